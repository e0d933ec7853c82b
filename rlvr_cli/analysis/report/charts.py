"""Lines over common axes as SVG elements of a page, whose style sheet decides their colors.

Enters: panels as `plots` has them, in which NaN and infinity are gaps. Leaves: a figure that reads without color, in which
every point can tell its value; nothing of it needs a script.
"""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol

from rlvr_cli.analysis.report.html import Html, tag

WIDTH, HEIGHT = 460, 250  # of a chart, in its own units
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 40  # the room around its axes
MARKERS = ("M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0", "M-3-3h6v6h-6z", "M0-4L4 3H-4z", "M0-4.5L4.5 0L0 4.5L-4.5 0z")
MAX_MARKERS, MAX_POINTS = 12, 300  # that are seen on a line, and that tell their value
STYLES = 7  # of lines in page.css


class Line(Protocol):
    """As in `plots`."""

    @property
    def label(self) -> str: ...
    @property
    def x(self) -> Sequence[float]: ...
    @property
    def y(self) -> Sequence[float]: ...
    @property
    def low(self) -> Sequence[float] | None: ...
    @property
    def high(self) -> Sequence[float] | None: ...


class Chart(Protocol):
    """As `plots.Panel`."""

    @property
    def title(self) -> str: ...
    @property
    def x_label(self) -> str: ...
    @property
    def y_label(self) -> str: ...
    @property
    def lines(self) -> Sequence[Line]: ...
    @property
    def share(self) -> bool: ...


def draw(chart: Chart) -> Html:
    """A chart with its title and legend, as wide as the page allows."""
    lines = [_finite(line) for line in chart.lines]
    values = [v for line in lines for point in line for v in point[1:] if v is not None]
    xs = [x for line in lines for x, *_ in line]
    if not values:
        return tag("figure", tag("figcaption", chart.title), tag("p", "No data."))
    low_y, high_y, ticks_y = (
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]) if chart.share else _axis(min(values), max(values))
    )
    low_x, high_x = min(xs), max(xs)
    if low_x == high_x:
        low_x, high_x = low_x - 1, high_x + 1
    ticks_x = [t for t in _axis(low_x, high_x)[2] if low_x <= t <= high_x]
    if all(float(x).is_integer() for x in xs):
        ticks_x = [t for t in ticks_x if t.is_integer()]

    def across(x: float) -> str:
        return f"{LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT):.1f}"

    def up(y: float) -> str:
        return f"{HEIGHT - BOTTOM - (y - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM):.1f}"

    shapes = [tag("path", class_="grid", d="".join(f"M{LEFT} {up(t)}H{WIDTH - RIGHT}" for t in ticks_y))]
    shapes += [tag("text", _tick(t), x=LEFT - 6, y=up(t), class_="tick y") for t in ticks_y]
    shapes += [tag("text", _tick(t), x=across(t), y=HEIGHT - BOTTOM + 16, class_="tick x") for t in ticks_x]
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    shapes += [
        tag("text", chart.x_label, x=LEFT + (WIDTH - LEFT - RIGHT) / 2, y=HEIGHT - 6, class_="axis"),
        tag("text", chart.y_label, transform=f"translate(13 {middle}) rotate(-90)", class_="axis"),
    ]
    for number, (line, points) in enumerate(zip(chart.lines, lines, strict=True)):
        at = [(across(x), *(None if v is None else up(v) for v in ys)) for x, *ys in points]
        shapes.append(_line(at, points, number=number, label=line.label))
    keys = [_key(line.label, number) for number, line in enumerate(chart.lines)]
    legend = [tag("ul", keys, class_="legend")] if len(keys) > 1 else []
    named = f"{chart.title}: {chart.y_label} against {chart.x_label}; {', '.join(line.label for line in chart.lines)}"
    drawing = tag("svg", shapes, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=named)
    return tag("figure", tag("figcaption", chart.title), *legend, drawing)


def _finite(line: Line) -> list[tuple[Any, ...]]:
    """The points (x, y, low, high) of a line, None for what cannot be drawn."""

    def number(value: float | None) -> float | None:
        return float(value) if value is not None and math.isfinite(value) and abs(value) < 1e100 else None

    nothing: Sequence[Any] = [None] * len(line.x)
    columns = (line.x, line.y, line.low or nothing, line.high or nothing)
    points = [tuple(map(number, point)) for point in zip(*columns, strict=True)]
    return [point for point in points if point[0] is not None]


def _line(at: Sequence[tuple[Any, ...]], points: Sequence[tuple[Any, ...]], *, number: int, label: str) -> Html:
    """The line, its interval, and its markers; every marker says its value. `at` is where the points are drawn."""
    shapes = []
    for run in _unbroken(at, lambda p: p[2] is not None and p[3] is not None):
        upper, lower = [f"{x} {high}" for x, _, _, high in run], [f"{x} {low}" for x, _, low, _ in reversed(run)]
        shapes.append(tag("path", class_="band", d=f"M{'L'.join(upper + lower)}Z"))
    paths = ["M" + "L".join(f"{x} {y}" for x, y, *_ in run) for run in _unbroken(at, lambda p: p[1] is not None)]
    shapes.append(tag("path", class_="line", d="".join(paths)))
    drawn = [i for i, p in enumerate(at) if p[1] is not None]
    told = drawn[:: math.ceil(len(drawn) / MAX_POINTS)] if drawn else []
    stride = 1 if len(told) <= 2 * MAX_MARKERS else math.ceil(len(told) / MAX_MARKERS)
    for place, i in enumerate(told):
        seen = (place + number * stride // STYLES) % stride == 0  # lines that meet keep their markers apart
        x, y, low, high = points[i]
        between = f" [{_tick(low)}, {_tick(high)}]" if low is not None and high is not None else ""
        title = tag("title", f"{label} at {_tick(x)}: {_tick(y)}{between}")
        moved = f"translate({at[i][0]} {at[i][1]})"
        shapes.append(
            tag("path", title, d=_marker(number), transform=moved, class_="marker" if seen else "hidden marker")
        )
    return tag("g", shapes, class_=f"series s{number % STYLES}")


def _unbroken(points: Sequence[tuple[Any, ...]], whole: Any) -> Iterator[list[tuple[Any, ...]]]:
    return (list(run) for there, run in groupby(points, whole) if there)


def _key(label: str, number: int) -> Html:
    sample = [
        tag("path", class_="line", d="M1 6H31"),
        tag("path", class_="marker", d=_marker(number), transform="translate(16 6)"),
    ]
    group = tag("g", sample, class_=f"series s{number % STYLES}")
    return tag("li", tag("svg", group, viewBox="0 0 32 12", class_="key", aria_hidden="true"), label)


def _marker(number: int) -> str:
    return MARKERS[number % len(MARKERS)]


def _axis(low: float, high: float) -> tuple[float, float, list[float]]:
    """The ends of an axis that shows these values, and round numbers on it."""
    if 0 < low < high / 2:
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if high else (-1.0, 1.0)
    rough = (high - low) / 5
    size = 10 ** math.floor(math.log10(rough))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [float(f"{i * step:.12g}") for i in range(first, last + 1)]
    return ticks[0], ticks[-1], ticks


def _tick(value: float) -> str:
    return (
        re.sub(r"e([+-])0*", r"e\1", f"{value:.4g}")
        if abs(value) < 1e4
        else f"{value:,.0f}"
        if abs(value) < 1e7
        else f"{value:.3g}"
    )
