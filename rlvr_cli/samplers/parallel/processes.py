"""Engines in processes of their own, each on a device of its own, as one sampler.

Enters: an engine, its options, and a device for each; then requests, and new weights. Leaves: completions in the order in which
they arrive. A process that dies is started again, and gets the current weights before it is asked again.
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.policy import Policy
from rlvr_cli.parallel.places import node_of
from rlvr_cli.parallel.shared_tensors import SharedTensors
from rlvr_cli.parallel.start import cores_of
from rlvr_cli.samplers.open import UTILIZATION
from rlvr_cli.samplers.parallel.process import SamplingProcess, SentWeights, send_weights
from rlvr_cli.samplers.parallel.several import SeveralSamplers
from rlvr_cli.types import Completion, Request, SamplingParams


class SamplingProcesses(SeveralSamplers[SamplingProcess]):
    """Processes of one engine. The weights that they load are in memory that all of them map.

    Args:
        engine: its name.
        engine_options: the other arguments of `serve.open_engine`.
        devices: of each process: such as cuda:1, or places on a cluster. On a CPU they divide its cores, and vLLM's share of its memory.
    """

    def __init__(self, engine: str, engine_options: Mapping[str, Any], *, devices: Sequence[str]) -> None:
        self.engine, self.policy_version = engine, 0
        self.plays_episodes = bool(engine_options.get("episodes"))  # see `process.SamplingProcess`
        self._options = dict(engine_options)
        self._numbers = {f"{number} ({device})": number for number, device in enumerate(devices)}
        self._devices = devices
        self._shared = SharedTensors()
        self._sent: SentWeights | None = None
        self._started_again: dict[str, SamplingProcess] = {}  # they do not have the weights yet
        super().__init__({name: self._start(name) for name in self._numbers})

    def _start(self, name: str) -> SamplingProcess:
        number = self._numbers[name]
        device, options, threads = self._devices[number], {**self._options}, 0
        if "cuda" not in device:
            beside = Counter(map(node_of, self._devices))[node_of(device)]
            threads = max(cores_of(device) // beside, 1)
            options["gpu_memory_utilization"] = (options["gpu_memory_utilization"] or UTILIZATION) / beside
        return SamplingProcess(
            self.engine,
            options | {"device": device},
            name=f"sampler{number}",
            threads=threads,
            shared=self._shared,
        )

    @property
    def seeding(self) -> str:
        """The engine's `seeding`, see `types.Sampler`."""
        self._await_open()
        return next(iter(self.members.values())).seeding

    @property
    def notes(self) -> list[str]:
        """The engine's `notes`, see `types.Sampler`, and which processes died."""
        self._await_open()
        return [*dict.fromkeys(note for process in self.members.values() for note in process.notes), *self.left_out]

    @property
    def context_length(self) -> int | None:
        """That of the engine, see `process.SamplingProcess`."""
        self._await_open()
        return next(iter(self.members.values())).context_length

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Generator[Completion]:
        """Answer every seed of every request; completions come in the order in which they arrive.

        Raises:
            RlvrError: the error that the engine raised, or every process has died.
        """
        self.settle()
        self._readmit()
        yield from super().sample(requests, params)

    def load_weights(self, policy: Policy, policy_version: int) -> None:
        """Switch to the weights of `policy`, and verify that every process serves them.

        Raises:
            RlvrError: the weights do not fit, a process does not serve them, or every process has died.
        """
        self.settle()
        self._sent = sent = send_weights(policy, policy_version, self._shared)
        self._each(lambda process: process.take_weights(sent))
        self._each(lambda process: process.verify_weights(sent))
        self.policy_version = policy_version

    def leave_out(self, name: str, error: RlvrError, *, why: str = "died, and is started again") -> None:
        """Start a process that has died again. Raises an error of the engine's own, which the others would raise too."""
        process = self.members[name]
        if process.worker.status is None:
            raise error
        super().leave_out(name, error, why=why)
        process.close()
        try:
            self._started_again[name] = self._start(name)
        except RlvrError as gone:  # the node, with all that was on it
            self.note(f"The sampler {name} cannot be started again, and is left out: {gone.problem}")

    def sleep(self) -> None:
        """Do nothing: the processes have devices of their own."""

    def close(self) -> None:
        """Kill all processes and their children; closing twice is allowed."""
        for process in (*self.members.values(), *self._started_again.values()):
            process.close()
        self._shared.close()

    def _await_open(self) -> None:
        self._each(lambda process: process.seeding)

    def _each(self, do: Callable[[SamplingProcess], object]) -> None:
        """Do something with each process; one that has died is left out."""
        for name, process in list(self.members.items()):
            try:
                do(process)
            except RlvrError as error:
                self.leave_out(name, error)

    def _readmit(self) -> None:
        """Give the processes that were started again the weights. One that fails now is not started again."""
        self._each(lambda process: process.worker.check())
        while self._started_again:
            name, process = self._started_again.popitem()
            try:
                if self._sent is not None:
                    process.take_weights(self._sent)
                    process.verify_weights(self._sent)
            except RlvrError as error:
                process.close()
                self.note(f"The sampler {name} was started again in vain, and is left out: {error.problem}")
            else:
                self.members[name] = process
