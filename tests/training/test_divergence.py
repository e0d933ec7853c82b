"""The rule of --stop-when diverged: what ends a run, what does not, and that an interruption changes nothing."""

import math
import random

import pytest

from rlvr_cli.training.divergence import ENTROPY_RISE, EVALUATIONS, IN_A_ROW, STEEP, Divergence, is_far_below


def told(*, rewards=(), samples=256, every=1, entropy=(), norms=(), skipped=(), tokens=(), updates=40, at_once=False):
    """`why` after each update, of metrics by update; what is not given is healthy."""
    rule = Divergence(max_skipped=3)
    found = []

    def at(values, i, usual):
        return values[i] if i < len(values) else usual

    for i in range(updates):
        if i % every == 0 and rewards:
            rule.add("eval", i, {"reward/mean": at(rewards, i // every, rewards[-1]), "reward/samples": samples})
        values = {
            "policy/entropy": at(entropy, i, 0.5), "optimizer/grad_norm": at(norms, i, 1.0),
            "update/skipped": at(skipped, i, 0.0), "update/tokens": at(tokens, i, 100.0),
        }  # fmt: skip
        rule.add("train", i, values)
        if not at_once:
            found.append(rule.read(i + 1))
    return found or [rule.read(updates)]


def test_a_run_that_learns_has_not_diverged():
    draw = random.Random(0)
    rewards = [min(0.4 + i / 50, 0.97) + draw.uniform(-0.05, 0.05) for i in range(40)]
    entropy = [0.6 * math.exp(-i / 10) for i in range(40)]
    norms = [draw.lognormvariate(-1, 0.8) for _ in range(40)]
    assert set(told(rewards=rewards, entropy=entropy, norms=norms)) == {""}


def test_rewards_far_below_the_best_end_it_after_some_evaluations_in_a_row():
    found = told(rewards=[0.4, 0.5, 0.1, 0.2, 0.1, 0.5], every=5)
    first = next(i for i, why in enumerate(found) if why)
    assert first == 5 * (1 + EVALUATIONS)  # the update after the third of them
    assert found[first] == (
        "the held-out reward is 0.1, and was 0.5 at its best, in 3 evaluations in a row, after 20 updates"
    )
    assert found[-1] == found[first]  # and it stays so
    assert set(told(rewards=[0.4, 0.5, 0.1, 0.2, 0.4, 0.1, 0.2, 0.4], every=5)) == {""}


def test_rewards_of_few_questions_may_be_low_by_chance():
    assert is_far_below(0.2, 0.5, samples=256)
    assert not is_far_below(0.3, 0.5, samples=256)  # more than half of it
    assert not is_far_below(0.2, 0.5, samples=16)
    assert not is_far_below(0.0, 0.0, samples=256)  # nothing was ever learned
    assert is_far_below(0.4, 1.0, samples=4)
    assert is_far_below(1.0, 3.0, samples=4)  # rewards above 1
    assert not is_far_below(math.nan, 0.5, samples=256)


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("entropy", 0.5 + ENTROPY_RISE, "the entropy is 2.51 nats per token, and was 0.5 in the first update"),
        ("norms", STEEP, "the gradient norm is 50.01, more than 50 times its median of 1"),
    ],
)
def test_values_past_their_bound_end_it_only_several_times_in_a_row(name, values, why):
    usual = 0.5 if name == "entropy" else 1.0
    past, inside = values + 0.01, values
    found = told(**{name: [*[usual] * 10, *[past] * 20]})
    assert found.index(next(filter(None, found))) == 10 + IN_A_ROW - 1
    assert found[-1].startswith(why.replace("50.01", f"{past:.3g}"))
    assert found[-1].endswith(f"after {10 + IN_A_ROW} updates")
    spikes = ([usual] * 10 + [past] * (IN_A_ROW - 1)) * 3
    assert set(told(**{name: spikes}, updates=42)) == {""}
    assert set(told(**{name: [*[usual] * 10, *[inside] * 20]})) == {""}


def test_updates_that_are_not_finite_end_it():
    assert set(told(skipped=[0, 1, 1, 0, 1, 1, 0])) == {""}
    found = told(skipped=[0, 1, 1, 1], norms=[1.0, math.nan, math.inf, math.nan], entropy=[0.5, math.nan, math.nan])
    assert found[:3] == ["", "", ""]
    assert found[3] == "3 updates in a row had a loss or gradient that is not finite, after 4 updates"


def test_updates_without_a_token_or_a_signal_tell_nothing():
    assert set(told(skipped=[1.0] * 20, tokens=[0.0] * 20)) == {""}
    assert set(told(norms=[0.0] * 30 + [1.0] * 10)) == {""}


def test_what_is_read_at_once_or_twice_is_the_same():
    rewards = [0.5, 0.5, 0.1, 0.1, 0.1]
    assert told(rewards=rewards, every=4, at_once=True)[-1] == told(rewards=rewards, every=4)[-1] != ""
    rule = Divergence(max_skipped=3)
    rule.add("eval", 0, {"reward/mean": 0.9, "reward/samples": 256})
    for _ in range(10):
        for step in (1, 2):
            rule.add("eval", step, {"reward/mean": 0.0, "reward/samples": 256})
        assert rule.read(3) == ""
