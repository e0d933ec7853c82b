r"""Multiple choice: which option a response chooses.

A letter counts where the response says that it is the answer: in `<answer>` tags or a ``\boxed{}``; else after "answer
is" or "answer:"; else after "option" or "choice"; else where the response begins with a letter and a mark, "B.", "(B)",
or its first line is nothing else. Of several places of one kind the last counts. There may be quotes, brackets, Markdown or
``\text{}`` around the letter.
"""

import re
from collections.abc import Iterator, Sequence

from rlvr_cli.graders.answers.extraction import last_boxed, tagged_answer

LETTERS = "ABCDEFGHIJ"
_OPEN = r"""[\s*$"'`_(\[\u2018\u201c]*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{[\s(]*)?"""
_CLOSE = r"""[\s*$"'`_)\]}\u2019\u201d.]*"""
_QUOTE = r"""["'`_{\[\u2018\u201c]"""
# Not the first letter of a word, A's or A_1, and behind a quote not a word, as in "A virus"; but 'A' and "A. a virus".
_QUOTED = rf"""(?<={_QUOTE}.)(?=[.,:)*"`\]}}\u201d]|['_\u2019]+(?!\w))"""
_LETTER = rf"{_OPEN}([A-J])(?:{_QUOTED}|(?<!{_QUOTE}.)(?![\w'\u2019-]))"
_STATED = (  # but not names of a program, such as option_A and answer["A"]
    re.compile(rf"(?i:\banswer\s+is|\banswer)(?![_\[])\s*+:?{_LETTER}"),
    re.compile(rf"(?i:\b(?:option|choice))(?![_\[])\s*+:?{_LETTER}"),
)
_WHOLE = re.compile(rf"{_OPEN}([A-J]){_CLOSE}")
_FIRST = re.compile(rf"{_OPEN}([A-J])(?:[.):*\]]|{_CLOSE}$)", re.MULTILINE)


def chosen_letters(response: str, letters: Sequence[str]) -> list[str]:
    """The letters that a response gives as its answer, in order: the last one counts; empty if there is none.

    Args:
        letters: those of the options; others do not count.
    """
    for found in _places(response):
        known = [letter for letter in found if letter in letters]
        if known:
            return known
    return []


def _places(response: str) -> Iterator[list[str]]:
    for marked in (tagged_answer(response), last_boxed(response)):
        match = _WHOLE.fullmatch(marked or "")
        yield [match[1]] if match else []
    for pattern in _STATED:
        yield pattern.findall(response)
    match = _FIRST.match(response)
    yield [match[1]] if match else []
