r"""The grader of the question_only prompt: the last closed ``\boxed{}`` of the response is the answer.

Enters: a response, a ground truth. Leaves: a `Grade`.
"""

from typing import Any

from rlvr_cli.graders.answers.equivalence import equivalent
from rlvr_cli.graders.answers.extraction import candidates, last_boxed, unboxed
from rlvr_cli.graders.r1_zero import formatted_failure_kind, is_right, rewards, truths_of
from rlvr_cli.types import Grade


def question_only_reward_fn(
    response: str, ground_truth: str | float | list[Any], fast: bool = True
) -> dict[str, float]:
    r"""Rewards of one response whose answer must be in a ``\boxed{}``; all else is as in `r1_zero_reward_fn`."""
    return rewards(grade(response, ground_truth, fast=fast))


def grade(response: str, ground_truth: str | float | list[Any], *, fast: bool = True) -> Grade:
    """The verdict on one response."""
    truths = truths_of(ground_truth)
    answer = last_boxed(response)
    if answer is None:
        return Grade(0.0, 0.0, 0.0, None, _unformatted_failure_kind(response, truths))
    if is_right(answer, truths, fast=fast):
        return Grade(1.0, 1.0, 1.0, answer.strip())
    return Grade(1.0, 0.0, 0.0, answer.strip(), formatted_failure_kind(answer))


def _unformatted_failure_kind(response: str, truths: list[str]) -> str:
    if not response.strip():
        return "empty"
    if any(equivalent(candidate, truth) for candidate in candidates(response) for truth in truths):
        return "correct_but_unformatted"
    return "malformed_tags" if "\\boxed" in response else "no_answer_tags"


def reference_response(ground_truth: str) -> str:
    """What a perfect model would answer."""
    return f"The answer is $\\boxed{{{unboxed(ground_truth) or ground_truth}}}$."
