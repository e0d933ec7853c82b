"""Dates, scores and ranges: whole numbers in order, such as `2023-01-02` and `3-1`, which are no subtraction and no division.

Enters: an answer and a ground truth. Leaves: whether they are the same numbers in the same order; None for any other
truth.
"""

import re

from rlvr_cli.graders.answers.reading.wording import HEDGES

_SEQUENCE = re.compile(r"(?<!\d)(?:(\d{1,4})([-/.])(\d{1,2})\2(\d{1,4})|(\d+)\s*-\s*(\d+))")
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|boxed|textit|bf)\b|[${}*]|\\[ ,;!()\[\]]")
_DASH = re.compile("--|[–—−‐‑]")
_AROUND = re.compile(r"[A-Za-z\s.,:=]*")  # an answer may be a sentence with nothing else in it


def same_sequence(answer: str, truth: str) -> bool | None:
    """Whether the answer is the date, score or range that the truth is; leading zeros do not matter."""
    wanted = _SEQUENCE.fullmatch(_plain(truth))
    if wanted is None:
        return None
    plain = _plain(answer)
    found = _SEQUENCE.search(plain)
    if found is None or _numbers(found) != _numbers(wanted):
        return False
    around = plain[: found.start()] + " " + plain[found.end() :]
    return _AROUND.fullmatch(around) is not None and not HEDGES & set(re.findall("[a-z]+", around.lower()))


def _plain(text: str) -> str:
    plain = _DASH.sub("-", _MARKUP.sub(" ", text)).strip().rstrip(".")
    return plain[1:-1] if plain.startswith("(") and plain.endswith(")") else plain


def _numbers(match: re.Match[str]) -> list[str]:
    return [part.lstrip("0") for part in match.group(1, 3, 4, 5, 6) if part is not None]
