"""Sample, grade and commit rollouts; all commands that sample use this module.

Enters: examples, a prompt template, an open sampler and grader pool, an open run. Leaves: committed rollout parts and
their metrics.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from datetime import datetime
from itertools import compress
from typing import NotRequired, Protocol, TypedDict, Unpack

from rlvr_cli.data.prompts import PromptTemplate
from rlvr_cli.errors import Interrupted, QuestionsRefused, RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.grading import GradingQueue, grade_fields
from rlvr_cli.rollouts.metrics import AVERAGED, SamplingStats, generation_metrics, mean_or_none, progress_signals
from rlvr_cli.rollouts.requests import missing_samples, slice_examples
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.parquet import to_rollouts
from rlvr_cli.text import storable
from rlvr_cli.types import (
    ENVIRONMENT,
    Completion,
    Example,
    Grade,
    Graders,
    Phase,
    Request,
    Rollout,
    Sampler,
    SamplingParams,
)

Credit = Callable[
    [Sequence[Rollout]], Sequence[Rollout]
]  # the rollouts of whole groups, with what their groups determine
COMMIT_ROWS = 512  # rollouts per part; fewer once COMMIT_SECONDS have passed
COMMIT_SECONDS = 20.0
_PATIENCE = 1.0  # seconds that a due commit waits for the graders
ASKED_ROWS = 8192  # rollouts requested per call of the sampler, which keeps their prompts in memory


class Progress(Protocol):
    """Receives progress reports: n more rollouts, with the means of the signals."""

    def advance(self, n: int, **signals: float) -> None: ...


class Collecting(TypedDict):
    """Arguments that every function of this module takes as keywords."""

    template: PromptTemplate
    sampler: Sampler
    params: SamplingParams
    grader: Graders
    seed: int
    stop: StopRequest
    progress: NotRequired[Progress]


class _Collector:
    """Turns the completions of one phase and step into graded rollouts and commits them.

    Attributes:
        wanted: (example, sample indices) that the run lacks, one per request.
        requests: the requests for the sampler.
        graded: rollouts that are not committed yet.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        phase: Phase,
        step: int,
        examples: Sequence[Example],
        num_samples: int,
        **collecting: Unpack[Collecting],
    ) -> None:
        self.run = run
        self.phase: Phase = phase
        self.step = step
        self.sampler, self.grader = collecting["sampler"], collecting["grader"]
        self.params, self.stop, self.progress = collecting["params"], collecting["stop"], collecting.get("progress")
        self.wanted, self.requests = missing_samples(
            run,
            phase=phase,
            step=step,
            examples=examples,
            template=collecting["template"],
            num_samples=num_samples,
            seed=collecting["seed"],
        )
        self.grader.recall(run.path)
        self.graded: list[Rollout] = []
        self.grading = GradingQueue(
            self.grader,
            ground_truth=lambda c: self.wanted[c.request_index][0].ground_truth,
            example=lambda c: (
                asdict(self.wanted[c.request_index][0]) | {"prompt": prompt_given(c, self.requests[c.request_index])}
            ),
        )
        self._started = time.monotonic()
        self._sampled = False  # whether all completions have arrived
        self._counted = SamplingStats()  # what `cost` has returned so far

    def add(self, completion: Completion) -> None:
        """Pass a completion to the graders."""
        self.run.activity.progress()
        self.grading.add(completion)

    def sampling(self) -> AbstractContextManager[None]:
        """The phase of the run's work in which it samples and grades."""
        total = sum(len(indices) for _, indices in self.wanted)
        return self.run.activity.doing(f"sampling, {self.phase} step {self.step}", total=total, unit="responses")

    def collect_grades(self, *, within: float | None) -> None:
        """Turn finished grades into rollouts, waiting at most `within` seconds (None: until all are graded)."""
        for batch in self.grading.verdicts(within=within):
            fault_point("graded")
            self.run.activity.progress(0)
            for completion, sampled_at, grade in batch:
                example, indices = self.wanted[completion.request_index]
                self.graded.append(
                    make_rollout(
                        completion,
                        grade,
                        run_id=self.run.id,
                        phase=self.phase,
                        step=self.step,
                        policy_version=self.sampler.policy_version,
                        example=example,
                        sample_index=indices[completion.sample_index],
                        request=self.requests[completion.request_index],
                        grader=self.grader.spec if completion.grade is None else ENVIRONMENT,
                        sampled_at=sampled_at,
                    )
                )
            if self.progress is not None:
                self.progress.advance(len(batch), **progress_signals(self.graded[-len(batch) :]))

    def commit(self) -> None:
        """Commit the graded rollouts."""
        if self.graded:
            self.run.commit_rollouts(self.phase, self.step, self.graded, cost=self.cost(self.graded))
            self.graded.clear()

    def completions(self) -> Generator[Completion]:
        """Sample, and yield what arrives."""
        completions = self.sampler.sample(self.requests, self.params)
        try:
            for completion in completions:
                fault_point("sampled")
                yield completion
            self._sampled = True
        finally:
            completions.close()

    def finish(self) -> None:
        """Grade and commit all pending completions. A failed grading batch loses only its rows; its error is raised last."""
        errors = []
        self.grading.send()
        try:
            while self.grading.has_pending:
                try:
                    self.collect_grades(within=None)
                except RlvrError as error:
                    errors.append(error)
        finally:
            self.commit()
        if errors:
            raise errors[0]

    def cost(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the tokens that the policy sampled of these rollouts, and the seconds since the last call."""
        waited = self.grading.waiting_seconds
        waiting, worked = time.monotonic() - self._started - waited, self.sampler.worked_seconds
        if worked is None or not self._sampled:  # before the end, it is that of earlier requests
            worked = waiting
        now = SamplingStats(sum(r.num_policy_tokens for r in rollouts), worked, waiting, waited)
        cost = (now - replace(self._counted, tokens=0)).cost
        self._counted = now
        return cost


def collect_rollouts(
    run: RunDir,
    *,
    phase: Phase,
    step: int,
    examples: Sequence[Example],
    num_samples: int,
    **collecting: Unpack[Collecting],
) -> None:
    """Sample, grade and commit every rollout of (phase, step) that the run lacks, in the order in which they finish.

    Grading and committing overlap with sampling. A kill loses only rollouts that were not committed, and the next call
    samples exactly these. If a signal or a permanent endpoint error stops the work, the completions received so far are
    graded and committed first; a second signal does not wait for the graders. The rollouts are only in the run, since
    they may exceed memory.

    Raises:
        Interrupted: `stop` was requested; all completions received so far are committed.
    """
    collector = _Collector(run, phase=phase, step=step, examples=examples, num_samples=num_samples, **collecting)
    if not collector.requests:
        return
    with collector.sampling():
        _collect(collector)


def _collect(collector: _Collector) -> None:
    """Sample, grade and commit all that a collector wants."""
    committed = time.monotonic()
    completions = collector.completions()
    try:
        for completion in completions:
            collector.add(completion)
            due = time.monotonic() - committed > COMMIT_SECONDS
            if due:
                collector.grading.send()
            collector.collect_grades(within=_PATIENCE if due else 0.0)
            if due or len(collector.graded) >= COMMIT_ROWS:
                collector.commit()
                committed = time.monotonic()
            collector.stop.check()
    except KeyboardInterrupt:  # the second signal
        collector.grading.cancel()
        raise
    except (Interrupted, RlvrError):
        completions.close()
        for completion in collector.sampler.arrived:
            collector.add(completion)
        raise
    finally:
        completions.close()
        collector.finish()
        collector.grading.cancel()


def collect_batch(
    run: RunDir,
    *,
    step: int,
    examples: Sequence[Example],
    num_samples: int,
    credit: Credit,
    **collecting: Unpack[Collecting],
) -> list[Rollout]:
    """Sample and grade every training rollout of a step that the run lacks, and commit all of them or none.

    The rollouts are committed in the order of the examples, as `credit` returns them. Only whole batches are committed, so
    that a resumed run samples the same batch again and trains to the same bits.

    Args:
        examples: the questions; rollouts of one question form a group.
        credit: see `sample_groups`.

    Returns:
        The committed rollouts.

    Raises:
        Interrupted: `stop` was requested; nothing is committed.
    """
    collector = _Collector(run, phase="train", step=step, examples=examples, num_samples=num_samples, **collecting)
    if not collector.requests:
        return []
    completions = collector.completions()
    with collector.sampling():
        try:
            for completion in completions:
                collector.add(completion)
                collector.collect_grades(within=0.0)
                collector.stop.check()
            collector.grading.send()
            collector.collect_grades(within=None)
            place = {example.id: i for i, example in enumerate(examples)}
            graded = sorted(collector.graded, key=lambda r: (place[r.example_id], r.sample_index))
            graded = list(credit(graded))
            run.commit_rollouts("train", collector.step, graded, cost=collector.cost(graded))
        finally:
            completions.close()
            collector.grading.cancel()
    return graded


def sample_groups(
    run: RunDir,
    *,
    step: int,
    examples: Sequence[Example],
    num_samples: int,
    credit: Credit,
    **collecting: Unpack[Collecting],
) -> list[Rollout]:
    """Return the training rollouts of a step; those that the run lacks are sampled, graded and committed first.

    Training uses exactly the committed rollouts, so a resumed run that reads them back ends with the same weights.

    Args:
        credit: rollouts of whole groups, each group contiguous -> the same rollouts with their advantages and shaped rewards.

    Returns:
        The rollouts, ordered by example and then by sample index.
    """
    fresh = []
    for part in slice_examples(examples, num_samples=num_samples):
        fresh += collect_batch(
            run,
            step=step,
            examples=part,
            num_samples=num_samples,
            credit=credit,
            **collecting,
        )
    if len(fresh) == len(examples) * num_samples:  # none was stored before: training on these gives the same bits
        return fresh
    stored = to_rollouts(run.rollouts("train", step))
    by_key = {(r.example_id, r.sample_index): r for r in stored}
    return [by_key[storable(e.id), i] for e in examples for i in range(num_samples)]


def stored_stats(run: RunDir, *, phase: Phase, step: int) -> SamplingStats:
    """Return what the rollouts of (phase, step) cost, those included that an interrupted run stored."""
    return SamplingStats.of_cost(run.cost(phase, step))


def log_generations(
    run: RunDir,
    *,
    phase: Phase,
    step: int,
    examples: Sequence[Example],
    num_samples: int,
    **collecting: Unpack[Collecting],
) -> dict[str, float]:
    """Generate responses for the examples and log them with their averages (handout, section 4.2).

    The rows (prompt, response, ground truth, the three rewards, mean token entropy, length) are committed as rollouts;
    the averages (rewards, entropy, length of all, correct and wrong responses, truncated share) as metrics. Memory use
    does not grow with the number of rows: they are requested in slices and read back part by part.

    Returns:
        The averages by metric name; a mean over no rows is absent.

    Raises:
        QuestionsRefused: an endpoint refuses some questions; all others are committed.
    """
    refused: list[QuestionsRefused] = []
    for some in slice_examples(examples, num_samples=num_samples, rows=ASKED_ROWS):
        for so_far in (*range(ASKED_ROWS, num_samples, ASKED_ROWS), num_samples):  # what is stored is not asked again
            try:
                collect_rollouts(run, phase=phase, step=step, examples=some, num_samples=so_far, **collecting)
            except QuestionsRefused as error:  # and not those of the next slices
                refused.append(error)
                break
    if refused:
        raise QuestionsRefused.joined(refused)
    rows = (row for part in run.parts(phase, step, columns=AVERAGED) for row in part.to_pylist())
    averages = generation_metrics(rows)
    run.commit_metrics(step, phase, averages | stored_stats(run, phase=phase, step=step).metrics)
    return averages


def prompt_given(completion: Completion, request: Request) -> str:
    """Return the prompt that the policy got: of an episode, its environment may have given another than the request's."""
    return request.prompt if completion.prompt is None else completion.prompt


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
    mask = completion.response_mask
    sampled = completion.logprobs if mask is None else compress(completion.logprobs, mask)
    return Rollout(
        run_id=run_id,
        phase=phase,
        step=step,
        policy_version=policy_version,
        example_id=example.id,
        sample_index=sample_index,
        prompt=prompt_given(completion, request),
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
        **grade_fields(
            grade,
            finish_reason=completion.finish_reason,
            episode=completion.episode and completion.episode._asdict(),
            turn_facts=completion.turn_facts and completion.turn_facts._asdict(),
        ),
        advantage=None,
        mean_logprob=mean_or_none(sampled),
        mean_entropy=completion.mean_entropy,
        seed=request.seeds[completion.sample_index],
        sampled_at=sampled_at,
        response_mask=mask,
        turns=completion.turns,
        episode=completion.episode,
        turn_facts=completion.turn_facts,
        measured=completion.measured,
        own_prompt=completion.prompt not in (None, request.prompt) if completion.episode else None,
    )
