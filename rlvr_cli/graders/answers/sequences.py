"""Dates, scores and ranges: whole numbers in order, such as `2023-01-02` and `3-1`, which are no subtraction and no division.

Enters: an answer and a ground truth. Leaves: whether they are the same numbers in the same order; None for any other
truth.
"""

import re

from rlvr_cli.graders.answers.notation import MARKUP
from rlvr_cli.graders.answers.reading.wording import HEDGES

_SEQUENCE = re.compile(r"(?<!\d)(?:(\d{1,4})([-/.])(\d{1,2})\2(\d{1,4})|(\d+)\s*-\s*(\d+))")
_DASH = re.compile("--|[–—−‐‑]")
_CURRENCY = re.compile("[€£₹¥]")
_INTRODUCTION = re.compile(r"\b(?:is|was|get)\b|[=:]")
_REASON = re.compile(r"(?<=\d)\W*\b(?:because|since|when|where|which)\b[^-/]*$")
# An answer may be a sentence with nothing else in it, a unit included: 10-15 m^2, 10-15^\circ, 1914-1918 (the war).
_AROUND = re.compile(
    r"""(?:[A-Za-z\s.,:=!'"\u2019°²³]|\\?%|\^\s*\\circ|(?<=[A-Za-z])(?:\^\d|/(?=[A-Za-z]))|(?<!\w)\(|\)(?!\w))*"""
)


def same_sequence(answer: str, truth: str) -> bool | None:
    """Whether the answer is the date, score or range that the truth is; leading zeros do not matter."""
    wanted = _SEQUENCE.fullmatch(_plain(truth))
    if wanted is None:
        return None
    plain = _CURRENCY.sub("", _plain(answer))
    reason = _REASON.search(plain)
    claim, why = (plain[: reason.start()], reason[0]) if reason else (plain, "")
    stated = _stated(claim)
    found = _SEQUENCE.search(stated)
    if found is None or _numbers(found) != _numbers(wanted):
        return False
    around = stated[: found.start()] + " " + stated[found.end() :]
    words = re.findall("[a-z']+", f"{around} {why}".lower().replace("\u2019", "'"))
    is_hedged = any(word in HEDGES or word.endswith("n't") for word in words)
    return _AROUND.fullmatch(around) is not None and not is_hedged


def _stated(plain: str) -> str:
    """What follows the last `is`, `was`, `=` or colon, if numbers are there; else all, also of `1/2/2021 is a week before 1/9/2021`."""
    introduced = list(_INTRODUCTION.finditer(plain))
    if not introduced or _SEQUENCE.fullmatch(plain[: introduced[-1].start()].strip()):
        return plain
    after = plain[introduced[-1].end() :]
    return after if _SEQUENCE.search(after) else plain


def _plain(text: str) -> str:
    plain = _DASH.sub("-", MARKUP.sub(" ", text)).strip().rstrip(".")
    return plain[1:-1] if plain.startswith("(") and plain.endswith(")") else plain


def _numbers(match: re.Match[str]) -> list[str]:
    return [part.lstrip("0") for part in match.group(1, 3, 4, 5, 6) if part is not None]
