r"""The grader of reasoning-gym's questions: the score that the package gives the answer, from 0 to 1.

Enters: a response, and a ground truth in JSON, `{"family": ..., "config": {...}, "entry": {...}}`: all that the scorer needs, so that
a stored row can be graded on any machine that has the package. Leaves: a `Grade` whose answer reward is the score. The answer is
what r1_zero reads where the prompt asks for `<answer>` tags, else the content of the last closed ``\boxed{}``.
"""

import ast
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import MISSING
from datetime import date, time
from enum import Enum
from functools import lru_cache
from typing import Any

from rlvr_cli.errors import missing_extra
from rlvr_cli.graders.answers.extraction import OPEN_TAG, last_boxed, tagged_answer, unboxed
from rlvr_cli.graders.r1_zero import is_formatted, unformatted_failure_kind
from rlvr_cli.types import FormatRule, Grade

# Families whose scorers give the answer to Python's eval, which would run any code in it.
EVALUATED_LISTS = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
EVALUATED_FORMULAS = {
    "countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration",
}  # fmt: skip
_LIST_NODES = (ast.List, ast.Tuple, ast.Constant, ast.Name, ast.UnaryOp, ast.unaryop, ast.expr_context)
_FORMULA_NODES = (ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Constant, ast.operator, ast.unaryop, ast.expr_context)
_FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "Abs", "Integral",
}  # fmt: skip
# Of entries without the one right answer.
_EXAMPLE_ANSWERS = ("possible_answer", "example_answer", "example_correct_answer")


def load() -> Any:
    """Import the package. Raises RlvrError if it is not installed."""
    try:
        import reasoning_gym
    except ImportError:
        raise missing_extra("reasoning-gym", "reasoning-gym") from None
    return reasoning_gym


def families() -> list[str]:
    """The names of all families. Raises RlvrError if the package is not installed."""
    return sorted(load().factory.DATASETS)


def option_defaults(family: str) -> dict[str, Any]:
    """The options of a family with their defaults; None where there is none. Size and seed are no options here."""
    options = dataclasses.fields(load().factory.DATASETS[family][1])
    made = {o.name: o.default if o.default_factory is MISSING else o.default_factory() for o in options}
    return {
        name: None if default is MISSING else default for name, default in made.items() if name not in ("size", "seed")
    }


def _typed(value: Any, default: Any) -> Any:
    """A value of JSON as the type of an option's default: a date, a time, a choice, or a group of options."""
    match default:
        case date() | time():
            return type(default).fromisoformat(value)
        case Enum():
            return type(default)(value)
        case _ if dataclasses.is_dataclass(default):
            return type(default)(**value)  # pyright: ignore[reportCallIssue]
    return value


def open_family(family: str, config: Mapping[str, Any]) -> Any:
    """Return the package's dataset of a family, which makes and scores its questions.

    Args:
        config: by the names of the family's configuration, as JSON has the values.

    Raises:
        RlvrError: the package is not installed.
        Exception: of the package, such as AssertionError, for a configuration that it refuses.
    """
    package = load()
    values = _typed_config(family, config)
    if family == "composite":
        from reasoning_gym.composite import DatasetSpec

        parts = [{"weight": 1, "config": {}} | part for part in values.get("datasets", [])]
        values["datasets"] = [
            DatasetSpec(**part | {"config": _typed_config(part["name"], part["config"])}) for part in parts
        ]
    return package.create_dataset(family, **values)


def _typed_config(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    defaults = option_defaults(family) if family in families() else {}
    return {name: _typed(value, defaults.get(name)) for name, value in config.items()}


@lru_cache(maxsize=32)
def _scorer(family: str, config: str) -> Any:
    return open_family(family, json.loads(config))


def grade(
    response: str,
    ground_truth: str,
    *,
    format_rule: FormatRule = "literal",
    example: Mapping[str, Any] | None = None,
) -> Grade:
    """The verdict on one response.

    Raises:
        ValueError: the ground truth is not an entry of reasoning-gym, or its score is no number from 0 to 1.
        Exception: whatever the package's scorer raises, also on the right answer.
    """
    family, config, entry = entry_of(ground_truth)
    answer = _boxed(response, (example or {}).get("prompt"))
    if answer is None:
        if not is_formatted(response, format_rule):
            kind = unformatted_failure_kind(response, lambda text: text == entry["answer"])
            return Grade(0.0, 0.0, 0.0, None, kind)
        written = tagged_answer(response) or ""
        answer = unboxed(written) or written
    answer = answer.strip()
    if not answer:
        return Grade(1.0, 0.0, 0.0, "", "empty")
    of = entry["metadata"]["source_dataset"] if family == "composite" else family
    scored = answer if is_harmless(of, answer) else ""
    scorer = _scorer(family, json.dumps(config))
    try:
        score = float(scorer.score_answer(scored, entry))
    except Exception:  # whatever the scorer raises for an answer that it cannot read
        scorer.score_answer(entry["answer"] or "", entry)  # for the right one, too: then it is the scorer's failure
        return Grade(1.0, 0.0, 0.0, answer, "unparsed_answer")
    if not 0.0 <= score <= 1.0:
        raise ValueError(f"the score of reasoning-gym is {score}, which is not from 0 to 1")
    kind = None if score > 0.5 else "multiple_answers" if response.count(OPEN_TAG) > 1 else "wrong_answer"
    return Grade(1.0, score, score, answer, kind)


def _boxed(response: str, prompt: str | None) -> str | None:
    """The content of the last box of a response without tags, unless the prompt asks for tags."""
    return None if OPEN_TAG in response or OPEN_TAG in (prompt or "") else last_boxed(response)


def is_harmless(family: str, answer: str) -> bool:
    """Whether the family's scorer runs no code of the answer's.

    Where the scorer evaluates the answer, this holds for a list of numbers, texts and names, for a text that Python cannot read, and
    for a formula of numbers, single letters and known functions. Any other answer is scored as an empty one.
    """
    if family not in EVALUATED_LISTS | EVALUATED_FORMULAS:
        return True
    try:
        nodes = list(ast.walk(ast.parse(answer.strip(), mode="eval").body))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return family in EVALUATED_LISTS  # eval cannot read it, either; SymPy may: it rewrites a formula before
    if family in EVALUATED_LISTS:
        return all(isinstance(node, _LIST_NODES) for node in nodes)
    return all(isinstance(node, _FORMULA_NODES) and _is_plain(node) for node in nodes)


def _is_plain(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=value):
            return type(value) in (int, float)
        case ast.Name(id=name):
            return len(name) == 1 or name == "pi" or name in _FUNCTIONS
        case ast.Call(func=function, keywords=keywords):
            return isinstance(function, ast.Name) and function.id in _FUNCTIONS and not keywords
    return True


# Entries as ground truths


def ground_truth_of(family: str, config: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """Write an entry of a family as a ground truth.

    Args:
        config: the options given to the family, without size and seed.

    Raises:
        TypeError: the entry holds an object that JSON cannot hold without a loss.
    """
    return json.dumps({"family": family, "config": dict(config), "entry": _written(dict(entry))})


def entry_of(ground_truth: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The family, its options, and the entry of a ground truth. Raises ValueError if it is none."""
    try:
        truth = json.loads(ground_truth)
        family, config, entry = str(truth["family"]), dict(truth["config"]), _read(truth["entry"])
        _ = entry["answer"], entry["metadata"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f'a ground truth of reasoning-gym is {{"family": ..., "config": ..., "entry": ...}}, not {ground_truth[:80]!r}'
        ) from error
    return family, config, entry


def _written(value: Any) -> Any:
    """A value in JSON's types. Scorers tell tuples from lists, and use whole numbers as keys: these are marked."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_written(item) for item in value]
        case tuple():
            return {"__tuple__": [_written(item) for item in value]}
        case dict() if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: _written(item) for key, item in value.items()}
        case dict():
            return {"__dict__": [[_written(key), _written(item)] for key, item in value.items()]}
    raise TypeError(f"an entry of reasoning-gym holds {type(value).__name__}, which cannot be stored")


def _read(value: Any) -> Any:
    match value:
        case list():
            return [_read(item) for item in value]
        case {"__tuple__": items}:
            return tuple(_read(item) for item in items)
        case {"__dict__": items}:
            return {_read(key): _read(item) for key, item in items}
        case dict():
            return {key: _read(item) for key, item in value.items()}
    return value


def reads(ground_truth: str) -> bool:
    """Whether it is an entry, also one without an answer of its own."""
    try:
        entry_of(ground_truth)
    except ValueError:
        return False
    return True


def reference_response(ground_truth: str) -> str | None:
    """What a perfect model would answer; None where the entry has no right answer, as those of boxnet and rush_hour."""
    try:
        _, _, entry = entry_of(ground_truth)
    except ValueError:
        return None
    known = [entry["answer"], *(entry["metadata"].get(name) for name in _EXAMPLE_ANSWERS)]
    answer = next((value for value in known if value is not None), None)
    if answer is None:
        return None
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return f"I know this one. </think> {OPEN_TAG} {text} </answer>"
