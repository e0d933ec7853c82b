"""Pictures as files: panels in a grid under one legend; the only module that uses matplotlib.

Enters: a `Picture`, which decides colors, marks, dashes, axes and the legend. Leaves: a PNG or SVG file, with the same bytes for
the same input, that can be read without color and on any background. It needs no display, and neither uses nor changes the
process's matplotlib settings or those in the user's files.
"""

import bisect
import io
import math
import re
import unicodedata
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_cli.analysis.pictures.picture import (
    COLORS,
    DASHES,
    NO_LINE,
    Axis,
    Panel,
    Picture,
    Style,
    distinct,
    numbers,
    numbers_across,
)
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.storage.files import atomic_write, shown
from rlvr_cli.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PANEL_INCHES = {1: (6.4, 4.0), 2: (4.8, 3.4), 3: (4.2, 3.2)}  # by columns, without legend and notes
TEXT_POINTS = 10.0
LINE_POINTS = 15.0  # height of a line of the legend or the notes
KEY_POINTS = 46.0  # the sample of a line in the legend, and the space around it
MAX_IN_LEGEND = 24
MARK_EVERY_POINT = 30  # a line of up to this many points has a mark at each of them
MAX_MARKS = 12  # on a longer line; an isolated point always has one
MAX_ASIDE = 24.0  # points over which the whiskers of several lines at one x are spread
MAX_LABEL_CHARACTERS = 300  # longer labels are shortened before they are measured

_MARKERS = {
    **{"circle": "o", "square": "s", "triangle": "^", "diamond": "D", "down": "v"},
    **{"plus": "P", "cross": "X", "star": "*", "dot": ".", "": ""},
}
_GRAY = "#555555"
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo", "|||")  # as with the marks, 56 series differ

_STYLE = {
    "text.parse_math": False,  # draw $ as it is
    "svg.fonttype": "none",  # keep text as text, for search and screen readers
    "svg.hashsalt": "rlvr",  # ids are otherwise random
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "font.size": TEXT_POINTS,
    "axes.titlesize": TEXT_POINTS + 1,
    "xtick.labelsize": TEXT_POINTS - 1,
    "ytick.labelsize": TEXT_POINTS - 1,
    "legend.fontsize": TEXT_POINTS - 1,
}


def save_plot(picture: Picture, path: Path) -> None:
    """Draw a picture: one panel in one column, two to four in two columns, more in three.

    Args:
        path: ends in .png or .svg, which decides the format. An existing file is replaced.

    Raises:
        RlvrError: the path has another ending, or the file cannot be written.
    """
    check_ending(path)

    import matplotlib

    settings: dict[Any, Any] = {**matplotlib.rcParamsDefault, **_STYLE}
    del settings["backend"]  # savefig chooses it by the format
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # missing in the font: drawn as a box; in an SVG it is text
        data = _rendered(picture, path.suffix.lower())
    atomic_write(path, data)


def check_ending(path: Path) -> None:
    """Raise RlvrError unless the path ends in .png or .svg."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise RlvrError(f"{shown(path)} does not end in .png or .svg.", "Choose a name with one of these endings.")


def _rendered(picture: Picture, suffix: str) -> bytes:
    from matplotlib.figure import Figure

    count = len(picture.panels)
    columns = 1 if count <= 1 else 2 if count <= 4 else 3
    rows = max(1, math.ceil(count / columns))
    width, height = PANEL_INCHES[columns]
    figure = Figure(layout="constrained", facecolor="white", dpi=150)
    grid = figure.add_gridspec(rows, columns)
    for place, panel in enumerate(picture.panels):
        axes = figure.add_subplot(grid[divmod(place, columns)])
        inside = (width - 0.9) * 72  # width of the axes in points, without the labels of the y axis
        _draw_panel(axes, panel, picture, inside)
        axes.set_title(_fitted(panel.title, inside, size=TEXT_POINTS + 1), loc="left")
        axes.set_xlabel(_fitted(panel.x_label, inside))
        axes.set_ylabel(_fitted(panel.y_label, (height - 0.9) * 72))
    if not picture.panels:
        _no_data(figure.add_subplot(grid[0, 0]))

    wide = width * columns * 72
    strip = _Strip(figure, picture, wide)
    tall = height * rows * 72 + strip.above + strip.below
    figure.set_size_inches(wide / 72, tall / 72)
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, strip.below / tall, 1, 1 - (strip.above + strip.below) / tall))
    strip.draw(tall)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix[1:], metadata={"Date": None} if suffix == ".svg" else None)
    return buffer.getvalue()


class _Strip:
    """Title and legend above the panels, notes below. `above` and `below` are their heights in points."""

    def __init__(self, figure: "Figure", picture: Picture, wide: float) -> None:
        self.figure, self.wide = figure, wide
        self.title = _fitted(picture.title, wide - 20, size=TEXT_POINTS + 2) if picture.title else ""
        self.notes = [line for note in picture.notes for line in _wrapped(note, wide - 20, size=TEXT_POINTS - 1)]
        bars = bool(picture.panels) and all(panel.bars for panel in picture.panels)
        self.blocks = [_Block(entries, wide, bars=bars) for entries in picture.legend if entries]
        self.title_height = 22.0 if self.title else 0.0
        self.above = self.title_height + sum(block.height for block in self.blocks) + 4 * bool(self.blocks)
        self.below = LINE_POINTS * len(self.notes)

    def draw(self, tall: float) -> None:
        left = 10 / self.wide
        if self.title:
            self.figure.text(left, 1 - 5 / tall, self.title, ha="left", va="top", fontsize=TEXT_POINTS + 2)
        top = self.title_height + 4
        for block in self.blocks:
            self.figure.add_artist(block.legend(self.figure, (left, 1 - top / tall)))
            top += block.height
        for number, note in enumerate(reversed(self.notes)):
            at = (4 + number * LINE_POINTS) / tall
            self.figure.text(left, at, note, ha="left", va="bottom", fontsize=TEXT_POINTS - 1, color=_GRAY)


class _Block:
    """A part of the legend in columns: its series, or its variants. `height` is in points."""

    def __init__(self, entries: Sequence[tuple[str, Style]], wide: float, *, bars: bool) -> None:
        shown, more = entries[:MAX_IN_LEGEND], entries[MAX_IN_LEGEND:]
        size = TEXT_POINTS - 1
        self.labels = distinct(
            [text for text, _ in shown], lambda text: _fitted(text, wide - KEY_POINTS - 20, size=size)
        )
        self.keys = [_key(style, number, bars=bars) for number, (_, style) in enumerate(shown)]
        if more:
            self.labels[-1], self.keys[-1] = f"… and {len(more) + 1} more", _key(Style(None, "", NO_LINE), 0, bars=bars)
        widest = max(_width(label, size=size) for label in self.labels) + KEY_POINTS
        self.columns = max(1, min(len(self.labels), int((wide - 20) / widest)))
        self.height = LINE_POINTS * math.ceil(len(self.labels) / self.columns)

    def legend(self, figure: "Figure", at: tuple[float, float]) -> Any:
        from matplotlib.legend import Legend

        return Legend(
            figure,
            self.keys,
            self.labels,
            loc="upper left",
            bbox_to_anchor=at,
            bbox_transform=figure.transFigure,
            ncols=self.columns,
            frameon=False,
            handlelength=3,
            handletextpad=0.6,
            columnspacing=1.2,
            labelspacing=0.35,
            borderpad=0,
            borderaxespad=0,
        )


def _key(style: Style, number: int, *, bars: bool) -> Any:
    """What shows a style in the legend; nothing for a style with neither line nor mark."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if style.dash == NO_LINE and not style.mark:
        return Patch(alpha=0)
    if bars:
        return Patch(facecolor=_color(style), hatch=_HATCHES[number % len(_HATCHES)], edgecolor="white")
    return Line2D([], [], **_drawn(style))


def _color(style: Style) -> str:
    return _GRAY if style.color is None else COLORS[style.color]


def _drawn(style: Style) -> dict[str, Any]:
    """The style of a line as matplotlib names it."""
    if style.dash == NO_LINE:
        shown = {"marker": _MARKERS[style.mark], "markersize": 8.0, "markeredgewidth": 0.0, "alpha": 0.6}
        return {"color": _color(style), "linestyle": "none", **shown}
    dash = DASHES[style.dash]
    return {
        "color": _color(style),
        "linestyle": (0, dash) if dash else "-",
        "linewidth": 1.6,
        "marker": _MARKERS[style.mark],
        "markersize": 5.5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
    }


# Panels


def _draw_panel(axes: "Axes", panel: Panel, picture: Picture, inside: float) -> None:
    """Draw a panel's lines or bars; `inside` is the width of its axes in points."""
    found = picture.axes(panel)
    if found is None:
        return _no_data(axes)
    across, up = found
    if panel.bars:
        _draw_bars(axes, panel, picture)
    else:
        _draw_lines(axes, panel, picture, up)
    axes.set_yscale("log" if up.log else "linear")
    if unit := across.unit:
        axes.set_xscale("function", functions=(lambda x: _log_of_1_plus(x / unit), lambda s: _inverse(s) * unit))
    else:
        axes.set_xscale("log" if across.log else "linear")
    for axis, name in ((across, "x"), (up, "y")):
        axes.set(**{f"{name}lim": (axis.low, axis.high)})
    axes.minorticks_off()
    axes.set_yticks(*zip(*up.ticks, strict=True))
    _ticks_across(axes, across, places=bool(panel.places), inside=inside)


def _log_of_1_plus(values: Any) -> Any:
    import numpy as np

    return np.log1p(np.maximum(values, -0.99))  # matplotlib also asks for what is far outside


def _inverse(values: Any) -> Any:
    import numpy as np

    return np.expm1(np.minimum(values, 300))


def _ticks_across(axes: "Axes", across: Axis, *, places: bool, inside: float) -> None:
    """Ticks of the x axis: only as many texts as fit, and slanting ones if they are long."""
    size = TEXT_POINTS - 1
    if not places:
        axes.set_xticks(*zip(*across.ticks, strict=True))
        return
    every = math.ceil(len(across.ticks) * 2 * size / inside)
    kept = across.ticks[::every]
    labels = distinct([text for _, text in kept], lambda text: _fitted(text, 130, size=size))
    axes.set_xticks([at for at, _ in kept], labels)
    if max(_width(label, size=size) for label in labels) > 0.95 * inside / len(labels):
        axes.tick_params(axis="x", labelrotation=30)
        for text in axes.get_xticklabels():
            text.set(ha="right", rotation_mode="anchor")


def _draw_lines(axes: "Axes", panel: Panel, picture: Picture, up: Axis) -> None:
    from matplotlib.transforms import ScaledTranslation

    for order, line in enumerate(panel.lines):
        x, y = numbers_across(line, panel), numbers(line.y, log="y" in panel.log)
        drawn = [math.isfinite(a) and math.isfinite(b) for a, b in zip(x, y, strict=True)]
        around = [False, *drawn, False]
        alone = [i for i, d in enumerate(drawn) if d and not around[i] and not around[i + 2]]
        stride = 1 if len(x) <= MARK_EVERY_POINT else math.ceil(len(x) / MAX_MARKS)
        marked = range(order * stride // max(1, len(panel.lines)), len(x), stride)  # stagger them: lines may overlap
        style = _drawn(picture.style(line))
        color = style["color"]
        if line.low is not None and line.high is not None:
            low, high = (numbers(bounds, log="y" in panel.log) for bounds in (line.low, line.high))
            if panel.has_whiskers:
                apart = min(3.0, MAX_ASIDE / len(panel.lines))
                low, high = ([min(max(v, up.low), up.high) for v in bounds] for bounds in (low, high))
                for place, aside in enumerate(panel.aside(order)):
                    moved = axes.transData + ScaledTranslation(
                        apart * aside / 72, 0, axes.figure.dpi_scale_trans
                    )  # inches
                    axes.vlines(
                        x[place],
                        low[place],
                        high[place],
                        color=color,
                        alpha=0.7,
                        linewidth=1.0,
                        transform=moved,
                        clip_on=False,
                    )
            else:
                axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
                for i in alone:  # fill_between draws nothing at an isolated point
                    axes.plot([x[i], x[i]], [low[i], high[i]], color=color, alpha=0.6)
        for values in line.faint:
            faint = {"color": color, "linewidth": 0.8, "alpha": 0.4, "marker": ".", "markevery": alone}
            axes.plot(x, numbers(values, log="y" in panel.log), **faint)
        axes.plot(x, y, **style, markevery=sorted({*marked, *alone}) if line.joined else None)


def _draw_bars(axes: "Axes", panel: Panel, picture: Picture) -> None:
    each = 0.8 / max(1, len(panel.lines))
    for order, line in enumerate(panel.lines):
        x = [place - 0.4 + each * (order + 0.5) for place in line.x]
        y = numbers(line.y)
        axes.bar(
            x,
            y,
            width=each * 0.94,
            color=_color(picture.style(line)),
            hatch=_HATCHES[(line.series or line.variant) % len(_HATCHES)],
            edgecolor="white",
        )
        top = y
        if line.low is not None and line.high is not None:
            low, high = numbers(line.low), numbers(line.high)
            top = [b if math.isfinite(b) else v for v, b in zip(y, high, strict=True)]
            axes.vlines(x, low, high, color="#333333", linewidth=1.0)
        for place, height, note in zip(x, top, line.notes, strict=False):
            if math.isfinite(height):
                axes.annotate(
                    _fitted(note, 60, size=7),
                    (place, height),
                    (0, 1),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=7,
                )
    axes.grid(visible=False, axis="x")
    axes.axhline(0, color="black", linewidth=0.8)


def _no_data(axes: "Axes") -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color="#555555")


def _plain(text: str) -> str:
    """Make a text one line, without control characters and characters that XML forbids; shorten a long one in the middle."""
    if len(text) > MAX_LABEL_CHARACTERS:
        half = MAX_LABEL_CHARACTERS // 2
        text = f"{text[:half]}…{text[-half:]}"
    marks = [unicodedata.category(c) in ("Mn", "Me") for c in text]
    text = "".join(c for i, c in enumerate(text) if i < 3 or not all(marks[i - 3 : i + 1]))  # at most 3 combining marks
    return re.sub("[\ufffe\uffff]", "\ufffd", printable(text, keep=""))


def _fitted(text: str, points: float, *, size: float = TEXT_POINTS) -> str:
    """Make the text plain, and cut out its middle until it is no wider than `points`."""
    text = _plain(text)
    if _width(text, size=size) <= points:
        return text

    def without_middle(kept: int) -> str:
        return f"{text[:kept]}…{text[len(text) - kept :]}"

    kept = bisect.bisect_right(range(len(text) // 2), points, key=lambda kept: _width(without_middle(kept), size=size))
    return without_middle(max(0, kept - 1))


def _wrapped(text: str, points: float, *, size: float) -> list[str]:
    """Break a sentence into lines no wider than `points`; a word that is wider is cut."""
    lines: list[str] = []
    for word in _plain(text).split():
        if lines and _width(f"{lines[-1]} {word}", size=size) <= points:
            lines[-1] += f" {word}"
        else:
            lines.append(_fitted(word, points, size=size))
    return lines


def _width(text: str, *, size: float = TEXT_POINTS) -> float:
    """Width of the drawn text in points, 4 % more than computed because hinting widens some letters."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    return text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)[0] * 1.04
