"""Grade the rollouts of an existing run with another grader, without sampling.

Enters: a run opened with `RunDir.annotate`, and a grader pool. Leaves: committed grades parts.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from rlvr_cli.config.store.grade import PhaseChoice
from rlvr_cli.data.prompts import StoredPrompts, stored_prompts
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.custom import example_of_truth
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.collect import COMMIT_ROWS, COMMIT_SECONDS, Progress
from rlvr_cli.rollouts.grading import GRADING_AHEAD, grade_fields
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Grade, Graders, Phase, Regrade

T = TypeVar("T")
GRADE_ROWS = 128  # responses graded together; Ctrl-C takes effect between these batches
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
    """The regrading of one phase and step by one attempt of a grader: `done` and `left` count rollouts."""

    phase: Phase
    step: int
    attempt: int
    done: int
    left: int


def plan_regrade(
    run: RunDir, *, grader: str, grader_sha256: str | None, phase: PhaseChoice, again: bool
) -> list[RegradeStep]:
    """Return the work per phase and step. Existing grades are kept, unless `again` is set or the grader's file changed.

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
    attempts: dict[Phase, int] = {}
    for p, _ in steps:
        if p not in attempts:
            last = run.last_attempt(grader, p)
            fresh = last is not None and (again or last.grader_sha256 != grader_sha256)
            attempts[p] = 0 if last is None else last.number + fresh
    works = []
    for p, s in steps:
        done = len(run.graded_keys(grader, p, s, attempt=attempts[p]))
        works.append(RegradeStep(p, s, attempts[p], done, run.num_rollouts(p, s) - done))
    return works


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
    """Grade what is left of `works` and commit the grades; after a kill or a signal, the next call continues.

    Args:
        grader: the name under which the grades are stored.

    Raises:
        Interrupted: `stop` was requested; all finished grades are committed.
    """
    for work in works:
        if work.left:
            _regrade_step(
                run, work, grader=grader, grader_sha256=grader_sha256, pool=pool, stop=stop, progress=progress
            )


def _regrade_step(
    run: RunDir,
    work: RegradeStep,
    *,
    grader: str,
    grader_sha256: str | None,
    pool: Graders,
    stop: StopRequest,
    progress: Progress | None,
) -> None:
    held = run.graded_keys(grader, work.phase, work.step, attempt=work.attempt)
    rows = run.rollouts(work.phase, work.step, columns=GRADED_COLUMNS).to_pylist()
    rows = [r for r in rows if (r["example_id"], r["sample_index"]) not in held]
    graded: list[Regrade] = []

    def commit() -> None:
        if graded:
            run.commit_grades(work.phase, work.step, graded)
            graded.clear()

    def submit(batch: Sequence[dict[str, Any]]) -> Future[list[Grade]]:
        pairs = [(graded_text(r), r["ground_truth"]) for r in batch]
        return pool.submit(pairs, example_of=lambda i: known_example(batch[i], prompts=prompts))

    committed, prompts = time.monotonic(), stored_prompts(run.metadata)
    try:
        for batch, grades in graded_batches(rows, submit, stop=stop):
            for row, grade in zip(batch, grades, strict=True):
                graded.append(
                    Regrade(
                        run_id=run.id,
                        phase=work.phase,
                        step=work.step,
                        example_id=row["example_id"],
                        sample_index=row["sample_index"],
                        grader=grader,
                        attempt=work.attempt,
                        grader_sha256=grader_sha256,
                        **grade_fields(
                            grade,
                            finish_reason=row["finish_reason"],
                            episode=row["episode"],
                            failed=row["turn_facts"]["failed"] if row["turn_facts"] else (),
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
    rows: Sequence[T], submit: Callable[[Sequence[T]], Future[list[Grade]]], *, stop: StopRequest
) -> Iterator[tuple[Sequence[T], list[Grade]]]:
    """Yield the rows in batches with their grades; the next batches are graded meanwhile. Raises Interrupted between two of them."""
    pending: deque[tuple[Sequence[T], Future[list[Grade]]]] = deque()
    try:
        for start in range(0, len(rows), GRADE_ROWS):
            stop.check()
            batch = rows[start : start + GRADE_ROWS]
            pending.append((batch, submit(batch)))
            if len(pending) > GRADING_AHEAD:
                ready, grades = pending.popleft()
                yield ready, grades.result()
        while pending:
            stop.check()
            ready, grades = pending.popleft()
            yield ready, grades.result()
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
