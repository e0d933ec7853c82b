"""Intervals hold the truth 95 times in 100, comparisons see what there is to see, and alarms are seldom false.

The quick forms take a few cases of `benchmarks/intervals.py`; the full ones all of them. The numbers are seeded.
"""

import importlib.util
from pathlib import Path

import pytest

from marks import slow

SCRIPT = Path(__file__).parents[2] / "benchmarks/intervals.py"


@pytest.fixture(scope="module")
def intervals():
    spec = importlib.util.spec_from_file_location("benchmarks_intervals", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("case", "share"),
    [
        ((100, 1, 1, 0.0), 0.99),
        ((20, 8, 1, 0.3), 0.05),
        ((100, 8, 1, 0.7), 0.99),
        ((20, 8, 4, 0.3), 0.8),
    ],
)
def test_a_share_has_an_interval_that_holds(intervals, case, share):
    held = intervals.shares_held(case, share=share, trials=400)
    assert held["ours"][0] >= 0.93
    assert held["wald"][0] < 0.93  # Wald's, which the query pass_at_k had, does not


@pytest.mark.parametrize("case", [slow((1, 20, 1, 0.0)), (3, 20, 8, 0.0), (3, 100, 8, 0.3)])
def test_seeds_and_questions_count_once_each(intervals, case):
    """The interval is neither too narrow where seeds matter, nor that of the noise counted twice where they do not."""
    null = intervals.arms_held(case, trials=150)
    assert 0.92 <= null["ours"][0] <= 0.99
    if case[0] > 1:
        assert null["ours"][1] < null["welch t"][1]
        if not case[3]:
            assert (
                null["ours"][1] < 1.4 * null["paired z"][1]
            )  # 1.7 times if the noise is counted in seeds and questions
        else:
            assert null["paired z"][0] < null["ours"][0]
        real = intervals.arms_held(case, effect=0.4, trials=100)
        assert real["ours"][2] > real["welch t"][2] - 0.02


@pytest.mark.parametrize("case", [(5, 32, 4, 0.3), slow((10, 64, 8, 0.9))])
def test_alarms_are_seldom_false(intervals, case):
    assert intervals.false_alarms(case, trials=120).get("any", 0.0) <= 0.05


def test_what_is_promised_is_detected(intervals):
    power, with_needed = intervals.found_at_the_promise((1, 100, 1, 0.0), trials=120)
    assert 0.7 <= power <= 0.9
    assert 0.7 <= with_needed <= 0.9


@pytest.mark.full
def test_every_share_has_an_interval_that_holds(intervals, figures):
    worst, narrowest = 1.0, ""
    for case in intervals.CLUSTERS:
        for share in intervals.SHARES:
            held = float(intervals.shares_held(case, share=share, trials=1000)["ours"][0])
            worst, narrowest = min((worst, narrowest), (held, f"{case} {share}"))
    figures |= {"cases": len(intervals.CLUSTERS) * len(intervals.SHARES), "least coverage": worst, "of": narrowest}
    assert worst >= 0.92


@pytest.mark.full
def test_every_comparison_holds_and_sees(intervals, figures):
    held, lost = [], []
    for case in intervals.ARMS:
        held.append(intervals.arms_held(case, trials=1000)["ours"][0])
        real = intervals.arms_held(case, effect=0.4, trials=500)
        lost.append(real["welch t"][2] - real["ours"][2] if "welch t" in real else 0.0)
    figures |= {"cases": len(held), "coverage": f"{min(held):.3f} to {max(held):.3f}", "most power lost": max(lost)}
    assert min(held) >= 0.92
    assert max(held) <= 0.99
    assert max(lost) <= 0.05


@pytest.mark.full
def test_no_run_shape_has_many_false_alarms(intervals, figures):
    found = {str(case): intervals.false_alarms(case, trials=1000).get("any", 0.0) for case in intervals.RUNS}
    figures |= {"shapes": len(found), "most false alarms": max(found.values())}
    assert max(found.values()) <= 0.05
