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
BORDER = 1e-5  # of a ratio of probabilities: nearer to the end of a range, rounding decides on which side it is


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


def packed(lengths: Sequence[int], *, capacity: int, order: Sequence[int]) -> list[list[int]]:
    """The items of each sequence: the longest item first, each into the sequence in which it leaves the least room."""
    rooms = torch.empty(0, dtype=torch.int64)
    sequences: list[list[int]] = []
    for item in sorted(order, key=lambda item: -lengths[item]):
        left = rooms - lengths[item]
        if not (left >= 0).any():
            rooms = torch.cat([rooms, torch.tensor([capacity])])
            left = rooms - lengths[item]
            sequences.append([])
        number = int(torch.where(left < 0, capacity, left).argmin())
        sequences[number].append(item)
        rooms[number] = left[number]
    return sequences


def learning_rate(update: int, options: Mapping[str, Any], *, num_updates: int, trained: int | None = None) -> float:
    """The learning rate of an update, counted from 0: k/w of the peak in the k-th of w updates of warm-up, then the schedule.

    Args:
        trained: updates before it without those of empty batches, where the warm-up leaves these out.
    """
    peak, warm_up = options["learning_rate"], options["warmup_steps"]
    before = update if trained is None else trained
    if before + 1 <= warm_up:
        return (before + 1) / warm_up * peak
    if options["lr_schedule"] == "constant":
        return peak
    falling = max(num_updates - 1 - warm_up, 1)  # updates over which the cosine falls from 1 to 0.1
    return peak * (0.55 + 0.45 * math.cos(math.pi * min(update - warm_up, falling) / falling))


def reward_terms(
    rewards: Sequence[float],
    lengths: Sequence[int],
    formats: Sequence[float],
    options: Mapping[str, Any],
    *,
    number: int,
) -> list[list[float]]:
    """What is added to the rewards of one group in the rollout batch `number`: a list for the format, and for the length; not the language."""
    terms = [[options["format_weight"] * f for f in formats]]
    if options["length_reward"] and number >= options["length_reward_after"] and max(rewards) > 0.5:
        least, most = min(lengths), max(lengths)
        shorter = [0.5 - (n - least) / (most - least) if most > least else 0.0 for n in lengths]
        right = [s if r > 0.5 else min(s, 0.0) for s, r in zip(shorter, rewards, strict=True)]
        terms.append([options["length_reward"] * r for r in right])
    if options["overlong"] == "soft_punish":
        limit = options["sampling_max_tokens"]
        buffer = options["overlong_buffer"] or max(limit // 5, 1)
        terms.append([-min(max(n - (limit - buffer), 0) / buffer, 1.0) for n in lengths])
    return terms


def shaped_rewards(rewards: Sequence[float], terms: Sequence[Sequence[float]]) -> list[float]:
    """The rewards of one group, with the terms that are added to them."""
    shaped = list(rewards)
    for added in terms:
        shaped = [r + term for r, term in zip(shaped, added, strict=True)]
    return shaped


def advantages(rewards: Sequence[float], options: Mapping[str, Any]) -> list[float]:
    """The advantages of one group of shaped rewards; these themselves without a baseline. Not yet divided by the batch's deviation."""
    if options["loss_type"] == "no_baseline":
        return list(rewards)
    if max(rewards) == min(rewards):
        return [0.0 for _ in rewards]
    mean = math.fsum(rewards) / len(rewards)
    deviations = [r - mean for r in rewards]
    if std_over(options) != "group":
        return deviations
    variance = math.fsum(d * d for d in deviations) / (len(rewards) - 1)
    return [d / (math.sqrt(variance) + options["advantage_eps"]) for d in deviations]


def turn_returns(turn_rewards: Sequence[float], terms: Sequence[float] = ()) -> list[float]:
    """The sum of the rewards of an episode's turns, from each turn on, and of the terms, which are of the whole response."""
    return [math.fsum([*turn_rewards[turn:], *terms]) for turn in range(len(turn_rewards))]


def turn_advantages(returns: Sequence[Sequence[float]], options: Mapping[str, Any]) -> list[list[float]]:
    """The advantages of the turns of one group's episodes: each compared with those that come as late in their episode."""
    found = [[0.0] * len(of_episode) for of_episode in returns]
    for turn in range(max(map(len, returns))):
        there = [episode for episode in range(len(returns)) if len(returns[episode]) > turn]
        compared = advantages([returns[episode][turn] for episode in there], options)
        for episode, advantage in zip(there, compared, strict=True):
            found[episode][turn] = advantage
    return found


def std_over(options: Mapping[str, Any]) -> str:
    """Over what the standard deviation is taken: group, batch or none."""
    return options["std_normalization"] or ("group" if options["use_std_normalization"] else "none")


def over_the_batch(advantages: Sequence[float], options: Mapping[str, Any]) -> list[float]:
    """The centered rewards of a batch, divided by their standard deviation; zeros stay."""
    if not any(advantages):
        return list(advantages)
    mean = math.fsum(advantages) / len(advantages)
    variance = math.fsum((a - mean) ** 2 for a in advantages) / (len(advantages) - 1)
    return [a / (math.sqrt(variance) + options["advantage_eps"]) for a in advantages]


def divisors(token_counts: Sequence[int], *, normalization: str, constant: float) -> list[float]:
    """What the summed loss of each response of an update is divided by, of the numbers of tokens that are trained on."""
    if normalization == "token_mean":
        return [float(sum(token_counts))] * len(token_counts)
    if normalization == "rows":
        return [float(sum(1 for n in token_counts if n))] * len(token_counts)
    if normalization == "masked_normalize":
        return [constant * len(token_counts)] * len(token_counts)
    return [float(count * sum(1 for n in token_counts if n)) for count in token_counts]


def policy_gradient_loss(
    new: Tensor,
    options: Mapping[str, Any],
    *,
    learned: Tensor,
    advantage: Tensor | float,
    old: Tensor,
    sampled: Tensor,
    reference: Tensor | None,
    nudged: bool = False,
) -> Tensor:
    """The loss of each token of a response; for kimi, whose loss is one number, the equal share of each of the `learned` tokens.

    Args:
        new: (tokens,) log-probabilities under the policy being trained.
        learned: (tokens,) bool, which of them the loss counts.
        advantage: (tokens,), or the same for all.
        options: of `rlvr grpo`.
        old, sampled, reference: (tokens,) log-probabilities of the policy before the first update on the batch, of the
            sampler, and of the first weights.
        nudged: decide the tokens at a border the other way, as rounding may: their gradient is there or not.
    """
    ratio = torch.exp(torch.clamp(new - old, -MOST, MOST))
    at = across if nudged else torch.full_like
    match options["loss_type"]:
        case "no_baseline" | "reinforce_with_baseline":
            loss = -advantage * new
        case "grpo_no_clip":
            loss = -ratio * advantage
        case "grpo_clip":
            low, high = clip_range(options, (0.2, 0.2))
            loss = -torch.minimum(
                ratio * advantage, torch.clamp(ratio, at(ratio, 1 - low), at(ratio, 1 + high)) * advantage
            )
        case "gspo":
            low, high = clip_range(options, (3e-4, 4e-4))
            of_response = torch.exp(torch.clamp((new - old)[learned].mean(), -MOST, MOST)).detach()
            ratio = of_response * torch.exp(new) / torch.exp(new).detach()
            loss = -torch.minimum(
                ratio * advantage, torch.clamp(ratio, at(ratio, 1 - low), at(ratio, 1 + high)) * advantage
            )
        case "cispo":
            loss = -torch.clamp(ratio, max=options["cispo_cap"]).detach() * advantage * new
        case "kimi":
            squared = (new - old)[learned].sum() ** 2
            share = options["kimi_tau"] / 2 * squared / learned.sum()
            loss = -advantage * new + share
        case other:
            raise AssertionError(other)
    correction = options["importance_correction"]
    weight = torch.exp(torch.clamp(old - sampled, -MOST, MOST))
    floor, cap = options["importance_floor"], options["importance_cap"]
    lags = options["async_steps"] == 1 or options.get("partial_rollout_tokens", 0) > 0
    if correction == "truncated" or (correction == "auto" and lags):
        loss = torch.clamp(weight, floor, cap) * loss
    if correction == "masked":
        loss = torch.where((weight >= at(weight, floor)) & (weight <= at(weight, cap)), weight, 0.0) * loss
    if reference is not None:
        d = torch.clamp(reference - new, -MOST, MOST)
        k3 = torch.exp(d) - d - 1
        kl = {"k2": d * d / 2, "k3": k3, "unbiased": torch.exp(torch.clamp(new - old, -MOST, MOST)) * k3}
        if options["loss_type"] == "kimi":  # per response: the mean over its tokens
            return loss + options["kl_coef"] * kl[options["kl_type"]] / learned.sum()
        loss = loss + options["kl_coef"] * kl[options["kl_type"]]
    return loss


def across(values: Tensor, border: float) -> Tensor:
    """Return the border for each value; of one that is so near that rounding decides on which side it is, a border beyond it."""
    values = values.detach()
    return torch.where((values - border).abs() < BORDER, 2 * values - border, border)


def task_advantages(rewards: Sequence[float]) -> list[float]:
    """The advantages of one group that `rlvr distill --task-reward` weights."""
    if max(rewards) == min(rewards):
        return [0.0 for _ in rewards]
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)
    return [(r - mean) / (math.sqrt(variance) + 1e-6) for r in rewards]


def distillation_loss(
    student: Tensor, teacher: Tensor, tokens: Tensor, options: Mapping[str, Any], *, advantage: Tensor | float
) -> Tensor:
    """The loss of each token of a response.

    Args:
        student, teacher: (tokens, vocabulary) logits over the temperature; the vocabularies may have different sizes.
        tokens: (tokens,) the sampled ones.
        options: of `rlvr distill`.
        advantage: of the response among its group, (tokens,), or the same for all.
    """
    each = torch.arange(len(tokens), device=tokens.device)
    new, of_teacher = (torch.log_softmax(logits, dim=-1)[each, tokens] for logits in (student, teacher))
    ratio = torch.exp(new - new.detach())
    known = min(student.shape[1], teacher.shape[1])
    p, q = (torch.softmax(logits[:, :known], dim=-1) for logits in (student, teacher))
    match options["divergence"]:
        case "reverse_kl":
            loss = (p * torch.log(p / q)).sum(dim=-1)
        case "forward_kl":
            loss = (q * torch.log(q / p)).sum(dim=-1)
        case "sampled":
            loss = -ratio * (of_teacher - new.detach())
        case other:
            raise AssertionError(other)
    return loss - options["task_reward"] * ratio * advantage


def clip_range(options: Mapping[str, Any], default: tuple[float, float]) -> tuple[float, float]:
    """How far a ratio may fall below 1, and rise above 1."""
    low, high = options["cliprange"] or default[0], options["cliprange_high"] or options["cliprange"] or default[1]
    return low, high
