"""Policy-gradient losses as pure functions of per-token tensors; the tables `LOSSES` (--loss-type) and `KL_TYPES` (--kl-type).

Enters: (batch, seq) log-probabilities and advantages. Leaves: per-token losses and statistics.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rlvr_cli.config.shared.optimization import LengthNormalization
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
    high = cliprange if cliprange_high is None else cliprange_high
    return _clipped_loss(_ratio(policy_log_probs, old_log_probs), advantages, low=cliprange, high=high)


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


def compute_gspo_loss(
    advantages: Tensor,
    policy_log_probs: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    *,
    low: float,
    high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(s A, clip(s, 1 - low, 1 + high) A), per token, with the ratio s of whole responses (Zheng et al., 2025, GSPO-token).

    s_i is the geometric mean of the ratios of response i's tokens. Each token has the value s_i and the gradient of its own
    log-probability, s_i,t = s_i p_i,t / p_i,t whose s_i and denominator have no gradient: under `masked_mean`, and only there,
    the sum over the tokens has the gradient of GSPO's loss per response.

    Args:
        advantages: (batch, 1), or (batch, seq) with one per token.
        policy_log_probs, old_log_probs: (batch, seq); no gradient goes through the latter.
        response_mask: (batch, seq) bool; values outside it are not read.
        low, high: how far s may fall below 1, and rise above 1.

    Returns:
        As `compute_grpo_clip_loss`; `ratio` is s_i at each token.
    """
    _check_column(advantages, policy_log_probs, name="advantages")
    new = policy_log_probs.masked_fill(~response_mask, 0)
    log_ratio = (new - old_log_probs).detach().masked_fill(~response_mask, 0)
    mean = log_ratio.sum(dim=1, keepdim=True) / response_mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * (new - new.detach()).exp()
    return _clipped_loss(ratio, advantages, low=low, high=high)


def compute_cispo_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, *, cap: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(ratio, cap) A log p, per token, with no gradient through the ratio (MiniMax-M1, 2025, equation 4).

    A token whose ratio is above the cap keeps its gradient, with the weight `cap`.

    Args:
        advantages: (batch, 1), or (batch, seq) with one per token.
        policy_log_probs, old_log_probs: (batch, seq).
        cap: the largest weight, itself a ratio: 5 and not 4 lets weights grow to 5.

    Returns:
        The loss, (batch, seq), and these statistics, (batch, seq) each: `ratio`, and `clipped`, whether it is above the cap.
    """
    _check_column(advantages, policy_log_probs, name="advantages")
    ratio = _ratio(policy_log_probs, old_log_probs).detach()
    weights = ratio.clamp(max=cap)
    return -weights * advantages * policy_log_probs, {"ratio": ratio, "clipped": ratio > cap}


def compute_kimi_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor, *, tau: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-(sum_t A log p - tau/2 D^2), per response, with D = sum_t log(p / p_old) (Kimi k1.5, 2025, section 2.3.2).

    This has the gradient of the squared residual (A - tau D)^2 / (2 tau) of the optimum of E[r] - tau KL(p || p_old), where the
    mean reward stands for tau log Z.

    Args:
        advantages: (batch, 1), r - mean(r); or (batch, seq) with one per token.
        policy_log_probs, old_log_probs: (batch, seq); no gradient goes through the latter.
        response_mask: (batch, seq) bool; values outside it are not read.
        tau: the weight of the KL divergence to the policy that the batch began with.

    Returns:
        The loss, (batch,), and the statistic `drift`, D, (batch,).
    """
    _check_column(advantages, policy_log_probs, name="advantages")
    weighted = (advantages * policy_log_probs).masked_fill(~response_mask, 0).sum(dim=1)
    drift = (policy_log_probs - old_log_probs.detach()).masked_fill(~response_mask, 0).sum(dim=1)
    return -(weighted - tau / 2 * drift**2), {"drift": drift.detach()}


def clip_range(
    cliprange: float | None, cliprange_high: float | None, *, default: tuple[float, float]
) -> tuple[float, float]:
    """Return how far a ratio may fall below 1 and rise above 1: the given ranges, else the loss's own."""
    low, high = default if cliprange is None else (cliprange, cliprange)
    return low, high if cliprange_high is None else cliprange_high


@dataclass(frozen=True)
class Loss:
    """A value of --loss-type.

    Attributes:
        function: (LossInputs, the options by keyword) -> LossOutputs.
        formula: (the options by keyword) -> the loss of token t of response i (of response i if `per_row`) as text, for the
            plan; a leading minus applies to the whole formula.
        where: what the symbols of `formula` mean; empty if it has none of its own.
        options: the config fields that `function` and `formula` take as keywords.
        per_row: `function` returns one number per response instead of one per token.
        raw_rewards: `advantages` are the rewards themselves, without a baseline.
        uses_ratio: corrects for off-policy updates by the ratio of new to old probability; on-policy, where every ratio is 1, it
            has the gradient of `reinforce_with_baseline` (if `per_row`, of the mean over the rows of its sum over their tokens).
            None: unknown, a user's own loss.
        clip_range: its default ranges below and above 1; None if it does not clip ratios to a range.
        length_normalization: the only one with which the loss is what its source defines; None: any.
        skip_zero_advantage: a response with advantage 0 always has a gradient of exactly 0, so that its backward pass can be skipped.
    """

    function: Callable[..., LossOutputs]
    formula: Callable[..., str]
    where: str = ""
    options: tuple[str, ...] = ()
    per_row: bool = False
    raw_rewards: bool = False
    uses_ratio: bool | None = False
    skip_zero_advantage: bool = False
    clip_range: tuple[float, float] | None = None
    length_normalization: LengthNormalization | None = None


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


CLIP_RANGE = (0.2, 0.2)  # the handout's example
GSPO_CLIP_RANGE = (3e-4, 4e-4)  # section 5.1 of its paper


def _grpo_clip(
    inputs: LossInputs, *, cliprange: float | None = None, cliprange_high: float | None = None
) -> LossOutputs:
    low, high = clip_range(cliprange, cliprange_high, default=CLIP_RANGE)
    return _handout_loss(inputs, loss_type="grpo_clip", cliprange=low, cliprange_high=high)


def _gspo(inputs: LossInputs, *, cliprange: float | None = None, cliprange_high: float | None = None) -> LossOutputs:
    assert inputs.advantages is not None
    low, high = clip_range(cliprange, cliprange_high, default=GSPO_CLIP_RANGE)
    tensors = (inputs.advantages, inputs.log_probs, inputs.old_log_probs, inputs.response_mask)
    return LossOutputs(*compute_gspo_loss(*tensors, low=low, high=high))


def _cispo(inputs: LossInputs, *, cispo_cap: float) -> LossOutputs:
    assert inputs.advantages is not None
    return LossOutputs(*compute_cispo_loss(inputs.advantages, inputs.log_probs, inputs.old_log_probs, cap=cispo_cap))


def _kimi(inputs: LossInputs, *, kimi_tau: float) -> LossOutputs:
    assert inputs.advantages is not None
    tensors = (inputs.advantages, inputs.log_probs, inputs.old_log_probs, inputs.response_mask)
    return LossOutputs(*compute_kimi_loss(*tensors, tau=kimi_tau))


def _clip_formula(
    ratio: str, default: tuple[float, float], *, cliprange: float | None, cliprange_high: float | None
) -> str:
    low, high = clip_range(cliprange, cliprange_high, default=default)
    return f"-min({ratio} A_i, clip({ratio}, 1-{low:g}, 1+{high:g}) A_i)"


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
        _grpo_clip,
        partial(_clip_formula, "rho_i,t", CLIP_RANGE),
        where="rho = p/p_old",
        options=("cliprange", "cliprange_high"),
        uses_ratio=True,
        skip_zero_advantage=True,
        clip_range=CLIP_RANGE,
    ),
    "grpo_no_clip": Loss(
        partial(_handout_loss, loss_type="grpo_no_clip"),
        lambda: "-rho_i,t A_i",
        where="rho = p/p_old",
        uses_ratio=True,
        skip_zero_advantage=True,
    ),
    "gspo": Loss(
        _gspo,
        partial(_clip_formula, "s_i,t", GSPO_CLIP_RANGE),
        where="s_i,t = (p_i/p_old,i)^(1/|o_i|), with the gradient of s_i log p_i,t",
        options=("cliprange", "cliprange_high"),
        uses_ratio=True,
        skip_zero_advantage=True,
        clip_range=GSPO_CLIP_RANGE,
        length_normalization="masked_mean",
    ),
    "cispo": Loss(
        _cispo,
        lambda *, cispo_cap: f"-min(rho_i,t, {cispo_cap:g}) A_i log p_i,t",
        where="rho = p/p_old, with no gradient through the min",
        options=("cispo_cap",),
        uses_ratio=True,
        skip_zero_advantage=True,
    ),
    "kimi": Loss(
        _kimi,
        lambda *, kimi_tau: f"-(A_i log p_i - ({kimi_tau:g}/2) (log p_i - log p_old,i)^2)",
        where="p_i = prod_t p_i,t",
        options=("kimi_tau",),
        per_row=True,
        uses_ratio=True,
    ),
}


def kl_penalty(policy_log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """The k3 estimate of KL(policy || reference), per token: exp(d) - d - 1 with d = log p_ref - log p (Schulman, 2020).

    Never negative, and unbiased for tokens sampled from the policy. Its gradient is another matter: see `KL_TYPES`.

    Args:
        policy_log_probs, reference_log_probs: (batch, seq); no gradient goes through the reference.

    Returns:
        (batch, seq), nats.
    """
    difference = _difference(reference_log_probs.detach(), policy_log_probs)
    return torch.expm1(difference) - difference


def _k2(log_probs: Tensor, old_log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    return _difference(reference_log_probs.detach(), log_probs) ** 2 / 2


def _k3(log_probs: Tensor, old_log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    return kl_penalty(log_probs, reference_log_probs)


def _unbiased(log_probs: Tensor, old_log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    return _ratio(log_probs, old_log_probs) * kl_penalty(log_probs, reference_log_probs)


@dataclass(frozen=True)
class KlType:
    """A value of --kl-type: a term of each token's loss that keeps the policy near the reference.

    Attributes:
        function: (log_probs, old_log_probs, reference_log_probs), (batch, seq) each -> the term, (batch, seq).
        name: the term in the plan's formula.
        formula: the term as text.
        descends: the divergence whose gradient the term's has as its expectation over tokens that the policy samples, at
            each prefix. Exact enumeration shows it; the value of the estimate does not.
    """

    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    name: str
    formula: str
    descends: str


KL_TYPES: dict[str, KlType] = {
    "k3": KlType(_k3, "k3(p_ref, p)", "exp(d) - d - 1, d = log p_ref - log p", "KL(p_ref || p)"),
    "k2": KlType(_k2, "k2(p_ref, p)", "d^2/2, d = log p_ref - log p", "KL(p || p_ref)"),
    "unbiased": KlType(_unbiased, "rho k3(p_ref, p)", "rho (exp(d) - d - 1), rho = p/p_old", "KL(p || p_ref)"),
}


def importance_weights(
    trainer_log_probs: Tensor, sampled_log_probs: Tensor, *, cap: float, floor: float = 0.0, masked: bool = False
) -> Tensor:
    """Weights per token, of the ratio p_trainer / p_sampler: they correct for the sampler's slightly different probabilities.

    The ratio is cut to `floor` and `cap` (truncated importance sampling; Yao et al., 2025); or, if `masked`, tokens whose ratio
    is outside them have the weight 0 (IcePop; Ling team, 2025). With the trainer's probabilities before the update; no gradient
    goes through the weights.

    Args:
        trainer_log_probs, sampled_log_probs: (batch, seq), of the same tokens.
        cap, floor: the largest and the smallest ratio.
    """
    ratio = _difference(trainer_log_probs, sampled_log_probs).detach().exp()
    if masked:
        return ratio.masked_fill((ratio < floor) | (ratio > cap), 0)
    return ratio.clamp(min=floor, max=cap)


def _clipped_loss(ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A), (batch, seq), with the statistics of `compute_grpo_clip_loss`."""
    unclipped, limited = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    clipped = limited < unclipped
    return -torch.minimum(unclipped, limited), {
        "ratio": ratio.detach(),
        "clipped": clipped,
        "clipped_low": clipped & (advantages < 0),
        "clipped_high": clipped & (advantages > 0),
    }


def _ratio(policy_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    assert policy_log_probs.shape == old_log_probs.shape, (policy_log_probs.shape, old_log_probs.shape)
    return _difference(policy_log_probs, old_log_probs.detach()).exp()


def _difference(log_probs: Tensor, others: Tensor) -> Tensor:
    """log_probs - others, cut to +-MAX_LOG_RATIO."""
    return (log_probs - others).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _check_column(per_response: Tensor, per_token: Tensor, *, name: str) -> None:
    """Raise ValueError for other shapes: (batch,) would silently broadcast along the tokens."""
    if per_response.shape not in ((len(per_token), 1), per_token.shape):
        raise ValueError(
            f"{name} has shape {tuple(per_response.shape)}, not (batch, 1) = ({len(per_token)}, 1), "
            f"nor (batch, seq) = {tuple(per_token.shape)}"
        )
