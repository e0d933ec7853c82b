"""The coordinates of a picture for `chart.svg.j2`; the page's style sheet sets the colors.

Enters: a `Picture`, which decides styles, axes and the legend. Leaves: the coordinates and texts of drawings that can be read
without color, and show a point's value under the mouse without a script.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from rlvr_cli.analysis.pictures.picture import NO_LINE, Line, Panel, Picture, Style, numbers, numbers_across, value_text

WIDTH, HEIGHT = 460, 250  # of a chart, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 40  # margins around the axes
MARKS = {
    "circle": "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0",
    "square": "M-3-3h6v6h-6z",
    "triangle": "M0-4L4 3H-4z",
    "diamond": "M0-4.5L4.5 0L0 4.5L-4.5 0z",
    "down": "M0 4L4-3H-4z",
    "plus": "M-1.3-4h2.6v2.7H4v2.6H1.3V4h-2.6V1.3H-4v-2.6h2.7z",
    "cross": "M-4-2.4L-2.4-4L0-1.6L2.4-4L4-2.4L1.6 0L4 2.4L2.4 4L0 1.6L-2.4 4L-4 2.4L-1.6 0z",
    "star": "M0-4.6L1.2-1.4L4.4-1.4L1.8 .6L2.8 3.8L0 1.9L-2.8 3.8L-1.8 .6L-4.4-1.4L-1.2-1.4z",
    "dot": "M-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0",
    "": "",
}
MAX_ASIDE = 20.0  # SVG units over which the whiskers of several lines at one x are spread
MAX_MARKS, MAX_POINTS = 12, 300  # per line: visible marks, and points that show their value


@dataclass(frozen=True, slots=True)
class Label:
    """A text of the axes; `kind` is its class in page.css."""

    text: str
    kind: str
    x: float | str
    y: float | str
    is_upright: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """A mark and its tooltip; a mark with `is_seen` False appears only under the mouse."""

    x: str
    y: str
    text: str
    is_seen: bool


@dataclass(frozen=True, slots=True)
class Key:
    """How a line looks: its classes in page.css, and the SVG path of its mark."""

    style: str
    mark: str


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the legend."""

    label: str
    key: Key


@dataclass(frozen=True, slots=True)
class Series:
    """A line with its intervals and marks; `line`, `faint`, `whiskers` and each of `bands` are SVG paths."""

    key: Key
    line: str
    bands: tuple[str, ...]
    whiskers: str
    points: tuple[Point, ...]
    faint: str = ""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart in SVG units; `series` is empty when there is nothing to draw."""

    title: str
    description: str = ""
    grid: str = ""
    labels: tuple[Label, ...] = ()
    series: tuple[Series, ...] = ()
    width: int = WIDTH
    height: int = HEIGHT


def layout_legend(picture: Picture) -> list[list[Entry]]:
    """The legend of all panels: the series, and apart from them the variants."""
    return [[Entry(text, _key(style)) for text, style in entries] for entries in picture.legend if entries]


def layout_chart(panel: Panel, picture: Picture) -> Drawing:
    """Compute the coordinates of a panel's lines, axes and texts."""
    assert not panel.bars, "the page has no bars"
    axes = picture.axes(panel)
    if axes is None:
        return Drawing(panel.title)
    x_axis, y_axis = axes

    def across(x: float) -> str:
        return f"{LEFT + x_axis.share(x) * (WIDTH - LEFT - RIGHT):.1f}"

    def up(y: float) -> str:
        return f"{HEIGHT - BOTTOM - y_axis.share(y) * (HEIGHT - TOP - BOTTOM):.1f}"

    series = []
    for number, line in enumerate(panel.lines):
        points = _finite(line, panel)
        at = [(across(x), *(None if v is None else up(v) for v in ys)) for x, *ys in points]
        name = " ".join(filter(None, (picture.label(line), "at")))
        texts = [_tooltip(name, panel, *point) for point in points]
        made = _series(at, texts, number=number, key=_key(picture.style(line)))
        for values in line.faint:
            thin = [(across(x), None if y is None else up(y)) for x, y, *_ in _finite(replace(line, y=values), panel)]
            made = replace(made, faint=made.faint + "".join(f"{path}h0" for path in _paths(thin)))
        if not line.joined:
            dots = "".join(f"M{x} {y}h0" for x, y, *_ in at if y is not None)
            made = replace(made, line=dots, points=tuple(replace(point, is_seen=False) for point in made.points))
        if panel.has_whiskers:
            apart = min(2.5, MAX_ASIDE / len(panel.lines))
            aside = [
                apart * steps
                for steps, x in zip(panel.aside(number), numbers_across(line, panel), strict=True)
                if not math.isnan(x)
            ]
            made = replace(made, bands=(), whiskers=_whiskers(at, aside=aside))
        series.append(made)
    labels = [Label(text, "tick y", LEFT - 6, up(t)) for t, text in y_axis.ticks]
    labels += [Label(text, "tick x", across(t), HEIGHT - BOTTOM + 16) for t, text in x_axis.ticks]
    labels += [
        Label(panel.x_label, "axis", LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 6),
        Label(panel.y_label, "axis", 13, TOP + (HEIGHT - TOP - BOTTOM) / 2, is_upright=True),
    ]
    names = ", ".join(dict.fromkeys(filter(None, map(picture.label, panel.lines))))
    return Drawing(
        panel.title,
        f"{panel.title}: {panel.y_label} against {panel.x_label}" + (f"; {names}" if names else ""),
        "".join(f"M{LEFT} {up(t)}H{WIDTH - RIGHT}" for t, _ in y_axis.ticks),
        tuple(labels),
        tuple(series),
    )


def _key(style: Style) -> Key:
    color = "gray" if style.color is None else f"c{style.color}"
    return Key(f"{color} points" if style.dash == NO_LINE else f"{color} d{style.dash}", MARKS[style.mark])


def _finite(line: Line, panel: Panel) -> list[tuple[Any, ...]]:
    """The points (x, y, low, high) of a line; None for y, low or high that cannot be drawn."""
    log = "y" in panel.log
    nothing = [math.nan] * len(line.x)
    bounds = (
        nothing if line.low is None or line.high is None else numbers(b, log=log)
        for b in (line.low or (), line.high or ())
    )
    columns = (numbers_across(line, panel), numbers(line.y, log=log), *bounds)
    points = [tuple(None if math.isnan(v) else v for v in point) for point in zip(*columns, strict=True)]
    return [point for point in points if point[0] is not None]


def _tooltip(name: str, panel: Panel, x: float, y: float | None, low: float | None, high: float | None) -> str:
    at = panel.places[round(x)] if panel.places else value_text(x)
    between = f" [{value_text(low)}, {value_text(high)}]" if low is not None and high is not None else ""
    return "" if y is None else f"{name} {at}: {value_text(y)}{between}"


def _series(at: Sequence[tuple[Any, ...]], texts: Sequence[str], *, number: int, key: Key) -> Series:
    """A line, its intervals, and its marks with tooltips. `at` has the drawn coordinates."""
    bands = []
    for run in _unbroken(at, lambda p: p[2] is not None and p[3] is not None):
        upper, lower = [f"{x} {high}" for x, _, _, high in run], [f"{x} {low}" for x, _, low, _ in reversed(run)]
        bands.append(f"M{'L'.join(upper + lower)}Z")
    drawn = [i for i, p in enumerate(at) if p[1] is not None]
    marked = drawn[:: math.ceil(len(drawn) / MAX_POINTS)] if drawn else []
    stride = 1 if len(marked) <= 2 * MAX_MARKS else math.ceil(len(marked) / MAX_MARKS)
    marks = []
    for place, i in enumerate(marked):
        is_seen = (place + 2 * number) % stride == 0  # stagger them: lines may overlap
        marks.append(Point(at[i][0], at[i][1], texts[i], is_seen))
    return Series(key, "".join(_paths(at)), tuple(bands), "", tuple(marks))


def _paths(at: Sequence[tuple[Any, ...]]) -> list[str]:
    """The parts of a line between its gaps."""
    return ["M" + "L".join(f"{x} {y}" for x, y, *_ in run) for run in _unbroken(at, lambda p: p[1] is not None)]


def _whiskers(at: Sequence[tuple[Any, ...]], *, aside: Sequence[float]) -> str:
    """The intervals of points as upright lines, each moved aside by so many units."""
    return "".join(
        f"M{float(x) + moved:.1f} {low}V{high}"
        for (x, _, low, high), moved in zip(at, aside, strict=True)
        if low is not None and high is not None
    )


def _unbroken(points: Sequence[tuple[Any, ...]], whole: Any) -> Iterator[list[tuple[Any, ...]]]:
    return (list(run) for there, run in groupby(points, whole) if there)
