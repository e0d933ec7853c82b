"""Policy-gradient losses as pure functions of per-token tensors, and `LOSSES`, the table of the values of --loss-type.

Enters: (batch, seq) log-probabilities and advantages. Leaves: per-token losses and statistics.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rlvr_cli.training.losses.inputs import LossInputs, LossOutputs

HandoutLoss = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip"]
MAX_LOG_RATIO = 20.0  # nats; log-ratios are clamped to this: exp of larger ones can overflow, with a gradient of nan


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """-A_t log p(o_t | q, o_<t), per token (the handout, equation 32).

    Args:
        raw_rewards_or_advantages: (batch, 1), one per response; or (batch, seq), one per token.
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
        advantages: (batch, 1), or (batch, seq) with one per token.
        policy_log_probs: (batch, seq), of the policy being trained.
        old_log_probs: (batch, seq), of the policy before the first update on these rollouts; no gradient goes through them.
        cliprange: how far the ratio may fall below 1, and rise above 1.
        cliprange_high: how far the ratio may rise above 1, if different (DAPO's clip-higher).

    Returns:
        The loss, (batch, seq), and these statistics, (batch, seq) each: `ratio`; `clipped`, whether the clipped term was the
        smaller one, so that no gradient flows; and its two cases `clipped_low` (A < 0) and `clipped_high` (A > 0).
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
    loss_type: HandoutLoss,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    *,
    cliprange_high: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the per-token loss of the given type (the handout, sections 7.2 and 8).

    Args:
        policy_log_probs: (batch, seq).
        loss_type: `no_baseline` (-r log p), `reinforce_with_baseline` (-A log p), `grpo_clip`, or `grpo_no_clip` (-ratio A).
        raw_rewards: (batch, 1) or (batch, seq), for `no_baseline`.
        advantages: (batch, 1) or (batch, seq), for the others.
        old_log_probs: (batch, seq), for `grpo_clip` and `grpo_no_clip`.
        cliprange, cliprange_high: for `grpo_clip`.

    Returns:
        The loss, (batch, seq), and the per-token statistics of `compute_grpo_clip_loss`, or `ratio` alone for `grpo_no_clip`.

    Raises:
        ValueError: the loss type is unknown, or an argument that it needs is missing; names it.
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
    raise ValueError(f"loss_type {loss_type!r} is not one of the handout's: {', '.join(get_args(HandoutLoss))}")


@dataclass(frozen=True)
class Loss:
    """A value of --loss-type.

    Attributes:
        function: (LossInputs, the options by keyword) -> LossOutputs.
        formula: (the options by keyword) -> the loss of token t of response i (of response i if `per_row`) as text, for the
            plan; a leading minus applies to the whole formula.
        options: the config fields that `function` and `formula` take as keywords.
        per_row: `function` returns one number per response instead of one per token.
        raw_rewards: `advantages` are the rewards themselves, without a baseline.
        uses_ratio: corrects for off-policy updates by the ratio of new to old probability; on-policy, where every ratio is 1, it
            has the gradient of `reinforce_with_baseline`. None: unknown, a user's own loss.
        skip_zero_advantage: a response with advantage 0 always has a gradient of exactly 0, so that its backward pass can be skipped.
    """

    function: Callable[..., LossOutputs]
    formula: Callable[..., str]
    options: tuple[str, ...] = ()
    per_row: bool = False
    raw_rewards: bool = False
    uses_ratio: bool | None = False
    skip_zero_advantage: bool = False


def _handout_loss(inputs: LossInputs, *, loss_type: HandoutLoss, **options: Any) -> LossOutputs:
    return LossOutputs(
        *compute_policy_gradient_loss(
            inputs.log_probs,
            loss_type,
            raw_rewards=inputs.advantages,
            advantages=inputs.advantages,
            old_log_probs=inputs.old_log_probs,
            **options,
        )
    )


def _clip_formula(*, cliprange: float, cliprange_high: float | None) -> str:
    high = cliprange if cliprange_high is None else cliprange_high
    return f"-min(rho_i,t A_i, clip(rho_i,t, 1-{cliprange:g}, 1+{high:g}) A_i)"


# To add one: its function and its line here, its name (LossType) and its options in config/grpo.py.
LOSSES: dict[str, Loss] = {
    "no_baseline": Loss(
        partial(_handout_loss, loss_type="no_baseline"),
        lambda: "-A_i log p_i,t",
        raw_rewards=True,
        skip_zero_advantage=True,
    ),
    "reinforce_with_baseline": Loss(
        partial(_handout_loss, loss_type="reinforce_with_baseline"), lambda: "-A_i log p_i,t", skip_zero_advantage=True
    ),
    "grpo_clip": Loss(
        partial(_handout_loss, loss_type="grpo_clip"),
        _clip_formula,
        options=("cliprange", "cliprange_high"),
        uses_ratio=True,
        skip_zero_advantage=True,
    ),
    "grpo_no_clip": Loss(
        partial(_handout_loss, loss_type="grpo_no_clip"),
        lambda: "-rho_i,t A_i",
        uses_ratio=True,
        skip_zero_advantage=True,
    ),
}


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
    """min(p_trainer / p_sampler, cap), per token: corrects for the sampler's slightly different probabilities.

    Truncated importance sampling (Yao et al., 2025), with the trainer's probabilities before the update. No gradient goes
    through the weights.

    Args:
        trainer_log_probs, sampled_log_probs: (batch, seq), of the same tokens.
        cap: the largest weight.
    """
    difference = (trainer_log_probs - sampled_log_probs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp().clamp(max=cap)


def _ratio(policy_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    assert policy_log_probs.shape == old_log_probs.shape, (policy_log_probs.shape, old_log_probs.shape)
    return (policy_log_probs - old_log_probs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _check_column(per_response: Tensor, per_token: Tensor, *, name: str) -> None:
    """Raise ValueError for other shapes: (batch,) would silently broadcast along the tokens."""
    if per_response.shape not in ((len(per_token), 1), per_token.shape):
        raise ValueError(
            f"{name} has shape {tuple(per_response.shape)}, not (batch, 1) = ({len(per_token)}, 1), "
            f"nor (batch, seq) = {tuple(per_token.shape)}"
        )
