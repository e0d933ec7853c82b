"""How a verdict came about, layer by layer, for `rlvr grade --explain`.

Enters: a response or a bare answer, a ground truth, and the verdict that a grader gave on them. Leaves: tables: the verdict,
and the steps in the order in which the grader takes them, up to the one that decides. The steps are those of the graders
themselves (`equivalence.comparisons`), read again, not a copy of their rules.
"""

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice

from rlvr_cli.graders import GRADERS, gsm8k
from rlvr_cli.graders.answers.equivalence import Comparison, comparisons, readable
from rlvr_cli.graders.answers.extraction import CLOSE_TAG, OPEN_TAG, candidates, last_boxed, tagged_answer, unboxed
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
from rlvr_cli.graders.r1_zero import is_formatted
from rlvr_cli.types import FormatRule, Grade, Table

Step = tuple[str, str | None, str | None, str]  # what is done, the answer's side, the truth's side, the result

_MOST_READINGS = 24  # pairs of readings that are listed


def response_of(text: str, grader: str) -> str:
    """The text as a response: a bare answer gets the format that the grader asks for; a response stays as it is."""
    if grader in ("r1_zero", "countdown", "reasoning_gym") and "</think>" not in text and "<answer" not in text:
        return f" </think> {OPEN_TAG} {text} {CLOSE_TAG}"
    if grader == "python" and "```" not in text and "<answer" not in text:
        return f"```python\n{text}\n```"
    if grader == "question_only" and "\\boxed" not in text:
        return f"\\boxed{{{text}}}"
    return text


def explained(verdict: Grade, response: str, ground_truth: str, *, grader: str, format_rule: FormatRule) -> list[Table]:
    """The tables of a verdict."""
    rows = list(_steps(verdict, response, ground_truth, grader=grader, format_rule=format_rule))
    fields = ("format_reward", "answer_reward", "reward", "category", "extracted_answer", "failure_kind", "error")
    fields += ("error_detail",) if verdict.error else ()
    return [
        Table(("step", "answer", "truth", "result"), rows, title="steps"),
        Table(("verdict", "value"), [("grader", grader), *((f, getattr(verdict, f)) for f in fields)], title="verdict"),
    ]


def _steps(verdict: Grade, response: str, ground_truth: str, *, grader: str, format_rule: FormatRule) -> Iterator[Step]:
    truth = unboxed(ground_truth) or ground_truth
    match grader:
        case "r1_zero":
            if not is_formatted(response, format_rule):
                yield "format", response, None, f"no </think> {OPEN_TAG} ... {CLOSE_TAG} ({format_rule} rule)"
                return
            yield "format", response, None, f"</think> {OPEN_TAG} ... {CLOSE_TAG} is there"
            written = tagged_answer(response) or ""
            yield from _compared(written, unboxed(written), truth, how="after the last <answer>")
        case "question_only":
            yield from _compared(response, last_boxed(response), truth, how="the last closed \\boxed{}")
        case "math_verify":
            found = next(iter(candidates(response)), None)
            yield from _compared(response, found, truth, how="tags, box, ####, `answer is` or the last line")
            if found is not None and (verdict.reward or 0) <= 0.5 and readable(found) and readable(truth):
                yield "L3 Math-Verify", found, truth, "not asked: both can be read without it"
            elif found is not None and not any(step.same for step in comparisons(found, truth)):
                yield "L3 Math-Verify", found, truth, _said((verdict.reward or 0) > 0.5)
        case "gsm8k":
            answer, number = gsm8k.final_number(response), gsm8k.final_number(ground_truth)
            yield "extracted", answer, number, "the last number in the line after the last ####, else of all"
            if answer is not None and number is not None:
                values = gsm8k.value_of(answer), gsm8k.value_of(number)
                yield "number", str(values[0]), str(values[1]), _said(values[0] == values[1])
        case _:
            known = "its own rules" if grader in GRADERS else "a judge" if verdict.judgement else "your function"
            result = verdict.error or f"reward {verdict.reward:g}"
            if verdict.judgement:
                result += f": {verdict.judgement.reply}"
            yield f"graded by {known}", response, ground_truth, result


def _compared(written: str, answer: str | None, truth: str, *, how: str) -> Iterator[Step]:
    if answer is None:
        yield "extracted", written, None, f"nothing: {how}"
        return
    yield "extracted", answer.strip(), truth.strip(), how
    for step in islice(comparisons(answer, truth), _MOST_READINGS):
        yield step.layer, _shown(step.answer), _shown(step.truth), _said(step.same) + _kinds(step)
        if step.same:
            return


def _said(same: bool) -> str:
    return "the same: this decides" if same else "not the same"


def _kinds(step: Comparison) -> str:
    kinds = [type(side).__name__.lower() for side in (step.answer, step.truth)]
    return "" if step.same or kinds[0] == kinds[1] else f" ({kinds[0]}, {kinds[1]})"


def _number(value: Fraction | complex) -> str:
    if isinstance(value, Fraction):
        digits = round(max(value.numerator.bit_length(), value.denominator.bit_length()) * math.log10(2))
        return str(value) if digits < 40 else f"a number of about {digits} digits"
    return f"{value.real:.12g}" if abs(value.imag) <= 1e-12 * abs(value) else f"{value:.12g}"


def _shown(side: Node | str | None) -> str | None:
    """One side of a comparison: a text as it is, an object as it was read."""
    match side:
        case None | str():
            return side
        case Value(formula=formula):
            number = None if formula.names else formula.value(0)
            written = "" if number is None else _number(number)
            return formula.key if written in ("", formula.key.replace(" ", "")) else f"{formula.key} = {written}"
        case Quantity(value=value, unit=unit):
            return f"{_shown(value)} in {unit}"
        case Listing(items=items, alternatives=alternatives, together=together):
            joint = " or " if alternatives else " and " if together else "; "
            return "in any order: " + joint.join(str(_shown(item)) for item in items)
        case Group(brackets=brackets, items=items):
            return brackets[0] + ", ".join(str(_shown(item)) for item in items) + brackets[1]
        case Sets(operation=operation, parts=parts):
            return f" {operation} ".join(str(_shown(part)) for part in parts)
        case Relation(sides=sides, operations=operations):
            shown = [str(_shown(s) or "") for s in sides]
            return shown[0] + "".join(f" {o} {s}" for o, s in zip(operations, shown[1:], strict=True))
        case Matrix(rows=rows):
            return "matrix " + "; ".join(", ".join(str(_shown(cell)) for cell in row) for row in rows)
        case Ratio(parts=parts):
            return "ratio " + " : ".join(str(_shown(part)) for part in parts)
        case Numeral(digits=digits, base=base):
            return f"{digits} in base {base}"
        case Words(text=text):
            return f"words: {text}"
        case Opaque(key=key):
            return f"unknown notation: {key}"
