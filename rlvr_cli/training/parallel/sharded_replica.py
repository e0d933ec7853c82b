"""One trainer's shard of the policy and of its optimizer's state (`--fsdp`), and how rank 0 gets both whole.

Enters: as `replica`. Leaves: a `ShardedReplica`. Its `policy` has weights only from `gather` to the next update: for an engine
that samples with them, or to be saved. Its `optimizer` has a state only from `gather_state`, or from a checkpoint that was
read, until that is saved or divided; the one that makes steps is another, over the shards.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlvr_cli.config.shared.training import TrainingConfig
from rlvr_cli.models.policy import Policy
from rlvr_cli.models.sharded import ShardedPolicy, check_shardable, empty
from rlvr_cli.training.optimizers.optimizer_state import Slot, layout, load_state
from rlvr_cli.training.parallel.ranks import Ranks, losses_within
from rlvr_cli.training.parallel.replica import Replica

_HOST = torch.device("cpu")


def open_replica(config: TrainingConfig, *, device: str, ranks: Ranks) -> Replica:
    """Load what a trainer holds: a copy of the policy or, with --fsdp, a shard of it."""
    return (ShardedReplica if config.fsdp else Replica)(config, device=device, ranks=ranks)


class ShardedReplica(Replica):
    """A shard of the policy, of its optimizer's state and, with a KL penalty, of the reference policy."""

    _trained: ShardedPolicy

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.optimizer = WholeState(self._stepped, self.policy.trainable_parameters().values())

    def _own_part(self, policy: Policy) -> ShardedPolicy:
        check_shardable(policy)
        return ShardedPolicy(policy, self.ranks.mesh(policy.device))

    def _own_reference(self) -> ShardedPolicy:
        """Divide the initial weights once more. Loaded again, they would be whole on the device beside the policy's."""
        reference = self._own_part(self.policy)
        reference.model.requires_grad_(False)
        return reference

    # On every rank at the same time

    @losses_within()
    def update(self, batch: Mapping[str, Tensor], **how: Any) -> dict[str, float]:
        self._empty()
        return self._update(batch, **how)

    @losses_within()
    def scores(self, batch: Mapping[str, Tensor], **how: Any) -> dict[str, Tensor]:
        self._empty()
        return super().scores(batch, **how)

    @losses_within()
    def gather(self, *, everywhere: bool) -> None:
        keep = everywhere or self.ranks.rank == 0
        self._trained.gather(self.policy, keep=keep)
        self.is_whole = keep
        self.gathers += 1

    @torch.no_grad()
    @losses_within()
    def gather_state(self) -> None:
        for shard, whole in self._parameters():
            state = self._stepped.state.get(shard, {})
            for key in sorted(state):
                tensor = state[key]
                if tensor.dim():
                    tensor = self._trained.whole_of(tensor, whole.shape)
                if self.ranks.rank == 0:
                    self.optimizer.state[whole][key] = tensor.to(_HOST)

    @torch.no_grad()
    @losses_within()
    def copy_rank_0(self) -> None:
        """Divide weights and optimizer state of rank 0 over all ranks."""
        self._trained.scatter(self.policy)
        self._empty()
        stepped = self.ranks.broadcast([whole in self.optimizer.state for _, whole in self._parameters()])
        found: dict[Tensor, dict[str, Tensor]] = {}
        for (shard, whole), has_state in zip(self._parameters(), stepped, strict=True):
            if has_state:
                found[shard] = {key: self._shard_of_state(whole, key, slot) for key, slot in self._slots(whole)}
        load_state(self._stepped, found)
        self.optimizer.state.clear()

    def _slots(self, whole: Tensor) -> list[tuple[str, Slot]]:
        return sorted(layout(self.optimizer, whole).items())

    def _shard_of_state(self, whole: Tensor, key: str, slot: Slot) -> Tensor:
        tensor = self.optimizer.state[whole][key] if self.ranks.rank == 0 else slot.zeros()
        return self._trained.shard_of(tensor) if slot.shape else self.ranks.broadcast(tensor)

    def _parameters(self) -> list[tuple[Tensor, Tensor]]:
        """Each trainable parameter: its shard, and its place in the whole policy."""
        shards, whole = self._trained.trainable_parameters(), self.policy.trainable_parameters()
        return [(shards[name], whole[name]) for name in shards]

    def _empty(self) -> None:
        if self.is_whole:
            empty(self.policy)
            self.is_whole = False


class WholeState(torch.optim.Optimizer):
    """What an optimizer over shards keeps of whole parameters, on the host: to be saved, or as it was read. It makes no steps."""

    def __init__(self, over_shards: torch.optim.Optimizer, whole: Iterable[Tensor]) -> None:
        super().__init__(whole, {})
        self._over_shards = over_shards

    def layout(self, parameter: Tensor) -> dict[str, Slot]:
        """Return what is kept of a whole parameter."""
        return {key: slot._replace(device=_HOST) for key, slot in layout(self._over_shards, parameter).items()}

    def step(self, closure: Any = None) -> None:
        raise AssertionError("the optimizer over the shards makes the steps")
