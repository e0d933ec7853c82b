"""Log-probabilities of the trainer, and how they fit those of the sampler."""

import functools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from arrays import every_two
from factories import a_rollout
from policies import make_batch, make_policy
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.policy import Policy
from rlvr_cli.models.tokens.tokenization import collate, tokenize_prompt_and_output
from rlvr_cli.training.losses.objectives import policy_gradient, token_metrics
from rlvr_cli.training.losses.policy_gradient import LOSSES
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.updates.scores import compute_log_probs
from rlvr_cli.training.updates.tensors import rollout_tensors, select_rows
from rlvr_cli.training.updates.update import check_ratios, train_update
from updates import LENGTHS, LOSS_TYPES, assert_same, make_rollout, one_shot_gradient, update_gradient, update_options


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
