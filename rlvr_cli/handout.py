"""The functions of Stanford CS336 assignment 5, with the handout's names, arguments and return values, in one module.

The reward functions are in `rlvr_cli.graders`. The training loops use the same building blocks; the three functions
defined here exist only for the handout.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.log_probs import compute_entropy, get_response_log_probs
from rlvr_cli.models.tokens.tokenization import tokenize_prompt_and_output
from rlvr_cli.rollouts.collect import log_generations, make_rollout
from rlvr_cli.rollouts.grading import utc_now_naive
from rlvr_cli.rollouts.metrics import rollout_metrics
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.training.credit.advantages import compute_group_normalized_rewards
from rlvr_cli.training.losses.normalization import masked_mean, masked_normalize
from rlvr_cli.training.losses.policy_gradient import (
    HandoutLoss,
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
)
from rlvr_cli.types import Completion, Example, Grade, Request

__all__ = [
    "compute_entropy",
    "compute_group_normalized_rewards",
    "compute_grpo_clip_loss",
    "compute_naive_policy_gradient_loss",
    "compute_policy_gradient_loss",
    "evaluate_vllm",
    "get_response_log_probs",
    "grpo_microbatch_train_step",
    "log_generations",
    "masked_mean",
    "masked_normalize",
    "sft_microbatch_train_step",
    "tokenize_prompt_and_output",
]


def sft_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of one micro-batch and run its backward pass (handout, section 4.2).

    The summed negative log-likelihood of each row's response, divided by `normalize_constant`, averaged over the rows
    and divided by `gradient_accumulation_steps`. Micro-batches of equally many rows accumulate to the gradient of their
    union; `train_update` does the same for micro-batches of any size.

    Args:
        policy_log_probs: (batch, seq), nats, with an autograd graph.
        response_mask: (batch, seq), 1 for response tokens.
        gradient_accumulation_steps: micro-batches per optimizer update.
        normalize_constant: the divisor of each row's sum.

    Returns:
        The loss, a detached scalar; `num_response_tokens` and `mean_nll` (nats per response token; NaN without response
        tokens).
    """
    per_example = masked_normalize(-policy_log_probs, response_mask, normalize_constant, dim=1)  # (batch,)
    loss = per_example.mean() / gradient_accumulation_steps
    loss.backward()
    with torch.no_grad():
        metadata = {
            "num_response_tokens": response_mask.bool().sum(),
            "mean_nll": -masked_mean(policy_log_probs, response_mask),
        }
    return loss.detach(), metadata


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: HandoutLoss,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of one micro-batch and run its backward pass (handout, section 7.2).

    The per-token loss averaged over each response (`masked_mean`), then over the rows, divided by
    `gradient_accumulation_steps`. Micro-batches of equally many rows accumulate to the gradient of their union;
    `train_update` does the same for micro-batches of any size and for every length normalization.

    Args:
        policy_log_probs: (batch, seq), nats, with an autograd graph.
        response_mask: (batch, seq), 1 for response tokens; every row has at least one.
        gradient_accumulation_steps: micro-batches per optimizer update.
        loss_type, raw_rewards, advantages, old_log_probs, cliprange: see `losses.compute_policy_gradient_loss`.

    Returns:
        The loss, a detached scalar; the mean over the response tokens of each of the loss's statistics.
    """
    per_token, statistics = compute_policy_gradient_loss(
        policy_log_probs,
        loss_type,
        raw_rewards=raw_rewards,
        advantages=advantages,
        old_log_probs=old_log_probs,
        cliprange=cliprange,
    )
    loss = masked_mean(per_token, response_mask, dim=1).mean() / gradient_accumulation_steps
    loss.backward()
    metadata = {name: masked_mean(values.float(), response_mask) for name, values in statistics.items()}
    return loss.detach(), metadata


def evaluate_vllm(
    vllm_model: Any,
    reward_fn: Callable[[str, str], dict[str, float]],
    prompts: Sequence[str],
    eval_sampling_params: Any,
    *,
    ground_truths: Sequence[str],
    runs_dir: str = "runs",
    run: str | None = None,
) -> None:
    """Evaluate a vLLM model on formatted prompts and serialize rows and metrics to a run directory (handout, section 3.2).

    Args:
        vllm_model: a `vllm.LLM`.
        reward_fn: (response, ground_truth) -> {"format_reward", "answer_reward", "reward"}; called in this process.
        prompts: formatted prompts.
        eval_sampling_params: a `vllm.SamplingParams`.
        ground_truths: one per prompt.
        runs_dir: directory that holds the runs.
        run: the name of the run; None generates one. `rlvr analyze` shows the latest run.
    """
    if not prompts or len(prompts) != len(ground_truths):
        raise RlvrError(
            f"Got {len(prompts)} prompts and {len(ground_truths)} ground truths.",
            "Pass at least one prompt, and one ground truth per prompt.",
        )
    name = getattr(reward_fn, "__name__", type(reward_fn).__name__)
    outputs = vllm_model.generate(list(prompts), eval_sampling_params)
    with RunDir.create(runs_dir, "eval", name=run, metadata={"grader": name, "engine": "vllm"}) as directory:
        rollouts = []
        for index, (output, truth) in enumerate(zip(outputs, ground_truths, strict=True)):
            for answer in output.outputs:
                grade = _grade_here(reward_fn, answer.text, truth)
                steps = zip(answer.token_ids, answer.logprobs, strict=True) if answer.logprobs else ()
                logprobs = tuple(step[token].logprob for token, step in steps)
                completion = Completion(
                    request_index=index,
                    sample_index=answer.index,
                    text=answer.text,
                    prompt_ids=tuple(output.prompt_token_ids or ()),
                    token_ids=tuple(answer.token_ids),
                    logprobs=logprobs,
                    num_prompt_tokens=len(output.prompt_token_ids or ()),
                    num_tokens=len(answer.token_ids),
                    finish_reason="length" if answer.finish_reason == "length" else "stop",
                    stop_reason=None if answer.finish_reason == "length" else str(answer.stop_reason or "eos"),
                    mean_entropy=None,
                )
                rollouts.append(
                    make_rollout(
                        completion,
                        grade,
                        run_id=directory.id,
                        phase="eval",
                        step=0,
                        policy_version=0,
                        example=Example(str(index), prompts[index], truth),
                        sample_index=answer.index,
                        request=Request(prompts[index], (0,) * (answer.index + 1)),
                        grader=name,
                        sampled_at=utc_now_naive(),
                    )
                )
        directory.commit_rollouts("eval", 0, rollouts)
        directory.commit_metrics(0, "eval", rollout_metrics(rollouts))
        directory.finish("finished")


def _grade_here(reward_fn: Callable[[str, str], dict[str, float]], response: str, truth: str) -> Grade:
    try:
        rewards = reward_fn(response, truth)
        return Grade(rewards["format_reward"], rewards["answer_reward"], rewards["reward"])
    except Exception as e:  # as in a grader's worker: a failing reward function must not lose the generated responses
        return Grade(None, None, None, error=type(e).__name__)
