"""SFT and policy-gradient updates against plain one-shot references: whole logits, one backward pass, in float64."""

import copy
import functools
import itertools
import math
from collections import defaultdict
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM

from arrays import every_two
from factories import a_rollout
from policies import VOCAB, make_batch, make_policy
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.handout import grpo_microbatch_train_step, sft_microbatch_train_step
from rlvr_cli.models.compute import onednn
from rlvr_cli.models.compute.recompute import gradient_checkpointing
from rlvr_cli.models.log_probs import get_response_log_probs
from rlvr_cli.models.policy import Policy
from rlvr_cli.models.tokens.tokenization import collate, tokenize_prompt_and_output
from rlvr_cli.training.credit.advantages import group_advantages
from rlvr_cli.training.losses.objectives import policy_gradient, token_metrics
from rlvr_cli.training.losses.policy_gradient import LOSSES, HandoutLoss
from rlvr_cli.training.optimizers.optimizer import learning_rate_at, make_optimizer
from rlvr_cli.training.updates.scores import compute_log_probs
from rlvr_cli.training.updates.tensors import rollout_tensors, select_rows
from rlvr_cli.training.updates.update import check_ratios, train_update

LOSS_TYPES = list(LOSSES)
NORMALIZATIONS = [("token_mean", None), ("masked_mean", None), ("masked_normalize", 1.0), ("masked_normalize", 13.0)]


@pytest.fixture(scope="module")
def policy():
    """Read-only; a test that updates it takes a copy."""
    return make_policy()


def rows_of(batch, rows, extra_width=0):
    """The batch with its rows reordered or chosen, and wider padding."""
    padded = {name: F.pad(tensor[rows], (0, extra_width), value=7) for name, tensor in batch.items()}
    padded["response_mask"][:, batch["response_mask"].shape[1] :] = False
    return padded


def plain_loss(model, batch, normalization, constant, temperature=1.0):
    """A loop over the rows of the whole batch: each row's loss is what the normalization's name says."""
    logits = model(batch["input_ids"]).logits / temperature
    losses = []  # one tensor of token losses per row
    for row, mask in enumerate(batch["response_mask"]):
        losses.append(F.cross_entropy(logits[row][mask], batch["labels"][row][mask], reduction="none"))
    if normalization == "token_mean":
        return torch.cat(losses).mean()
    if normalization == "masked_mean":
        return torch.stack([loss.mean() for loss in losses if len(loss)]).mean()
    return torch.stack([loss.sum() / constant for loss in losses]).mean()


def update_gradient(model, batch, *, compute_dtype="auto", **options):
    """The gradient that `train_update` hands to the optimizer, and its metrics; the model is left as it was."""
    model = copy.deepcopy(model)
    policy = Policy(model, compute_dtype=compute_dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model.parameters()))
    metrics = train_update(policy, optimizer, batch, **{"learning_rate": 0.0, "max_grad_norm": math.inf, **options})
    return seen, metrics


def one_shot_gradient(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_same(left, right, tolerance=1e-10):
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def norm_of(gradients):
    return math.sqrt(sum(float((g * g).sum()) for g in gradients))


def distance(gradients, others):
    """The norm of the difference, relative to the norm of the others."""
    return norm_of([one - other for one, other in zip(gradients, others, strict=True)]) / norm_of(others)


def bytes_of(model, optimizer):
    state = [*model.state_dict().values()]
    state += [value for entry in optimizer.state.values() for value in entry.values()]
    return [tensor.detach().numpy().tobytes() for tensor in state]


# --- the update


@st.composite
def cut_batches(draw):
    lengths = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7)), min_size=1, max_size=6))
    lengths.append((2, draw(st.integers(1, 7))))
    batch = make_batch(lengths, draw(st.integers(0, 100)))
    order = draw(st.permutations(range(len(lengths))))
    return batch, rows_of(batch, order, draw(st.integers(0, 5))), draw(st.integers(1, len(lengths) + 1))


@pytest.mark.parametrize(("normalization", "constant"), NORMALIZATIONS)
@given(cut_batches())
@settings(max_examples=5)
def test_no_cut_order_or_padding_changes_the_gradient(policy, normalization, constant, case):
    batch, shuffled, micro_batch_size = case
    loss = plain_loss(policy, batch, normalization, constant)
    gradient, metrics = update_gradient(
        policy,
        shuffled,
        micro_batch_size=micro_batch_size,
        normalization=normalization,
        normalize_constant=constant,
    )
    expected = one_shot_gradient(policy, loss)
    assert_same(gradient, expected)
    assert metrics["loss/objective"] == pytest.approx(loss.item(), rel=1e-12)
    assert metrics["optimizer/grad_norm"] == pytest.approx(norm_of(expected), rel=1e-10)


def test_the_handouts_accumulation_is_a_special_case(policy):
    batch = make_batch([(2, 3), (1, 7), (4, 2), (3, 5)])
    model = copy.deepcopy(policy)
    for rows in ([0, 1], [2, 3]):
        micro = {name: tensor[rows] for name, tensor in batch.items()}
        log_probs = get_response_log_probs(model, micro["input_ids"], micro["labels"])["log_probs"]
        sft_microbatch_train_step(log_probs, micro["response_mask"], 2, 9.0)
    gradient, _ = update_gradient(
        policy, batch, micro_batch_size=3, normalization="masked_normalize", normalize_constant=9.0
    )
    assert_same(gradient, [p.grad for p in model.parameters()])


def test_metrics_are_exact_and_do_not_depend_on_the_cut(policy):
    batch = make_batch([(2, 3), (1, 7), (4, 1), (3, 0)])
    mask = batch["response_mask"]
    with torch.no_grad():
        logits = policy(batch["input_ids"]).logits[mask] / 0.8
    nll = F.cross_entropy(logits, batch["labels"][mask]).item()
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean().item()
    for micro_batch_size, count in ((1, 3), (2, 2), (4, 1)):
        _, metrics = update_gradient(
            policy, batch, micro_batch_size=micro_batch_size, normalization="masked_mean", temperature=0.8
        )
        assert metrics["loss/nll"] == pytest.approx(nll, rel=1e-12)
        assert metrics["policy/entropy"] == pytest.approx(entropy, rel=1e-12)
        assert metrics["update/tokens"] == 11
        assert metrics["update/rows"] == 4
        assert metrics["update/micro_batches"] == count
        assert metrics["update/skipped"] == 0
        assert metrics["update/seconds"] > 0
    objective = plain_loss(policy, batch, "masked_mean", None, temperature=0.8).item()
    assert metrics["loss/objective"] == pytest.approx(objective, rel=1e-12)


def shapes_of_the_body(policy, batch, **options):
    """What goes through the model's body in an update, and the update's metrics."""
    model, shapes = copy.deepcopy(policy), []
    model.base_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    get_response_log_probs(model, batch["input_ids"], batch["labels"])
    shapes.clear()
    optimizer = torch.optim.SGD(model.parameters())
    return shapes, train_update(model, optimizer, batch, learning_rate=0.0, **options)


def test_rows_of_like_length_share_a_micro_batch_and_the_longest_go_first(policy):
    batch = make_batch([(1, 2), (1, 9), (2, 0), (1, 3), (3, 6)])  # 2, 9, none, 3 and 8 positions that matter
    shapes, metrics = shapes_of_the_body(policy, batch, micro_batch_size=2)
    assert shapes == [(1, 9 + 8), (1, 3 + 2)]
    assert (metrics["update/computed"], metrics["update/padding"], metrics["update/shared"]) == (22, 0, 0)


def test_rows_of_a_prompt_share_a_micro_batch_in_which_it_is_computed_once(policy):
    prompts = [[5, 6, 7], [8], [5, 6, 7], [8], [5, 6, 9]]
    responses = [[9, 10], [11, 12, 13, 14], [9, 10, 11], [12], [13, 14, 15]]
    batch = collate(prompts, responses, pad_id=1)
    shapes, metrics = shapes_of_the_body(policy, batch, micro_batch_size=3)
    # 5 6 7 9 10 (its last token predicts nothing) with 5 6 7 9 inside it, and 5 6 9 13 14, of which 5 6 is the same; then 8 11 12 13 with 8.
    assert shapes == [(1, 5 + 3), (1, 4)]
    assert metrics["update/shared"] == pytest.approx(1 - 12 / (5 + 4 + 5 + 4 + 1))


@given(cut_batches(), st.integers(1, 40))
@settings(max_examples=8)
def test_no_number_of_tokens_changes_the_gradient(policy, case, tokens):
    batch, shuffled, _ = case
    gradient, metrics = update_gradient(policy, shuffled, micro_batch_size=1, micro_batch_tokens=tokens)
    assert_same(gradient, one_shot_gradient(policy, plain_loss(policy, batch, "token_mean", None)))
    assert metrics["update/micro_batches"] <= int(batch["response_mask"].any(dim=1).sum())


def test_a_micro_batch_computes_at_most_so_many_tokens(policy):
    """In the order in which they are taken the rows add 3 + 2, 1, 1 + 3 and 0 tokens: a row's last one predicts nothing."""
    prompts = [[5, 6, 7], [8], [5, 6, 7], [8], [8]]
    responses = [[9, 10], [11, 12, 13, 14], [9, 10, 11], [12], []]
    batch = collate(prompts, responses, pad_id=1)

    def shapes(tokens):
        return shapes_of_the_body(policy, batch, micro_batch_size=1, micro_batch_tokens=tokens)[0]

    assert shapes(10) == [(1, 9)]  # 5 6 7 9 10, which is found to contain 5 6 7 9, and 8 11 12 13, which contains 8
    assert shapes(9) == shapes(6) == [(1, 5), (1, 4)]
    assert shapes(5) == shapes(4) == [(1, 5), (1, 4), (1, 4)]
    assert shapes(3) == [(1, 5), (1, 4), (1, 4), (1, 1)], "a row is never split"


def test_rows_that_share_nothing_are_counted_with_their_padding():
    batch = make_batch([(1, 8), (1, 2), (1, 2)])
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCAB, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, sliding_window=4,
        )
    ).eval()  # fmt: skip
    for tokens, expected in ((24, [(3, 8)]), (23, [(2, 8), (1, 2)]), (4, [(1, 8), (2, 2)])):
        with pytest.warns(UserWarning, match="not ordinary causal attention"):
            shapes, _ = shapes_of_the_body(model, batch, micro_batch_size=1, micro_batch_tokens=tokens)
        assert shapes == expected


def test_scores_are_those_of_the_same_micro_batches(policy):
    batch = make_batch([(2, 3), (1, 7), (4, 2), (3, 5)])
    wide = compute_log_probs(policy, batch, micro_batch_size=1, micro_batch_tokens=100)
    narrow = compute_log_probs(policy, batch, micro_batch_size=9, micro_batch_tokens=1)
    torch.testing.assert_close(wide, narrow, rtol=1e-12, atol=1e-12)
    assert not torch.equal(wide, torch.zeros_like(wide))


def saved_bytes(policy, batch, **options):
    """The bytes that autograd keeps for the backward pass of an update, a tensor that is kept twice counted once."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        update_gradient(policy, batch, micro_batch_size=8, **options)
    return sum(kept.values())


def test_gradient_checkpointing_changes_no_bit_and_keeps_less():
    policy = make_policy(layers=4)
    batch = collate([[5, 6, 7]] * 4 + [[8]], [[9] * 40, [9, 10], [11, 12, 13, 14], [15], [16, 17, 18]], pad_id=1)
    plain, metrics = update_gradient(policy, batch, micro_batch_size=8)
    again, same = update_gradient(policy, batch, micro_batch_size=8, gradient_checkpointing=True)
    assert all(torch.equal(one, other) for one, other in zip(again, plain, strict=True))
    unequal = {name for name in metrics if metrics[name] != same[name]}
    assert unequal <= {"update/seconds"}, "prefixes are shared as before"
    assert metrics["update/shared"] > 0
    assert saved_bytes(policy, batch, gradient_checkpointing=True) < 0.6 * saved_bytes(policy, batch)


def test_gradient_checkpointing_leaves_the_model_as_it_was(policy):
    model = copy.deepcopy(policy)
    before = [dict(vars(module)) for module in model.modules()]
    batch = make_batch([(1, 4), (2, 3)])
    train_update(
        model, make_optimizer(model, learning_rate=1e-3), batch, learning_rate=1e-3, micro_batch_size=2, gradient_checkpointing=True
    )  # fmt: skip
    for module, attributes in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == attributes.keys()
        assert module.training == attributes["training"]


def test_a_model_without_layers_to_check_says_so(policy):
    with pytest.raises(RlvrError, match="have no gradient checkpointing"), gradient_checkpointing(policy.lm_head):
        pass


def test_recomputation_in_the_backward_pass_goes_row_by_row(policy):
    batch = make_batch([(1, 2), (1, 9), (2, 0), (1, 3), (3, 6)])
    model = copy.deepcopy(policy)
    model.gradient_checkpointing_enable()
    model.train()
    plain, _ = update_gradient(policy, batch, micro_batch_size=2)
    ours, _ = update_gradient(model, batch, micro_batch_size=2)
    assert_same(ours, plain)
    assert shapes_of_the_body(model, batch, micro_batch_size=2)[0][0] == (2, 9)


def test_a_model_with_a_window_computes_row_by_row_and_says_so():
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=4,
    )
    lengths = [(1, 2), (1, 9), (2, 0), (1, 3), (3, 6)]
    batch = make_batch(lengths)
    batch["input_ids"][:, 0] = 5  # one prompt for most: it must not bring rows of unlike length together
    with pytest.warns(UserWarning, match="MistralForCausalLM is not ordinary causal attention"):
        shapes, metrics = shapes_of_the_body(MistralForCausalLM(config).eval(), batch, micro_batch_size=2)
    assert shapes == [(2, 9), (2, 3)]
    assert metrics["update/padding"] == pytest.approx(1 - (9 + 8 + 3 + 2) / (18 + 6))
    assert metrics["update/shared"] == 0


def test_the_gradient_is_clipped_to_the_norm_and_its_norm_before_is_reported(policy):
    batch = make_batch([(2, 5), (1, 3)])
    whole, metrics = update_gradient(policy, batch, micro_batch_size=1)
    norm = norm_of(whole)
    assert metrics["optimizer/grad_norm"] == pytest.approx(norm)
    clipped, metrics = update_gradient(policy, batch, micro_batch_size=1, max_grad_norm=norm / 3)
    assert metrics["optimizer/grad_norm"] == pytest.approx(norm)
    assert norm_of(clipped) == pytest.approx(norm / 3, rel=1e-5)
    assert_same([g * 3 for g in clipped], whole, 1e-5)
    below, _ = update_gradient(policy, batch, micro_batch_size=1, max_grad_norm=norm * 2)
    assert_same(below, whole, 0)


@pytest.mark.parametrize("cause", ["both", "loss", "gradient"])
def test_a_non_finite_update_is_skipped_and_changes_no_byte(cause):
    batch = make_batch([(2, 5), (1, 3)])
    model = make_policy(torch.float32)
    optimizer = make_optimizer(model, learning_rate=1e-2)
    options = {"learning_rate": 1e-2, "micro_batch_size": 1}
    assert train_update(model, optimizer, batch, **options)["update/skipped"] == 0
    twin = copy.deepcopy(model)
    twin_optimizer = make_optimizer(twin, learning_rate=1e-2)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = bytes_of(model, optimizer)
    spoil = {"both": torch.clone, "loss": torch.zeros_like, "gradient": lambda gradient: gradient * torch.inf}[cause]
    hooks = [parameter.register_hook(spoil) for parameter in model.parameters()]
    temperature = 1.0 if cause == "gradient" else 1e-44  # at which the logits overflow
    metrics = train_update(model, optimizer, batch, **options, temperature=temperature)
    for hook in hooks:
        hook.remove()
    assert math.isfinite(metrics["loss/objective"]) == (cause == "gradient")
    assert math.isfinite(metrics["optimizer/grad_norm"]) == (cause == "loss")
    assert metrics["update/skipped"] == 1
    assert bytes_of(model, optimizer) == before
    for one, its_optimizer in ((model, optimizer), (twin, twin_optimizer)):
        assert train_update(one, its_optimizer, batch, **options)["update/skipped"] == 0
    assert bytes_of(model, optimizer) == bytes_of(twin, twin_optimizer) != before


def test_gradients_left_by_someone_else_are_dropped_and_none_are_left(policy):
    batch = make_batch([(2, 5), (1, 3)])
    expected, _ = update_gradient(policy, batch, micro_batch_size=2)
    model = copy.deepcopy(policy)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e3)
    seen = []
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model.parameters()))
    train_update(model, optimizer, batch, learning_rate=0.0, micro_batch_size=2, max_grad_norm=math.inf)
    assert_same(seen, expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_batch_without_a_response_token_is_an_error_of_the_data(policy):
    model = copy.deepcopy(policy)
    with pytest.raises(RlvrError, match="No response token in this batch of 2 rows"):
        train_update(
            model,
            make_optimizer(model, learning_rate=0.1),
            make_batch([(3, 0), (2, 0)]),
            learning_rate=0.1,
            micro_batch_size=1,
        )


def test_a_batch_may_carry_more_tensors(policy):
    batch = make_batch([(2, 5), (1, 3), (2, 2)])
    plain, _ = update_gradient(policy, batch, micro_batch_size=2)
    batch |= {"advantages": torch.ones(3, 1), "old_log_probs": torch.zeros(batch["labels"].shape)}
    assert_same(update_gradient(policy, batch, micro_batch_size=2)[0], plain, 0)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_weights_and_optimizer_state_stay_float32_and_the_mode_stays(tiny_model, tiny_tokenizer, compute_dtype):
    policy = Policy(tiny_model, compute_dtype=compute_dtype)
    optimizer = make_optimizer(tiny_model, learning_rate=1e-3)
    batch = tokenize_prompt_and_output(["What is 12 + 30?"], [" 42 </answer>"], tiny_tokenizer)
    for training in (True, False):
        tiny_model.train(training)
        train_update(policy, optimizer, batch, learning_rate=1e-3, micro_batch_size=1)
        assert tiny_model.training is training
    assert {parameter.dtype for parameter in tiny_model.parameters()} == {torch.float32}
    assert {value.dtype for entry in optimizer.state.values() for value in entry.values()} == {torch.float32}


def test_an_update_in_bfloat16_is_near_that_in_float32_however_it_is_cut():
    """Near for this policy, whose weights are so wide that it triples the rounding of 2^-9 in every layer."""
    model, lengths = make_policy(torch.float32), [(2, 5), (1, 3), (2, 2), (4, 6), (3, 3), (2, 7), (1, 1), (3, 4)]
    batch = make_batch(lengths)
    exact, expected = update_gradient(model, batch, micro_batch_size=8, compute_dtype="float32")
    rounded, metrics = update_gradient(model, batch, micro_batch_size=8, compute_dtype="bfloat16")
    assert {gradient.dtype for gradient in rounded} == {torch.float32}
    assert 0.01 < distance(rounded, exact) < 0.05
    assert 1e-5 < abs(metrics["loss/nll"] - expected["loss/nll"]) < 1e-2
    for size in (1, 3):
        cut, _ = update_gradient(model, batch, micro_batch_size=size, compute_dtype="bfloat16")
        assert distance(cut, rounded) < 2**-8


def test_in_half_precision_a_cpu_computes_full_blocks_of_tokens(monkeypatch):
    """oneDNN would compile kernels for each other number of them. Nothing that is added enters a result."""
    batch, model = make_batch([(3, 9), (3, 5), (6, 7), (2, 11)]), make_policy(torch.float32)
    found = {}
    for blocks in (True, False):
        if not blocks:
            monkeypatch.setattr(onednn, "_ROWS_TOGETHER", 1)
        found[blocks] = update_gradient(model, batch, micro_batch_size=2, compute_dtype="bfloat16")
    tokens = found[False][1]["update/computed"]
    assert (tokens, found[True][1]["update/computed"]) == (42, 64)
    for rounded, exact in zip(found[True][0], found[False][0], strict=True):
        torch.testing.assert_close(rounded, exact, rtol=1e-4, atol=1e-6)
    assert update_gradient(model, batch, micro_batch_size=2)[1]["update/computed"] == tokens, (
        "in float32 there are none"
    )


def test_gradients_of_bfloat16_weights_are_summed_in_float32():
    """64 equal rows have the mean loss of one: 1/64 of its gradient, 64 times, exactly. In bfloat16 each sum would be rounded."""
    model = make_policy(torch.bfloat16)
    alone, _ = update_gradient(model, make_batch([(3, 5)]), micro_batch_size=1)
    batch = rows_of(make_batch([(3, 5)]), [0] * 64)
    together, metrics = update_gradient(model, batch, micro_batch_size=1)
    assert metrics["update/micro_batches"] == 64
    assert {gradient.dtype for gradient in together} == {torch.bfloat16}
    assert_same(together, alone, 0)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_gradients_of_bfloat16_weights_are_not_all_in_memory_beside_their_sums(gradient_checkpointing):
    model = make_policy(torch.bfloat16, layers=2)
    parameters = list(model.parameters())
    at_once, sums, found = [], {}, []

    def see(parameter):
        at_once.append(sum(p.grad is not None for p in parameters))
        sums[parameter] = sums.get(parameter, 0) + parameter.grad.float()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(see)
    optimizer = torch.optim.SGD(parameters)
    optimizer.register_step_pre_hook(lambda *_: found.extend(p.grad.clone() for p in parameters))
    options = {"learning_rate": 0.1, "max_grad_norm": math.inf, "gradient_checkpointing": gradient_checkpointing}
    for _ in range(2):  # nothing is left over for another update
        train_update(model, optimizer, make_batch([(3, 5), (2, 4), (4, 3)]), micro_batch_size=1, **options)
        assert at_once == [1] * 3 * len(parameters)
        assert_same(found, [sums[parameter].bfloat16() for parameter in parameters], 0)
        at_once.clear(), sums.clear(), found.clear()


def test_ten_updates_follow_an_independent_loop_and_the_tiny_model_overfits(tiny_model, tiny_tokenizer):
    """Golden trajectory: the same ten updates written the plain way, without any of our functions."""
    prompts = ["What is 12 + 30?", "Natalia sold 48 clips.", "Solve x^2 = 9."]
    outputs = [" <answer> 42 </answer>", " She sold 72.", r" \boxed{3}, or -3, since (-3)^2 = 9 </answer>"]
    ours, theirs = tiny_model.double(), copy.deepcopy(tiny_model).double()
    batch = tokenize_prompt_and_output(prompts, outputs, tiny_tokenizer)
    optimizer = make_optimizer(ours, learning_rate=1e-2)
    losses = []
    for step in range(10):
        rate = learning_rate_at(step, peak=1e-2, num_steps=10, warmup_steps=2, schedule="cosine")
        losses.append(train_update(ours, optimizer, batch, learning_rate=rate, micro_batch_size=2)["loss/objective"])

    rates = [0.005, 0.01] + [0.01 * (0.1 + 0.45 * (1 + math.cos(math.pi * k / 7))) for k in range(8)]
    ids = [(tiny_tokenizer(p).input_ids, tiny_tokenizer(o).input_ids) for p, o in zip(prompts, outputs, strict=True)]
    adam = torch.optim.AdamW(theirs.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(10):
        token_losses = []
        for prompt, output in ids:  # one row at a time, unpadded
            logits = theirs(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
            token_losses.append(F.cross_entropy(logits, torch.tensor(output), reduction="none"))
        loss = torch.cat(token_losses).mean()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        adam.param_groups[0]["lr"] = rates[step]
        adam.step()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-9), f"step {step}"
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)
    assert losses[-1] < 0.5 * losses[0]


# --- policy gradients: the update


def make_rollouts(model, lengths, *, seed=0, temperature=1.0, spread=0.3):
    """A batch with all that `policy_gradient` may read, its log-probabilities near the model's own."""
    batch = make_batch(lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        every = (model(batch["input_ids"]).logits / temperature).log_softmax(-1)
    own = every.gather(-1, batch["labels"][..., None]).squeeze(-1)
    for name in ("old_log_probs", "sampled_log_probs", "reference_log_probs"):
        batch[name] = own + spread * torch.randn(own.shape, dtype=own.dtype, generator=generator)
    batch["advantages"] = torch.randn(len(own), 1, dtype=own.dtype, generator=generator)
    return batch


def objective_of(loss_type, *, kl_coef=0.0, kl_type="k3", importance_cap=None, importance_masked=False, **given):
    """The objective of `rlvr grpo`; options that are not given have their defaults. No weights per token for a loss per row."""
    loss, given = LOSSES[loss_type], vars(GrpoConfig()) | given
    bound = functools.partial(loss.function, **{name: given[name] for name in loss.options})
    return functools.partial(
        policy_gradient,
        loss=bound,
        kl_coef=kl_coef,
        kl_type=kl_type,
        importance_cap=None if loss.per_row else importance_cap,
        importance_masked=importance_masked,
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
@settings(max_examples=3, phases=[Phase.explicit, Phase.reuse, Phase.generate])
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


def update_options(loss_type, **keywords):
    return {"objective": objective_of(loss_type, **keywords), "micro_batch_size": 2}


LENGTHS = [(2, 3), (1, 7), (4, 2), (3, 5)]
ROUNDING = 1e-5  # of a gradient times a factor: the model's normalization layers compute in float32


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
    for keywords in ({}, {"importance_cap": 1.1}, {"kl_coef": 0.1}):
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
    math.naned = dict(batch)
    for name in ("old_log_probs", "sampled_log_probs", "reference_log_probs"):
        math.naned[name] = torch.where(batch["response_mask"], batch[name], math.nan)
    math.naned["advantages"] = batch["advantages"].index_fill(0, torch.tensor(4), math.nan)
    without = {name: tensor[:4] for name, tensor in batch.items()}
    for normalization, constant, fraction in (
        ("token_mean", None, 1.0),
        ("masked_mean", None, 1.0),
        ("masked_normalize", 9.0, 4 / 5),
    ):
        how = {"normalization": normalization, "normalize_constant": constant}
        fraction = 1.0 if LOSSES[loss_type].per_row else fraction
        expected, its_metrics = update_gradient(policy, without, **options, **how)
        gradient, metrics = update_gradient(policy, math.naned, **options, **how)
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


# --- scoring


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 9])
def test_score_is_the_log_softmax_of_the_whole_logits(policy, micro_batch_size, temperature):
    batch = make_batch([(2, 3), (1, 7), (4, 0), (3, 5)])
    scored = compute_log_probs(policy, batch, micro_batch_size=micro_batch_size, temperature=temperature)
    with torch.no_grad():
        every = (policy(batch["input_ids"]).logits / temperature).log_softmax(-1)
    own = every.gather(-1, batch["labels"][..., None]).squeeze(-1).masked_fill(~batch["response_mask"], 0.0)
    torch.testing.assert_close(scored, own, rtol=1e-12, atol=1e-12)
    assert (scored[~batch["response_mask"]] == 0).all()
    assert scored.shape == batch["labels"].shape


def test_score_of_nothing_is_zero(policy):
    batch = make_batch([(3, 0), (2, 0)])
    assert torch.equal(compute_log_probs(policy, batch, micro_batch_size=2), torch.zeros(batch["labels"].shape))


def test_scores_are_ordinary_tensors_and_the_model_is_left_alone():
    model = make_policy(torch.float32).train()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    scored = compute_log_probs(model, make_batch(LENGTHS), micro_batch_size=2)
    assert not scored.is_inference()
    assert not scored.requires_grad
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same(model.state_dict().values(), before, 0)


@pytest.mark.parametrize(
    *every_two(
        loss_type=LOSS_TYPES, micro_batch_size=[1, 2, 3, 8], kl_coef=[0.1, 0.0], compute_dtype=["float32", "bfloat16"]
    )
)
def test_from_its_own_scores_the_first_update_has_ratios_of_exactly_one(
    loss_type, micro_batch_size, kl_coef, compute_dtype
):
    model = Policy(
        make_policy(torch.float32), compute_dtype=compute_dtype
    )  # its first forward pass is that of compute_log_probs
    batch = make_batch([*LENGTHS, (1, 1), (2, 7), (3, 0)])
    options = update_options(loss_type, kl_coef=kl_coef, importance_cap=2.0)
    how = {"micro_batch_size": micro_batch_size, "temperature": 0.9}
    options |= how | {"learning_rate": 0.05}
    old = compute_log_probs(model, batch, **how)
    batch |= {"old_log_probs": old, "sampled_log_probs": old, "reference_log_probs": old}
    batch["advantages"] = torch.randn(7, 1, generator=torch.Generator().manual_seed(0))
    if not kl_coef:
        batch["advantages"][[1, 4]] = 0.0
        batch["zero_advantage"] = batch["advantages"] == 0
        old = batch["old_log_probs"] = batch["sampled_log_probs"] = compute_log_probs(model, batch, **how)
    optimizer = make_optimizer(model, learning_rate=0.05)
    first = train_update(model, optimizer, batch, **options)
    assert [first[f"policy/ratio_{name}"] for name in ("mean", "min", "p01", "p99", "max")] == [1.0] * 5
    assert [first[f"mismatch/ratio_{name}"] for name in ("mean", "p01", "p99", "max")] == [1.0] * 4
    assert (
        first["mismatch/logprob_max_abs"]
        == first.get("policy/kl", 0.0)
        == first.get("policy/clip_fraction", 0.0)
        == 0.0
    )
    assert first.get("mismatch/importance_weight_mean") == (None if LOSSES[loss_type].per_row else 1.0)

    mask = batch["response_mask"]
    moved = (compute_log_probs(model, batch, **how) - old)[mask]
    if loss_type == "gspo":  # at each token the mean over its response
        of_response = [part.mean().expand(len(part)) for part in moved.split(mask.sum(dim=1).tolist())]
        moved = torch.cat(of_response)
    second = train_update(model, optimizer, batch, **options)
    assert second["policy/ratio_min"] < 1 < second["policy/ratio_max"]
    assert second["policy/ratio_max"] == pytest.approx(moved.exp().max().item(), rel=1e-6 if loss_type == "gspo" else 0)
    assert second["policy/ratio_mean"] == pytest.approx(moved.double().exp().mean().item(), rel=1e-6)
    assert not kl_coef or second["policy/kl"] > 0
    assert second["mismatch/logprob_max_abs"] == 0.0  # the sampler and the trainer before the update do not move
    if loss_type == "grpo_clip":
        assert second["policy/clip_fraction"] > 0


@pytest.mark.parametrize("wrong", ["rows mixed up", "dropout", "nan"])
def test_the_first_ratios_of_a_batch_show_what_is_wrong(wrong):
    model = make_policy(torch.float32)
    batch = make_batch([(2, 3), (4, 2), (3, 4)])
    how = {"micro_batch_size": 2}
    old = compute_log_probs(model, batch, **how)
    batch |= {"old_log_probs": old, "sampled_log_probs": old, "advantages": torch.tensor([[1.0], [-1.0], [0.5]])}
    options = update_options("grpo_clip") | how | {"learning_rate": 0.0}
    right = train_update(model, make_optimizer(model, learning_rate=0.0), batch, **options)
    check_ratios(right, dtype=torch.float32)
    skipped = right | {"policy/ratio_max": math.nan, "update/skipped": 1.0}  # nothing was changed
    check_ratios(skipped, dtype=torch.float32)

    if wrong == "rows mixed up":
        batch["old_log_probs"] = old.roll(1, dims=0)
    elif wrong == "dropout":
        model.model.embed_tokens.register_forward_hook(lambda _module, _inputs, out: F.dropout(out, 0.1))
    metrics = train_update(model, make_optimizer(model, learning_rate=0.0), batch, **options)
    if wrong == "nan":
        metrics["policy/ratio_max"] = math.nan
    with pytest.raises(RlvrError, match="must be 1"):
        check_ratios(metrics, dtype=torch.float32)


def test_a_real_tokenizer_and_model_agree_with_their_own_scores(tiny_model, tiny_tokenizer):
    prompts = ["What is 12 + 30?", "Natalia sold 48 clips.", "Solve x^2 = 9."]
    outputs = [" <answer> 42 </answer>", " 72.", r" \boxed{3}, or -3, since (-3)^2 = 9 </answer>"]
    batch = tokenize_prompt_and_output(prompts, outputs, tiny_tokenizer)
    old = compute_log_probs(tiny_model, batch, micro_batch_size=2)
    batch |= {"old_log_probs": old, "sampled_log_probs": old, "advantages": torch.tensor([[1.0], [-1.0], [0.5]])}
    optimizer = make_optimizer(tiny_model, learning_rate=1e-2)
    metrics = train_update(tiny_model, optimizer, batch, learning_rate=1e-2, **update_options("grpo_clip"))
    assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1.0
    assert metrics["policy/clip_fraction"] == 0.0
    assert metrics["update/skipped"] == 0


def test_the_mismatch_is_also_told_by_position_and_length():
    """Two responses, of 2 and 6 tokens; the gaps are worked out by hand."""
    statistics = {
        "mismatch": torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0, -6.0, 7.0, -8.0]),
        "position": torch.tensor([0, 1, 0, 1, 2, 3, 4, 5]),
        "length": torch.tensor([2, 2, 6, 6, 6, 6, 6, 6]),
    }
    metrics = token_metrics(statistics)
    told = {k.removeprefix("mismatch/"): v for k, v in metrics.items() if "position" in k or "length" in k}
    assert told == {
        "position/0": 2.0,
        "position/1": pytest.approx((2 + 4 + 5 + 6) / 4),
        "position/4": 7.5,
        "length/1": 1.5,
        "length/4": 5.5,
    }


def test_the_mismatch_of_tokens_before_the_minimum_is_told_by_position_alone():
    """The sampler forbids the end of a response there. Two responses, of 3 and 5 tokens, at least 2 each; worked out by hand."""
    statistics = {
        "mismatch": torch.tensor([8.0, -8.0, 1.0, 6.0, -6.0, -2.0, 3.0, -4.0]),
        "position": torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]),
        "length": torch.tensor([3, 3, 3, 5, 5, 5, 5, 5]),
        "early": torch.tensor([True, True, False, True, True, False, False, False]),
    }
    metrics = token_metrics(statistics)
    assert metrics["mismatch/logprob_mean_abs"] == 2.5
    assert metrics["mismatch/logprob_max_abs"] == 4.0
    assert metrics["mismatch/ratio_max"] == pytest.approx(math.exp(3))
    told = {k.removeprefix("mismatch/"): v for k, v in metrics.items() if "position" in k or "length" in k}
    assert told == {"position/0": 7.0, "position/1": 4.0, "position/4": 4.0, "length/1": 1.0, "length/4": 3.0}
    nothing = token_metrics({name: values[:2] for name, values in statistics.items()})
    assert nothing == {"mismatch/position/0": 8.0, "mismatch/position/1": 8.0}


def test_rollouts_are_trained_on_as_the_ids_that_were_sampled():
    """The second response's text would tokenize to one id; it was sampled as two."""
    rows = [((1, 2), (3, 4, 5), (-0.5, -0.25, -1.0), 0.5), ((7,), (8, 9), (-2.0, -0.125), -0.5)]
    rollouts = [make_rollout(prompt, response, logprobs, advantage) for prompt, response, logprobs, advantage in rows]
    batch = rollout_tensors(rollouts, pad_id=0)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [7, 8, 9, 0]]
    assert batch["labels"].tolist() == [[2, 3, 4, 5], [8, 9, 0, 0]]
    assert batch["response_mask"].tolist() == [[False, True, True, True], [True, True, False, False]]
    assert batch["sampled_log_probs"].tolist() == [[0, -0.5, -0.25, -1.0], [-2.0, -0.125, 0, 0]]
    assert batch["advantages"].tolist() == [[0.5], [-0.5]]
    assert {k: v.tolist() for k, v in select_rows(batch, [1]).items()} == {k: v[1:].tolist() for k, v in batch.items()}


def test_tokens_that_the_policy_did_not_sample_are_read_and_not_trained_on(policy):
    """As a loop over the rows, one at a time and without padding, that leaves those tokens' losses out."""
    mask = (True, True, False, False, True, False, True)
    rows = [
        ((5, 6, 7), (9, 10, 11, 12, 13, 14, 15), mask, 0.5),
        ((5, 6, 7), (9, 10, 21, 22, 13, 14), (False, *mask[:5]), -1.0),  # the environment speaks first
        ((5, 6, 7), (9, 10), None, 2.0),
        ((8,), (16, 17, 18), (False,) * 3, 3.0),
        ((8,), (16, 17, 18), (True,) * 3, 1.5),
    ]
    rollouts = [
        a_rollout(
            prompt_ids=prompt,
            response_ids=response,
            sampled_logprobs=tuple(-1.0 - 0.1 * i if kept is None or kept[i] else 0.0 for i in range(len(response))),
            response_mask=kept,
            advantage=advantage,
        )
        for prompt, response, kept, advantage in rows
    ]
    losses = []
    for r in rollouts:
        ids = torch.tensor([r.prompt_ids + r.response_ids])
        log_probs = policy(ids).logits[0, len(r.prompt_ids) - 1 : -1].log_softmax(-1)
        for i, token in enumerate(r.response_ids):
            if r.response_mask is None or r.response_mask[i]:
                weight = (log_probs[i, token].detach() - r.sampled_logprobs[i]).exp().clamp(max=2.0)
                losses.append(-r.advantage * weight * log_probs[i, token])
    assert len(losses) == 4 + 3 + 2 + 0 + 3
    expected = one_shot_gradient(policy, torch.stack(losses).mean())

    batch = rollout_tensors(rollouts, pad_id=1)
    assert batch["response_mask"].sum(dim=1).tolist() == [4, 3, 2, 0, 3]
    assert batch["sampled_log_probs"][~batch["response_mask"]].abs().sum() == 0
    loss = LOSSES["reinforce_with_baseline"].function
    objective = functools.partial(policy_gradient, loss=loss, importance_cap=2.0)
    for size in (1, 2, 5):
        gradient, metrics = update_gradient(policy, batch, micro_batch_size=size, objective=objective)
        assert metrics["update/tokens"] == len(losses)
        assert_same(gradient, expected, tolerance=1e-6)  # float32 log-probabilities of the sampler


def test_a_mask_of_ones_is_none(policy):
    plain = a_rollout(prompt_ids=(5, 6), response_ids=(7, 8, 9), sampled_logprobs=(-1.0, -2.0, -3.0), advantage=1.0)
    masked = replace(plain, response_mask=(True, True, True))
    left, right = (rollout_tensors([r], pad_id=1) for r in (plain, masked))
    assert {name: tensor.tolist() for name, tensor in left.items()} == {name: t.tolist() for name, t in right.items()}
    with pytest.raises(AssertionError, match="one entry per token"):
        collate([[5]], [[6, 7]], pad_id=1, response_masks=[[True]])


def make_rollout(prompt_ids, response_ids, logprobs, advantage):
    return a_rollout(prompt_ids=prompt_ids, response_ids=response_ids, sampled_logprobs=logprobs, advantage=advantage)
