"""A user's own grader: `path/to/file.py:function`, called as `function(response, ground_truth) -> dict[str, float]`.

A function with one more parameter, `example`, gets the example that is answered as well: a dict of its fields, `id`, `question`,
`prompt`, `ground_truth`, `response` and `solution` (these two: of its trace). What is not known is None: a finished run that is
graded again holds no question, only the prompt that was made of it.

Enters: the specification. Leaves: a grading function. The file is the user's own code and runs with the user's rights;
`check` reads it without running it, `load` runs it.
"""

import ast
import importlib.util
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.types import Example, Grade


class BadGrade(TypeError):
    """The user's function returned something that is not a dictionary of finite rewards."""


def is_custom(spec: str) -> bool:
    """Whether a specification names a file and a function."""
    return ".py:" in spec or spec.endswith(".py")


def check(spec: str) -> tuple[Path, str]:
    """The file and the function's name, after a look at the source that runs nothing.

    Raises:
        RlvrError: there is no such file, it is not Python, or it defines no such function.
    """
    path_text, _, name = spec.rpartition(":")
    if not path_text or not name.isidentifier():
        raise RlvrError(f"{spec} names no function.", "Write path/to/file.py:function.")
    path = Path(path_text)
    if not path.is_file():
        raise RlvrError(f"There is no grader file {path}.", f"It was looked for in {Path.cwd()}.")
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise RlvrError(f"{path}{f':{line}' if line else ''} is not Python: {error}", "Correct the file.") from error
    defined = set(_top_level_names(tree))
    if name not in defined and "*" not in defined:
        functions = sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
        raise RlvrError(
            f"{path} defines no function {name}.", f"It defines: {', '.join(functions) or 'no function at all'}."
        )
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            _check_signature(node, path)
    return path, name


def _top_level_names(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
    return names


def _check_signature(node: ast.FunctionDef, path: Path) -> None:
    arguments = node.args
    by_position = [*arguments.posonlyargs, *arguments.args]
    required = by_position[2 : max(len(by_position) - len(arguments.defaults), 2)]
    required += [a for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None]
    too_many = [a for a in required if a.arg != "example" or a in arguments.posonlyargs]
    if (len(by_position) < 2 and arguments.vararg is None) or too_many:
        raise _uncallable(f"{path}:{node.lineno}: {node.name}")


def _uncallable(name: str) -> RlvrError:
    return RlvrError(
        f"{name} cannot be called with two arguments, nor with these and an example.",
        "A grader has the signature (response: str, ground_truth: str) -> dict[str, float], or a third parameter: example.",
    )


def wants_example(function: Callable[..., Any]) -> bool:
    """Whether a function has, after two parameters, one called `example`."""
    try:
        parameters = list(signature(function).parameters.values())
    except (TypeError, ValueError):  # some of C have no signature
        return False
    return any(
        p.name == "example" and (p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and place >= 2))
        for place, p in enumerate(parameters)
    )


def example_of_truth(ground_truth: str) -> dict[str, Any]:
    """The fields of an example of which nothing else is known."""
    return dict.fromkeys(field.name for field in fields(Example)) | {"ground_truth": ground_truth}


def load(spec: str) -> Callable[[str, str], Grade]:
    """Run the file and return its function as a grader.

    Raises:
        RlvrError: see `check`; or the file raised an exception when it was run.
    """
    path, name = check(spec)
    module_spec = importlib.util.spec_from_file_location(f"rlvr_user_grader_{path.stem}", path.resolve())
    assert module_spec is not None, path
    assert module_spec.loader is not None, path
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and typing look the module up
    directory = str(path.resolve().parent)
    if directory not in sys.path:
        sys.path.append(directory)  # what lies beside the file can be imported, but shadows nothing
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise RlvrError(f"{path} could not be loaded: {type(error).__name__}: {error}", "Correct the file.") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise RlvrError(f"{name} in {path} is not a function.", "Write path/to/file.py:function.")

    asks = wants_example(function)
    with suppress(ValueError):  # of C, without a signature
        try:
            signature(function).bind("", "", **({"example": {}} if asks else {}))
        except TypeError:
            raise _uncallable(f"{name} in {path}") from None

    def grade(response: str, ground_truth: str) -> Grade:
        return grade_of(function(response, ground_truth))

    def grade_with_example(response: str, ground_truth: str, example: dict[str, Any] | None = None) -> Grade:
        return grade_of(function(response, ground_truth, example=example or example_of_truth(ground_truth)))

    return grade_with_example if asks else grade


def grade_of(returned: Any) -> Grade:
    """A user's dictionary as a `Grade`.

    `reward` is the reward; without it `answer_reward` is. A missing `answer_reward` is the reward, a missing
    `format_reward` is 1: a grader that has no notion of a format never fails it. The strings `failure_kind` and
    `extracted_answer` are kept.

    Raises:
        BadGrade: it is no dictionary, has no reward, or a reward that is not a finite number.
    """
    if not isinstance(returned, dict):
        raise BadGrade(f"a grader returns a dictionary, not {type(returned).__name__}")
    rewards: dict[str, float] = {}
    for key in ("format_reward", "answer_reward", "reward"):
        if returned.get(key) is None:
            continue
        try:
            rewards[key] = float(returned[key])
        except (TypeError, ValueError) as error:
            raise BadGrade(f"{key} is {type(returned[key]).__name__}, not a number") from error
        if not math.isfinite(rewards[key]):
            raise BadGrade(f"{key} is {rewards[key]}")
    if "reward" not in rewards and "answer_reward" not in rewards:
        raise BadGrade("neither reward nor answer_reward in " + ", ".join(map(str, list(returned)[:8])))
    reward = rewards.get("reward", rewards.get("answer_reward", 0.0))
    answer_reward = rewards.get("answer_reward", reward)
    format_reward = rewards.get("format_reward", 1.0)
    kind, extracted = returned.get("failure_kind"), returned.get("extracted_answer")
    if reward > 0.5:
        kind = None
    elif not isinstance(kind, str):
        kind = "wrong_answer" if format_reward > 0.5 else "malformed_tags"
    return Grade(format_reward, answer_reward, reward, extracted[:1_000] if isinstance(extracted, str) else None, kind)
