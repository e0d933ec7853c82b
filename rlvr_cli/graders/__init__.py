"""Graders: (response, ground truth) -> `Grade`.

Enters: a response and its ground truth. Leaves: the rewards and, for a response without a reward, the failure kind.
`resolve_grader` returns the named grader as a function that grades in this process; `pool.GraderPool` grades in worker
processes that can be killed. `r1_zero_reward_fn` and `question_only_reward_fn` are the reward functions of the handout.
Importing this package is cheap, which each grading process does: a grader's module, and Math-Verify above all, is imported on
first use.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from rlvr_cli import user_code
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders import custom
from rlvr_cli.graders.answers.extraction import unboxed
from rlvr_cli.types import FormatRule, Grade, GraderName

if TYPE_CHECKING:
    from rlvr_cli.graders.question_only import question_only_reward_fn
    from rlvr_cli.graders.r1_zero import FAILURE_KINDS, r1_zero_reward_fn

__all__ = [
    "FAILURE_KINDS",
    "GRADERS",
    "FormatRule",
    "check_grader",
    "has_format_rule",
    "has_unknown_answer",
    "is_unit_tests",
    "question_only_reward_fn",
    "r1_zero_reward_fn",
    "reference_response",
    "resolve_grader",
]

GRADERS: tuple[str, ...] = get_args(GraderName)  # each a module here with a function `grade`
_MODULE_OF = {"FAILURE_KINDS": "r1_zero", "question_only_reward_fn": "question_only", "r1_zero_reward_fn": "r1_zero"}


def __getattr__(name: str) -> Any:
    """The reward functions of the handout."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_module(_MODULE_OF[name]), name)


def check_grader(spec: str) -> None:
    """Raise `RlvrError` unless a grader of this name exists; a user's file is read, but not run."""
    if spec in GRADERS:
        return
    if not user_code.is_file_spec(spec):
        raise RlvrError(
            f"There is no grader {spec}.", f"Choose one of {', '.join(GRADERS)}, or path/to/file.py:function."
        )
    custom.check(spec)


def resolve_grader(
    spec: str, *, format_rule: FormatRule = "literal", timeout: float | None = None
) -> Callable[[str, str], Grade]:
    """Return the grading function of a built-in name or of `path/to/file.py:function`, whose file is run.

    Args:
        spec: one of `GRADERS`, or `path/to/file.py:function`.
        format_rule: for graders that have one (`has_format_rule`).
        timeout: seconds after which the caller gives a grade up, for graders that run programs. None: their own default.

    Raises:
        RlvrError: there is no such grader.
    """
    check_grader(spec)
    if spec not in GRADERS:
        return custom.load(spec)
    module = _module(spec)
    if hasattr(module, "load"):  # of a package, which no grade's time limit is to pay for
        module.load()
    grade = module.grade
    if has_format_rule(spec):
        grade = partial(grade, format_rule=format_rule)
    if timeout is not None and "seconds" in inspect.signature(grade).parameters:
        grade = partial(grade, seconds=_module(spec).seconds_of(timeout))
    return custom.with_example(grade) if custom.wants_example(grade) else grade


def has_format_rule(spec: str) -> bool:
    """Whether --format-rule applies to this grader: its `grade` takes the argument `format_rule`."""
    return spec in GRADERS and "format_rule" in inspect.signature(_module(spec).grade).parameters


def _module(name: str) -> Any:
    return importlib.import_module(f"rlvr_cli.graders.{name}")


def reference_response(grader_name: str, ground_truth: str) -> str | None:
    """Return the response of a perfect model, to check that a grader accepts a dataset's own answers.

    A grader's module may define its own `reference_response`. Otherwise, and for a user's grader, the response has the
    r1_zero format. None if no response can be right: a countdown puzzle without a solution, a GSM8K ground truth
    without a number; or if none is known (`has_unknown_answer`).
    """
    if grader_name in GRADERS and hasattr(_module(grader_name), "reference_response"):
        return _module(grader_name).reference_response(ground_truth)
    return f"I know this one. </think> <answer> {unboxed(ground_truth) or ground_truth} </answer>"


def has_unknown_answer(grader_name: str, ground_truth: str) -> bool:
    """Whether the grader can read a ground truth for which `reference_response` knows no answer.

    Unit tests from which no program can be read, and families of reasoning-gym whose entries have no answer.
    """
    if grader_name not in GRADERS or not hasattr(_module(grader_name), "reads"):
        return False
    return _module(grader_name).reads(ground_truth) and reference_response(grader_name, ground_truth) is None


def is_unit_tests(ground_truth: str) -> bool:
    """Whether a ground truth is for the grader `python`: a list of inputs and outputs, or Python with assertions."""
    may_be = "assert" in ground_truth or ground_truth.lstrip().startswith("[")
    return may_be and _module("python").reads(ground_truth)
