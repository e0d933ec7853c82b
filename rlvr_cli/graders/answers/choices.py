r"""Multiple choice: which option a response chooses.

A letter counts where the response says that it is the answer: in `<answer>` tags or a ``\boxed{}``, alone or before a mark and a text, "B.
Paris", or its option's own text; else after "answer is", "answer:" or "the correct option is"; else after "option" or "choice", unless it
is called wrong and not the only one; else where the response begins with a letter and a mark, "B.", "(B)", or its first line is nothing
else. Of several places of one kind the last counts. There may be quotes, brackets, Markdown or ``\text{}`` around the letter. Of the
thinking only tags and boxes count, and only where no letter follows the thinking. Tags or a box that hold the text of an option without a
letter choose no other one, unless it is stated after the box.
"""

import re
from collections.abc import Sequence

from rlvr_cli.graders.answers.extraction import last_boxed, tagged_answer, without_thinking

LETTERS = "ABCDEFGHIJ"
_OPEN = r"""[\s*$"'`_(\[\u2018\u201c]*(?:\\[(\[][\s(]*)?(?:\\(?:text|textbf|mathrm|mathbf)\s*\{[\s(]*)?"""
_CLOSE = r"""[\s*$"'`_)\]}\u2019\u201d.\\]*"""
_QUOTE = r"""["'`_{\[\u2018\u201c]"""
# Not the first letter of a word, A's or A_1, and behind a quote not a word, as in "A virus"; but 'A' and "A. a virus".
_QUOTED = rf"""(?<={_QUOTE}.)(?=[.,:)*"`\]}}\u201d]|['_\u2019]+(?!\w))"""
_LETTER = rf"{_OPEN}([A-J])(?:{_QUOTED}|(?<!{_QUOTE}.)(?![\w'\u2019-]))"
_IS = r"is(?:\s+(?:clearly|therefore|option|choice))*"
# Not the worst or the second best one, and not "A or B" or "A if".
_CORRECT = (
    r"\b(?:the(?:\s+(?:best|most\s+(?:likely|suitable|appropriate|accurate)))?|my|correct|right|final)\s+"
    rf"(?:option|choice)[\s*]+{_IS}(?!{_OPEN}[A-J]\b(?:[^\w]*(?:or|if|and)\b|/[A-J]))"
)
_REFUTED = r"(?:\([^()\n]{0,200}\)\s*)?(?:[:,]\s*|is\s+)(?:wrong|incorrect|false|not\s+(?:the\s+)?(?:right|correct))\b"
_NAMED = rf"(?i:\b(?:option|choice))(?![_\[])\s*+:?{_LETTER}"
_STATED = (  # but not names of a program, such as option_A and answer["A"]
    re.compile(rf"(?i:\banswer(?:[\s*]+{_IS})?|{_CORRECT})(?![_\[])[\s*]*+:?{_LETTER}"),
    re.compile(rf"{_NAMED}(?!{_CLOSE}{_REFUTED})"),
)
_WHOLE = re.compile(rf"{_OPEN}([A-J]){_CLOSE}")
_FIRST = re.compile(rf"{_OPEN}([A-J])(?:[.):*\]]|{_CLOSE}$)", re.MULTILINE)
_SEVERAL = r"[\s,/&]*(?:and|or)?[\s(\[]*[A-J](?:[.):,\]]|\s*$)"  # "(A) and (C)"
_BEFORE_TEXT = re.compile(rf"""{_OPEN}([A-J])[*$"'`_]*[.):\]](?!{_SEVERAL}|[A-Z](?!\w))""")  # but not "A.D. 70"
_ANOTHER = re.compile(r"[\s(,;.][A-J]\s*[.):]")  # "A. London B. Paris"
_BEFORE_OWN = re.compile(rf"""{_OPEN}([A-J])[*$"'`_.,:;)\]]*\s+(?:[-\u2013\u2014=]\s)?(.*)""", re.DOTALL)
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_AROUND = " $*\"'`_(){}\u2018\u2019\u201c\u201d"


def chosen_letters(response: str, options: Sequence[str]) -> list[str]:
    """The letters that a response gives as its answer, in order: the last one counts; empty if there is none.

    Args:
        options: their texts. Letters beyond them do not count.
    """
    answer = after_thinking(response)
    letters = list(LETTERS[: len(options)])
    for text, after in _declared(answer):
        letter = _letter_of(text, options)
        if letter in letters:
            return [letter]
        if not any(pattern.search(after) for pattern in _STATED):
            letters = _with_text(text, options) or letters
    first = _FIRST.match(answer)
    places = [pattern.findall(answer) for pattern in _STATED]
    places += [[first[1]] if first else [], *([_letter_of(text, options)] for text, _ in _declared(response))]
    named = re.findall(_NAMED, answer)
    places.append(named if len(set(named)) == 1 else [])
    known = ([letter for letter in place if letter in letters] for place in places)
    return next(filter(None, known), [])


def after_thinking(response: str) -> str:
    """What follows the thinking; the whole response if nothing does."""
    return without_thinking(response).strip() or response


def _declared(text: str) -> list[tuple[str, str]]:
    """What the tags hold, and what the box holds, if there are any; each with what follows it, which may say something else: of tags nothing."""
    after = text[max(text.rfind(box) for box in (r"\boxed", r"\fbox")) :]
    found = (tagged_answer(text), ""), (last_boxed(text), after)
    return [(_TEXT.sub(r"\1", held), after) for held, after in found if held is not None]


def _letter_of(declared: str, options: Sequence[str]) -> str | None:
    """The letter that tags or a box hold; None where it only begins their text, such as in "A virus"."""
    if match := _WHOLE.fullmatch(declared):
        return match[1]
    if _with_text(declared, options):
        return None
    own = _BEFORE_OWN.fullmatch(declared)
    if own and own[1] in _with_text(own[2], options):
        return own[1]
    match = _BEFORE_TEXT.match(declared)
    return match[1] if match and not _ANOTHER.search(declared, match.end()) else None


def _with_text(text: str, options: Sequence[str]) -> list[str]:
    """The letters of the options with this text, but for capitals and what is around it."""
    plain = _plain(text)
    return [letter for letter, option in zip(LETTERS, options, strict=False) if plain and plain == _plain(option)]


def _plain(text: str) -> str:
    return " ".join(text.split()).strip(_AROUND).rstrip(_AROUND + ".").casefold()
