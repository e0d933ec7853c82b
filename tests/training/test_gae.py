"""Generalized advantage estimation, whitening and rewards of tokens: numbers of an independent script, and identities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_cli.training.gae import explained_variance, gae, kl_to_reference, token_rewards, whitened

VALUES = [0.2, 0.5, 0.4, 0.6]
OUTSIDE = [0.0, math.nan, 1e9, -math.inf]


def row(*values, width=4, outside=0.0):
    return torch.tensor([[*values, *[outside] * (width - len(values))]], dtype=torch.float64)


def mask_of(*lengths, width=4):
    return torch.arange(width) < torch.tensor(lengths)[:, None]


# --- worked numbers


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize(
    ("gamma", "gae_lambda", "advantages", "returns"),
    [
        (1, 1, [0.8, 0.5, 0.6, 0.4], [1, 1, 1, 1]),
        (1, 0.95, [0.72845, 0.451, 0.58, 0.4], [0.92845, 0.951, 0.98, 1]),
        (1, 0, [0.3, -0.1, 0.2, 0.4], [0.5, 0.4, 0.6, 1]),
        (0.99, 0.95, [0.701553, 0.432273, 0.5702, 0.4], [0.901553, 0.932273, 0.9702, 1]),
    ],
)
def test_worked_numbers(gamma, gae_lambda, advantages, returns, outside):
    mask = mask_of(4, width=6)
    rewards = token_rewards(torch.tensor([1.0], dtype=torch.float64), mask)
    found = gae(rewards, row(*VALUES, width=6, outside=outside), mask, gamma=gamma, gae_lambda=gae_lambda)
    assert found.advantages[0].tolist() == pytest.approx([*advantages, 0, 0], abs=6e-7)
    assert found.returns[0].tolist() == pytest.approx([*returns, 0, 0], abs=6e-7)


def test_a_value_after_the_last_token_would_be_a_reward_there():
    """The numbers of a bootstrap from 0.6. What stands behind the last token is never one."""
    bootstrapped = gae(row(0, 0, 0, 0.6), row(*VALUES), mask_of(4), gamma=1, gae_lambda=0.95)
    assert bootstrapped.advantages[0].tolist() == pytest.approx([0.3855, 0.09, 0.2, 0], abs=1e-9)
    for behind in (0.6, math.nan):
        cut = gae(
            row(0, 0, 0, 0, width=5), row(*VALUES, behind, width=5), mask_of(4, width=5), gamma=1, gae_lambda=0.95
        )
        alone = gae(row(0, 0, 0, 0), row(*VALUES), mask_of(4), gamma=1, gae_lambda=0.95)
        assert cut.advantages[:, :4].equal(alone.advantages)
        assert cut.advantages[0, 3] == -0.6


def test_kl_in_the_reward():
    kl = row(0.1, -0.2, 0.3, 0)
    mask = mask_of(4)
    rewards = token_rewards(torch.tensor([1.0], dtype=torch.float64), mask, kl=kl, kl_coef=0.1)
    assert rewards[0].tolist() == pytest.approx([-0.01, 0.02, -0.03, 1])
    found = gae(rewards, row(*VALUES), mask, gamma=1, gae_lambda=1)
    assert found.advantages[0].tolist() == pytest.approx([0.78, 0.49, 0.57, 0.4])


def test_kl_to_the_reference_with_and_without_a_clamp():
    log_probs, reference = torch.tensor([[-0.5, -0.5]]), torch.tensor([[-0.7, -0.3]])
    assert kl_to_reference(log_probs, reference, clamp=False)[0].tolist() == pytest.approx([0.2, -0.2])
    assert kl_to_reference(log_probs, reference, clamp=True)[0].tolist() == pytest.approx([0.2, 0.0])


@pytest.mark.parametrize("outside", OUTSIDE)
def test_whitening_is_over_tokens_and_never_over_padding(outside):
    advantages = torch.cat([row(0.72845, 0.451, 0.58, 0.4), row(0.685, 0.3, outside=outside)])
    found = whitened(advantages, mask_of(4, 2))
    assert found[0].tolist() == pytest.approx([1.213864, -0.434021, 0.332161, -0.736930], abs=6e-7)
    assert found[1].tolist() == pytest.approx([0.955797, -1.330870, 0, 0], abs=6e-7)
    over_padding = [1.192502, 0.206021, 0.664684, 0.024689]  # the bug, whose signs differ
    assert found[0, 1] < 0 < over_padding[1]


def test_fewer_than_two_tokens_are_not_whitened():
    assert whitened(row(0.7, outside=math.nan), mask_of(1)).tolist() == [[0.7, 0, 0, 0]]
    assert whitened(row(0.7), mask_of(0)).tolist() == [[0, 0, 0, 0]]
    assert whitened(row(0.7, 0.7), mask_of(2)).tolist() == [[0, 0, 0, 0]], "equal ones stay finite"


# --- rewards of tokens


def test_the_reward_is_that_of_the_last_token():
    mask = torch.tensor([[True, True, False], [True, False, True], [False, False, False], [False, True, False]])
    found = token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    assert found.tolist() == [[0, 1, 0], [0, 0, 2], [0, 0, 0], [0, 4, 0]]
    kl = torch.tensor([[0.5, 0.5, math.nan]] * 4)
    assert token_rewards(torch.zeros(4), mask, kl=kl, kl_coef=2.0)[0].tolist() == [-1, -1, 0]


# --- identities


@st.composite
def episodes(draw):
    """Rewards, values and a mask with gaps, of a few rows."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    numbers = st.lists(st.floats(-2, 2), min_size=rows * width, max_size=rows * width)
    rewards, values = (torch.tensor(draw(numbers), dtype=torch.float64).view(rows, width) for _ in range(2))
    bits = draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width))
    return rewards, values, torch.tensor(bits).view(rows, width)


@given(episodes())
@settings(max_examples=50, deadline=None)
def test_without_discount_an_advantage_is_what_is_still_to_come_minus_the_value(case):
    rewards, values, mask = case
    found = gae(rewards, values, mask, gamma=1, gae_lambda=1)
    to_come = (rewards * mask).flip(1).cumsum(dim=1).flip(1)
    torch.testing.assert_close(found.advantages, (to_come - values) * mask, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.returns, to_come * mask, rtol=0, atol=1e-12)
    baseless = gae(rewards, torch.zeros_like(values), mask, gamma=1, gae_lambda=1)
    torch.testing.assert_close(baseless.advantages, to_come * mask, rtol=0, atol=1e-12)


@given(episodes(), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_it_is_the_definition_for_each_response(case, gamma, gae_lambda):
    """The sum of (gamma lambda)^k delta_t+k, over the tokens of one response alone; and gaps are no steps."""
    rewards, values, mask = case
    found = gae(
        rewards.masked_fill(~mask, math.nan),
        values.masked_fill(~mask, math.nan),
        mask,
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    for i, inside in enumerate(mask):
        r, v = rewards[i][inside].tolist(), [*values[i][inside].tolist(), 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        expected = [sum((gamma * gae_lambda) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(r))]
        assert found.advantages[i][inside].tolist() == pytest.approx(expected, abs=1e-9)
    assert not found.advantages[~mask].any()
    assert not found.returns[~mask].any()


@given(episodes())
@settings(max_examples=50, deadline=None)
def test_whitened_advantages_have_mean_0_and_deviation_1(case):
    advantages, _, mask = case
    kept = advantages[mask]
    found = whitened(advantages, mask)
    if len(kept) >= 2 and float(kept.std()) > 1e-3:
        assert float(found[mask].mean()) == pytest.approx(0, abs=1e-9)
        assert float(found[mask].std(correction=1)) == pytest.approx(1, abs=1e-4)
    assert not found[~mask].any()


# --- explained variance


def test_explained_variance():
    mask = mask_of(3)
    returns = row(1.0, 0.0, 0.5, outside=math.nan)
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(row(0.3, 0.3, 0.3), returns, mask) == pytest.approx(0)
    assert explained_variance(row(0.0, 1.0, 0.5), returns, mask) == pytest.approx(-3)


def test_returns_that_hardly_differ_have_none_to_explain():
    assert explained_variance(row(0.9, 1.0, 1.1), row(1.0, 1.0, 1.0005), mask_of(3)) is None
    assert explained_variance(row(0.9), row(1.0), mask_of(1)) is None
