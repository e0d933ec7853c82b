"""What all sources of rollouts do: draw questions, sample groups of responses to them, and log what the batch is like.

Enters: an open trainer, the training questions, and what the algorithm makes of a group. Leaves: graded, credited, stored rollouts.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rlvr_cli.rollouts.collect import Credit, sample_groups, stored_stats
from rlvr_cli.rollouts.grading import GradeError, check_grade_errors, grader_hint
from rlvr_cli.rollouts.metrics import SamplingStats, rollout_metrics
from rlvr_cli.samplers.episodes.turns import environment_spec
from rlvr_cli.training.loop import Place, RolloutBatch
from rlvr_cli.training.question_order import Order, QuestionOrder
from rlvr_cli.training.session import Inputs
from rlvr_cli.training.trainer import Trainer
from rlvr_cli.types import Rollout, Sampler

SHOWN = {  # metrics in the progress bar, by label
    "reward": "reward/mean",
    "signal": "groups/signal_share",
    "length": "length/mean",
    "truncated": "length/truncated_share",
    "unfinished": "partial/unfinished_share",
}


def uncredited(rollouts: Sequence[Rollout], *, number: int) -> Sequence[Rollout]:
    """Credit nothing: the algorithm makes no advantages of a group."""
    return rollouts


def plain_metrics(rollouts: Sequence[Rollout], *, step: int) -> dict[str, float]:
    """The metrics of a batch that is not looked at by groups."""
    return rollout_metrics(rollouts)


class Sampling:
    """How a command samples its rollout batches.

    Attributes:
        trainer: with the sampler, its weights and the run.
        inputs: with the questions, the prompt template and the grader.
        order: draws the questions of each batch.
        num_questions: of a batch.
        group_size: responses to each question.
        credit: `credit(rollouts, number=)` returns the rollouts of whole groups with their advantages; `number` is that of the batch.
    """

    def __init__(
        self,
        trainer: Trainer,
        inputs: Inputs,
        *,
        num_questions: int,
        group_size: int,
        order: Order = "shuffled",
        credit: Callable[..., Sequence[Rollout]] = uncredited,
        measure: Callable[..., dict[str, float]] = plain_metrics,
    ) -> None:
        """
        Args:
            measure: `measure(rollouts, step=)` returns the metrics of all rollouts of a batch.
        """
        self.trainer, self.inputs = trainer, inputs
        self.num_questions, self.group_size = num_questions, group_size
        self.credit, self._measure = credit, measure
        self.order = QuestionOrder(
            order, inputs.questions, trainer.run, seed=trainer.config.seed, before=trainer.step_of_batch
        )

    def sync_weights(self) -> dict[str, float]:
        """Give the sampler the weights of the next rollouts. Returns the metric of the seconds that it took."""
        return {"weight_sync/seconds": self.trainer.sync_weights(self.trainer.updates, rollouts=True)}

    def sample(
        self, indices: Sequence[int], place: Place, *, sampler: Sampler | None = None, credit: Credit | None = None
    ) -> list[Rollout]:
        """Return the rollouts of each of these training questions, see `rollouts.collect.sample_groups`.

        Args:
            sampler: who answers; None: the trainer's.
            credit: None: that of the command.

        Raises:
            RlvrError: of the first batch that has any, more of them than --max-grade-errors could not be graded.
        """
        trainer = self.trainer
        rollouts = sample_groups(
            trainer.run,
            step=place.step,
            examples=[self.inputs.questions[i] for i in indices],
            num_samples=self.group_size,
            credit=credit or partial(self.credit, number=place.number),
            template=self.inputs.template,
            sampler=sampler or trainer.sampler,
            params=trainer.config.sampling_params,
            grader=self.inputs.pool,
            seed=trainer.config.seed,
            stop=trainer.stop,
        )
        if not any(phase == "train" and step < place.step for phase, step in trainer.run.steps()):
            check_grade_errors(
                (GradeError(r.grade_error, r.grade_error_detail, r.failure_kind) for r in rollouts),
                at_most=trainer.config.max_grade_errors,
                of="the first batch",
                hint=grader_hint(trainer.run.path, phase="train"),
                environment=environment_spec(trainer.config).title,
            )
        return rollouts

    def record(
        self,
        rollouts: list[Rollout],
        place: Place,
        *,
        asked: int,
        sampled: Sequence[Rollout] | None = None,
        metrics: Mapping[str, float],
        stats: SamplingStats | None = None,
    ) -> RolloutBatch:
        """Count what was sampled in the order of questions, log its metrics, and return the batch.

        Args:
            rollouts: to train on.
            asked: questions asked so far.
            sampled: all rollouts that were sampled; None: those to train on.
            metrics: of the source.
            stats: what the batch cost; None: what its stored rollouts did.
        """
        sampled = rollouts if sampled is None else sampled
        self.order.count(sampled)
        stats = stats or stored_stats(self.trainer.run, phase="train", step=place.step)
        found = {**self._measure(sampled, step=place.step), **metrics, **stats.metrics}
        self.trainer.metrics.add(place.step, found)
        shown = {label: found[name] for label, name in SHOWN.items() if name in found}
        return RolloutBatch(rollouts, asked, shown | {"tokens": float(stats.tokens)})
