"""Examples x prompt x sampler x grader -> rollouts in the store: the one road that every sampled token takes.

Enters: examples, a template, an open sampler and grader pool, an open run. Leaves: committed rollout parts and their metrics.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol

from rlvr_cli.data.prompts import PromptTemplate
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.grading import Grading, failure_kind_of
from rlvr_cli.rollouts.metrics import AVERAGED, Effort, generation_metrics, mean_or_none, progress_signals
from rlvr_cli.rollouts.requests import missing, slices_of
from rlvr_cli.runs.parquet import to_rollouts
from rlvr_cli.runs.readers import read_parts, read_rollouts
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.text import storable
from rlvr_cli.types import Completion, Example, Grade, Phase, Request, Rollout, Sampler, SamplingParams

Advantages = Callable[[Sequence[Rollout]], Sequence[float | None]]
COMMIT_ROWS = 512  # rollouts of a part; fewer when COMMIT_SECONDS have passed
COMMIT_SECONDS = 20.0
_PATIENCE = 1.0  # seconds that a commit which is due waits for the graders
ASKED_ROWS = 8192  # rollouts of an evaluation that the sampler is asked for at once: it keeps all their prompts


class Progress(Protocol):
    """What is told of the work as it goes on."""

    def advance(self, n: int, **signals: float) -> None: ...


def collect_rollouts(
    run: RunDir,
    *,
    phase: Phase,
    step: int,
    examples: Sequence[Example],
    template: PromptTemplate,
    sampler: Sampler,
    params: SamplingParams,
    num_samples: int,
    grader: GraderPool,
    seed: int,
    stop: StopRequest,
    progress: Progress | None = None,
    advantages: Advantages | None = None,
) -> tuple[list[Rollout], Effort]:
    """Sample, grade and commit every rollout of (phase, step) that the run does not hold yet.

    Completions are graded and committed as they come, in whatever order they finish, while others are being sampled; a kill
    loses at most what was not yet committed, and the next call samples just that. Whatever ends the work early (a signal, an
    endpoint that fails for good), the completions at hand are graded and committed first; a second signal waits for no grader.

    With `advantages` the rollouts are committed together, in the order of the examples and with their advantages, or not at
    all: they are trained on, and what a resumed run samples again has to be the whole batch if it is to come out the same
    to the last bit.

    Returns:
        What was committed, with `advantages`, else nothing: it may be more than memory holds; and what it took.

    Raises:
        Interrupted: `stop` was requested; everything at hand is committed, or nothing with `advantages`.
    """
    wanted, requests = missing(
        run, phase=phase, step=step, examples=examples, template=template, num_samples=num_samples, seed=seed
    )
    tokens, started = 0, time.monotonic()
    graded: list[Rollout] = []
    grading = Grading(grader, ground_truth=lambda c: wanted[c.request_index][0].ground_truth)

    def take(*, within: float | None) -> None:
        for batch in grading.verdicts(within=within):
            for completion, sampled_at, grade in batch:
                example, indices = wanted[completion.request_index]
                graded.append(
                    make_rollout(
                        completion,
                        grade,
                        run_id=run.id,
                        phase=phase,
                        step=step,
                        policy_version=sampler.policy_version,
                        example=example,
                        sample_index=indices[completion.sample_index],
                        request=requests[completion.request_index],
                        grader=grader.spec,
                        sampled_at=sampled_at,
                    )
                )
            if progress is not None:
                signals = progress_signals(graded[-len(batch) :], tokens=sum(c.num_tokens for c, _, _ in batch))
                progress.advance(len(batch), **signals)

    def commit() -> None:
        if graded:
            run.commit_rollouts(phase, step, graded)
            graded.clear()

    def settle() -> None:
        """Grade and commit all that is at hand; an error of the graders costs only the rows that it is of."""
        errors = []
        grading.send()
        try:
            while grading.under_way:
                try:
                    take(within=None)
                except RlvrError as error:
                    errors.append(error)
        finally:
            commit()
        if errors:
            raise errors[0]

    def commit_whole() -> None:
        grading.send()
        take(within=None)
        place = {example.id: i for i, example in enumerate(examples)}
        graded.sort(key=lambda r: (place[r.example_id], r.sample_index))
        values = advantages(graded) if advantages else []
        graded[:] = [replace(r, advantage=a) for r, a in zip(graded, values, strict=True)]
        run.commit_rollouts(phase, step, graded)

    if not requests:
        return [], Effort()
    committed = time.monotonic()
    completions = sampler.sample(requests, params)
    try:
        for completion in completions:
            grading.add(completion)
            tokens += completion.num_tokens
            due = advantages is None and time.monotonic() - committed > COMMIT_SECONDS
            if due:
                grading.send()
            take(within=_PATIENCE if due else 0.0)
            if due or (advantages is None and len(graded) >= COMMIT_ROWS):
                commit()
                committed = time.monotonic()
            stop.check()
        if advantages is not None:
            commit_whole()
    except KeyboardInterrupt:  # the second signal
        grading.give_up()
        raise
    finally:
        completions.close()
        if advantages is None:
            settle()
        grading.give_up()
    waiting = time.monotonic() - started - grading.waited
    return graded, Effort(tokens, getattr(sampler, "worked_seconds", waiting), waiting, grading.waited)


def sample_groups(
    run: RunDir, *, step: int, examples: Sequence[Example], num_samples: int, advantages: Advantages, **collecting: Any
) -> tuple[list[Rollout], Effort]:
    """The training rollouts of a step, from the store: those that it lacks are sampled, graded and committed first.

    What is trained on is what is on disk, so that a run that replays it ends with the same weights.

    Args:
        advantages: rollouts of whole groups, next to each other -> one advantage each.
        collecting: the other arguments of `collect_rollouts`.

    Returns:
        The rollouts, in the order of the examples and then of the samples, and what sampling took.
    """
    fresh, effort = [], Effort()
    for part in slices_of(examples, num_samples=num_samples):
        committed, took = collect_rollouts(
            run,
            phase="train",
            step=step,
            examples=part,
            num_samples=num_samples,
            advantages=advantages,
            **collecting,
        )
        fresh, effort = fresh + committed, effort + took
    if len(fresh) == len(examples) * num_samples:  # what was just written need not be read: it trains to the same bits
        return fresh, effort
    stored = to_rollouts(read_rollouts(run.path, phase="train", step=step))
    by_key = {(r.example_id, r.sample_index): r for r in stored}
    return [by_key[storable(e.id), i] for e in examples for i in range(num_samples)], effort


def log_generations(
    run: RunDir, *, phase: Phase, step: int, examples: Sequence[Example], num_samples: int, **collecting: Any
) -> dict[str, float]:
    """Generate for the given examples and log what came of it (handout, section 4.2).

    The rows (prompt, response, ground truth, the three rewards, mean token entropy, length) are rollouts in the store; the
    averages (rewards, entropy, response length of all, correct and wrong responses, truncated share) are metrics. Memory
    does not grow with the rows: the sampler is asked for some, and the store is read part by part.

    Args:
        collecting: the other arguments of `collect_rollouts`.

    Returns:
        The averages by metric name; a mean over nothing is absent.
    """
    effort = Effort()
    for some in slices_of(examples, num_samples=num_samples, rows=ASKED_ROWS):
        effort += collect_rollouts(run, phase=phase, step=step, examples=some, num_samples=num_samples, **collecting)[1]
    parts = read_parts(run.path, phase=phase, step=step, columns=AVERAGED)
    averages = generation_metrics(row for part in parts for row in part.to_pylist())
    run.commit_metrics(step, phase, averages | effort.metrics)
    return averages


def make_rollout(
    completion: Completion,
    grade: Grade,
    *,
    run_id: str,
    phase: Phase,
    step: int,
    policy_version: int,
    example: Example,
    sample_index: int,
    request: Request,
    grader: str,
    sampled_at: datetime,
) -> Rollout:
    return Rollout(
        run_id=run_id,
        phase=phase,
        step=step,
        policy_version=policy_version,
        example_id=example.id,
        sample_index=sample_index,
        prompt=request.prompt,
        response=completion.text,
        ground_truth=example.ground_truth,
        prompt_ids=completion.prompt_ids,
        response_ids=completion.token_ids,
        sampled_logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        num_prompt_tokens=completion.num_prompt_tokens,
        num_response_tokens=completion.num_tokens,
        grader=grader,
        format_reward=grade.format_reward,
        answer_reward=grade.answer_reward,
        reward=grade.reward,
        grade_error=grade.error,
        extracted_answer=grade.extracted_answer,
        category=grade.category,
        failure_kind=failure_kind_of(grade, finish_reason=completion.finish_reason),
        advantage=None,
        mean_logprob=mean_or_none(completion.logprobs),
        mean_entropy=completion.mean_entropy,
        seed=request.seeds[completion.sample_index],
        sampled_at=sampled_at,
    )
