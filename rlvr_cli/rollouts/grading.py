"""Completions on their way through the graders, while others are sampled."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from datetime import UTC, datetime
from typing import Any

from rlvr_cli.config.shared import PromptOptions
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.types import Completion, Grade

GRADE_ROWS = 64  # completions that are graded together
GRADING_AHEAD = 4  # so many of these may be with the graders before sampling waits for them
UNFINISHED_KINDS = {"no_think_close", "no_answer_tags", "malformed_tags", "empty", "unparsed_answer"}


def choose_grader(grader: str, *, dataset_grader: str | None, prompt: str) -> str:
    """The grader that was named, else the dataset's own, else the one that reads the prompt's answers."""
    return grader or dataset_grader or ("question_only" if prompt == "question_only" else "r1_zero")


def grader_pool(config: PromptOptions, dataset_grader: str | None) -> GraderPool:
    """The grader that was named, or the one that fits the dataset, in its processes."""
    return GraderPool(
        choose_grader(config.grader, dataset_grader=dataset_grader, prompt=config.prompt),
        format_rule=config.format_rule,
        workers=config.grader_workers,
        timeout=config.grader_timeout,
    )


class Grading:
    """Completions on their way through the graders, while others are sampled; in the order in which they came."""

    def __init__(
        self,
        grader: GraderPool,
        *,
        ground_truth: Callable[[Completion], str],
        example: Callable[[Completion], Mapping[str, Any]],
    ) -> None:
        """`example` gives the fields of what a completion answers, for a grader that asks for them."""
        self._grader, self._ground_truth, self._example = grader, ground_truth, example
        self._fresh: list[Completion] = []
        self._batches: deque[tuple[list[Completion], datetime, Future[list[Grade]]]] = deque()
        self.waited = 0.0  # seconds, for the graders

    @property
    def under_way(self) -> bool:
        """Whether the graders have any."""
        return bool(self._batches)

    def add(self, completion: Completion) -> None:
        """Take one more; as soon as they are `GRADE_ROWS` they go to the graders."""
        self._fresh.append(completion)
        if len(self._fresh) >= GRADE_ROWS:
            self.send()

    def send(self) -> None:
        """Hand the graders what they do not have yet."""
        if self._fresh:
            batch, self._fresh = self._fresh, []
            pairs = [(c.text, self._ground_truth(c)) for c in batch]
            verdicts = self._grader.submit(pairs, example_of=lambda i: self._example(batch[i]))
            self._batches.append((batch, utc_now_naive(), verdicts))

    def verdicts(self, *, within: float | None) -> Iterator[list[tuple[Completion, datetime, Grade]]]:
        """Those that are there or come within so many seconds (None: all), batch by batch, with the time of their sending.

        Where the graders are far behind it waits for them: no more than `GRADING_AHEAD` batches are left with them.

        Raises:
            RlvrError: the graders failed on a batch, which is then gone; the next call goes on with the one after it.
        """
        started = time.monotonic()
        while self._batches:
            batch, sent_at, future = self._batches[0]
            if not future.done():
                behind = len(self._batches) > GRADING_AHEAD
                before = time.monotonic()
                rest = None if within is None or behind else within - (before - started)
                if rest is not None and rest <= 0:
                    return
                wait([future], timeout=rest)
                self.waited += time.monotonic() - before
                if not future.done():
                    return
            self._batches.popleft()
            yield [(c, sent_at, grade) for c, grade in zip(batch, future.result(), strict=True)]

    def give_up(self) -> None:
        """Forget all that the graders are not done with."""
        self._fresh.clear()
        for _, _, future in self._batches:
            future.cancel()
        done = [entry for entry in self._batches if entry[2].done() and not entry[2].cancelled()]
        self._batches = deque(done)


def verdict_of(grade: Grade, *, finish_reason: str) -> dict[str, Any]:
    """What a `Rollout` and a `Regrade` hold of a grade, by the names of their fields."""
    return {
        "format_reward": grade.format_reward,
        "answer_reward": grade.answer_reward,
        "reward": grade.reward,
        "grade_error": grade.error,
        "extracted_answer": grade.extracted_answer,
        "category": grade.category,
        "failure_kind": failure_kind_of(grade, finish_reason=finish_reason),
    }


def failure_kind_of(grade: Grade, *, finish_reason: str) -> str | None:
    """Why there was no reward: what was cut at the length limit has no answer for that, whatever the grader saw missing."""
    truncated = finish_reason == "length" and grade.failure_kind in UNFINISHED_KINDS
    return "truncated" if truncated else grade.failure_kind


def utc_now_naive() -> datetime:
    """UTC, naive, as the store wants it."""
    return datetime.now(UTC).replace(tzinfo=None)
