"""A process that works for this one: a trainer, a sampler. It is started, called, watched, and killed.

Enters: a function, `module:function`, and its arguments. Leaves: a `Worker`, which exchanges JSON messages with the function.
The process of a `LocalWorker` is `python -m rlvr_cli.parallel.child`; it dies with the thread that started it. One on another
node of a cluster (`cluster`) is the `LocalWorker` of a process there.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

import rlvr_cli
from rlvr_cli.errors import RlvrError
from rlvr_cli.faults import environment_of
from rlvr_cli.process import LONGEST_WAIT, stoppable

_GUARD_SECONDS = 10.0  # for a guard to end everything that its process has started


class Worker(Protocol):
    """A process that works for this one, on this machine or on another."""

    @property
    def pid(self) -> int:
        """Its process id, where it is."""
        ...

    @property
    def status(self) -> int | None:
        """The status with which it has ended, negative for a signal; None while it runs."""
        ...

    def check(self) -> None:
        """Raise RlvrError if it has ended; NodeLost if the machine on which it was has gone, or might have."""
        ...

    def send(self, message: Any) -> None:
        """Send a message. Raises RlvrError if it has ended."""
        ...

    def share(self) -> None:
        """Let it see what was written into the memory that it was given, before the next message."""
        ...

    def receive(self, *, within: float | None = None) -> Any:
        """Wait for its next message.

        Args:
            within: seconds; None: for as long as it takes.

        Raises:
            RlvrError: it has ended.
            TimeoutError: there is none in time.
            Interrupted: a signal arrived.
        """
        ...

    def interrupt(self) -> None:
        """Ask it to end, by SIGTERM; who waits for its message sees when it has ended."""
        ...

    def kill(self) -> None:
        """Kill it and its children; killing twice is allowed."""
        ...


class LocalWorker:
    """A process of this machine, in a session of its own: it gets no Ctrl-C, and is killed together with its children.

    Args:
        name: of its fault points (`faults`), such as sampler1.completion.
        entry: the function, as `module:function`. It gets a `Connection` and the arguments, and is imported in the process.
        arguments: what JSON can hold.
        title: what a message about its end calls it.
        hint: what to do when it has ended.
        device: the only one that it sees, if it is a CUDA device such as cuda:1; empty: all.
        threads: of torch, on a CPU; 0: as many as it likes.
        descriptors: of files that it inherits, under the same numbers.
        variables: its environment; None: that of this process.
        guarded: whether the function calls `process.fork_guarded`: what it has started, in whatever session, ends with it.
        errors: the descriptor of a file for what it writes to stderr; None: that of this process.

    Attributes:
        connection: to the function.
    """

    def __init__(
        self,
        name: str,
        entry: str,
        *,
        arguments: Mapping[str, Any],
        title: str,
        hint: str,
        device: str = "",
        threads: int = 0,
        descriptors: Sequence[int] = (),
        variables: Mapping[str, str] | None = None,
        guarded: bool = False,
        errors: int | None = None,
    ) -> None:
        self._title, self._hint, self._guarded = title, hint, guarded
        self.connection, theirs = Pipe()
        root = str(Path(rlvr_cli.__file__).parents[1])
        environment = environment_of(name) if variables is None else dict(variables)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        if threads:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        if device.startswith("cuda:"):
            environment["CUDA_VISIBLE_DEVICES"] = visible_as_only(device)
        with theirs:
            child = ("-P", "-m", "rlvr_cli.parallel.child", entry, str(theirs.fileno()), str(os.getpid()))
            self._process = subprocess.Popen(
                [sys.executable, *child],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # stdout is for results
                stderr=errors,
                env=environment,
                pass_fds=[theirs.fileno(), *descriptors],
                start_new_session=True,
            )
        self.send(dict(arguments))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The status with which it has ended, negative for a signal; None while it runs."""
        return self._process.poll()

    def check(self) -> None:
        """Raise RlvrError if it has ended."""
        if self.status is not None:
            raise self._ended()

    def send(self, message: Any) -> None:
        """Send a message. Raises RlvrError if it has ended."""
        self.send_bytes(encoded(message))

    def send_bytes(self, message: bytes) -> None:
        """Send a message that is `encoded` already."""
        with self._losses_as_user_errors():
            self.connection.send_bytes(message)

    def share(self) -> None:
        """Do nothing: it maps the memory itself."""

    def receive(self, *, within: float | None = None) -> Any:
        """As `Worker.receive`."""
        with self._losses_as_user_errors(), stoppable():
            if within is None or self._comes(within):
                return read(self.connection)
        raise TimeoutError

    def receive_bytes(self) -> bytes:
        """Wait for its next message, and return it `encoded`. Raises RlvrError if it has ended."""
        with self._losses_as_user_errors():
            return self.connection.recv_bytes()

    def wait(self) -> int:
        """Wait until it has ended. Returns its status."""
        return self._process.wait()

    def interrupt(self) -> None:
        """As `Worker.interrupt`: a guard, or the process itself if none guards it, gets the signal."""
        if self._process.returncode is None:  # otherwise the id may belong to another process by now
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGTERM)
                os.kill(self.pid, signal.SIGCONT)  # it may have been stopped

    def kill(self) -> None:
        """Kill it and its children; killing twice is allowed."""
        if self._guarded:
            self.interrupt()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GUARD_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()

    def _comes(self, within: float) -> bool:
        """Whether a message comes in time."""
        ends = time.monotonic() + within
        while not self.connection.poll(min(within, LONGEST_WAIT)):
            within = ends - time.monotonic()
            if within <= 0:
                return False
        return True

    @contextmanager
    def _losses_as_user_errors(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def _ended(self) -> RlvrError:
        return RlvrError(f"{self._title} ended with status {self._process.wait()}.", self._hint)


def visible_as_only(device: str) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES with which a process sees only this one of the visible devices."""
    number = int(device.removeprefix("cuda:"))
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(number) if listed is None else listed.split(",")[number].strip()


def write(connection: Connection, message: Any) -> None:
    """Send a message, from either end."""
    connection.send_bytes(encoded(message))


def read(connection: Connection) -> Any:
    """Wait for the next message, at either end. Raises EOFError when the other one is gone."""
    return json.loads(connection.recv_bytes())


def encoded(message: Any) -> bytes:
    """A message as it goes through a connection: JSON, in which a dataclass is an object of its fields."""
    return json.dumps(message, default=asdict).encode()
