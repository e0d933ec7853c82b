"""`rlvr_cli.handout` exports all functions of the course, with the handout's arguments."""

import inspect
from typing import get_args

import pytest
import torch

from rlvr_cli import handout
from rlvr_cli.handout import grpo_microbatch_train_step, sft_microbatch_train_step
from rlvr_cli.training.losses.policy_gradient import HandoutLoss

ARGUMENTS = {
    "tokenize_prompt_and_output": "prompt_strs output_strs tokenizer",
    "compute_entropy": "logits",
    "get_response_log_probs": "model input_ids labels return_token_entropy",
    "masked_normalize": "tensor mask normalize_constant dim",
    "sft_microbatch_train_step": "policy_log_probs response_mask gradient_accumulation_steps normalize_constant",
    "log_generations": None,
    "compute_group_normalized_rewards": "reward_fn rollout_responses repeated_ground_truths group_size advantage_eps normalize_by_std",
    "compute_naive_policy_gradient_loss": "raw_rewards_or_advantages policy_log_probs",
    "compute_grpo_clip_loss": "advantages policy_log_probs old_log_probs cliprange",
    "compute_policy_gradient_loss": "policy_log_probs loss_type raw_rewards advantages old_log_probs cliprange",
    "masked_mean": "tensor mask dim",
    "grpo_microbatch_train_step": "policy_log_probs response_mask gradient_accumulation_steps loss_type raw_rewards advantages "
    "old_log_probs cliprange",
    "evaluate_vllm": "vllm_model reward_fn prompts eval_sampling_params",
}  # fmt: skip


def test_all_functions_are_exported():
    assert set(handout.__all__) == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_arguments_are_the_handouts(name):
    """In the handout's order; our additional parameters follow, with a default or keyword-only."""
    parameters = inspect.signature(getattr(handout, name)).parameters
    names = (ARGUMENTS[name] or "").split()
    assert list(parameters)[: len(names)] == names
    if names:
        ours = list(parameters.values())[len(names) :]
        assert all(p.default is not p.empty or p.kind is p.KEYWORD_ONLY for p in ours), ours


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


def test_the_handouts_signature_of_the_grpo_step():
    names = list(inspect.signature(grpo_microbatch_train_step).parameters)
    assert names == [
        "policy_log_probs",
        "response_mask",
        "gradient_accumulation_steps",
        "loss_type",
        "raw_rewards",
        "advantages",
        "old_log_probs",
        "cliprange",
    ]


def test_grpo_microbatch_train_step_worked_by_hand():
    mask = torch.tensor([[False, True, True], [False, False, True]])
    column = torch.tensor([[2.0], [-1.0]])
    for loss_type, name in (("no_baseline", "raw_rewards"), ("reinforce_with_baseline", "advantages")):
        log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]], requires_grad=True)
        loss, metadata = grpo_microbatch_train_step(log_probs, mask, 4, loss_type, **{name: column})
        assert loss.item() == pytest.approx(((2 * 2 + 2 * 3) / 2 - 6) / 2 / 4)
        torch.testing.assert_close(log_probs.grad, torch.tensor([[0, -1, -1], [0, 0, 1]]) / 8)
        assert not loss.requires_grad
        assert metadata == {}


def test_grpo_clip_microbatch_train_step_worked_by_hand():
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    ratio = torch.tensor([[1.0, 0.5, 1.5, 1.1], [0.5, 1.5, 0.1, 9.0]])
    old = torch.full((2, 4), -1.0)
    log_probs = (old + ratio.log()).requires_grad_()
    loss, metadata = grpo_microbatch_train_step(
        log_probs, mask, 2, "grpo_clip", advantages=torch.tensor([[2.0], [-1.0]]), old_log_probs=old, cliprange=0.2
    )
    assert loss.item() == pytest.approx((-2 * (1 + 0.5 + 1.2 + 1.1) / 4 + (0.8 + 1.5) / 2) / 2 / 2)
    expected = torch.tensor([[-2 * 1.0, -2 * 0.5, 0, -2 * 1.1], [0, 2 * 1.5, 0, 0]]) / 4 / 4
    torch.testing.assert_close(log_probs.grad, expected)
    assert {name: value.item() for name, value in metadata.items()} == pytest.approx(
        {"ratio": 6.1 / 6, "clipped": 2 / 6, "clipped_low": 1 / 6, "clipped_high": 1 / 6}
    )


@pytest.mark.parametrize("loss_type", get_args(HandoutLoss))
def test_equal_grpo_micro_batches_accumulate_to_their_union(loss_type):
    generator = torch.Generator().manual_seed(3)
    log_probs = -torch.rand(8, 5, dtype=torch.float64, generator=generator)
    mask = torch.rand(8, 5, generator=generator) < 0.6
    mask[:, 2] = True
    column = torch.randn(8, 1, dtype=torch.float64, generator=generator)
    old = log_probs + 0.4 * torch.randn(8, 5, dtype=torch.float64, generator=generator)

    def accumulated(size):
        pieces = log_probs.clone().requires_grad_()
        losses = []
        for rows in torch.arange(8).split(size):
            loss, _ = grpo_microbatch_train_step(
                pieces[rows],
                mask[rows],
                8 // size,
                loss_type,
                raw_rewards=column[rows],
                advantages=column[rows],
                old_log_probs=old[rows],
                cliprange=0.2,
            )
            losses.append(loss)
        return pieces.grad, sum(losses)

    gradient, loss = accumulated(8)
    assert gradient.abs().sum() > 0
    for size in (1, 2, 4):
        torch.testing.assert_close(accumulated(size)[0], gradient, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(accumulated(size)[1], loss, rtol=1e-12, atol=1e-15)
