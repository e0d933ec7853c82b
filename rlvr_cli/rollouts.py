"""Examples x prompt x sampler x grader -> rollouts in the store: the one road that every sampled token takes.

Enters: examples, a template, an open sampler and grader pool, an open run. Leaves: committed rollout parts and their metrics.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from rlvr_cli.columns import to_rollouts
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.prompts import PromptTemplate, prompt_of
from rlvr_cli.records import (
    Completion,
    Example,
    Grade,
    Phase,
    PrefetchingSampler,
    Request,
    Rollout,
    Sampler,
    SamplingParams,
)
from rlvr_cli.signals import StopRequest
from rlvr_cli.store import RunDir, read_parts, read_rollouts
from rlvr_cli.text import storable

Advantages = Callable[[Sequence[Rollout]], Sequence[float | None]]

GRADE_ROWS = 64  # completions that are graded together
GRADING_AHEAD = 4  # so many of these may be with the graders before sampling waits for them
COMMIT_ROWS = 512  # rollouts of a part; fewer when COMMIT_SECONDS have passed
COMMIT_SECONDS = 20.0
_PATIENCE = 1.0  # seconds that a commit which is due waits for the graders
SLICE_ROWS = 2048  # training rollouts that are committed together, or not at all
ASKED_ROWS = 8192  # rollouts of an evaluation that the sampler is asked for at once: it keeps all their prompts
AVERAGED = ("reward", "format_reward", "answer_reward", "num_response_tokens", "finish_reason", "mean_entropy")
UNFINISHED_KINDS = {"no_think_close", "no_answer_tags", "malformed_tags", "empty", "unparsed_answer"}


class Progress(Protocol):
    """What is told of the work as it goes on."""

    def advance(self, n: int, **signals: float) -> None: ...


@dataclass(frozen=True)
class Effort:
    """What it took to collect rollouts."""

    tokens: int = 0
    sampling_seconds: float = 0.0  # the engine's
    waiting_seconds: float = 0.0  # for the engine: less, where it had begun before it was asked
    grading_seconds: float = 0.0  # for the graders, beyond what went on beside sampling

    def __add__(self, other: "Effort") -> "Effort":
        return Effort(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def metrics(self) -> dict[str, float]:
        """By metric name; empty when nothing had to be sampled."""
        if not self.tokens:
            return {}
        return {
            "sampling/tokens": float(self.tokens),
            "sampling/seconds": self.sampling_seconds,
            "sampling/waiting_seconds": self.waiting_seconds,
            "sampling/tokens_per_second": self.tokens / max(self.sampling_seconds, 1e-9),
            "grading/seconds": self.grading_seconds,
        }


def request_seed(seed: int, *, phase: Phase, step: int, example_id: str, sample_index: int) -> int:
    """The 63-bit seed of one sample: a pure function of who it is, so that no order of work can change its tokens."""
    identity = f"{seed}\0{phase}\0{step}\0{sample_index}\0{example_id}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big") >> 1


def choose_grader(grader: str, *, dataset_grader: str | None, prompt: str) -> str:
    """The grader that was named, else the dataset's own, else the one that reads the prompt's answers."""
    return grader or dataset_grader or ("question_only" if prompt == "question_only" else "r1_zero")


def missing(
    run: RunDir,
    *,
    phase: Phase,
    step: int,
    examples: Sequence[Example],
    template: PromptTemplate,
    num_samples: int,
    seed: int,
) -> tuple[list[tuple[Example, list[int]]], list[Request]]:
    """The samples of (phase, step) that the run does not hold: by example, and as requests."""
    wanted = [(e, run.missing(phase, step, e.id, num_samples=num_samples)) for e in examples]
    wanted = [(e, indices) for e, indices in wanted if indices]
    requests = [
        Request(
            prompt_of(e, template),
            tuple(request_seed(seed, phase=phase, step=step, example_id=e.id, sample_index=i) for i in indices),
            name=e.id,
        )
        for e, indices in wanted
    ]
    return wanted, requests


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
    grading = _Grading(grader, ground_truth=lambda c: wanted[c.request_index][0].ground_truth)

    def take(*, within: float | None) -> None:
        for batch in grading.verdicts(within=within):
            for completion, sampled_at, grade in batch:
                example, indices = wanted[completion.request_index]
                graded.append(
                    _rollout(
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
                signals = _signals(graded[-len(batch) :], tokens=sum(c.num_tokens for c, _, _ in batch))
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


class _Grading:
    """Completions on their way through the graders, while others are sampled; in the order in which they came."""

    def __init__(self, grader: GraderPool, *, ground_truth: Callable[[Completion], str]) -> None:
        self._grader, self._ground_truth = grader, ground_truth
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
            verdicts = self._grader.start([(c.text, self._ground_truth(c)) for c in batch])
            self._batches.append((batch, _now(), verdicts))

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
    for part in _slices(examples, num_samples=num_samples):
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


def prefetch_groups(
    run: RunDir,
    *,
    step: int,
    examples: Sequence[Example],
    num_samples: int,
    template: PromptTemplate,
    sampler: PrefetchingSampler,
    params: SamplingParams,
    seed: int,
) -> None:
    """Have the sampler begin with what `sample_groups` will ask of it for that step."""
    for part in _slices(examples, num_samples=num_samples):
        _, requests = missing(
            run, phase="train", step=step, examples=part, template=template, num_samples=num_samples, seed=seed
        )
        if requests:
            sampler.prefetch(requests, params)


def _slices(examples: Sequence[Example], *, num_samples: int, rows: int = SLICE_ROWS) -> Iterator[Sequence[Example]]:
    size = max(rows // num_samples, 1)
    for start in range(0, len(examples), size):
        yield examples[start : start + size]


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
    for some in _slices(examples, num_samples=num_samples, rows=ASKED_ROWS):
        effort += collect_rollouts(run, phase=phase, step=step, examples=some, num_samples=num_samples, **collecting)[1]
    parts = read_parts(run.path, phase=phase, step=step, columns=AVERAGED)
    averages = generation_metrics(row for part in parts for row in part.to_pylist())
    run.commit_metrics(step, phase, averages | effort.metrics)
    return averages


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """`generation_metrics` of rollouts."""
    return generation_metrics({name: getattr(r, name) for name in AVERAGED} for r in rollouts)


def generation_metrics(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Averages over rollout rows; a failed grade counts as 0 reward and is counted in `reward/grade_errors`."""
    totals: dict[str, tuple[float, int]] = {}
    samples = errors = 0
    for row in rows:
        reward, tokens = row["reward"] or 0.0, row["num_response_tokens"]
        samples, errors = samples + 1, errors + (row["reward"] is None)
        values = {
            "reward/mean": reward,
            "reward/format": row["format_reward"] or 0.0,
            "reward/answer": row["answer_reward"] or 0.0,
            "length/mean": tokens,
            "length/correct": tokens if reward > 0.5 else None,
            "length/wrong": tokens if reward <= 0.5 else None,
            "length/truncated_share": row["finish_reason"] == "length",
            "entropy/mean": row["mean_entropy"],
        }
        for name, value in values.items():
            total, count = totals.get(name, (0.0, 0))
            totals[name] = (total, count) if value is None else (total + value, count + 1)
    means = {name: total / count for name, (total, count) in totals.items() if count}
    return means | {"reward/samples": float(samples), "reward/grade_errors": float(errors)}


def evaluate_vllm(
    vllm_model: Any,
    reward_fn: Callable[[str, str], dict[str, float]],
    prompts: Sequence[str],
    eval_sampling_params: Any,
    *,
    ground_truths: Sequence[str],
    runs_dir: str = "runs",
    run: str | None = None,
) -> None:
    """Evaluate a vLLM model on formatted prompts and serialise rows and metrics to a run directory (handout, section 3.2).

    Args:
        vllm_model: a `vllm.LLM`.
        reward_fn: (response, ground_truth) -> {"format_reward", "answer_reward", "reward"}; called in this process.
        prompts: formatted prompts.
        eval_sampling_params: a `vllm.SamplingParams`.
        ground_truths: one per prompt.
        runs_dir: where run directories live.
        run: the name of the run; None makes one up. `rlvr analyze` shows the latest run.
    """
    if not prompts or len(prompts) != len(ground_truths):
        raise RlvrError(f"{len(prompts)} prompts came with {len(ground_truths)} ground truths.", "Give one for each.")
    name = getattr(reward_fn, "__name__", type(reward_fn).__name__)
    outputs = vllm_model.generate(list(prompts), eval_sampling_params)
    with RunDir.create(runs_dir, "eval", name=run, metadata={"grader": name, "engine": "vllm"}) as directory:
        rollouts = []
        for index, (output, truth) in enumerate(zip(outputs, ground_truths, strict=True)):
            for answer in output.outputs:
                grade = _grade_here(reward_fn, answer.text, truth)
                steps = zip(answer.token_ids, answer.logprobs, strict=True) if answer.logprobs else ()
                logprobs = tuple(step[token].logprob for token, step in steps)
                completion = Completion(
                    request_index=index,
                    sample_index=answer.index,
                    text=answer.text,
                    prompt_ids=tuple(output.prompt_token_ids or ()),
                    token_ids=tuple(answer.token_ids),
                    logprobs=logprobs,
                    num_prompt_tokens=len(output.prompt_token_ids or ()),
                    num_tokens=len(answer.token_ids),
                    finish_reason="length" if answer.finish_reason == "length" else "stop",
                    stop_reason=None if answer.finish_reason == "length" else str(answer.stop_reason or "eos"),
                    mean_entropy=None,
                )
                rollouts.append(
                    _rollout(
                        completion,
                        grade,
                        run_id=directory.id,
                        phase="eval",
                        step=0,
                        policy_version=0,
                        example=Example(str(index), prompts[index], truth),
                        sample_index=answer.index,
                        request=Request(prompts[index], (0,) * (answer.index + 1)),
                        grader=name,
                        sampled_at=_now(),
                    )
                )
        directory.commit_rollouts("eval", 0, rollouts)
        directory.commit_metrics(0, "eval", rollout_metrics(rollouts))
        directory.finish("finished")


def failure_kind_of(grade: Grade, *, finish_reason: str) -> str | None:
    """Why there was no reward: what was cut at the length limit has no answer for that, whatever the grader saw missing."""
    truncated = finish_reason == "length" and grade.failure_kind in UNFINISHED_KINDS
    return "truncated" if truncated else grade.failure_kind


def _grade_here(reward_fn: Callable[[str, str], dict[str, float]], response: str, truth: str) -> Grade:
    try:
        rewards = reward_fn(response, truth)
        return Grade(rewards["format_reward"], rewards["answer_reward"], rewards["reward"])
    except Exception as e:  # as in a grader's worker: what was generated is not lost to a reward function that fails
        return Grade(None, None, None, error=type(e).__name__)


def _now() -> datetime:
    """UTC, naive, as the store wants it."""
    return datetime.now(UTC).replace(tzinfo=None)


def _rollout(
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
        mean_logprob=_mean(completion.logprobs),
        mean_entropy=completion.mean_entropy,
        seed=request.seeds[completion.sample_index],
        sampled_at=sampled_at,
    )


def _signals(rollouts: Sequence[Rollout], *, tokens: int) -> dict[str, float]:
    return {
        "reward": _mean(r.reward or 0.0 for r in rollouts) or 0.0,
        "truncated": _mean(r.finish_reason == "length" for r in rollouts) or 0.0,
        "tokens": float(tokens),
    }


def _mean(values: Iterable[float]) -> float | None:
    items = [float(v) for v in values]
    return sum(items) / len(items) if items else None
