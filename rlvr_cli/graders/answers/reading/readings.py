r"""Read an answer in every way that it may be meant: text -> nodes.

Enters: the text of an answer. Leaves: the objects of `reader`, the most literal reading first.
"""

import contextlib
import re
from collections.abc import Sequence
from functools import lru_cache

from rlvr_cli.graders.answers.notation import Token, Unreadable, key_of, tokens_of
from rlvr_cli.graders.answers.objects import Node, Quantity, Value
from rlvr_cli.graders.answers.reading.reader import EMPTY, allow_work, has_prose, read_quantity, read_tokens
from rlvr_cli.graders.answers.reading.sentences import stated
from rlvr_cli.graders.answers.reading.token_lists import Tokens, closing_index, merge_thousands, trimmed
from rlvr_cli.graders.answers.units import UNITS

_BREAK = re.compile(  # the last as in `x=2 y=3`
    r"(?:\\\\\*?(?:\[[^\]\n]{0,12}\])?|\\q?quad(?![a-z])|\n)\s*|(?<=[\d})$])\s+(?=\$?[A-Za-z](?:_\w)?=\S)"
)
_ALIGNED = r"\{(?:align|gather|split)[a-z]*\*?\}"
_MARKS = re.compile(  # of a line, not of its equation: `- **x = 5**`, `**x** = 5`, `x &= 5`
    rf"(?:\\left\\\{{\s*)?\\begin{_ALIGNED}|\\end{_ALIGNED}(?:\s*\\right\.)?|(?:&|\*\*)(?=\s*=)|(?<==)&"
    r"|(?m:^[ \t]*(?:(?:[-*•]|\d+[.)])[ \t]+)?(?:\*\*)?|\*\*[.,;]?[ \t]*$)"
)
_BOX = re.compile(r"\A[\s$]*\\boxed\{(.*)\}[\s$.]*\Z", re.DOTALL)
_EQUATION_FOR = re.compile(r"(?:\s|\$|\\[(\[])*((?:[A-Za-z]|[\\A-Z][a-z]+)(?:_\w|_\{\w+\})?(?:\([a-z]\))?)\s*=")


@lru_cache(maxsize=16)  # `spelling` and `readings` both need the tokens of a text
def _cached_tokens(text: str) -> tuple[Token, ...]:
    return tokens_of(_with_separators(text))


def _with_separators(text: str) -> str:
    """A text of nothing but equations for different names, one below or beside the other, with `;` between them."""
    lines = [line.strip(" \t&") for line in _BREAK.split(_MARKS.sub("", _BOX.sub(r"\1", text)))]
    lines = [line for line in lines if line]
    if lines and lines[0].endswith(":") and "=" not in lines[0]:
        del lines[0]  # `The solution is:`
    if len(lines) < 2:
        return text
    first = lines[0].rpartition(" is ")[2]  # of `The answer is x=5`
    names = [match[1] for line in [first, *lines[1:]] if (match := _EQUATION_FOR.match(line))]
    is_list = len(set(names)) == len(lines) and not _is_computed(lines, names)
    return "; ".join(lines) if is_list else text


def _is_computed(lines: Sequence[str], names: Sequence[str]) -> bool:
    r"""Whether an equation computes with those before: with a name (`A = \pi r^2`, `S = ab`), or the last one with two values or more
    (`S = 5 + 6 = 11`): with one, as in `x = 2` and `y = 12/2 = 6`, it may be by chance.
    """
    values = [line.partition("=")[2] for line in lines]
    letters = "".join(name for name in names if len(name) == 1)
    before = [re.escape(name) for name in names] + ([f"[{letters}]+"] if letters else [])
    if any(re.search(rf"(?<![A-Za-z\\])(?:{'|'.join(before)})(?![A-Za-z])", value) for value in values[1:]):
        return True
    computation, has_result, _ = values[-1].rpartition("=")
    holds = (re.search(rf"(?<!\w){re.escape(value.strip(' $.,;'))}(?!\w)", computation) for value in values[:-1])
    return bool(has_result) and len(values) > 2 and all(holds)


def _tokens(text: str) -> Tokens:
    return list(_cached_tokens(text))


@lru_cache(maxsize=4_096)
def spelling(text: str) -> str | None:
    """A text without typesetting, as one canonical string; None if it is too long or empty."""
    try:
        return key_of(trimmed(_tokens(text))) or None
    except Unreadable:
        return None


@lru_cache(maxsize=4_096)
def readings(text: str) -> tuple[Node, ...]:
    """Every way to read a text, the most literal first: as notation, with its commas as separators, as a sentence.

    Empty for a text that is too long, too deep or too much work.
    """
    allow_work()
    found: list[Node] = []
    with contextlib.suppress(Unreadable):
        _read_all(text, found)
    return tuple(found)


def _read_all(text: str, found: list[Node]) -> None:
    every = _tokens(text)
    if [token.text for token in every] == ["{", "}"]:
        found.append(EMPTY)
    tokens = trimmed(every)
    node = read_tokens(tokens, thousands=not _in_braces(every, text))
    if node is not None:
        found.append(node)
    if any(token.text == "," for token in tokens) and merge_thousands(tokens) != tokens:
        other = read_tokens(tokens, thousands=False)
        if other is not None:
            found.append(other)
    crossed = _with_crosses(tokens)
    if crossed is not None and (product := read_tokens(crossed)) is not None:
        found.append(product)
    if has_prose(node):
        found.extend(stated(_with_separators(text)))
    elif (
        isinstance(node, Value)
        and node.formula.names
        and any(token.gap and token.text in UNITS for token in tokens[1:])
    ):
        unit = read_quantity(tokens)  # `5 m` may be five meters
        if isinstance(unit, Quantity) and "?" not in unit.unit:
            found.append(unit)


def _in_braces(tokens: Tokens, text: str) -> bool:
    """Whether the text is a set in plain braces, as {1,234}: two numbers, unlike 1,234 in a box."""
    braced = bool(tokens) and tokens[0].text == "{" and closing_index(tokens, 0, len(tokens)) == len(tokens) - 1
    return braced and "\\boxed" not in text


def _with_crosses(tokens: Tokens) -> Tokens | None:
    """The tokens with the letter x as a multiplication sign, as in 3.2 x 10^5, if it stands nowhere but between numbers."""
    crosses = [index for index, token in enumerate(tokens) if token.text in ("x", "X") and token.kind == "word"]
    for index in crosses:
        before, after = tokens[index - 1 : index], tokens[index + 1 : index + 2]
        if not before or not after or before[0].kind != "num" or after[0].kind != "num":
            return None
        if tokens[index].gap != after[0].gap:  # 2x 3y
            return None
    changed = [Token("op", "*", token.gap) if at in crosses else token for at, token in enumerate(tokens)]
    return changed if crosses else None
