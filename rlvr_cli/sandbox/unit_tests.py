"""Runs another program's unit tests; itself a program that runs in the sandbox, and nowhere else.

Enters: a program and the inputs or expressions of its tests, as arguments. Leaves: what the program makes of them, without a verdict:
the right answers are not here, where the program could read them. `graders.python` appends a call of one of the functions, and
gives its arguments beside it.
"""

import atexit
import gc
import io
import os
import sys
import threading
import weakref
from contextlib import suppress
from types import CodeType
from typing import Any

Result = dict[str, str]  # {"output": ...}, {"value": a literal} or {"error": the name of an exception}


MAX_PRINTED_BYTES = 8 << 20  # by one run
_CHUNK = 1 << 16
_PAUSE = 0.001  # seconds


class OutputTooLarge(Exception):
    """A run has printed more than it may."""


class _Printed:
    """What one run writes to file descriptor 1: a pipe, which a thread empties."""

    def __init__(self) -> None:
        self._bytes, self._ended = bytearray(), threading.Event()
        self._read, write = os.pipe()
        os.set_blocking(self._read, False)
        os.dup2(write, 1)
        os.close(write)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        """Empty the pipe now and then: a thread that is woken by each write would slow the program down."""
        try:
            while len(self._bytes) <= MAX_PRINTED_BYTES and not self._ended.wait(_PAUSE):
                self._empty()
            self._empty()
        finally:
            os.close(self._read)  # who goes on writing gets a BrokenPipeError

    def _empty(self) -> None:
        with suppress(BlockingIOError):
            while len(self._bytes) <= MAX_PRINTED_BYTES and (chunk := os.read(self._read, _CHUNK)):
                self._bytes += chunk

    def stream(self) -> io.TextIOWrapper:
        return open(1, "w", encoding="utf-8", errors="replace", closefd=False)

    def end(self) -> str:
        """All that was written until now; what still has the pipe open is not waited for."""
        self._ended.set()
        self._thread.join()
        if len(self._bytes) > MAX_PRINTED_BYTES:
            raise OutputTooLarge
        return self._bytes.decode("utf-8", "replace")


def outputs(program: str, inputs: list[str]) -> list[Result]:
    """Run the program once for each standard input, as a script, and return its standard output."""
    code = compile(program, "program.py", "exec", dont_inherit=True)
    return [_run_script(code, text) for text in inputs]


def _run_script(code: CodeType, text: str) -> Result:
    """One run: what it wrote to standard output until its end, or the error that ended it."""
    threading.stack_size(0)  # the last run may have set it
    real, kept = (sys.stdin, sys.stdout, sys.__stdin__, sys.__stdout__), os.dup(1)
    printed = _Printed()
    sys.stdin = sys.__stdin__ = _feed(text)
    sys.stdout = sys.__stdout__ = printed.stream()
    names, error = {"__name__": "__main__"}, None
    try:
        exec(code, names)  # what this file is for; it runs in the sandbox alone
    except SystemExit:
        pass
    except Exception as raised:  # whatever the program raises is its result
        error = type(raised).__name__
    finally:
        _end(names)
        sys.stdin, sys.stdout, sys.__stdin__, sys.__stdout__ = real
        gc.collect()  # files that the program has left open are written
        gc.freeze()  # what is left now would cost the next run time
        for number in (0, 1):  # the program may have closed them
            os.dup2(kept, number)
        os.close(kept)
    try:
        output = printed.end()
    except OutputTooLarge as raised:  # its program got another error, or none
        error = type(raised).__name__
    return {"output": output} if error is None else {"error": error}


def _end(names: dict[str, Any]) -> None:
    """End a script as its interpreter would: its threads, what it registered for the end, its streams and its names."""
    _wait_for_threads()
    atexit._run_exitfuncs()
    finalize: Any = weakref.finalize
    finalize._shutdown = finalize._registered_with_atexit = False  # for the next run
    for stream in (sys.stdout, sys.__stdout__):
        with suppress(BaseException):  # the program may have closed or replaced it
            if stream is not None:
                stream.flush()
    names.clear()


def _wait_for_threads() -> None:
    """Wait until the script's threads have ended, and what it has submitted to pools of threads is done."""
    while True:
        pools: Any = sys.modules.get("concurrent.futures.thread")
        workers = [t for t in getattr(pools, "_threads_queues", ()) if t.is_alive()]
        others = [t for t in threading.enumerate() if not t.daemon and t not in (threading.main_thread(), *workers)]
        if others:
            others[0].join()
        elif workers:
            pools._python_exit()
            pools._shutdown = False  # for the next run
        else:
            return


def values(program: str, between: list[str], expressions: list[str]) -> list[Result]:
    """Run the program, then the tests in their order, and return each expression's value.

    Args:
        between: the statements before each expression, and those after the last one.
    """
    names: dict[str, Any] = {"__name__": "program"}

    def run(statements: str, file: str) -> None:
        # Statements of a policy or a dataset: this file runs in the sandbox alone.
        exec(compile(statements, file, "exec", dont_inherit=True), names)

    run(program, "program.py")
    results: list[Result] = []
    *before, after = between
    for statements, expression in zip(before, expressions, strict=True):
        run(statements, "tests.py")
        try:
            results.append({"value": _literal(eval(compile(expression, "tests.py", "eval", dont_inherit=True), names))})
        except Exception as raised:  # whatever the expression raises is its result
            results.append({"error": type(raised).__name__})
    run(after, "tests.py")
    return results


def _feed(text: str) -> io.TextIOWrapper:
    """Standard input with this text, also for a program that reads file descriptor 0 itself."""
    read, write = os.pipe()
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
