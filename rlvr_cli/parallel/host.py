"""A process on a node of a cluster that starts a worker there, and hands its messages on.

Enters: what a `LocalWorker` is started with. Leaves: its messages, and the status with which it ends. It ends with its host,
and its host with the command that asked for it.
"""

import os
import queue
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.parallel.shared_memory import SharedMemory
from rlvr_cli.parallel.worker import LocalWorker

_LINES = 5  # of its errors, the last
_MOST = 1000  # messages at a time
_LINGER = 0.01  # seconds in which more of them come along: a call costs more than a message


class Host:
    """The process. Its methods are called from several threads: one sends, one receives, one waits for the end.

    Args:
        folder: of the command, in which the worker runs if this node has it too; else relative names are not found.
        variables: of the environment, in place of those of the cluster's own processes.
        weights: whether the worker gets memory into which `load` writes.
        started: the arguments of `LocalWorker`.
    """

    def __init__(self, *, folder: str, variables: Mapping[str, str], weights: bool, started: dict[str, Any]) -> None:
        with suppress(OSError):
            os.chdir(folder)
        self._memory = SharedMemory() if weights else None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as this process
        # OMP_NUM_THREADS is the cluster's guess here, unless the command itself has it.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        descriptors = []
        if self._memory is not None:
            descriptors = [self._memory.descriptor]
            started["arguments"]["weights"] = self._memory.descriptor
        opened: queue.SimpleQueue[LocalWorker] = queue.SimpleQueue()

        def start() -> None:
            opened.put(
                LocalWorker(
                    **started,
                    variables=environment | {**variables},
                    descriptors=descriptors,
                    errors=self._errors.fileno(),
                )
            )
            threading.Event().wait()  # a worker dies with the thread that started it

        threading.Thread(target=start, daemon=True).start()
        self._worker = opened.get(timeout=60)

    def pid(self) -> int:
        """Its process id on this node."""
        return self._worker.pid

    def send(self, message: Any) -> None:
        """Hand a message on; to one that has ended, of which `wait` tells, in vain."""
        with suppress(RlvrError):
            self._worker.send(message)

    def load(self, content: Any) -> None:
        """Write bytes into its memory.

        Args:
            content: an array of bytes.
        """
        assert self._memory is not None
        self._memory.grow(content.nbytes)
        self._memory.mapped()[: content.nbytes] = memoryview(content)

    def receive(self) -> list[Any]:
        """Wait for messages, and return all that have come; none when it has ended."""
        found = []
        with suppress(RlvrError, TimeoutError):
            found.append(self._worker.receive())
            until = time.monotonic() + _LINGER
            while len(found) < _MOST:
                found.append(self._worker.receive(within=max(until - time.monotonic(), 0)))
        return found

    def wait(self) -> tuple[int, str]:
        """Wait until it ends. Returns its status and the last lines of its errors."""
        status = self._worker.wait()
        size = os.fstat(self._errors.fileno()).st_size
        text = os.pread(self._errors.fileno(), 4096, max(size - 4096, 0)).decode(errors="replace")
        return status, "\n".join(text.splitlines()[-_LINES:])

    def interrupt(self) -> None:
        """Ask it to end."""
        self._worker.interrupt()

    def kill(self) -> None:
        """Kill it and its children."""
        self._worker.kill()
