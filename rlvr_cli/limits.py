"""Bounds on what a call into foreign code may take, for code that does not look at the clock by itself.

Enters: seconds and bytes. Leaves: nothing; a process that exceeds the time ends with the user's two lines and exit status 1.

Only the command line lets itself be ended (`process_may_end`): in a notebook or a test the bounds do nothing.
"""

import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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
