"""The SFT update against plain one-shot references: whole logits, F.cross_entropy, one backward pass, in float64."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlvr_cli.errors import RlvrError
from rlvr_cli.tokens import collate, get_response_log_probs, tokenize_prompt_and_output
from rlvr_cli.training import (
    autocast_context,
    batches,
    epoch_order,
    learning_rate_at,
    make_optimizer,
    sft_microbatch_train_step,
    train_update,
)

VOCAB = 41
NORMALIZATIONS = [("token_mean", None), ("masked_mean", None), ("masked_normalize", 1.0), ("masked_normalize", 13.0)]


def make_policy(dtype=torch.float64):
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Qwen2ForCausalLM(config).to(dtype).eval()


@pytest.fixture(scope="module")
def policy():
    """Read-only; a test that updates it takes a copy."""
    return make_policy()


def make_batch(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(count):
        return torch.randint(2, VOCAB, (count,), generator=generator).tolist()

    return collate([draw(p) for p, _ in lengths], [draw(r) for _, r in lengths], pad_id=1)


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


def update_gradient(model, batch, **options):
    """The gradient that `train_update` hands to the optimizer, and its metrics; the model is left as it was."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model.parameters()))
    metrics = train_update(model, optimizer, batch, **{"learning_rate": 0.0, "max_grad_norm": math.inf, **options})
    return seen, metrics


def one_shot_gradient(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_same(left, right, tolerance=1e-10):
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def norm_of(gradients):
    return math.sqrt(sum(float((g * g).sum()) for g in gradients))


def bytes_of(model, optimizer):
    state = [*model.state_dict().values()]
    state += [value for entry in optimizer.state.values() for value in entry.values()]
    return [tensor.detach().numpy().tobytes() for tensor in state]


# --- the handout's micro-batch step


def test_sft_microbatch_train_step_worked_by_hand():
    log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]], requires_grad=True)
    mask = torch.tensor([[False, True, True], [False, False, True]])
    loss, metadata = sft_microbatch_train_step(log_probs, mask, 4, 10.0)
    assert loss.item() == pytest.approx(((2 + 3) / 10 + 6 / 10) / 2 / 4)
    expected = torch.tensor([[0, -1, -1], [0, 0, -1]]) / 80
    torch.testing.assert_close(log_probs.grad, expected)
    assert metadata["num_response_tokens"] == 3
    assert metadata["mean_nll"].item() == pytest.approx(11 / 3)
    assert not loss.requires_grad


@pytest.mark.parametrize("constant", [1.0, 42.0])
def test_sft_microbatch_train_step_accumulates_like_the_courses_ten_step_test(constant):
    generator = torch.Generator().manual_seed(42)
    log_probs = torch.randn(2, 10, generator=generator, requires_grad=True)
    mask = torch.rand(2, 10, generator=generator) > 0.5
    for step in range(1, 11):
        loss, _ = sft_microbatch_train_step(
            policy_log_probs=log_probs,
            response_mask=mask,
            gradient_accumulation_steps=2,
            normalize_constant=constant,
        )
        rows = [-sum(v for v, m in zip(r, k, strict=True) if m) for r, k in zip(log_probs.tolist(), mask, strict=True)]
        assert loss.item() == pytest.approx(sum(rows) / constant / 2 / 2, rel=1e-5)
        torch.testing.assert_close(log_probs.grad, -step * mask / constant / 4)


def test_eight_micro_batches_of_one_are_one_of_eight():
    log_probs = -torch.rand(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(8, 5, generator=torch.Generator().manual_seed(1)) < 0.6
    whole, pieces = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    loss, _ = sft_microbatch_train_step(whole, mask, 1, 3.0)
    parts = [sft_microbatch_train_step(pieces[row : row + 1], mask[row : row + 1], 8, 3.0)[0] for row in range(8)]
    torch.testing.assert_close(whole.grad, pieces.grad)
    torch.testing.assert_close(loss, sum(parts))


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
@settings(max_examples=12, deadline=None)
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


def test_rows_of_like_length_share_a_micro_batch_and_the_longest_go_first(policy):
    batch = make_batch([(1, 2), (1, 9), (2, 0), (1, 3), (3, 6)])  # 2, 9, none, 3 and 8 positions that matter
    model, shapes = copy.deepcopy(policy), []
    model.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    get_response_log_probs(model, batch["input_ids"], batch["labels"])
    shapes.clear()
    metrics = train_update(model, torch.optim.SGD(model.parameters()), batch, learning_rate=0.0, micro_batch_size=2)
    assert shapes == [(2, 9), (2, 3)]
    assert metrics["update/padding"] == pytest.approx(1 - (9 + 8 + 3 + 2) / (18 + 6))


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


def test_weights_and_optimizer_state_stay_float32_and_the_mode_stays(tiny_model, tiny_tokenizer):
    optimizer = make_optimizer(tiny_model, learning_rate=1e-3)
    batch = tokenize_prompt_and_output(["What is 12 + 30?"], [" 42 </answer>"], tiny_tokenizer)
    for training in (True, False):
        tiny_model.train(training)
        train_update(tiny_model, optimizer, batch, learning_rate=1e-3, micro_batch_size=1)
        assert tiny_model.training is training
    assert {parameter.dtype for parameter in tiny_model.parameters()} == {torch.float32}
    assert {value.dtype for entry in optimizer.state.values() for value in entry.values()} == {torch.float32}


def test_a_cpu_computes_in_the_precision_of_the_weights(policy):
    with autocast_context(policy):
        assert not torch.is_autocast_enabled("cpu")


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


# --- optimizer, learning rate, order


def test_the_optimizer_has_the_handouts_defaults_and_only_what_trains():
    model = make_policy(torch.float32)
    model.model.embed_tokens.weight.requires_grad_(False)  # the tied head with it
    optimizer = make_optimizer(model, learning_rate=3e-5)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (3e-5, (0.9, 0.95), 0.0)
    assert len(group["params"]) == sum(p.requires_grad for p in model.parameters())
    before = model.lm_head.weight.clone()
    metrics = train_update(model, optimizer, make_batch([(2, 3)]), learning_rate=0.1, micro_batch_size=1)
    assert metrics["optimizer/learning_rate"] == optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(model.lm_head.weight, before)
    assert metrics["optimizer/grad_norm"] > 0


def test_learning_rate_worked_by_hand():
    def rates(**options):
        return [learning_rate_at(step, peak=1.0, num_steps=7, **options) for step in range(9)]

    assert rates() == [1.0] * 9
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    expected = [0.5, 1.0, 1.0, 0.1 + 0.45 * (1 + math.cos(math.pi / 4)), 0.55]
    expected += [0.1 + 0.45 * (1 - math.cos(math.pi / 4)), 0.1, 0.1, 0.1]
    assert rates(warmup_steps=2, schedule="cosine") == pytest.approx(expected)


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 600))
def test_learning_rate_stays_within_its_bounds(num_steps, warmup_steps, step):
    rate = learning_rate_at(step, peak=2.0, num_steps=num_steps, warmup_steps=warmup_steps, schedule="cosine")
    assert 0 < rate <= 2.0
    if step >= warmup_steps:
        assert rate >= 0.2 * (1 - 1e-12)
        later = learning_rate_at(step + 1, peak=2.0, num_steps=num_steps, warmup_steps=warmup_steps, schedule="cosine")
        assert later <= rate * (1 + 1e-12)


def test_the_order_is_a_permutation_fixed_for_good_by_seed_and_epoch():
    assert sorted(epoch_order(1000, seed=3, epoch=2)) == list(range(1000))
    orders = {tuple(epoch_order(50, seed=seed, epoch=epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert epoch_order(8, seed=0, epoch=0) == (7, 0, 1, 5, 3, 4, 2, 6)
    firsts = [epoch_order(4, seed=seed, epoch=0)[0] for seed in range(2000)]
    for index in range(4):
        assert 400 < firsts.count(index) < 600  # 500 expected, 5 standard deviations


@given(st.integers(0, 30), st.integers(1, 7), st.integers(1, 7), st.integers(0, 30))
def test_an_epoch_can_go_on_anywhere_with_another_batch_size(count, first_size, second_size, done):
    examples = [f"example {index}" for index in range(count)]
    expected = [examples[index] for index in epoch_order(count, seed=1, epoch=4)]
    done = min(done // first_size, count // first_size)
    seen = list(batches(examples, batch_size=first_size, seed=1, epoch=4))[:done]
    seen += list(batches(examples, batch_size=second_size, seed=1, epoch=4, start=done * first_size))
    assert [example for batch in seen for example in batch] == expected


def test_the_last_batch_that_is_not_full_is_kept_or_dropped_as_asked():
    def sizes(**options):
        return [len(batch) for batch in batches(range(10), batch_size=4, seed=0, epoch=0, **options)]

    assert sizes() == [4, 4, 2]
    assert sizes(drop_last=True) == [4, 4]
    assert sizes(start=2, drop_last=True) == [4, 4]
