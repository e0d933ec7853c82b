"""The standard streams of the process: what is printed on stdout is written, or the command fails; stderr never fails it.

Enters: the three descriptors, open, closed or full. Leaves: `sys.stdout`, on which a failed write raises RlvrError (or
BrokenPipeError, when the reader has gone), and `sys.stderr`, on which a message that cannot be written is dropped: a full
disk under a log, or a terminal that was closed, must not end a run.
"""

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

from rlvr_cli.errors import RlvrError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def claim() -> None:
    """Take over the standard streams of a process whose command line is ours.

    A closed descriptor is opened on /dev/null, so that no file of a run gets its number; for stdout such that a write
    fails, since nobody would read it.
    """
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, mode)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
    if sys.stdout is sys.__stdout__:  # not where a test has replaced it
        sys.stdout = _text(_Results(1, "wb", closefd=False))
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Messages(2, "wb", closefd=False), line_buffering=True)


def finish() -> None:
    """Write what is left for stdout. Raises RlvrError or BrokenPipeError if that fails."""
    sys.stdout.flush()
    if isinstance(getattr(getattr(sys.stdout, "buffer", None), "raw", None), _Results):
        with _failure_as_user_error():
            os.close(os.dup(1))  # where a network file system says that a write has failed


def flush() -> None:
    """Write what is there for stdout, if it can be written; before an end that is an error already."""
    try:
        sys.stdout.flush()
    except (RlvrError, OSError):
        discard()


@contextmanager
def of_results() -> Iterator[None]:
    """Context manager that keeps stdout for results: what a user's code writes to it meanwhile, also to its descriptor, goes to stderr."""
    sys.stdout.flush()
    results = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(results, 1)
        os.close(results)


def discard() -> None:
    """Drop what is left for stdout: it cannot be written, and the exit status says so."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Stream(io.FileIO):
    """A descriptor that may be non-blocking, as those of some terminals and pipes are: a write then waits."""

    def write(self, data: "ReadableBuffer") -> int:
        while (written := super().write(data)) is None:
            select.select([], [self], [])
        return written


class _Results(_Stream):
    def write(self, data: "ReadableBuffer") -> int:
        with _failure_as_user_error():
            return super().write(data)


class _Messages(_Stream):
    def write(self, data: "ReadableBuffer") -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


@contextmanager
def _failure_as_user_error() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RlvrError(
            f"Cannot write the result to standard output: {error.strerror}.",
            "Give it room or another place and repeat the command; what a run has stored is kept.",
        ) from error


def _text(raw: io.FileIO, *, line_buffering: bool = False) -> io.TextIOWrapper:
    old = sys.stdout if raw.fileno() == 1 else sys.stderr
    return io.TextIOWrapper(
        io.BufferedWriter(raw),  # writes until everything is written; without it, as with python -u, a part may be lost
        encoding=getattr(old, "encoding", "utf-8"),
        errors=getattr(old, "errors", "backslashreplace"),
        line_buffering=line_buffering or raw.isatty(),
    )
