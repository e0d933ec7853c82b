"""What a sweep says of its arms: p-values corrected for their number, and words that fit them."""

from dataclasses import dataclass
from pathlib import Path

from rlvr_cli.analysis.sweep_table import corrected, difference_table, divergences, sentences


@dataclass
class Found:
    """The fields of a `Comparison` that are read."""

    p: float
    difference: float = 0.05
    low: float = 0.01
    high: float = 0.09
    decided: bool = True
    detectable: float | None = 0.04
    questions: int = 100


def test_p_values_are_corrected_for_the_number_of_arms():
    found = {"a": Found(0.01), "b": Found(0.04), "c": Found(0.2, decided=False, low=-0.02)}
    assert corrected(found) == {"a": 0.03, "b": 0.08, "c": 0.2}
    rows = list(difference_table(found, baseline="z").records())
    assert [(r["arm"], r["p"], r["p_holm"], r["decided"]) for r in rows] == [
        ("a", 0.01, 0.03, "yes"), ("b", 0.04, 0.08, "no"), ("c", 0.2, 0.2, "no"),
    ]  # fmt: skip
    told = list(sentences(found, baseline="z"))
    assert told[0] == (
        "a is better than z: +5.0 points (95% interval +1.0 to +9.0; p = 0.01; for 3 comparisons p = 0.03)."
    )
    assert told[1].startswith("Taken alone, b is better than z: +5.0 points")
    assert "Among 3 comparisons a difference like this one arises by chance too often to count." in told[1]
    assert told[2].startswith("The data cannot tell c from z: +5.0 points (95% interval -2.0 to +9.0;")
    assert told[2].endswith("4.0 points or more would show in 4 of 5 trials.")
    assert "3 arms are compared with one baseline" in told[3]


def test_a_tiny_p_is_no_row_of_digits():
    assert "p < 0.0001)" in next(sentences({"a": Found(3e-71)}, baseline="z"))


def test_one_comparison_needs_no_correction():
    (told,) = sentences({"a": Found(0.01, difference=-0.05, low=-0.09, high=-0.01)}, baseline="z")
    assert told == "a is worse than z: -5.0 points (95% interval -9.0 to -1.0; p = 0.01)."


@dataclass
class Info:
    metadata: dict
    id: str = "r"
    path: Path = Path()


def test_arms_that_diverged_are_named_with_what_went_wrong():
    ended = [
        {"status": "diverged", "diverged": {"updates": n, "why": f"the entropy is 4, after {n} updates"}}
        for n in (12, 9)
    ]
    arms = {"a": [Info({"status": "finished"}), *map(Info, ended)], "b": [Info(ended[0])], "c": []}
    assert list(divergences(arms)) == [
        "a diverged with 2 of its 3 seeds: the entropy is 4, after 12 updates; the entropy is 4, after 9 updates. "
        "It is compared as it was then.",
        "b diverged with its one seed: the entropy is 4, after 12 updates. It is compared as it was then.",
    ]
