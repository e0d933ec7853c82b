"""The description of a picture: styles, legend and axes, which both drawers take from it."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_cli.analysis.pictures.picture import (
    COLORS,
    DASHES,
    MARKS,
    NO_LINE,
    Line,
    Panel,
    Picture,
    distinct,
    value_text,
)

NAN = math.nan


def panel(*ys, x_label="updates", y_label="reward", **changes):
    lines = tuple(Line(range(len(y)), y, series=i) for i, y in enumerate(ys))
    return Panel("t", x_label, y_label, lines, **changes)


def y_axis(*ys, **changes):
    found = panel(*ys, **changes)
    axes = Picture((found,)).axes(found)
    assert axes is not None
    return axes[1]


def ends(axis):
    """The ends of an axis without its margin."""
    margin = 0.03 / 1.06 * (axis.high - axis.low)
    return pytest.approx((axis.low + margin, axis.high - margin), abs=1e-9)


def test_a_run_has_one_color_and_one_mark_and_a_measure_one_dash():
    picture = Picture((), ("a", "b", "c"), ("mean", "worst"))
    styles = {(s, v): picture.style(Line((), (), series=s, variant=v)) for s in range(3) for v in range(2)}
    for s in range(3):
        assert len({(styles[s, v].color, styles[s, v].mark) for v in range(2)}) == 1
    for v in range(2):
        assert len({styles[s, v].dash for s in range(3)}) == 1
    assert len({(style.color, style.mark, style.dash) for style in styles.values()}) == 6
    series, variants = picture.legend
    assert [text for text, _ in series] == ["a (no data)", "b (no data)", "c (no data)"]
    assert [(text, style.color, style.mark) for text, style in variants] == [("mean", None, ""), ("worst", None, "")]


def test_only_whiskers_at_one_x_are_moved_aside():
    interval = {"low": (0, 0), "high": (1, 1)}
    lines = (
        Line((0, 4), (0, 0), **interval),
        Line((0, 7), (0, 0), **interval),
        Line((0, 4), (0, 0)),
        Line((0, 4), (0, 0), **interval),
    )
    panel = Panel("t", "x", "y", lines)
    assert [panel.aside(number) for number in range(4)] == [[-1, -0.5], [0, 0], [0, 0], [1, 0.5]]


def test_what_has_the_color_of_another_series_has_another_dash():
    """Also where a reader cannot tell their marks."""
    styles = [Picture((), tuple("abcdefghi")).style(Line((), (), series=i)) for i in range(9)]
    assert [style.dash == 0 for style in styles] == [True] * 7 + [False] * 2
    assert len({(style.color, style.dash) for style in styles}) == 9


def test_single_points_have_no_line_in_the_legend_either():
    lines = (Line((0, 1), (1, 2)), Line((0, 1), (1, 0), variant=1, joined=False))
    for series in (("a",), ("a", "b")):
        picture = Picture((Panel("t", "x", "y", lines),), series, ("best so far", "attempt"))
        (_, best), (_, attempt) = picture.legend[1]
        assert (best.dash, attempt.dash, attempt.mark) == (0, NO_LINE, "dot")
        assert picture.style(lines[1]).dash == NO_LINE


def test_the_measures_of_one_run_have_a_color_each():
    picture = Picture((), ("a",), ("pass@k", "best@k"))
    assert [picture.style(Line((), (), variant=v)).color for v in range(2)] == [0, 1]
    series, variants = picture.legend
    assert not series
    assert [style.color for _, style in variants] == [0, 1]
    assert picture.label(Line((), (), variant=1)) == "best@k"
    assert Picture((), ("a", "b"), ("x", "y")).label(Line((), (), series=1)) == "b x"


def test_nothing_to_distinguish_has_no_legend():
    assert Picture((panel([1.0]),), ("a",)).legend == ([], [])


def test_56_series_differ():
    many = Picture((), tuple(map(str, range(56))))
    styles = {(s.color, s.mark) for s in (many.style(Line((), (), series=i)) for i in range(56))}
    assert len(styles) == 56
    assert math.gcd(len(COLORS), len(MARKS)) == 1
    assert len({*MARKS}) == 8, "without color, by the mark"
    assert len(DASHES) == 5


def test_small_rewards_fill_the_axis_and_start_at_0():
    assert ends(y_axis([0.0, 0.03, 0.11])) == (0.0, 0.11)


def test_large_values_that_differ_little_do_not_fill_the_axis():
    """From 0.97 to 0.99 is no cliff: the axis spans at least a fifth of the largest value."""
    low, high = ends(y_axis([0.97, 0.98, 0.99])).expected
    assert (low, high) == pytest.approx((0.8, 1.0), abs=0.051)
    assert high - low >= 0.2 * 0.99


@given(st.lists(st.floats(0.001, 1e6), min_size=2, max_size=8))
def test_a_change_of_1_percent_is_never_more_than_a_twentieth_of_the_axis(values):
    axis = y_axis(values)
    assert 0.01 * max(values) <= 0.05 * (axis.high - axis.low) * (1 + 1e-9)
    assert axis.low <= min(values)
    assert max(values) <= axis.high
    if min(values) < max(values) / 2:
        assert axis.low <= 0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), st.booleans())
def test_axes_hold_all_values_and_have_round_ticks(values, bars):
    axis = y_axis(values, bars=bars)
    rounding = 1e-9 * (axis.high - axis.low)
    assert axis.low <= min(values) + rounding
    assert max(values) <= axis.high + rounding
    assert 1 <= len(axis.ticks) <= 9
    assert all(axis.low <= tick <= axis.high for tick, _ in axis.ticks)
    if bars:
        assert axis.low <= 0 <= axis.high


def test_a_wide_interval_does_not_squash_the_line():
    """That of two seeds may be a hundred times as wide as the values differ: it is cut."""
    line = Line([0, 1], [1.0, 2.0], [-100.0, 1.5], [100.0, 2.5])
    found = Panel("t", "x", "y", (line,))
    axes = Picture((found,)).axes(found)
    assert axes is not None
    assert ends(axes[1]).expected[0] == pytest.approx(0, abs=1e-9), (
        "values that are never negative have no axis below 0"
    )
    assert 2.9 < axes[1].high <= 4
    assert axes[1].share(100.0) == 1.0


def test_an_interval_takes_the_axis_below_0_where_values_are():
    line = Line([0, 1], [-0.5, 2.0], [-2.0, 1.5], [1.0, 2.5])
    found = Panel("t", "x", "y", (line,))
    axes = Picture((found,)).axes(found)
    assert axes is not None
    assert axes[1].low < -2


def test_panels_with_the_same_label_have_the_same_axis():
    first, second, third = panel([0, 1, 2]), panel([0, 10]), panel([0, 7], y_label="tokens")
    picture = Picture((first, second, third))
    assert picture.axes(first) == picture.axes(second)
    assert picture.axes(first)[1] != picture.axes(third)[1]
    assert picture.axes(first)[0] == picture.axes(third)[0]


def test_a_logarithmic_axis_has_a_tick_at_each_k():
    found = Panel("t", "k", "y", (Line([1, 2, 4, 8, 16], [0.1] * 5),), log="x")
    x, _ = Picture((found,)).axes(found)
    assert [text for _, text in x.ticks] == ["1", "2", "4", "8", "16"]
    places = [x.share(k) for k, _ in x.ticks]
    steps = [b - a for a, b in pairwise(places)]
    assert steps == pytest.approx([steps[0]] * 4)


def test_a_logarithmic_axis_leaves_out_what_is_not_above_0():
    found = Panel("t", "x", "y", (Line([0, 1, 2, 3], [0.0, -1.0, 0.001, 10.0]),), log="y")
    _, y = Picture((found,)).axes(found)
    assert [text for _, text in y.ticks] == ["0.001", "0.01", "0.1", "1", "10"]
    assert 0 < y.low < 0.001


@pytest.mark.parametrize(("low", "high"), [(0.52, 0.95), (210, 450), (55, 95), (1.1, 1.9), (2.1, 4.9), (0.9, 1.9)])
def test_a_logarithmic_axis_without_powers_of_ten_has_round_numbers(low, high):
    many = [low + i * (high - low) / 20 for i in range(21)]
    for xs in (many, [0, *many]):
        found = Panel("t", "x", "y", (Line(xs, [*many, high][: len(xs)]),), log="xy")
        x, y = Picture((found,)).axes(found)
        for axis in (x, y):
            shown = [tick for tick, _ in axis.ticks if tick]
            assert len(shown) >= 2
            assert all(low <= tick <= high and len(text) <= 4 for tick, text in axis.ticks if tick)


@given(st.floats(1e-90, 1e90), st.floats(1, 50))
def test_a_logarithmic_axis_always_has_ticks(low, times):
    _, y = Picture((found := panel([low, low * times], log="y"),)).axes(found)
    assert len(y.ticks) >= 2
    assert all(y.low <= tick <= y.high for tick, _ in y.ticks)


def test_a_logarithmic_axis_of_what_begins_at_0_begins_there():
    found = Panel("t", "updates", "y", (Line(range(0, 701), [0.5] * 701), Line(range(41), [0.5] * 41)), log="x")
    x, _ = Picture((found,)).axes(found)
    assert [text for _, text in x.ticks] == ["0", "1", "10", "100"]
    assert 0 < x.share(0) < 0.05
    shares = [x.share(v) for v in (0, 1, 3, 7, 15)]  # 1 + v doubles
    steps = [b - a for a, b in pairwise(shares)]
    assert steps == pytest.approx([steps[0]] * 4)
    tokens = Panel("t", "tokens", "y", (Line([0, 1e5, 1e6, 1e7], [0.5] * 4),), log="x")
    x, _ = Picture((tokens,)).axes(tokens)
    assert x.share(1e5) > 0.1, "the first of them is not far from 0"
    alone = Panel("t", "updates", "y", (Line([0], [0.5]),), log="x")
    assert not Picture((alone,)).axes(alone)[0].log


def test_variants_with_panels_of_their_own_are_not_in_the_legend():
    apart = [
        Panel(title, "x", "y", (Line([0, 1], [0, 1]), Line([0, 1], [1, 1], series=1))) for title in ("right", "wrong")
    ]
    picture = Picture(tuple(apart), ("a", "b"), ("right", "wrong"))
    assert picture.legend[1] == []
    assert picture.label(apart[1].lines[1]) == "b"


def test_updates_have_whole_ticks():
    for count in (2, 3, 6, 7, 40):
        found = panel([0.0] * count)
        x, _ = Picture((found,)).axes(found)
        assert all(tick.is_integer() for tick, _ in x.ticks)


@pytest.mark.parametrize("y", [[], [NAN], [None], [math.inf]])
def test_no_data_has_no_axes(y):
    found = Panel("t", "x", "y", (Line(range(len(y)), y),))
    assert Picture((found,)).axes(found) is None


def test_labels_that_become_equal_are_numbered():
    assert distinct(["alpha", "beta"], lambda text: text[:3]) == ["alp", "bet"]
    assert distinct(["alpha", "alpine"], lambda text: text[:3]) == ["1: ", "2: "]
    assert distinct(["same", "same"], lambda text: text) == ["same", "same"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00003, "3e-5"),
        (0.25, "0.25"),
        (20000, "20,000"),
        (1000, "1,000"),
        (1234.5, "1234"),
        (2.5e8, "2.5e8"),
        (-1.0, "-1"),
    ],
)
def test_numbers_of_ticks(value, text):
    assert value_text(value) == text
