"""What is minimized: log-probabilities and a batch -> per-token loss and statistics, and the metrics made of these."""

from collections.abc import Callable, Mapping

from torch import Tensor

from rlvr_cli.models.tokenization import Batch
from rlvr_cli.training.losses.policy_gradient import (
    LossType,
    compute_policy_gradient_loss,
    importance_weights,
    kl_penalty,
)

# (log-probabilities (batch, seq), the batch) -> per-token loss (batch, seq) and named per-token statistics of that shape
Objective = Callable[[Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]


def negative_log_likelihood(log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective of supervised fine-tuning, -log p of each token."""
    return -log_probs, {}


def policy_gradient(
    log_probs: Tensor,
    batch: Batch,
    *,
    loss_type: LossType,
    cliprange: float | None = None,
    cliprange_high: float | None = None,
    kl_coef: float = 0.0,
    importance_cap: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective of GRPO and its relatives; bind the keywords with functools.partial.

    Args:
        log_probs: (batch, seq), of the policy being trained.
        batch: `advantages` (batch, 1), which for `no_baseline` are the raw rewards; `sampled_log_probs` (batch, seq), the
            sampler's; `old_log_probs` (batch, seq), the trainer's before the first update on these rollouts, where there was
            one: without them this is that update and they are `log_probs` itself, so that every ratio is exactly 1;
            `reference_log_probs` (batch, seq) with a `kl_coef`.
        loss_type, cliprange, cliprange_high: see `losses.compute_policy_gradient_loss`.
        kl_coef: times `losses.kl_penalty`, added to each token's loss; 0 needs no reference.
        importance_cap: multiplies each token's loss by `losses.importance_weights`; None does not.

    Returns:
        The per-token loss and statistics: `ratio` (new / old), `mismatch` (trainer's old minus sampler's log-probability),
        `position` in the response and its `length` (tokens), and, where they apply, `clipped`, `clipped_low`,
        `clipped_high`, `importance_weight`, `kl`.
    """
    old = batch.get("old_log_probs", log_probs.detach())
    loss, statistics = compute_policy_gradient_loss(
        log_probs,
        loss_type,
        raw_rewards=batch["advantages"],
        advantages=batch["advantages"],
        old_log_probs=old,
        cliprange=cliprange,
        cliprange_high=cliprange_high,
    )
    statistics.setdefault("ratio", (log_probs.detach() - old).exp())
    statistics["mismatch"] = old - batch["sampled_log_probs"]
    mask = batch["response_mask"]
    statistics["position"] = mask.cumsum(dim=1) - 1
    statistics["length"] = mask.sum(dim=1, keepdim=True).expand_as(mask)
    if importance_cap is not None:
        weights = importance_weights(old, batch["sampled_log_probs"], cap=importance_cap)
        loss = weights * loss
        statistics["importance_weight"] = weights
    if kl_coef:
        kl = kl_penalty(log_probs, batch["reference_log_probs"])
        loss = loss + kl_coef * kl
        statistics["kl"] = kl.detach()
    return loss, statistics


def token_metrics(statistics: Mapping[str, Tensor]) -> dict[str, float]:
    """Metrics over an update's response tokens from the statistics of `policy_gradient`, (tokens,) each.

    Returns:
        `policy/ratio_mean`, `_min`, `_p01`, `_p99`, `_max`; `policy/clip_fraction`, `_low`, `_high`; `policy/kl`;
        `mismatch/logprob_mean_abs` and `_max_abs`, |trainer - sampler| in nats; `mismatch/ratio_mean`, `_p01`, `_p99`, `_max`,
        trainer over sampler; `mismatch/importance_weight_mean`; and the mean |trainer - sampler| of the tokens at positions 0,
        1 to 3, 4 to 15, ... as `mismatch/position/0`, `/1`, `/4`, `/16`, ..., and of those in responses of 1 to 3, 4 to 15, ...
        tokens as `mismatch/length/1`, `/4`, ...
    """
    metrics: dict[str, float] = {}
    for name, values in statistics.items():
        match name:
            case "ratio":
                metrics |= {f"policy/ratio_{k}": v for k, v in _spread(values).items()}
            case "mismatch":
                metrics["mismatch/logprob_mean_abs"] = float(values.abs().mean())
                metrics["mismatch/logprob_max_abs"] = float(values.abs().max())
                metrics |= {f"mismatch/ratio_{k}": v for k, v in _spread(values.exp()).items()}
                for where in statistics.keys() & {"position", "length"}:
                    means = _means_by_size(values.abs(), statistics[where])
                    metrics |= {f"mismatch/{where}/{start}": mean for start, mean in means.items()}
            case "importance_weight":
                metrics["mismatch/importance_weight_mean"] = float(values.mean())
            case "kl":
                metrics["policy/kl"] = float(values.mean())
            case "clipped" | "clipped_low" | "clipped_high":
                metrics[f"policy/{name.replace('clipped', 'clip_fraction')}"] = float(values.double().mean())
    return metrics


def _spread(values: Tensor) -> dict[str, float]:
    """Mean and quantiles. Not torch.quantile, which takes at most 2**24 values."""
    ordered = values.flatten().double().sort().values
    last = len(ordered) - 1
    places = {"min": 0.0, "p01": 0.01, "p99": 0.99, "max": 1.0}
    return {"mean": float(ordered.mean())} | {k: float(ordered[round(q * last)]) for k, q in places.items()}


def _means_by_size(values: Tensor, sizes: Tensor) -> dict[int, float]:
    """The mean of `values` in each bucket of `sizes`: 0, then powers of four, named by where they start."""
    means, start, end = {}, 0, 1
    while start <= int(sizes.max()):
        inside = (sizes >= start) & (sizes < end)
        if inside.any():
            means[start] = float(values[inside].mean())
        start, end = end, end * 4
    return means
