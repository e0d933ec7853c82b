"""Generalized advantage estimation, whitening and rewards of tokens: numbers of an independent script, and identities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_cli.training.credit.gae import explained_variance, gae, kl_to_reference, token_rewards, whitened

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
@settings(max_examples=50)
def test_without_discount_an_advantage_is_what_is_still_to_come_minus_the_value(case):
    rewards, values, mask = case
    found = gae(rewards, values, mask, gamma=1, gae_lambda=1)
    to_come = (rewards * mask).flip(1).cumsum(dim=1).flip(1)
    torch.testing.assert_close(found.advantages, (to_come - values) * mask, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.returns, to_come * mask, rtol=0, atol=1e-12)
    baseless = gae(rewards, torch.zeros_like(values), mask, gamma=1, gae_lambda=1)
    torch.testing.assert_close(baseless.advantages, to_come * mask, rtol=0, atol=1e-12)


@given(episodes(), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=50)
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
@settings(max_examples=50)
def test_whitened_advantages_have_mean_0_and_deviation_1(case):
    advantages, _, mask = case
    kept = advantages[mask]
    found = whitened(advantages, mask)
    if len(kept) >= 2 and float(kept.std()) > 1e-3:
        assert float(found[mask].mean()) == pytest.approx(0, abs=1e-9)
        assert float(found[mask].std(correction=1)) == pytest.approx(1, abs=1e-4)
    assert not found[~mask].any()


# --- expected gradients, over all responses of up to two tokens


class Responses:
    """Every response over three tokens, of which the first ends it, each with its probability under a policy of free logits."""

    def __init__(self):
        generator = torch.Generator().manual_seed(4)
        first, second, *reference = (
            torch.randn(shape, dtype=torch.float64, generator=generator) for shape in [(3,), (3, 3)] * 2
        )
        paths = [(0,), *((a, b) for a in (1, 2) for b in range(3))]
        self.logits = [first.requires_grad_(), second.requires_grad_()]
        self.mask = mask_of(*map(len, paths), width=2)
        self.rewards = torch.randn(len(paths), dtype=torch.float64, generator=generator)
        self.log_probs, self.reference = (
            torch.stack([self._of(path, *logits) for path in paths]) for logits in (self.logits, reference)
        )
        self.probabilities = self.log_probs.sum(dim=1).exp()
        same = torch.tensor([[path[0] == other[0] and len(path) == len(other) for other in paths] for path in paths])
        self.prefix = torch.stack(
            [torch.ones_like(same), same], dim=-1
        )  # (rows, rows, 2): which share the state of a token

    @staticmethod
    def _of(path, first, second):
        found = [first.log_softmax(-1)[path[0]], *[second[path[0]].log_softmax(-1)[b] for b in path[1:]]]
        return torch.stack([*found, *[torch.zeros((), dtype=torch.float64)] * (2 - len(path))])

    def token_rewards(self, *, kl_coef, clamp=False):
        kl = kl_to_reference(self.log_probs, self.reference, clamp=clamp).detach()
        return token_rewards(self.rewards, self.mask, kl=kl, kl_coef=kl_coef)

    def true_values(self, rewards):
        """The expectation of what is still to come in each state."""
        to_come = rewards.flip(1).cumsum(dim=1).flip(1)
        weights = self.prefix * self.probabilities.detach()[None, :, None]
        return (weights * to_come).sum(dim=1) / weights.sum(dim=1)

    def gradient(self, rewards, values, *, gae_lambda):
        """The expectation of A_t grad log p_t, summed over a response."""
        advantages = gae(rewards, values, self.mask, gamma=1, gae_lambda=gae_lambda).advantages
        return self._of_logits((self.probabilities.detach()[:, None] * advantages * self.log_probs).sum())

    def exact(self, *, kl_coef):
        """The gradient of E[r] - kl_coef KL(p || p_ref), the divergence of whole responses."""
        divergence = (self.log_probs - self.reference).sum(dim=1)
        return self._of_logits((self.probabilities * (self.rewards - kl_coef * divergence)).sum())

    def _of_logits(self, value):
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, self.logits, retain_graph=True)])


@pytest.mark.parametrize("kl_coef", [0.0, 0.7])
def test_at_lambda_1_the_expected_gradient_is_right_whatever_the_values_are(kl_coef):
    """So the log ratio to the reference, as a reward, has the gradient of the divergence of whole responses."""
    responses = Responses()
    assert responses.probabilities.sum().item() == pytest.approx(1)
    rewards, exact = responses.token_rewards(kl_coef=kl_coef), responses.exact(kl_coef=kl_coef)
    for values in (torch.zeros_like(rewards), torch.full_like(rewards, -3), responses.true_values(rewards) + 1):
        found = responses.gradient(rewards, values, gae_lambda=1)
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)
    assert float(exact.abs().max()) > 0.1
    if kl_coef:
        clamped = responses.gradient(responses.token_rewards(kl_coef=kl_coef, clamp=True), values, gae_lambda=1)
        assert float((clamped - exact).abs().max()) > 0.01


@pytest.mark.parametrize("kl_coef", [0.0, 0.7])
def test_below_lambda_1_the_values_have_to_be_true(kl_coef):
    responses = Responses()
    rewards, exact = responses.token_rewards(kl_coef=kl_coef), responses.exact(kl_coef=kl_coef)
    true = responses.true_values(rewards)
    wrong = true + torch.tensor([0.0, 1.0]) * torch.tensor([[0.0], *[[2.0]] * 3, *[[-2.0]] * 3])  # by the first token
    for gae_lambda in (0, 0.5, 0.95):
        found = responses.gradient(rewards, true, gae_lambda=gae_lambda)
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)
    at_0, at_95 = (responses.gradient(rewards, wrong, gae_lambda=gae_lambda) - exact for gae_lambda in (0, 0.95))
    assert float(at_0.abs().max()) > 0.1
    torch.testing.assert_close(at_95, 0.05 * at_0, rtol=0, atol=1e-12)


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
