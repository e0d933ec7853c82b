"""Find, check and load a user's own function, given as `path/to/file.py:function`.

Enters: the specification and the role of the function. Leaves: the function. The file is the user's own code and runs
with the user's permissions; `find` reads it without running it, `load` runs it.
"""

import ast
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr_cli.errors import RlvrError


@dataclass(frozen=True)
class Role:
    """What a user's function is for: how errors describe it, and the signature it must have."""

    noun: str  # "grader"
    num_arguments: int | None  # None: any
    signature: str  # "(response: str, ground_truth: str) -> dict[str, float]"
    kind: str = "function"  # or "class"
    optional_parameter: str = ""  # name of an optional extra parameter, passed by keyword


def is_file_spec(spec: str) -> bool:
    """Whether a specification refers to a file rather than to a built-in name."""
    return ".py:" in spec or spec.endswith(".py")


def find(spec: str, role: Role) -> tuple[Path, str]:
    """Return the file and the function's name, after checking the source without running it.

    Raises:
        RlvrError: there is no such file, it is not Python, it defines no such function, or the signature does not fit
            the role.
    """
    path_text, _, name = spec.rpartition(":")
    if not path_text or not name.isidentifier():
        raise RlvrError(f"{spec} names no {role.kind}.", f"Write path/to/file.py:{role.kind}.")
    path = Path(path_text)
    if not path.is_file():
        raise RlvrError(f"There is no {role.noun} file {path}.", f"Relative paths start at {Path.cwd()}.")
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise RlvrError(f"{path}{f':{line}' if line else ''} is not Python: {error}", "Correct the file.") from error
    defined = set(_top_level_names(tree))
    if name not in defined and "*" not in defined:
        sought = ast.ClassDef if role.kind == "class" else ast.FunctionDef
        others = sorted(node.name for node in tree.body if isinstance(node, sought))
        raise RlvrError(
            f"{path} defines no {role.kind} {name}.", f"It defines: {', '.join(others) or f'no {role.kind} at all'}."
        )
    for node in tree.body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name == name:
            raise RlvrError(
                f"{path}:{node.lineno}: the {role.noun} {name} is async, and it is called without await.",
                "Write def; asyncio.run(...) in it waits for what is async.",
            )
        if isinstance(node, ast.FunctionDef) and node.name == name:
            _check_signature(node, path, role)
    return path, name


def load(spec: str, role: Role) -> Callable[..., Any]:
    """Run the file and return its function.

    Raises:
        RlvrError: see `find`; or running the file raised an exception, or the function is a generator.
    """
    path, name = find(spec, role)
    module_spec = importlib.util.spec_from_file_location(f"rlvr_user_{role.noun}_{path.stem}", path.resolve())
    assert module_spec is not None, path
    assert module_spec.loader is not None, path
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and typing look the module up
    directory = str(path.resolve().parent)
    if directory not in sys.path:
        sys.path.append(directory)  # last on the path: modules beside the file can be imported but shadow nothing
    try:
        module_spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's own code raises
        raise RlvrError(
            f"{path} could not be loaded: {type(error).__name__}: {text_of(error)}", "Correct the file."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise RlvrError(f"{name} in {path} is not a {role.kind}.", f"Write path/to/file.py:{role.kind}.")
    if inspect.isgeneratorfunction(function):
        raise RlvrError(
            f"{location(spec, function)}: the {role.noun} {name} is a generator, and its result is taken as a whole.",
            "Write return in place of yield.",
        )
    if role.num_arguments is None:
        return function
    with suppress(ValueError):  # some C functions have no signature
        extra = {role.optional_parameter: None} if has_optional_parameter(function, role) else {}
        try:
            inspect.signature(function).bind(*[None] * role.num_arguments, **extra)
        except TypeError:
            raise _uncallable(f"{path}: {name}", role) from None
    return function


def has_optional_parameter(function: Callable[..., Any], role: Role) -> bool:
    """Whether a function has the role's optional parameter."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some C functions have no signature
        return False
    return any(
        p.name == role.optional_parameter
        and (p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and place >= (role.num_arguments or 0)))
        for place, p in enumerate(parameters)
    )


def sha256(spec: str) -> str:
    """Return the SHA-256 (hex) of the file in a specification; modules that it imports are not included."""
    return hashlib.sha256(Path(spec.rpartition(":")[0]).read_bytes()).hexdigest()


def location(spec: str, function: Callable[..., Any], *, error: BaseException | None = None) -> str:
    """Return FILE:LINE of the error if it was raised in the file, else of the function's definition, else FILE."""
    path = Path(spec.rpartition(":")[0])
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    lines = [frame.lineno for frame in frames if frame.filename == str(path.resolve())]
    code = getattr(function, "__code__", None)
    if not lines and code is not None and code.co_filename == str(path.resolve()):
        lines = [code.co_firstlineno]
    return f"{path}:{lines[-1]}" if lines else str(path)


def text_of(error: BaseException) -> str:
    """Return the text of an exception, which may be the user's own code: a sentence about it where that raises."""
    try:
        return str(error).strip()
    except KeyboardInterrupt:
        raise
    except BaseException:
        return "its text cannot be read"


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


def _check_signature(node: ast.FunctionDef, path: Path, role: Role) -> None:
    arguments, wanted = node.args, role.num_arguments
    if wanted is None:
        return
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[wanted : max(len(positional) - len(arguments.defaults), wanted)]
    required += [a for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None]
    too_many = [a for a in required if a.arg != role.optional_parameter or a in arguments.posonlyargs]
    if (len(positional) < wanted and arguments.vararg is None) or too_many:
        raise _uncallable(f"{path}:{node.lineno}: {node.name}", role)


def _uncallable(name: str, role: Role) -> RlvrError:
    assert role.num_arguments is not None
    count = {0: "no arguments", 1: "one argument", 2: "two arguments"}.get(
        role.num_arguments, f"{role.num_arguments} arguments"
    )
    article = "An" if role.noun[0] in "aeiou" else "A"
    has = "is a" if role.kind == "class" else "has the signature"
    more = f" It may also take a parameter {role.optional_parameter}." if role.optional_parameter else ""
    return RlvrError(f"{name} cannot be called with {count}.", f"{article} {role.noun} {has} {role.signature}.{more}")
