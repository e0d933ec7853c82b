"""Sampling ahead: a process samples the next batch while the trainer trains on this one, with weights one batch old (--async-steps)."""

from rlvr_cli.commands.sources.sampling import Sampling
from rlvr_cli.rollouts.requests import prefetch_groups
from rlvr_cli.training.loop import Place, RolloutBatch, RolloutSource


class Ahead:
    """Another source, whose first questions of a batch are asked while the one before is trained on."""

    def __init__(self, source: RolloutSource, sampling: Sampling) -> None:
        self._source, self._sampling = source, sampling

    def next_batch(self, place: Place) -> RolloutBatch:
        return self._source.next_batch(place)

    def sample_ahead(self, place: Place | None) -> None:
        """Keep the weights as they are before the updates of this batch, and let the sampling process start on the next one with them."""
        sampling, trainer = self._sampling, self._sampling.trainer
        if trainer.updates == trainer.step_of_batch:  # else the run was resumed between the updates, and has them
            trainer.weights.snapshot_policy(trainer.updates)
        if place is None:
            return
        assert trainer.weights.process is not None
        trainer.sync_weights(trainer.updates, rollouts=True)
        indices, _ = sampling.order.draw(sampling.num_questions, number=place.number, start=place.asked)
        prefetch_groups(
            trainer.run,
            step=place.step,
            examples=[sampling.inputs.questions[i] for i in indices],
            num_samples=sampling.group_size,
            template=sampling.inputs.template,
            sampler=trainer.weights.process,
            params=trainer.config.sampling_params,
            seed=trainer.config.seed,
        )

    def finish(self) -> None:
        self._source.finish()
