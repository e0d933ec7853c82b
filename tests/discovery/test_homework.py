"""The homework's report: what it calls gains, and which program it calls the best."""

import re
from dataclasses import asdict

import pytest

from factories import a_candidate, a_rollout
from rlvr_cli.discovery.homework import report

CONFIG = {"proposer": "mutate", "strategy": "refine", "num_samples": 1, "program_timeout": 10.0}


def report_of(scores: list[float | None], start: dict) -> str:
    """The report of a search with attempts of these scores; None: not valid."""
    rows = [
        asdict(a_rollout(step=number, reward=score or 0.0, failure_kind=None if score else "no_code"))
        | {"candidate": a_candidate(number=number, points_sha256="c0ffee" if score else None)._asdict()}
        for number, score in enumerate(scores)
    ]
    facts = {"dataset": {"name": "kissing-11"}, "model": {"name": "mutate"}}
    return report(rows, {"config": CONFIG, "facts": facts, "start": start})


def gains_of(text: str) -> tuple[list[str], list[str]]:
    """The attempts and best scores of the table, and what is said of the largest gains."""
    return re.findall(r"^\| (\d+ \| \d+ \| \d+) \|", text, re.M), re.findall(r"^Attempt (.*):$", text, re.M)


@pytest.mark.parametrize("points", [{}, {"points_sha256": "c0ffee"}], ids=["of an earlier version", "competes"])
def test_a_gain_is_one_over_all_before_and_over_the_program_to_start_from(points: dict):
    table, largest = gains_of(report_of([22.0, 220.0, 600.0, None, 610.0], {"score": 582.0} | points))
    assert table[-2:] == ["2 | 2 | 600", "4 | 4 | 610"]
    assert len(table) == (2 if points else 4), "no row is below a start that competes"
    assert largest == ["2, from 582 to 600", "4, from 600 to 610"]


def test_attempts_below_the_program_to_start_from_gain_nothing():
    text = report_of([22.0, 220.0], {"score": 582.0, "points_sha256": "c0ffee"})
    assert gains_of(text) == ([], [])
    assert "best score" not in text
    assert "Final score: 582 (the program to start from). The program is best/program.py" in text
    assert "first valid score: 22 (attempt 0)" in text


def test_an_attempt_as_good_as_the_program_to_start_from_is_the_best_and_no_gain():
    text = report_of([None, 582.0], {"score": 582.0, "points_sha256": "c0ffee"})
    assert gains_of(text) == (["1 | 1 | 582"], [])
    assert "Final score: 582 (attempt 1)." in text


def test_nothing_valid_is_said_so():
    text = report_of([None], {"score": None, "points_sha256": None})
    assert gains_of(text) == ([], [])
    assert "Final score: nothing valid.\n" in text
