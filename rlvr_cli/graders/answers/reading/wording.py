"""Words of an answer that say how its mathematics is meant: that deny, doubt, change, condition or introduce a value."""

import re
from itertools import pairwise

from rlvr_cli.graders.answers.notation import word_set
from rlvr_cli.graders.answers.reading.token_lists import Tokens

HEDGES = word_set(
    "not no cannot can't isn't or either neither nor between least most more less fewer than about root roots if else "
    "approximately around roughly nearly almost maybe perhaps possibly never without except undefined "
    "negative minus impossible unknown insufficient infinitely infinite"
)
DENIALS = word_set("not no cannot nor never neither wrong incorrect false impossible except undefined")
CHANGES = word_set("over under above below exceeds twice double triple half multiple divisible opposite reciprocal")
POWERS = word_set("squared cubed")
CONDITIONS = word_set("when where at for if since with because which")
CONCLUSIONS = word_set("so then but thus hence therefore")
_CONNECTIVES = word_set("is are was be equals equal gives get answer therefore thus hence")
_CONNECTED_BY_TO = word_set("equal equals simplifies reduces evaluates amounts comes")
_DENIED = re.compile(
    r"\bno (?:[a-z]+ )?[a-z] (?:with|such that|for which) |\ball [a-z] except |\b(?:impossible|false|not true) that "
    r"|^(?:not|never) (?-i:[a-z])$",  # "Not A" may be an event
    re.I,
)
_FOR_A_NUMBER = re.compile(r"(?:since|because) (?:- )?[\d.]+$")
_AGAINST = word_set("not cannot nor never")
_FALSE = word_set("wrong incorrect false impossible undefined")
_ANSWERS = {*_CONNECTIVES, *word_set("the a an this it")}


def is_denied(tokens: Tokens) -> bool:
    """Whether tokens before `=` deny it: `there is no x with f(x)`, `no solution since 0`, not `probability of no 6`."""
    tokens = [token for token in tokens if token.text != "="]
    start = 0
    for index, token in enumerate(tokens):
        if token.text in (",", ";") or token.text.lower() in CONCLUSIONS or connects(tokens, index):
            start = index + 1
    clause = " ".join(token.text for token in tokens[start:])
    if _DENIED.search(clause):
        return True
    return bool(DENIALS & words_of(tokens[start:])) and _FOR_A_NUMBER.search(clause) is not None


def ends_in_denial(tokens: Tokens) -> bool:
    """Whether the last word before those that connect is a denial: `cannot be`, `is not equal to`, `wrong:`; not `number wrong:`."""
    words = [word.strip(":") for token in tokens[-5:] for word in token.text.lower().split()]
    while words and words[-1] in {*_CONNECTIVES, "to", ""}:
        words.pop()
    last = words.pop() if words else ""
    return last in _AGAINST or (last in _FALSE and _ANSWERS.issuperset(words))


def is_called_wrong(words: list[str]) -> bool:
    """Whether words say that what stands before them is no answer: `5 is wrong`, not `5 is the number of wrong ones`."""
    return any(first == "is" and second in ("wrong", "incorrect") for first, second in pairwise(words))


def words_of(tokens: Tokens) -> set[str]:
    """The words of tokens, in small letters."""
    return {word for token in tokens for word in token.text.lower().split()}


def connects(tokens: Tokens, index: int) -> bool:
    """Whether a token introduces what the sentence states: a word such as `is`, or a colon after a word (`Answer:`)."""
    token = tokens[index]
    if token.kind == "text":  # \\text{The answer is }5
        words = token.text.lower().split()
        return words[-1].endswith(":") or words[-1] in _CONNECTIVES
    if token.kind == "word":
        before = tokens[index - 1].text.lower() if index else ""
        return token.text.lower() in _CONNECTIVES or (token.text == "to" and before in _CONNECTED_BY_TO)
    return token.text == ":" and index > 0 and tokens[index - 1].kind in ("word", "text")
