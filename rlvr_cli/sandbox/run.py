"""Run a program that nobody trusts, and get its answer as data.

Enters: the text of a Python program and the names under which it may leave its answer. Leaves: an `Execution`: the answer, decoded from
JSON, or what went wrong. The program runs in a fresh interpreter (`child`) that the kernel has bound before the program's first
line, see `layers`: it can read Python's own files and nothing else, write nowhere, reach no network and no other process, start none,
and use only so much memory and time. It sees no variable of this process's environment. It dies with this process.

What the program writes to the answer's pipe, whatever wrote it, is an answer like any other: who must not be deceived by an answer
checks it in this process.
"""

import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlvr_cli.errors import RlvrError
from rlvr_cli.process import LONGEST_WAIT
from rlvr_cli.sandbox.layers import available_layers, missing
from rlvr_cli.text import storable

Status = Literal["ok", "exception", "no_answer", "bad_answer", "timeout", "cpu", "memory", "output_too_large"]

MESSAGE_CHARACTERS = 2_000  # of an error
OUTPUT_BYTES = 4_096  # that are kept of standard output and error
MAX_PROGRAM_BYTES = 1 << 20
_MAX_PRINTED_BYTES = 64 << 20  # a program that prints more is stopped
_START_SECONDS = 60.0  # for the interpreter, on a machine that is very busy
_CHILD = Path(__file__).with_name("child.py")
_CHUNK = 1 << 16
_PIPE_CHUNKS = 16  # a pipe holds a MiB at most
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program gives the same answer
    "PYTHONUTF8": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
_FAILURES_SAID: dict[str, Status] = {  # by the child
    "exception": "exception",
    "no_answer": "no_answer",
    "bad_answer": "bad_answer",
    "memory": "memory",
    "output_too_large": "output_too_large",
}


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    seconds: float = 10.0  # of wall time; of CPU time a second more
    memory_bytes: int = 2 << 30  # of address space
    output_bytes: int = 8 << 20  # of its answer, as JSON


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Execution:
    """What became of a program."""

    status: Status
    value: Any  # the answer as JSON decodes it, without NaN or infinity; None unless the status is "ok"
    message: str  # what went wrong, for a reader; empty if nothing did
    output: str  # the end of what it printed, standard output and error together
    seconds: float  # wall time, from the program's first line
    layers: tuple[str, ...]  # that were active, of `LAYERS`
    entry: str | None = None  # the name that gave the answer, as the program says; None if there is none
    num_printed: int = 0  # bytes that it printed, of which `output` is the end


class _Ended(NamedTuple):
    layers: tuple[str, ...] | None  # None: it ended before it was bound, and so before the program
    said: bytes  # what followed on the answer's pipe
    printed: bytes  # the end of what it printed
    num_printed: int  # bytes
    stopped: Literal["", "timeout", "output_too_large", "printed_too_much"]
    seconds: float


def sandbox_warning() -> str:
    """A sentence on the layers that this machine lacks, and what programs can do therefore; empty if it has all."""
    lacking = missing(available_layers())
    if not lacking:
        return ""
    return (
        f"this machine lacks {', '.join(lacking)}: programs are limited in time and memory, but can read and change your files. "
        "Linux 5.13 or later on x86-64 or ARM64 has all layers of the sandbox."
    )


def check_sandbox() -> None:
    """Raise RlvrError where this machine lacks a layer of the sandbox."""
    lacking = missing(available_layers())
    if lacking:
        raise RlvrError(
            f"The sandbox is not complete on this machine: it lacks {', '.join(lacking)}.",
            "Use Linux 5.13 or later on x86-64 or ARM64, or leave out --require-sandbox and trust the programs.",
        )


def run_program(
    program: str,
    *,
    entry: Sequence[str] | None,
    given: Mapping[str, Any] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    require_sandbox: bool = False,
) -> Execution:
    """Run a program to its end and return its answer. Blocks; may be called from several threads.

    Args:
        program: Python. Its `__name__` is "program", or of a script "__main__".
        entry: names of globals. The first that the program defines gives the answer: called without arguments if it is callable, else
            taken as it is. A numpy array or scalar is converted exactly (`tolist`); a tuple becomes a list. None: the program is a
            script, which answers nothing: it runs to its end as Python would run it, and fails by an exception or an exit status other than 0.
        given: globals that the program finds, as JSON has them.

    Raises:
        RlvrError: `require_sandbox` and this machine lacks a layer; or no interpreter can be started.
    """
    if require_sandbox:
        check_sandbox()
    if len(program.encode("utf-8", "surrogatepass")) > MAX_PROGRAM_BYTES:
        return Execution("exception", None, f"the program is larger than {MAX_PROGRAM_BYTES >> 20} MiB", "", 0.0, ())
    setup = {
        "program": program,
        "entry": None if entry is None else list(entry),
        "given": dict(given or {}),
        "cpu_seconds": _cpu_seconds(limits),
        "memory_bytes": limits.memory_bytes,
        "output_bytes": limits.output_bytes,
        "paths": _library_paths(),
        "require_sandbox": require_sandbox,
    }
    process, answer = _start(setup)
    assert process.stdout is not None
    printed = process.stdout.fileno()
    try:
        ended = _follow(answer, printed, limits)
    finally:
        with suppress(ProcessLookupError, PermissionError):  # macOS permits no signal to a group that has ended
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so that the number is its own
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        tail = _rest(printed)
        process.stdout.close()
        os.close(answer)
    output = storable((ended.printed + tail)[-OUTPUT_BYTES:].decode(errors="replace"))
    if ended.layers is None or (require_sandbox and missing(ended.layers)):
        lacking = "" if ended.layers is None else f": it lacks {', '.join(missing(ended.layers))}"
        lines = output.strip().splitlines() or [f"its interpreter ended with status {process.returncode}"]
        raise RlvrError(f"The sandbox does not start{lacking or f': {lines[-1]}'}.", "See that it has memory enough.")
    cpu_used = usage.ru_utime + usage.ru_stime
    found = _outcome(ended, limits=limits, returncode=process.returncode, cpu_used=cpu_used)
    message = storable(found.message)[:MESSAGE_CHARACTERS]
    num_printed = ended.num_printed + len(tail)
    return Execution(found.status, found.value, message, output, ended.seconds, ended.layers, found.entry, num_printed)


def _cpu_seconds(limits: Limits) -> int:
    """More than the wall time, so that a program of one thread always ends at the same limit."""
    return math.ceil(limits.seconds) + 1


@cache
def _library_paths() -> list[str]:
    """Where the program finds numpy, and what is installed beside it."""
    numpy = find_spec("numpy")
    return [] if numpy is None or numpy.origin is None else [str(Path(numpy.origin).parents[1])]


def _start(setup: dict[str, Any]) -> tuple[subprocess.Popen[bytes], int]:
    """Start the child and give it its setup; also returns the end of the answer's pipe that is read."""
    answer, write = os.pipe()
    try:
        process = subprocess.Popen(
            # As `-I`, in whose place the environment is empty: with `-I`, hashes of strings would differ between runs.
            [sys.executable, "-s", "-P", "-S", "-B", str(_CHILD), str(write), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            cwd="/",
            env=_ENVIRONMENT | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
            pass_fds=(write,),
            start_new_session=True,
        )
    except OSError as error:
        os.close(answer)
        raise RlvrError(
            f"The sandbox does not start: {error.strerror}.", f"Its interpreter: {sys.executable}"
        ) from error
    finally:
        os.close(write)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended: `_follow` sees that
        process.stdin.write(json.dumps(setup).encode())
    process.stdin.close()
    return process, answer


def _follow(answer: int, printed: int, limits: Limits) -> _Ended:
    """Read both pipes until the answer is complete, its pipe is closed, or a limit is exceeded."""
    layers: tuple[str, ...] | None = None
    said, tail, num_printed = bytearray(), bytearray(), 0
    began = time.monotonic()
    deadline = began + _START_SECONDS
    stopped: Literal["", "timeout", "output_too_large", "printed_too_much"] = ""
    with selectors.DefaultSelector() as selector:
        selector.register(answer, selectors.EVENT_READ)
        selector.register(printed, selectors.EVENT_READ)
        while not stopped:
            left = deadline - time.monotonic()
            if left <= 0:
                stopped = "timeout"
                break
            ready = [key.fd for key, _ in selector.select(min(left, LONGEST_WAIT))]
            if printed in ready:
                chunk = os.read(printed, _CHUNK)
                num_printed += len(chunk)
                tail = (tail + chunk)[-OUTPUT_BYTES:]
                if not chunk:
                    selector.unregister(printed)
                if num_printed > _MAX_PRINTED_BYTES:
                    stopped = "printed_too_much"
            if answer in ready:
                chunk = os.read(answer, _CHUNK)
                said += chunk
                if layers is None and b"\n" in said:
                    first, _, said = said.partition(b"\n")
                    layers = tuple(json.loads(first))
                    began = time.monotonic()
                    deadline = began + limits.seconds
                if not chunk or (layers is not None and b"\n" in chunk and b"\n" in said):
                    break
                if len(said) > limits.output_bytes + _CHUNK:
                    stopped = "output_too_large"
    return _Ended(layers, bytes(said), bytes(tail), num_printed, stopped, time.monotonic() - began)


def _rest(printed: int) -> bytes:
    """What is left in the pipe of a program that has ended, without waiting for a process that it may have left behind."""
    os.set_blocking(printed, False)
    rest = b""
    with suppress(BlockingIOError):
        for _ in range(_PIPE_CHUNKS):
            rest += os.read(printed, _CHUNK)
    return rest


class _Outcome(NamedTuple):
    status: Status
    message: str
    value: Any = None
    entry: str | None = None


def _outcome(ended: _Ended, *, limits: Limits, returncode: int, cpu_used: float) -> _Outcome:
    line, newline, _ = ended.said.partition(b"\n")
    if newline:
        return _decoded(line, limits)
    match ended.stopped:
        case "timeout":
            return _Outcome("timeout", f"no answer within {limits.seconds:g} s")
        case "output_too_large":
            return _Outcome("output_too_large", f"the answer has more than {limits.output_bytes} bytes as JSON")
        case "printed_too_much":
            return _Outcome("output_too_large", f"the program printed more than {_MAX_PRINTED_BYTES >> 20} MiB")
    if returncode == -signal.SIGXCPU or (returncode == -signal.SIGKILL and cpu_used >= _cpu_seconds(limits)):
        return _Outcome("cpu", f"the program used more than {_cpu_seconds(limits)} s of CPU time")
    if returncode < 0 and returncode != -signal.SIGKILL:
        return _Outcome("exception", f"the program was ended by a signal: {signal.strsignal(-returncode)}")
    return _Outcome("no_answer", "the program ended before it gave an answer")


def _decoded(line: bytes, limits: Limits) -> _Outcome:
    """Read the line of an answer. The program may have written it: anything may stand in it."""
    if len(line) > limits.output_bytes + _CHUNK:
        return _Outcome("output_too_large", f"the answer has more than {limits.output_bytes} bytes as JSON")
    try:
        said = json.loads(line, parse_constant=_not_json, parse_float=_finite)
    except RecursionError:
        return _Outcome("bad_answer", "the answer is nested too deeply")
    except ValueError as error:  # also of a whole number with more digits than Python converts
        return _Outcome("bad_answer", f"the answer cannot be read: {error}")
    match said:
        case {"status": "ok", "entry": str(entry), "value": value}:
            return _Outcome("ok", "", value, entry)
        case {"status": "ok", "value": value}:
            return _Outcome("ok", "", value)
        case {"status": str(status), "message": str(message)} if status in _FAILURES_SAID:
            return _Outcome(_FAILURES_SAID[status], message)
    return _Outcome("bad_answer", "the answer is not one")


def _not_json(constant: str) -> float:
    raise ValueError(f"it holds {constant}, which is not a number of JSON")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"it holds {digits[:40]}, which is too large")
    return number
