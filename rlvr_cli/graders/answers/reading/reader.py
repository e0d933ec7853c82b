r"""Read an answer as a mathematical object: text -> nodes.

Enters: the text of an answer. Leaves: a tree of frozen dataclasses: a number or formula, a quantity with its unit, an
ordered tuple or interval, an unordered list or set, a union, an equation or inequality, a matrix, a ratio, a numeral in
another base, words; or `Opaque`, notation that this grammar does not know and that only equals itself.
"""

import re
import threading
from fractions import Fraction
from itertools import pairwise

from rlvr_cli.graders.answers.formula import Formula, combined, constant, parse_formula
from rlvr_cli.graders.answers.formula_parser import Unparsed, int_or_none
from rlvr_cli.graders.answers.notation import FUNCTIONS, GREEK, Token, Unreadable, is_prose, key_of, tokens_of, word_set
from rlvr_cli.graders.answers.objects import (
    Group,
    Listing,
    Matrix,
    Node,
    Numeral,
    Opaque,
    Quantity,
    Ratio,
    Relation,
    Sets,
    Value,
    Words,
)
from rlvr_cli.graders.answers.reading.number_words import NUMBER_WORDS, factor_of
from rlvr_cli.graders.answers.reading.token_lists import (
    CLOSE,
    OPEN,
    Tokens,
    closing_index,
    merge_thousands,
    split,
    trimmed,
)
from rlvr_cli.graders.answers.reading.wording import (
    CONDITIONS,
    DENIALS,
    HEDGES,
    POWERS,
    is_called_wrong,
    is_denied,
    words_of,
)
from rlvr_cli.graders.answers.units import GLUED_UNITS, UNITS, canonical_unit

EMPTY = Words("empty set")
MAX_ITEMS = 200  # of a list, a set or a tuple
_MAX_WORK = 1_500  # objects read for one text


class _Work(threading.local):
    left = 0


_work = _Work()


def allow_work() -> None:
    """Let `read_tokens` and the others read `_MAX_WORK` objects from now on, in this thread."""
    _work.left = _MAX_WORK


_RELATIONS = frozenset(
    ["=", "\\approx", "<", ">", "<=", ">=", "!=", "\\in", "\\equiv", "\\iff", "\\notin", "\\sim", "\\propto"]
)
_MATRICES = word_set("matrix pmatrix bmatrix Bmatrix vmatrix Vmatrix smallmatrix array psmallmatrix bsmallmatrix")
_CURRENCY_SIGNS = word_set("$ € ₹ ¥ £")
_BEFORE_UNIT = word_set("^ 2 3 { } / - ( ) * . '")
_INSIDE_NAMES = word_set(", | _ ^ - + '")
_BESIDE_NAMES = word_set("_ ' : / . ^")
_SET_OPERATORS = {"\\cup": word_set(r"\cup U u"), "\\cap": word_set(r"\cap"), "\\setminus": word_set(r"\setminus -")}
_PUNCTUATION = word_set(". ' \" ! : `")
_LINE = ("all real numbers", "all reals", "all real x", "set of all real numbers", "real numbers", "reals")
_SCALES = {"c": "celsius", "celsius": "celsius", "f": "fahrenheit", "fahrenheit": "fahrenheit"}
_NO_LETTER = re.compile(r"[^a-z0-9.+/-]+")


def has_prose(node: Node | None) -> bool:
    """Whether a part of the object could not be read as mathematics."""
    match node:
        case None | Words() | Opaque():
            return True
        case Quantity(value=value):
            return has_prose(value)
        case Listing(items=items) | Group(items=items) | Sets(parts=items) | Ratio(parts=items):
            return any(has_prose(item) for item in items)
        case Relation(sides=sides):
            return any(has_prose(side) for side in sides)
        case Matrix(rows=rows):
            return any(has_prose(cell) for row in rows for cell in row)
        case _:
            return False


def read_tokens(tokens: Tokens, *, thousands: bool = True, nested: bool = False) -> Node | None:
    """Read tokens as a list of objects or, without separators, as one object."""
    tokens = trimmed(tokens)
    if not tokens:
        return None
    merged = merge_thousands(tokens) if thousands and not nested else tokens
    parts = split(merged, lambda token: token.kind == "sep" or token.text in (",", ";"))
    if len(parts) == 1:
        return read_one(merged)
    if len(parts) > MAX_ITEMS:
        return _opaque(tokens)
    items: list[Node] = []
    prefix: Relation | None = None
    for part in parts:
        item = read_one(part)
        if item is None:
            continue
        if isinstance(item, Relation):
            prefix = item if len(item.sides) == 2 and item.operations[0] == "=" and item.named else None
        elif prefix is not None and not has_prose(item):
            item = Relation((prefix.sides[0], item), prefix.operations, True)  # x = 1, 2, 3
        items.extend(item.items if isinstance(item, Listing) and not item.braces else (item,))
    if not items:
        return None
    joints = {token.text for token in tokens if token.kind == "sep" or token.text in (",", ";")}
    if len(items) == 1:
        return items[0]
    return Listing(tuple(items), alternatives=joints == {"or"}, together=joints == {"and"})


def read_one(tokens: Tokens) -> Node | None:
    """Read tokens as one object."""
    tokens = trimmed(tokens)
    if not tokens:
        return None
    if len(tokens) > 1 and tokens[0].text.lower() in ("negative", "minus") and tokens[1].kind == "num":
        tokens = [Token("op", "-", False), *tokens[1:]]
    _work.left -= 1
    if _work.left < 0:  # readers that parse a part before they fail make deep nesting exponential
        raise Unreadable("too much work")
    unequal = any(token.text in ("<", ">", "<=", ">=") for token in tokens)
    unit_last = _ends_in_unit(tokens)
    node = (
        _words(tokens)
        or (_sets(tokens) if unequal else None)
        or _relation(tokens)
        or _plus_minus(tokens)
        or (None if unequal else _sets(tokens))
        or _system(tokens)
        or _bracketed(tokens)
        or _matrix(tokens)
        or _numeral(tokens)
        or (read_quantity(tokens) if unit_last else None)
        or _ratio(tokens)
        or _formula(tokens)
        or (None if unit_last else read_quantity(tokens))
    )
    return node if node is not None else _opaque(tokens)


# One reader per kind of object, which returns None if the tokens are of another kind


def _words(tokens: Tokens) -> Node | None:
    if [token.text for token in tokens] == ["\\mathbbR"]:
        return _whole_line()
    if [token.text for token in tokens] == ["\\emptyset"]:
        return EMPTY
    wordy = [token for token in tokens if token.kind in ("word", "text")]
    if not wordy or any(token.kind in ("cmd", "bad", "begin", "end") for token in tokens):
        return None
    plain = _plain(tokens)
    if plain in ("infinity", "positive infinity", "+infinity", "plus infinity"):
        return _parsed("\\infty")
    if plain in ("negative infinity", "-infinity", "minus infinity"):
        return _parsed("-\\infty")
    if plain in _LINE:
        return _whole_line()
    operators = {token.text for token in tokens if token.kind == "op"} - _PUNCTUATION
    if any(token.kind == "num" for token in tokens):
        return Words(plain) if tokens[0].kind == "text" and not any(token.kind == "op" for token in tokens) else None
    if operators - {"(", ")", "-"}:
        return None
    if all(token.kind == "text" for token in wordy):
        return Words(plain)
    prose = [token.kind == "text" or is_prose(token.text) for token in wordy]
    if all(prose) or (any(prose) and not operators and (prose[0] or wordy[1].kind == "word")):
        return Words(plain)
    return None


def _opaque(tokens: Tokens) -> Opaque:
    wordy = any(t.kind in ("word", "text") for t in tokens) and all(
        t.kind in ("word", "text", "num", "sep") or t.text in (".", ",", "-", "'", ":", "(", ")") for t in tokens
    )
    return Opaque(key_of(tokens), _plain(tokens) if wordy else "")


def _plain(tokens: Tokens) -> str:
    text = " ".join(token.text for token in tokens).lower()
    text = text.replace("\\{", " ").replace("\\}", " ")
    text = " ".join(_NO_LETTER.sub(" ", text).split()).strip(" .")
    for article in ("the ", "a ", "an ", "on "):
        text = text.removeprefix(article)
    return text


def _whole_line() -> Group:
    return Group("()", (_parsed("-\\infty"), _parsed("\\infty")))


def _is_line(node: Node) -> bool:
    return isinstance(node, Group) and [_key(item) for item in node.items] == ["- \\infty", "\\infty"]


def _key(node: Node) -> str:
    return node.formula.key if isinstance(node, Value) else ""


def _parsed(text: str) -> Value:
    return Value(parse_formula(tokens_of(text)))


def _relation(tokens: Tokens) -> Node | None:
    operations: list[str] = []

    def is_relation(token: Token) -> bool:
        if token.text in _RELATIONS:
            operations.append(token.text)
            return True
        return False

    sides = split(tokens, is_relation)
    if not operations:
        return None
    if len(sides) > 12:
        return _opaque(tokens)
    if not trimmed(sides[0]) and operations[0] in ("=", "\\approx"):
        return read_one(tokens[1:]) if trimmed(tokens[1:]) else None
    if any(is_denied(side) for side, operation in zip(sides, operations, strict=False) if operation == "="):
        return _opaque(tokens)
    if any(CONDITIONS & words_of(side) for side in sides[1:-1]):
        return _opaque(tokens)  # y = 7 when x = 2
    nodes = tuple(read_one(side) for side in sides)
    unsolved = any(token.kind == "num" for token in sides[0]) and any(
        token.kind in ("word", "cmd") for token in sides[0]
    )
    return Relation(nodes, tuple(operations), _is_name(trimmed(sides[0])), unsolved)


def _is_name(tokens: Tokens) -> bool:
    r"""Whether tokens only name something: `x`, `x_1`, `f(x)`, `AB`, `\angle A`, `P(A|B)`, `Area`, `(x, y)`, `a:b`."""
    if not tokens or len(tokens) > 16:
        return False
    texts = [token.text for token in tokens]
    if len(tokens) == 3 and texts[0] == texts[2] == "|":
        return texts[1].isupper()  # |AB|
    if texts[0] == "(":
        return all(token.kind == "word" or token.text in ("(", ")", ",") for token in tokens)
    outside: Tokens = []  # tokens outside of brackets and subscripts
    depth = 0
    for before, token in pairwise([Token("op", "", False), *tokens]):
        if token.text in ("(", "{", "["):
            depth += 1
        elif token.text in (")", "}", "]"):
            depth -= 1
        elif depth:
            if token.kind == "op" and token.text not in _INSIDE_NAMES:
                return False
        elif before.text not in ("_", "^"):
            outside.append(token)
    if any(t.kind == "num" or (t.kind == "op" and t.text not in _BESIDE_NAMES) for t in outside):
        return False
    if any(token.text.removeprefix("\\") in FUNCTIONS for token in outside):
        return _is_named_angle(tokens)
    words = [token.text for token in outside if token.kind == "word"]
    if any(len(word) > 1 and word.islower() and not is_prose(word) and word not in GREEK for word in words):
        return False  # xy = 6 is an equation
    letters = sum(len(word) == 1 and word.islower() for word in words)
    if "\\frac" in texts and any(token.kind == "num" for token in tokens):
        return False
    if letters and "^" in texts and texts[-1] != ")":
        return False  # x^2 = 9 is an equation; R^2 and f^{-1}(x) are names
    return letters <= 1 or ":" in texts or "/" in texts or any(map(is_prose, words))


def _is_named_angle(tokens: Tokens) -> bool:
    r"""Whether tokens are a function of a named angle: `\sin A`, `\cos \theta`, `\tan(\angle ABC)`; not `\sin x`, `\sqrt{x}`."""
    if tokens[0].text.removeprefix("\\") not in ("sin", "cos", "tan", "cot", "sec", "csc"):
        return False
    rest = [token for token in tokens[1:] if token.text not in ("(", ")", "{", "}", "\\angle", "^", "2")]
    return bool(rest) and all(
        (token.kind == "word" and token.text.isupper()) or token.text.removeprefix("\\") in GREEK for token in rest
    )


def _plus_minus(tokens: Tokens) -> Node | None:
    if not any(token.text in ("\\pm", "\\mp") for token in tokens):
        return None
    both: list[Node] = []
    for upper in (True, False):
        chosen = [
            Token("op", "+" if (token.text == "\\pm") == upper else "-", token.gap)
            if token.text in ("\\pm", "\\mp")
            else token
            for token in tokens
        ]
        node = read_one(chosen)
        if node is None:
            return None
        both.append(node)
    return Listing(tuple(both))


def _sets(tokens: Tokens) -> Node | None:
    texts = {token.text for token in tokens}
    for operation in ("\\cup", "\\cap", "\\setminus"):
        if not texts & _SET_OPERATORS[operation]:
            continue
        marks = {id(token) for index, token in enumerate(tokens) if _joins_sets(tokens, index, operation)}
        pieces = [trimmed(piece) for piece in split(tokens, lambda token, marks=marks: id(token) in marks)]
        if len(pieces) < 2 or not all(pieces):
            continue
        parts = tuple(node for node in map(read_one, pieces) if node is not None)
        if (
            operation == "\\setminus"
            and len(parts) == 2
            and _is_line(parts[0])
            and isinstance(parts[1], Listing | Value)
        ):
            return _punctured(parts[1])
        return Sets(operation, parts)
    return None


def _joins_sets(tokens: Tokens, index: int, operation: str) -> bool:
    r"""Whether a token is the operation: spelled out, `U` between brackets, or the minus of `\mathbb{R} - \{0\}`."""
    text = tokens[index].text
    if text == operation:
        return True
    if not 0 < index < len(tokens) - 1:
        return False
    before, after = tokens[index - 1].text, tokens[index + 1].text
    if operation == "\\cup":
        return text in ("U", "u") and before in CLOSE and after in OPEN
    return operation == "\\setminus" and text == "-" and before == "\\mathbbR" and after == "\\{"


def _punctured(hole: Node) -> Node:
    holes = hole.items if isinstance(hole, Listing) else (hole,)

    def place(node: Node) -> Fraction | float:
        value = node.formula.value(0) if isinstance(node, Value) else None
        return 0.0 if value is None else value.real

    ordered = sorted(holes, key=place)
    minus, plus = _whole_line().items
    return Sets("\\cup", tuple(Group("()", pair) for pair in pairwise([minus, *ordered, plus])))


def _bracketed(tokens: Tokens) -> Node | None:
    first = tokens[0].text
    if first not in ("(", "[", "\\{", "\\langle") or closing_index(tokens, 0, len(tokens)) != len(tokens) - 1:
        return None
    last = tokens[-1].text
    inner = tokens[1:-1]
    if first == "\\{":
        if last != "\\}":
            return None
        if not inner:
            return EMPTY
        builder = split(inner, lambda token: token.text in ("|", ":"))
        if len(builder) == 2 and len(builder[0]) <= 3 and builder[0] and builder[0][0].kind == "word":
            return read_tokens(builder[1], nested=True)
        node = read_tokens(inner, nested=True)
        if node is None:
            return None
        return Listing(node.items, True) if isinstance(node, Listing) else Listing((node,), True)
    parts = split(inner, lambda token: token.text in (",", ";"))
    if len(parts) == 1:
        if inner and inner[0].kind == "begin":
            return None  # a matrix between its brackets
        if first == "[" or (
            inner and (inner[0].text in ("(", "[") or any(t.text in _RELATIONS or t.text == "\\cup" for t in inner))
        ):
            node = read_one(inner)
            return node if not isinstance(node, Opaque) else None
        return None
    if len(parts) > MAX_ITEMS:
        return None
    items = [read_one(part) for part in parts]
    if any(item is None for item in items):
        return None
    if last == "\\rangle":
        last = ")"
    return Group(("(" if first == "\\langle" else first) + last, tuple(item for item in items if item is not None))


def _system(tokens: Tokens) -> Node | None:
    """Read equations stacked behind a brace, as a list."""
    start = 1 if tokens[0].text == "\\{" else 0
    if start >= len(tokens) or (tokens[start].kind, tokens[start].text) not in (("begin", "cases"), ("begin", "array")):
        return None
    if closing_index(tokens, start, len(tokens)) != len(tokens) - 1 or (tokens[start].text == "array" and not start):
        return None
    lines = [line for line in split(tokens[start + 1 : -1], lambda token: token.text == "\\\\") if trimmed(line)]
    if any(token.text == "&" for line in lines for token in line):
        return None  # a function by cases
    items = tuple(node for node in map(read_one, lines) if node is not None)
    return Listing(items) if items else None


def _matrix(tokens: Tokens) -> Node | None:
    start = next((index for index, token in enumerate(tokens) if token.kind == "begin"), None)
    if start is None or tokens[start].text not in _MATRICES:
        return None
    end = closing_index(tokens, start, len(tokens))
    if end < 0:
        return None
    before, body, after = tokens[:start], tokens[start + 1 : end], tokens[end + 1 :]
    if before and before[-1].text in ("(", "[", "|") and after:
        before, after = before[:-1], after[1:]
    if after:
        return None
    if before and before[-1].text == "*":
        before = before[:-1]
    scale: Formula | None = None
    if before:
        try:
            scale = constant(-1) if [token.text for token in before] == ["-"] else parse_formula(before)
        except Unparsed:
            return None
    rows: list[tuple[Node, ...]] = []
    for line in split(body, lambda token: token.text == "\\\\"):
        if not line:
            continue
        cells = []
        for cell in split(line, lambda token: token.text == "&"):
            node = read_one(cell)
            if node is None:
                return None
            cells.append(_scaled(scale, node) if scale else node)
        rows.append(tuple(cells))
    return Matrix(tuple(rows), tokens[start].text.lower().startswith("v")) if rows else None


def _scaled(scale: Formula, node: Node) -> Node:
    return Value(combined("*", scale, node.formula)) if isinstance(node, Value) else node


def _numeral(tokens: Tokens) -> Node | None:
    """`4210_{5}`, `2A_{12}`: digits, an underscore, a base."""
    at = next((index for index, token in enumerate(tokens) if token.text == "_"), 0)
    if not at or any(token.kind not in ("num", "word", "text") for token in tokens[:at]):
        return None
    digits = "".join(token.text for token in tokens[:at])
    if not digits[0].isdigit() and not (tokens[0].kind == "text" and digits.isalnum()):
        return None
    base = [token for token in tokens[at + 1 :] if token.text not in ("{", "}")]
    if len(base) != 1:
        return None
    number = int_or_none(base[0].text) if base[0].kind == "num" else NUMBER_WORDS.get(base[0].text.lower())
    if number is None or not 2 <= number <= 36 or not digits.replace(".", "", 1).isalnum():
        return None
    return Numeral(digits.upper().lstrip("0") or "0", number)


def _ratio(tokens: Tokens) -> Node | None:
    parts = split(tokens, lambda token: token.text in (":", "to", "\\ratio"))
    if not 2 <= len(parts) <= 8:
        return None
    nodes = [read_one(part) for part in parts]
    if any(node is None or has_prose(node) for node in nodes):
        if (
            len(parts) == 2
            and nodes[1] is not None
            and not has_prose(nodes[1])
            and all(t.kind in ("word", "text") for t in parts[0])
            and not DENIALS & words_of(parts[0])
        ):
            return nodes[1]  # Answer: 5
        return None
    return Ratio(tuple(node for node in nodes if node is not None), key_of(tokens).replace(" ", ""))


def _formula(tokens: Tokens) -> Node | None:
    try:
        formula = parse_formula(tokens)
    except (Unparsed, RecursionError):
        return None
    if any(token.text == "/" for token in tokens):
        try:
            loose = parse_formula(tokens, loose=True)
        except (Unparsed, RecursionError):
            loose = None
        return Value(formula, loose if loose is not None and loose.tree != formula.tree else None)
    return Value(formula)


def _ends_in_unit(tokens: Tokens) -> bool:
    """Whether the end must be a unit: a percent or degree sign, a modulus, or a unit that is not read as variables."""
    end = len(tokens)
    if tokens[-1].text == "%":
        return sum(token.text == "%" for token in tokens) == 1
    if _degree_sign(tokens) or (tokens[-1].text.lower() in _SCALES and _degree_sign(tokens[:-1])):
        return True
    if any(token.text in ("\\pmod", "\\bmod") for token in tokens):
        return True
    for power in (["^", "2"], ["^", "3"], ["^", "{", "2", "}"], ["^", "{", "3", "}"]):
        if [token.text for token in tokens[-len(power) :]] == power:
            end -= len(power)
    if end < 2:
        return False
    last = tokens[end - 1]
    if last.kind == "text":
        return True
    if last.kind == "word" and len(last.text) > 1 and last.text in UNITS:
        return last.gap or (last.text in GLUED_UNITS and tokens[end - 2].kind == "num")
    return False


def _degree_sign(tokens: Tokens) -> int:
    """How many tokens at the end form a degree sign; 0 if a function is applied to the angle."""
    for count in (4, 2, 1):
        if "".join(token.text for token in tokens[-count:]) in ("^{\\circ}", "^\\circ", "\\circ"):
            applied = any(token.text.removeprefix("\\") in FUNCTIONS for token in tokens)
            return 0 if applied else count
    return 0


def read_quantity(tokens: Tokens) -> Node | None:
    """A value, then words for its unit, a percent or a degree sign or a modulus; or a currency sign, then a value."""
    for special in (_temperature, _modular):
        node = special(tokens)
        if node is not None:
            return node
    aside = tokens[-3:] if len(tokens) > 3 else []
    if [token.text for token in aside[::2]] == ["(", ")"] and aside[1].kind in ("word", "text") and aside[1].text[1:]:
        tokens = [*tokens[:-3], Token("text", aside[1].text, True)]  # 5 (meters)
    sign = tokens[1 if len(tokens) > 2 and tokens[0].text == "-" else 0].text
    currency = UNITS[sign] if sign in _CURRENCY_SIGNS else ""
    if currency:
        tokens = [token for index, token in enumerate(tokens) if not (token.text == sign and index < 2)]
    end = len(tokens)
    while end > 1 and _may_be_unit(tokens, end - 1):
        end -= 1
    while end < len(tokens) and tokens[end].text in _BEFORE_UNIT:
        end += 1  # in `5 ^2 cm` the unit begins with its first word
    if end == len(tokens) and not currency:
        return None
    value, unit_tokens = read_one(tokens[:end]), tokens[end:]
    if value is None or isinstance(value, Words | Opaque | Relation | Quantity):
        return None
    words = [word for token in unit_tokens for word in token.text.lower().split()]
    if any(word in HEDGES for word in words) or POWERS & set(words[:1]):
        return None
    if is_called_wrong(words[:2]):
        return None
    while words and isinstance(value, Value) and (factor := factor_of(words[0])):
        value = Value(combined("*", value.formula, constant(factor)))
        rest = unit_tokens[0].text.split()[1:]
        unit_tokens = [*([Token("text", " ".join(rest), True)] if rest else []), *unit_tokens[1:]]
        words = words[1:]
    unit = canonical_unit(unit_tokens)
    if currency:
        unit = currency if unit in ("", currency) else f"{currency} {unit}"
    return Quantity(value, unit) if unit else value


def _temperature(tokens: Tokens) -> Node | None:
    """An angle or a temperature: a value and a degree sign, then C or F or nothing."""
    scale = _SCALES.get(tokens[-1].text.lower(), "")
    bare = tokens[:-1] if scale else tokens
    cut = _degree_sign(bare)
    if not cut:
        return None
    value = read_one(bare[:-cut])
    return Quantity(value, scale or "degree") if isinstance(value, Value | Listing) else None


def _modular(tokens: Tokens) -> Node | None:
    at = next((index for index, token in enumerate(tokens) if token.text in ("\\pmod", "\\bmod")), 0)
    value = read_one([token for token in tokens[:at] if token.text != "("]) if at else None
    return Quantity(value, f"mod {key_of(tokens[at + 1 :])}") if isinstance(value, Value) else None


def _may_be_unit(tokens: Tokens, index: int) -> bool:
    token, before = tokens[index], tokens[index - 1]
    if token.kind == "text":
        return True
    if token.text == "%" or token.text in _CURRENCY_SIGNS:
        return before.text != token.text
    if token.kind == "word":
        text = token.text
        if (text in FUNCTIONS or text in GREEK or text == "pi") and not (text in UNITS and index == len(tokens) - 1):
            return False
        if is_prose(text) or (text in UNITS and len(text) > 1 and (token.gap or text in GLUED_UNITS)):
            return True
        if len(text) == 1 and text in UNITS and before.text == "/":
            return True
        return token.gap and (text in UNITS or before.kind in ("word", "text") or (len(text) == 3 and text.isalpha()))
    if token.text in ("2", "3") and before.text in ("^", "{"):
        return True
    if [t.text for t in tokens[index - 3 : index + 1]] in (["^", "{", "2", "}"], ["^", "{", "3", "}"]):
        if index < 5:
            return False
        unit, before = tokens[index - 4], tokens[index - 5]
        # A letter is one only behind a number: of `\pi h^{2}` it is a quantity.
        return len(unit.text) > 1 or unit.kind == "text" or before.kind == "num"
    if token.text in _BEFORE_UNIT:
        following = [t for t in tokens[index + 1 :] if t.text not in ("{", "}", "(", ")", ".")]
        return (
            bool(following)
            and following[0].kind in ("word", "text", "num", "op")
            and any(t.kind in ("word", "text") for t in tokens[:index][-3:])
        )
    return False
