"""Plots as files: lines with intervals, and bars, in a grid; the only module that uses matplotlib.

Enters: labeled numbers; NaN and infinity are gaps; labels may be any text, however hostile or long. Leaves: a PNG or SVG
file, with the same bytes for the same input, that can be read without color and on any background. It needs no display, and
neither uses nor changes the process's matplotlib settings or those in the user's files.
"""

import bisect
import io
import math
import re
import unicodedata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.files import atomic_write, shown
from rlvr_cli.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes


PANEL_INCHES = {1: (6.4, 4.0), 2: (4.8, 3.4), 3: (4.2, 3.2)}  # by columns, legends not counted
TEXT_POINTS = 10.0
MAX_IN_LEGEND = 24
MARK_EVERY_POINT = 30  # a line of up to this many points has a marker at each of them
MAX_MARKERS = 12  # on a longer line; an isolated point always has one
MAX_DASHED_POINTS = 60  # with more points, dashes look like gaps: the lines are solid
MAX_LABEL_CHARACTERS = 300  # longer labels are shortened before they are measured

# Series are distinguished by color (Okabe and Ito's, which color-blind readers can distinguish, without their yellow, which is
# too faint on white), and without color by dashes, markers and hatches. The cycles have coprime lengths, so 35 pairs differ.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1.2, 1, 1.2, 1, 1.2)))
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo")

_STYLE = {
    "text.parse_math": False,  # draw $ as it is
    "svg.fonttype": "none",  # keep text as text, for search and screen readers
    "svg.hashsalt": "rlvr",  # ids are otherwise random
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-4, 6),
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


@dataclass(frozen=True)
class Line:
    """Points (x, y) in order; `low` and `high`, if both are given, are intervals. All sequences have the same length."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Panel:
    """Lines over common axes; with `share`, y is a share and its axis shows 0 to 1."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    share: bool = False


@dataclass(frozen=True)
class Bars:
    """Grouped bars: each of `groups` is the name of a series and its values, one per label."""

    title: str
    x_label: str
    y_label: str
    labels: tuple[str, ...]
    groups: tuple[tuple[str, tuple[float, ...]], ...]


class _Key(NamedTuple):
    """An entry of a legend: the artist that shows how its series is drawn, and the series' name."""

    artist: Any
    label: str


def save_plot(panels: Sequence[Panel | Bars], path: Path, *, title: str = "") -> None:
    """Draw the panels into a picture: one panel in one column, two to four in two columns, more in three.

    Args:
        path: ends in .png or .svg, which decides the format. An existing file is replaced.
        title: one line above the panels.

    Raises:
        RlvrError: the path has another ending, or the file cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in (".png", ".svg"):
        raise RlvrError(f"{shown(path)} does not end in .png or .svg.", "Choose a name with one of these endings.")

    import matplotlib

    settings: dict[Any, Any] = {**matplotlib.rcParamsDefault, **_STYLE}
    del settings["backend"]  # savefig chooses it by the format
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # missing in the font: drawn as a box; in an SVG it is text
        data = _rendered(panels, suffix, title=title)
    atomic_write(path, data)


def _rendered(panels: Sequence[Panel | Bars], suffix: str, *, title: str) -> bytes:
    from matplotlib.figure import Figure

    count = len(panels)
    columns = 1 if count <= 1 else 2 if count <= 4 else 3
    rows = max(1, math.ceil(count / columns))
    width, height = PANEL_INCHES[columns]
    figure = Figure(layout="constrained", facecolor="white", dpi=150)
    grid = figure.add_gridspec(rows, columns)
    legends = [0.0] * rows  # points
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(place, columns)])
        inside = (width - 0.9) * 72  # width of the axes in points, without the labels of the y axis
        keys = _draw_bars(axes, panel, inside) if isinstance(panel, Bars) else _draw_lines(axes, panel)
        taken = _legend(axes, keys, inside)
        legends[place // columns] = max(legends[place // columns], taken)
        axes.set_title(_fitted(panel.title, inside, size=TEXT_POINTS + 1), loc="left", pad=6 + taken)
        axes.set_xlabel(_fitted(panel.x_label, inside))
        axes.set_ylabel(_fitted(panel.y_label, (height - 0.9) * 72))
    if not panels:
        _no_data(figure.add_subplot(grid[0, 0]))

    points = width * columns * 72
    if title:
        large = TEXT_POINTS + 2
        figure.suptitle(_fitted(title, points - 20, size=large), fontsize=large)
    figure.set_size_inches(width * columns, height * rows + sum(legends) / 72 + (0.3 if title else 0))
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix[1:], metadata={"Date": None} if suffix == ".svg" else None)
    return buffer.getvalue()


# One function per kind of panel: (axes, panel, width of the axes in points) -> entries of the legend


def _draw_lines(axes: "Axes", panel: Panel) -> list[_Key]:
    keys, xs = [], []
    for number, line in enumerate(panel.lines):
        x, y = _numbers(line.x), _numbers(line.y)
        drawn = [math.isfinite(a) and math.isfinite(b) for a, b in zip(x, y, strict=True)]
        around = [False, *drawn, False]
        alone = [i for i, d in enumerate(drawn) if d and not around[i] and not around[i + 2]]
        stride = 1 if len(x) <= MARK_EVERY_POINT else math.ceil(len(x) / MAX_MARKERS)
        marked = range(number * stride // max(1, len(panel.lines)), len(x), stride)  # stagger them: lines may overlap
        dashes = _cycled(_DASHES, number) if len(x) <= MAX_DASHED_POINTS else "-"
        style = {"color": _cycled(_COLORS, number), "linestyle": dashes}
        if line.low is not None and line.high is not None:
            low, high = _numbers(line.low), _numbers(line.high)
            axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
            for bound in (low, high):
                axes.plot(x, bound, **style, linewidth=0.5, alpha=0.6)
            for i in alone:  # fill_between draws nothing at an isolated point
                axes.plot([x[i], x[i]], [low[i], high[i]], color=style["color"], alpha=0.6)
        (artist,) = axes.plot(
            x,
            y,
            **style,
            linewidth=1.6 if len(x) <= MAX_DASHED_POINTS else 1.2,
            marker=_cycled(_MARKERS, number),
            markersize=5.5,
            markeredgecolor="white",
            markeredgewidth=0.6,
            markevery=sorted({*marked, *alone}),
        )
        keys.append(_Key(artist, line.label if any(drawn) else f"{line.label} (no data)"))
        xs += [a for a, d in zip(x, drawn, strict=True) if d]
    if not xs:
        _no_data(axes)
        return keys if len(keys) > 1 else []
    if all(a.is_integer() for a in xs):
        axes.xaxis.set_major_locator(_whole_numbers())
        if min(xs) == max(xs):
            axes.set_xlim(xs[0] - 1, xs[0] + 1)
    if panel.share:
        axes.set_ylim(-0.03, 1.03)  # so that lines at 0 and 1 are fully visible
        axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    return keys


def _draw_bars(axes: "Axes", panel: Bars, inside: float) -> list[_Key]:
    count = len(panel.labels)
    keys, any_drawn = [], False
    each = 0.8 / max(1, len(panel.groups))
    for number, (name, values) in enumerate(panel.groups):
        heights = _numbers(values)
        assert len(heights) == count, f"{len(heights)} values for {count} labels"
        any_drawn |= any(map(math.isfinite, heights))
        artist = axes.bar(
            [i - 0.4 + each * (number + 0.5) for i in range(count)],
            heights,
            width=each * 0.94,
            color=_cycled(_COLORS, number),
            hatch=_cycled(_HATCHES, number),
            edgecolor="white",
        )
        keys.append(_Key(artist, name))
    if not any_drawn:
        _no_data(axes)
        return []
    axes.grid(visible=False, axis="x")
    axes.axhline(0, color="black", linewidth=0.8)
    size = TEXT_POINTS - 1
    every = math.ceil(count * 2 * size / inside)  # show only some labels if they would overlap at 30 degrees
    labels = [_fitted(label, 100, size=size) for label in panel.labels[::every]]
    axes.set_xticks(range(0, count, every), labels)
    axes.set_xlim(-0.6, count - 0.4)
    if max(_width(label, size=size) for label in labels) > 0.95 * inside / len(labels):
        axes.tick_params(axis="x", labelrotation=30)
        for text in axes.get_xticklabels():
            text.set(ha="right", rotation_mode="anchor")
    return keys


def _legend(axes: "Axes", keys: list[_Key], inside: float) -> float:
    """Put a legend between axes and title if there are two keys or more. Returns its height in points."""
    if len(keys) < 2:
        return 0.0

    from matplotlib.patches import Patch

    size = TEXT_POINTS - 1
    handle = 5 * size  # the sample of the line, and the space around it
    labels = [_fitted(key.label, inside - handle, size=size) for key in keys[:MAX_IN_LEGEND]]
    artists = [key.artist for key in keys[:MAX_IN_LEGEND]]
    if len(keys) > MAX_IN_LEGEND:
        labels[-1], artists[-1] = f"… and {len(keys) - MAX_IN_LEGEND + 1} more", Patch(alpha=0)
    columns = max(1, min(len(labels), int(inside / (max(_width(label, size=size) for label in labels) + handle))))
    axes.legend(
        artists,
        labels,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        frameon=False,
        handlelength=3,
        handletextpad=0.6,
        columnspacing=1.2,
        labelspacing=0.3,
        borderpad=0,
        borderaxespad=0.4,
    )
    return math.ceil(len(labels) / columns) * size * 1.32 + 5


def _whole_numbers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10])


def _no_data(axes: "Axes") -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color="#555555")


def _cycled(values: Sequence[Any], number: int) -> Any:
    return values[number % len(values)]


def _numbers(values: Sequence[float]) -> list[float]:
    """Convert to floats, with NaN for values that cannot be drawn: None, infinity, and those that overflow in matplotlib."""
    numbers = [math.nan if v is None else float(v) for v in values]
    return [v if abs(v) < 1e100 else math.nan for v in numbers]


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


def _width(text: str, *, size: float = TEXT_POINTS) -> float:
    """Width of the drawn text in points, 4 % more than computed because hinting widens some letters."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    return text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)[0] * 1.04
