"""Partial rollouts: a response that has got its tokens of a step goes on in the next one, from its ids (Kimi k1.5, 2501.12599).

Enters: questions to ask, an open run and sampler. Leaves: committed segments, and of each group whose responses have all ended a
`Completion` per response.

Each step continues every unfinished response of the groups in flight, and commits what was sampled, all or none, before anything
is made of it. So the groups in flight before a step are a function of the segments of earlier steps (`in_flight`).
"""

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from rlvr_cli.data.prompts import PromptTemplate, prompt_of
from rlvr_cli.faults import fault_point
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.grading import utc_now_naive
from rlvr_cli.rollouts.metrics import SamplingStats
from rlvr_cli.rollouts.requests import common_prefix, request_seed
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.text import storable
from rlvr_cli.types import Completion, Example, Request, Rollout, Sampler, SamplingParams, Segment

Group = tuple[tuple[Segment, ...], ...]  # of each sample its segments, in order
Groups = Mapping[str, Group]  # by example id, as stored; in the order in which they were asked


def extended(groups: Groups, segments: Iterable[Segment], *, group_size: int) -> dict[str, Group]:
    """Return the groups with the segments of one more step.

    A segment that begins a response begins its group, if that is not there. One that continues a response which is not there is left
    out: it is of a group that has ended.
    """
    found = {name: [list(of_sample) for of_sample in group] for name, group in groups.items()}
    for segment in segments:
        if not segment.start:
            found.setdefault(segment.example_id, [[] for _ in range(group_size)])
        if segment.example_id in found:
            found[segment.example_id][segment.sample_index].append(segment)
    return {name: tuple(map(tuple, group)) for name, group in found.items()}


def has_ended(group: Group) -> bool:
    """Whether every response of a group has."""
    return all(segments and segments[-1].finish_reason is not None for segments in group)


def in_flight(steps: Iterable[Iterable[Segment]], *, group_size: int) -> dict[str, Group]:
    """Return the groups that have not ended after these steps, in the order in which they were asked.

    Args:
        steps: of each step its segments, as they were committed. Earlier steps may be left out, if all groups that began in them
            have ended.
    """
    groups: dict[str, Group] = {}
    for segments in steps:
        groups = {
            name: group
            for name, group in extended(groups, segments, group_size=group_size).items()
            if not has_ended(group)
        }
    return groups


def stored_in_flight(run: RunDir, *, before: int, group_size: int, max_tokens: int, tokens: int) -> dict[str, Group]:
    """Return the groups in flight before a step, from the run's segments.

    Args:
        before: the step.
        max_tokens, tokens: of a response, and what it gets of these in one step.
    """
    steps = [step for step in run.segment_steps() if step < before]
    last = len(steps) - (max_tokens // tokens - 1)  # a group that began before this many steps has ended
    return in_flight((run.segments(step) for step in steps[max(last, 0) :]), group_size=group_size)


class _Wanted(NamedTuple):
    """The samples of one request."""

    name: str  # the example id, as stored
    indices: Sequence[int]  # of the samples, one per seed of the request
    request: Request


def _wanted(
    groups: Groups, questions: Sequence[Example], *, step: int, template: PromptTemplate, num_samples: int, seed: int
) -> Iterator[_Wanted]:
    """The samples of a step. Questions in flight continue each response that has not ended, the others begin all of theirs.

    The seeds are the step's own, so that no response repeats its draws.
    """
    prompts = [prompt_of(example, template) for example in questions]
    common = common_prefix(prompts)
    for example, prompt in zip(questions, prompts, strict=True):
        name = storable(example.id)
        key = {"phase": "train", "step": step, "example_id": example.id}
        seeds = [request_seed(seed, **key, sample_index=index) for index in range(num_samples)]
        if name not in groups:
            yield _Wanted(
                name, range(num_samples), Request(prompt, tuple(seeds), name=example.id, common_prefix=common)
            )
            continue
        for index, segments in enumerate(groups[name]):
            if segments[-1].finish_reason is None:
                ids = token_ids_of(segments)
                prompt_ids = (*segments[0].prompt_ids, *ids)
                more = {"prompt_ids": prompt_ids, "begun": len(ids), "common_prefix": common}
                request = Request(prompt, (seeds[index],), name=example.id, **more)
                yield _Wanted(name, [index], request)


def sample_segments(
    run: RunDir,
    *,
    step: int,
    groups: Groups,
    questions: Sequence[Example],
    tokens: int,
    template: PromptTemplate,
    num_samples: int,
    sampler: Sampler,
    params: SamplingParams,
    seed: int,
    stop: StopRequest,
) -> list[Segment]:
    """Sample the segments of a step and commit them, all or none; or return those that an interrupted run has committed.

    Args:
        groups: in flight before the step.
        questions: those of the groups, in the same order, and then the new ones.
        tokens: what each response gets, at most.
        params: `max_tokens` is of a whole response.

    Raises:
        Interrupted: `stop` was requested; nothing is committed.
    """
    if stored := run.segments(step):
        return stored
    key = {"step": step, "template": template, "num_samples": num_samples, "seed": seed}
    wanted = list(_wanted(groups, questions, **key))
    found: dict[tuple[int, int], Segment] = {}
    started = time.monotonic()
    completions = sampler.sample([w.request for w in wanted], replace(params, max_tokens=tokens))
    total = sum(len(w.indices) for w in wanted)
    try:
        with run.activity.doing(f"sampling, train step {step}", total=total, unit="responses"):
            for completion in completions:
                fault_point("sampled")
                run.activity.progress()
                found[completion.request_index, completion.sample_index] = _segment(
                    completion,
                    wanted[completion.request_index],
                    run_id=run.id,
                    step=step,
                    policy_version=sampler.policy_version,
                    max_tokens=params.max_tokens,
                )
                stop.check()
    finally:
        completions.close()
    segments = [found[place] for place in sorted(found)]
    assert len(segments) == total, (len(segments), total)
    waited = time.monotonic() - started
    worked = waited if sampler.worked_seconds is None else sampler.worked_seconds
    stats = SamplingStats(sum(len(s.response_ids) for s in segments), worked, waited)
    run.commit_segments(step, segments, cost=stats.cost)
    fault_point("segments")
    return segments


def _segment(
    completion: Completion, wanted: _Wanted, *, run_id: str, step: int, policy_version: int, max_tokens: int
) -> Segment:
    request = wanted.request
    goes_on = completion.finish_reason == "length" and request.begun + completion.num_tokens < max_tokens
    return Segment(
        run_id=run_id,
        phase="train",
        step=step,
        policy_version=policy_version,
        example_id=wanted.name,
        sample_index=wanted.indices[completion.sample_index],
        start=request.begun,
        response=completion.text,
        prompt_ids=completion.prompt_ids[: len(completion.prompt_ids) - request.begun],
        response_ids=completion.token_ids,
        sampled_logprobs=completion.logprobs,
        finish_reason=None if goes_on else completion.finish_reason,
        stop_reason=completion.stop_reason,
        mean_entropy=completion.mean_entropy,
        seed=request.seeds[completion.sample_index],
        sampled_at=utc_now_naive(),
    )


def token_ids_of(segments: Sequence[Segment]) -> tuple[int, ...]:
    """The ids of a response, or of what there is of it."""
    return tuple(chain.from_iterable(segment.response_ids for segment in segments))


def joined(segments: Sequence[Segment], *, request_index: int = 0, sample_index: int = 0) -> Completion:
    """Return a response that has ended as one completion."""
    first, last = segments[0], segments[-1]
    assert last.finish_reason is not None, "the response goes on"
    tokens = token_ids_of(segments)
    known = [(s.mean_entropy, len(s.response_ids)) for s in segments if s.mean_entropy is not None]
    entropy = last.mean_entropy
    if len(segments) > 1:
        whole = len(known) == len(segments)
        entropy = sum(mean * count for mean, count in known) / len(tokens) if whole else None
    return Completion(
        request_index=request_index,
        sample_index=sample_index,
        text=last.response,
        prompt_ids=first.prompt_ids,
        token_ids=tokens,
        logprobs=tuple(chain.from_iterable(segment.sampled_logprobs for segment in segments)),
        num_prompt_tokens=len(first.prompt_ids),
        num_tokens=len(tokens),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        mean_entropy=entropy,
    )


def with_origin(rollout: Rollout, segments: Sequence[Segment]) -> Rollout:
    """Return the rollout of a response with the versions of the policy that sampled it; its seed is that of its first segment."""
    first, last = segments[0], segments[-1]
    versions = tuple(chain.from_iterable([s.policy_version] * len(s.response_ids) for s in segments))
    return replace(
        rollout,
        policy_version=first.policy_version,
        token_versions=versions if versions[-1] != versions[0] else None,
        seed=first.seed,
        sampled_at=last.sampled_at,
    )


class Answers:
    """A sampler that samples nothing: it answers with the responses of groups that have ended."""

    seeding = "per-request"
    notes = ()
    worked_seconds = 0.0
    arrived = ()

    def __init__(self, groups: Groups, sampler: Sampler) -> None:
        """
        Args:
            sampler: the one that sampled them.
        """
        self._groups = groups
        self.engine, self.policy_version = sampler.engine, sampler.policy_version

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Generator[Completion]:
        """Yield every response to the requests' questions; each request has a seed for each of them."""
        for number, request in enumerate(requests):
            group = self._groups[storable(request.name)]
            assert len(group) == len(request.seeds), "a group is graded as a whole"
            yield from (
                joined(segments, request_index=number, sample_index=index) for index, segments in enumerate(group)
            )

    def load_weights(self, policy: Any, policy_version: int) -> None:
        raise AssertionError("it has no weights")

    def sleep(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def partial_metrics(segments: Iterable[Segment], *, groups: Groups, ended: Groups) -> dict[str, float]:
    """Metrics of a step.

    Args:
        segments: of the step.
        groups: in flight after it.
        ended: in it.

    Returns:
        `partial/unfinished_share`  share of the responses sampled in this step that go on in the next one
        `partial/carried_tokens`    tokens of the groups in flight, which the next step begins with
        `partial/groups_in_flight`  the number of these groups
        `partial/versions_mean`     versions of the policy that sampled a response, mean over the groups that ended; absent without one
    """
    segments = list(segments)
    versions = [len({s.policy_version for s in response}) for group in ended.values() for response in group]
    return {
        "partial/unfinished_share": sum(s.finish_reason is None for s in segments) / len(segments),
        "partial/carried_tokens": float(sum(len(token_ids_of(r)) for group in groups.values() for r in group)),
        "partial/groups_in_flight": float(len(groups)),
        **({"partial/versions_mean": sum(versions) / len(versions)} if versions else {}),
    }
