"""What a process may be asked for: to stop, to end with its parent, to bound a call into foreign code.

Enters: signals, or seconds and bytes. Leaves: `Interrupted`, raised where the work says that it can stop; a second signal stops at
once. A process that exceeds the seconds of `bounded` ends with the user's two lines and exit status 1: only the command line lets
itself be ended (`process_may_end`); in a notebook or a test the bounds do nothing.
"""

import contextlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

from rlvr_cli.errors import Interrupted

_PR_SET_PDEATHSIG = 1


class StopRequest:
    """Context manager that turns SIGINT and SIGTERM into a flag, polled with `check`.

    Only the main thread can take signals; elsewhere this is a flag that nobody sets.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def check(self) -> None:
        """Raises Interrupted once a signal has come."""
        if self.requested:
            raise Interrupted


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies (Linux); elsewhere the end of what it reads has to do."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request
        os._exit(0)


GRACE = 1.0  # seconds that the code has to end by itself

process_may_end = False  # set by cli.main


@contextmanager
def bounded(*, seconds: float, bytes: int, problem: str, hint: str) -> Iterator[None]:
    """Run a block that may take so long, and so much memory beyond what the process has."""
    if not process_may_end:
        yield
        return

    def give_up() -> None:
        print(f"error: {problem}\n  {hint}", file=sys.stderr, flush=True)
        os._exit(1)  # the thread that runs the block cannot be stopped

    timer = threading.Timer(seconds + GRACE, give_up)
    timer.daemon = True
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    ceiling = _data_bytes() + bytes
    with suppress(ValueError, OSError):
        resource.setrlimit(
            resource.RLIMIT_DATA, (ceiling if hard == resource.RLIM_INFINITY else min(ceiling, hard), hard)
        )
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    """What counts towards RLIMIT_DATA so far; 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()
    return 0
