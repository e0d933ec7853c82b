"""An update against plain one-shot references, whole logits and one backward pass, in float64."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM, OPTConfig, OPTForCausalLM

from policies import VOCAB, make_batch, make_policy
from rlvr_cli.errors import RlvrError
from rlvr_cli.handout import sft_microbatch_train_step
from rlvr_cli.models.compute import onednn
from rlvr_cli.models.compute.recompute import gradient_checkpointing
from rlvr_cli.models.log_probs import get_response_log_probs
from rlvr_cli.models.policy import Policy
from rlvr_cli.models.tokens.tokenization import collate, tokenize_prompt_and_output
from rlvr_cli.training.optimizers.optimizer import learning_rate_at, make_optimizer
from rlvr_cli.training.updates.scores import compute_log_probs
from rlvr_cli.training.updates.update import train_update
from updates import (
    NORMALIZATIONS,
    assert_same,
    bytes_of,
    distance,
    norm_of,
    one_shot_gradient,
    plain_loss,
    rows_of,
    update_gradient,
)


@st.composite
def cut_batches(draw):
    lengths = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7)), min_size=1, max_size=6))
    lengths.append((2, draw(st.integers(1, 7))))
    batch = make_batch(lengths, draw(st.integers(0, 100)))
    order = draw(st.permutations(range(len(lengths))))
    return batch, rows_of(batch, order, draw(st.integers(0, 5))), draw(st.integers(1, len(lengths) + 1))


@pytest.mark.parametrize(("normalization", "constant"), NORMALIZATIONS)
@given(cut_batches())
@settings(max_examples=3)
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
@settings(max_examples=5)
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


@pytest.mark.filterwarnings("ignore:The logits of:UserWarning")  # which are not one linear map
def test_gradient_checkpointing_computes_no_dropout_in_the_layers_themselves():
    config = OPTConfig(
        vocab_size=VOCAB, hidden_size=8, ffn_dim=12, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=8,
        max_position_embeddings=32, dropout=0.5, pad_token_id=1, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    model, batch = OPTForCausalLM(config).eval(), make_batch([(1, 4), (2, 3)])
    plain, metrics = update_gradient(model, batch, micro_batch_size=2)
    again, same = update_gradient(model, batch, micro_batch_size=2, gradient_checkpointing=True)
    assert all(torch.equal(one, other) for one, other in zip(again, plain, strict=True))
    assert same["loss/nll"] == metrics["loss/nll"]
    with gradient_checkpointing(model):  # also with the backward pass within the block
        model(batch["input_ids"], use_cache=False).logits.sum().backward()


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
