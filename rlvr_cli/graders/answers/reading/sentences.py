"""Read a sentence as the object that it states: `The maximum is 7 at x = 2` states 7.

Enters: the text of an answer. Leaves: nodes, none where it states nothing, several or what it denies.
"""

import re
from itertools import pairwise

from rlvr_cli.graders.answers.notation import is_prose, tokens_of
from rlvr_cli.graders.answers.objects import Listing, Node, Opaque, Relation, Words
from rlvr_cli.graders.answers.reading.reader import has_prose, read_tokens
from rlvr_cli.graders.answers.reading.token_lists import CLOSE, OPEN, Tokens, trimmed
from rlvr_cli.graders.answers.reading.wording import (
    CHANGES,
    CONCLUSIONS,
    CONDITIONS,
    HEDGES,
    POWERS,
    connects,
    ends_in_denial,
    is_called_wrong,
    is_denied,
    words_of,
)

_SENTENCE = re.compile(r"(?<=[.!?])(?<!Rs\.)\s+(?=[A-Z$\\(\d])")
_REASONED = re.compile(  # not before a conclusion: "since x > 0, x = 20", "because he buys 8 he now has 20"
    r"(.*\banswer(?:\s+is(?!\s+not\b)|:)\s+[^,;]*?\d[^,;]*?),?\s(?:because|since)\s"
    r"(?!.*(?:,|\b(?:so|thus|hence|therefore|answer|we|he|she|it|they)\b))",
    re.I | re.S,
)
_CHECK = re.compile(r"(?:check|verification|verify)\s*:(?!.*\banswer\b)", re.I | re.S)


def stated(text: str) -> list[Node]:
    """Read the last sentence that states an object: those after its last `is` and its last `=`, or its only one. One that checks comes last."""
    last = [sentence for sentence in _SENTENCE.split(text.strip())[:-4:-1] if not sentence.startswith("I hope")]
    for sentence in sorted(last, key=lambda sentence: _CHECK.match(sentence) is not None):
        found = _stated_by(trimmed(list(tokens_of(_without_reason(sentence)))))
        if found:
            return found
    return []


def _without_reason(sentence: str) -> str:
    """A sentence that says `answer is` and a number, up to `because` or `since`."""
    match = _REASONED.match(sentence)
    return sentence if match is None else match[1]


def _stated_by(tokens: Tokens) -> list[Node]:
    depth, after_word, after_equals = 0, 0, 0
    for index, token in enumerate(tokens):
        if token.text in OPEN or token.kind == "begin":
            depth += 1
        elif token.text in CLOSE or token.kind == "end":
            depth -= 1
        elif depth == 0 and token.text == "=":
            after_equals = index + 1
        elif depth == 0 and connects(tokens, index):
            after_word = index + 1
    first_equals = next((index + 1 for index in range(after_equals) if tokens[index].text == "="), 0)
    for start in {after_word, first_equals} - {0}:
        if len(shorter := _without_condition(tokens, start)) < len(tokens):
            return _stated_by(shorter)
    if 0 < after_word < after_equals and _are_several(read_tokens(tokens[after_word:])):
        after_equals = 0
    found: list[Node] = []
    denied = False
    for start in {after_word, after_equals} - {0}:
        denied = (is_denied if tokens[start - 1].text == "=" else ends_in_denial)(tokens[:start])
        node = read_tokens(tokens[start:])
        if node is not None and not denied:
            found.append(node)
    if after_equals or denied or not all(isinstance(node, Opaque | Words) for node in found):
        return found
    return [*found, *_only_object(tokens)]


def _without_condition(tokens: Tokens, start: int) -> Tokens:
    """The tokens up to a condition with `=` behind the value that begins at `start`: `is 7 at x = 2`, and no conclusion after it."""
    for index in range(start + 1, len(tokens)):
        if tokens[index].text.lower().strip() in CONDITIONS:
            rest = [token.text for token in tokens[index:]]
            concludes = "=" not in rest or "," in rest or CONCLUSIONS & words_of(tokens[index:])
            if not concludes and not _ends_in_name(tokens[index + 1 : index + rest.index("=")]):
                return tokens  # 3 hours at $4 = $12
            return tokens if concludes or has_prose(read_tokens(tokens[start:index])) else tokens[:index]
    return tokens


def _ends_in_name(tokens: Tokens) -> bool:
    """Whether tokens before `=` may name what has a value: `x`, `x_1`, `f(2)`, `quotient q`; not `$4`, `5 x 3`, `a person`."""
    numbered = [before.text for before, token in pairwise(tokens) if token.kind == "num"]
    return (
        bool(tokens) and tokens[0].kind != "num" and {"_", "("}.issuperset(numbered) and not is_prose(tokens[-1].text)
    )


def _are_several(node: Node | None) -> bool:
    """Whether they are several values, as `2 and b = 3`."""
    if not isinstance(node, Listing) or has_prose(node):
        return False
    return all(item.named for item in node.items if isinstance(item, Relation))


def _only_object(tokens: Tokens) -> list[Node]:
    """The only piece of mathematics in a sentence without words of doubt (`HEDGES`); nothing if there are several."""
    words = [word.lower() for token in tokens if token.kind in ("word", "text", "sep") for word in token.text.split()]
    if HEDGES & set(words) or is_called_wrong(words) or any(token.kind == "bad" for token in tokens):
        return []
    pieces: list[Tokens] = [[]]
    for index, token in enumerate(tokens):
        if token.kind == "num" and (
            CHANGES & words_of(tokens[max(0, index - 2) : index]) or POWERS & words_of(tokens[index + 1 : index + 2])
        ):
            return []  # half of 5, 5 squared
        if token.kind == "text" or (token.kind == "word" and is_prose(token.text)):
            if pieces[-1] and not token.gap:
                return []
            pieces.append([])
        elif token.text not in (".", ",", "!", "'", '"', "-") or pieces[-1] or token.text == "-":
            if not pieces[-1] and len(pieces) > 1 and not token.gap:
                return []
            pieces[-1].append(token)
    pieces = [piece for piece in map(trimmed, pieces) if piece and not (len(piece) == 1 and piece[0].kind == "word")]
    if len(pieces) != 1:
        return []
    node = read_tokens(pieces[0])
    return [] if has_prose(node) or node is None else [node]
