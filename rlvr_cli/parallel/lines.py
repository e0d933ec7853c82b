"""Messages of a process as numbered lines of JSON, for many small ones: those that come close together are read at once.

Enters: the connection of a `worker.LocalWorker`. Leaves: messages, one by one. What the worker's own messages lack: many are read with one
call, the time limit holds also within a message, and a message too many, of something else in the process, is not taken for the next one.
"""

import json
import os
import select
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from rlvr_cli.parallel.worker import encoded
from rlvr_cli.process import LONGEST_WAIT

MOST_BYTES = 1 << 28  # of a line
_TOGETHER_SECONDS = 0.0005  # lines that come so close together are read at once
_READ_BYTES = 1 << 16


class LineWriter:
    """The end that writes: a process that sends nothing else through the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._number = connection, 0

    def write(self, message: dict[str, Any]) -> None:
        """Send a message to the `Lines` at the other end."""
        rest = memoryview(encoded([self._number, message]) + b"\n")
        self._number += 1
        while rest:
            rest = rest[os.write(self._connection.fileno(), rest) :]


class Lines:
    """The end that reads."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._number = connection, 0
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._whole = deque[bytes]()
        self._begun = bytearray()

    def receive(self, *, within: float, several: bool = False) -> dict[str, Any]:
        """Wait for the next message.

        Args:
            within: seconds.
            several: whether others may follow it at once, which are then waited for a moment.

        Raises:
            EOFError: the other end is gone.
            TimeoutError: there is no whole line in time.
            ValueError: the line is longer than `MOST_BYTES`, or not the next message.
        """
        ends = time.monotonic() + within
        while not self._whole:
            if self._poll.poll(1000 * min(max(0.0, ends - time.monotonic()), LONGEST_WAIT)):
                if several:
                    time.sleep(_TOGETHER_SECONDS)
                    several = False
                self._read()
            if not self._whole and time.monotonic() >= ends:
                raise TimeoutError
        try:
            number, message = json.loads(self._whole.popleft())
        except (RecursionError, TypeError) as error:
            raise ValueError("a line that is no message") from error
        if number != self._number or not isinstance(message, dict):
            raise ValueError(f"message {self._number} is {message!r:.100}, number {number!r:.100}")
        self._number += 1
        return message

    def _read(self) -> None:
        """Take what has come. Raises EOFError or ValueError, as `receive`."""
        data = os.read(self._connection.fileno(), _READ_BYTES)
        if not data:
            raise EOFError
        self._begun += data
        if b"\n" in data:
            *lines, self._begun = self._begun.split(b"\n")
            self._whole.extend(map(bytes, lines))
        if len(self._begun) > MOST_BYTES:
            raise ValueError(f"a line of more than {MOST_BYTES} bytes")
