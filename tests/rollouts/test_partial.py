"""rollouts/partial.py: who is in flight, and how segments become responses."""

import math
from datetime import datetime
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import a_rollout, a_segment
from rlvr_cli.data.prompts import load_prompt
from rlvr_cli.rollouts.partial import (
    Answers,
    _wanted,
    extended,
    has_ended,
    in_flight,
    joined,
    partial_metrics,
    stored_in_flight,
    with_origin,
)
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Example, Request, SamplingParams

# Per group, the steps that each of its two responses takes; after these, all take one.
DURATIONS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=24)
TOKENS, STEPS = 3, 4  # of a step; the most that a response takes


def of_step(step, asked, durations, *, every=1):
    """The segments of a step: `asked` is when each group was asked. Steps count by `every`, as with several updates a batch."""
    segments = []
    for group, begun in asked.items():
        for sample, lasts in enumerate(durations(group)):
            age = step - begun
            if 0 <= age < lasts:
                segments.append(
                    a_segment(
                        step=step * every,
                        policy_version=step * every,
                        example_id=f"q{group}",
                        sample_index=sample,
                        start=age * TOKENS,
                        finish_reason="stop" if age == lasts - 1 else None,
                    )
                )
    return segments


def simulated(lasting, *, width, steps):
    """A slow reference: when each group is asked if `width` of them are always in flight, which end in each step, and which are left."""
    asked, ended, slots, numbers = {}, [], [], count()
    for step in range(steps):
        while len(slots) < width:
            group = next(numbers)
            asked[group] = step
            slots.append(group)
        over = [g for g in slots if step == asked[g] + max(lasting(g)) - 1]
        slots = [g for g in slots if g not in over]
        ended.append((over, list(slots)))
    return asked, ended


@settings(deadline=None)
@given(DURATIONS, st.integers(1, 4), st.integers(1, 12))
def test_the_groups_in_flight_are_those_of_a_slow_reference(given_durations, width, steps):
    def lasting(group):
        return given_durations[group] if group < len(given_durations) else (1, 1)

    asked, expected = simulated(lasting, width=width, steps=steps)
    committed = [of_step(step, asked, lasting) for step in range(steps)]
    groups = {}
    for step, (over, left) in enumerate(expected):
        assert list(groups) == list(in_flight(committed[:step], group_size=2))
        every = extended(groups, committed[step], group_size=2)
        assert [name for name, group in every.items() if has_ended(group)] == [f"q{g}" for g in over]
        groups = {name: group for name, group in every.items() if not has_ended(group)}
        assert list(groups) == [f"q{g}" for g in left]
        for name, group in groups.items():
            age = step - asked[int(name[1:])] + 1
            assert [len(r) for r in group] == [min(age, lasts) for lasts in lasting(int(name[1:]))]
    longest_ago = max(0, steps - (STEPS - 1))  # what is before cannot be in flight
    assert in_flight(committed[longest_ago:], group_size=2) == groups


def test_a_resumed_run_has_the_same_groups_in_flight(tmp_path):
    durations = [(1, 4), (2, 1), (4, 4), (1, 1), (3, 2)] * 4
    asked, expected = simulated(durations.__getitem__, width=3, steps=8)
    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        for step in range(8):
            run.commit_segments(step * 5, of_step(step, asked, durations.__getitem__, every=5))
        for step in range(8):
            found = stored_in_flight(run, before=step * 5, group_size=2, max_tokens=STEPS * TOKENS, tokens=TOKENS)
            assert list(found) == ([f"q{g}" for g in expected[step - 1][1]] if step else [])
            assert found == in_flight((run.segments(s * 5) for s in range(step)), group_size=2)
        assert stored_in_flight(run, before=40, group_size=2, max_tokens=TOKENS, tokens=TOKENS) == {}


def test_a_question_is_asked_again_while_nothing_of_the_first_time_is_left():
    first = [a_segment(finish_reason="stop"), a_segment(sample_index=1)]
    second = [a_segment(step=1, sample_index=1, start=1, finish_reason="stop")]
    third = [a_segment(step=2), a_segment(step=2, sample_index=1, finish_reason="stop")]
    assert in_flight([first, second], group_size=2) == {}
    assert in_flight([first, second, third], group_size=2) == {"q0": ((third[0],), (third[1],))}


def test_what_goes_on_and_what_is_new_begin_alike():
    examples = [Example(id=f"q{i}", question=f"{i} + 1", ground_truth="1") for i in range(3)]
    template, groups = load_prompt("r1_zero"), in_flight([[a_segment(), a_segment(sample_index=1)]], group_size=2)
    wanted = list(_wanted(groups, examples, step=1, template=template, num_samples=2, seed=0))
    assert [(w.name, w.request.begun) for w in wanted] == [("q0", 1), ("q0", 1), ("q1", 0), ("q2", 0)]
    assert {w.request.common_prefix for w in wanted} == {template.text.partition("{question}")[0]}


PARTS = (
    a_segment(response_ids=(4, 5, 6), sampled_logprobs=(-1.0, -2.0, -3.0), mean_entropy=1.0, seed=7),
    a_segment(
        step=2,
        policy_version=2,
        start=3,
        response="ab</answer>",
        response_ids=(7,),
        sampled_logprobs=(-4.0,),
        mean_entropy=2.0,
        finish_reason="stop",
        stop_reason="</answer>",
        seed=8,
        sampled_at=datetime(2026, 1, 3),
    ),
)


def test_segments_are_joined_in_order():
    whole = joined(PARTS, request_index=3, sample_index=1)
    assert (whole.request_index, whole.sample_index) == (3, 1)
    assert whole.token_ids == (4, 5, 6, 7)
    assert whole.logprobs == (-1.0, -2.0, -3.0, -4.0)
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("ab</answer>", "stop", "</answer>")
    assert (whole.num_tokens, whole.prompt_ids, whole.num_prompt_tokens) == (4, (1,), 1)
    assert whole.mean_entropy == (3 * 1.0 + 2.0) / 4
    (one,) = [a_segment(mean_entropy=0.1, finish_reason="length")]
    assert joined([one]).mean_entropy == 0.1
    assert joined([a_segment(mean_entropy=None), PARTS[1]]).mean_entropy is None, "an engine that does not know it"


def test_a_rollout_says_which_policy_sampled_each_token():
    row = with_origin(a_rollout(step=2, policy_version=2, seed=5), PARTS)
    assert row.token_versions == (0, 0, 0, 2)
    assert (row.step, row.policy_version, row.seed, row.sampled_at) == (2, 0, 7, datetime(2026, 1, 3))
    assert with_origin(a_rollout(step=2, policy_version=2), PARTS[:1]).token_versions is None, (
        "policy_version sampled all"
    )


def test_the_graders_get_the_responses_of_groups_that_have_ended():
    group = (PARTS, (a_segment(sample_index=1, finish_reason="length"),))

    class Engine:
        engine, policy_version = "transformers", 2

    answers = Answers({"q0": group}, Engine())
    asked = [Request("3 + 4?", (1, 2), name="q0")]
    assert list(answers.sample(asked, SamplingParams())) == [joined(PARTS), joined(group[1], sample_index=1)]


def test_the_metrics_of_a_step():
    segments = [a_segment(), a_segment(sample_index=1, finish_reason="stop")]
    ended = {"q1": (PARTS, (a_segment(finish_reason="stop"),))}
    found = partial_metrics(segments, groups={"q0": ((PARTS[0],), (segments[1],))}, ended=ended)
    assert found == {
        "partial/unfinished_share": 0.5,
        "partial/carried_tokens": 3.0 + 1.0,
        "partial/groups_in_flight": 1.0,
        "partial/versions_mean": pytest.approx(math.fsum([2, 1]) / 2),
    }
    assert "partial/versions_mean" not in partial_metrics(segments, groups={}, ended={})
