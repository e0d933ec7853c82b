"""Tokens of an environment inside a response: numbers worked by hand, and every loss as on rows that never had them."""

import math
from datetime import datetime
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import an_episode
from rlvr_cli.rollouts.collect import make_rollout
from rlvr_cli.training.credit.gae import gae, token_rewards, whitened
from rlvr_cli.training.losses.inputs import LossInputs
from rlvr_cli.training.losses.normalization import loss_denominators
from rlvr_cli.training.losses.objectives import (
    negative_log_likelihood,
    policy_gradient,
    reduced_loss,
    statistics_at,
    token_metrics,
)
from rlvr_cli.training.losses.policy_gradient import KL_TYPES, LOSSES
from rlvr_cli.training.losses.value import actor_critic
from rlvr_cli.training.updates.tensors import rollout_tensors
from rlvr_cli.types import Completion, Example, Grade, Request

NORMALIZATIONS = [("token_mean", None), ("masked_mean", None), ("masked_normalize", 13.0)]
OPTIONS = {"cliprange": 0.2, "cliprange_high": 0.3, "cispo_cap": 1.1, "kimi_tau": 0.1}

# --- a turn of 4 tokens, 3 of the environment, a turn of 2; log-probabilities by token

LOGPROBS = (-0.1, -0.2, -0.3, -0.4, 0.0, 0.0, 0.0, -0.5, -0.5)
EPISODE = an_episode(4, 3, 2, prompt_ids=(5, 6, 7, 8, 9), sampled_logprobs=LOGPROBS, advantage=1.0)
ONE_TURN = an_episode(2, prompt_ids=(5, 6), advantage=1.0)


def test_the_mean_log_probability_is_of_the_policys_tokens():
    e = EPISODE
    completion = Completion(
        0, 0, "r", e.prompt_ids, e.response_ids, LOGPROBS, 5, 9, "stop", "eos", None, e.response_mask, e.turns, None, e.episode
    )  # fmt: skip
    row = make_rollout(
        completion, Grade(1.0, 1.0, 1.0), run_id="r", phase="train", step=0, policy_version=0, example=Example("q", "", "7"),
        sample_index=0, request=Request("", (1,)), grader="r1_zero", sampled_at=datetime(2026, 1, 2),
    )  # fmt: skip
    assert row.mean_logprob == pytest.approx(-0.3333, abs=5e-5)
    assert (row.num_response_tokens, row.num_policy_tokens) == (9, 6)


def gradients(rollouts, normalization):
    """The loss of advantage 1 where all ratios are 1, and its gradient at each token of the batch."""
    batch = rollout_tensors(rollouts, pad_id=0)
    mask, old = batch["response_mask"], batch["sampled_log_probs"].double()
    log_probs = old.clone().requires_grad_()
    inputs = LossInputs(log_probs, old, mask, old, batch["advantages"].double(), sampled_log_probs=old)
    outputs = policy_gradient(inputs, loss=LOSSES["grpo_no_clip"].function)
    denominators = loss_denominators(mask, normalization=normalization)
    value = reduced_loss(outputs.loss, mask, denominators=denominators, num_rows=len(mask))
    (gradient,) = torch.autograd.grad(value, log_probs)
    return value.item(), gradient


def test_the_loss_and_its_gradient_on_the_policys_tokens_and_0_on_the_environments():
    value, gradient = gradients([EPISODE], "masked_mean")
    assert value == pytest.approx(-1)
    assert gradient[0].tolist() == pytest.approx([0] * 4 + [-1 / 6] * 4 + [0] * 3 + [-1 / 6] * 2)


def test_beside_a_row_of_one_turn_every_token_weighs_the_same():
    value, gradient = gradients([EPISODE, ONE_TURN], "token_mean")
    assert value == pytest.approx(-1)
    assert gradient[0].tolist() == pytest.approx([0] * 4 + [-1 / 8] * 4 + [0] * 3 + [-1 / 8] * 2)
    assert gradient[1].tolist() == pytest.approx([0] + [-1 / 8] * 2 + [0] * 10)


@pytest.mark.parametrize("outside", [0.0, 1e9, math.nan])
def test_the_environments_tokens_are_no_steps(outside):
    mask = torch.tensor([[True, True, False, False, True, True]])
    values = torch.tensor([[0.5, 0.6, outside, outside, 0.7, 0.8]], dtype=torch.float64)
    rewards = token_rewards(torch.tensor([1.0], dtype=torch.float64), mask)
    found = gae(rewards, values, mask, gamma=1.0, gae_lambda=1.0)
    assert found.advantages[0].tolist() == pytest.approx([0.5, 0.4, 0, 0, 0.3, 0.2])


def test_the_first_tokens_of_each_turn_are_those_that_could_not_end_it():
    mask = rollout_tensors([EPISODE, ONE_TURN], pad_id=0)["response_mask"]
    zeros = torch.zeros(mask.shape)
    inputs = LossInputs(zeros, zeros, mask, zeros, torch.ones(2, 1), sampled_log_probs=zeros)
    found = policy_gradient(inputs, loss=LOSSES["grpo_no_clip"].function, min_tokens=1).statistics
    assert found["early"][mask].tolist() == [True, False, False, False, True, False, True, False]
    assert found["position"][mask].tolist() == [0, 1, 2, 3, 0, 5, 0, 1]
    assert found["length"][mask].tolist() == [6] * 6 + [2] * 2


# --- as on the rows without them


@st.composite
def masks(draw):
    """Rows of a few turns: the lengths of the policy's and the environment's, which begins where the first is 0."""
    rows = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=4))
    rows.append([draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))])
    tokens = [[i % 2 == 0 for i, n in enumerate(row) for _ in range(n)] for row in rows]
    width = max(map(len, tokens)) + 1
    return torch.tensor([row + [False] * (width - len(row)) for row in tokens]), draw(st.integers(0, 99))


def cut(tensor, mask):
    """The tokens in the mask, row by row from the left, without the others."""
    width = int(mask.sum(dim=1).max())
    rows = [row[kept] for row, kept in zip(tensor, mask, strict=True)]
    return torch.stack([torch.cat([row, row.new_zeros(width - len(row))]) for row in rows])


def inputs_of(mask, seed, *, per_token, outside=0.0):
    """The columns of a batch; at the environment's tokens stands what must not matter."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale=1.0):
        drawn = torch.rand(mask.shape, dtype=torch.float64, generator=generator)
        return torch.where(mask, -scale * drawn, outside)

    names = (
        "log_probs",
        "entropy",
        "old_log_probs",
        "sampled_log_probs",
        "reference_log_probs",
        "values",
        "old_values",
        "returns",
    )
    columns = {name: noise() for name in names} | {"response_mask": mask}
    each = torch.randn(mask.shape, dtype=torch.float64, generator=generator)
    return columns | {"advantages": torch.where(mask, each, outside) if per_token else each[:, :1]}


def computed(objective, columns, normalization, constant):
    """The value, its gradient at the tokens of the mask, and what becomes the metrics."""
    mask = columns["response_mask"]
    log_probs = columns["log_probs"].clone().requires_grad_()
    outputs = objective(LossInputs(**{**columns, "log_probs": log_probs}))
    denominators = loss_denominators(mask, normalization=normalization, normalize_constant=constant)
    value = reduced_loss(outputs.loss, mask, denominators=denominators, num_rows=len(mask))
    (gradient,) = torch.autograd.grad(value, log_probs)
    assert not gradient[~mask].any()
    statistics = statistics_at(outputs.statistics, mask.flatten().nonzero().flatten())
    return [value.item(), *gradient[mask].tolist()], token_metrics(statistics)


OBJECTIVES = {
    "sft": negative_log_likelihood,
    "ppo": partial(actor_critic, cliprange=0.2, vf_coef=0.5, vf_cliprange=0.1, kl_coef=0.1),
} | {
    name: partial(
        policy_gradient,
        loss=partial(loss.function, **{option: OPTIONS[option] for option in loss.options}),
        kl_coef=0.1,
        kl_type=kl_type,
        importance_cap=None if loss.per_row else 1.5,
    )
    for (name, loss), kl_type in zip(LOSSES.items(), 3 * list(KL_TYPES), strict=False)
}


@pytest.mark.parametrize("name", OBJECTIVES)
@given(masks(), st.booleans(), st.sampled_from([0.0, 7.0, -1e9]), st.sampled_from(NORMALIZATIONS))
@settings(max_examples=12)
def test_every_loss_is_that_of_the_rows_without_them(name, case, per_token, outside, normalization):
    """Value, gradients and metrics: clip fractions, lengths, positions, ratios, mismatch, KL divergence."""
    mask, seed = case
    per_token = per_token or name == "ppo"
    whole = inputs_of(mask, seed, per_token=per_token, outside=outside)
    without = {n: cut(t, mask) if t.shape == mask.shape else t for n, t in whole.items()}
    (found, metrics), (expected, expected_metrics) = (
        computed(OBJECTIVES[name], columns, *normalization) for columns in (whole, without)
    )
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert metrics == pytest.approx(expected_metrics, rel=1e-12, abs=1e-12)


@given(masks(), st.floats(0, 1), st.floats(0, 1), st.sampled_from([0.0, 7.0, math.nan]))
@settings(max_examples=20)
def test_advantage_estimation_is_that_of_the_rows_without_them(case, gamma, gae_lambda, outside):
    mask, seed = case
    columns = inputs_of(mask, seed, per_token=True, outside=outside)
    rewards, kl, values = torch.arange(len(mask)).double(), columns["log_probs"], columns["values"]

    def estimated(mask, kl, values):
        of_tokens = token_rewards(rewards, mask, kl=kl, kl_coef=0.3)
        found = gae(of_tokens, values, mask, gamma=gamma, gae_lambda=gae_lambda)
        return [*found, whitened(found.advantages, mask)]

    found = estimated(mask, kl, values)
    expected = estimated(cut(mask, mask).bool(), cut(kl, mask), cut(values, mask))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(cut(one, mask), other, rtol=1e-12, atol=1e-12)
