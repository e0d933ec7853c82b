"""What is minimized: `LossInputs` -> per-token or per-row loss and statistics; the scalar, and the metrics, made of these."""

from collections.abc import Callable, Mapping

from torch import Tensor

from rlvr_cli.training.losses.inputs import LossInputs, LossOutputs
from rlvr_cli.training.losses.normalization import masked_loss
from rlvr_cli.training.losses.policy_gradient import importance_weights, kl_penalty

Objective = Callable[[LossInputs], LossOutputs]


def negative_log_likelihood(inputs: LossInputs) -> LossOutputs:
    """The objective of supervised fine-tuning, -log p of each token."""
    return LossOutputs(-inputs.log_probs)


def policy_gradient(
    inputs: LossInputs, *, loss: Objective, kl_coef: float = 0.0, importance_cap: float | None = None
) -> LossOutputs:
    """The objective of GRPO and its relatives; bind the keywords with functools.partial.

    Args:
        inputs: with `advantages`, `sampled_log_probs`, and, for a `kl_coef`, `reference_log_probs`.
        loss: the function of one of `LOSSES` with its options bound, or a user's own.
        kl_coef: times `kl_penalty`, added to each token's loss, or its mean over the response to the response's loss; 0 needs
            no reference.
        importance_cap: multiplies each token's loss by `importance_weights`; None does not. Not for a loss per row.

    Returns:
        The loss, and beside its own statistics: `ratio` (new / old), `mismatch` (trainer's old minus sampler's log-probability),
        `position` in the response and its `length` (tokens), and, where they apply, `importance_weight`, `kl`.
    """
    outputs = loss(inputs)
    value, statistics = outputs.loss, dict(outputs.statistics)
    old, sampled, mask = inputs.old_log_probs, inputs.sampled_log_probs, inputs.response_mask
    assert sampled is not None
    statistics.setdefault("ratio", (inputs.log_probs.detach() - old).exp())
    statistics["mismatch"] = old - sampled
    statistics["position"] = mask.cumsum(dim=1) - 1
    statistics["length"] = mask.sum(dim=1, keepdim=True).expand_as(mask)
    if importance_cap is not None:
        assert value.dim() == 2, "importance weights are per token"
        weights = importance_weights(old, sampled, cap=importance_cap)
        value = weights * value
        statistics["importance_weight"] = weights
    if kl_coef:
        assert inputs.reference_log_probs is not None
        kl = kl_penalty(inputs.log_probs, inputs.reference_log_probs)
        value = value + kl_coef * (
            kl if value.dim() == 2 else kl.masked_fill(~mask, 0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        )
        statistics["kl"] = kl.detach()
    return LossOutputs(value, statistics)


def reduced_loss(loss: Tensor, mask: Tensor, *, denominators: Tensor, num_rows: int) -> Tensor:
    """What a micro-batch adds to the update's loss, a scalar.

    Args:
        loss: (batch, seq), of which the tokens of the mask are summed, each divided by its row's denominator; or (batch,), which
            is summed and divided by the number of rows.
        mask: (batch, seq), the response tokens.
        denominators: (batch, 1), see `losses.loss_denominators`.
        num_rows: of the whole update, all its micro-batches together.
    """
    if loss.dim() == 1:
        assert len(loss) == len(mask), (loss.shape, mask.shape)
        return loss.sum() / num_rows
    return masked_loss(loss, mask, denominators.to(loss.device))


def observed(statistics: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """The values of statistics where they count, flat and without a graph: those of the mask's tokens, or those of all rows."""
    return {
        name: values.detach()[mask] if values.dim() == 2 else values.detach() for name, values in statistics.items()
    }


def token_metrics(statistics: Mapping[str, Tensor]) -> dict[str, float]:
    """Metrics over an update's response tokens, or its rows, from the statistics of an objective, (tokens,) or (rows,) each.

    Returns:
        `policy/NAME_mean`, but for the names that `policy_gradient` and the handout's losses give:
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
            case "position" | "length":
                pass
            case _:
                metrics[f"policy/{name}_mean"] = float(values.double().mean())
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
