"""Which questions a rollout batch asks (--question-order).

Enters: options, the training questions, an open run. Leaves: the indices of each batch's questions. They are a function of the seed,
of counters and of the rollouts that are committed before the batch, so that a resumed run asks the same ones.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from rlvr_cli.config.grpo import QuestionOrder as Order
from rlvr_cli.data.order import next_indices, weighted_indices
from rlvr_cli.runs.readers import read_parts
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.text import storable
from rlvr_cli.types import Example, Rollout

LEAST_PRIORITY = 0.05  # of a question that is always answered right, so that it is asked again some day


class QuestionOrder:
    """Draws the questions of each rollout batch."""

    def __init__(self, order: Order, questions: Sequence[Example], run: RunDir, *, seed: int, before: int) -> None:
        """Count the rollouts of an interrupted run.

        Args:
            order: that of --question-order.
            before: the step of the batch that is to be sampled next; only rollouts of earlier steps count.
        """
        self._order, self._seed = order, seed
        self._ids = [storable(question.id) for question in questions]
        self._asked: Counter[str] = Counter()  # responses to each question
        self._right: Counter[str] = Counter()  # and how many were rewarded
        if order == "prioritized":
            for part in read_parts(run.path, phase="train", columns=["step", "example_id", "reward"]):
                rows = zip(*(part[name].to_pylist() for name in ("step", "example_id", "reward")), strict=True)
                self._add((example_id, reward) for step, example_id, reward in rows if step < before)

    def count(self, rollouts: Iterable[Rollout]) -> None:
        """Count the rollouts of a batch that is committed."""
        self._add((r.example_id, r.reward) for r in rollouts)

    def _add(self, rewards: Iterable[tuple[str, float | None]]) -> None:
        for example_id, reward in rewards:
            self._asked[example_id] += 1
            self._right[example_id] += (reward or 0.0) > 0.5

    @property
    def priorities(self) -> list[float]:
        """1 - the success rate of each question, at least `LEAST_PRIORITY`; 1 for a question that was never asked."""
        return [
            max(1 - self._right[name] / self._asked[name], LEAST_PRIORITY) if self._asked[name] else 1.0
            for name in self._ids
        ]

    def draw(self, count: int, *, number: int, start: int, exclude: Sequence[int] = ()) -> tuple[list[int], int]:
        """Return the next questions of a batch, as `data.order.next_indices` does.

        Args:
            number: of the rollout batch, from 0.
            start: questions asked so far.
            exclude: those that the batch has asked already.
        """
        seed, order = self._seed, self._order
        if order == "prioritized":
            drawn = weighted_indices(self.priorities, count, seed=seed, draw=number, exclude=exclude)
            return drawn, start + len(drawn)
        return next_indices(len(self._ids), count, seed=None if order == "file" else seed, start=start, exclude=exclude)
