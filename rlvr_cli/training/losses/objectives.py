"""Objectives: `LossInputs` -> per-token or per-row loss and statistics, and their reduction to a scalar and to metrics."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rlvr_cli.training.losses.inputs import LossInputs, LossOutputs
from rlvr_cli.training.losses.normalization import masked_loss
from rlvr_cli.training.losses.policy_gradient import KL_TYPES, importance_weights, kl_penalty

Objective = Callable[[LossInputs], LossOutputs]


def negative_log_likelihood(inputs: LossInputs) -> LossOutputs:
    """The objective of supervised fine-tuning, -log p of each token."""
    return LossOutputs(-inputs.log_probs)


def policy_gradient(
    inputs: LossInputs,
    *,
    loss: Objective,
    kl_coef: float = 0.0,
    kl_type: str = "k3",
    importance_cap: float | None = None,
    importance_floor: float = 0.0,
    importance_masked: bool = False,
    min_tokens: int = 0,
) -> LossOutputs:
    """The objective of GRPO and its relatives; bind the keywords with functools.partial.

    Log-probabilities outside the mask are set to 0 first, so that nothing there reaches the loss, its gradient or a statistic.

    Args:
        inputs: with `advantages`, `sampled_log_probs`, and, if `kl_coef` is not 0, `reference_log_probs`.
        loss: the function of one of `LOSSES` with its options bound, or a user's own.
        kl_coef: weight of the KL penalty, which is added to the loss: per token, or as the response's mean for a loss per row.
        kl_type: one of `KL_TYPES`.
        importance_cap, importance_floor, importance_masked: if the cap is given, each token's loss is multiplied by
            `importance_weights`. Not for a loss per row.
        min_tokens: the sampler lets no response, and no turn of an episode, end before so many tokens, so that it draws those from
            another distribution.

    Returns:
        The loss and its statistics, with these added: `ratio` (new / old), `mismatch` (the trainer's old log-probability minus
        the sampler's), `length` of the response (tokens), `early` (a token among the first `min_tokens` of its turn), `position` in the
        response, of an early token in its turn, and, where they apply, `stale`, `importance_weight` and `kl`, which is `kl_penalty`
        whatever the type.
    """
    inputs = _without_values_outside(inputs)
    outputs = loss(inputs)
    value, statistics = outputs.loss, dict(outputs.statistics)
    old, sampled, mask = inputs.old_log_probs, inputs.sampled_log_probs, inputs.response_mask
    assert sampled is not None
    statistics.setdefault("ratio", (inputs.log_probs.detach() - old).exp())
    statistics["mismatch"] = old - sampled
    if inputs.stale is not None:
        statistics["stale"] = inputs.stale
    position = mask.cumsum(dim=1) - 1
    in_turn = position - (position + 1).masked_fill(mask, 0).cummax(dim=1).values
    statistics["early"] = in_turn < min_tokens
    statistics["position"] = torch.where(statistics["early"], in_turn, position)
    statistics["length"] = mask.sum(dim=1, keepdim=True).expand_as(mask)
    if importance_cap is not None:
        assert value.dim() == 2, "importance weights are per token"
        weights = importance_weights(old, sampled, cap=importance_cap, floor=importance_floor, masked=importance_masked)
        value = weights * value
        statistics["importance_weight"] = weights
    if kl_coef:
        assert inputs.reference_log_probs is not None
        kl = KL_TYPES[kl_type].function(inputs.log_probs, old, inputs.reference_log_probs)
        value = value + kl_coef * (
            kl if value.dim() == 2 else kl.masked_fill(~mask, 0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        )
        statistics["kl"] = kl_penalty(inputs.log_probs.detach(), inputs.reference_log_probs)
    return LossOutputs(value, statistics)


def _without_values_outside(inputs: LossInputs) -> LossInputs:
    """The inputs with log-probabilities of 0 outside the mask: an arbitrary value there, times 0, may be nan."""
    names = (
        "log_probs",
        "old_log_probs",
        "sampled_log_probs",
        "reference_log_probs",
        "teacher_log_probs",
        "divergence",
    )
    found = {name: getattr(inputs, name) for name in names}
    return replace(inputs, **{k: v.masked_fill(~inputs.response_mask, 0) for k, v in found.items() if v is not None})


def reduced_loss(loss: Tensor, mask: Tensor, *, denominators: Tensor, num_rows: float) -> Tensor:
    """Reduce a micro-batch's loss to a scalar, its share of the update's loss.

    Args:
        loss: (batch, seq): summed over the mask's tokens, each divided by its row's denominator; or (batch,): summed and
            divided by `num_rows`.
        mask: (batch, seq), the response tokens.
        denominators: (batch, 1), see `loss_denominators`.
        num_rows: divisor of a loss per row: the rows of the whole update, over all micro-batches.
    """
    if loss.dim() == 1:
        assert len(loss) == len(mask), (loss.shape, mask.shape)
        return loss.sum() / num_rows
    return masked_loss(loss, mask, denominators.to(loss.device))


def statistics_at(statistics: Mapping[str, Tensor], positions: Tensor) -> dict[str, Tensor]:
    """Detached values of statistics: for one per token those at `positions`, indices into rows x width; for one per row all."""
    return {
        name: values.detach().flatten()[positions] if values.dim() == 2 else values.detach()
        for name, values in statistics.items()
    }


def token_metrics(statistics: Mapping[str, Tensor]) -> dict[str, float]:
    """Turn an objective's statistics, (tokens,) or (rows,) each, into metrics of the update.

    Returns:
        `policy/NAME_mean` for each statistic, or NAME alone if it has a slash, except for those of `policy_gradient` and of the
        handout's losses:
        `policy/ratio_mean`, `_min`, `_p01`, `_p99`, `_max`; `policy/clip_fraction`, `_low`, `_high`; `policy/kl`;
        `mismatch/logprob_mean_abs` and `_max_abs`, |trainer - sampler| in nats; `mismatch/ratio_mean`, `_min`, `_p01`, `_p99`,
        `_max`, trainer over sampler; `mismatch/importance_weight_mean`; the mean |trainer - sampler| of the tokens at
        positions 0, 1 to 3, 4 to 15, ... as `mismatch/position/0`, `/1`, `/4`, ...; and of the tokens in responses of
        1 to 3, 4 to 15, ... tokens as `mismatch/length/1`, `/4`, ... These, but for the importance weights, are of the tokens that
        the same policy sampled from the same distribution, if there are any: not of `stale` ones, and, but for the means by
        position, not of `early` ones. `sampling/stale_share` is the share of the stale ones.
    """
    metrics: dict[str, float] = {}
    gaps = {name: statistics[name] for name in ("mismatch", "position", "length", "early") if name in statistics}
    if (stale := statistics.get("stale")) is not None:
        gaps = {name: values[~stale.bool()] for name, values in gaps.items()}
    if len(gaps.get("position", ())):
        means = _means_by_size(gaps["mismatch"].abs(), gaps["position"])
        metrics |= {f"mismatch/position/{start}": mean for start, mean in means.items()}
    if (early := gaps.pop("early", None)) is not None:
        gaps = {name: values[~early.bool()] for name, values in gaps.items()}
    if len(gaps.get("length", ())):
        means = _means_by_size(gaps["mismatch"].abs(), gaps["length"])
        metrics |= {f"mismatch/length/{start}": mean for start, mean in means.items()}
    for name, values in statistics.items():
        match name:
            case "ratio":
                metrics |= {f"policy/ratio_{k}": v for k, v in _spread(values).items()}
            case "mismatch" if len(gaps["mismatch"]):
                metrics["mismatch/logprob_mean_abs"] = float(gaps["mismatch"].abs().mean())
                metrics["mismatch/logprob_max_abs"] = float(gaps["mismatch"].abs().max())
                metrics |= {f"mismatch/ratio_{k}": v for k, v in _spread(gaps["mismatch"].exp()).items()}
            case "stale":
                metrics["sampling/stale_share"] = float(values.double().mean())
            case "importance_weight":
                metrics["mismatch/importance_weight_mean"] = float(values.mean())
            case "kl":
                metrics["policy/kl"] = float(values.mean())
            case "clipped" | "clipped_low" | "clipped_high":
                metrics[f"policy/{name.replace('clipped', 'clip_fraction')}"] = float(values.double().mean())
            case "mismatch" | "position" | "length" | "early":
                pass
            case _:
                metrics[name if "/" in name else f"policy/{name}_mean"] = float(values.double().mean())
    return metrics


def _spread(values: Tensor) -> dict[str, float]:
    """Mean and quantiles, computed by sorting: torch.quantile takes at most 2**24 values."""
    ordered = values.flatten().double().sort().values
    last = len(ordered) - 1
    places = {"min": 0.0, "p01": 0.01, "p99": 0.99, "max": 1.0}
    return {"mean": float(ordered.mean())} | {k: float(ordered[round(q * last)]) for k, q in places.items()}


def _means_by_size(values: Tensor, sizes: Tensor) -> dict[int, float]:
    """The mean of `values` in each bucket of `sizes`, by the bucket's start: 0, then powers of four."""
    means, start, end = {}, 0, 1
    while start <= int(sizes.max()):
        inside = (sizes >= start) & (sizes < end)
        if inside.any():
            means[start] = float(values[inside].mean())
        start, end = end, end * 4
    return means
