"""The loops of training: rollout batches and the updates on each (`rollout_loop`), or updates on data that are given (`data_loop`).

Enters: a trainer, and a source of rollouts or a stream of minibatches. Leaves: what an algorithm needs next, in order, from where the
run stands: one that was interrupted goes on with the next update of the same batch. The loops evaluate when it is due, look at the time
limit and the updates, keep what a resumed run needs, and show the progress; an algorithm says what is computed.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, Unpack

from torch import Tensor

from rlvr_cli.data.order import update_rows
from rlvr_cli.models.tokens.tokenization import Batch
from rlvr_cli.terminal.console import Progress
from rlvr_cli.training.checks import UpdateChecks
from rlvr_cli.training.trainer import Trainer
from rlvr_cli.training.updates.tensors import select_rows
from rlvr_cli.training.updates.update import UpdateOptions
from rlvr_cli.types import Rollout

T = TypeVar("T")

BY_BATCH = "by_batch"  # as `schedule` in run.json: the learning rate is that of the planned updates of each batch


@dataclass(frozen=True)
class Place:
    """Where a run needs a rollout batch. With the seed and what is stored, these counters determine all data that follow.

    Attributes:
        number: of the batch, from 0.
        step: updates done before the batch is trained on, which is the step of its rollouts.
        asked: questions asked for the batches before, counted over all epochs of the dataset.
    """

    number: int
    step: int
    asked: int


class RolloutBatch(NamedTuple):
    """A batch to train on.

    Attributes:
        rollouts: whole groups, each contiguous; graded, credited and stored.
        asked: questions asked so far, those of this batch included.
        signals: values for the progress bar.
    """

    rollouts: list[Rollout]
    asked: int
    signals: dict[str, float]


class RolloutSource(Protocol):
    """Where the batches come from."""

    def next_batch(self, place: Place) -> RolloutBatch:
        """Sample, grade, credit and store the groups to train on, or read those that an interrupted run stored."""
        ...

    def sample_ahead(self, place: Place | None) -> None:
        """The updates on the batch begin: start on the next one meanwhile, or do nothing.

        Args:
            place: of the next batch; None: the run needs no other.
        """
        ...

    def finish(self) -> None:
        """Say what is left when the run has its last batch."""
        ...


@contextmanager
def rollout_loop(
    trainer: Trainer,
    source: RolloutSource,
    *,
    num_steps: int,
    shown: Mapping[str, str],
    checks: UpdateChecks | None = None,
    evaluate_every: Literal["updates", "steps"] = "updates",
) -> Iterator["RolloutLoop"]:
    """Show the progress of a run of `num_steps` rollout batches while it goes through them.

        with rollout_loop(trainer, source, num_steps=2, shown={"nll": "loss/nll"}) as loop:
            for rollouts in loop.batches():
                loop.begin_updates(len(rollouts), batch_size=4, epochs=1)
                for rows in loop.minibatches():
                    loop.update(rollout_tensors([rollouts[row] for row in rows], pad_id=0))

    Args:
        shown: metrics of an update in the progress bar, by label.
        checks: look at each update.
        evaluate_every: what --eval-every counts.
    """
    longer = f"--n-{trainer.run.metadata['command']}-steps {2 * num_steps}"
    done = trainer.cursor.get("steps", trainer.updates)  # rlvr distill did not count steps: each has one update
    with trainer.progress("steps", num_steps, done=done, longer=longer) as bar:
        yield RolloutLoop(
            trainer,
            source,
            bar,
            steps=range(done, num_steps),
            shown=shown,
            checks=checks,
            evaluate_every=evaluate_every,
        )
    source.finish()


class RolloutLoop:
    """Goes through the batches of a run and the updates on them.

    Attributes:
        number: of the present batch, from 0.
        step: updates done before it.
        done: updates on it so far.
    """

    def __init__(
        self,
        trainer: Trainer,
        source: RolloutSource,
        bar: Progress,
        *,
        steps: range,
        shown: Mapping[str, str],
        checks: UpdateChecks | None,
        evaluate_every: Literal["updates", "steps"],
    ) -> None:
        """Use `rollout_loop`.

        Args:
            steps: the numbers of the batches that are left, the one that is under way first.
        """
        self.number, self._num_steps = steps.start, steps.stop
        self.step = trainer.step_of_batch
        self.done = trainer.updates - self.step
        self._trainer, self._source, self._bar = trainer, source, bar
        self._shown, self._checks, self._evaluate_every = shown, checks, evaluate_every
        self._asked = trainer.cursor.get("asked", 0)  # questions, before the present batch
        self._by_batch = trainer.run.metadata.get("schedule") == BY_BATCH
        self._empty = trainer.cursor.get("empty", 0)  # batches without a row so far, if the schedule goes by batches
        self._batch = RolloutBatch([], self._asked, {})
        self._signals: dict[str, float] = {}
        self._minibatches: list[list[int]] | None = None
        self._first_epoch: list[list[int]] = []
        self._kept: dict[str, Tensor] = {}

    def batches(self) -> Iterator[list[Rollout]]:
        """The rollouts of each batch, until the run has all of them or its time is over."""
        while self.number < self._num_steps and self._trainer.has_time(evaluates=self._evaluates):
            self._batch = self._source.next_batch(Place(self.number, self.step, self._asked))
            self._signals, self._minibatches, self._kept = dict(self._batch.signals), None, {}
            self._evaluate()
            yield self._batch.rollouts
            self._trainer.metrics.add(self.step, {"step/seconds": self._trainer.clock.step_seconds})
            self.number, self.step, self.done = self.number + 1, self._trainer.updates, 0
            self._asked = self._batch.asked
            self._bar.advance(1, **self._signals)

    def begin_updates(self, count: int, *, batch_size: int, epochs: int) -> None:
        """Divide `count` rows into the minibatches of the updates, epoch after epoch, each in another random order.

        From now on the source may sample ahead. A batch for which this is not called has one update. Without a row there is none, and
        one is counted as skipped.
        """
        seed = self._trainer.config.seed
        self._minibatches = update_rows(count, batch_size=batch_size, epochs=epochs, seed=seed, number=self.number)
        self._first_epoch = self._minibatches[: len(self._minibatches) // epochs]
        following = Place(self.number + 1, self.step + max(self.num_updates, 1), self._batch.asked)
        self._source.sample_ahead(following if following.number < self._num_steps else None)

    @property
    def num_updates(self) -> int:
        """The updates on the present batch; 0 for one without a row, where one is counted as skipped."""
        return 1 if self._minibatches is None else len(self._minibatches)

    def minibatches(self) -> Iterator[list[int]]:
        """The rows of each update that is still to be done, in order; `update` must be called once for each."""
        assert self._minibatches is not None, "begin_updates comes first"
        for number, rows in enumerate(self._minibatches[self.done :]):
            if number:
                self._evaluate()
            yield rows
        if not self._minibatches:
            self._empty += self._by_batch
            self._trainer.skip(self._after)

    def old_scores(self, batch: Batch, **how: Any) -> dict[str, Tensor]:
        """Compute what the policy says of a batch before the first update on it: `old_log_probs` and, of a critic, `old_values`.

        Once per batch, in the minibatches of its first epoch. They are kept in checkpoints within the batch: a resumed run could not
        compute them again, because the weights have changed.

        Args:
            how: see `Trainer.scores`.

        Returns:
            Columns (batch, seq), 0 outside the responses.
        """
        assert self._minibatches is not None, "begin_updates comes first"
        kept = self._trainer.tensors if self.done else {}
        self._kept = {name: kept[name] for name in ("old_log_probs", "old_values") if name in kept}
        if not self._kept:
            for rows in self._first_epoch:
                for name, scored in self._trainer.scores(select_rows(batch, rows), **how).items():
                    zeros = scored.new_zeros(batch["response_mask"].shape)
                    self._kept.setdefault(f"old_{name}", zeros)[rows] = scored
        return self._kept

    def update(self, batch: Mapping[str, Tensor], **how: Unpack[UpdateOptions]) -> None:
        """Do the next update on the batch, see `Trainer.update`."""
        last = self.done + 1 >= self.num_updates
        metrics = self._trainer.update(
            batch,
            cursor=self._after if last else self._cursor(self.number, asked=self._asked, done=self.done + 1),
            tensors={} if last else self._kept,
            learning_rate=self._learning_rate,
            **how,
        )
        self.done += 1
        if metrics["update/tokens"]:
            self._signals |= {label: metrics[name] for label, name in self._shown.items()}
            if self._checks is not None:
                self._checks.look_at(metrics, batch, number=self.done)

    def show(self, **signals: float) -> None:
        """Show more values in the progress bar."""
        self._signals |= signals

    @property
    def _after(self) -> dict[str, int]:
        """The cursor after the last update on the batch."""
        return self._cursor(self.number + 1, asked=self._batch.asked, done=0)

    def _cursor(self, number: int, *, asked: int, done: int) -> dict[str, int]:
        cursor = {"steps": number, "asked": asked, "updates_of_batch": done}
        return cursor | ({"empty": self._empty} if self._empty else {})

    @property
    def _learning_rate(self) -> float:
        """Of the next update. Where batches vary in size, the schedule goes by batches, so that it ends with the run."""
        trainer = self._trainer
        if not self._by_batch:
            return trainer.learning_rate_at(trainer.updates)
        planned = self.number * (trainer.num_updates // self._num_steps) + self.done
        return trainer.learning_rate_at(planned, trained=trainer.updates - self._empty)

    def _evaluate(self) -> None:
        if self._evaluates is None:
            self._trainer.evaluate_if_due()
        elif self._evaluates:
            self._trainer.evaluate()

    @property
    def _evaluates(self) -> bool | None:
        """Whether an evaluation is due before the first update on the batch; None if --eval-every counts updates.

        Under a time limit one is due, too, where none has shown yet how long the last one takes.
        """
        if self._evaluate_every == "updates":
            return None
        config, evaluator = self._trainer.config, self._trainer.evaluator
        is_unknown = bool(config.time_limit and evaluator and not evaluator.seconds_per_question)
        return not self.done and (is_unknown or bool(config.eval_every and self.number % config.eval_every == 0))


@contextmanager
def data_loop(trainer: Trainer, stream: Iterable[T], *, shown: Mapping[str, str]) -> Iterator["DataLoop[T]"]:
    """Show the progress of a run while it goes through the minibatches of a dataset, see `rollout_loop`.

    Args:
        stream: the minibatches of the whole run.
    """
    with trainer.progress("updates", trainer.num_updates, done=trainer.updates) as bar:
        yield DataLoop(trainer, stream, bar, shown=shown)


class DataLoop(Generic[T]):
    """Goes through the minibatches of a dataset, one update each."""

    def __init__(self, trainer: Trainer, stream: Iterable[T], bar: Progress, *, shown: Mapping[str, str]) -> None:
        """Use `data_loop`."""
        self._trainer, self._stream, self._bar, self._shown = trainer, stream, bar, shown

    def minibatches(self) -> Iterator[T]:
        """Those that are left, until the run's time is over; `update` must be called once for each."""
        trainer = self._trainer
        for minibatch in islice(self._stream, trainer.updates, trainer.num_updates):
            if not trainer.has_time():
                break
            trainer.evaluate_if_due()
            yield minibatch

    def update(
        self, batch: Mapping[str, Tensor], *, tensors: dict[str, Tensor] | None = None, **how: Unpack[UpdateOptions]
    ) -> None:
        """Do the next update, see `Trainer.update`."""
        metrics = self._trainer.update(batch, cursor={}, tensors=tensors, **how)
        self._bar.advance(1, **{label: metrics[name] for label, name in self._shown.items() if name in metrics})
