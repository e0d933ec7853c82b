"""Every objective on one batch of four responses whose values and gradients were worked out by an independent script, and identities.

The batch: rewards (1, 0, 0, 0), lengths 2, 3, 1, 4. Outside the responses stand values that must not matter.
"""

import math
from functools import partial

import pytest
import torch

from rlvr_cli.training.credit.advantages import group_advantages
from rlvr_cli.training.losses.inputs import LossInputs, LossOutputs
from rlvr_cli.training.losses.normalization import loss_denominators
from rlvr_cli.training.losses.objectives import policy_gradient, reduced_loss
from rlvr_cli.training.losses.policy_gradient import (
    KL_TYPES,
    LOSSES,
    compute_gspo_loss,
    compute_kimi_loss,
    importance_weights,
)

OLD = [[-0.5, -1.0], [-0.7, -0.2, -1.5], [-2.0], [-0.3, -0.6, -0.9, -1.2]]
NEW = [[-0.4, -0.7], [-0.9, -0.2, -1.1], [-2.5], [-0.35, -0.5, -0.9, -0.8]]
REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
CENTERED = group_advantages(REWARDS, group_size=4, normalize_by_std=False)
BY_STD = group_advantages(REWARDS, group_size=4)
MASK = torch.tensor([[len(row) > t for t in range(4)] for row in NEW])
OUTSIDE = [0.0, math.nan, 1e9, -math.inf]


def padded(rows, outside=0.0):
    return torch.tensor([row + [outside] * (4 - len(row)) for row in rows], dtype=torch.float64)


def evaluated(
    loss, *, new=NEW, old=OLD, advantages=CENTERED, normalization="masked_mean", constant=None, outside=0.0, **keywords
):
    """The value of a policy gradient on the batch, its gradient by response, and its statistics."""
    log_probs = padded(new, outside).requires_grad_()
    inputs = LossInputs(
        log_probs=log_probs,
        entropy=padded(new, outside),
        response_mask=MASK,
        old_log_probs=padded(old, outside),
        advantages=advantages[:, None],
        sampled_log_probs=padded(old, outside),
        reference_log_probs=padded(OLD, outside),
    )
    outputs = policy_gradient(inputs, loss=loss, **keywords)
    denominators = loss_denominators(MASK, normalization=normalization, normalize_constant=constant)
    value = reduced_loss(outputs.loss, MASK, denominators=denominators, num_rows=4)
    (gradient,) = torch.autograd.grad(value, log_probs)
    assert not gradient[~MASK].any(), "a gradient outside the responses"
    return value.item(), [row[: len(r)].tolist() for row, r in zip(gradient, NEW, strict=True)], outputs.statistics


def loss_of(name, **options):
    return partial(LOSSES[name].function, **options)


def flat(rows):
    return [value for row in rows for value in row]


CLIP_TOKEN_MEAN = [[-0.082888, 0], [0.020468, 0.025, 0.037296], [0], [0.023781, 0.027629, 0.025, 0.037296]]
GSPO = [[0, 0], [0.022270] * 3, [0], [0.017486] * 4]
WORKED = {
    "clip, masked_mean": (
        loss_of("grpo_clip", cliprange=0.2), {}, -0.026074,
        [[-0.103610, 0], [0.017057, 0.020833, 0.031080], [0], [0.014863, 0.017268, 0.015625, 0.023310]],
    ),
    "clip, token_mean": (loss_of("grpo_clip", cliprange=0.2), {"normalization": "token_mean"}, 0.043582, CLIP_TOKEN_MEAN),
    "clip, masked_normalize": (
        loss_of("grpo_clip", cliprange=0.2), {"normalization": "masked_normalize", "constant": 8.0}, 0.013619,
        [[-0.025902, 0], [0.006396, 0.007812, 0.011655], [0], [0.007431, 0.008634, 0.007812, 0.011655]],
    ),
    "DAPO": (
        loss_of("grpo_clip", cliprange=0.2, cliprange_high=0.28), {"normalization": "token_mean", "advantages": BY_STD}, 0.075163,
        [[-0.165775, 0], [0.040936, 0.05, 0.074591], [0], [0.047561, 0.055258, 0.05, 0.074591]],
    ),
    "gspo": (loss_of("gspo"), {}, 0.011657, GSPO),
    "gspo with the range of grpo_clip": (loss_of("gspo", cliprange=0.2), {}, -0.038249, GSPO),
    "cispo": (
        loss_of("cispo", cispo_cap=5.0), {"normalization": "token_mean"}, -0.072806,
        [[-0.082888, -0.101239], [0.020468, 0.025, 0.037296], [0.015163], [0.023781, 0.027629, 0.025, 0.037296]],
    ),
    "cispo with a low cap": (
        loss_of("cispo", cispo_cap=1.2), {"normalization": "token_mean"}, -0.066812,
        [[-0.082888, -0.09], [0.020468, 0.025, 0.03], [0.015163], [0.023781, 0.027629, 0.025, 0.03]],
    ),
    "kimi": (loss_of("kimi", kimi_tau=0.1), {}, -0.238719, [[-0.1775] * 2, [0.0675] * 3, [0.05], [0.07375] * 4]),
}  # fmt: skip


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("name", WORKED)
def test_worked_numbers(name, outside):
    loss, how, value, gradient = WORKED[name]
    got, found, _ = evaluated(loss, outside=outside, **how)
    assert got == pytest.approx(value, abs=6e-7)
    assert flat(found) == pytest.approx(flat(gradient), abs=6e-7)


def test_what_gspo_says_of_its_ratios():
    _, _, found = evaluated(loss_of("gspo"))
    for row, ratio in enumerate([1.221403, 1.068939, 0.606531, 1.119072]):
        assert found["ratio"][row].tolist() == pytest.approx([ratio] * 4, abs=6e-7)
    assert found["clipped_high"].any(dim=1).tolist() == [True, False, False, False]
    assert found["clipped_low"].any(dim=1).tolist() == [False, False, True, False]


def test_what_kimi_says_of_its_drift():
    _, _, found = evaluated(loss_of("kimi", kimi_tau=0.1))
    assert found["drift"].tolist() == pytest.approx([0.4, 0.2, -0.5, 0.45])


def test_advantages_of_the_batch():
    assert BY_STD.tolist() == pytest.approx([1.499997] + [-0.499999] * 3, abs=6e-7)
    assert CENTERED.tolist() == [0.75, -0.25, -0.25, -0.25]


# --- identities


def summed(inputs):
    """REINFORCE's loss per response."""
    return LossOutputs(-(inputs.advantages * inputs.log_probs).sum(dim=1))


@pytest.mark.parametrize("kl_type", KL_TYPES)
@pytest.mark.parametrize(
    ("loss", "normalization", "same"),
    [
        (loss_of("grpo_clip"), "masked_mean", loss_of("reinforce_with_baseline")),
        (loss_of("gspo"), "masked_mean", loss_of("reinforce_with_baseline")),
        (loss_of("cispo", cispo_cap=5.0), "token_mean", loss_of("reinforce_with_baseline")),
        (loss_of("kimi", kimi_tau=0.1), "token_mean", summed),
    ],
    ids=["grpo_clip", "gspo", "cispo", "kimi"],
)
def test_on_policy_each_is_reinforce(loss, normalization, same, kl_type):
    for kl_coef in (0.0, 0.3):
        how = {"old": NEW, "normalization": normalization, "kl_coef": kl_coef, "kl_type": kl_type}
        (_, ours, _), (_, plain, _) = evaluated(loss, **how), evaluated(same, **how)
        assert ours == plain, "to the last bit"


def sequence_gspo(inputs, *, low, high):
    """GSPO as its paper's equation 5 has it: one clipped ratio per response, with its own gradient."""
    mask = inputs.response_mask
    ratio = ((inputs.log_probs - inputs.old_log_probs) * mask).sum(dim=1).div(mask.sum(dim=1)).exp()
    advantages = inputs.advantages[:, 0]
    return LossOutputs(-torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages))


@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.2, 0.2), (0.2, 0.25), (0.5, 0.01)])
def test_gspo_per_token_is_gspo_per_response(low, high):
    (value, ours, _), (expected, plain, _) = (
        evaluated(loss_of("gspo", cliprange=low, cliprange_high=high)),
        evaluated(partial(sequence_gspo, low=low, high=high)),
    )
    assert value == pytest.approx(expected, rel=1e-14)
    assert flat(ours) == pytest.approx(flat(plain), rel=1e-13, abs=1e-16)


def test_a_mean_log_ratio_is_finite_where_the_product_is_not():
    """9,000 tokens a hundredth of a nat apart: their product is infinite in float32."""
    new = torch.full((1, 9000), -1.0).requires_grad_()
    tensors = (torch.ones(1, 1), new, new.detach() - 0.01, torch.ones(1, 9000, dtype=torch.bool))
    loss, statistics = compute_gspo_loss(*tensors, low=0.2, high=0.2)
    assert statistics["ratio"][0, 0].item() == pytest.approx(math.exp(0.01), rel=1e-5)
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.isfinite().all()


@pytest.mark.parametrize("tau", [0.01, 0.1, 2.0])
def test_kimi_has_the_gradient_of_its_squared_residual(tau):
    def squared(inputs):
        drift = ((inputs.log_probs - inputs.old_log_probs) * inputs.response_mask).sum(dim=1)
        return LossOutputs((inputs.advantages[:, 0] - tau * drift) ** 2 / (2 * tau))

    (_, ours, _), (value, plain, _) = evaluated(loss_of("kimi", kimi_tau=tau)), evaluated(squared)
    assert flat(ours) == pytest.approx(flat(plain), rel=1e-13)
    if tau == 0.1:
        assert value == pytest.approx(0.880031, abs=6e-7)


def test_kimi_at_its_optimum_has_no_residual():
    policy, rewards, tau = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), [1.0, 0.0, 0.0], 0.5
    tilted = policy * (torch.tensor(rewards, dtype=torch.float64) / tau).exp()
    best = tilted / tilted.sum()
    assert best.tolist() == pytest.approx([0.880797, 0.071522, 0.047681], abs=6e-7)
    mean = tau * tilted.sum().log()
    assert mean.item() == pytest.approx(0.716890, abs=6e-7)
    for action, reward in enumerate(rewards):  # each a response of one token
        log_prob = best[action].log().view(1, 1).requires_grad_()
        inputs = (torch.tensor([[reward]]) - mean, log_prob, policy[action].log().view(1, 1), torch.ones(1, 1).bool())
        names = ("advantages", "log_probs", "old_log_probs", "response_mask")
        given = LossInputs(entropy=log_prob, **dict(zip(names, inputs, strict=True)))
        (gradient,) = torch.autograd.grad(LOSSES["kimi"].function(given, kimi_tau=tau).loss.sum(), log_prob)
        assert gradient.item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("outside", [math.nan, 1e9, -math.inf])
@pytest.mark.parametrize("name", ["gspo", "kimi"])
def test_a_loss_that_sums_over_a_response_reads_nothing_outside(name, outside):
    """Even by itself, without the objective around it."""

    def found(outside):
        new = padded(NEW, outside).requires_grad_()
        more = {"low": 0.2, "high": 0.2} if name == "gspo" else {"tau": 0.1}
        function = compute_gspo_loss if name == "gspo" else compute_kimi_loss
        loss, statistics = function(CENTERED[:, None], new, padded(OLD, outside), MASK, **more)
        value = loss[MASK].sum() if name == "gspo" else loss.sum()
        (gradient,) = torch.autograd.grad(value, new)
        seen = [values[MASK] if values.dim() == 2 else values for values in statistics.values()]
        return [value.detach(), gradient[MASK], *seen]

    for one, other in zip(found(outside), found(0.0), strict=True):
        assert torch.equal(one, other)


def test_cispo_keeps_the_gradient_of_a_token_that_clipping_drops():
    _, clip, _ = evaluated(loss_of("grpo_clip", cliprange=0.2), normalization="token_mean")
    _, cispo, found = evaluated(loss_of("cispo", cispo_cap=1.2), normalization="token_mean")
    assert clip[0][1] == 0
    assert cispo[0][1] < 0
    assert found["clipped"][MASK].tolist() == [math.exp(n - o) > 1.2 for n, o in zip(flat(NEW), flat(OLD), strict=True)]


# --- the KL penalty


KL_WORKED = {
    "k2": (0.036125, [[0.01, 0.03], [-0.02, 0, 0.04], [-0.05], [-0.005, 0.01, 0, 0.04]]),
    "k3": (
        0.036253,
        [[0.009516, 0.025918], [-0.022140, 0, 0.032968], [-0.064872], [-0.005127, 0.009516, 0, 0.032968]],
    ),
}


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("kl_type", KL_TYPES)
def test_kl_penalties_worked_by_hand(kl_type, outside):
    """The reference is the old policy here; `unbiased` is looked at on-policy, where it has k3's value and k2's gradient."""
    nothing = partial(LOSSES["reinforce_with_baseline"].function)
    how = {"advantages": torch.zeros(4, dtype=torch.float64), "normalization": "token_mean", "outside": outside}
    old = NEW if kl_type == "unbiased" else OLD
    value, gradient, found = evaluated(nothing, kl_coef=1.0, kl_type=kl_type, old=old, **how)
    assert value == pytest.approx(KL_WORKED["k2" if kl_type == "k2" else "k3"][0], abs=6e-7)
    assert flat(gradient) == pytest.approx(flat(KL_WORKED["k3" if kl_type == "k3" else "k2"][1]), abs=6e-7)
    assert found["kl"][MASK].mean().item() == pytest.approx(KL_WORKED["k3"][0], abs=6e-7), (
        "k3 is reported whatever the type"
    )


@pytest.mark.parametrize("kl_type", KL_TYPES)
def test_a_kl_penalty_descends_the_divergence_that_the_plan_names(kl_type):
    """By exact enumeration of a token's distribution; `unbiased` also where another policy sampled it."""
    generator = torch.Generator().manual_seed(1)
    logits, other, behavior = (torch.randn(6, dtype=torch.float64, generator=generator) for _ in range(3))
    logits.requires_grad_()
    log_p, log_q = logits.log_softmax(0), other.log_softmax(0)
    divergences = {
        "KL(p || p_ref)": (log_p.exp() * (log_p - log_q)).sum(),
        "KL(p_ref || p)": (log_q.exp() * (log_q - log_p)).sum(),
    }
    gradients = {name: torch.autograd.grad(d, logits, retain_graph=True)[0] for name, d in divergences.items()}
    for sampler in [log_p.detach(), *([behavior.log_softmax(0)] if kl_type == "unbiased" else [])]:
        terms = KL_TYPES[kl_type].function(log_p, sampler, log_q)
        (found,) = torch.autograd.grad((sampler.exp() * terms).sum(), logits, retain_graph=True)
        matching = [
            name for name, expected in gradients.items() if torch.allclose(found, expected, rtol=1e-12, atol=1e-14)
        ]
        assert matching == [KL_TYPES[kl_type].descends]


def test_off_policy_the_unbiased_penalty_is_weighted_by_the_ratio():
    how = {"advantages": torch.zeros(4, dtype=torch.float64), "normalization": "token_mean"}
    value, _, _ = evaluated(loss_of("reinforce_with_baseline"), kl_coef=1.0, kl_type="unbiased", **how)
    ratios = [math.exp(n - o) for n, o in zip(flat(NEW), flat(OLD), strict=True)]
    assert value == pytest.approx(sum(r * (1 / r - 1 + math.log(r)) for r in ratios) / 10)


# --- corrections for the sampler


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"cap": 2.0}, [0.4, 1, 2]),
        ({"cap": 2.0, "floor": 0.5}, [0.5, 1, 2]),
        ({"cap": 5.0, "floor": 0.5, "masked": True}, [0, 1, 0]),
        ({"cap": 3.0, "masked": True}, [0.4, 1, 0]),
        ({"cap": 7.0, "floor": 0.3, "masked": True}, [0.4, 1, 6]),
    ],
)
def test_corrections_worked_by_hand(given, expected):
    sampled = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64)
    trainer = (sampled + torch.tensor([[0.4, 1.0, 6.0]], dtype=torch.float64).log()).requires_grad_()
    weights = importance_weights(trainer, sampled, **given)
    assert weights.tolist()[0] == pytest.approx(expected)
    assert not weights.requires_grad


def test_masked_tokens_have_no_gradient_and_the_others_keep_theirs():
    sampled = [[o - math.log(6.0) if (i, t) == (3, 1) else o for t, o in enumerate(row)] for i, row in enumerate(OLD)]
    log_probs = padded(NEW).requires_grad_()
    inputs = LossInputs(
        log_probs=log_probs, entropy=log_probs, response_mask=MASK, old_log_probs=padded(OLD), advantages=CENTERED[:, None],
        sampled_log_probs=padded(sampled),
    )  # fmt: skip
    masked = policy_gradient(
        inputs, loss=loss_of("gspo"), importance_cap=5.0, importance_floor=0.5, importance_masked=True
    )
    plain = policy_gradient(inputs, loss=loss_of("gspo"))
    for outputs, expected in ((plain, [0.069942] * 4), (masked, [0.069942, 0, 0.069942, 0.069942])):
        (gradient,) = torch.autograd.grad(outputs.loss[3].sum() / 4, log_probs, retain_graph=True)
        assert gradient[3].tolist() == pytest.approx(expected, abs=6e-7)
