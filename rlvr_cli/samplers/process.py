"""A sampler in a process of its own, so that one batch is sampled while another one is trained on.

Enters: how to open an engine there; requests; now and then the policy's weights. Leaves: completions in the order in which
they finish, of weights that are proven to be the policy's.

The process is `python -m rlvr_cli.samplers.serve`, which opens the engine and calls `serve`. The two talk JSON, and bytes of weights,
over a socket pair; the process does one thing after the other, as it was asked: it answers requests, or takes weights.
"""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

import rlvr_cli
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.policy import Policy, distinct
from rlvr_cli.samplers.weight_check import Probe, fixed_logprobs, prove
from rlvr_cli.types import Completion, Request, Sampler, SamplingParams

_DROP = re.compile(rb"drop ([0-9]{1,20})")  # a message that is no JSON, and no tensor of any model


@dataclass
class _Job:
    """Requests that the process was given, and what has come back of them."""

    requests: Sequence[Request]
    params: SamplingParams
    completions: deque[Completion] = field(default_factory=deque)
    seconds: float | None = None  # that it took; None while it is under way
    given_up: bool = False  # nobody waits for the rest


class SamplingProcess:
    """The parent's end: a `Sampler` that can also begin with requests before anybody asks for the answers.

    Args:
        engine: its name.
        opening: what `engines.open_apart` is given there besides.
        visible_devices: the CUDA devices that the process sees, as in CUDA_VISIBLE_DEVICES; None: the parent's.

    Attributes:
        policy_version: of the weights that it samples from.
        worked_seconds: how long it worked on the requests that `sample` answered last.
    """

    def __init__(
        self,
        engine: str,
        opening: Mapping[str, Any],
        *,
        visible_devices: str | None = None,
    ) -> None:
        self.engine, self.policy_version, self.worked_seconds = engine, 0, 0.0
        self._jobs: list[_Job] = []
        self._asked = 0  # jobs so far
        self._last_probe: Probe | None = None
        self._facts: dict[str, Any] | None = None  # what it said when it had opened its engine
        self._connection, theirs = Pipe()
        root = str(Path(rlvr_cli.__file__).parents[1])
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
            **({} if visible_devices is None else {"CUDA_VISIBLE_DEVICES": visible_devices}),
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlvr_cli.samplers.serve", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # that is for results
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # gets no Ctrl-C, and is killed with all that it has started
            )
        self._send(["open", {"engine": engine, **opening}])

    @property
    def seeding(self) -> str:
        """Whose seeds its draws come from."""
        return self._greeting["seeding"]

    @property
    def notes(self) -> list[str]:
        """What its engine has to say of itself."""
        return self._greeting["notes"]

    @property
    def _greeting(self) -> dict[str, Any]:
        while self._facts is None:
            self._receive()
        return self._facts

    def prefetch(self, requests: Sequence[Request], params: SamplingParams) -> None:
        """Begin to answer: the next `sample` of just these requests finds what is done by then."""
        self._begin(requests, params)

    def drop(self) -> None:
        """Give up all that was asked for and has not been answered."""
        for job in self._jobs:
            job.given_up = True
        self._forget()
        with _explained(self._process):
            self._connection.send_bytes(f"drop {self._asked}".encode())

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Generator[Completion]:
        """Answer every seed of every request; completions come in the order in which they finish.

        Raises:
            RlvrError: what the engine raised; or the process has ended.
        """
        wanted = (list(requests), params)
        waiting = [job for job in self._jobs if (job.requests, job.params) == wanted and not job.given_up]
        job = waiting[0] if waiting else self._begin(requests, params)
        try:
            while job.completions or job.seconds is None:
                if job.completions:
                    yield job.completions.popleft()
                else:
                    self._receive()
            self.worked_seconds = job.seconds
        finally:
            job.given_up = True
            job.completions.clear()
            self._forget()

    def load_weights(self, policy: Policy, policy_version: int) -> None:
        """Sample from `policy`'s weights from now on, and prove it: see `probe.prove`.

        The engine proves that it serves its own process's copy of the policy; that the copy is the policy is proven here.

        Raises:
            RlvrError: the weights do not fit, or the process does not have them.
        """
        assert self._greeting  # else its answer to the weights would be taken for it
        while any(job.seconds is None for job in self._jobs):
            self._receive()
        weights = distinct(policy.weights_for_engine())
        self._send(["load", policy_version, _sizes(weights)])
        with _explained(self._process):
            for tensor in weights.values():
                self._connection.send_bytes(_bytes_of(tensor))
        probe = Probe((), self._receive(), fixed_logprobs(policy))
        prove(
            probe,
            self._last_probe,
            precisions=[str(policy.dtype).removeprefix("torch.")],
            version=policy_version,
            served=self.policy_version,
            way_out="--async-steps 0 samples in the trainer's own process.",
        )
        self._last_probe, self.policy_version = probe, policy_version

    def sleep(self) -> None:
        """Nothing: it samples while the trainer trains."""

    def close(self) -> None:
        """End the process and all that it has started; closing twice is allowed."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _begin(self, requests: Sequence[Request], params: SamplingParams) -> _Job:
        job = _Job(list(requests), params)
        self._asked += 1
        self._send(["sample", self._asked, [asdict(request) for request in requests], asdict(params)])
        self._jobs.append(job)
        return job

    def _forget(self) -> None:
        """Jobs that nobody waits for and of which nothing will come any more."""
        self._jobs = [job for job in self._jobs if job.seconds is None or not job.given_up]

    def _send(self, message: list[Any]) -> None:
        with _explained(self._process):
            _write(self._connection, message)

    def _receive(self) -> Any:
        """Take the process's next message: what it says of itself, of the first job that is not done, or of its weights."""
        with _explained(self._process):
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
                self._forget()
            case _:
                job = next(job for job in self._jobs if job.seconds is None)
                if not job.given_up:
                    job.completions.append(_completion(content))
        return None


@contextmanager
def _explained(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """An error of the connection as what it means: the process is gone."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise RlvrError(
            f"The sampling process ended with status {process.wait()}.",
            "What it said is above. -9 is what ends a process when memory runs out: lower --max-batch-size, or take "
            "--async-steps 0, which needs one copy of the model less.",
        ) from error


def serve(connection: Connection, open_engine: Callable[..., tuple[Sampler, Policy]]) -> None:
    """The process's end: open an engine as the parent says, and answer until the parent is gone.

    Args:
        open_engine: gives the engine and the policy through which it is given weights.
    """
    line = _Line(connection)
    try:
        _, opening = line.take()
        sampler, policy = open_engine(**opening)
        line.answers.put(["ready", {"notes": list(sampler.notes), "seeding": sampler.seeding}])
        while True:
            _answer(line, sampler, policy)
    except RlvrError as error:
        line.answers.put(["error", [error.problem, error.hint]])
        with suppress(EOFError):
            while True:  # until the parent, which now knows, closes its end
                line.take_bytes()
    except EOFError:
        pass


class _Line:
    """Both directions of the connection, each with a thread of its own.

    Answers wait here while the parent trains and does not read, so that the engine need not; requests wait here while the
    engine samples and does not read, so that the parent need not.
    """

    def __init__(self, connection: Connection) -> None:
        self.answers: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self.unwanted = 0  # of the jobs asked for, the first so many
        self._connection = connection
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for work in (self._receive_all, self._send_all):
            threading.Thread(target=work, daemon=True).start()

    def take_bytes(self) -> bytes:
        """The next message. Raises EOFError when the parent is gone."""
        message = self._inbox.get()
        if message is None:
            raise EOFError
        return message

    def take(self) -> list[Any]:
        return json.loads(self.take_bytes())

    def _receive_all(self) -> None:
        with suppress(EOFError, ConnectionError):
            while True:
                message = self._connection.recv_bytes()
                if dropped := _DROP.fullmatch(message):  # does not wait its turn
                    self.unwanted = int(dropped[1])
                else:
                    self._inbox.put(message)
        self._inbox.put(None)

    def _send_all(self) -> None:
        with suppress(OSError):  # the parent is gone; the other thread sees it too
            while True:
                _write(self._connection, self.answers.get())


def _answer(line: _Line, sampler: Sampler, policy: Policy) -> None:
    match line.take():
        case "sample", number, requests, params:
            started = time.perf_counter()
            asked = [Request(**_with_tuples(request)) for request in requests]
            completions = sampler.sample(asked, SamplingParams(**_with_tuples(params)))
            while number > line.unwanted and (completion := next(completions, None)):
                line.answers.put(["completion", asdict(completion)])
            completions.close()
            line.answers.put(["done", time.perf_counter() - started])
        case "load", version, sizes:
            weights = distinct(policy.weights())  # a plain policy: its own are what an engine is given
            if _sizes(weights) != sizes:
                raise RlvrError("The policy's weights do not fit the model in the sampling process.")
            with torch.no_grad():
                for tensor in weights.values():
                    received = torch.frombuffer(bytearray(line.take_bytes()), dtype=torch.uint8)
                    tensor.copy_(received.view(tensor.dtype).view(tensor.shape))
            sampler.load_weights(policy, version)
            line.answers.put(["loaded", fixed_logprobs(policy)])


def _sizes(weights: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    return [[name, tensor.nbytes] for name, tensor in weights.items()]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _completion(fields: dict[str, Any]) -> Completion:
    assert fields["turns"] is None, "an engine answers in one turn"
    return Completion(**_with_tuples(fields))


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON's lists as what the dataclasses have."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _write(connection: Connection, message: list[Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _read(connection: Connection) -> list[Any]:
    return json.loads(connection.recv_bytes())
