"""Losses as pure functions of per-token tensors.

Enters: (batch, seq) log-probabilities, advantages and a response mask. Leaves: per-token losses, a scalar to differentiate, or
masked sums and means.

What a loss is divided by is decided once for a whole optimizer update (`loss_denominators`), never per micro-batch: the
sum of the micro-batches' losses is then the loss of the batch, however it was cut.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

LengthNormalization = Literal["token_mean", "masked_mean", "masked_normalize"]
LossType = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip"]

MAX_LOG_RATIO = 20.0  # nats that a log-ratio is held to: beyond, exp overflows and its gradient is nan


def masked_normalize(tensor: Tensor, mask: Tensor, normalize_constant: float, dim: int | None = None) -> Tensor:
    """Sum of the elements with `mask == 1`, divided by a constant (the handout, section 4.2).

    Args:
        tensor: any shape.
        mask: the same shape, bool or 0/1. What it leaves out contributes nothing, not even a nan, and has gradient 0.
        normalize_constant: the divisor.
        dim: the dimension summed over; None sums over all of them.

    Returns:
        The normalised sum, without `dim`; a scalar for `dim=None`.
    """
    return _masked_sum(tensor, mask, dim) / normalize_constant


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the elements with `mask == 1` (the handout, section 7.2).

    Args:
        tensor: any shape.
        mask: the same shape, bool or 0/1. What it leaves out contributes nothing, not even a nan.
        dim: the dimension averaged over; None averages over all of them.

    Returns:
        The mean, without `dim`; a scalar for `dim=None`. A mean over no element is nan: there is no such number.
    """
    return _masked_sum(tensor, mask, dim) / mask.bool().sum(dim=dim)


def loss_denominators(
    response_mask: Tensor, *, normalization: LengthNormalization, normalize_constant: float | None = None
) -> Tensor:
    """What each row's summed token losses are divided by, for one optimizer update.

    `token_mean`        every response token of the update weighs the same: the number of them.
    `masked_mean`       every row weighs the same, by the mean over its tokens: its length times the number of rows that
                        have a response token.
    `masked_normalize`  sum over a row's tokens / normalize_constant, averaged over all rows: the constant times the
                        number of rows. With the constant 1 it is the handout's SFT loss.

    Args:
        response_mask: (batch, seq), of the whole update: all its micro-batches, on all its devices.
        normalization: one of the three.
        normalize_constant: for `masked_normalize`, and only there. A configured number, such as the longest response
            allowed; never the padded width, which differs from batch to batch.

    Returns:
        (batch, 1) float64, never 0: a row without a response token has no loss to divide.
    """
    needs_constant = normalization == "masked_normalize"
    assert (normalize_constant is not None) == needs_constant, (normalization, normalize_constant)
    tokens = response_mask.bool().sum(dim=1, keepdim=True).double()  # (batch, 1)
    match normalization:
        case "token_mean":
            return tokens.sum().clamp(min=1).expand_as(tokens)
        case "masked_mean":
            return tokens.clamp(min=1) * (tokens > 0).sum().clamp(min=1)
        case "masked_normalize":
            return torch.full_like(tokens, normalize_constant * len(tokens))  # type: ignore[operator]


def masked_loss(per_token_loss: Tensor, mask: Tensor, denominator: Tensor | float) -> Tensor:
    """Sum over rows and masked tokens of per_token_loss / denominator.

    Args:
        per_token_loss: (batch, seq).
        mask: (batch, seq), the response tokens.
        denominator: a number for all rows, or (batch, 1) with one for each (`loss_denominators`).

    Returns:
        Scalar.
    """
    denominator = torch.as_tensor(denominator, dtype=per_token_loss.dtype, device=per_token_loss.device)
    return _masked_sum(per_token_loss / denominator, mask, None)


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """-A_t log p(o_t | q, o_<t), per token (the handout, equation 32).

    Args:
        raw_rewards_or_advantages: (batch, 1), one per response.
        policy_log_probs: (batch, seq).

    Returns:
        (batch, seq).
    """
    _check_column(raw_rewards_or_advantages, policy_log_probs, name="raw_rewards_or_advantages")
    return -raw_rewards_or_advantages * policy_log_probs


def compute_grpo_clip_loss(
    advantages: Tensor,
    policy_log_probs: Tensor,
    old_log_probs: Tensor,
    cliprange: float,
    *,
    cliprange_high: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(ratio A, clip(ratio, 1 - cliprange, 1 + cliprange_high) A), per token (the handout, equation 33).

    Args:
        advantages: (batch, 1).
        policy_log_probs: (batch, seq), of the policy being trained.
        old_log_probs: (batch, seq), of the policy that the update starts from; no gradient goes through them.
        cliprange: how far the ratio may fall, and rise.
        cliprange_high: how far it may rise when that differs (DAPO's clip-higher).

    Returns:
        The loss, (batch, seq), and, each (batch, seq): `ratio`, and whether the clipped term was the smaller one and so no
        gradient flows, `clipped`, with its two cases `clipped_low` (A < 0) and `clipped_high` (A > 0).
    """
    _check_column(advantages, policy_log_probs, name="advantages")
    ratio = _ratio(policy_log_probs, old_log_probs)
    high = cliprange if cliprange_high is None else cliprange_high
    unclipped, limited = ratio * advantages, ratio.clamp(1 - cliprange, 1 + high) * advantages
    clipped = limited < unclipped
    return -torch.minimum(unclipped, limited), {
        "ratio": ratio.detach(),
        "clipped": clipped,
        "clipped_low": clipped & (advantages < 0),
        "clipped_high": clipped & (advantages > 0),
    }


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    *,
    cliprange_high: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The per-token loss of the type that is asked for (the handout, sections 7.2 and 8).

    Args:
        policy_log_probs: (batch, seq).
        loss_type: `no_baseline` (-r log p), `reinforce_with_baseline` (-A log p), `grpo_clip`, or `grpo_no_clip` (-ratio A).
        raw_rewards: (batch, 1), for `no_baseline`.
        advantages: (batch, 1), for the others.
        old_log_probs: (batch, seq), for `grpo_clip` and `grpo_no_clip`.
        cliprange, cliprange_high: for `grpo_clip`.

    Returns:
        The loss, (batch, seq), and the per-token statistics of `compute_grpo_clip_loss`, or `ratio` alone for `grpo_no_clip`.

    Raises:
        ValueError: an unknown loss type, or one that lacks an argument; names it.
    """

    def needed(name: str, value: Tensor | float | None) -> Any:
        if value is None:
            raise ValueError(f"loss_type {loss_type!r} needs {name}")
        return value

    match loss_type:
        case "no_baseline":
            return compute_naive_policy_gradient_loss(needed("raw_rewards", raw_rewards), policy_log_probs), {}
        case "reinforce_with_baseline":
            return compute_naive_policy_gradient_loss(needed("advantages", advantages), policy_log_probs), {}
        case "grpo_clip":
            return compute_grpo_clip_loss(
                needed("advantages", advantages),
                policy_log_probs,
                needed("old_log_probs", old_log_probs),
                needed("cliprange", cliprange),
                cliprange_high=cliprange_high,
            )
        case "grpo_no_clip":
            ratio = _ratio(policy_log_probs, needed("old_log_probs", old_log_probs))
            return compute_naive_policy_gradient_loss(needed("advantages", advantages), ratio), {
                "ratio": ratio.detach()
            }
    raise ValueError(f"loss_type {loss_type!r} is none of {', '.join(get_args(LossType))}")


def kl_penalty(policy_log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """The k3 estimate of KL(policy || reference), per token: exp(d) - d - 1 with d = log p_ref - log p (Schulman, 2020).

    Never negative, and unbiased for tokens sampled from the policy.

    Args:
        policy_log_probs, reference_log_probs: (batch, seq); no gradient goes through the reference.

    Returns:
        (batch, seq), nats.
    """
    difference = (reference_log_probs.detach() - policy_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def importance_weights(trainer_log_probs: Tensor, sampled_log_probs: Tensor, *, cap: float) -> Tensor:
    """min(p_trainer / p_sampler, cap), per token: corrects for an engine that samples from slightly other numbers.

    Truncated importance sampling (Yao et al., 2025), with the trainer's probabilities before the update. A constant to the
    gradient.

    Args:
        trainer_log_probs, sampled_log_probs: (batch, seq), of the same weights and tokens.
        cap: the largest weight.
    """
    difference = (trainer_log_probs - sampled_log_probs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp().clamp(max=cap)


def _ratio(policy_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    assert policy_log_probs.shape == old_log_probs.shape, (policy_log_probs.shape, old_log_probs.shape)
    return (policy_log_probs - old_log_probs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _check_column(per_response: Tensor, per_token: Tensor, *, name: str) -> None:
    """(batch,) would broadcast along the tokens without a word."""
    if per_response.shape != (len(per_token), 1):
        raise ValueError(f"{name} has shape {tuple(per_response.shape)}, not (batch, 1) = ({len(per_token)}, 1)")


def _masked_sum(tensor: Tensor, mask: Tensor, dim: int | None) -> Tensor:
    """Selects instead of multiplying: 0 x nan is nan."""
    assert tensor.shape == mask.shape, (tensor.shape, mask.shape)
    return tensor.masked_fill(~mask.bool(), 0).sum(dim=dim)
