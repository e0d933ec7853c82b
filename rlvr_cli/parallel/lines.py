"""Messages to a process and from it as lines of JSON, for many small ones: those that come close together are read at once.

Enters: the connection of a `worker.LocalWorker`. Leaves: messages, one by one, those of the process numbered. What the worker's own messages
lack: many are read with one call, the time limit holds also within a message, both ways, and a message too many, of something else in the
process, is not taken for the next one.
"""

import json
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from rlvr_cli.parallel.worker import encoded
from rlvr_cli.process import LONGEST_WAIT

MOST_BYTES = 1 << 28  # of a line
_TOGETHER_SECONDS = 0.0005  # lines that come so close together are read at once
_READ_BYTES = 1 << 16


class TheirLines:
    """The end in the process, which neither sends nor reads anything else through the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._number = connection, 0

    def read(self) -> Iterator[Any]:
        """Wait for each message that is sent, until the other end is gone."""
        with open(self._connection.fileno(), "rb", closefd=False) as lines:
            yield from map(json.loads, lines)

    def write(self, message: dict[str, Any]) -> None:
        """Send a message to the `Lines` at the other end."""
        rest = memoryview(encoded([self._number, message]) + b"\n")
        self._number += 1
        while rest:
            rest = rest[os.write(self._connection.fileno(), rest) :]


class Lines:
    """The end of the process that asks."""

    def __init__(self, connection: Connection) -> None:
        self._socket, self._number = socket.socket(fileno=os.dup(connection.fileno())), 0
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._whole = deque[bytes]()
        self._begun = bytearray()

    def send(self, message: bytes, *, within: float) -> None:
        """Send a message that is `encoded`.

        Args:
            within: seconds; at most an hour is waited.

        Raises:
            OSError: the other end is gone.
            TimeoutError: it has not been read in time.
        """
        self._socket.settimeout(min(within, LONGEST_WAIT))
        self._socket.sendall(message + b"\n")

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

    def close(self) -> None:
        """Send and read no more."""
        self._socket.close()

    def _read(self) -> None:
        """Take what has come. Raises EOFError or ValueError, as `receive`."""
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise EOFError
        self._begun += data
        if b"\n" in data:
            *lines, self._begun = self._begun.split(b"\n")
            self._whole.extend(map(bytes, lines))
        if len(self._begun) > MOST_BYTES:
            raise ValueError(f"a line of more than {MOST_BYTES} bytes")
