"""The grader of code: the program in the response passes its unit tests, in the sandbox.

Enters: a response, and unit tests as the ground truth. Leaves: a `Grade` with reward 1 if every test passes; the format reward says
whether there was a program. The program is the last fenced Python block after the thinking; where the response has `<answer>` tags, it
is the last block between them, or all that stands there.

The tests are one of:

- A JSON list of `{"input": ..., "output": ...}`. The program runs as a script once per test. Its standard output must be `output`, but for
  white space at the ends of lines and of the whole.
- Python: assertions and, beside them, other statements such as imports, all in their order. Of `assert EXPRESSION == LITERAL` the program's
  side is computed in the sandbox and compared here: what the program does cannot make a wrong value right. Any other assertion is
  computed beside the program as a whole, so that a program that looks for it can fake it.
"""

import ast
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rlvr_cli import sandbox
from rlvr_cli.graders.answers.extraction import last_code_block, tagged_answer, without_thinking
from rlvr_cli.sandbox.run import DEFAULT_LIMITS, Execution, Limits, Status, run_program
from rlvr_cli.sandbox.unit_tests import MAX_PRINTED_BYTES
from rlvr_cli.types import Grade

KINDS: dict[Status, str] = {
    "exception": "exception",
    "no_answer": "exception",  # it ended the interpreter
    "bad_answer": "exception",
    "timeout": "timeout",
    "cpu": "timeout",
    "memory": "memory",
    "output_too_large": "output_too_large",
}
_MEMORY_BYTES = (1 << 30) + (72 << 20)  # of which the thread that reads what a script prints takes an arena and a stack
_MAX_OUTPUT_BYTES = 32 << 20  # of the right outputs of all tests
_ANSWER_STEP = 16 << 20  # the program could read a finer limit, and guess a short output from its length
_LONGER = 400  # times: no value is written longer than an equal one; the worst is 1e308 as an int
_FORMS = 'a JSON list of {"input": ..., "output": ...}, or lines such as: assert f(2) == 4'


class ScriptTests(NamedTuple):
    """Tests of standard input and output."""

    inputs: list[str]
    outputs: list[str]


class AssertTests(NamedTuple):
    """Assertions. Where `compared`, the expression's value must equal the literal; else it must be true."""

    between: list[str]  # the other statements: those before each assertion, and those after the last
    expressions: list[str]
    compared: list[bool]
    literals: list[Any]


def grade(response: str, ground_truth: str, *, seconds: float = 4.0) -> Grade:
    """The verdict on one response.

    Args:
        seconds: for all tests together.

    Raises:
        ValueError: the ground truth is not unit tests.
    """
    tests = tests_of(ground_truth)
    program = program_of(response)
    if program is None or not program.strip():
        return Grade(0.0, 0.0, 0.0, None, "no_code" if response.strip() else "empty")
    if isinstance(tests, ScriptTests):  # the right answers stay here
        call, given = "outputs(program, inputs)", {"inputs": tests.inputs}
    else:
        call, given = (
            "values(program, between, expressions)",
            {"between": tests.between, "expressions": tests.expressions},
        )
    execution = run_program(
        f"{_runner()}\nresults = {call}\n",
        entry=("results",),
        given={"program": program, **given},
        limits=Limits(seconds=seconds, memory_bytes=_MEMORY_BYTES, output_bytes=_answer_bytes(tests)),
    )
    kind = failure(tests, execution)
    return Grade(1.0, float(kind is None), float(kind is None), program, kind)


def _answer_bytes(tests: ScriptTests | AssertTests) -> int:
    """How long the answer of all tests may be: of long right outputs, twice as long, with white space that does not count; in coarse steps."""
    right = len(json.dumps(tests.outputs)) if isinstance(tests, ScriptTests) else 0
    return DEFAULT_LIMITS.output_bytes + -(-2 * right // _ANSWER_STEP) * _ANSWER_STEP


def program_of(response: str) -> str | None:
    """The program in a response; None if there is none."""
    answer = tagged_answer(without_thinking(response))
    return last_code_block(response) if answer is None else last_code_block(answer) or answer.strip()


def failure(tests: ScriptTests | AssertTests, execution: Execution) -> str | None:
    """The failure kind of a program; None if it passes all tests."""
    if execution.status != "ok":
        return KINDS[execution.status]
    expected = tests.outputs if isinstance(tests, ScriptTests) else tests.expressions
    results = execution.value  # of the program's own making, perhaps
    if not isinstance(results, list) or len(results) != len(expected):
        return "exception"
    kinds = [_failure_of(tests, index, result) for index, result in enumerate(results)]
    return next(filter(None, kinds), None)


def _failure_of(tests: ScriptTests | AssertTests, index: int, result: Any) -> str | None:
    match result:
        case {"error": str(error)}:
            return {"MemoryError": "memory", "OutputTooLarge": "output_too_large"}.get(error, "exception")
        case {"output": str(output)} if isinstance(tests, ScriptTests):
            return None if _lines(output) == _lines(tests.outputs[index]) else "wrong_answer"
        case {"value": str(text)} if isinstance(tests, AssertTests):
            literal = tests.literals[index]
            try:
                if len(text) > _LONGER * (len(repr(literal)) + 1):  # the parser would take a kilobyte for each item
                    return "wrong_answer"
                value = ast.literal_eval(text)
                right = value == literal if tests.compared[index] else bool(value)
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                return "wrong_answer"
            return None if right else "wrong_answer"
    return "exception"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def tests_of(ground_truth: str) -> ScriptTests | AssertTests:
    """The unit tests of a ground truth. Raises ValueError if it is none."""
    try:
        cases = json.loads(ground_truth)
    except (ValueError, RecursionError):
        return _asserts_of(ground_truth)
    match cases:
        case [_, *_] if all(
            isinstance(c, dict) and _is_text(c.get("input")) and _is_text(c.get("output")) for c in cases
        ):
            return _script_tests([c["input"] for c in cases], [c["output"] for c in cases])
    raise ValueError(f"unit tests are {_FORMS}; not {ground_truth[:80]!r}")


def _script_tests(inputs: list[str], outputs: list[str]) -> ScriptTests:
    sizes = [len(output.encode("utf-8", "replace")) for output in outputs]
    if max(sizes) > MAX_PRINTED_BYTES or sum(sizes) > _MAX_OUTPUT_BYTES:
        raise ValueError(
            f"no program passes these tests: their longest output has {max(sizes):,} bytes, all have {sum(sizes):,}; a program may "
            f"print {MAX_PRINTED_BYTES >> 20} MiB in a test, and {_MAX_OUTPUT_BYTES >> 20} MiB in all"
        )
    return ScriptTests(inputs, outputs)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _asserts_of(ground_truth: str) -> AssertTests:
    try:
        statements = ast.parse(ground_truth).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"unit tests are {_FORMS}; not {ground_truth[:80]!r}: {error}") from error
    tests, others = AssertTests([], [], [], []), list[ast.stmt]()
    for statement in statements:
        if not isinstance(statement, ast.Assert):
            others.append(statement)
            continue
        expression, literal, compared = statement.test, None, False
        match expression:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]) if _is_literal(right):
                expression, literal, compared = left, ast.literal_eval(right), True
        tests.between.append(ast.unparse(ast.Module(others, [])))
        tests.expressions.append(ast.unparse(expression if compared else ast.Call(_BOOL, [expression], [])))
        tests.literals.append(literal)
        tests.compared.append(compared)
        others = []
    if not tests.expressions:
        raise ValueError(f"unit tests are {_FORMS}; there is no assert in {ground_truth[:80]!r}")
    tests.between.append(ast.unparse(ast.Module(others, [])))
    return tests


_BOOL = ast.Name("bool", ast.Load())


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


@cache
def _runner() -> str:
    return Path(sandbox.__file__).with_name("unit_tests.py").read_text(encoding="utf-8")


def reference_response(ground_truth: str) -> str | None:
    """A program that looks the right answers up; None where they cannot be read off the tests, which other statements may change."""
    try:
        tests = tests_of(ground_truth)
    except ValueError:
        return None
    if isinstance(tests, ScriptTests):
        table = dict(zip(tests.inputs, tests.outputs, strict=True))
        return _fenced(f"import sys\nprint({table!r}[sys.stdin.read()])")
    others = [statement for source in tests.between for statement in ast.parse(source).body]
    if not all(isinstance(statement, ast.Import | ast.ImportFrom) for statement in others):
        return None
    tables: dict[str, list[tuple[str, Any]]] = {}
    for expression, compared, literal in zip(tests.expressions, tests.compared, tests.literals, strict=True):
        call = ast.parse(expression, mode="eval").body
        if not compared or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.keywords:
            return None
        if not all(map(_is_literal, call.args)):
            return None
        arguments = tuple(ast.literal_eval(argument) for argument in call.args)
        tables.setdefault(call.func.id, []).append((repr(arguments), literal))
    return _fenced("\n".join(_lookup(name, answers) for name, answers in tables.items()))


def reads(ground_truth: str) -> bool:
    """Whether it is unit tests, also such as `reference_response` passes none of."""
    try:
        tests_of(ground_truth)
    except ValueError:
        return False
    return True


def _lookup(name: str, answers: Sequence[tuple[str, Any]]) -> str:
    return f"def {name}(*arguments):\n    return {dict(answers)!r}[repr(arguments)]"


def _fenced(program: str) -> str:
    return f"I know this one.\n```python\n{program}\n```"


def seconds_of(timeout: float) -> float:
    """The seconds of the program where a grade has `timeout` seconds: what is left starts and ends the sandbox."""
    return timeout - 1.0 if timeout > 2.0 else timeout / 2
