"""The GSM8K grader: the last number in the line after the last `####`, else of the response, is the answer.

Enters: a response, a ground truth (a number, or a GSM8K solution that ends in `#### number`). Leaves: a `Grade` whose
format reward says whether there was a number at all. Thousands commas, a dollar sign and a trailing period do not
matter.
"""

from fractions import Fraction

from rlvr_cli.graders.answers.extraction import last_number
from rlvr_cli.types import Grade

_MAX_DIGITS = 1_000


def grade(response: str, ground_truth: str) -> Grade:
    """The verdict on one response.

    Raises:
        ValueError: the ground truth holds no number.
    """
    truth = final_number(ground_truth)
    if truth is None:
        raise ValueError(f"no number in the ground truth {ground_truth[:80]!r}")
    if not response.strip():
        return Grade(0.0, 0.0, 0.0, None, "empty")
    answer = final_number(response)
    if answer is None:
        return Grade(0.0, 0.0, 0.0, None, "unparsed_answer")
    if value_of(answer) == value_of(truth):
        return Grade(1.0, 1.0, 1.0, answer)
    return Grade(1.0, 0.0, 0.0, answer, "wrong_answer")


def final_number(text: str) -> str | None:
    """The last number in the first line of text after the last `####`, else the last number before it, as written."""
    before, marker, after = text.rpartition("####")
    if marker:
        first_line = after.strip().partition("\n")[0]
        return last_number(first_line) or last_number(before)
    return last_number(text)


def value_of(number: str) -> Fraction | None:
    """The exact value of a number as written; None for a zero denominator or more than `_MAX_DIGITS` characters."""
    bare = number.replace(",", "").replace("$", "")
    if len(bare) > _MAX_DIGITS:
        return None
    try:
        return Fraction(bare)
    except (ValueError, ZeroDivisionError):
        top, slash, bottom = bare.partition("/")
        return Fraction(top) / Fraction(bottom) if slash and set(bottom) > {"0"} else None


def reference_response(ground_truth: str) -> str | None:
    """What a perfect model would answer; None if the ground truth contains no number."""
    answer = final_number(ground_truth)
    return None if answer is None else f"#### {answer}"
