"""A sampler in its own process, so that one batch is sampled while another one is trained on.

Enters: options to open an engine there; requests; new weights of the policy. Leaves: completions in the order in which
they finish, sampled from weights that are verified to be the policy's.

What the process does is `serve`. Parent and child exchange JSON, and weights in memory that both map. The child handles
messages one at a time, in order: it answers requests, or loads weights.
"""

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.compute.device import dtype_name
from rlvr_cli.models.policy import Policy
from rlvr_cli.parallel.places import device_of
from rlvr_cli.parallel.shared_tensors import SharedTensors
from rlvr_cli.parallel.start import start_worker
from rlvr_cli.samplers.weight_check import Probe, fixed_logprobs, verify_weights
from rlvr_cli.types import Completion, Episode, Grade, Measured, Request, SamplingParams, Turn, TurnFacts

ENDED = (
    "Its own messages are above. Status -9 usually means that memory ran out: lower --max-batch-size, or use "
    "--async-steps 0 and --samplers 1, which need no further copy of the model. Then resume the run."
)


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
        engine_options: the other arguments of `serve.open_engine`. Its `device` is one of this machine, such as cuda:1, or a place on a
            cluster; the process sees no other.
        name: of its fault points (`faults`), such as sampler1.completion.
        threads: of torch, on a CPU; 0: as many as it likes.
        shared: where new weights are written, by whoever calls `take_weights`; None: it has memory of its own for them.

    Attributes:
        worker: the process.
        policy_version: of the weights that the process samples from.
        plays_episodes: whether a request is answered with an episode, which needs its example.
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
        shared: SharedTensors | None = None,
    ) -> None:
        self.engine, self.policy_version, self.worked_seconds = engine, 0, 0.0
        self.plays_episodes = bool(engine_options.get("episodes"))
        self._jobs: list[_Job] = []
        self._jobs_sent = 0  # number of jobs so far
        self._last_probe: Probe | None = None
        self._facts: dict[str, Any] | None = None  # what the engine says of itself, once it is open
        self._shared, self._shares = shared or SharedTensors(), shared is not None
        place = engine_options["device"]
        device = device_of(place)
        self.worker = start_worker(
            name,
            "rlvr_cli.samplers.parallel.serve:serve",
            place=place,
            arguments={"engine": engine, **engine_options, "device": "cuda" if device.startswith("cuda") else device},
            title="The sampling process",
            hint=ENDED,
            sees_only=True,
            threads=threads,
            memory=self._shared,
        )

    @property
    def seeding(self) -> str:
        """The engine's `seeding`, see `types.Sampler`."""
        return self._greeting["seeding"]

    @property
    def notes(self) -> list[str]:
        """The engine's `notes`, see `types.Sampler`."""
        return self._greeting["notes"]

    @property
    def context_length(self) -> int | None:
        """The most tokens of a prompt and its response; None: the engine does not know."""
        return self._greeting["context_length"]

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
        self.worker.send(["drop", self._jobs_sent])

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
        self.worker.share()
        self.worker.send(["load", sent.version, sent.sizes])

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
        self.worker.kill()
        if not self._shares:
            self._shared.close()

    def _begin(self, requests: Sequence[Request], params: SamplingParams) -> _Job:
        job = _Job(list(requests), params)
        self._jobs_sent += 1
        self.worker.send(
            [
                "sample",
                self._jobs_sent,
                [asdict(request if self.plays_episodes else replace(request, example=None)) for request in requests],
                asdict(params),
            ]
        )
        self._jobs.append(job)
        return job

    def _remove_finished(self) -> None:
        """Remove the finished jobs that nobody waits for."""
        self._jobs = [job for job in self._jobs if job.seconds is None or not job.canceled]

    def _receive(self) -> Any:
        """Handle the next message of the process: about its engine, the first unfinished job, or loaded weights."""
        kind, content = self.worker.receive()
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
    return SentWeights(policy, policy_version, sizes_of(weights))


def sizes_of(weights: Mapping[str, Tensor]) -> list[list[Any]]:
    """Return the name and the bytes of each tensor."""
    return [[name, tensor.nbytes] for name, tensor in weights.items()]


def _completion(fields: dict[str, Any]) -> Completion:
    turns, episode, facts, measured, grade = (
        fields[name] for name in ("turns", "episode", "turn_facts", "measured", "grade")
    )
    return Completion(
        **with_tuples(fields)
        | {
            "turns": tuple(Turn(*turn) for turn in turns) if turns is not None else None,
            "episode": Episode(*map(_as_tuple, episode)) if episode is not None else None,
            "turn_facts": TurnFacts(*map(_as_tuple, facts)) if facts is not None else None,
            "measured": tuple(Measured(*each) for each in measured) if measured is not None else None,
            "grade": Grade(**grade) if grade is not None else None,
        }
    )


def with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Turn the lists of JSON into the tuples of the dataclasses."""
    return {name: _as_tuple(value) for name, value in fields.items()}


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
