r"""The grader of the r1_zero prompt: ``reasoning </think> <answer> ... </answer>``.

Enters: a response, a ground truth. Leaves: a `Grade`. The format is the handout's literal one: the response contains
``</think> <answer>`` (one space) and ``</answer>``; the answer is the text between the last ``<answer>`` and the first
``</answer>`` after it, or the content of the last closed ``\boxed{}`` in that text.
"""

import re
from collections.abc import Callable
from typing import Any

from rlvr_cli.graders.answers.equivalence import equivalent, readable
from rlvr_cli.graders.answers.extraction import CLOSE_TAG, OPEN_TAG, candidates, tagged_answer, unboxed
from rlvr_cli.types import FormatRule, Grade

FAILURE_KINDS = (
    "truncated",  # the length limit ended the response; set by the caller, which knows the engine's finish reason
    "out_of_turns",  # --max-turns ended the episode; set by the caller, as the next three
    "no_tool_call",  # the answer is wrong, and the policy never called its environment
    "tool_error",  # the answer is wrong, and a call of the last turn with calls failed
    "environment_error",  # the environment failed, so that there is no grade
    "empty",  # the response or the answer is empty
    "no_think_close",  # no </think>
    "no_answer_tags",  # no <answer> or no </answer>; of question_only: no \boxed{}
    "malformed_tags",  # the tags are there, but not as `</think> <answer>`; or a \boxed{ that is never closed
    "correct_but_unformatted",  # wrong format, but the response contains the right answer
    "multiple_answers",  # formatted, not right, and more than one <answer>
    "unparsed_answer",  # formatted, but the answer could not be read; of gsm8k and math_verify: no answer found
    "wrong_answer",  # formatted, read, and not equal to the ground truth; of python: a test failed
    "no_code",  # of python: there is no program
    "exception",  # of python, as the next three: the program raised one, or ended without a result
    "timeout",
    "memory",
    "output_too_large",
    "no_format",  # of a user's function: it gave a format reward of at most 0.5, and no kind
    "low_reward",  # of a user's function that returned nothing but a reward, or of a judge: it is at most 0.5
    "judge_timeout",  # the judge did not reply in time; of this and the next five there is no grade
    "judge_refused",  # its endpoint refused the request
    "judge_unavailable",  # its endpoint could not be reached, was busy or answered nothing readable, after all retries
    "judge_cut_off",  # its reply was cut off at --judge-max-tokens
    "judge_no_score",  # the last line of its reply is no score
    "judge_out_of_scale",  # its score is outside of the rubric's scale
)
_LENIENT = re.compile(r"</think>\s*<answer>")


def r1_zero_reward_fn(response: str, ground_truth: str | float | list[Any], fast: bool = True) -> dict[str, float]:
    """Rewards of one response: format_reward, answer_reward, and reward, which is the answer reward.

    Args:
        response: what the policy wrote after the prompt.
        ground_truth: the right answer, or a list of acceptable ones.
        fast: False also asks Math-Verify about notation outside of our grammar. That call has no time limit of its own
            and should be made in a process that can be killed, as `GraderPool` does.

    Raises:
        TypeError: the ground truth is neither a string, a number, nor a list of them.
    """
    return rewards(grade(response, ground_truth, fast=fast))


def rewards(verdict: Grade) -> dict[str, float]:
    """The three rewards of a verdict as the handout's reward functions return them."""
    return {
        "format_reward": verdict.format_reward or 0.0,
        "answer_reward": verdict.answer_reward or 0.0,
        "reward": verdict.reward or 0.0,
    }


def is_formatted(response: str, format_rule: FormatRule = "literal") -> bool:
    """Whether the response has the tags; `lenient` accepts any white space between `</think>` and `<answer>`."""
    if CLOSE_TAG not in response:
        return False
    return f"</think> {OPEN_TAG}" in response or (format_rule == "lenient" and _LENIENT.search(response) is not None)


def grade(
    response: str, ground_truth: str | float | list[Any], *, format_rule: FormatRule = "literal", fast: bool = True
) -> Grade:
    """The verdict on one response; arguments and errors are those of `r1_zero_reward_fn`."""
    truths = truths_of(ground_truth)
    if not is_formatted(response, format_rule):
        return Grade(
            0.0, 0.0, 0.0, None, unformatted_failure_kind(response, lambda text: is_right(text, truths, fast=True))
        )
    written = tagged_answer(response) or ""
    answer = unboxed(written)
    if answer is not None and is_right(answer, truths, fast=fast):
        return Grade(1.0, 1.0, 1.0, answer.strip())
    kind = "multiple_answers" if response.count(OPEN_TAG) > 1 else formatted_failure_kind(answer)
    return Grade(1.0, 0.0, 0.0, (written if answer is None else answer).strip(), kind)


def truths_of(ground_truth: str | float | list[Any]) -> list[str]:
    """The acceptable answers as strings, without their boxes."""
    values = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    for value in values:
        if not isinstance(value, str | int | float):
            raise TypeError(f"a ground truth is a string, a number or a list of them, not {type(value).__name__}")
    return [unboxed(str(value)) or str(value) for value in values]


def is_right(answer: str, truths: list[str], *, fast: bool) -> bool:
    """Whether the answer is one of the truths."""
    if any(equivalent(answer, truth) for truth in truths):
        return True
    if fast:
        return False
    from rlvr_cli.graders.answers.math_verify_fallback import equal_by_math_verify

    return any(equal_by_math_verify(answer, truth) for truth in truths)


def formatted_failure_kind(answer: str | None) -> str:
    """The failure kind of a formatted response whose answer is not right."""
    if answer is None:
        return "unparsed_answer"
    if not answer.strip():
        return "empty"
    return "wrong_answer" if readable(answer) else "unparsed_answer"


def unformatted_failure_kind(response: str, is_right_text: Callable[[str], bool]) -> str:
    """The failure kind of an unformatted response; `is_right_text` judges an answer found outside of the tags."""
    if not response.strip():
        return "empty"
    if CLOSE_TAG in response and _LENIENT.search(response):
        return "malformed_tags"
    if any(map(is_right_text, candidates(response))):
        return "correct_but_unformatted"
    if "</think>" not in response:
        return "no_think_close"
    if OPEN_TAG in response and CLOSE_TAG in response:
        return "malformed_tags"
    return "malformed_tags" if "<answer" in response and OPEN_TAG not in response else "no_answer_tags"
