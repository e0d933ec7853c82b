"""Ctrl-C and SIGTERM as a request that long work honours at its next safe point.

Enters: signals. Leaves: `Interrupted`, raised where the work says that it can stop. A second signal stops at once.
"""

import signal
import threading
from types import FrameType, TracebackType

from rlvr_cli.errors import Interrupted


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
