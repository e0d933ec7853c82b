"""A program in each of the course's forms, and each fault of the course's own evaluator: what it got wrong is right here."""

import sys

import pytest

from kissing_sets import axes, laminated_582, large_coordinates, overflow_exploit, roots
from marks import slow
from rlvr_cli.discovery.tasks import read_text
from rlvr_cli.discovery.verify_program import CATEGORIES, points_of, run_candidate, verify_execution
from rlvr_cli.errors import RlvrError
from rlvr_cli.sandbox.run import Limits

LIMITS = Limits(seconds=30.0)
STARTER = """
import numpy as np

def run_code():
    points = np.zeros((22, 11), dtype=int)
    for i in range(11):
        points[2 * i, i], points[2 * i + 1, i] = 2, -2
    return (points,)
"""


def verdict_of(program, *, dim=11):
    return verify_execution(run_candidate(program, limits=LIMITS), dim=dim)


@pytest.mark.parametrize(
    "program",
    [
        STARTER,
        slow(STARTER.replace("return (points,)", "return points")),
        STARTER.replace("return (points,)", "return (points.tolist(), )"),
        STARTER.replace("def run_code", "def get_centers").replace("(points,)", "points"),
        slow(STARTER + "points = run_code()[0]\ndel run_code"),
        slow(f"points = {axes()}"),
        f"points = tuple(map(tuple, {axes()}))",
        f"points = [[0] * 11]\ndef get_centers(): return {axes()}",
    ],
)
def test_the_forms_of_a_program(program):
    verdict = verdict_of(program)
    assert (verdict.num_points, verdict.dimension, verdict.validity, verdict.error) == (22, 11, 1.0, "")


def test_a_program_in_a_file(tmp_path):
    path = tmp_path / 'it\'s a "program"; $(x).py'  # the course's evaluator pasted the path into source
    path.write_text(f"\ufeffpoints = {laminated_582()}")
    assert verdict_of(read_text(path, "the program")).num_points == 582
    path.write_bytes(b"\xff")
    with pytest.raises(RlvrError, match="It must be text in UTF-8"):
        read_text(path, "the program")
    with pytest.raises(RlvrError, match=r"There is no .*none\.py"):
        read_text(tmp_path / "none.py", "the program")


@pytest.mark.parametrize(
    "points",
    [[[1, 2], [3, 4]], [[1, 2]], slow([[[1, 2]], [[3, 4]]]), slow([0, 1, 4]), [], 5, slow("ab"), slow({"a": 1})],
)
def test_the_tuple_that_run_code_returns_is_taken_off_and_nothing_else(points):
    for program in (
        f"def run_code(): return ({points!r},)",
        f"def get_centers(): return {points!r}",
        f"points = {points!r}",
    ):
        assert points_of(run_candidate(program, limits=LIMITS)) == points, program


def test_a_list_that_run_code_returns_is_all_of_it():
    assert points_of(run_candidate("def run_code(): return [3, 4]", limits=LIMITS)) == [3, 4]


def test_a_program_without_points_has_the_categories_of_its_run():
    execution = run_candidate("x = 1", limits=LIMITS)
    verdict = verify_execution(execution, dim=11)
    assert verdict.category == "no_points"
    assert verdict.error == execution.message == "the program defines none of: run_code, get_centers, points"
    assert verdict.num_points == 0
    assert verdict_of("1 / 0").error == "ZeroDivisionError: division by zero (line 1)"
    assert set(CATEGORIES.values()) == {
        *("exception", "no_points", "bad_points", "timeout", "cpu", "memory", "output_too_large"),
    }


# The faults of the course's evaluator


def test_large_true_sets_are_accepted():
    """int64 squares refused the published 593, whose entries have 43 bits, as a set that holds 0."""
    verdict = verdict_of(f"points = {large_coordinates()}")
    assert (verdict.num_points, verdict.validity) == (582, 1.0)


def test_sets_that_are_valid_only_modulo_two_to_the_64_are_refused():
    assert verdict_of(f"points = {overflow_exploit()}").category == "invalid_condition"
    program = f"import numpy as np\npoints = np.array({overflow_exploit()[:50]}, dtype=object)"
    assert verdict_of(program).category == "invalid_condition"


def test_another_dimension_is_refused():
    assert verdict_of(f"points = {roots(24)}").error == "vector 0 has 24 entries, not 11"


@pytest.mark.parametrize("kind", ["float", "'float32'", "complex", "bool"])
def test_nothing_is_rounded_and_no_array_but_of_whole_numbers_is_taken(kind):
    verdict = verdict_of(f"import numpy as np\npoints = np.array({axes()}, dtype={kind})")
    assert verdict.category == "bad_points", verdict
    assert verdict_of(f"points = [[1.6] * 11, {[0] * 10 + [2]}]").error == "vector 0 has a non-integer entry (float)"
    assert "NaN" in verdict_of("points = [[float('nan')] * 11] * 2").error


def test_results_are_no_pickles_and_the_program_runs_not_here(tmp_path):
    """The program could write what the evaluator then loaded, which ran it in the evaluator's process."""
    program = f"""
import os, pickle
class Run:
    def __reduce__(self): return (open, ({str(tmp_path / "ran")!r}, "w"))
for fd in range(3, 1024):
    try: os.write(fd, pickle.dumps(Run()) + b"\\n")
    except OSError: pass
"""
    assert verdict_of(program).category == "bad_points"
    assert not (tmp_path / "ran").exists()
    assert "hidden" not in sys.modules


def test_the_exact_error_is_in_the_verdict():
    rows = [[6, 0, 2] + [0] * 8, [0, 6, 2] + [0] * 8, [6, 0, -4] + [0] * 8]
    error = "Minimum squared distance 36 < maximum squared norm 52 (vectors 0 and 2)"
    assert verdict_of(f"points = {rows}").error == error
