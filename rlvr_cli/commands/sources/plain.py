"""The next questions, and a group of responses to each."""

from rlvr_cli.commands.sources.sampling import Sampling
from rlvr_cli.training.loop import Place, RolloutBatch


class Plain:
    """Samples as many groups as a batch has, and gives all of them."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def next_batch(self, place: Place) -> RolloutBatch:
        sampling = self._sampling
        indices, asked = sampling.order.draw(sampling.num_questions, number=place.number, start=place.asked)
        syncing = sampling.sync_weights()
        rollouts = sampling.sample(indices, place)
        return sampling.record(rollouts, place, asked=asked, metrics=syncing)

    def sample_ahead(self, place: Place | None) -> None:
        """Do nothing: the next batch needs the weights that are being trained."""

    def finish(self) -> None:
        """Nothing is left."""
