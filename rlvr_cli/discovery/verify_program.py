"""Run a program in the sandbox and verify the points that it gives.

Enters: a program in one of the course's three forms: a function `run_code()` that returns `(points,)`, a function `get_centers()`, or a
global `points`. Leaves: the verdict on its points, and how the run went. The points leave the sandbox as JSON and are verified here:
nothing that the program does can change the verdict on what it gave.
"""

from pathlib import Path
from typing import Any

from rlvr_cli.discovery.kissing import Category, Verdict, verify
from rlvr_cli.errors import RlvrError
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


def verify_program(
    program: str | Path, *, dim: int, limits: Limits = DEFAULT_LIMITS, require_sandbox: bool = False
) -> tuple[Verdict, Execution]:
    """Run a program, given as its text or its file, and verify its points in `dim` dimensions.

    Raises:
        RlvrError: the file cannot be read, or `require_sandbox` and the machine lacks a layer of the sandbox.
    """
    execution = run_program(_text_of(program), entry=ENTRY, limits=limits, require_sandbox=require_sandbox)
    if execution.status == "ok":
        return verify(points_of(execution.value), dim=dim), execution
    return Verdict(0, dim, 0.0, execution.message, CATEGORIES[execution.status]), execution


def points_of(value: Any) -> Any:
    """The points of an answer: those of `run_code`, which returns `(points,)`, or the answer itself."""
    match value:
        case [[] | [[*_], *_] as points]:
            return points
    return value


def _text_of(program: str | Path) -> str:
    if isinstance(program, str):
        return program
    try:
        return program.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RlvrError(f"Cannot read the program {program}: {reason}.", "Name a Python file.") from error
