"""Run a program in the sandbox and verify the points that it gives.

Enters: a program in one of the course's three forms: a function `run_code()` that returns `(points,)`, a function `get_centers()`, or a
global `points`. Leaves: the verdict on its points, and how the run went. The points leave the sandbox as JSON and are verified here:
nothing that the program does can change the verdict on what it gave.
"""

from typing import Any

from rlvr_cli.discovery.kissing import Category, Verdict, verify
from rlvr_cli.sandbox.run import DEFAULT_LIMITS, Execution, Limits, Status, run_program

ENTRY = ("run_code", "get_centers", "points")
CATEGORIES: dict[Status, Category] = {
    "exception": "exception",
    "no_answer": "no_points",
    "bad_answer": "bad_points",
    "timeout": "timeout",
    "cpu": "cpu",
    "memory": "memory",
    "output_too_large": "output_too_large",
}


def run_candidate(program: str, *, limits: Limits = DEFAULT_LIMITS, require_sandbox: bool = False) -> Execution:
    """Run a program in one of the forms. Raises RlvrError if `require_sandbox` and the machine lacks a layer of the sandbox."""
    return run_program(program, entry=ENTRY, limits=limits, require_sandbox=require_sandbox)


def verify_execution(execution: Execution, *, dim: int) -> Verdict:
    """Verify the points that a program gave in `dim` dimensions; if it gave none, the verdict says why."""
    if execution.status == "ok":
        return verify(points_of(execution), dim=dim)
    return Verdict(0, dim, 0.0, execution.message, CATEGORIES[execution.status])


def points_of(execution: Execution) -> Any:
    """The points of an answer: those of `run_code`, which returns `(points,)`, or the answer itself."""
    match execution.entry, execution.value:
        case "run_code", [points]:
            return points
    return execution.value
