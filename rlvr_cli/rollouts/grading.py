"""Grade completions in the background while others are sampled."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rlvr_cli.config.shared.prompt import PromptOptions, is_judge
from rlvr_cli.config.store.grade import GradeConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.pool import GraderPool, described_error
from rlvr_cli.judges.pool import JudgePool
from rlvr_cli.runs.readers import read_parts
from rlvr_cli.runs.storage.files import typed
from rlvr_cli.terminal import console
from rlvr_cli.types import Completion, Grade, Graders, Phase

GRADE_ROWS = 64  # completions per grading batch
GRADING_AHEAD = 4  # batches that may be pending before sampling waits for the graders
UNFINISHED_KINDS = {
    "no_think_close", "no_answer_tags", "malformed_tags", "no_format", "no_code", "empty", "unparsed_answer",
}  # fmt: skip
ENVIRONMENT_ERROR = "environment_error"
WRONG_KINDS = {"wrong_answer", "low_reward"}  # which say no more than that the answer is wrong


class GradeError(NamedTuple):
    """Why a response has no grade: fields of its `Rollout`."""

    grade_error: str | None  # None: it has one
    grade_error_detail: str | None
    failure_kind: str | None


def choose_grader(grader: str, *, dataset_grader: str | None, prompt: str) -> str:
    """Return the grader that the user chose, else the dataset's, else the one for the prompt template."""
    return grader or dataset_grader or ("question_only" if prompt == "question_only" else "r1_zero")


def grader_pool(config: PromptOptions, dataset_grader: str | None) -> Graders:
    """Return what grades for the grader from `choose_grader`; it starts with the first `grade` or `submit`."""
    return open_graders(choose_grader(config.grader, dataset_grader=dataset_grader, prompt=config.prompt), config)


def open_graders(
    spec: str,
    config: "PromptOptions | GradeConfig",
    *,
    workers: int | None = None,
    report: Callable[[str], None] | None = None,
) -> Graders:
    """Return a pool of worker processes, or a judge.

    Args:
        workers: processes; None: as many as the options say.
        report: gets what there is to say, see `GraderPool`; None: it is printed.
    """
    report = report or say_failure
    if is_judge(spec):
        return JudgePool(spec, config, report=report)
    return GraderPool(
        spec,
        format_rule=config.format_rule,
        workers=workers or config.grader_workers,
        timeout=config.grader_timeout,
        report=report,
    )


def say_failure(sentence: str) -> None:
    """Print what a pool of graders reports."""
    console.say(f"note: {sentence}")


def stored_errors(run: Path, *, phase: Phase, step: int) -> Iterator[GradeError]:
    """The error of each grade of a phase and step, read part by part."""
    for part in read_parts(run, phase=phase, step=step, columns=GradeError._fields):
        yield from (GradeError(**row) for row in part.to_pylist())


def check_grade_errors(
    errors: Iterable[GradeError], *, at_most: float, of: str, hint: str, environment: str = ""
) -> None:
    """Raise RlvrError, with the commonest error, if more than this share of grades failed.

    Args:
        at_most: a share; 1 never raises.
        of: what the responses are of, such as "the first batch".
        hint: what to do about it.
        environment: what plays the episodes, if they are such.
    """
    total, failed, kinds = 0, Counter[GradeError](), Counter[tuple[str | None, str | None]]()
    for error in errors:
        total += 1
        if error.grade_error is not None:
            failed[error] += 1
            kinds[error.grade_error, error.failure_kind] += 1
    if failed.total() <= at_most * total:
        return
    ((commonest, _),) = kinds.most_common(1)
    worst = max((e for e in failed if (e.grade_error, e.failure_kind) == commonest), key=failed.__getitem__)
    if worst.failure_kind == ENVIRONMENT_ERROR:
        mine = sum(n for e, n in failed.items() if e.failure_kind == ENVIRONMENT_ERROR)
        what = f"The environment {environment} failed in {mine} of the {total} episodes of {of}"
    else:
        what = f"{failed.total()} of the {total} responses of {of} could not be graded"
    described = described_error(worst.grade_error or "", worst.grade_error_detail)
    raise RlvrError(f"{what}; {failed[worst]} of them: {described}", hint)


def check_some_graded(run: Path, *, of: str, hint: str, environment: str = "") -> None:
    """Raise RlvrError if not one response of an evaluation could be graded. Arguments as of `check_grade_errors`."""
    errors = partial(stored_errors, run, phase="eval", step=0)
    if all(each.grade_error is not None for each in errors()):  # mostly the first row decides
        check_grade_errors(errors(), at_most=0, of=of, hint=hint, environment=environment)


def grader_hint(run: Path, *, phase: Phase) -> str:
    """What to do about a grader whose grades fail in training."""
    return (
        f"rlvr analyze failures {typed(run)} --phase {phase} shows them. Correct the grader (try it with rlvr grade --check) or the environment, "
        "and start a new run. "
        "--max-grade-errors 1 trains in spite of it."
    )


class GradingQueue:
    """A queue of completions that are graded in the background; verdicts come out in the order of `add`."""

    def __init__(
        self,
        grader: Graders,
        *,
        ground_truth: Callable[[Completion], str],
        example: Callable[[Completion], Mapping[str, Any]],
    ) -> None:
        """
        Args:
            ground_truth: completion -> ground truth.
            example: completion -> fields of its example, for graders that have an `example` parameter.
        """
        self._grader, self._ground_truth, self._example = grader, ground_truth, example
        self._fresh: list[Completion] = []
        self._batches: deque[tuple[list[Completion], datetime, Future[list[Grade]]]] = deque()
        self.waiting_seconds = 0.0  # spent waiting for the graders

    @property
    def has_pending(self) -> bool:
        """Whether any batch has been sent and not yet returned."""
        return bool(self._batches)

    def add(self, completion: Completion) -> None:
        """Add a completion; every `GRADE_ROWS` completions are sent to the graders as a batch."""
        self._fresh.append(completion)
        if len(self._fresh) >= GRADE_ROWS:
            self.send()

    def send(self) -> None:
        """Send the completions that are not in a batch yet."""
        if self._fresh:
            batch, self._fresh = self._fresh, []
            judged = [c for c in batch if c.grade is None]
            pairs = [(c.graded_text, self._ground_truth(c)) for c in judged]
            verdicts = self._grader.submit(pairs, example_of=lambda i: self._example(judged[i]))
            self._batches.append((batch, utc_now_naive(), verdicts))

    def verdicts(self, *, within: float | None) -> Iterator[list[tuple[Completion, datetime, Grade]]]:
        """Yield finished batches as (completion, time of sending, grade), waiting up to `within` seconds (None: for all).

        If the graders are far behind, this waits longer, until at most `GRADING_AHEAD` batches are pending.

        Raises:
            RlvrError: the graders failed on a batch. That batch is dropped; the next call continues with the following
                one.
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
                self.waiting_seconds += time.monotonic() - before
                if not future.done():
                    return
            self._batches.popleft()
            verdicts = iter(future.result())
            yield [(c, sent_at, c.grade or next(verdicts)) for c in batch]

    def cancel(self) -> None:
        """Cancel and forget every batch that is not finished."""
        self._fresh.clear()
        for _, _, future in self._batches:
            future.cancel()
        done = [entry for entry in self._batches if entry[2].done() and not entry[2].cancelled()]
        self._batches = deque(done)


def grade_fields(
    grade: Grade,
    *,
    finish_reason: str,
    episode: Mapping[str, Any] | None = None,
    turn_facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the grade as fields that `Rollout` and `Regrade` share, by name. `episode`, `turn_facts`: see `failure_kind_of`."""
    return {
        "format_reward": grade.format_reward,
        "answer_reward": grade.answer_reward,
        "reward": grade.reward,
        "grade_error": grade.error,
        "extracted_answer": grade.extracted_answer,
        "category": grade.category,
        "failure_kind": failure_kind_of(grade, finish_reason=finish_reason, episode=episode, turn_facts=turn_facts),
        "grade_error_detail": grade.error_detail,
        "judgement": grade.judgement,
    }


def failure_kind_of(
    grade: Grade,
    *,
    finish_reason: str,
    episode: Mapping[str, Any] | None = None,
    turn_facts: Mapping[str, Any] | None = None,
) -> str | None:
    """Return the grader's failure kind, or what explains it.

    That is what left the response unfinished, "truncated" or "out_of_turns"; of an episode whose answer is wrong and nothing else,
    "no_tool_call" or "tool_error"; "environment_error" of one that has no grade since its environment failed.

    Args:
        episode: the fields of an `Episode`.
        turn_facts: those of its `TurnFacts`; older runs have none.
    """
    kind, ended_by = grade.failure_kind, episode["ended_by"] if episode else ""
    if ended_by == "error" and grade.error is not None:
        return ENVIRONMENT_ERROR
    unplayed = kind == "low_reward" and ended_by in ("turns", "length")  # more turns might have been rewarded
    if kind in UNFINISHED_KINDS or unplayed:
        return "out_of_turns" if ended_by == "turns" else "truncated" if finish_reason == "length" else kind
    if episode and kind in WRONG_KINDS:
        facts = turn_facts or {"ends": (0,), "failed": ()}
        called = ended_by in ("turns", "environment", "error") or facts["ends"][-1] > episode["graded_to"]
        last = episode["num_turns"] - (1 if called else 2)  # of the turns that called
        if last < 0 and not episode["tool_calls"]:
            return "no_tool_call"
        if any(turn >= last for turn in facts["failed"]):
            return "tool_error"
    return kind


def utc_now_naive() -> datetime:
    """Return the current UTC time as a naive datetime, the format of `Rollout.sampled_at`."""
    return datetime.now(UTC).replace(tzinfo=None)
