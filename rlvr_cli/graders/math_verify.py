"""The lenient grader: it finds the answer anywhere in the response and uses Math-Verify where our own grammar ends.

Enters: a response, a ground truth. Leaves: a `Grade` whose format reward says whether there was an answer at all.
Run it in a `GraderPool`: Math-Verify runs without a time limit (see `answers/math_verify_fallback.py`).
"""

from rlvr_cli.graders.answers.extraction import candidates
from rlvr_cli.graders.question_only import reference_response as reference_response  # a boxed answer
from rlvr_cli.graders.r1_zero import formatted_failure_kind, is_right, truths_of
from rlvr_cli.types import Grade


def grade(response: str, ground_truth: str) -> Grade:
    """The verdict on one response."""
    if not response.strip():
        return Grade(0.0, 0.0, 0.0, None, "empty")
    found = candidates(response)
    if not found:
        return Grade(0.0, 0.0, 0.0, None, "unparsed_answer")
    truths = truths_of(ground_truth)
    for answer in found:
        if is_right(answer, truths, fast=False):
            return Grade(1.0, 1.0, 1.0, answer)
    return Grade(1.0, 0.0, 0.0, found[0], formatted_failure_kind(found[0]))
