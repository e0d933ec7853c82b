"""Ctrl-C and SIGTERM as a request that long work honours at its next safe point; and processes that end with their parent.

Enters: signals. Leaves: `Interrupted`, raised where the work says that it can stop. A second signal stops at once.
"""

import contextlib
import os
import signal
import threading
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
