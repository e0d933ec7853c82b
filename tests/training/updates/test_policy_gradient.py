"""Policy-gradient updates against plain one-shot references, one response at a time, in float64."""

import copy
import itertools
import math
from collections import defaultdict
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from arrays import every_two
from policies import make_policy
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.handout import grpo_microbatch_train_step
from rlvr_cli.models.log_probs import get_response_log_probs
from rlvr_cli.training.credit.advantages import group_advantages
from rlvr_cli.training.losses.policy_gradient import LOSSES, HandoutLoss
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.updates.scores import compute_log_probs
from rlvr_cli.training.updates.update import train_update
from updates import (
    LENGTHS,
    LOSS_TYPES,
    NORMALIZATIONS,
    ROUNDING,
    assert_same,
    bytes_of,
    make_rollouts,
    norm_of,
    objective_of,
    one_shot_gradient,
    rows_of,
    update_gradient,
    update_options,
)


def dealt(batch, order, extra_width):
    """The rollouts with their rows in another order and wider padding."""
    columns = {"advantages": batch["advantages"][order]}
    return rows_of({k: v for k, v in batch.items() if k not in columns}, order, extra_width) | columns


def plain_reinforce(advantage, new, old, *, config):
    return -advantage * new, {}


def plain_grpo_clip(advantage, new, old, *, config):
    return plain_clip(advantage, new.exp() / old.exp(), config.cliprange, config.cliprange_high or config.cliprange)


def plain_gspo(advantage, new, old, *, config):
    """The product of the ratios to the power of 1 / length, once for each token, whose own probability alone has a gradient."""
    of_response = (new.exp() / old.exp()).prod().detach() ** (1 / max(len(new), 1))
    ratio = torch.stack([of_response * p / p.detach() for p in new.exp()]) if len(new) else new.exp()
    loss, statistics = plain_clip(advantage, ratio, config.cliprange, config.cliprange_high or config.cliprange)
    return loss, statistics | {"policy/ratio": ratio}


def plain_cispo(advantage, new, old, *, config):
    ratio = (new.exp() / old.exp()).detach()
    capped = ratio > config.cispo_cap
    return -advantage * torch.where(capped, config.cispo_cap, ratio) * new, {"policy/clip_fraction": capped}


def plain_kimi(advantage, new, old, *, config):
    """Its one number, in equal shares of the response's tokens."""
    product = new.exp().prod() / old.exp().prod()
    loss = -(advantage * new.sum() - config.kimi_tau * product.log() ** 2 / 2)
    drift = product.log().expand(min(len(new), 1))
    return loss.expand(len(new)) / max(len(new), 1), {"policy/drift_mean": drift}


def plain_clip(advantage, ratio, low, high):
    above, below = (ratio > 1 + high) & (advantage > 0), (ratio < 1 - low) & (advantage < 0)
    return -advantage * torch.where(above, 1 + high, torch.where(below, 1 - low, ratio)), {
        "policy/clip_fraction": above | below,
        "policy/clip_fraction_low": below,
        "policy/clip_fraction_high": above,
    }


def plain_grpo_no_clip(advantage, new, old, *, config):
    return -advantage * new.exp() / old.exp(), {}


# A slow reference for each loss: one response's advantage and log-probabilities, (response,) each, and the config ->
# the loss of each token, and the statistics of each token by the name of the metric that is their mean.
PLAIN_LOSSES = {
    "no_baseline": plain_reinforce,
    "reinforce_with_baseline": plain_reinforce,
    "grpo_clip": plain_grpo_clip,
    "grpo_no_clip": plain_grpo_no_clip,
    "gspo": plain_gspo,
    "cispo": plain_cispo,
    "kimi": plain_kimi,
}


def plain_loss_of(loss_type):
    if loss_type not in PLAIN_LOSSES:
        raise KeyError(
            f"the loss {loss_type} has no slow reference: write one, as its source has it, into PLAIN_LOSSES"
        )
    return PLAIN_LOSSES[loss_type]


def plain_policy_gradient(
    model, batch, *, loss_type, normalization, constant, config, kl_coef, importance_cap, temperature
):
    per_row = LOSSES[loss_type].per_row
    """The loss and its metrics as the papers write them, in a loop over the rows of the whole batch."""
    logits = model(batch["input_ids"]).logits / temperature
    rows, tokens = [], defaultdict(list)
    for row, mask in enumerate(batch["response_mask"]):
        distribution = logits[row][mask].log_softmax(-1)  # (response, vocab)
        new = distribution.gather(-1, batch["labels"][row][mask][:, None]).squeeze(-1)
        old = batch["old_log_probs"][row][mask] if "old_log_probs" in batch else new.detach()
        sampled, reference = batch["sampled_log_probs"][row][mask], batch["reference_log_probs"][row][mask]
        ratio = new.exp() / old.exp()
        loss, statistics = plain_loss_of(loss_type)(batch["advantages"][row, 0], new, old, config=config)
        for name, values in statistics.items():
            tokens[name].append(values.double())
        weight = old.exp() / sampled.exp()
        tokens["mismatch/ratio"].append(weight)
        if importance_cap is not None and not per_row:
            beyond = weight > importance_cap
            weight = torch.where(beyond, 0.0 if config.importance_correction == "masked" else importance_cap, weight)
            loss = loss * weight
            tokens["mismatch/importance_weight_mean"].append(weight)
        if kl_coef:
            odds = reference.exp() / new.exp()
            k3 = odds - odds.log() - 1
            kl = {"k2": odds.log() ** 2 / 2, "k3": k3, "unbiased": new.exp() / old.exp() * k3}[config.kl_type]
            loss = loss + kl_coef * kl / (max(len(kl), 1) if per_row else 1)
            tokens["policy/kl"].append(k3)
        rows.append(loss)
        if "policy/ratio" not in statistics:
            tokens["policy/ratio"].append(ratio)
        tokens["mismatch/logprob"].append((old - sampled).abs())
        tokens["loss/nll"].append(-new)
        tokens["policy/entropy"].append(-(distribution.exp() * distribution).sum(-1))
    lengths = [len(row) for row in rows if len(row)]
    if per_row:
        loss, denominators = torch.cat(rows).sum() / len(lengths), [len(lengths)] * len(lengths)
    elif normalization == "token_mean":
        loss, denominators = torch.cat(rows).mean(), [sum(lengths)] * len(lengths)
    elif normalization == "masked_mean":
        loss = torch.stack([row.mean() for row in rows if len(row)]).mean()
        denominators = [length * len(lengths) for length in lengths]
    else:
        loss = torch.stack([row.sum() / constant for row in rows]).mean()
        denominators = [constant * len(rows)] * len(lengths)
    metrics = {"loss/objective": loss.item()}
    weighted = sum(length * denominator for length, denominator in zip(lengths, denominators, strict=True))
    metrics["loss/denominator"] = weighted / sum(lengths)
    for name, parts in tokens.items():
        values = torch.cat(parts).detach().numpy()
        if name == "mismatch/logprob":
            metrics |= {f"{name}_mean_abs": values.mean(), f"{name}_max_abs": values.max()}
            places = [("position", t, gap) for part in parts for t, gap in enumerate(part.tolist())]
            places += [("length", len(part), gap) for part in parts for gap in part.tolist()]
            for where, start, end in itertools.product(("position", "length"), (0, 1, 4), (0, 3, 15)):
                inside = [gap for kind, size, gap in places if kind == where and start <= size <= end]
                if inside and (start, end) in ((0, 0), (1, 3), (4, 15)):
                    metrics[f"mismatch/{where}/{start}"] = sum(inside) / len(inside)
        elif name.endswith("/ratio"):
            metrics |= {f"{name}_mean": values.mean(), f"{name}_min": values.min(), f"{name}_max": values.max()}
            metrics[f"{name}_p01"], metrics[f"{name}_p99"] = np.quantile(values, [0.01, 0.99], method="nearest")
        else:
            metrics[name] = values.mean()
    return loss, metrics


@st.composite
def rollout_cases(draw):
    lengths = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7)), min_size=1, max_size=5))
    lengths.append((2, draw(st.integers(1, 7))))
    return {
        "lengths": lengths,
        "seed": draw(st.integers(0, 100)),
        "order": draw(st.permutations(range(len(lengths)))),
        "extra_width": draw(st.integers(0, 5)),
        "micro_batch_size": draw(st.integers(1, len(lengths) + 1)),
        "temperature": draw(st.sampled_from([1.0, 0.7])),
        "cliprange_high": draw(st.sampled_from([None, 0.1, 0.4])),
        "importance_cap": draw(st.sampled_from([None, 1.1])),
        "importance_correction": draw(st.sampled_from(["truncated", "masked"])),
        "kl_type": draw(st.sampled_from(["k3", "k2", "unbiased"])),
    }


@pytest.mark.parametrize(
    *every_two(loss_type=LOSS_TYPES, normalized=NORMALIZATIONS, off_policy=[True, False], kl_coef=[0.0, 0.3])
)
@given(rollout_cases())
@settings(max_examples=2, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_no_cut_order_or_padding_changes_a_policy_gradient(policy, loss_type, normalized, off_policy, kl_coef, case):
    normalization, constant = normalized
    low, high, cap = 0.2, case["cliprange_high"], case["importance_cap"]
    batch = make_rollouts(policy, case["lengths"], seed=case["seed"], temperature=case["temperature"])
    if not off_policy:
        del batch["old_log_probs"]
    loss, expected_metrics = plain_policy_gradient(
        policy,
        batch,
        loss_type=loss_type,
        normalization=normalization,
        constant=constant,
        config=GrpoConfig(
            cliprange=low,
            cliprange_high=high,
            cispo_cap=1.2,
            kimi_tau=0.3,
            kl_type=case["kl_type"],
            importance_correction=case["importance_correction"],
        ),
        kl_coef=kl_coef,
        importance_cap=cap,
        temperature=case["temperature"],
    )
    expected = one_shot_gradient(policy, loss)
    objective = objective_of(
        loss_type, cliprange=low, cliprange_high=high, cispo_cap=1.2, kimi_tau=0.3, kl_coef=kl_coef, importance_cap=cap,
        importance_masked=case["importance_correction"] == "masked", kl_type=case["kl_type"],
    )  # fmt: skip
    gradient, metrics = update_gradient(
        policy,
        dealt(batch, case["order"], case["extra_width"]),
        objective=objective,
        micro_batch_size=case["micro_batch_size"],
        normalization=normalization,
        normalize_constant=constant,
        temperature=case["temperature"],
    )
    assert_same(gradient, expected)
    assert {name for name in metrics if not name.startswith(("update/", "optimizer/"))} == set(expected_metrics)
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-10, abs=1e-12), name
    assert metrics["optimizer/grad_norm"] == pytest.approx(norm_of(expected), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("loss_type", get_args(HandoutLoss))
def test_the_handouts_grpo_accumulation_is_a_special_case(policy, loss_type):
    batch = make_rollouts(policy, LENGTHS)
    model, losses = copy.deepcopy(policy), []
    for rows in ([0, 1], [2, 3]):
        micro = {name: tensor[rows] for name, tensor in batch.items()}
        loss, _ = grpo_microbatch_train_step(
            get_response_log_probs(model, micro["input_ids"], micro["labels"])["log_probs"],
            micro["response_mask"],
            2,
            loss_type,
            raw_rewards=micro["advantages"],
            advantages=micro["advantages"],
            old_log_probs=micro["old_log_probs"],
            cliprange=0.2,
        )
        losses.append(loss.item())
    options = update_options(loss_type) | {"micro_batch_size": 3, "normalization": "masked_mean"}
    gradient, metrics = update_gradient(policy, batch, **options)
    assert_same(gradient, [p.grad for p in model.parameters()])
    assert metrics["loss/objective"] == pytest.approx(sum(losses), rel=1e-12)


@pytest.mark.parametrize("loss_type", ["reinforce_with_baseline", "kimi"])
@pytest.mark.parametrize(("normalization", "constant"), [("masked_mean", None), ("masked_normalize", 7.0)])
def test_updates_by_their_share_of_the_rows_add_up_to_the_whole(policy, loss_type, normalization, constant):
    batch = make_rollouts(policy, LENGTHS)
    how = update_options(loss_type) | {"normalization": normalization, "normalize_constant": constant}
    expected, whole = update_gradient(policy, batch, **how)
    parts = [
        update_gradient(policy, {name: tensor[rows] for name, tensor in batch.items()}, **how, share=len(rows) / 4)
        for rows in ([0, 2, 3], [1])
    ]
    assert_same([a + b for a, b in zip(*(gradient for gradient, _ in parts), strict=True)], expected)
    assert sum(metrics["loss/objective"] for _, metrics in parts) == pytest.approx(whole["loss/objective"], rel=1e-10)


@pytest.mark.parametrize(("normalization", "constant"), NORMALIZATIONS)
def test_on_policy_all_types_have_one_gradient(policy, normalization, constant):
    same = [name for name, loss in LOSSES.items() if (loss.uses_ratio or loss.raw_rewards) and not loss.per_row]
    assert {"grpo_clip", "grpo_no_clip", "no_baseline"} <= set(same)
    batch = make_rollouts(policy, LENGTHS)
    del batch["old_log_probs"]
    how = {"normalization": normalization, "normalize_constant": constant}
    for keywords in ({}, {"importance_cap": 1.1, "kl_coef": 0.1}):
        expected, _ = update_gradient(policy, batch, **update_options("reinforce_with_baseline", **keywords), **how)
        assert norm_of(expected) > 1e-3
        for loss_type in same:
            gradient, _ = update_gradient(policy, batch, **update_options(loss_type, **keywords), **how)
            assert_same(gradient, expected, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_every_ratio_is_one_and_nothing_is_clipped(loss_type, dtype):
    model = make_policy(dtype)
    batch = make_rollouts(model, LENGTHS)
    del batch["old_log_probs"]
    _, metrics = update_gradient(model, batch, **update_options(loss_type))
    assert [metrics[f"policy/ratio_{name}"] for name in ("mean", "min", "p01", "p99", "max")] == [1.0] * 5
    clips = {name: value for name, value in metrics.items() if "clip" in name}
    assert set(clips.values()) <= {0.0}
    handouts = {name: 3 if name == "grpo_clip" else 0 for name in get_args(HandoutLoss)}
    assert len(clips) == handouts.get(loss_type, len(clips))


def test_a_likelier_response_is_the_result_of_a_positive_advantage(policy):
    """The sign, end to end: rewards -> advantages -> one step -> probabilities."""
    batch = make_rollouts(policy, [(3, 4), (3, 4)])
    del batch["old_log_probs"]
    batch["advantages"] = group_advantages(torch.tensor([1.0, 0.0], dtype=torch.float64), group_size=2)[:, None]
    for loss_type in LOSS_TYPES:
        model = copy.deepcopy(policy)
        before = compute_log_probs(model, batch, micro_batch_size=2).sum(dim=1)
        optimizer = torch.optim.SGD(model.parameters())
        train_update(model, optimizer, batch, learning_rate=1e-3, **update_options(loss_type))
        after = compute_log_probs(model, batch, micro_batch_size=2).sum(dim=1)
        assert after[0] > before[0], loss_type
        assert after[1] < before[1], loss_type


def test_responses_without_an_advantage_still_count_in_the_mean(policy):
    batch = make_rollouts(policy, LENGTHS)
    batch["advantages"][2:] = 0.0
    for normalization, fraction in (("token_mean", 10 / 17), ("masked_mean", 2 / 4)):
        options = update_options("reinforce_with_baseline") | {"normalization": normalization}
        whole, _ = update_gradient(policy, batch, **options)
        half, _ = update_gradient(policy, {name: tensor[:2] for name, tensor in batch.items()}, **options)
        assert_same(whole, [gradient * fraction for gradient in half], ROUNDING)


@pytest.mark.parametrize(
    "zero", [[0, 2, 3], *(pytest.param(rows, marks=pytest.mark.slow) for rows in ([], [0, 1, 2, 3, 4, 5, 6]))]
)
@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if LOSSES[name].skip_zero_advantage])
def test_rows_with_advantage_0_skip_the_backward_pass_and_nothing_else(policy, loss_type, zero):
    batch = make_rollouts(policy, [*LENGTHS, (1, 1), (2, 7), (3, 0)])
    batch["advantages"][zero] = 0.0
    marked = batch | {"zero_advantage": batch["advantages"] == 0}
    for size in (1, 3):
        options = update_options(loss_type, importance_cap=1.1) | {"micro_batch_size": size}
        gradient, metrics = update_gradient(policy, batch, **options)
        ours, found = update_gradient(policy, marked, **options)
        assert_same(ours, gradient)
        left_out = ("update/seconds", "update/padding", "update/micro_batches")
        for name in metrics.keys() - set(left_out):
            assert found[name] == pytest.approx(metrics[name], rel=1e-10, abs=1e-12), name


def test_an_update_with_only_zero_advantages_still_follows_the_momentum(policy):
    """As one with gradients of 0, which it is."""
    batch = make_rollouts(policy, LENGTHS)
    ends = []
    for mark in (False, True):
        model = copy.deepcopy(policy)
        optimizer = make_optimizer(model, learning_rate=0.1)
        options = update_options("reinforce_with_baseline") | {"learning_rate": 0.1}
        train_update(model, optimizer, batch, **options)
        zero = batch | {"advantages": torch.zeros_like(batch["advantages"])}
        if mark:
            zero["zero_advantage"] = zero["advantages"] == 0
        before = bytes_of(model, optimizer)
        train_update(model, optimizer, zero, **options)
        ends.append(bytes_of(model, optimizer))
        assert ends[-1] != before
    assert ends[0] == ends[1]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nothing_outside_the_responses_has_an_influence(policy, loss_type):
    """Nor has the advantage of a response that is masked out as a whole, other than in a constant's number of rows."""
    options = update_options(loss_type, kl_coef=0.1, importance_cap=1.1)
    batch = make_rollouts(policy, [*LENGTHS, (2, 4)])
    batch["response_mask"][4] = False
    spoiled = dict(batch)
    for name in ("old_log_probs", "sampled_log_probs", "reference_log_probs"):
        spoiled[name] = torch.where(batch["response_mask"], batch[name], math.nan)
    spoiled["advantages"] = batch["advantages"].index_fill(0, torch.tensor(4), math.nan)
    without = {name: tensor[:4] for name, tensor in batch.items()}
    for normalization, constant, fraction in (
        ("token_mean", None, 1.0),
        ("masked_mean", None, 1.0),
        ("masked_normalize", 9.0, 4 / 5),
    ):
        how = {"normalization": normalization, "normalize_constant": constant}
        fraction = 1.0 if LOSSES[loss_type].per_row else fraction
        expected, its_metrics = update_gradient(policy, without, **options, **how)
        gradient, metrics = update_gradient(policy, spoiled, **options, **how)
        assert_same(gradient, [g * fraction for g in expected], 1e-12 if fraction == 1 else ROUNDING)
        assert metrics["loss/objective"] == pytest.approx(its_metrics["loss/objective"] * fraction, rel=1e-12)
        for name, value in metrics.items():
            if name.startswith(("policy/", "mismatch/")):
                assert value == pytest.approx(its_metrics[name], rel=1e-12), name


@pytest.mark.parametrize(
    ("name", "loss_type"),
    [
        *(("advantages", loss_type) for loss_type in LOSS_TYPES),
        ("old_log_probs", "grpo_clip"),
        ("old_log_probs", "grpo_no_clip"),
        ("old_log_probs", "gspo"),
        ("old_log_probs", "cispo"),
        ("old_log_probs", "kimi"),
        ("sampled_log_probs", "reinforce_with_baseline"),
        ("reference_log_probs", "reinforce_with_baseline"),
    ],
)
def test_one_nan_among_the_rollouts_skips_the_update_and_changes_no_byte(name, loss_type):
    model = make_policy(torch.float32)
    optimizer = make_optimizer(model, learning_rate=1e-2)
    batch = make_rollouts(model, LENGTHS)
    options = update_options(loss_type, kl_coef=0.1, importance_cap=2.0) | {"learning_rate": 1e-2}
    assert train_update(model, optimizer, batch, **options)["update/skipped"] == 0
    before = bytes_of(model, optimizer)
    row, place = (
        2,
        0 if name == "advantages" else int(batch["response_mask"][2].nonzero()[0]),
    )  # in the last micro-batch
    poisoned = batch | {name: batch[name].clone()}
    poisoned[name][row, place] = torch.nan
    metrics = train_update(model, optimizer, poisoned, **options)
    assert metrics["update/skipped"] == 1
    assert bytes_of(model, optimizer) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert train_update(model, optimizer, batch, **options)["update/skipped"] == 0
    assert bytes_of(model, optimizer) != before


def test_a_nan_from_the_sampler_matters_only_where_it_is_used(policy):
    batch = make_rollouts(policy, LENGTHS)
    expected, _ = update_gradient(policy, batch, **update_options("grpo_clip"))
    batch["sampled_log_probs"] = torch.full_like(batch["sampled_log_probs"], torch.nan)
    batch.pop("reference_log_probs")
    gradient, metrics = update_gradient(policy, batch, **update_options("grpo_clip"))
    assert metrics["update/skipped"] == 0
    assert_same(gradient, expected, 0)
