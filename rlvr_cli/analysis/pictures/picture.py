"""The description of a picture: what is drawn, in which colors, marks and dashes, over which axes, and what its legend says.

Enters: lines and bars of numbers, in which NaN, None and infinity are gaps; labels may be any text. Leaves: a `Picture`, in which
everything is decided that both drawers must agree on: `plots` draws it as a PNG or SVG file, `report.charts` in the page.

A series (a run, or an arm of several seeds) has one color and one mark in all panels. What else a panel has several lines of,
such as pass@k and best@k, are variants: they have the same color and another dash; with one series, each has a color of its own.
Where there are more series than colors, those of the second cycle have another dash, too.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property

# Okabe and Ito's colors, which color-blind readers can distinguish, without their yellow, which is too faint on white. With the
# marks 56 series differ, since the lengths of the two cycles are coprime; without color the first 8 do.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKS = ("circle", "square", "triangle", "diamond", "down", "plus", "cross", "star")
DASHES = (
    (),
    (5.0, 1.5),
    (1.0, 1.2),
    (6.0, 1.5, 1.0, 1.5),
    (3.0, 1.2, 1.0, 1.2, 1.0, 1.2),
)  # on, off, ... in line widths
NO_LINE = -1  # the dash of single points

PAD = 0.03  # of an axis beyond its ends, so that lines and marks at an end are whole
LEAST_SPAN = 0.2  # of an axis that does not start at 0, as a share of its largest value
TICKS = 5
MAX_BANDS, MAX_WHISKERS = 3, 20  # lines with bands in a panel, and points of a line with whiskers
MAX_TICKED = 10  # a logarithmic axis of up to this many values has a tick at each


@dataclass(frozen=True, slots=True)
class Line:
    """Points (x, y) in order of x; `low` and `high`, if both are given, are intervals. All sequences have the same length.

    Attributes:
        series, variant: numbers in `Picture.series` and `Picture.variants`.
        raw: the values before smoothing, drawn faintly.
        seeds: the values of each of two seeds, drawn faintly.
        notes: a text for each point, such as a count; drawn above bars.
        joined: whether neighbors are: not where points do not follow from each other, such as the attempts of a search.
    """

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    series: int = 0
    variant: int = 0
    raw: Sequence[float] | None = None
    seeds: Sequence[Sequence[float]] = ()
    notes: Sequence[str] = ()
    joined: bool = True

    @property
    def faint(self) -> Sequence[Sequence[float]]:
        """The values of the thin lines behind it."""
        return (*self.seeds, *(() if self.raw is None else (self.raw,)))


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over common axes, or bars side by side.

    Attributes:
        name: what `--panels` calls it.
        places: if there are any, x is not a number but the place of a text in it: 0, 1, 2, ...
        log: the axes that are logarithmic: "", "x", "y" or "xy".
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    name: str = ""
    bars: bool = False
    places: tuple[str, ...] = ()
    log: str = ""

    @property
    def has_whiskers(self) -> bool:
        """Whether intervals are drawn as whiskers: where no line has two points, or few points and many lines, whose bands
        would hide each other."""
        with_interval = [line for line in self.lines if line.low is not None]
        points = max((len(line.x) for line in with_interval), default=0)
        return self.bars or points == 1 or (len(with_interval) > MAX_BANDS and points <= MAX_WHISKERS)

    def aside(self, line: int) -> list[float]:
        """How far the whisker of each point of a line is moved: those of several lines at one x stand beside each other, a unit apart."""
        with_interval = [number for number, of in enumerate(self.lines) if of.low is not None]
        here: list[float] = []
        for x in self.lines[line].x:
            at_x = [number for number in with_interval if x in self.lines[number].x]
            here.append(at_x.index(line) - (len(at_x) - 1) / 2 if line in at_x else 0.0)
        return here


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis shows: from `low` to `high`, with a text at each tick. Bands that go beyond are cut."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False
    unit: float = 0.0  # above 0: the logarithm is that of 1 + value / unit, so that the axis begins at 0

    def share(self, value: float) -> float:
        """Where a value is on the axis, from 0 to 1, and outside of it at the nearer end."""
        low, high = self.low, self.high
        if self.unit:
            low, high, value = (math.log1p(v / self.unit) for v in (low, high, value))
        elif self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return min(1.0, max(0.0, (value - low) / (high - low)))


@dataclass(frozen=True, slots=True)
class Style:
    """How a line is drawn: the number of its color in `COLORS` (None: gray), the name of its mark ("": none), its dash."""

    color: int | None
    mark: str
    dash: int


Entries = Sequence[tuple[str, Style]]


@dataclass(frozen=True)
class Picture:
    """Panels with one legend.

    Attributes:
        series: labels of the runs or arms, in the order in which they were asked for.
        variants: labels of what a panel has several lines of.
        notes: sentences below the panels.
    """

    panels: tuple[Panel, ...]
    series: tuple[str, ...] = ("",)
    variants: tuple[str, ...] = ("",)
    title: str = ""
    notes: tuple[str, ...] = ()

    def style(self, line: Line) -> Style:
        number = line.series if len(self.series) > 1 else line.variant
        if not line.joined:
            return Style(number % len(COLORS), "dot", NO_LINE)
        cycle = line.series // len(COLORS)  # from the last dash on, which few variants have
        return Style(number % len(COLORS), MARKS[number % len(MARKS)], (line.variant - cycle) % len(DASHES))

    def label(self, line: Line) -> str:
        """The line's name, of the parts that distinguish it from the picture's other lines."""
        series = self.series[line.series] if len(self.series) > 1 else ""
        variant = self.variants[line.variant] if len(self._drawn_variants) > 1 else ""
        return " ".join(filter(None, (series, variant)))

    @cached_property
    def _drawn_variants(self) -> list[int]:
        """The variants of lines that are drawn; where each has panels of its own, these name them."""
        drawn = {line.variant for panel in self.panels for line in panel.lines}
        return [i for i in range(len(self.variants)) if i in drawn or not self.panels]

    @cached_property
    def legend(self) -> tuple[Entries, Entries]:
        """The entries of the legend: the series, and apart from them the variants; none where there is only one."""
        several = len(self.series) > 1
        drawn = {line.series for panel in self.panels for line in panel.lines}
        series = [
            (text if i in drawn else f"{text} (no data)", self.style(Line((), (), series=i)))
            for i, text in enumerate(self.series)
            if several
        ]
        joined = {line.variant: line.joined for panel in self.panels for line in panel.lines}
        styles = [(i, self.style(Line((), (), variant=i, joined=joined.get(i, True)))) for i in self._drawn_variants]
        gray = [Style(None, "dot" if style.dash == NO_LINE else "", style.dash) for _, style in styles]
        variants = [(self.variants[i], g if several else style) for (i, style), g in zip(styles, gray, strict=True)]
        return series, variants if len(variants) > 1 else []

    def axes(self, panel: Panel) -> tuple[Axis, Axis] | None:
        """The x and the y axis of a panel, None without data. Panels with the same label have the same axis."""
        if not any(True for _ in _points(panel)):
            return None
        alike = [p for p in self.panels if p.bars == panel.bars and p.log == panel.log]
        across = [p for p in alike if (p.x_label, p.places) == (panel.x_label, panel.places)] or [panel]
        up = [p for p in alike if p.y_label == panel.y_label] or [panel]
        return _x_axis(panel, across), _y_axis(panel, up)


def number(value: float | Decimal | None) -> float:
    """A value to draw, NaN if it cannot be drawn: None, infinity, and what overflows in a drawing. What underflows is 0."""
    if value is None or not math.isfinite(value) or abs(value) >= 1e100:
        return math.nan
    return float(value) if abs(value) > 1e-100 else 0.0


def numbers(values: Sequence[float], *, log: bool = False) -> list[float]:
    """The values to draw; on a logarithmic axis only those above 0."""
    return [math.nan if log and not v > 0 else v for v in map(number, values)]


def numbers_across(line: Line, panel: Panel) -> list[float]:
    """The x of a line's points; a logarithmic axis begins at 0 where a point does (`Axis.unit`)."""
    return [math.nan if "x" in panel.log and v < 0 else v for v in map(number, line.x)]


def distinct(labels: Sequence[str], shortened: Callable[[str], str]) -> list[str]:
    """Labels that fit: shortened where needed, and numbered if two that differ would become equal."""
    short = [shortened(label) for label in labels]
    if len(set(short)) == len(set(labels)):
        return short
    return [shortened(f"{i}: {label}") for i, label in enumerate(labels, start=1)]


def value_text(value: float) -> str:
    """A number with up to four digits."""
    if abs(value) < (1000 if float(value).is_integer() else 1e4):
        return re.sub(r"e([+-])0*", r"e\1", f"{value:.4g}")
    return f"{value:,.0f}" if abs(value) < 1e7 else re.sub(r"e\+0*", "e", f"{value:.3g}")


# Axes


def _points(panel: Panel) -> Iterator[tuple[float, float, float, float]]:
    """(x, y, low, high) of all points with x and y, also those of seeds. Without an interval low and high are the value before
    smoothing, or y."""
    seeds = [replace(line, y=y) for line in panel.lines for y in line.seeds]
    for line in (*panel.lines, *seeds):
        x, y = numbers_across(line, panel), numbers(line.y, log="y" in panel.log)
        low, high = (
            numbers(b, log="y" in panel.log) if b is not None else y
            for b in (line.low or line.raw, line.high or line.raw)
        )
        for point in zip(x, y, low, high, strict=True):
            if not (math.isnan(point[0]) or math.isnan(point[1])):
                at, value, below, above = point
                yield at, value, value if math.isnan(below) else below, value if math.isnan(above) else above


def _x_axis(panel: Panel, panels: Sequence[Panel]) -> Axis:
    if panel.places:
        half = 0.6 if panel.bars else 0.25
        ticks = tuple((float(i), text) for i, text in enumerate(panel.places))
        return Axis(panel.x_label, -half, len(panel.places) - 1 + half, ticks)
    xs = sorted({x for p in panels for x, *_ in _points(p)})
    low, high = xs[0], xs[-1]
    if "x" in panel.log and high > 0:
        return _log_axis(panel.x_label, low, high, values=xs) if low > 0 else _log_axis_from_0(panel.x_label, xs)
    whole = all(x.is_integer() for x in xs)
    if low == high:
        low, high = low - 1, high + 1
    elif 0 < low <= 0.1 * high:
        low = 0.0
    ticks = [t for t in _ticks(low, high, whole=whole) if low <= t <= high]
    return _padded(panel.x_label, low, high, ticks)


def _y_axis(panel: Panel, panels: Sequence[Panel]) -> Axis:
    points = [point for p in panels for point in _points(p)]
    low, high = min(y for _, y, _, _ in points), max(y for _, y, _, _ in points)
    if "y" in panel.log:
        bounds = [bound for *_, a, b in points for bound in (a, b)]
        return _log_axis(panel.y_label, max(min(bounds), low / 10), min(max(bounds), high * 10), values=())
    # An interval may widen the axis, but not by more than the lines themselves take, nor below 0 where they are not: there it is cut.
    room = max(high - low, LEAST_SPAN * max(abs(low), abs(high)))
    below, above = min(b for *_, b, _ in points), max(b for *_, b in points)
    low, high = max(below, low - room, 0.0 if low >= 0 else -math.inf), min(above, high + room)
    low, high = (min(low, 0.0), max(high, 0.0) or float(low == 0)) if panel.bars else _honest(low, high)
    ticks = _ticks(low, high)
    near = 0.35 * (ticks[1] - ticks[0])  # an end so near to the next round number goes on to it
    low, high = ticks[0] if low - ticks[0] <= near else low, ticks[-1] if ticks[-1] - high <= near else high
    return _padded(panel.y_label, low, high, [t for t in ticks if low <= t <= high], flush=panel.bars)


def _honest(low: float, high: float) -> tuple[float, float]:
    """Ends of a y axis that fit the data without making noise look large.

    The axis starts at 0 if the smallest value is less than half of the largest one. Else it spans at least a fifth of the
    largest, so that a change of 1 % is never more than a twentieth of its height.
    """
    if low == high == 0:
        return 0.0, 1.0
    if low >= 0:
        return (0.0 if low < high / 2 else min(low, (1 - LEAST_SPAN) * high)), high
    if high <= 0:
        return low, (0.0 if high > low / 2 else max(high, (1 - LEAST_SPAN) * low))
    return low, high


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Round numbers, of which the first and the last enclose the values."""
    rough = max((high - low) / TICKS, 1e-300)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next((m * size for m in (1, 2, 2.5, 5, 10) if m * size >= rough * 0.999), 10 * size)
    if whole:
        step = max(1.0, step if step.is_integer() else 2 * step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _padded(label: str, low: float, high: float, ticks: Sequence[float], *, flush: bool = False) -> Axis:
    pad = PAD * (high - low)
    start = low if flush and low == 0 else low - pad
    return Axis(label, start, high + pad, tuple((t, value_text(t)) for t in ticks))


def _log_axis(label: str, low: float, high: float, *, values: Sequence[float]) -> Axis:
    """Ticks at the values if they are few, such as k = 1, 2, 4, 8, else at powers of ten, or at 1, 2 and 5 of each, or at what is round."""
    if low == high:
        low, high = low / 2, high * 2
    ratio = (high / low) ** PAD
    ticks = tuple((v, value_text(v)) for v in _log_ticks(low, high, values) if low / ratio <= v <= high * ratio)
    return Axis(label, low / ratio, high * ratio, ticks, log=True)


def _log_axis_from_0(label: str, values: Sequence[float]) -> Axis:
    """An axis from 0 to the last of these sorted values, linear below the first one above 0 and logarithmic above it."""
    unit, high = next(v for v in values if v > 0), values[-1]
    pad = PAD * math.log1p(high / unit)
    last = unit * math.expm1(math.log1p(high / unit) + pad)
    ticks = [v for v in _log_ticks(unit, max(high, 2 * unit), values) if unit <= v <= last]
    return Axis(
        label, unit * math.expm1(-pad), last, tuple((v, value_text(v)) for v in (0.0, *ticks)), log=True, unit=unit
    )


def _log_ticks(low: float, high: float, values: Sequence[float]) -> Sequence[float]:
    """The ticks: where fewer than two powers of ten, or 1, 2 and 5 of each, are between the ends, other round numbers."""
    if 0 < len(values) <= MAX_TICKED:
        return values
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = math.ceil(len(decades) / 8)
    ticks = [10.0**d for d in decades[::every]]
    if sum(low <= v <= high for v in ticks) < 3:
        ticks = [m * 10.0**d for d in decades for m in (1, 2, 5)]
    if sum(low <= v <= high for v in ticks) >= 2:
        return ticks
    between = {v for v in _ticks(low, high) if low <= v <= high}
    return sorted(between) if len(between) >= 2 else (low, high)
