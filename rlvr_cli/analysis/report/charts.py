"""The layout of line charts for `chart.svg.j2`; the page's style sheet sets the colors.

Enters: panels, in which NaN and infinity are gaps. Leaves: the coordinates and texts of a drawing that can be read without
color, and shows a point's value under the mouse without a script.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rlvr_cli.analysis.plots import Line, Panel

WIDTH, HEIGHT = 460, 250  # of a chart, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 40  # margins around the axes
MARKERS = ("M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0", "M-3-3h6v6h-6z", "M0-4L4 3H-4z", "M0-4.5L4.5 0L0 4.5L-4.5 0z")
MAX_MARKERS, MAX_POINTS = 12, 300  # per line: visible markers, and points that show their value
STYLES = 7  # line styles in page.css


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
    """A marker and its tooltip; a marker with `is_seen` False appears only under the mouse."""

    x: str
    y: str
    text: str
    is_seen: bool


@dataclass(frozen=True, slots=True)
class Series:
    """A line with its intervals and markers; `line`, each of `bands` and `marker` are SVG paths."""

    label: str
    style: int
    marker: str
    line: str
    bands: tuple[str, ...]
    points: tuple[Point, ...]


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


def layout_chart(panel: Panel) -> Drawing:
    """Compute the coordinates of a panel's lines, axes and texts."""
    lines = [_finite(line) for line in panel.lines]
    values = [v for line in lines for point in line for v in point[1:] if v is not None]
    xs = [x for line in lines for x, *_ in line]
    if not values:
        return Drawing(panel.title)
    low_y, high_y, ticks_y = (
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]) if panel.share else _axis(min(values), max(values))
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

    series = []
    for number, (line, points) in enumerate(zip(panel.lines, lines, strict=True)):
        at = [(across(x), *(None if v is None else up(v) for v in ys)) for x, *ys in points]
        series.append(_series(at, points, number=number, label=line.label))
    labels = [Label(_tick(t), "tick y", LEFT - 6, up(t)) for t in ticks_y]
    labels += [Label(_tick(t), "tick x", across(t), HEIGHT - BOTTOM + 16) for t in ticks_x]
    labels += [
        Label(panel.x_label, "axis", LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 6),
        Label(panel.y_label, "axis", 13, TOP + (HEIGHT - TOP - BOTTOM) / 2, is_upright=True),
    ]
    return Drawing(
        panel.title,
        f"{panel.title}: {panel.y_label} against {panel.x_label}; {', '.join(line.label for line in panel.lines)}",
        "".join(f"M{LEFT} {up(t)}H{WIDTH - RIGHT}" for t in ticks_y),
        tuple(labels),
        tuple(series),
    )


def _finite(line: Line) -> list[tuple[Any, ...]]:
    """The points (x, y, low, high) of a line; None for y, low or high that cannot be drawn."""

    def number(value: float | None) -> float | None:
        return float(value) if value is not None and math.isfinite(value) and abs(value) < 1e100 else None

    nothing: Sequence[Any] = [None] * len(line.x)
    columns = (line.x, line.y, line.low or nothing, line.high or nothing)
    points = [tuple(map(number, point)) for point in zip(*columns, strict=True)]
    return [point for point in points if point[0] is not None]


def _series(at: Sequence[tuple[Any, ...]], points: Sequence[tuple[Any, ...]], *, number: int, label: str) -> Series:
    """A line, its intervals, and its markers with tooltips. `at` has the drawn coordinates, `points` the values."""
    bands = []
    for run in _unbroken(at, lambda p: p[2] is not None and p[3] is not None):
        upper, lower = [f"{x} {high}" for x, _, _, high in run], [f"{x} {low}" for x, _, low, _ in reversed(run)]
        bands.append(f"M{'L'.join(upper + lower)}Z")
    paths = ["M" + "L".join(f"{x} {y}" for x, y, *_ in run) for run in _unbroken(at, lambda p: p[1] is not None)]
    drawn = [i for i, p in enumerate(at) if p[1] is not None]
    marked = drawn[:: math.ceil(len(drawn) / MAX_POINTS)] if drawn else []
    stride = 1 if len(marked) <= 2 * MAX_MARKERS else math.ceil(len(marked) / MAX_MARKERS)
    markers = []
    for place, i in enumerate(marked):
        x, y, low, high = points[i]
        between = f" [{_tick(low)}, {_tick(high)}]" if low is not None and high is not None else ""
        is_seen = (place + number * stride // STYLES) % stride == 0  # stagger them: lines may overlap
        markers.append(Point(at[i][0], at[i][1], f"{label} at {_tick(x)}: {_tick(y)}{between}", is_seen))
    marker = MARKERS[number % len(MARKERS)]
    return Series(label, number % STYLES, marker, "".join(paths), tuple(bands), tuple(markers))


def _unbroken(points: Sequence[tuple[Any, ...]], whole: Any) -> Iterator[list[tuple[Any, ...]]]:
    return (list(run) for there, run in groupby(points, whole) if there)


def _axis(low: float, high: float) -> tuple[float, float, list[float]]:
    """The ends of an axis for these values, and its ticks, which are round numbers."""
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
