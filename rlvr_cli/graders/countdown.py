"""The countdown grader: reach a target with the four operations, each number used exactly once.

Enters: a response in the r1_zero format whose answer is an equation such as `(44 - 19) * 35` or `(44 - 19) * 35 =
875`, and a ground truth in JSON, `{"numbers": [44, 19, 35], "target": 875}`. Leaves: a `Grade`. The equation is read
by an arithmetic parser of + - * / and parentheses over whole numbers and evaluated in exact fractions.
"""

import json
import re
from fractions import Fraction

from rlvr_cli.graders.answers.extraction import OPEN_TAG, tagged_answer, unboxed
from rlvr_cli.graders.r1_zero import is_formatted, unformatted_failure_kind
from rlvr_cli.types import FormatRule, Grade

_MAX_TOKENS = 200
_MAX_DEPTH = 30
_MAX_STATES = 200_000  # that the solver visits
_SYMBOLS = str.maketrans(
    {"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")", "{": "(", "}": ")"}
)
_COMMANDS = {
    "\\times": "*",
    "\\cdot": "*",
    "\\div": "/",
    "\\left": "",
    "\\right": "",
    "$": "",
    "\\(": "",
    "\\)": "",
    "\\[": "",
    "\\]": "",
}
_TOKEN = re.compile(r"\s*(?:([0-9]{1,12})(?![0-9.])|([-+*/()=]))")


class NotAnEquation(ValueError):
    """The text is not arithmetic over whole numbers."""


def grade(response: str, ground_truth: str, *, format_rule: FormatRule = "literal") -> Grade:
    """The verdict on one response.

    Raises:
        ValueError: the ground truth is not `{"numbers": [...], "target": ...}` with whole numbers.
    """
    numbers, target = puzzle_of(ground_truth)
    if not is_formatted(response, format_rule):
        return Grade(
            0.0, 0.0, 0.0, None, unformatted_failure_kind(response, lambda text: solves(text, numbers, target))
        )
    written = tagged_answer(response) or ""
    answer = (unboxed(written) or "").strip()
    if not answer:
        return Grade(1.0, 0.0, 0.0, "", "unparsed_answer" if written.strip() else "empty")
    if solves(answer, numbers, target):
        return Grade(1.0, 1.0, 1.0, answer)
    kind = "wrong_answer" if _evaluated(answer) is not None else "unparsed_answer"
    kind = "multiple_answers" if response.count(OPEN_TAG) > 1 else kind
    return Grade(1.0, 0.0, 0.0, answer, kind)


def puzzle_of(ground_truth: str) -> tuple[list[int], int]:
    """The numbers and the target of a puzzle; raises ValueError for anything else."""
    try:
        puzzle = json.loads(ground_truth)
        numbers, target = puzzle["numbers"], puzzle["target"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f'a countdown ground truth is {{"numbers": [...], "target": ...}}, not {ground_truth[:80]!r}'
        ) from error
    if not isinstance(numbers, list) or not all(type(number) is int for number in [*numbers, target]):
        raise ValueError(f"numbers and target must be whole numbers in {ground_truth[:80]!r}")
    return numbers, target


def solves(text: str, numbers: list[int], target: int) -> bool:
    """Whether an equation reaches the target and uses each number exactly once."""
    found = _evaluated(text)
    return found is not None and found[0] == target and sorted(found[1]) == sorted(numbers)


def _evaluated(text: str) -> tuple[Fraction, list[int]] | None:
    """As `evaluate`, but None if the text is not arithmetic, divides by zero, or states a false `= value`."""
    try:
        return evaluate(text)
    except (NotAnEquation, ZeroDivisionError):
        return None


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of an arithmetic expression and the numbers it uses; an `= value` after it must be true.

    Raises:
        NotAnEquation: the text is anything else, or too long.
        ZeroDivisionError: it divides by zero.
    """
    tokens = _tokens(text)
    if "=" in tokens:
        left, right = tokens[: tokens.index("=")], tokens[tokens.index("=") + 1 :]
        value, used = _sum(left, [])
        stated, _ = _sum(right, [])
        if value != stated:
            raise NotAnEquation("its sides differ")
        return value, used
    return _sum(tokens, [])


def _tokens(text: str) -> list[str]:
    if len(text) > 1_000:
        raise NotAnEquation("too long")
    text = text.translate(_SYMBOLS)
    for command, symbol in _COMMANDS.items():
        text = text.replace(command, symbol)
    text, tokens, position = text.strip().rstrip(".").rstrip(), [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or len(tokens) >= _MAX_TOKENS:
            raise NotAnEquation(text[position : position + 20])
        tokens.append(match[1] or match[2])
        position = match.end()
    return tokens


def _sum(tokens: list[str], used: list[int]) -> tuple[Fraction, list[int]]:
    rest = list(reversed(tokens))
    value = _terms(rest, used, 0)
    if rest:
        raise NotAnEquation(rest[-1])
    return value, used


def _terms(rest: list[str], used: list[int], depth: int) -> Fraction:
    value = _factors(rest, used, depth)
    while rest and rest[-1] in "+-":
        sign = 1 if rest.pop() == "+" else -1
        value += sign * _factors(rest, used, depth)
    return value


def _factors(rest: list[str], used: list[int], depth: int) -> Fraction:
    value = _atom(rest, used, depth)
    while rest and rest[-1] in "*/":
        value = value * _atom(rest, used, depth) if rest.pop() == "*" else value / _atom(rest, used, depth)
    return value


def _atom(rest: list[str], used: list[int], depth: int) -> Fraction:
    if not rest or depth > _MAX_DEPTH:
        raise NotAnEquation("a number expected" if not rest else "too deep")
    token = rest.pop()
    if token == "-":
        return -_atom(rest, used, depth + 1)
    if token == "(":
        value = _terms(rest, used, depth + 1)
        if not rest or rest.pop() != ")":
            raise NotAnEquation(") expected")
        return value
    if not token.isdigit():
        raise NotAnEquation(token)
    used.append(int(token))
    return Fraction(int(token))


def solution(numbers: list[int], target: int) -> str | None:
    """Find an expression that reaches the target with each number used once; None if the bounded search finds none."""
    seen: set[tuple[Fraction, ...]] = set()

    def search(items: list[tuple[Fraction, str]]) -> str | None:
        if len(items) == 1:
            return items[0][1] if items[0][0] == target else None
        state = tuple(sorted(value for value, _ in items))
        if state in seen or len(seen) >= _MAX_STATES:
            return None
        seen.add(state)
        for i, (a, left) in enumerate(items):
            for j, (b, right) in enumerate(items):
                if i == j:
                    continue
                others = [item for k, item in enumerate(items) if k not in (i, j)]
                combined = [(a - b, f"({left} - {right})")]
                if i < j:
                    combined += [(a + b, f"({left} + {right})"), (a * b, f"({left} * {right})")]
                if b:
                    combined.append((a / b, f"({left} / {right})"))
                for item in combined:
                    found = search([*others, item])
                    if found is not None:
                        return found
        return None

    found = search([(Fraction(number), str(number)) for number in numbers])
    return found[1:-1] if found is not None and found.startswith("(") else found


def reference_response(ground_truth: str) -> str | None:
    """What a perfect model would answer; None if the ground truth is not a puzzle or the puzzle has no solution."""
    try:
        numbers, target = puzzle_of(ground_truth)
    except ValueError:
        return None
    answer = solution(numbers, target)
    return None if answer is None else f"I know this one. </think> <answer> {answer} </answer>"
