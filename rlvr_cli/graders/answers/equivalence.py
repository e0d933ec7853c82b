r"""Decide whether an answer equals the ground truth: the same mathematical object, in any notation, as one answer.

Enters: two texts. Leaves: True or False, in bounded time and without side effects: nothing in the texts is executed.

Three layers, cheapest first: the same spelling (L0), the same structure (L1), the same values (L2). A fourth,
Math-Verify (L3), is used only for texts outside of the grammar, and only by callers that can kill the process (see
`math_verify_fallback.py`).

What counts as right: unreduced fractions, unevaluated exact forms, 50% for 0.5, 2:3 for 2/3, {5} for 5, x^12 for
x^{12}, a base left out, a unit added or left out, `x =` or `2 + 3 =` in front, a sentence with one value. What does not:
decimal approximations of exact values, another unit, another variable, another base, another bracket of an interval,
another order of a tuple, another date, score or range with the same difference, "5 or 6", an equation that is still to
be solved (`x^2 = 9`, `a + b = 7`) or is false (`6 = 5`).
"""

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeGuard

from rlvr_cli.graders.answers.formula import (
    DEGREE,
    combined,
    constant,
    proportionality_constant,
    same_value,
    to_complex,
)
from rlvr_cli.graders.answers.notation import MARKUP, MAX_LENGTH
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
from rlvr_cli.graders.answers.reading.number_words import number_word
from rlvr_cli.graders.answers.reading.reader import EMPTY, has_prose
from rlvr_cli.graders.answers.reading.readings import readings, spelling
from rlvr_cli.graders.answers.sequences import same_sequence
from rlvr_cli.graders.answers.units import units_agree

_MAX_UNORDERED = 60  # items; longer lists are compared in the given order
_CHOICE_TRUTH = re.compile(
    r"\s*(?:\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{)?\s*\(?([A-J])\)?\s*\.?\}?\s*(?:\\ |~|\s)*(\S.*)?", re.S
)
_CHOICE_ANSWER = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\(([A-J])\)|([A-J]))\s*(?:[.:)](?:\s.*)?)?", re.S | re.I
)
_LETTERED = re.compile(r"\(([A-J])\)\s*\S.*", re.S)
_DECIMAL = re.compile(r"(?:- )?\d*(?:\.(\d+))?(?: \* 10 \^ (\d{1,2}|\{ - \d{1,2} \})|[eE]([+-]?\d{1,2}))?")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


class Comparison(NamedTuple):
    """One comparison of an answer with the truth, as texts or as the objects that were read."""

    layer: str
    answer: str | Node
    truth: str | Node
    same: bool


@lru_cache(maxsize=65_536)
def equivalent(answer: str, truth: str) -> bool:
    """Whether `answer` equals `truth`, by layers L0 to L2."""
    return any(step.same for step in comparisons(answer, truth))


def comparisons(answer: str, truth: str) -> Iterator[Comparison]:
    """The comparisons that `equivalent` makes, in their order; it stops at the first that finds the two the same."""
    answer, truth = answer.strip(), truth.strip()
    if not answer or not truth:
        return
    yield Comparison("L0 text", answer, truth, answer == truth)
    if len(answer) > MAX_LENGTH or len(truth) > MAX_LENGTH:
        return
    if _NUMBER.fullmatch(answer) and _NUMBER.fullmatch(truth):
        yield Comparison("L0 number", answer, truth, Fraction(answer) == Fraction(truth))
        return
    spelled, wanted = spelling(answer), spelling(truth)
    yield Comparison("L0 spelling", spelled or "", wanted or "", spelled is not None and spelled == wanted)
    in_order = same_sequence(answer, truth)
    if in_order is not None:
        yield Comparison("L0 date, score or range", answer, truth, in_order)
        return
    if _same_choice(answer, truth):
        yield Comparison("L1 choice letter", answer, truth, True)
    if _same_verdict(answer, truth):
        yield Comparison("L1 yes or no", answer, truth, True)
    truths = readings(truth)
    for a in readings(answer):
        for t in truths:
            values = isinstance(a, Value) and isinstance(t, Value)
            yield Comparison("L2 value" if values else "L1 structure", a, t, _same(a, t))


def readable(text: str) -> bool:
    """Whether the grammar can read all of a text: it has no prose and no unknown notation."""
    return any(not has_prose(node) for node in readings(text.strip()))


def _same_verdict(answer: str, truth: str) -> bool:
    """Whether the truth is yes, no, true or false and the answer starts with it, as in `Yes, because ...`."""
    plain = MARKUP.sub(" ", truth).strip(" .").lower()
    return (
        plain in ("yes", "no", "true", "false")
        and re.match(rf"{plain}\s*[,.:;]", MARKUP.sub(" ", answer).strip().lower()) is not None
    )


def _same_choice(answer: str, truth: str) -> bool:
    """Whether both are the same multiple-choice letter, written as A, (A), A., `(A) 12` or Option A."""
    match = _CHOICE_TRUTH.fullmatch(truth)
    if match is None or len(truth) > 200:
        return False
    letter, rest = match[1], match[2]
    if rest is not None and not _LETTERED.match(MARKUP.sub(" ", truth).strip()):
        return False
    plain = " ".join(MARKUP.sub(" ", answer).split()).rstrip(".")
    found = _CHOICE_ANSWER.fullmatch(plain) or _LETTERED.fullmatch(plain)
    if found is None:
        return False
    if re.search(r"\b(?:or|and|not)\b", plain) or len(set(re.findall(r"\(([A-J])\)", plain))) > 1:
        return False
    return next(group for group in found.groups() if group).upper() == letter


def _same(answer: Node | None, truth: Node | None) -> bool:
    if answer is None or truth is None:
        return False
    if isinstance(answer, Listing) and len(answer.items) == 1 and answer.items[0] != EMPTY:
        answer = answer.items[0]
    if isinstance(truth, Listing) and len(truth.items) == 1 and truth.items[0] != EMPTY:
        truth = truth.items[0]
    if _is_intersection(answer) or _is_intersection(truth):
        return _same_intersections(answer, truth)
    if isinstance(answer, Listing) and answer.alternatives and not isinstance(truth, Listing | Sets):
        return all(_same(item, truth) for item in answer.items)
    if isinstance(answer, Relation) or isinstance(truth, Relation):
        return _same_with_relation(answer, truth)
    match answer, truth:
        case Value() as a, Value() as t:
            return _same_values(a, t)
        case (Quantity(), _) | (_, Quantity()):
            return _same_quantity(answer, truth)
        case (Numeral(), _) | (_, Numeral()):
            return _same_numeral(answer, truth)
        case Listing(items=a), Listing(items=t):
            values_by_name = _different_names(t) and not any(isinstance(item, Relation) for item in a)
            return (_same_ordered if values_by_name else _same_unordered)(a, t)
        case Group(brackets=left, items=a), Group(brackets=right, items=t):
            return left == right and _same_ordered(a, t)
        case Sets(operation=left, parts=a), Sets(operation=right, parts=t):
            return left == right and (_same_ordered if left == "\\setminus" else _same_unordered)(a, t)
        case (Listing(items=a), Sets(operation="\\cup", parts=t)) | (
            Sets(operation="\\cup", parts=a),
            Listing(items=t),
        ):
            return _same_unordered(a, t)
        case Listing(items=a, braces=False), Group(brackets="()", items=t):
            return _same_ordered(a, t)
        case Matrix(rows=a, determinant=left), Matrix(rows=t, determinant=right):
            same_shape = [len(row) for row in a] == [len(row) for row in t]
            return left == right and same_shape and all(_same_ordered(x, y) for x, y in zip(a, t, strict=True))
        case Matrix(rows=rows), Group(brackets="()", items=items):
            return all(len(row) == 1 for row in rows) and _same_ordered(tuple(row[0] for row in rows), items)
        case Group(brackets="()", items=items), Matrix(rows=rows):
            return all(len(row) == 1 for row in rows) and _same_ordered(items, tuple(row[0] for row in rows))
        case (Ratio(), _) | (_, Ratio()):
            return _same_ratio(answer, truth)
        case (Words(text=a), Words(text=t)) | (Words(text=a), Opaque(plain=t)) | (Opaque(plain=a), Words(text=t)):
            return a.replace(" ", "") == t.replace(" ", "")
        case (Words(text=words), Value(formula=formula)) | (Value(formula=formula), Words(text=words)):
            number = number_word(words)
            if number is None:
                return words == re.sub(r"[() ]", "", formula.key).lower()
            return not formula.names and formula.value(0) == number
        case Opaque(key=left, plain=a), Opaque(key=right, plain=t):
            return left == right or a == t != ""
        case _:
            return False


def _same_ordered(answers: tuple[Node, ...], truths: tuple[Node, ...]) -> bool:
    return len(answers) == len(truths) and all(_same(a, t) for a, t in zip(answers, truths, strict=True))


def _same_unordered(answers: tuple[Node, ...], truths: tuple[Node, ...]) -> bool:
    if len(answers) != len(truths):
        return False
    if len(answers) > _MAX_UNORDERED:
        return _same_ordered(answers, truths)
    left = list(truths)
    for answer in answers:
        for index, truth in enumerate(left):
            if _same(answer, truth):
                del left[index]
                break
        else:
            return False
    return True


def _different_names(items: tuple[Node, ...]) -> bool:
    """Whether the items are values of different names, as `x = 3, y = 4`; not of `x_1` and `x_2`, which may be swapped."""
    names = {_spelled(item.sides[0]).partition(" _")[0] for item in items if isinstance(item, Relation) and item.named}
    return len(names) == len(items)


def _same_values(answer: Value, truth: Value) -> bool:
    keys = (answer.formula.key, truth.formula.key)
    if all(map(_are_in_order, keys)):
        return keys[0] == keys[1]
    if same_value(answer.formula, truth.formula):
        return True
    return answer.loose is not None and same_value(answer.loose, truth.formula)


def _are_in_order(key: str) -> bool:
    """Whether letters are a sequence, as HHT or IV, and no product. AB is a segment, and LWH a volume: in any order."""
    if not re.fullmatch("[A-Z]{2,}", key):
        return False
    repeat = len(set(key)) < len(key) > 2
    return repeat or set(key) <= set("IVXL") or (set(key) <= set("IVXLCDM") and len(key) > 2)


def _same_quantity(answer: Node, truth: Node) -> bool:
    """Compare quantities: a unit on one side only is ignored, two must agree. A percentage also equals its number."""
    unit_a = answer.unit if isinstance(answer, Quantity) else ""
    unit_t = truth.unit if isinstance(truth, Quantity) else ""
    value_a = answer.value if isinstance(answer, Quantity) else answer
    value_t = truth.value if isinstance(truth, Quantity) else truth
    if unit_a and unit_t and not units_agree(unit_a, unit_t):
        return False
    if isinstance(value_a, Ratio) != isinstance(value_t, Ratio) and "percent" not in (unit_a, unit_t):
        return False
    if _same(value_a, value_t):
        return True
    if unit_a == unit_t or not isinstance(value_a, Value) or not isinstance(value_t, Value):
        return False
    given, number = (value_a.formula, value_t.formula) if unit_a else (value_t.formula, value_a.formula)
    if "percent" in (unit_a, unit_t):
        return same_value(combined("/", given, constant(100)), number)
    if "degree" in (unit_a, unit_t) and "pi" in number.features:
        return same_value(combined("*", given, DEGREE), number)
    return False


def _same_numeral(answer: Node, truth: Node) -> bool:
    """Compare numerals by digits and base. The answer may leave the base out; a truth without one has base 10."""
    if isinstance(answer, Numeral) and isinstance(truth, Numeral):
        return answer.base == truth.base and answer.digits == truth.digits
    numeral, other, in_answer = (answer, truth, False) if isinstance(answer, Numeral) else (truth, answer, True)
    assert isinstance(numeral, Numeral)
    if not isinstance(other, Value) or not (in_answer or numeral.base == 10):
        return False
    if numeral.base == 10 and not other.formula.names:
        value = other.formula.value(0)
        return isinstance(value, Fraction) and value == Fraction(numeral.digits) if numeral.digits.isdigit() else False
    return other.formula.key.replace(" ", "").upper().lstrip("0") == numeral.digits.lstrip("0")


def _same_ratio(answer: Node, truth: Node) -> bool:
    """Compare ratios as fractions, but two times of day, such as `12:30` and `12:00`, as written."""
    if isinstance(answer, Ratio) and isinstance(truth, Ratio):
        if answer.text == truth.text or _same_ordered(answer.parts, truth.parts):
            return True
        if len(answer.parts) != len(truth.parts) or (_is_time(answer) and _is_time(truth)) or _is_only_time(truth):
            return False
        first_a, first_t = answer.parts[0], truth.parts[0]
        return all(
            isinstance(x, Value) and isinstance(y, Value) and _same_products(first_a, y, x, first_t)
            for x, y in zip(answer.parts[1:], truth.parts[1:], strict=True)
        )
    ratio, other = (answer, truth) if isinstance(answer, Ratio) else (truth, answer)
    assert isinstance(ratio, Ratio)
    if ratio is truth and _is_only_time(ratio):
        return False
    if (
        len(ratio.parts) != 2
        or not isinstance(other, Value)
        or not all(isinstance(part, Value) for part in ratio.parts)
    ):
        return False
    top, bottom = ratio.parts
    if not isinstance(top, Value) or not isinstance(bottom, Value):
        return False
    return same_value(combined("/", top.formula, bottom.formula), other.formula)


def _same_products(a: Node, b: Node, c: Node, d: Node) -> bool:
    """Whether a * b == c * d and none of the four is zero."""
    if not (isinstance(a, Value) and isinstance(b, Value) and isinstance(c, Value) and isinstance(d, Value)):
        return False
    if any(node.formula.value(0) in (None, 0) for node in (a, b, c, d)):
        return False
    return same_value(combined("*", a.formula, b.formula), combined("*", c.formula, d.formula))


def _is_time(ratio: Ratio) -> bool:
    return re.fullmatch(r"(?:[01]?\d|2[0-4]):[0-5]\d(?::[0-5]\d)?", ratio.text) is not None


def _is_only_time(ratio: Ratio) -> bool:
    """Whether it is a time of day and no ratio: a ratio in lowest terms, such as 5:12, may be either."""
    hours, minutes = ratio.text.split(":")[:2] if _is_time(ratio) else ("1", "1")
    return math.gcd(int(hours), int(minutes)) != 1 or minutes.startswith("0")


# Equations and inequalities


def _is_intersection(node: Node) -> TypeGuard[Listing]:
    """Whether it is inequalities that hold together, as `x > 2 and x < 3`."""
    return (
        isinstance(node, Listing)
        and node.together
        and all(isinstance(item, Relation) and set(item.operations) <= _FLIPPED.keys() for item in node.items)
    )


def _same_intersections(answer: Node, truth: Node) -> bool:
    """Compare inequalities that hold together, one by one or joined to one; they are no union, and no list of values."""
    joined_answer = _joined(answer) if _is_intersection(answer) else answer
    joined_truth = _joined(truth) if _is_intersection(truth) else truth
    if joined_answer is not None and joined_truth is not None:
        return _same_with_relation(joined_answer, joined_truth)
    if not isinstance(answer, Listing) or not isinstance(truth, Listing) or answer.alternatives or truth.alternatives:
        return False
    return _same_unordered(answer.items, truth.items)


def _same_with_relation(answer: Node, truth: Node) -> bool:
    if isinstance(answer, Relation) and isinstance(truth, Relation):
        return _same_relations(answer, truth)
    if isinstance(answer, Relation):
        joined = _joined(truth)
        if joined is not None and _same_relations(answer, joined):
            return True
        return any(_same(node, truth) for node in _stands_for(answer, in_answer=True))
    assert isinstance(truth, Relation)
    joined = _joined(answer)
    if joined is not None and _same_relations(joined, truth):
        return True
    return any(_same(answer, node) for node in _stands_for(truth, in_answer=False))


def _stands_for(relation: Relation, *, in_answer: bool) -> list[Node]:
    """The objects that a relation states: the value of `x = 5`, the set of `x > 5`, the last side of a chain.

    Args:
        in_answer: whether the relation is in the answer, where the left-hand side may be anything; in a ground truth it
            must be a name.
    """
    found: list[Node] = []
    operations = set(relation.operations)
    last = relation.sides[-1]
    if operations <= {"="} or (operations == {"\\in"} and len(relation.sides) == 2):
        if last is not None and (relation.named or (in_answer and _is_solved(relation))) and _is_consistent(relation):
            found.append(last)
        if (
            len(relation.sides) == 2
            and relation.operations == ("=",)
            and _is_variable(last)
            and relation.sides[0] is not None
        ):
            found.append(relation.sides[0])
    elif operations <= {"=", "\\approx"}:
        found.extend(_approximated(relation, in_answer=in_answer))
    elif operations <= {"\\in", "="} and last is not None and in_answer:
        found.append(last)
    interval = _as_interval(relation)
    if interval is not None:
        found.append(interval)
    return found


def _is_solved(relation: Relation) -> bool:
    """Whether the last side is the answer although the first is no name: a computation, a ratio a/b, or no formula at all."""
    first = relation.sides[0]
    if len(relation.sides) > 2:
        return True
    if not isinstance(first, Value):
        return not relation.unsolved
    tree = first.formula.tree
    return not first.formula.names or (tree[0] == "/" and {tree[1][0], tree[2][0]} == {"v"})


def _is_consistent(relation: Relation) -> bool:
    """Whether the sides without variables have one value: 1 + 1 = 3 = 5 states nothing."""
    sides = [side for side in relation.sides if isinstance(side, Value) and not side.formula.names]
    return all(_same_values(a, b) for a, b in pairwise(sides))


def _approximated(relation: Relation, *, in_answer: bool) -> list[Node]:
    r"""Both sides of `5/6 \approx 0.833`, which is one value in two notations; the last side of `x \approx 3.14`.

    Neither of `100 \approx 101`: they are two values, of which one may happen to be right.
    """
    at = relation.operations.index("\\approx")
    exact, rounded = relation.sides[at], relation.sides[-1]
    if rounded is None:
        return []
    if at == 0 and (relation.named or (in_answer and _is_solved(relation))) and _has_names(exact):
        return [rounded]
    if not (in_answer or relation.named) or not isinstance(exact, Value) or not isinstance(rounded, Value):
        return []
    a, b = exact.formula.value(0), rounded.formula.value(0)
    if a is None or b is None or to_complex(a) is None or to_complex(b) is None:
        return []
    difference, are_complex = abs(a - b), bool(a.imag or b.imag)
    return (
        [exact, rounded]
        if difference <= 0.02 * abs(a) and difference < _precision(exact, rounded, are_complex=are_complex)
        else []
    )


def _precision(exact: Value, rounded: Value, *, are_complex: bool) -> Fraction | float:
    r"""By how much two sides joined by `\approx` may differ: by less than one unit of the last digit of the right one, or else of the left one.

    Zeros at the end of a whole number are digits unless the other side is a formula, as of `400\pi \approx 1260`. Two formulas must be equal,
    up to what computing them loses; the digits in a complex number are not looked for.
    """
    of_exact, of_rounded = _last_digit(exact), _last_digit(rounded)
    digit = of_exact if of_rounded is None else of_rounded
    if digit is None:
        return math.inf if are_complex else 1e-9
    if digit == 1 and (of_exact is None or of_rounded is None):
        number = (exact if of_rounded is None else rounded).formula.key
        return Fraction(10) ** (len(number) - len(number.rstrip("0")))
    return digit


def _last_digit(number: Value) -> Fraction | None:
    r"""What one more in its last digit is: 1/1000 of 0.833, 100 of `1.5 \times 10^3`; None of what is no decimal number."""
    match = _DECIMAL.fullmatch(number.formula.key)
    if match is None:
        return None
    return Fraction(10) ** (int(re.sub("[ {}]", "", match[2] or match[3] or "0")) - len(match[1] or ""))


def _joined(node: Node) -> Relation | None:
    """Rewrite `x > 0 and x < 3` as `0 < x < 3`; None for any other object."""
    if not isinstance(node, Listing) or node.alternatives or len(node.items) != 2:
        return None
    turned = []
    for item in node.items:
        if not isinstance(item, Relation) or len(item.sides) != 2 or item.operations[0] not in _FLIPPED:
            return None
        rising = item.operations[0] in ("<", "<=")
        turned.append((item.sides, item.operations[0]) if rising else (item.sides[::-1], _FLIPPED[item.operations[0]]))
    turned.sort(key=lambda pair: _is_variable(pair[0][0]))  # a < x first, then x < b
    (low, first), (high, second) = turned
    if not (_is_variable(low[1]) and _is_variable(high[0]) and _same(low[1], high[0])):
        return None
    return Relation((low[0], low[1], high[1]), (first, second), False)


def _has_names(node: Node | None) -> bool:
    return isinstance(node, Value) and bool(node.formula.names)


def _is_variable(node: Node | None) -> bool:
    return isinstance(node, Value) and node.formula.tree[0] == "v"


def _as_interval(relation: Relation) -> Node | None:
    """The set that a relation solved for its variable describes, as `x > 5`, `0 < x < 3` or `x != 2`; else None."""
    sides, operations = list(relation.sides), list(relation.operations)
    if operations == ["\\in"] and _is_variable(sides[0]) and isinstance(sides[1], Group | Sets):
        return sides[1]
    if operations and operations[0] in (">", ">="):
        sides, operations = sides[::-1], [_FLIPPED.get(operation, operation) for operation in operations[::-1]]
    infinity, minus = readings("\\infty")[0], readings("-\\infty")[0]
    if len(sides) == 2 and operations == ["!="] and _is_variable(sides[0]) and sides[1] is not None:
        hole = sides[1]
        return Sets("\\cup", (Group("()", (minus, hole)), Group("()", (hole, infinity))))
    if not set(operations) <= {"<", "<="} or any(side is None for side in sides):
        return None
    opened, closed = {"<": "(", "<=": "["}, {"<": ")", "<=": "]"}
    low, high = sides[0], sides[-1]
    if low is None or high is None:
        return None
    if len(sides) == 3 and _is_variable(sides[1]):
        return Group(opened[operations[0]] + closed[operations[1]], (low, high))
    if len(sides) == 2 and _is_variable(low):
        return Group("(" + closed[operations[0]], (minus, high))
    if len(sides) == 2 and _is_variable(high):
        return Group(opened[operations[0]] + ")", (low, infinity))
    return None


def _same_relations(answer: Relation, truth: Relation) -> bool:
    if len(answer.sides) == len(truth.sides) == 2:
        if _same_pair(_pair(answer), _pair(truth)):
            return True
        if answer.operations == truth.operations:
            if all(_same(a, t) for a, t in zip(answer.sides, truth.sides, strict=True)):
                return True
            if answer.operations == ("=",) and all(
                _same(a, t) for a, t in zip(answer.sides, truth.sides[::-1], strict=True)
            ):
                return True
            function_and_y = answer.named and truth.named and _is_function_of(answer.sides[0], truth.sides[0])
            return function_and_y and _same(answer.sides[1], truth.sides[1])
    elif set(answer.operations) <= _FLIPPED.keys() and len(answer.sides) == len(truth.sides):
        pairs_a, pairs_t = _pairs(answer), _pairs(truth)
        ordered = all(_same_pair(a, t) for a, t in zip(pairs_a, pairs_t, strict=True))
        return ordered or all(_same_pair(a, t) for a, t in zip(pairs_a, pairs_t[::-1], strict=True))
    elif set(answer.operations) == set(truth.operations) == {"="}:
        if truth.named and len(truth.sides) > 2 and len(answer.sides) == 2:
            return _same_pair(_pair(answer), (truth.sides[0], "=", truth.sides[-1]))
        if len(answer.sides) > 2 and len(truth.sides) == 2:
            return _same_pair((answer.sides[0], "=", answer.sides[-1]), _pair(truth))
        if len(answer.sides) == len(truth.sides):
            return all(_same(a, t) for a, t in zip(answer.sides, truth.sides, strict=True))
    a, t = _as_interval(answer), _as_interval(truth)
    return a is not None and t is not None and _solved_for(answer) == _solved_for(truth) and _same(a, t)


def _solved_for(relation: Relation) -> str:
    return next(
        (side.formula.key for side in relation.sides if isinstance(side, Value) and side.formula.tree[0] == "v"), ""
    )


def _is_function_of(left: Node | None, right: Node | None) -> bool:
    """Whether one left-hand side is `y` and the other `f(x)`: both only name the value on the right."""
    keys = {_spelled(left), _spelled(right)}
    return "y" in keys and any(re.fullmatch(r"[A-Za-z] \( [a-z] \)", key) for key in keys)


def _spelled(node: Node | None) -> str:
    return node.formula.key if isinstance(node, Value) else node.key if isinstance(node, Opaque) else ""


Pair = tuple[Node | None, str, Node | None]


def _pair(relation: Relation) -> Pair:
    return relation.sides[0], relation.operations[0], relation.sides[1]


def _pairs(relation: Relation) -> list[Pair]:
    return list(zip(relation.sides[:-1], relation.operations, relation.sides[1:], strict=True))


def _same_pair(answer: Pair, truth: Pair) -> bool:
    """Whether the differences of the sides are proportional; in inequalities (turned to `<`) by a positive factor."""
    left_a, operation_a, right_a = answer
    left_t, operation_t, right_t = truth
    if not (isinstance(left_a, Value) and isinstance(right_a, Value)):
        return False
    if not (isinstance(left_t, Value) and isinstance(right_t, Value)):
        return False
    if operation_a in (">", ">="):
        left_a, operation_a, right_a = right_a, _FLIPPED[operation_a], left_a
    if operation_t in (">", ">="):
        left_t, operation_t, right_t = right_t, _FLIPPED[operation_t], left_t
    if operation_a != operation_t or operation_a not in ("=", "<", "<=", "!="):
        return False
    if operation_a == "=" and not (_has_names(left_a) or _has_names(right_a)):
        return _same_values(left_a, left_t) and _same_values(right_a, right_t)
    factor = proportionality_constant((left_a.formula, right_a.formula), (left_t.formula, right_t.formula))
    if factor is None:
        return False
    if operation_a in ("=", "!="):
        return True
    if isinstance(factor, Fraction):
        return factor > 0
    number = complex(factor)
    return number.real > 0 and abs(number.imag) <= 1e-9 * abs(number)
