"""A process on a node of a cluster that starts a worker there, and hands its messages on.

Enters: what a `LocalWorker` is started with. Leaves: its messages, which are not looked into, and the status with which it ends. It
ends with its host, and its host with the command that asked for it.
"""

import os
import queue
import socket
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
_MOST = 2**20  # bytes of messages at a time, but for the last one
_PAUSE = 0.01  # seconds between two answers of `receive`, so that messages come together: a call costs more than one
# Variables of the environment that a worker has from the command, and those of vLLM among them that name the command's own node.
_OURS = ("RLVR_", "HF_", "OMP_", "MKL_", "CUBLAS_", "NCCL_", "GLOO_", "PYTORCH_", "TORCH_", "VLLM_", "MALLOC_")
_OF_A_NODE = ("_IP", "_HOST", "_PORT")


def handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the command's environment that its workers have on every node."""
    return {
        name: value
        for name, value in environment.items()
        if name == "PYTHONPATH"
        or (name.startswith(_OURS) and not (name.startswith("VLLM_") and name.endswith(_OF_A_NODE)))
    }


class Host:
    """The process. Its methods are called from several threads: one sends, one receives, one waits for the end.

    Args:
        folder: of the command, in which the worker runs if this node has it too; else relative names are not found.
        variables: of the environment, in place of those of the cluster's own processes.
        weights: whether the worker gets memory into which `load` writes.
        started: the arguments of `LocalWorker`.
        command: where the command listens (host, port) as long as it lives.
    """

    def __init__(
        self,
        *,
        folder: str,
        variables: Mapping[str, str],
        weights: bool,
        started: dict[str, Any],
        command: tuple[str, int],
    ) -> None:
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
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._handed_on = float("-inf")  # when
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._end_with, args=(command,), daemon=True).start()

    def _end_with(self, command: tuple[str, int]) -> None:
        """End when the command does: without its head, which tells of that, a cluster's node can take minutes to see it."""
        try:
            life = socket.create_connection(command, timeout=10)
        except ConnectionRefusedError:  # it has ended already
            pass
        except OSError:  # nodes cannot reach each other at every port: what Ray sees has to do
            return
        else:
            life.settimeout(None)
            life.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            with suppress(OSError):
                life.recv(1)  # nothing ever comes
        self._worker.kill()
        os._exit(1)

    def pid(self) -> int:
        """Its process id on this node."""
        return self._worker.pid

    def send(self, message: bytes) -> None:
        """Hand a message on; to one that has ended, of which `wait` tells, in vain."""
        with suppress(RlvrError):
            self._worker.send_bytes(message)

    def load(self, content: Any) -> None:
        """Write bytes into its memory.

        Args:
            content: an array of bytes.
        """
        assert self._memory is not None
        self._memory.grow(content.nbytes)
        self._memory.mapped()[: content.nbytes] = memoryview(content)

    def receive(self) -> list[bytes]:
        """Wait for messages, and return those that have come; none when it has ended. The first after a pause is not kept waiting."""
        message, found, size = self._said.get(), [], 0
        time.sleep(max(self._handed_on + _PAUSE - time.monotonic(), 0))
        with suppress(queue.Empty):
            while message is not None:
                found.append(message)
                if (size := size + len(message)) >= _MOST:
                    break
                message = self._said.get_nowait()
        if message is None:
            self._said.put(None)  # for the next call
        self._handed_on = time.monotonic()
        return found

    def _listen(self) -> None:
        with suppress(RlvrError):
            while True:
                self._said.put(self._worker.receive_bytes())
        self._said.put(None)

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
