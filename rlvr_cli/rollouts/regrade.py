"""Grade the rollouts of an existing run with another grader, without sampling.

Enters: a run opened with `RunDir.annotate`, and a grader pool. Leaves: committed grades parts.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from rlvr_cli.config.store.grade import PhaseChoice
from rlvr_cli.data.prompts import StoredPrompts, stored_prompts
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.graders.custom import example_of_truth
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.collect import COMMIT_ROWS, COMMIT_SECONDS, Progress
from rlvr_cli.rollouts.grading import grade_fields
from rlvr_cli.runs.run_dir import Attempt, RunDir
from rlvr_cli.types import Grade, Graders, Phase, Regrade

T = TypeVar("T")
GRADED_AHEAD = 640  # responses whose grades may be under way
_POLL = 0.2  # seconds between looks at a Ctrl-C while a batch is graded
GRADED_COLUMNS = (
    "example_id",
    "sample_index",
    "prompt",
    "response",
    "ground_truth",
    "finish_reason",
    "turn_facts",
    "reward",
    "episode",
    "own_prompt",
)


@dataclass(frozen=True, slots=True)
class RegradeStep:
    """The regrading of one phase and step by a grader: numbers of its attempts, and of rollouts."""

    phase: Phase
    step: int
    attempt: int  # on all rollouts
    retry: int  # the attempt on those whose grade failed
    done: int  # have a grade of `attempt` or later
    failed: int  # have one that failed, and are tried again
    left: int  # have none


def plan_regrade(
    run: RunDir, *, grader: str, grader_sha256: str | None, phase: PhaseChoice, again: bool
) -> list[RegradeStep]:
    """Return the work per phase and step. Existing grades are kept, unless `again` is set or the grader's file changed.

    Grades that failed are not kept: these rollouts are tried again.

    Raises:
        RlvrError: the run has no rollouts of that phase.
    """
    steps: list[tuple[Phase, int]] = [place for place in run.steps() if phase in ("all", place[0])]
    if not steps:
        raise RlvrError(
            f"{run.path} has no {'' if phase == 'all' else phase + ' '}rollouts to grade.",
            "Name a run that has sampled: of rlvr eval, or of training on questions."
            if phase == "all"
            else "Use --phase all.",
        )
    counts: dict[tuple[Phase, int], Counter[Attempt]] = {}  # of the rollouts, by the last attempt on each
    last: dict[Phase, int] = {}
    on_all: dict[Phase, Attempt] = {}
    first: dict[Phase, Attempt] = {}  # the first attempt that gave a grade
    for p, s in steps:
        found = run.grade_attempts(grader, p, s).values()
        counts[p, s] = Counter(attempts[-1] for attempts in found)
        for attempts in found:
            last[p] = max(last.get(p, 0), attempts[-1].number)
            on_all[p] = max(on_all.get(p, attempts[0]), _last_on_all(attempts), key=_number)
            for attempt in attempts:
                if not attempt.failed:
                    first[p] = min(first.get(p, attempt), attempt, key=_number)
    for (p, _), of_step in counts.items():
        if p in first and any(on_all[p].number <= attempt.number < first[p].number for attempt in of_step):
            on_all[p] = first[p]  # interrupted: each grade before it had failed, so that it tried all again
    works = []
    for p, s in steps:
        number = 0
        if p in last:
            fresh = again or on_all[p].grader_sha256 != grader_sha256
            number = last[p] + 1 if fresh else on_all[p].number
        held = {attempt: count for attempt, count in counts[p, s].items() if attempt.number >= number}
        failed = sum(count for attempt, count in held.items() if attempt.failed)
        done = sum(held.values()) - failed
        left = run.num_rollouts(p, s) - done - failed
        works.append(RegradeStep(p, s, number, max(number, last.get(p, 0)) + 1, done=done, failed=failed, left=left))
    return works


def _number(attempt: Attempt) -> int:
    return attempt.number


def _last_on_all(attempts: Sequence[Attempt]) -> Attempt:
    """Return the last attempt on a rollout that did not only try a grade again that had failed."""
    for before, attempt in reversed(list(pairwise(attempts))):
        if not before.failed or before.grader_sha256 != attempt.grader_sha256:
            return attempt
    return attempts[0]


def regrade(
    run: RunDir,
    works: Sequence[RegradeStep],
    *,
    grader: str,
    grader_sha256: str | None,
    pool: Graders,
    stop: StopRequest,
    progress: Progress | None = None,
) -> None:
    """Grade what is left of `works` or failed, and commit the grades; after a kill or a signal, the next call continues.

    Args:
        grader: the name under which the grades are stored.

    Raises:
        Interrupted: `stop` was requested; all finished grades are committed.
    """
    prompts = stored_prompts(run.metadata)
    for work in works:
        if not (work.left or work.failed):
            continue
        attempts = run.grade_attempts(grader, work.phase, work.step)
        rows: dict[int, list[dict[str, Any]]] = {work.attempt: [], work.retry: []}
        for row in run.rollouts(work.phase, work.step, columns=GRADED_COLUMNS).to_pylist():
            last = attempts.get((row["example_id"], row["sample_index"]), [None])[-1]
            if last is None or last.number < work.attempt:
                rows[work.attempt].append(row)
            elif last.failed:
                rows[work.retry].append(row)
        for attempt, its in rows.items():
            made = partial(
                Regrade,
                run_id=run.id,
                phase=work.phase,
                step=work.step,
                grader=grader,
                attempt=attempt,
                grader_sha256=grader_sha256,
            )
            _grade_rows(run, its, made, prompts=prompts, pool=pool, stop=stop, progress=progress)


def _grade_rows(
    run: RunDir,
    rows: Sequence[dict[str, Any]],
    made: Callable[..., Regrade],
    *,
    prompts: StoredPrompts,
    pool: Graders,
    stop: StopRequest,
    progress: Progress | None,
) -> None:
    """Grade rows of one phase and step; `made` makes a grade of them from the fields that differ from row to row."""
    graded: list[Regrade] = []

    def commit() -> None:
        if graded:
            run.commit_grades(graded[0].phase, graded[0].step, graded)
            graded.clear()

    def submit(batch: Sequence[dict[str, Any]]) -> Future[list[Grade]]:
        pairs = [(graded_text(r), r["ground_truth"]) for r in batch]
        return pool.submit(pairs, example_of=lambda i: known_example(batch[i], prompts=prompts))

    committed = time.monotonic()
    try:
        for batch, grades in graded_batches(rows, submit, batch_size=pool.batch_size, stop=stop):
            for row, grade in zip(batch, grades, strict=True):
                graded.append(
                    made(
                        example_id=row["example_id"],
                        sample_index=row["sample_index"],
                        **grade_fields(
                            grade,
                            finish_reason=row["finish_reason"],
                            episode=row["episode"],
                            turn_facts=row["turn_facts"],
                        ),
                    )
                )
            if progress is not None:
                flipped = sum(_right(r["reward"]) != _right(g.reward) for r, g in zip(batch, grades, strict=True))
                right = sum(_right(g.reward) for g in grades)
                progress.advance(len(batch), right=right / len(batch), changed=flipped / len(batch))
            if len(graded) >= COMMIT_ROWS or time.monotonic() - committed > COMMIT_SECONDS:
                commit()
                committed = time.monotonic()
    finally:
        commit()


def graded_batches(
    rows: Sequence[T], submit: Callable[[Sequence[T]], Future[list[Grade]]], *, batch_size: int, stop: StopRequest
) -> Iterator[tuple[Sequence[T], list[Grade]]]:
    """Yield the rows in batches with their grades; the next batches are graded meanwhile.

    Args:
        batch_size: rows in a batch.

    Raises:
        Interrupted: `stop` was requested; the batches that are graded are yielded, and those under way are given up.
        RlvrError: of `submit`; as `Interrupted`.
    """
    pending: deque[tuple[Sequence[T], Future[list[Grade]]]] = deque()

    def first() -> tuple[Sequence[T], list[Grade]]:
        while not wait([pending[0][1]], timeout=_POLL).done:
            stop.check()
        batch, grades = pending.popleft()
        return batch, grades.result()

    try:
        for start in range(0, len(rows), batch_size):
            stop.check()
            batch = rows[start : start + batch_size]
            pending.append((batch, submit(batch)))
            if len(pending) * batch_size >= GRADED_AHEAD:
                yield first()
        while pending:
            stop.check()
            yield first()
    except (Interrupted, RlvrError):
        for batch, grades in pending:
            if grades.done() and grades.exception() is None:
                yield batch, grades.result()
        raise
    finally:
        for _, grades in pending:
            grades.cancel()


def known_example(row: Mapping[str, Any], *, prompts: StoredPrompts) -> dict[str, Any]:
    """Reconstruct the fields of an example from its rollout; unknown fields are None.

    Args:
        prompts: of the run.
    """
    return example_of_truth(row["ground_truth"]) | {
        "id": row["example_id"],
        "prompt": row["prompt"],
        "question": prompts.question_of(row),
    }


def _right(reward: float | None) -> bool:
    return reward is not None and reward > 0.5


def graded_text(row: Mapping[str, Any]) -> str:
    """What a grader reads of a row: the response, of an episode the last turn of the policy."""
    episode = row["episode"]
    return row["response"] if episode is None else row["response"][episode["graded_from"] : episode["graded_to"]]
