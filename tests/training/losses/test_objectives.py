"""The seam between an update and what it minimizes: loss per token or per row, entropy with its gradient, rows that stay together."""

import copy
import functools
import math
import typing

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import policies
from policies import make_policy
from rlvr_cli.config.grpo import GrpoConfig, LossType
from rlvr_cli.config.parsing.options import options, value_type
from rlvr_cli.models.tokens.tokenization import row_lengths
from rlvr_cli.training.losses.custom import RESERVED
from rlvr_cli.training.losses.inputs import LossInputs, LossOutputs, loss_inputs
from rlvr_cli.training.losses.objectives import policy_gradient, reduced_loss, token_metrics
from rlvr_cli.training.losses.policy_gradient import LOSSES
from rlvr_cli.training.updates.micro_batches import micro_batches
from rlvr_cli.training.updates.scores import compute_log_probs
from rlvr_cli.training.updates.tensors import zero_advantage_rows
from rlvr_cli.training.updates.update import train_update

NORMALIZATIONS = [("token_mean", None), ("masked_mean", None), ("masked_normalize", 13.0)]
LENGTHS = [(2, 3), (1, 7), (4, 2), (3, 5), (2, 1)]


@pytest.fixture(scope="module")
def policy():
    """Read-only; a test that updates it takes a copy."""
    return make_policy()


def make_batch(lengths, seed=0):
    """`policies.make_batch` with every column that a loss may read."""
    generator = torch.Generator().manual_seed(seed)
    batch = policies.make_batch(lengths, seed)
    mask = batch["response_mask"]

    def noise():
        return torch.where(mask, -torch.rand(mask.shape, dtype=torch.float64, generator=generator), 0.0)

    batch |= {"old_log_probs": noise() * 4, "sampled_log_probs": noise() * 4, "reference_log_probs": noise() * 4}
    return batch | {"advantages": torch.randn(len(mask), 1, dtype=torch.float64, generator=generator)}


def update_gradient(model, batch, **how):
    """The gradient that `train_update` hands to the optimizer, and its metrics; the model is left as it was."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model.parameters()))
    return seen, train_update(model, optimizer, batch, **{"learning_rate": 0.0, "max_grad_norm": math.inf, **how})


def distributions(model, batch):
    """(batch, seq, vocab) log-probabilities, and those of the labels."""
    every = model(batch["input_ids"]).logits.log_softmax(-1)
    return every, every.gather(-1, batch["labels"][..., None]).squeeze(-1)


def gradient_of(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_same(left, right, tolerance=1e-10):
    assert len(left) == len(right) > 0
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def assert_differ(left, right):
    assert max(float((one - other).abs().max()) for one, other in zip(left, right, strict=True)) > 1e-3


# --- a loss per row


def squared(inputs):
    """Per row, and not linear in the tokens: ((sum of log-ratios) - A)^2 / 2."""
    mask = inputs.response_mask
    ratio = torch.where(mask, inputs.log_probs - inputs.old_log_probs, 0.0).sum(dim=1)
    return LossOutputs((ratio - inputs.advantages[:, 0]) ** 2 / 2, {"drift": ratio})


def plain_squared(model, batch):
    """(batch,) losses and drifts of the rows that have a response token."""
    _, own = distributions(model, batch)
    drifts, losses = [], []
    for row, mask in enumerate(batch["response_mask"]):
        if mask.any():
            drifts.append((own[row][mask] - batch["old_log_probs"][row][mask]).sum())
            losses.append((drifts[-1] - batch["advantages"][row, 0]) ** 2 / 2)
    return torch.stack(losses), torch.stack(drifts)


def test_a_loss_per_row_is_averaged_over_the_rows_worked_by_hand():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    denominators = torch.tensor([[100.0], [7.0]])  # of a loss per token
    per_row = torch.tensor([3.0, 5.0])
    assert reduced_loss(per_row, mask, denominators=denominators, num_rows=4).item() == 2.0
    per_token = torch.tensor([[1.0, 2.0, 9.0], [14.0, 9.0, 9.0]])
    assert reduced_loss(per_token, mask, denominators=denominators, num_rows=4).item() == pytest.approx(3 / 100 + 2)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7)), min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(0, 99),
    st.sampled_from(NORMALIZATIONS),
)
@settings(max_examples=8)
def test_no_cut_changes_the_gradient_of_a_loss_per_row(policy, lengths, micro_batch_size, seed, normalization):
    batch = make_batch([*lengths, (2, 3)], seed)
    losses, drifts = plain_squared(policy, batch)
    name, constant = normalization
    gradient, metrics = update_gradient(
        policy,
        batch,
        objective=squared,
        micro_batch_size=micro_batch_size,
        normalization=name,
        normalize_constant=constant,
    )
    assert_same(gradient, gradient_of(policy, losses.mean()), 1e-9)
    assert metrics["loss/objective"] == pytest.approx(losses.mean().item(), rel=1e-10)
    assert metrics["loss/denominator"] == len(losses)
    assert metrics["policy/drift_mean"] == pytest.approx(drifts.mean().item(), rel=1e-10)


def test_the_mean_over_tokens_as_a_loss_per_row_is_masked_mean(policy):
    def per_row(inputs):
        mask = inputs.response_mask
        means = torch.where(mask, inputs.log_probs, 0.0).sum(dim=1) / mask.sum(dim=1)
        return LossOutputs(-inputs.advantages[:, 0] * means)

    batch = make_batch([*LENGTHS, (1, 0)])
    how = {"micro_batch_size": 2, "normalization": "masked_mean"}
    for kl_coef in (0.0, 0.3):
        objectives = [
            functools.partial(policy_gradient, loss=loss, kl_coef=kl_coef)
            for loss in (per_row, LOSSES["reinforce_with_baseline"].function)
        ]
        (ours, found), (expected, metrics) = (update_gradient(policy, batch, objective=o, **how) for o in objectives)
        assert_same(ours, expected)
        names = [
            "loss/objective",
            "policy/ratio_mean",
            "mismatch/logprob_mean_abs",
            *(["policy/kl"] if kl_coef else []),
        ]
        assert [found[name] for name in names] == pytest.approx([metrics[name] for name in names], rel=1e-12)


# --- entropy


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_an_entropy_bonus_has_its_gradient(policy, micro_batch_size):
    batch = make_batch(LENGTHS)
    mask = batch["response_mask"]

    def objective(inputs):
        return LossOutputs(-inputs.advantages * inputs.log_probs - 0.7 * inputs.entropy)

    every, own = distributions(policy, batch)
    entropy = -(every.exp() * every).sum(-1)
    loss = (-batch["advantages"] * own - 0.7 * entropy)[mask].mean()
    gradient, metrics = update_gradient(policy, batch, objective=objective, micro_batch_size=micro_batch_size)
    assert_same(gradient, gradient_of(policy, loss))
    assert metrics["policy/entropy"] == pytest.approx(entropy[mask].mean().item(), rel=1e-12)
    without, _ = update_gradient(
        policy, batch, objective=LOSSES["reinforce_with_baseline"].function, micro_batch_size=micro_batch_size
    )
    assert_differ(gradient, without)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_rows_with_advantage_0_are_trained_on_where_the_objective_needs_them(policy, micro_batch_size):
    """An entropy bonus has a gradient where the advantage is 0."""
    batch = make_batch(LENGTHS)
    batch["advantages"][[0, 3]] = 0.0
    marked = batch | {"zero_advantage": batch["advantages"] == 0}

    def objective(inputs):
        return LossOutputs(-inputs.advantages * inputs.log_probs - 0.7 * inputs.entropy)

    how = {"objective": objective, "micro_batch_size": micro_batch_size}
    expected, _ = update_gradient(policy, batch, **how)
    learned, _ = update_gradient(policy, marked, skip_zero_advantage=False, **how)
    skipped, _ = update_gradient(policy, marked, skip_zero_advantage=True, **how)
    assert_same(learned, expected)
    assert_differ(skipped, expected)


def test_advantages_per_token_train_as_in_a_plain_reference(policy):
    """Only rows whose response tokens all have advantage 0 skip the backward pass."""
    batch = make_batch([(2, 3), (1, 3), (3, 3), (2, 5)])
    mask = batch["response_mask"]
    shape = torch.Size((4, 6))
    assert mask.shape == shape
    per_token = torch.linspace(-1, 1, 24, dtype=torch.float64).view(shape)
    per_token[0][mask[0]] = torch.tensor([0.0, 0.0, 1.5], dtype=torch.float64)  # a signal at the last token alone
    per_token[1][mask[1]] = 0.0  # none; outside the response, values are arbitrary
    per_token[2][mask[2]] = torch.tensor([0.0, -0.5, 0.0], dtype=torch.float64)
    batch["advantages"] = per_token
    marked = batch | {"zero_advantage": zero_advantage_rows(batch)}
    assert marked["zero_advantage"].tolist() == [[False], [True], [False], [False]]

    model = copy.deepcopy(policy)
    log_probs = model(input_ids=batch["input_ids"]).logits.log_softmax(-1)
    taken = log_probs.gather(-1, batch["labels"][..., None]).squeeze(-1)
    (-(per_token * taken)[mask].sum() / mask.sum()).backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    objective = LOSSES["reinforce_with_baseline"].function
    for size in (1, 2, 4):
        ours, _ = update_gradient(policy, marked, objective=objective, micro_batch_size=size)
        assert_same(ours, expected)


def test_a_response_with_advantage_0_is_marked(policy):
    batch = make_batch(LENGTHS)
    batch["advantages"][[0, 3]] = 0.0
    assert zero_advantage_rows(batch).equal(batch["advantages"] == 0)


@pytest.mark.parametrize("column", ["zero_advantage", "unit", "group", "advantages"])
def test_a_column_of_another_shape_is_refused(policy, column):
    batch = make_batch(LENGTHS)
    wide = torch.zeros(batch["input_ids"].shape[0], 2).to(torch.bool if column == "zero_advantage" else torch.int64)
    with pytest.raises(AssertionError, match=column):
        update_gradient(
            policy, batch | {column: wide}, objective=LOSSES["reinforce_with_baseline"].function, micro_batch_size=2
        )


# --- rows that stay together


@st.composite
def unit_batches(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    units = draw(st.permutations([unit for unit, size in enumerate(sizes) for _ in range(size)]))
    lengths = [(draw(st.integers(1, 3)), draw(st.integers(0, 5))) for _ in units]
    lengths[0] = (1, 3)
    batch = make_batch(lengths, draw(st.integers(0, 99)))
    batch["unit"] = torch.tensor(units)[:, None] * 7 - 3
    batch["group"] = batch["unit"]
    if draw(st.booleans()):  # rows of a prompt are neighbors, where that cuts no unit
        batch["input_ids"][:, :1] = 5
    zero_advantage = draw(st.lists(st.booleans(), min_size=len(units), max_size=len(units)))
    if draw(st.booleans()):
        batch["zero_advantage"] = torch.tensor(zero_advantage)[:, None]
    return batch, draw(st.integers(1, 6)), draw(st.booleans())


@given(unit_batches())
@settings(max_examples=60)
def test_no_unit_is_cut_and_every_row_goes_once(case):
    batch, size, together = case
    units = batch["unit"].flatten().tolist()
    lengths = row_lengths(batch["response_mask"].bool()).tolist()
    cuts = micro_batches(batch, size, tokens=None, together=together)
    seen = [row for rows, _, _ in cuts for row in rows.tolist()]
    alive = {unit for unit, length in zip(units, lengths, strict=True) if length}
    assert sorted(seen) == [row for row, unit in enumerate(units) if unit in alive]
    where = {row: number for number, (rows, _, _) in enumerate(cuts) for row in rows.tolist()}
    for unit in alive:
        members = [row for row in range(len(units)) if units[row] == unit]
        assert len({where[row] for row in members}) == 1, "a unit was cut"
        places = [seen.index(row) for row in members]
        assert places == list(range(places[0], places[0] + len(members))), "its rows are not in the order of the batch"
    for number, (rows, width, learning) in enumerate(cuts):
        held = [units[row] for row in rows.tolist()]
        assert len(held) <= size or len(set(held)) == 1, "only a unit of more rows is a larger micro-batch"
        assert width == max(lengths[row] for row in rows.tolist())
        if "zero_advantage" in batch:
            loud = any(not bool(batch["zero_advantage"][row]) for row in rows.tolist())
            assert learning == (loud or number == 0)


@given(unit_batches(), st.integers(1, 60), st.integers(2, 4))
@settings(max_examples=50)
def test_ranks_have_as_many_micro_batches_of_tokens_and_none_waits_for_a_larger_one(case, tokens, ranks):
    """By the definition: with a token less at a time, there would be more of them than the ranks go through anyway."""
    batch, _, together = case
    batch.pop("zero_advantage", None)

    def cut(most, **how):
        return [rows.tolist() for rows, _, _ in micro_batches(batch, None, tokens=most, together=together, **how)]

    alone, divided = cut(tokens), cut(tokens, ranks=ranks)
    number = math.ceil(len(alone) / ranks) * ranks
    assert sorted(row for rows in divided for row in rows) == sorted(row for rows in alone for row in rows)
    assert len(divided) <= number
    sizes = [size for size in range(1, tokens + 1) if len(cut(size)) <= number]
    assert divided == cut(sizes[0])
    units = {int(batch["unit"][row]) for rows in alone for row in rows}
    if ranks == 2 and len(units) > 1:
        assert len(divided) > 1, "each trainer has work"


def pairwise(inputs):
    """-log sigmoid of the difference of two responses' summed log-ratios, as in DPO; 0 for a row without its partner."""
    mask = inputs.response_mask
    ratio = torch.where(mask, inputs.log_probs - inputs.reference_log_probs, 0.0).sum(dim=1)
    same = (inputs.group[:, None] == inputs.group[None, :]).to(ratio.dtype).tril(-1)  # (batch, batch), each pair once
    margins = ratio[None, :] - ratio[:, None]
    return LossOutputs((-F.logsigmoid(margins) * same).sum(dim=1), {"partners": same.sum(dim=1)})


@given(unit_batches())
@settings(max_examples=8)
def test_what_compares_the_rows_of_a_unit_has_the_gradient_of_one_shot(policy, case):
    batch, size, _ = case
    batch.pop("zero_advantage", None)
    _, own = distributions(policy, batch)
    inputs = loss_inputs(batch, log_probs=own, entropy=torch.zeros_like(own))
    alive = {int(unit) for unit, mask in zip(batch["unit"], batch["response_mask"], strict=True) if mask.any()}
    rows = torch.tensor([int(unit) in alive for unit in batch["unit"]])
    outputs = pairwise(inputs)
    expected = gradient_of(policy, outputs.loss[rows].mean())
    gradient, metrics = update_gradient(policy, batch, objective=pairwise, micro_batch_size=size)
    assert_same(gradient, expected)
    assert metrics["loss/objective"] == pytest.approx(outputs.loss[rows].mean().item(), rel=1e-10, abs=1e-14)
    assert metrics["policy/partners_mean"] == pytest.approx(outputs.statistics["partners"][rows].mean().item())


def test_scores_of_a_batch_with_units_are_those_of_the_updates_forward_pass(policy):
    batch = make_batch(LENGTHS) | {"unit": torch.tensor([[0], [1], [0], [1], [2]])}
    batch["old_log_probs"] = compute_log_probs(policy, batch, micro_batch_size=2)
    objective = functools.partial(policy_gradient, loss=LOSSES["grpo_no_clip"].function)
    _, metrics = update_gradient(policy, batch, objective=objective, micro_batch_size=2)
    assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1.0
    assert metrics["update/micro_batches"] == 3


def rows_by_length(batch, size, *, together):
    """How batches without units are cut: rows by falling length, in chunks."""
    mask = batch["response_mask"].bool()
    lengths, starts = row_lengths(mask).tolist(), mask.int().argmax(dim=1).tolist()
    ids = batch["input_ids"].numpy()
    zero_advantage = batch["zero_advantage"].flatten().tolist() if "zero_advantage" in batch else [False] * len(lengths)
    cuts = []
    for learning in (True, False):
        prompts = {}
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            if lengths[row] and zero_advantage[row] != learning:
                prompts.setdefault(ids[row, : starts[row] + 1].tobytes() if together else b"", []).append(row)
        rows = [row for of_prompt in prompts.values() for row in of_prompt]
        cuts += [(rows[first : first + size], learning) for first in range(0, len(rows), size)]
    return [(rows, max(lengths[r] for r in rows), on or number == 0) for number, (rows, on) in enumerate(cuts)]


@given(unit_batches())
@settings(max_examples=50)
def test_without_units_rows_are_cut_by_length_alone(case):
    batch, size, together = case
    del batch["unit"]
    cuts = [
        (rows.tolist(), width, on) for rows, width, on in micro_batches(batch, size, tokens=None, together=together)
    ]
    assert cuts == rows_by_length(batch, size, together=together)


# --- what a loss is given


def test_an_objective_is_given_the_columns_of_its_rows(policy):
    batch = make_batch(LENGTHS) | {"group": torch.tensor([[0], [0], [1], [1], [2]])}
    batch["advantages"] = torch.randn(batch["labels"].shape, dtype=torch.float64)  # one per token
    seen = []

    def objective(inputs):
        seen.append(inputs)
        return LossOutputs(-inputs.advantages * inputs.log_probs)

    gradient, _ = update_gradient(policy, batch, objective=objective, micro_batch_size=2)
    _, own = distributions(policy, batch)
    assert_same(gradient, gradient_of(policy, (-batch["advantages"] * own)[batch["response_mask"]].mean()))
    assert sorted(int(g) for inputs in seen for g in inputs.group) == [0, 0, 1, 1, 2]
    for inputs in seen:
        assert isinstance(inputs, LossInputs)
        shape = inputs.log_probs.shape
        for name in ("entropy", "response_mask", "old_log_probs", "sampled_log_probs", "reference_log_probs"):
            assert getattr(inputs, name).shape == shape, name
        assert inputs.advantages.shape == shape
        assert inputs.group.shape == shape[:1]
        assert inputs.values is None


def test_in_the_first_update_the_old_policy_is_the_new_one():
    batch = make_batch(LENGTHS)
    del batch["old_log_probs"], batch["reference_log_probs"]
    log_probs = torch.zeros(batch["labels"].shape).requires_grad_()
    inputs = loss_inputs(batch, log_probs=log_probs, entropy=log_probs)
    assert torch.equal(inputs.old_log_probs, log_probs)
    assert not inputs.old_log_probs.requires_grad
    assert inputs.reference_log_probs is None
    assert inputs.group is None


def test_a_statistic_of_any_name_is_a_mean():
    metrics = token_metrics({"surprise": torch.tensor([1.0, 2.0, 6.0]), "above": torch.tensor([True, False])})
    assert metrics == {"policy/surprise_mean": 3.0, "policy/above_mean": 0.5}


def test_statistics_keep_no_graph_and_count_response_tokens_only(policy):
    batch = make_batch(LENGTHS)
    mask = batch["response_mask"]

    def objective(inputs):
        outside = torch.full_like(inputs.log_probs, 1e6)
        return LossOutputs(-inputs.log_probs, {"nll": torch.where(inputs.response_mask, -inputs.log_probs, outside)})

    _, metrics = update_gradient(policy, batch, objective=objective, micro_batch_size=2)
    _, own = distributions(policy, batch)
    assert metrics["policy/nll_mean"] == pytest.approx(-own[mask].mean().item(), rel=1e-12)


# --- the table


def test_the_table_the_type_and_the_option_name_the_same_losses():
    (option,) = [o for o in options(GrpoConfig) if o.name == "loss_type"]
    assert tuple(LOSSES) == typing.get_args(LossType) == value_type(option).choices


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_the_table_is_what_its_line_says(name):
    loss, config = LOSSES[name], GrpoConfig()
    given = {option: getattr(config, option) for option in loss.options}
    assert {o.name for o in options(GrpoConfig)} >= set(loss.options)
    assert loss.formula(**given)
    batch = make_batch([*LENGTHS, (1, 4)])
    batch["advantages"][1:3] = 0.0
    log_probs = (batch["old_log_probs"] + 0.5 * batch["sampled_log_probs"]).requires_grad_()
    entropy = torch.rand(log_probs.shape, dtype=torch.float64).requires_grad_()
    outputs = loss.function(loss_inputs(batch, log_probs=log_probs, entropy=entropy), **given)
    assert (outputs.loss.dim() == 1) == loss.per_row
    gradients = torch.autograd.grad(outputs.loss.sum(), (log_probs, entropy), allow_unused=True)
    assert gradients[0][batch["advantages"][:, 0] != 0].abs().sum() > 0
    quiet = [g[1:3] for g in gradients if g is not None]
    assert not loss.skip_zero_advantage or not any(g.any() for g in quiet), "a gradient without an advantage"


def test_what_the_objective_says_of_every_loss_is_reserved():
    batch = make_batch(LENGTHS)
    log_probs = batch["old_log_probs"].clone().requires_grad_()
    batch["stale"] = torch.zeros_like(batch["response_mask"])
    inputs = loss_inputs(batch, log_probs=log_probs, entropy=log_probs)
    loss = LOSSES["no_baseline"].function
    objective = functools.partial(policy_gradient, loss=loss, kl_coef=0.1, importance_cap=2.0)
    assert set(objective(inputs).statistics) == set(RESERVED)


def test_token_metrics_worked_by_hand():
    ratio = torch.tensor([4.0, 1.0, 2.0, 3.0])
    metrics = token_metrics(
        {
            "ratio": ratio,
            "mismatch": torch.tensor([0.5, -1.5, 0.0, 0.0]),
            "clipped": torch.tensor([True, True, True, False]),
            "clipped_low": torch.tensor([True, False, False, False]),
            "clipped_high": torch.tensor([False, True, True, False]),
            "importance_weight": torch.tensor([1.0, 2.0, 1.0, 1.0]),
            "kl": torch.tensor([0.25, 0.0, 0.25, 0.5]),
        }
    )
    assert metrics == {
        "policy/ratio_mean": 2.5,
        "policy/ratio_min": 1.0,
        "policy/ratio_p01": 1.0,
        "policy/ratio_p99": 4.0,
        "policy/ratio_max": 4.0,
        "mismatch/logprob_mean_abs": 0.5,
        "mismatch/logprob_max_abs": 1.5,
        "mismatch/ratio_mean": pytest.approx((math.exp(0.5) + math.exp(-1.5) + 2) / 4),
        "mismatch/ratio_min": pytest.approx(math.exp(-1.5)),
        "mismatch/ratio_p01": pytest.approx(math.exp(-1.5)),
        "mismatch/ratio_p99": pytest.approx(math.exp(0.5)),
        "mismatch/ratio_max": pytest.approx(math.exp(0.5)),
        "policy/clip_fraction": 0.75,
        "policy/clip_fraction_low": 0.25,
        "policy/clip_fraction_high": 0.5,
        "mismatch/importance_weight_mean": 1.25,
        "policy/kl": 0.25,
    }
    assert {type(value) for value in metrics.values()} == {float}
    assert token_metrics({}) == {}


@given(st.integers(0, 2**32), st.one_of(st.integers(1, 400), st.sampled_from([51, 151, 251, 1001])))
@settings(max_examples=40)
def test_token_quantiles_are_numpys_nearest(seed, count):
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    metrics = token_metrics({"ratio": values, "mismatch": values})
    expected = np.quantile(values.double().numpy(), [0.0, 0.01, 0.99, 1.0], method="nearest").tolist()
    assert [metrics[f"policy/ratio_{name}"] for name in ("min", "p01", "p99", "max")] == expected
    assert metrics["policy/ratio_mean"] == pytest.approx(values.double().mean().item(), rel=1e-12)
    assert metrics["mismatch/ratio_p99"] == pytest.approx(math.exp(expected[2]), rel=1e-6)
    assert metrics["mismatch/logprob_max_abs"] == pytest.approx(max(map(abs, expected)))
