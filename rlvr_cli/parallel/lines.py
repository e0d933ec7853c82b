"""Messages of a process as lines of JSON, for many small ones: those that come close together are read at once.

Enters: the connection of a `worker.LocalWorker`. Leaves: lines. A thread that reads each message when it comes takes a turn with the one
that samples for each; and where a message breaks off, it waits for the rest of it for as long as that takes.
"""

import os
import select
import time
from multiprocessing.connection import Connection
from typing import Any

from rlvr_cli.parallel.worker import encoded
from rlvr_cli.process import LONGEST_WAIT

MOST_BYTES = 1 << 28  # of a line
_TOGETHER_SECONDS = 0.0005  # lines that come so close together are read at once
_READ_BYTES = 1 << 16


def write_line(connection: Connection, message: Any) -> None:
    """Send a message to the `Lines` at the other end."""
    rest = memoryview(encoded(message) + b"\n")
    while rest:
        rest = rest[os.write(connection.fileno(), rest) :]


class Lines:
    """What is read from a connection after its last message."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._begun = bytearray()

    def receive(self, *, within: float, several: bool) -> list[bytes]:
        """Wait for a line, and return those that have come.

        Args:
            within: seconds.
            several: whether others may follow it at once, which are then waited for a moment.

        Raises:
            EOFError: the other end is gone.
            TimeoutError: there is no whole line in time.
            ValueError: it is longer than `MOST_BYTES`.
        """
        ends = time.monotonic() + within
        data = b""
        while b"\n" not in data:
            if not self._poll.poll(1000 * min(max(0.0, ends - time.monotonic()), LONGEST_WAIT)):
                if time.monotonic() >= ends:
                    raise TimeoutError
                continue
            if several:
                time.sleep(_TOGETHER_SECONDS)
            data = os.read(self._connection.fileno(), _READ_BYTES)
            if not data:
                raise EOFError
            self._begun += data
            if len(self._begun) > MOST_BYTES:
                raise ValueError(f"a line of more than {MOST_BYTES} bytes")
        *lines, self._begun = self._begun.split(b"\n")
        return [bytes(line) for line in lines]
