"""The process in which a program runs: `python child.py ANSWER PARENT`, started by `run.run_program` and by nothing else.

Enters, on standard input: one JSON object with the program, its entry and its limits. Leaves, on file descriptor ANSWER: one JSON line
with the layers that bind this process, written before the program's first line runs, then one JSON line with its answer or what went
wrong. Whatever the program does to this interpreter, such as to write that line itself, changes only its own answer.

The interpreter has no site and an empty environment. This file imports nothing of rlvr but its neighbor `layers`.
"""

import atexit
import builtins
import gc
import json
import os
import sys
from json import dumps
from types import ModuleType
from typing import Any

_CHARACTERS = 2_000  # of a message
_SCRIPT_ENDED = b'{"status": "ok", "value": null}'
_SPARE_BYTES = 4 << 20  # of memory, kept to say that there is no more
_SYSTEM_FILES = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/localtime", "/etc/ld.so.cache",
    "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom",
)  # fmt: skip


def main() -> None:
    """Bind this process, run the program, and say what came of it."""
    answer, parent = int(sys.argv[1]), int(sys.argv[2])
    setup = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv[:] = ["program.py"]
    builtins.exit = builtins.quit = sys.exit  # as site would have it
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import layers

    sys.path[:] = [*sys.path[1:], *setup["paths"]]
    spare = [bytearray(_SPARE_BYTES)]
    active = layers.apply(
        cpu_seconds=setup["cpu_seconds"],
        memory_bytes=setup["memory_bytes"],
        readable=[*sys.path, os.path.join(sys.base_prefix, "lib"), *_SYSTEM_FILES],
        parent=parent,
    )
    _write(answer, dumps(active).encode())
    if setup["require_sandbox"] and layers.missing(active):
        return
    is_script = setup["entry"] is None
    module = ModuleType("__main__" if is_script else "program")
    module.__dict__.update(setup["given"])
    said = _run(module, setup["program"], entry=setup["entry"], output_bytes=setup["output_bytes"], spare=spare)
    if is_script:
        _end_script(module)
    for stream in (sys.stdout, sys.__stdout__, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BaseException:  # the program may have replaced it
            continue
    _write(answer, said)
    os._exit(0)  # of a program that is no script, neither its threads nor what it registered for the end are waited for


def _end_script(module: ModuleType) -> None:
    """Wait for the script's threads, run what it registered for the end, and let its names go, so that files left open are written."""
    threading: Any = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()
    atexit._run_exitfuncs()
    module.__dict__.clear()
    gc.collect()


def _run(
    module: ModuleType, program: str, *, entry: list[str] | None, output_bytes: int, spare: list[bytearray]
) -> bytes:
    """Run the program in a module and return the line that says what came of it.

    Args:
        entry: None for a script.
        spare: memory that is given up when there is no other left.
    """
    sys.modules[module.__name__] = module
    try:
        # The sandbox's one program; `layers.apply` has bound this process.
        exec(compile(program, "<program>", "exec", dont_inherit=True), module.__dict__)
        if entry is None:
            return _SCRIPT_ENDED
        name = next((name for name in entry if name in module.__dict__), None)
        if name is None:
            return _line("no_answer", f"the program defines none of: {', '.join(entry)}" if entry else "no answer")
        value = module.__dict__[name]
        if callable(value):
            value = value()
    except MemoryError as error:
        spare.clear()
        error.__traceback__ = None  # it keeps the program's variables
        return _line("memory", "the program needs more memory than it may have")
    except SystemExit as error:
        if entry is not None:
            return _line("no_answer", "the program exited before it gave an answer")
        return _SCRIPT_ENDED if error.code in (None, 0) else _line("exception", _described(error))
    except BaseException as error:
        return _line("exception", _described(error))
    try:
        text = dumps(value, default=_plain)
    except MemoryError:
        spare.clear()
        return _line("memory", "the answer needs more memory than the program may have")
    except BaseException as error:
        return _line("bad_answer", f"the answer cannot be written as JSON: {_text(error)}")
    if len(text) > output_bytes:
        return _line("output_too_large", f"the answer has {len(text)} bytes as JSON; the limit is {output_bytes}")
    return b'{"status": "ok", "entry": ' + dumps(name).encode() + b', "value": ' + text.encode() + b"}"


def _plain(value: Any) -> Any:
    """A numpy array or scalar as lists and numbers of Python's own."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return value.tolist()
    raise TypeError(f"it holds an object of type {type(value).__name__}")


def _described(error: BaseException) -> str:
    """An exception as its type, its text, and the program's line that it comes from."""
    line = None
    if isinstance(error, SyntaxError):
        line, text = error.lineno, str(error.msg)
    else:
        text, frame = _text(error), error.__traceback__
        while frame is not None:
            if frame.tb_frame.f_code.co_filename == "<program>":
                line = frame.tb_lineno
            frame = frame.tb_next
    where = "" if line is None else f" (line {line})"
    return f"{type(error).__name__}: {text[: _CHARACTERS - 200]}{where}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # its text may be the program's own code
        return "its text cannot be read"


def _line(status: str, message: str) -> bytes:
    return dumps({"status": status, "message": message[:_CHARACTERS]}).encode()


def _write(answer: int, line: bytes) -> None:
    rest = memoryview(line + b"\n")  # a slice of bytes would copy the rest each time
    while rest:
        rest = rest[os.write(answer, rest) :]


if __name__ == "__main__":
    main()
