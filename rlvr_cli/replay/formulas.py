"""The definitions of docs/algorithms.md, written a second time: row by row, in float64, as the formulas are printed there.

Enters: numbers and the log-probabilities of one response. Leaves: orders, learning rates, advantages and losses. Nothing here
may share code with `data.order` or with the room `training`: that the two agree is what a replay shows.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MOST = 20.0  # nats: differences of log-probabilities are cut to +- this before they are exponentiated


def order(count: int, *, seed: int, epoch: int) -> list[int]:
    """The order of `count` items in an epoch: by the 16-byte BLAKE2b of "SEED/EPOCH/INDEX"."""
    digests = [
        hashlib.blake2b(b"%d/%d/%d" % (seed, epoch, index), digest_size=16).hexdigest() for index in range(count)
    ]
    return [index for _, index in sorted(zip(digests, range(count), strict=True))]


def minibatches(count: int, *, size: int, seed: int, epochs: Sequence[int]) -> list[list[int]]:
    """The items of each update: every epoch is put in order and cut into pieces of `size`; its last one may be smaller."""
    found = []
    for epoch in epochs:
        remaining = order(count, seed=seed, epoch=epoch)
        while remaining:
            found.append(remaining[:size])
            remaining = remaining[size:]
    return found


def learning_rate(update: int, options: Mapping[str, Any], *, num_updates: int) -> float:
    """The learning rate of an update, counted from 0: k/w of the peak in the k-th of w updates of warm-up, then the schedule."""
    peak, warm_up = options["learning_rate"], options["warmup_steps"]
    if update + 1 <= warm_up:
        return (update + 1) / warm_up * peak
    if options["lr_schedule"] == "constant":
        return peak
    falling = max(num_updates - 1 - warm_up, 1)  # updates over which the cosine falls from 1 to 0.1
    return peak * (0.55 + 0.45 * math.cos(math.pi * min(update - warm_up, falling) / falling))


def advantages(rewards: Sequence[float], lengths: Sequence[int], options: Mapping[str, Any]) -> list[float]:
    """The advantages of one group of responses; the raw rewards without a baseline. Overlong responses are punished first."""
    if options["overlong"] == "soft_punish":
        limit = options["sampling_max_tokens"]
        buffer = options["overlong_buffer"] or max(limit // 5, 1)
        rewards = [r - min(max(n - (limit - buffer), 0) / buffer, 1.0) for r, n in zip(rewards, lengths, strict=True)]
    if options["loss_type"] == "no_baseline":
        return list(rewards)
    if max(rewards) == min(rewards):
        return [0.0 for _ in rewards]
    mean = math.fsum(rewards) / len(rewards)
    deviations = [r - mean for r in rewards]
    if not options["use_std_normalization"]:
        return deviations
    variance = math.fsum(d * d for d in deviations) / (len(rewards) - 1)
    return [d / (math.sqrt(variance) + options["advantage_eps"]) for d in deviations]


def divisors(token_counts: Sequence[int], *, normalization: str, constant: float) -> list[float]:
    """What the summed loss of each response of an update is divided by, of the numbers of tokens that are trained on."""
    if normalization == "token_mean":
        return [float(sum(token_counts))] * len(token_counts)
    if normalization == "masked_normalize":
        return [constant * len(token_counts)] * len(token_counts)
    return [float(count * sum(1 for n in token_counts if n)) for count in token_counts]


def policy_gradient_loss(
    new: Tensor,
    options: Mapping[str, Any],
    *,
    advantage: float,
    old: Tensor,
    sampled: Tensor,
    reference: Tensor | None,
) -> Tensor:
    """The loss of each token of a response.

    Args:
        new: (tokens,) log-probabilities under the policy being trained.
        options: of `rlvr grpo`.
        old, sampled, reference: (tokens,) log-probabilities of the policy before the first update on the batch, of the
            sampler, and of the first weights.
    """
    ratio = torch.exp(torch.clamp(new - old, -MOST, MOST))
    match options["loss_type"]:
        case "no_baseline" | "reinforce_with_baseline":
            loss = -advantage * new
        case "grpo_no_clip":
            loss = -ratio * advantage
        case "grpo_clip":
            above = options["cliprange"] if options["cliprange_high"] is None else options["cliprange_high"]
            inside = torch.clamp(ratio, 1 - options["cliprange"], 1 + above)
            loss = -torch.minimum(ratio * advantage, inside * advantage)
        case other:
            raise AssertionError(other)
    correction = options["importance_correction"]
    if correction == "truncated" or (correction == "auto" and options["async_steps"] == 1):
        weight = torch.exp(torch.clamp(old - sampled, -MOST, MOST))
        loss = torch.clamp(weight, max=options["importance_cap"]) * loss
    if reference is not None:
        d = torch.clamp(reference - new, -MOST, MOST)
        loss = loss + options["kl_coef"] * (torch.exp(d) - d - 1)
    return loss
