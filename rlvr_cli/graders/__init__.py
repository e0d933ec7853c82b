"""Graders: (response, ground truth) -> `Grade`.

Enters: what a policy wrote and what was right. Leaves: rewards and, where there was none, why. `resolve_grader` turns
the name of a grader into a function that grades in this process; `pool.GraderPool` does it in processes that can be
killed. `r1_zero_reward_fn` and `question_only_reward_fn` are the reward functions of the handout. Importing this
package is cheap: a grader's module, and Math-Verify above all, is imported when it is asked for.
"""

from collections.abc import Callable
from functools import partial

from rlvr_cli import user_code
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.question_only import question_only_reward_fn
from rlvr_cli.graders.r1_zero import FAILURE_KINDS, r1_zero_reward_fn
from rlvr_cli.types import FormatRule, Grade

__all__ = [
    "FAILURE_KINDS",
    "GRADERS",
    "FormatRule",
    "check_grader",
    "question_only_reward_fn",
    "r1_zero_reward_fn",
    "reference_response",
    "resolve_grader",
]

GRADERS = ("r1_zero", "question_only", "math_verify", "gsm8k", "countdown")


def check_grader(spec: str) -> None:
    """Raise `RlvrError` unless a grader of this name exists; a user's file is read, but not run."""
    if spec in GRADERS:
        return
    if not user_code.names_file(spec):
        raise RlvrError(
            f"There is no grader {spec}.", f"Choose one of {', '.join(GRADERS)}, or path/to/file.py:function."
        )
    from rlvr_cli.graders import custom

    custom.check(spec)


def resolve_grader(spec: str, *, format_rule: FormatRule = "literal") -> Callable[[str, str], Grade]:
    """The grading function of a name, or of `path/to/file.py:function`, whose file is run.

    Args:
        spec: one of `GRADERS`, or a file and a function.
        format_rule: `lenient` accepts any white space between `</think>` and `<answer>` (r1_zero and countdown).

    Raises:
        RlvrError: there is no such grader.
    """
    check_grader(spec)
    match spec:
        case "r1_zero":
            from rlvr_cli.graders import r1_zero

            return partial(r1_zero.grade, format_rule=format_rule)
        case "question_only":
            from rlvr_cli.graders import question_only

            return question_only.grade
        case "math_verify":
            from rlvr_cli.graders import math_verify

            return math_verify.grade
        case "gsm8k":
            from rlvr_cli.graders import gsm8k

            return gsm8k.grade
        case "countdown":
            from rlvr_cli.graders import countdown

            return partial(countdown.grade, format_rule=format_rule)
        case _:
            from rlvr_cli.graders import custom

            return custom.load(spec)


def reference_response(grader_name: str, ground_truth: str) -> str | None:
    """The response of a perfect model, to check that a grader can read a data set's own answers.

    Of a user's own grader it is guessed to be in the shape of r1_zero. None where no response can be right: a countdown
    puzzle without a solution, a GSM8K truth without a number.
    """
    from rlvr_cli.graders.answers.extraction import unboxed

    answer: str | None = unboxed(ground_truth) or ground_truth
    match grader_name:
        case "question_only" | "math_verify":
            return f"The answer is $\\boxed{{{answer}}}$."
        case "gsm8k":
            from rlvr_cli.graders import gsm8k

            answer = gsm8k.final_number(ground_truth)
            return None if answer is None else f"#### {answer}"
        case "countdown":
            from rlvr_cli.graders import countdown

            try:
                numbers, target = countdown.puzzle_of(ground_truth)
            except ValueError:
                return None
            answer = countdown.solution(numbers, target)
    return None if answer is None else f"I know this one. </think> <answer> {answer} </answer>"
