"""Runs another program's unit tests; itself a program that runs in the sandbox, and nowhere else.

Enters: a program and the inputs or expressions of its tests, as arguments. Leaves: what the program makes of them, without a verdict:
the right answers are not here, where the program could read them. `graders.python` appends a call of one of the functions, and
gives its arguments beside it.
"""

import io
import os
import sys
import threading
from typing import Any

Result = dict[str, str]  # {"output": ...}, {"value": a literal} or {"error": the name of an exception}


MAX_PRINTED_BYTES = 8 << 20  # by one run


class OutputTooLarge(Exception):
    """A run has printed more than it may."""


class _Printed(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MAX_PRINTED_BYTES:
            raise OutputTooLarge
        return super().write(data)


def outputs(program: str, inputs: list[str]) -> list[Result]:
    """Run the program once for each standard input, as a script, and return its standard output."""
    code, results = compile(program, "program.py", "exec", dont_inherit=True), list[Result]()
    real = sys.stdin, sys.stdout
    for text in inputs:
        buffer = _Printed()
        printed = io.TextIOWrapper(buffer, encoding="utf-8", errors="replace", write_through=True)
        sys.stdin, sys.stdout = _feed(text), printed
        error = None
        try:
            exec(code, {"__name__": "__main__"})  # what this file is for; it runs in the sandbox alone
        except SystemExit:
            pass
        except Exception as raised:  # whatever the program raises is its result
            error = type(raised).__name__
        finally:
            sys.stdin, sys.stdout = real
        output = buffer.getvalue().decode("utf-8", "replace")
        results.append({"output": output} if error is None else {"error": error})
    return results


def values(program: str, setup: str, expressions: list[str]) -> list[Result]:
    """Run the program, then the statements of the tests that are no assertions, and return each expression's value."""
    names: dict[str, Any] = {"__name__": "program"}
    # Programs are run here: this file runs in the sandbox alone.
    exec(compile(program, "program.py", "exec", dont_inherit=True), names)
    exec(compile(setup, "tests.py", "exec", dont_inherit=True), names)
    results: list[Result] = []
    for expression in expressions:
        try:
            results.append({"value": _literal(eval(compile(expression, "tests.py", "eval", dont_inherit=True), names))})
        except Exception as raised:  # whatever the expression raises is its result
            results.append({"error": type(raised).__name__})
    return results


def _feed(text: str) -> io.TextIOWrapper:
    """Standard input with this text, also for a program that reads file descriptor 0 itself."""
    read, write = os.pipe()
    if read != 0:  # the last run may have closed 0
        os.dup2(read, 0)
        os.close(read)

    def feed() -> None:
        try:
            with open(write, "w", encoding="utf-8", errors="replace", newline="") as stream:
                stream.write(text)
        except OSError:  # the program has not read all of it
            return

    threading.Thread(target=feed, daemon=True).start()
    return open(0, encoding="utf-8", errors="replace", closefd=False)


def _literal(value: Any) -> str:
    """A value as a literal of Python: of the built-in type that it is or inherits from, or of a numpy scalar or array."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        value = value.tolist()
    if value is None or value is True or value is False:
        return repr(value)
    kind: Any = next((kind for kind in (int, float, complex, str, bytes) if isinstance(value, kind)), None)
    if kind is not None:
        return kind.__repr__(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in dict.items(value)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, list.__iter__(value))) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(_literal(item) + ", " for item in tuple.__iter__(value)) + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(map(_literal, value)) + "}" if value else "set()"
    raise TypeError(f"an object of type {type(value).__name__} is no literal")
