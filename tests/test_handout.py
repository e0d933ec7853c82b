"""`rlvr_cli.handout` exports all functions of the course, with the handout's arguments."""

import inspect

import pytest

from rlvr_cli import handout

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
