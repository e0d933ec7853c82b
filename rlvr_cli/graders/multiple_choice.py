"""The grader of multiple choice: the letter of the right option (`answers.choices` says where a letter counts).

Enters: a response, a ground truth: a letter, or `truth_of` a question's options. Leaves: a `Grade` whose format reward says
whether the response gave the letter of an option.
"""

import json
import re
from collections.abc import Sequence

from rlvr_cli.graders.answers.choices import LETTERS, after_thinking, chosen_letters
from rlvr_cli.types import Grade


def truth_of(letter: str, options: Sequence[str], subject: str | None = None) -> str:
    """The ground truth of a question, as JSON: {"answer": LETTER, "options": [...]} and "subject" if it has one."""
    truth = {"answer": letter, "options": list(options)} | ({"subject": subject} if subject else {})
    return json.dumps(truth, ensure_ascii=False)


def letter_of(ground_truth: str) -> tuple[str, list[str]]:
    """The right letter, and the options; of a bare letter A to D, four empty ones.

    Raises:
        ValueError: the ground truth is neither.
    """
    if ground_truth.strip() in tuple(LETTERS[:4]):
        return ground_truth.strip(), [""] * 4
    try:
        truth = json.loads(ground_truth)
        letter, options = truth["answer"], truth["options"]
        if all(isinstance(option, str) for option in options) and letter in tuple(LETTERS[: len(options)]):
            return letter, options
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"the ground truth {ground_truth[:80]!r} is neither a letter nor options with a letter among them")


def subject_of(ground_truth: str) -> str:
    """The subject in a ground truth of `truth_of`; empty if there is none."""
    try:
        return str(json.loads(ground_truth)["subject"])
    except (ValueError, KeyError, TypeError):
        return ""


def grade(response: str, ground_truth: str) -> Grade:
    """The verdict on one response.

    Raises:
        ValueError: see `letter_of`.
    """
    right, options = letter_of(ground_truth)
    if not response.strip():
        return Grade(0.0, 0.0, 0.0, None, "empty")
    letters = chosen_letters(response, options)
    if not letters:
        said = _names(after_thinking(response), options)
        kind = "correct_but_unformatted" if said == [LETTERS.index(right)] else "unparsed_answer"
        return Grade(0.0, 0.0, 0.0, None, kind)
    if letters[-1] == right:
        return Grade(1.0, 1.0, 1.0, right)
    return Grade(1.0, 0.0, 0.0, letters[-1], "multiple_answers" if right in letters else "wrong_answer")


def _names(response: str, options: Sequence[str]) -> list[int]:
    """The options whose text stands in a response as words of its own; one inside of another that does is not counted."""
    found = [
        {place for match in re.finditer(rf"(?<!\w){re.escape(option)}(?!\w)", response, re.I) for place in range(*match.span())}
        if option.strip()
        else set()
        for option in options
    ]  # fmt: skip
    return [i for i, own in enumerate(found) if own and not any(own < other for other in found)]


def reference_response(ground_truth: str) -> str | None:
    """What a perfect model would answer; None if the ground truth has no letter."""
    try:
        return f"The correct answer is {letter_of(ground_truth)[0]}."
    except ValueError:
        return None
