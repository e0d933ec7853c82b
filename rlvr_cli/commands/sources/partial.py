"""Partial rollouts: a response that has got its tokens of a step goes on in the next one (Kimi k1.5, 2501.12599)."""

from collections.abc import Sequence
from dataclasses import replace

from rlvr_cli.commands.sources.sampling import Sampling
from rlvr_cli.rollouts.collect import stored_stats
from rlvr_cli.rollouts.metrics import SamplingStats
from rlvr_cli.rollouts.partial import (
    Answers,
    extended,
    has_ended,
    partial_metrics,
    sample_segments,
    stored_in_flight,
    with_origin,
)
from rlvr_cli.runs.manifest import SEGMENTS
from rlvr_cli.terminal import console
from rlvr_cli.text import storable
from rlvr_cli.training.loop import Place, RolloutBatch
from rlvr_cli.types import Rollout, Segment


class PartialRollouts:
    """Lets every response in flight go on, and gives the groups whose responses have all ended.

    As many new questions are asked as groups ended in the step before, so that the number in flight stays the same.

    Args:
        tokens: that a response gets in one step, at most.
        num_steps: of the whole run.
    """

    def __init__(self, sampling: Sampling, *, tokens: int, num_steps: int) -> None:
        self._sampling, self._tokens, self._num_steps = sampling, tokens, num_steps
        self._places = {storable(question.id): i for i, question in enumerate(sampling.inputs.questions)}
        self._flight = stored_in_flight(
            sampling.trainer.run,
            before=sampling.trainer.step_of_batch,
            group_size=sampling.group_size,
            max_tokens=sampling.trainer.config.sampling_max_tokens,
            tokens=tokens,
        )

    def next_batch(self, place: Place) -> RolloutBatch:
        sampling, run = self._sampling, self._sampling.trainer.run
        begun = [self._places[name] for name in self._flight]
        missing = sampling.num_questions - len(begun)
        fresh, asked = sampling.order.draw(missing, number=place.number, start=place.asked, exclude=begun)
        syncing = sampling.sync_weights()
        segments = self._sample_segments(begun + fresh, place)
        groups = extended(self._flight, segments, group_size=sampling.group_size)
        ended = {name: group for name, group in groups.items() if has_ended(group)}
        self._flight = {name: group for name, group in groups.items() if name not in ended}

        def credit(rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
            own = [with_origin(r, ended[storable(r.example_id)][r.sample_index]) for r in rollouts]
            return sampling.credit(own, number=place.number)

        answers = Answers(ended, sampling.trainer.sampler)
        rollouts = sampling.sample([self._places[name] for name in ended], place, sampler=answers, credit=credit)
        if not rollouts:
            console.say(
                f"step {place.number + 1}: all {len(self._flight)} questions go on, so there is nothing to train on yet"
            )
        metrics = syncing | partial_metrics(segments, groups=self._flight, ended=ended)
        cost = SamplingStats.of_cost(run.cost("train", place.step, folder=SEGMENTS))
        grading = stored_stats(run, phase="train", step=place.step).grading_seconds
        return sampling.record(
            rollouts, place, asked=asked, metrics=metrics, stats=replace(cost, grading_seconds=grading)
        )

    def _sample_segments(self, indices: Sequence[int], place: Place) -> list[Segment]:
        """Sample the next tokens of the responses to these questions."""
        sampling, trainer = self._sampling, self._sampling.trainer
        return sample_segments(
            trainer.run,
            step=place.step,
            groups=self._flight,
            questions=[sampling.inputs.questions[i] for i in indices],
            tokens=self._tokens,
            template=sampling.inputs.template,
            num_samples=sampling.group_size,
            sampler=trainer.sampler,
            params=trainer.config.sampling_params,
            seed=trainer.config.seed,
            stop=trainer.stop,
        )

    def sample_ahead(self, place: Place | None) -> None:
        """Do nothing: which questions the next batch asks is known when it begins."""

    def finish(self) -> None:
        """Say how many questions are unfinished, and what goes on with them."""
        if not self._flight:
            return
        trainer, longer = self._sampling.trainer, ""
        if trainer.cursor.get("steps", 0) < self._num_steps:
            longer = ": with a longer --time-limit, --resume goes on with them"
        elif trainer.config.lr_schedule == "constant":  # else more steps would have changed the updates that are done
            longer = ": with more --n-grpo-steps, --resume goes on with them"
        console.say(f"{len(self._flight)} questions are unfinished and were not trained on{longer}")
