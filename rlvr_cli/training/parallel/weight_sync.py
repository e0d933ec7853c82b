"""The sampling engine, and the transfer of the policy's weights to it.

Enters: the options of a training command and the policy. Leaves: a `Sampler` that has the requested weights; each load is
verified (`samplers.weight_check`).
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from rlvr_cli.config.shared.training import TrainingConfig
from rlvr_cli.models.policy import Policy, distinct_tensors
from rlvr_cli.samplers.open import engine_kind, settings_of
from rlvr_cli.samplers.parallel.process import SamplingProcess
from rlvr_cli.samplers.parallel.processes import SamplingProcesses
from rlvr_cli.training.optimizers.optimizer_state import move_state
from rlvr_cli.training.parallel.placement import Placement
from rlvr_cli.training.parallel.trainers import DividedSampler, Trainers
from rlvr_cli.training.planning.memory import MemoryPlan
from rlvr_cli.types import Sampler

_LAGGING = "lagging/"  # prefix of a `Snapshot`'s weights in a checkpoint's tensors


@dataclass(frozen=True)
class Snapshot:
    """The weights of the policy after `version` updates, on the CPU."""

    version: int
    weights: dict[str, Tensor]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights under the names that a checkpoint gives them."""
        return {f"{_LAGGING}{name}": tensor for name, tensor in self.weights.items()}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor], *, version: int) -> "Snapshot":
        """The inverse of `tensors`."""
        names = [name for name in tensors if name.startswith(_LAGGING)]
        return Snapshot(version, {name.removeprefix(_LAGGING): tensors[name] for name in names})

    @contextmanager
    def loaded_into(self, policy: Policy) -> Iterator[None]:
        """Load these weights into the policy within the block, and restore its own afterwards, bit for bit."""
        kept = {n: tensor.detach().clone() for n, tensor in distinct_tensors(policy.weights()).items()}
        try:
            policy.load_weights(self.weights)
            yield
        finally:
            policy.load_weights(kept)


class WeightSync:
    """A sampler that follows the policy.

    Attributes:
        sampler: the engine, or what plays episodes with it. If it shares the trainer's model, it opens when it is first needed, after
            `attach`: it refuses models that can be trained.
        process: the engine, if it samples ahead in a separate process (--async-steps), else None.
        snapshot: the weights that the next rollouts are sampled with, if not the current ones.
    """

    def __init__(self, config: TrainingConfig, *, engine: str, placement: Placement, memory: MemoryPlan) -> None:
        """Open the engine, unless it shares the trainer's model; it must take its share of memory before the trainer loads."""
        self.config = config
        self.process: SamplingProcess | None = None
        self.snapshot: Snapshot | None = None
        self._sampler: Sampler | None = None
        kind = engine_kind(engine)
        self._settings = replace(
            settings_of(config),
            device=placement.engine,
            takes_weights=True,
            gpu_memory_utilization=memory.utilization,
            # On a CPU too: there the engine notes that it cannot sleep.
            sleep_mode=not config.samples_apart
            and placement.trainer == placement.engine
            and not memory.keeps_workspace,
        )
        self._moves_state = memory.moves_state
        self._optimizer: torch.optim.Optimizer | None = None
        self._share = None if config.samples_apart else kind.share
        self._synced: tuple[int, int] | None = None  # the version that the sampler serves, and see `_state`
        precisions = {"param_dtype": config.param_dtype, "compute_dtype": config.compute_dtype}
        if config.async_steps:
            self._sampler = self.process = SamplingProcess(engine, asdict(self._settings) | precisions)
        elif config.samplers > 1:
            self._sampler = SamplingProcesses(engine, asdict(self._settings) | precisions, devices=placement.engines)
        elif self._share is None:
            self._sampler = kind.open(self._settings)
            self._sampler.sleep()

    def attach(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        trainers: Trainers | None = None,
        played: Callable[[Sampler], Sampler] = lambda engine: engine,
    ) -> None:
        """Use this policy's weights from now on. The embedded engine samples from the policy's model itself, without a copy.

        Args:
            optimizer: its state is moved out of the way of an engine that needs the room (`MemoryPlan.moves_state`).
            trainers: if there are several, each samples a share with the embedded engine.
            played: an engine -> what plays episodes with it, if there is an environment.
        """
        self._policy, self._optimizer, self._trainers, self._played = policy, optimizer, trainers, played
        if self._sampler is not None:
            self._sampler = played(self._sampler)
        if trainers is not None:
            trainers.sample = self._share is not None

    @property
    def policy(self) -> Policy:
        """The policy with its weights."""
        return self._policy if self._trainers is None else self._trainers.policy

    @property
    def sampler(self) -> Sampler:
        if self._sampler is None:
            assert self._share is not None
            self._sampler = self._played(self._share(self.policy, self._settings))
            if self._trainers is not None and self._trainers.size > 1:
                self._sampler = DividedSampler(self._sampler, self._trainers, sleep_mode=self._settings.sleep_mode)
        return self._sampler

    def sleep(self) -> None:
        """Let the engine, if it is open, release its device memory until it is needed again: before the trainer computes."""
        if self._sampler is not None:
            self._sampler.sleep()
        if self._settings.sleep_mode and self._share is None:
            self._synced = None  # the engine has no weights when it wakes
        self._move_optimizer_state(to_host=False)

    def _move_optimizer_state(self, *, to_host: bool) -> None:
        if self._moves_state and self._optimizer is not None:
            move_state(self._optimizer, to_host=to_host)

    def _state(self, version: int) -> tuple[int, int]:
        """What the sampler must serve: this version. If it shares the policy's weights, also where these are now."""
        if self._share is None or self._trainers is None:
            return version, 0
        _ = self.policy
        return version, self._trainers.replica.gathers

    def sync(self, version: int) -> float:
        """Load the policy's weights into the sampler and verify them. Returns seconds."""
        started = time.perf_counter()
        if self._synced != self._state(version):
            self._move_optimizer_state(to_host=True)
            self.sampler.load_weights(self.policy, version)
            self._synced = self._state(version)
        return time.perf_counter() - started

    def sync_rollouts(self, version: int) -> float:
        """Sync the weights that the next training rollouts use: the snapshot with --async-steps, else the policy. Returns seconds."""
        if self.process is None:
            return self.sync(version)
        started = time.perf_counter()
        if self.snapshot is None:
            self.snapshot_policy(version)
        assert self.snapshot is not None
        if self._synced != self._state(self.snapshot.version):
            with self.snapshot.loaded_into(self.policy):
                self.sampler.load_weights(self.policy, self.snapshot.version)
            self._synced = self._state(self.snapshot.version)
        return time.perf_counter() - started

    def snapshot_policy(self, version: int) -> None:
        """Keep a copy of the current weights: the next rollouts use it while the policy is trained, also after a resume."""
        weights = distinct_tensors(self.policy.weights())
        self.snapshot = Snapshot(version, {n: t.detach().to("cpu", copy=True) for n, t in weights.items()})

    def close(self) -> None:
        """Close the engine, if it was opened."""
        if self._sampler is not None:
            self._sampler.close()
