"""The loss of `rlvr ppo`: a clipped policy gradient, and the squared error of the values."""

from dataclasses import replace

import torch
from torch import Tensor

from rlvr_cli.training.losses.inputs import LossInputs, LossOutputs
from rlvr_cli.training.losses.objectives import policy_gradient
from rlvr_cli.training.losses.policy_gradient import compute_grpo_clip_loss


def compute_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange: float = 0.0
) -> tuple[Tensor, Tensor]:
    """1/2 (V - R)^2 per token; clipped: the larger of this and 1/2 (V_old + clip(V - V_old, -c, c) - R)^2 (Schulman et al., 2017).

    Args:
        values: (batch, seq), of the critic being trained.
        old_values: (batch, seq), of the critic before the first update on these rollouts.
        returns: (batch, seq).
        cliprange: c, in units of the reward; 0: no clipping.

    Returns:
        The loss, and whether the clipped term is the larger one, so that no gradient flows; (batch, seq) each.
    """
    error = (values - returns) ** 2
    if not cliprange:
        return error / 2, torch.zeros_like(error, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-cliprange, cliprange)
    clipped = (near - returns) ** 2
    return torch.maximum(error, clipped) / 2, clipped > error


def actor_critic(
    inputs: LossInputs,
    *,
    cliprange: float,
    vf_coef: float,
    vf_cliprange: float = 0.0,
    kl_coef: float = 0.0,
    critic_alone: bool = False,
    min_tokens: int = 0,
) -> LossOutputs:
    """The objective of `rlvr ppo`; bind the keywords with functools.partial.

    Args:
        inputs: with `advantages` (batch, seq), `values`, `old_values` and `returns`, and what `policy_gradient` needs. Values outside
            the mask are not read.
        cliprange: of the probability ratio.
        vf_coef: weight of the value loss.
        vf_cliprange: of the values (`compute_value_loss`).
        kl_coef: weight of a KL penalty in the loss (`policy_gradient`); 0 if it is in the reward.
        critic_alone: no gradient goes to the policy.
        min_tokens: of a response, see `policy_gradient`.

    Returns:
        The loss and the statistics of `policy_gradient`, with those of the critic added: `critic/loss`, `critic/value_mean`
        and, if values are clipped, `critic/clip_fraction`.
    """
    values, old_values, returns = inputs.values, inputs.old_values, inputs.returns
    assert values is not None
    assert old_values is not None
    assert returns is not None
    outside = ~inputs.response_mask
    value_loss, clipped = compute_value_loss(
        *(tensor.masked_fill(outside, 0) for tensor in (values, old_values, returns)), cliprange=vf_cliprange
    )
    if critic_alone:
        inputs = replace(inputs, log_probs=inputs.log_probs.detach())

    def clip(of: LossInputs) -> LossOutputs:
        assert of.advantages is not None
        advantages = of.advantages.masked_fill(outside, 0)
        return LossOutputs(*compute_grpo_clip_loss(advantages, of.log_probs, of.old_log_probs, cliprange))

    outputs = policy_gradient(inputs, loss=clip, kl_coef=kl_coef, min_tokens=min_tokens)
    of_critic = {"critic/loss": value_loss.detach(), "critic/value_mean": values.detach()}
    if vf_cliprange:
        of_critic["critic/clip_fraction"] = clipped
    return LossOutputs(outputs.loss + vf_coef * value_loss, {**outputs.statistics, **of_critic})
