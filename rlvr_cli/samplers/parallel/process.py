"""A sampler in its own process, so that one batch is sampled while another one is trained on.

Enters: options to open an engine there; requests; new weights of the policy. Leaves: completions in the order in which
they finish, sampled from weights that are verified to be the policy's.

The process is `python -m rlvr_cli.samplers.parallel.serve`, which opens the engine and calls `serve`. Parent and child exchange
JSON over a socket pair, and weights in memory that both map. The child handles messages one at a time, in order: it
answers requests, or loads weights.
"""

import json
import mmap
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

import rlvr_cli
from rlvr_cli.errors import RlvrError
from rlvr_cli.faults import environment_of, fault_point
from rlvr_cli.models.compute.device import dtype_name, visible_as_only
from rlvr_cli.models.policy import Policy
from rlvr_cli.process import stoppable
from rlvr_cli.samplers.weight_check import Probe, fixed_logprobs, verify_weights
from rlvr_cli.types import Completion, Request, Sampler, SamplingParams

_DROP = re.compile(rb"drop ([0-9]{1,20})")  # is not JSON
_ALIGNMENT = 64  # bytes, of each tensor in the shared memory


@dataclass
class _Job:
    """Requests that were sent to the process, and the completions received so far."""

    requests: Sequence[Request]
    params: SamplingParams
    completions: deque[Completion] = field(default_factory=deque)
    seconds: float | None = None  # that it took; None while it is running
    canceled: bool = False  # nobody waits for the remaining completions


class SamplingProcess:
    """The parent's end: a `Sampler` that can also start on requests before their completions are needed.

    Args:
        engine: its name.
        engine_options: the other arguments of `serve.open_engine`. Of a `device` such as cuda:1 the process sees no other.
        name: of its fault points (`faults`), such as sampler1.completion.
        threads: of torch, on a CPU; 0: as many as it likes.
        shared: where new weights are written, by whoever calls `take_weights`; None: it has memory of its own for them.

    Attributes:
        policy_version: of the weights that the process samples from.
        worked_seconds: how long the process worked on the requests of the last `sample`.
    """

    arrived = ()

    def __init__(
        self,
        engine: str,
        engine_options: Mapping[str, Any],
        *,
        name: str = "sampler",
        threads: int = 0,
        shared: "SharedTensors | None" = None,
    ) -> None:
        self.engine, self.policy_version, self.worked_seconds = engine, 0, 0.0
        self._jobs: list[_Job] = []
        self._jobs_sent = 0  # number of jobs so far
        self._last_probe: Probe | None = None
        self._facts: dict[str, Any] | None = None  # seeding and notes of the engine, sent once it is open
        self._shared, self._shares = shared or SharedTensors(), shared is not None
        self._connection, theirs = Pipe()
        root = str(Path(rlvr_cli.__file__).parents[1])
        environment = environment_of(name) | {
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        }
        if threads:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        if engine_options["device"].startswith("cuda:"):
            environment["CUDA_VISIBLE_DEVICES"] = visible_as_only(engine_options["device"])
            engine_options = {**engine_options, "device": "cuda"}
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "rlvr_cli.samplers.parallel.serve"),
                    *map(str, (theirs.fileno(), self._shared.descriptor, os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # stdout is for results
                env=environment,
                pass_fds=[theirs.fileno(), self._shared.descriptor],
                start_new_session=True,  # gets no Ctrl-C, and can be killed together with its children
            )
        self._send(["open", {"engine": engine, **engine_options}])

    @property
    def seeding(self) -> str:
        """The engine's `seeding`, see `types.Sampler`."""
        return self._greeting["seeding"]

    @property
    def notes(self) -> list[str]:
        """The engine's `notes`, see `types.Sampler`."""
        return self._greeting["notes"]

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def check(self) -> None:
        """Raise RlvrError if the process has ended."""
        if not self.alive:
            raise _ended(self._process)

    @property
    def _greeting(self) -> dict[str, Any]:
        while self._facts is None:
            self._receive()
        return self._facts

    def prefetch(self, requests: Sequence[Request], params: SamplingParams) -> None:
        """Start sampling now: the next `sample` with the same requests yields these completions."""
        self._begin(requests, params)

    def cancel_pending(self) -> None:
        """Cancel all pending requests."""
        for job in self._jobs:
            job.canceled = True
        self._remove_finished()
        with _connection_errors_as_user_errors(self._process):
            self._connection.send_bytes(f"drop {self._jobs_sent}".encode())

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Generator[Completion]:
        """Answer every seed of every request; completions come in the order in which they finish.

        Raises:
            RlvrError: the error that the engine raised, or the process has ended.
        """
        wanted = (list(requests), params)
        waiting = [job for job in self._jobs if (job.requests, job.params) == wanted and not job.canceled]
        job = waiting[0] if waiting else self._begin(requests, params)
        try:
            while job.completions or job.seconds is None:
                if job.completions:
                    yield job.completions.popleft()
                else:
                    self._receive()
            self.worked_seconds = job.seconds
        finally:
            job.canceled = True
            job.completions.clear()
            self._remove_finished()
            if self._jobs and all(job.canceled for job in self._jobs):
                with suppress(RlvrError):  # the process has ended, which the next call tells
                    self.cancel_pending()

    def load_weights(self, policy: Policy, policy_version: int) -> None:
        """Switch to the weights of `policy`, and verify that they are served: see `weight_check.verify_weights`.

        The child verifies that its engine serves the child's copy of the policy; the parent verifies that copy here.

        Raises:
            RlvrError: the weights do not fit, or the process does not serve them.
        """
        self.take_weights(sent := send_weights(policy, policy_version, self._shared))
        self.verify_weights(sent)

    def take_weights(self, sent: "SentWeights") -> None:
        """Let the process load what was written into `shared`; `verify_weights` waits until it has."""
        assert self._greeting  # waits for the greeting: below, `_receive` must return the reply to the weights
        while any(job.seconds is None for job in self._jobs):
            self._receive()
        self._send(["load", sent.version, sent.sizes])

    def verify_weights(self, sent: "SentWeights") -> None:
        """Wait until the process has loaded the weights, and verify that it serves them.

        Raises:
            RlvrError: it does not, or it has ended.
        """
        probe = Probe((), self._receive(), sent.logprobs)
        verify_weights(
            probe,
            self._last_probe,
            precisions=[dtype_name(sent.policy.dtype)],
            version=sent.version,
            served_version=self.policy_version,
            hint="--async-steps 0 and --samplers 1 sample in the trainer's own process.",
        )
        self._last_probe, self.policy_version = probe, sent.version

    def sleep(self) -> None:
        """Do nothing: the process samples while the trainer trains."""

    def close(self) -> None:
        """Kill the process and its children; closing twice is allowed."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        if not self._shares:
            self._shared.close()

    def _begin(self, requests: Sequence[Request], params: SamplingParams) -> _Job:
        job = _Job(list(requests), params)
        self._jobs_sent += 1
        self._send(["sample", self._jobs_sent, [asdict(request) for request in requests], asdict(params)])
        self._jobs.append(job)
        return job

    def _remove_finished(self) -> None:
        """Remove the finished jobs that nobody waits for."""
        self._jobs = [job for job in self._jobs if job.seconds is None or not job.canceled]

    def _send(self, message: list[Any]) -> None:
        with _connection_errors_as_user_errors(self._process):
            _write(self._connection, message)

    def _receive(self) -> Any:
        """Handle the next message of the process: about its engine, the first unfinished job, or loaded weights."""
        with _connection_errors_as_user_errors(self._process), stoppable():
            kind, content = _read(self._connection)
        match kind:
            case "ready":
                self._facts = content
            case "loaded":
                return tuple(content)
            case "error":
                raise RlvrError(*content)
            case "done":
                job = next(job for job in self._jobs if job.seconds is None)
                job.seconds = content
                self._remove_finished()
            case _:
                job = next(job for job in self._jobs if job.seconds is None)
                if not job.canceled:
                    job.completions.append(_completion(content))
        return None


@contextmanager
def _connection_errors_as_user_errors(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Turn a connection error into a user error: the process has ended."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise _ended(process) from error


def _ended(process: "subprocess.Popen[bytes]") -> RlvrError:
    return RlvrError(
        f"The sampling process ended with status {process.wait()}.",
        "Its own messages are above. Status -9 usually means that memory ran out: lower --max-batch-size, or use "
        "--async-steps 0 and --samplers 1, which need no further copy of the model. Then resume the run.",
    )


class SharedTensors:
    """Memory that two processes map, for tensors of which both know the sizes; it grows with what is written.

    Args:
        descriptor: of the memory, inherited from the process that made it; None: make it.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is not None:
            self.descriptor = descriptor
        elif hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("rlvr-weights")
        else:  # not on Linux
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        self._map: mmap.mmap | None = None

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors into the memory."""
        size = sum(_aligned(tensor) for tensor in tensors.values())
        if os.fstat(self.descriptor).st_size < size:
            os.ftruncate(self.descriptor, size)
        for tensor, place in zip(tensors.values(), self._places(tensors), strict=True):
            place.copy_(tensor.detach())

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the memory into these tensors, in place: they must have the sizes and dtypes of those that were written."""
        for tensor, place in zip(tensors.values(), self._places(tensors), strict=True):
            tensor.copy_(place)

    def _places(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        size = os.fstat(self.descriptor).st_size
        if self._map is None or len(self._map) != size:
            self._map = mmap.mmap(self.descriptor, size)
        offset = 0
        for tensor in tensors.values():
            flat = torch.frombuffer(self._map, dtype=torch.uint8, count=tensor.nbytes, offset=offset)
            yield flat.view(tensor.dtype).view(tensor.shape)
            offset += _aligned(tensor)

    def close(self) -> None:
        """Give this process's share of the memory back; closing twice is allowed."""
        self._map = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _aligned(tensor: torch.Tensor) -> int:
    return tensor.nbytes + -tensor.nbytes % _ALIGNMENT


@dataclass(frozen=True)
class SentWeights:
    """Weights in the shared memory.

    Attributes:
        policy: whose they are.
        sizes: name and bytes of each tensor.
    """

    policy: Policy
    version: int
    sizes: list[list[Any]]

    @cached_property
    def logprobs(self) -> tuple[float, ...]:
        """What the policy gives fixed token ids (`weight_check.fixed_logprobs`); asked for before it is trained further."""
        return fixed_logprobs(self.policy)


def send_weights(policy: Policy, policy_version: int, shared: SharedTensors) -> SentWeights:
    """Write the weights of `policy` into the shared memory. No process may be reading it."""
    weights = policy.weights_for_process()
    shared.write(weights)
    return SentWeights(policy, policy_version, _sizes(weights))


def serve(
    connection: Connection,
    shared: SharedTensors,
    open_engine: Callable[..., tuple[Sampler, Callable[[], Policy]]],
) -> None:
    """The child's end: open the engine that the parent names, and serve it until the parent is gone.

    Args:
        shared: where the parent writes new weights.
        open_engine: returns the engine and what gives the policy through which it receives new weights.
    """
    channel = _Channel(connection)
    try:
        _, engine_options = channel.receive()
        sampler, policy_of = open_engine(**engine_options)
        channel.answers.put(["ready", {"notes": list(sampler.notes), "seeding": sampler.seeding}])
        while True:
            _answer(channel, shared, sampler, policy_of)
    except RlvrError as error:
        channel.answers.put(["error", [error.problem, error.hint]])
        with suppress(EOFError):
            while True:  # until the parent has read the error and closes its end
                channel.receive_bytes()
    except EOFError:
        pass


class _Channel:
    """Both directions of the connection, each with its own thread and queue.

    Answers queue here while the parent trains and does not read, so the engine never blocks; requests queue here while
    the engine samples and does not read, so the parent never blocks.
    """

    def __init__(self, connection: Connection) -> None:
        self.answers: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self.canceled_through = 0  # jobs up to this number are canceled
        self._connection = connection
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for work in (self._receive_all, self._send_all):
            threading.Thread(target=work, daemon=True).start()

    def receive_bytes(self) -> bytes:
        """The next message. Raises EOFError when the parent is gone."""
        message = self._inbox.get()
        if message is None:
            raise EOFError
        return message

    def receive(self) -> list[Any]:
        return json.loads(self.receive_bytes())

    def _receive_all(self) -> None:
        with suppress(EOFError, ConnectionError):
            while True:
                message = self._connection.recv_bytes()
                if dropped := _DROP.fullmatch(message):  # takes effect at once, not in its turn
                    self.canceled_through = int(dropped[1])
                else:
                    self._inbox.put(message)
        self._inbox.put(None)

    def _send_all(self) -> None:
        with suppress(OSError):  # the parent is gone; the other thread sees it too
            while True:
                _write(self._connection, self.answers.get())


def _answer(channel: _Channel, shared: SharedTensors, sampler: Sampler, policy_of: Callable[[], Policy]) -> None:
    match channel.receive():
        case "sample", number, requests, params:
            started = time.perf_counter()
            asked = [Request(**_with_tuples(request)) for request in requests]
            completions = sampler.sample(asked, SamplingParams(**_with_tuples(params)))
            while number > channel.canceled_through and (completion := next(completions, None)):
                channel.answers.put(["completion", asdict(completion)])
                fault_point("completion")
            completions.close()
            channel.answers.put(["done", time.perf_counter() - started])
        case "load", version, sizes:
            fault_point("load")
            policy = policy_of()
            weights = policy.weights_for_process()
            if _sizes(weights) != sizes:
                raise RlvrError("The policy's weights do not fit the model in the sampling process.")
            with torch.no_grad():
                shared.read(weights)
            sampler.load_weights(policy, version)
            channel.answers.put(["loaded", fixed_logprobs(policy)])


def _sizes(weights: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    return [[name, tensor.nbytes] for name, tensor in weights.items()]


def _completion(fields: dict[str, Any]) -> Completion:
    assert fields["turns"] is None, "an engine answers in one turn"
    return Completion(**_with_tuples(fields))


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Turn the lists of JSON into the tuples of the dataclasses."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _write(connection: Connection, message: list[Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _read(connection: Connection) -> list[Any]:
    return json.loads(connection.recv_bytes())
