"""Group advantages and the overlong penalty, against hand-worked groups and the standard library's statistics."""

import inspect
import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_cli.training.credit.advantages import (
    batch_normalized,
    compute_group_normalized_rewards,
    group_advantages,
    has_signal,
    soft_overlong_penalty,
)

# the sample's deviations are 1/2 and 1/sqrt(3); the population's would be sqrt(3)/4 and 1/2
TWO_GROUPS = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0], dtype=torch.float64)


def test_advantages_worked_by_hand():
    root = math.sqrt(3) / 2
    expected = [1.5, -0.5, -0.5, -0.5, root, root, -root, -root]
    assert group_advantages(TWO_GROUPS, group_size=4, advantage_eps=0.0).tolist() == pytest.approx(expected, rel=1e-14)
    plain = group_advantages(TWO_GROUPS, group_size=4, normalize_by_std=False)
    assert plain.tolist() == [0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5]


def test_the_deviation_is_the_samples_and_the_small_number_is_added_to_it():
    for eps in (1.5, 0.5, 1e-3, 1e-6):
        got = group_advantages(TWO_GROUPS, group_size=4, advantage_eps=eps)
        assert got[0].item() == pytest.approx(0.75 / (0.5 + eps), rel=1e-12)
        assert got[4].item() == pytest.approx(0.5 / (1 / math.sqrt(3) + eps), rel=1e-12)
    default = group_advantages(TWO_GROUPS, group_size=4)
    assert torch.equal(default, group_advantages(TWO_GROUPS, group_size=4, advantage_eps=1e-6))


def test_without_the_division_the_small_number_has_no_part():
    small, large = (
        group_advantages(TWO_GROUPS, group_size=4, advantage_eps=eps, normalize_by_std=False) for eps in (1e-6, 10.0)
    )
    assert torch.equal(small, large)


@pytest.mark.parametrize("normalize_by_std", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_have_no_advantage_at_all(dtype, normalize_by_std):
    left_over = 0.0
    for reward in (0.0, 1.0, 0.1, 0.7, -1 / 3):
        for size in (1, 2, 3, 6, 7, 8, 11, 64):
            rewards = torch.full((size,), reward, dtype=dtype)
            left_over = max(left_over, (rewards - rewards.mean()).abs().max().item())
            for eps in (1e-6, 0.0):
                advantages = group_advantages(
                    rewards, group_size=size, advantage_eps=eps, normalize_by_std=normalize_by_std
                )
                assert advantages.tolist() == [0.0] * size
    assert left_over > 0  # the mean of 0.1s is not always 0.1


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_a_group_of_one_has_no_advantage(normalize_by_std):
    rewards = torch.tensor([0.0, 1.0, 0.3])
    assert group_advantages(rewards, group_size=1, normalize_by_std=normalize_by_std).tolist() == [0.0, 0.0, 0.0]


def test_a_group_without_signal_does_not_touch_its_neighbors():
    rewards = torch.tensor([0.1] * 8 + [1.0] + [0.0] * 7)
    advantages = group_advantages(rewards, group_size=8, advantage_eps=0.0)
    assert advantages[:8].tolist() == [0.0] * 8
    alone = group_advantages(rewards[8:], group_size=8, advantage_eps=0.0)
    assert torch.equal(advantages[8:], alone)
    assert has_signal(rewards, group_size=8).tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_precision_of_the_rewards_is_kept(dtype):
    advantages = group_advantages(TWO_GROUPS.to(dtype), group_size=4)
    assert advantages.dtype == dtype
    assert advantages.shape == (8,)
    torch.testing.assert_close(advantages, group_advantages(TWO_GROUPS, group_size=4).to(dtype))


@st.composite
def grouped_rewards(draw):
    size = draw(st.integers(2, 6))
    group = st.lists(st.sampled_from([-0.5, 0.0, 0.1, 0.7, 1.0, 3.0]), min_size=size, max_size=size)
    return draw(st.lists(group, min_size=1, max_size=4))


@given(grouped_rewards(), st.floats(1e-8, 2.0), st.booleans())
@settings(max_examples=60)
def test_advantages_against_a_slow_loop(groups, eps, normalize_by_std):
    expected = []
    for group in groups:
        mean = statistics.fmean(group)
        scale = statistics.stdev(group) + eps if normalize_by_std else 1.0
        expected += [0.0 if len(set(group)) == 1 else (reward - mean) / scale for reward in group]
    size = len(groups[0])
    rewards = torch.tensor(groups, dtype=torch.float64)
    options = {"group_size": size, "advantage_eps": eps, "normalize_by_std": normalize_by_std}
    advantages = group_advantages(rewards.flatten(), **options)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert has_signal(rewards.flatten(), group_size=size).tolist() == [len(set(group)) > 1 for group in groups]
    assert torch.equal(
        group_advantages(rewards.flip(0).flatten(), **options).view(-1, size).flip(0).flatten(), advantages
    )


@pytest.mark.parametrize("count", [1, 3, 7])
def test_rewards_that_do_not_fill_their_groups_are_refused(count):
    with pytest.raises(AssertionError):
        group_advantages(torch.arange(float(count)), group_size=2)


# --- the handout's function


def grade(response, ground_truth):
    """Half a point for a response that ends in a full stop, half for one that contains the ground truth."""
    formatted, correct = float(response.endswith(".")), float(ground_truth in response)
    return {"reward": (formatted + correct) / 2, "format_reward": formatted, "answer_reward": correct}


def test_the_handouts_signature():
    names = list(inspect.signature(compute_group_normalized_rewards).parameters)
    assert names == [
        "reward_fn",
        "rollout_responses",
        "repeated_ground_truths",
        "group_size",
        "advantage_eps",
        "normalize_by_std",
    ]


def test_compute_group_normalized_rewards_worked_by_hand():
    responses = ["42.", "42", "41.", "41", "7", "7", "7", "8."]
    truths = ["42"] * 4 + ["7"] * 4
    advantages, rewards, metadata = compute_group_normalized_rewards(grade, responses, truths, 4, 0.25, True)
    assert rewards.tolist() == [1.0, 0.5, 0.5, 0.0, 0.5, 0.5, 0.5, 0.5]
    scale = math.sqrt(0.5 / 3) + 0.25
    assert advantages.tolist() == pytest.approx([0.5 / scale, 0, 0, -0.5 / scale, 0, 0, 0, 0], rel=1e-6)
    assert advantages[4:].tolist() == [0.0] * 4
    assert (advantages.shape, advantages.dtype) == (rewards.shape, rewards.dtype) == ((8,), torch.float32)
    assert metadata == {
        "reward_mean": 0.5,
        "reward_std": pytest.approx(math.sqrt(0.5 / 7)),
        "reward_min": 0.0,
        "reward_max": 1.0,
        "format_reward_mean": 3 / 8,
        "answer_reward_mean": 5 / 8,
        "share_of_groups_with_signal": 0.5,
    }
    assert {type(value) for value in metadata.values()} == {float}
    centred, again, _ = compute_group_normalized_rewards(grade, responses, truths, 4, 0.25, False)
    assert centred.tolist() == [0.5, 0.0, 0.0, -0.5, 0.0, 0.0, 0.0, 0.0]
    assert torch.equal(again, rewards)


def test_one_response_has_finite_metadata():
    advantages, rewards, metadata = compute_group_normalized_rewards(grade, ["42."], ["42"], 1, 1e-6, True)
    assert (advantages.tolist(), rewards.tolist()) == ([0.0], [1.0])
    assert all(math.isfinite(value) for value in metadata.values())
    assert (metadata["reward_std"], metadata["share_of_groups_with_signal"]) == (0.0, 0.0)


def test_unequal_numbers_of_responses_ground_truths_and_group_members_are_refused():
    for responses, truths in ((["a"] * 4, ["a"] * 3), (["a"] * 3, ["a"] * 4)):
        with pytest.raises(ValueError, match=r"zip\(\)"):
            compute_group_normalized_rewards(grade, responses, truths, 2, 1e-6, True)
    with pytest.raises(AssertionError):
        compute_group_normalized_rewards(grade, ["a"] * 3, ["a"] * 3, 2, 1e-6, True)


# --- the overlong penalty


def test_soft_overlong_penalty_worked_by_hand():
    penalty = soft_overlong_penalty([0, 79, 80, 81, 85, 90, 99, 100, 130], max_tokens=100, buffer=20)
    assert penalty.tolist() == [0.0, 0.0, 0.0, -0.05, -0.25, -0.5, -0.95, -1.0, -1.0]
    assert penalty.dtype == torch.float64
    assert soft_overlong_penalty([0, 2, 3, 4], max_tokens=4, buffer=4).tolist() == [0.0, -0.5, -0.75, -1.0]
    assert soft_overlong_penalty([], max_tokens=4, buffer=1).shape == (0,)


@pytest.mark.parametrize("buffer", [0, 11])
def test_a_buffer_that_does_not_fit_is_refused(buffer):
    with pytest.raises(AssertionError):
        soft_overlong_penalty([1], max_tokens=10, buffer=buffer)


# --- over the batch


def test_over_the_batch_worked_by_hand():
    centered = group_advantages(torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0]).double(), group_size=4, normalize_by_std=False)
    divided = batch_normalized(centered, advantage_eps=0.0)
    assert divided.tolist() == pytest.approx([1.620185, *[-0.540062] * 3, *[0.540062] * 3, -1.620185], abs=6e-7)
    assert batch_normalized(centered, advantage_eps=0.5)[0].item() == pytest.approx(
        0.75 / (0.75 / 1.620185 + 0.5), rel=1e-6
    )


def test_over_the_batch_nothing_stays_nothing():
    for eps in (1e-6, 0.0):
        assert batch_normalized(torch.zeros(8), advantage_eps=eps).tolist() == [0.0] * 8
    assert batch_normalized(torch.tensor([0.5])).tolist() == [0.5]


@pytest.mark.parametrize(("correct", "by_std", "centered"), [(1, 0.618717, 0.218750), (4, 0.935413, 0.5)])
def test_the_deviation_lifts_questions_of_extreme_difficulty(correct, by_std, centered):
    """The weight of a question, the mean of |A|, of 8 responses: the easy and the hard gain on the medium ones."""
    rewards = torch.tensor([1.0] * correct + [0.0] * (8 - correct), dtype=torch.float64)
    for normalize, expected in ((True, by_std), (False, centered)):
        weight = group_advantages(rewards, group_size=8, normalize_by_std=normalize).abs().mean()
        assert weight.item() == pytest.approx(expected, abs=2e-6)


def test_the_expected_gradient_of_centered_rewards_is_a_constant_share_of_the_true_one():
    """(G - 1) / G, over all groups of three actions; divided by it (RLOO), it is the true gradient."""
    logits = torch.tensor([0.3, -0.2, 0.7], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, 0.0, 0.4], dtype=torch.float64)
    log_p = logits.log_softmax(0)
    (true,) = torch.autograd.grad((log_p.exp() * rewards).sum(), logits, retain_graph=True)
    for size in (2, 3, 4):
        loss = torch.zeros((), dtype=torch.float64)
        for actions in itertools.product(range(3), repeat=size):
            taken = log_p[list(actions)]
            advantages = group_advantages(rewards[list(actions)], group_size=size, normalize_by_std=False)
            loss = loss + taken.sum().exp().detach() * (advantages * taken).mean()
        (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(found, (size - 1) / size * true, rtol=1e-13, atol=1e-15)
