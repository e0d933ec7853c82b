"""The loss of `rlvr ppo`: numbers of an independent script, identities, and the same update for every layout of a batch."""

import copy
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import make_batch, make_policy
from rlvr_cli.models.log_probs import get_response_log_probs
from rlvr_cli.models.policy import Critic, Policy
from rlvr_cli.training.credit.gae import gae, token_rewards
from rlvr_cli.training.losses.inputs import LossInputs
from rlvr_cli.training.losses.objectives import policy_gradient, reduced_loss
from rlvr_cli.training.losses.policy_gradient import LOSSES
from rlvr_cli.training.losses.value import actor_critic, compute_value_loss
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.updates.scores import compute_scores
from rlvr_cli.training.updates.update import check_ratios, train_update

OUTSIDE = [0.0, math.nan, 1e9, -math.inf]
OLD_VALUES, VALUES = [0.2, 0.5, 0.4, 0.6], [0.55, 0.45, 0.9, 0.7]


# --- the value loss


def test_worked_numbers_of_the_value_loss():
    old, new = (torch.tensor([values], dtype=torch.float64) for values in (OLD_VALUES, VALUES))
    plain, none_clipped = compute_value_loss(new, old, torch.ones(1, 4))
    assert float(plain.mean()) == pytest.approx(0.075625)
    assert not none_clipped.any()
    clipped, which = compute_value_loss(new, old, torch.ones(1, 4), cliprange=0.2)
    assert float(clipped.mean()) == pytest.approx(0.1140625)
    assert (2 * clipped)[0].tolist() == pytest.approx([0.36, 0.3025, 0.16, 0.09])
    assert which.tolist() == [[True, False, True, False]]


@pytest.mark.parametrize(
    ("value", "old", "gradient"),
    [(2.5, 0.0, 1.5), (1.5, 0.0, 0.0), (0.5, 0.0, 0.0), (0.1, 0.0, -0.9), (-0.5, 0.0, -1.5), (0.95, 0.9, -0.05)],
)
def test_a_value_has_no_gradient_where_the_clipped_one_is_further_from_the_return(value, old, gradient):
    new = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    loss, _ = compute_value_loss(new, torch.tensor([[old]]), torch.ones(1, 1), cliprange=0.2)
    (found,) = torch.autograd.grad(loss.sum(), new)
    assert float(found) == pytest.approx(gradient)


# --- the objective


def inputs_of(outside=0.0, *, width=6, double=True, **changes):
    """Two responses, of 4 and 2 tokens."""

    def padded(*rows):
        return torch.tensor([[*row, *[outside] * (width - len(row))] for row in rows], dtype=torch.float64)

    mask = torch.arange(width) < torch.tensor([[4], [2]])
    fields = {
        "log_probs": padded([-0.35, -0.5, -0.9, -0.8], [-0.4, -0.7]).requires_grad_(),
        "entropy": padded([1.0] * 4, [1.0] * 2),
        "response_mask": mask,
        "old_log_probs": padded([-0.3, -0.6, -0.9, -1.2], [-0.5, -1.0]),
        "sampled_log_probs": padded([-0.3, -0.6, -0.9, -1.2], [-0.5, -1.0]),
        "reference_log_probs": padded([-0.2, -0.7, -0.9, -1.0], [-0.6, -0.9]),
        "advantages": padded([0.8, 0.5, -0.6, 0.4], [-0.3, 0.2]),
        "values": padded(VALUES, [0.1, 0.3]).requires_grad_(),
        "old_values": padded(OLD_VALUES, [0.2, 0.2]),
        "returns": padded([1.0] * 4, [0.0] * 2),
    }
    return LossInputs(**fields | changes)


def reduced(outputs, inputs):
    mask = inputs.response_mask
    return reduced_loss(
        outputs.loss, mask, denominators=torch.full((2, 1), float(mask.sum()), dtype=torch.float64), num_rows=2
    )


@pytest.mark.parametrize("outside", OUTSIDE)
def test_it_is_the_clipped_policy_gradient_plus_the_weighted_value_loss(outside):
    inputs = inputs_of(outside)
    how = {"cliprange": 0.2, "kl_coef": 0.1}
    outputs = actor_critic(inputs, vf_coef=0.5, vf_cliprange=0.2, **how)
    plain = inputs_of()
    policy = policy_gradient(plain, loss=partial(LOSSES["grpo_clip"].function, cliprange=0.2), kl_coef=0.1)
    values = 0.5 * (4 * 0.1140625 + (0.01 + 0.09) / 2) / 6
    assert reduced(outputs, inputs).item() == pytest.approx(reduced(policy, plain).item() + values)
    found = torch.autograd.grad(reduced(outputs, inputs), [inputs.log_probs, inputs.values])
    (expected,) = torch.autograd.grad(reduced(policy, plain), plain.log_probs)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-15)
    of_values = [0, (0.45 - 1) / 12, 0, (0.7 - 1) / 12, 0, 0], [0.1 / 12, 0.3 / 12, 0, 0, 0, 0]
    torch.testing.assert_close(found[1], torch.tensor(of_values, dtype=torch.float64))
    mask = inputs.response_mask
    assert outputs.statistics["critic/clip_fraction"][mask].tolist() == [True, False, True, False, False, False]
    assert outputs.statistics["critic/loss"][mask].sum() == pytest.approx(2 * values * 6)


def test_a_critic_alone_leaves_the_policy_as_it_is():
    inputs = inputs_of()
    outputs = actor_critic(inputs, cliprange=0.2, vf_coef=1.0, kl_coef=0.1, critic_alone=True)
    none, of_values = torch.autograd.grad(
        reduced(outputs, inputs), [inputs.log_probs, inputs.values], allow_unused=True
    )
    assert none is None
    assert of_values.abs().sum() > 0
    assert outputs.statistics.keys() == actor_critic(inputs, cliprange=0.2, vf_coef=1.0, kl_coef=0.1).statistics.keys()


@pytest.mark.parametrize("wrong", [0.0, 0.7])
def test_without_discount_and_off_the_first_update_it_is_reinforce_with_the_values_as_baseline(wrong):
    """rho = 1: the gradient of -(R - V) log p; with V = 0 that of plain REINFORCE."""
    mask = inputs_of().response_mask
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    values = torch.full(mask.shape, wrong, dtype=torch.float64)
    found = gae(token_rewards(rewards, mask), values, mask, gamma=1, gae_lambda=1)
    log_probs = inputs_of().log_probs
    inputs = inputs_of(old_log_probs=log_probs.detach(), log_probs=log_probs, advantages=found.advantages)
    loss = reduced(actor_critic(inputs, cliprange=0.2, vf_coef=1.0), inputs)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    plain = -((rewards[:, None] - wrong) * log_probs)[mask].mean()
    torch.testing.assert_close(gradient, torch.autograd.grad(plain, log_probs)[0], rtol=0, atol=1e-15)


# --- the update


LENGTHS = [(4, 3), (4, 2), (3, 5), (2, 1), (3, 4)]


def critic_policy(own, *, dtype=torch.float64):
    """A policy with a critic whose head is not 0, and whose body is not quite the policy's."""
    policy = Policy(make_policy(dtype))
    body = Policy(make_policy(dtype)) if own else None
    policy.critic = Critic(policy, body)
    with torch.no_grad():
        policy.critic.head.weight.copy_(torch.linspace(-0.5, 0.5, 8))
        policy.critic.head.bias.fill_(0.1)
        if body is not None:
            for parameter in body.model.parameters():
                parameter.mul_(0.9)
    return policy


def ppo_batch(policy, *, outside=0.0, seed=0):
    """A batch with old scores that are not those of the policy, advantages and returns; arbitrary numbers outside the mask."""
    batch = make_batch(LENGTHS, seed)
    mask, generator = batch["response_mask"], torch.Generator().manual_seed(seed)
    scores = compute_scores(policy, batch, micro_batch_size=2)

    def noise(scale):
        return scale * torch.randn(mask.shape, generator=generator, dtype=torch.float64)

    columns = {
        "old_log_probs": scores["log_probs"] + noise(0.2),
        "sampled_log_probs": scores["log_probs"],
        "old_values": scores["values"] + noise(0.2),
        "advantages": noise(1),
        "returns": noise(1),
    }
    return batch | {name: tensor.masked_fill(~mask, outside) for name, tensor in columns.items()}


OBJECTIVE = partial(actor_critic, cliprange=0.2, vf_coef=0.5, vf_cliprange=0.2)


def gradients_of_update(policy, batch, **how):
    """The gradients that an update hands to the optimizer, by name, and its metrics; the policy is left as it was."""
    policy = copy.deepcopy(policy)
    optimizer, seen = make_optimizer(policy, learning_rate=1e-3), {}
    optimizer.register_step_pre_hook(
        lambda *_: seen.update(
            {n: p.grad.clone() for n, p in policy.trainable_parameters().items() if p.grad is not None}
        )
    )
    how = {"micro_batch_size": 5, "max_grad_norm": math.inf, "skip_zero_advantage": False} | how
    metrics = train_update(policy, optimizer, batch, learning_rate=1e-3, objective=OBJECTIVE, **how)
    return seen, metrics


def one_shot(policy, batch):
    """The same gradients from one plain forward pass, with whole logits."""
    mask, ids = batch["response_mask"], batch["input_ids"]
    critic = policy.critic
    logits = policy.model(input_ids=ids).logits
    log_probs = logits.log_softmax(-1).gather(-1, batch["labels"][..., None]).squeeze(-1)
    body = (critic.body or policy).model.base_model
    values = critic.head(body(input_ids=ids).last_hidden_state).squeeze(-1)
    ratio = (log_probs - batch["old_log_probs"]).exp()[mask]
    a, old, returns = (batch[name][mask] for name in ("advantages", "old_values", "returns"))
    policy_loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    near = old + (values[mask] - old).clamp(-0.2, 0.2)
    value_loss = torch.maximum((values[mask] - returns) ** 2, (near - returns) ** 2) / 2
    loss = (policy_loss + 0.5 * value_loss).mean()
    parameters = policy.trainable_parameters()
    found = torch.autograd.grad(loss, list(parameters.values()))
    return loss.item(), dict(zip(parameters, found, strict=True))


@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
@pytest.mark.parametrize("outside", OUTSIDE)
def test_an_update_is_one_plain_pass_over_the_batch(own, outside):
    policy = critic_policy(own)
    loss, expected = one_shot(policy, ppo_batch(policy))
    found, metrics = gradients_of_update(policy, ppo_batch(policy, outside=outside), micro_batch_size=2)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-10)
    assert metrics["loss/objective"] == pytest.approx(loss, abs=1e-10)
    for area, of_critic in (("optimizer", False), ("critic", True)):
        squares = [float((g * g).sum()) for n, g in expected.items() if n.startswith("critic.") == of_critic]
        assert metrics[f"{area}/grad_norm"] == pytest.approx(math.sqrt(sum(squares)))


@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
@given(st.permutations(range(len(LENGTHS))), st.integers(1, 6), st.integers(0, 3), st.booleans())
@settings(max_examples=3)
def test_no_cut_order_or_padding_changes_an_update(own, order, size, extra_width, recomputed):
    policy = critic_policy(own)
    batch = ppo_batch(policy)
    shuffled = {n: torch.nn.functional.pad(t[order], (0, extra_width), value=0) for n, t in batch.items()}
    whole, _ = gradients_of_update(policy, batch)
    cut, _ = gradients_of_update(policy, shuffled, micro_batch_size=size, gradient_checkpointing=recomputed)
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-10, atol=1e-10)


def test_each_network_is_clipped_by_itself_and_has_its_own_learning_rate():
    policy = critic_policy(own=True)
    batch = ppo_batch(policy)
    whole, metrics = gradients_of_update(policy, batch)
    clipped, same = gradients_of_update(policy, batch, max_grad_norm=0.01)
    for of_critic, area in ((False, "optimizer"), (True, "critic")):
        norm = metrics[f"{area}/grad_norm"]
        assert norm == same[f"{area}/grad_norm"] > 0.01
        for name in (n for n in whole if n.startswith("critic.") == of_critic):
            torch.testing.assert_close(clipped[name], whole[name] * (0.01 / (norm + 1e-6)))
    optimizer = make_optimizer(policy, learning_rate=1e-3, critic_learning_rate=4e-3)
    how = {"objective": OBJECTIVE, "micro_batch_size": 5, "skip_zero_advantage": False}
    before = {name: p.detach().clone() for name, p in policy.trainable_parameters().items()}
    train_update(policy, optimizer, batch, learning_rate=5e-4, **how)
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(5e-4), pytest.approx(2e-3)]
    steps = {name: (p - before[name]).abs().max().item() for name, p in policy.trainable_parameters().items()}
    assert steps["model.norm.weight"] == pytest.approx(5e-4, rel=1e-3), "AdamW's first step is the learning rate"
    assert steps["critic.head.weight"] == pytest.approx(2e-3, rel=1e-3)
    assert steps["critic.body.norm.weight"] == pytest.approx(2e-3, rel=1e-3)


def test_a_gradient_of_the_critic_that_is_not_finite_skips_the_whole_update():
    policy = critic_policy(own=True)
    batch = ppo_batch(policy)
    batch["returns"] = batch["returns"].masked_fill(batch["response_mask"], math.nan)
    before = {name: t.clone() for name, t in policy.weights().items()}
    optimizer = make_optimizer(policy, learning_rate=1e-3)
    metrics = train_update(
        policy, optimizer, batch, learning_rate=1e-3, objective=OBJECTIVE, micro_batch_size=2, skip_zero_advantage=False
    )
    assert metrics["update/skipped"] == 1
    assert all(tensor.equal(before[name]) for name, tensor in policy.weights().items())
    assert not optimizer.state


def test_a_critic_alone_changes_no_weight_of_the_policy_and_leaves_its_moments_out():
    policy = critic_policy(own=True)
    before = {name: t.clone() for name, t in policy.weights().items()}
    optimizer = make_optimizer(policy, learning_rate=1e-2, weight_decay=0.1)
    batch = ppo_batch(policy) | {
        "old_log_probs": compute_scores(policy, ppo_batch(policy), micro_batch_size=2)["log_probs"]
    }
    metrics = train_update(
        policy,
        optimizer,
        batch,
        learning_rate=1e-2,
        objective=partial(OBJECTIVE, critic_alone=True),
        micro_batch_size=2,
        skip_zero_advantage=False,
    )
    check_ratios(metrics, dtype=torch.float64)
    moved = {name for name, tensor in policy.weights().items() if not tensor.equal(before[name])}
    assert moved == {name for name in before if name.startswith("critic.")}
    assert {n for n, p in policy.trainable_parameters().items() if p in optimizer.state} == moved


@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
def test_scores_are_those_of_the_update_to_the_last_bit(own):
    policy = critic_policy(own, dtype=torch.float32)
    batch = ppo_batch(policy)
    scores = compute_scores(policy, batch, micro_batch_size=2)
    seen = []

    def look(inputs):
        seen.append((inputs.log_probs.detach(), inputs.values.detach()))
        return OBJECTIVE(inputs)

    how = {"micro_batch_size": 2, "skip_zero_advantage": False, "learning_rate": 0.0}
    train_update(policy, make_optimizer(policy, learning_rate=1.0), batch, objective=look, **how)
    for index, name in enumerate(("log_probs", "values")):
        ours = sorted(float(v) for pair in seen for v in pair[index].flatten() if v)
        assert ours == sorted(float(v) for v in scores[name].flatten() if v)
    assert not scores["values"][~batch["response_mask"]].any()


def test_a_new_critic_expects_nothing():
    policy = Policy(make_policy())
    policy.critic = Critic(policy, Policy(make_policy()))
    batch = make_batch(LENGTHS)
    scores = get_response_log_probs(policy, batch["input_ids"], batch["labels"], response_mask=batch["response_mask"])
    assert not scores["values"].any()
    assert scores["values"].dtype == torch.float64
