"""Dynamic sampling: questions are asked until every group of the batch has differing rewards (DAPO, 2503.14476, section 3.2)."""

from rlvr_cli.commands.sources.sampling import Sampling
from rlvr_cli.training.credit.groups import groups_with_signal
from rlvr_cli.training.loop import Place, RolloutBatch
from rlvr_cli.types import Rollout


class DynamicSampling:
    """Drops groups without a signal, and samples others in their place.

    Args:
        max_rounds: after so many, a batch is what it is.
        by_turn: see `groups_with_signal`.
    """

    def __init__(self, sampling: Sampling, *, max_rounds: int, by_turn: bool) -> None:
        self._sampling, self._max_rounds, self._by_turn = sampling, max_rounds, by_turn

    def next_batch(self, place: Place) -> RolloutBatch:
        sampling, size, asked = self._sampling, self._sampling.group_size, place.asked
        sampled: list[Rollout] = []
        used: list[Rollout] = []
        indices: list[int] = []
        rounds = 0
        syncing = sampling.sync_weights()
        while (lacking := sampling.num_questions - len(used) // size) and rounds < self._max_rounds:
            fresh, asked = sampling.order.draw(lacking, number=place.number, start=asked, exclude=indices)
            if not fresh:
                break
            rollouts = sampling.sample(fresh, place)
            signal = groups_with_signal(rollouts, group_size=size, by_turn=self._by_turn)
            used += [r for number, r in enumerate(rollouts) if signal[number // size]]
            sampled, indices, rounds = sampled + rollouts, indices + fresh, rounds + 1
        metrics = syncing | {"groups/used": len(used) / size, "sampling/rounds": float(rounds)}
        return sampling.record(used, place, asked=asked, sampled=sampled, metrics=metrics)

    def sample_ahead(self, place: Place | None) -> None:
        """Do nothing: the next batch needs the weights that are being trained."""

    def finish(self) -> None:
        """Nothing is left."""
