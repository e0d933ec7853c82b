"""The preference losses: values worked out by an independent script, identities, and an update that no layout changes."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marks import slow
from policies import make_batch, make_policy
from rlvr_cli.config.dpo import BETAS, DpoConfig
from rlvr_cli.training.losses.inputs import LossInputs
from rlvr_cli.training.losses.objectives import reduced_loss
from rlvr_cli.training.losses.preference import PREFERENCE_LOSSES, preference
from rlvr_cli.training.planning.plan import preference_objective
from rlvr_cli.training.updates.scores import compute_log_probs
from rlvr_cli.training.updates.update import train_update

CHOSEN, CHOSEN_REFERENCE = [-0.4, -0.7], [-0.5, -1.0]
REJECTED, REJECTED_REFERENCE = [-0.9, -0.2, -1.1], [-0.7, -0.2, -1.5]
OUTSIDE = [0.0, math.nan, 1e9, -math.inf]
NAMES = list(PREFERENCE_LOSSES)
GAMMAS = {"dpo": 0.0, "dpo_norm": 0.0, "simpo": 1.0}


def pair(chosen, rejected, reference, *, outside=0.0, width=4):
    """The inputs of one pair, (2, 4), with a value for what is outside the responses."""

    def padded(rows):
        return torch.tensor([row + [outside] * (width - len(row)) for row in rows], dtype=torch.float64)

    log_probs = padded([chosen, rejected]).requires_grad_()
    return LossInputs(
        log_probs=log_probs,
        entropy=padded([chosen, rejected]),
        response_mask=torch.tensor([[t < len(row) for t in range(width)] for row in (chosen, rejected)]),
        old_log_probs=log_probs.detach(),
        reference_log_probs=padded(reference),
    )


def evaluated(inputs, name, *, beta=None, gamma=None, nll_coef=0.0):
    """The loss of the update, its gradient by response, and the statistics."""
    beta, gamma = BETAS[name] if beta is None else beta, GAMMAS[name] if gamma is None else gamma
    outputs = preference(inputs, loss=PREFERENCE_LOSSES[name], beta=beta, gamma=gamma, nll_coef=nll_coef)
    rows = len(inputs.response_mask)
    loss = reduced_loss(outputs.loss, inputs.response_mask, denominators=torch.ones(rows, 1), num_rows=rows)
    (gradient,) = torch.autograd.grad(loss, inputs.log_probs)
    assert not gradient[~inputs.response_mask].any(), "a gradient outside the responses"
    of_rows = [row[kept].tolist() for row, kept in zip(gradient, inputs.response_mask, strict=True)]
    return loss.item(), of_rows, outputs.statistics


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize(
    ("name", "loss", "chosen", "rejected"),
    [
        ("dpo", 0.683197, -0.0495, 0.0495),
        ("dpo_norm", 0.414370, -0.848109, 0.565406),
        ("simpo", 1.059137, -0.653245, 0.435497),
    ],
)
def test_worked_values(name, loss, chosen, rejected, outside):
    inputs = pair(CHOSEN, REJECTED, [CHOSEN_REFERENCE, REJECTED_REFERENCE], outside=outside)
    value, (of_chosen, of_rejected), statistics = evaluated(inputs, name)
    assert value == pytest.approx(loss, abs=1e-6)
    assert of_chosen == pytest.approx([chosen] * 2, abs=1e-6)
    assert of_rejected == pytest.approx([rejected] * 3, abs=1e-6)
    scores = {"dpo": (0.4, 0.2), "dpo_norm": (0.2, 0.2 / 3), "simpo": (-0.55, -2.2 / 3)}[name]
    assert statistics["chosen_log_ratio"].tolist() == pytest.approx([scores[0]] * 2)
    assert statistics["rejected_log_ratio"].tolist() == pytest.approx([scores[1]] * 2)
    assert statistics["margin"].tolist() == pytest.approx([BETAS[name] * (scores[0] - scores[1])] * 2)
    assert statistics["accuracy"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("name", NAMES)
def test_the_likelihood_of_the_chosen_response_is_added_per_token(name, outside):
    inputs = pair(CHOSEN, REJECTED, [CHOSEN_REFERENCE, REJECTED_REFERENCE], outside=outside)
    without, (of_chosen, of_rejected), _ = evaluated(inputs, name)
    value, (chosen, rejected), statistics = evaluated(inputs, name, nll_coef=0.3)
    assert statistics["chosen_nll"].tolist() == pytest.approx([0.55] * 2)  # (0.4 + 0.7) / 2
    assert value - without == pytest.approx(0.3 * 0.55)
    assert [a - b for a, b in zip(chosen, of_chosen, strict=True)] == pytest.approx([-0.3 / 2] * 2)
    assert rejected == of_rejected


@pytest.mark.parametrize("name", ["dpo", "dpo_norm"])
def test_a_policy_that_is_its_reference_has_margin_0_and_loss_log_2(name):
    value, (of_chosen, of_rejected), statistics = evaluated(pair(CHOSEN, REJECTED, [CHOSEN, REJECTED]), name, beta=0.3)
    assert value == pytest.approx(math.log(2), abs=1e-15)
    divisors = (2, 3) if name == "dpo_norm" else (1, 1)
    assert of_chosen == pytest.approx([-0.15 / divisors[0]] * 2)
    assert of_rejected == pytest.approx([0.15 / divisors[1]] * 3)
    assert statistics["margin"].tolist() == [0.0, 0.0]
    assert statistics["accuracy"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_the_other_way_round_the_margin_has_the_other_sign(name):
    reference = [CHOSEN_REFERENCE, REJECTED_REFERENCE]
    value, _, there = evaluated(pair(CHOSEN, REJECTED, reference), name, gamma=0.0)
    swapped, _, back = evaluated(pair(REJECTED, CHOSEN, reference[::-1]), name, gamma=0.0)
    assert (there["margin"] + back["margin"]).tolist() == [0.0, 0.0]
    assert there["accuracy"].tolist() == [1.0, 1.0]
    assert back["accuracy"].tolist() == [0.0, 0.0]
    # -log sigma(z) and -log sigma(-z) differ by z
    assert swapped - value == pytest.approx(float(there["margin"][0]))


@pytest.mark.parametrize("name", NAMES)
def test_a_response_repeated_counts_once_if_log_probabilities_are_divided_by_the_length(name):
    reference = [CHOSEN_REFERENCE, REJECTED_REFERENCE]
    _, _, once = evaluated(pair(CHOSEN, REJECTED, reference), name)
    longer = pair(CHOSEN * 2, REJECTED, [CHOSEN_REFERENCE * 2, REJECTED_REFERENCE])
    _, _, twice = evaluated(longer, name)
    factor = 2 if name == "dpo" else 1
    assert twice["chosen_log_ratio"].tolist() == pytest.approx((factor * once["chosen_log_ratio"]).tolist())


def test_gamma_is_asked_for_after_beta():
    inputs = pair(CHOSEN, REJECTED, [CHOSEN, REJECTED])
    score = 2 * (sum(CHOSEN) / 2 - sum(REJECTED) / 3)
    for gamma in (0.0, 1.0, 1.6):
        value, _, statistics = evaluated(inputs, "simpo", gamma=gamma)
        assert value == pytest.approx(math.log1p(math.exp(gamma - score)))
        assert statistics["margin"].tolist() == pytest.approx([score] * 2), "without gamma"


def test_simpo_reads_no_reference():
    inputs = pair(CHOSEN, REJECTED, [CHOSEN_REFERENCE, REJECTED_REFERENCE])
    assert evaluated(replace(inputs, reference_log_probs=None), "simpo")[0] == evaluated(inputs, "simpo")[0]


def test_the_plan_says_what_is_minimized():
    assert preference_objective(DpoConfig(dataset="p")).startswith(
        "-(1/B) sum log sigma(0.1 (h_w - h_l));  h = log p/p_ref of"
    )
    assert "sigma(5 (h_w - h_l));  h = (1/|o|) log p/p_ref" in preference_objective(DpoConfig(loss_type="dpo_norm"))
    assert "sigma(2.5 (h_w - h_l) - 1.25);  h = (1/|o|) log p of" in preference_objective(
        DpoConfig(loss_type="simpo", beta=2.5)
    )
    assert preference_objective(DpoConfig(nll_coef=0.5)).startswith(
        "(1/B) sum [-log sigma(0.1 (h_w - h_l)) - 0.5 (1/|o_w|) log p(o_w)];  h = log p/p_ref of"
    )
    assert "sigma(2 (h_w - h_l) - 0.3);" in preference_objective(DpoConfig(loss_type="simpo", gamma=0.3))


# The update

LENGTHS = [(3, 4), (3, 2), (2, 1), (2, 6), (5, 3), (5, 3), (3, 5), (3, 2), (4, 1), (4, 2)]  # five pairs


def pairs_batch(reference):
    batch = make_batch(LENGTHS)
    for row in range(0, len(LENGTHS), 2):  # chosen and rejected have one prompt
        prompt = LENGTHS[row][0]
        batch["input_ids"][row + 1, :prompt] = batch["input_ids"][row, :prompt]
        batch["labels"][row + 1, : prompt - 1] = batch["labels"][row, : prompt - 1]
    batch["unit"] = torch.arange(len(LENGTHS))[:, None] // 2
    batch["reference_log_probs"] = compute_log_probs(reference, batch, micro_batch_size=4)
    return batch


def moved(policy):
    """The same policy with other weights."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return policy


def updated(batch, name, *, size, tokens=None):
    """The weights after one update of plain gradient descent, and its metrics."""
    policy = moved(make_policy())
    metrics = train_update(
        policy,
        torch.optim.SGD(policy.parameters(), lr=0.1),
        batch,
        learning_rate=0.1,
        micro_batch_size=size,
        micro_batch_tokens=tokens,
        objective=partial(preference, loss=PREFERENCE_LOSSES[name], beta=BETAS[name], gamma=GAMMAS[name]),
        max_grad_norm=math.inf,
    )
    return torch.cat([p.detach().flatten() for p in policy.parameters()]), metrics


def plainly_updated(batch, name):
    """The same by one pass of each response alone, with the formula as it stands in the paper."""
    policy = moved(make_policy())
    losses = []
    for row in range(0, len(LENGTHS), 2):
        scores = []
        for of_pair in (row, row + 1):
            prompt, length = LENGTHS[of_pair]
            ids = torch.cat([batch["input_ids"][of_pair, :1], batch["labels"][of_pair, : prompt + length - 1]])
            log_probs = policy(ids[None]).logits[0, :-1].log_softmax(-1)
            own = log_probs[torch.arange(len(ids) - 1), ids[1:]][prompt - 1 :]
            reference = batch["reference_log_probs"][of_pair, prompt - 1 : prompt - 1 + length]
            score = own.sum() if name == "simpo" else own.sum() - reference.sum()
            scores.append(score if name == "dpo" else score / length)
        losses.append(torch.log1p(torch.exp(GAMMAS[name] - BETAS[name] * (scores[0] - scores[1]))))
    loss = torch.stack(losses).mean()
    loss.backward()
    weights = [p.detach() - 0.1 * (p.grad if p.grad is not None else 0) for p in policy.parameters()]
    return torch.cat([w.flatten() for w in weights]), loss.item()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("size", "tokens"), [(1, None), slow(2, None), (3, None), slow(4, None), slow(10, None), (4, 12), slow(4, 30)]
)
def test_an_update_is_the_plain_one_in_any_micro_batches(name, size, tokens):
    batch = pairs_batch(make_policy())
    weights, metrics = updated(batch, name, size=size, tokens=tokens)
    expected, loss = plainly_updated(batch, name)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
    assert metrics["loss/objective"] == pytest.approx(loss, abs=1e-12)
    assert 0 < metrics["policy/accuracy_mean"] < 1


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=2)
@given(order=st.permutations(range(5)), size=st.integers(1, 10))
def test_an_update_does_not_depend_on_the_order_of_the_pairs(name, order, size):
    batch = pairs_batch(make_policy())
    rows = [row for number in order for row in (2 * number, 2 * number + 1)]
    shuffled = {key: tensor[rows] for key, tensor in batch.items()}
    expected, _ = updated(batch, name, size=10)
    torch.testing.assert_close(updated(shuffled, name, size=size)[0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("value", OUTSIDE[1:])
def test_values_outside_the_responses_change_nothing(value):
    batch = pairs_batch(make_policy())
    spoiled = batch["reference_log_probs"].masked_fill(~batch["response_mask"], value)
    expected, _ = updated(batch, "dpo", size=4)
    torch.testing.assert_close(
        updated(batch | {"reference_log_probs": spoiled}, "dpo", size=4)[0], expected, rtol=0, atol=0
    )
