"""Rewards of grouped responses -> advantages.

Enters: one reward per response, the responses to a question next to each other. Leaves: one advantage per response, its
reward compared with those of its group.
"""

from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
from torch import Tensor


class GroupOptions(TypedDict):
    """How responses, or turns, are compared within their group: see `group_advantages`."""

    group_size: int
    advantage_eps: float
    normalize_by_std: bool


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], dict[str, float]],
    rollout_responses: list[str],
    repeated_ground_truths: list[str],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Grade responses and normalize their rewards within their groups (the handout, section 7.2).

    Args:
        reward_fn: (response, ground_truth) -> a dict with "reward", "format_reward" and "answer_reward".
        rollout_responses: n_prompts_per_rollout_batch * group_size responses, those to one question next to each other.
        repeated_ground_truths: one per response: each question's ground truth repeated group_size times.
        group_size, advantage_eps, normalize_by_std: see `group_advantages`.

    Returns:
        `advantages` and `raw_rewards`, (rollout_batch_size,) float32, and metadata: mean, std, min and max of the rewards, mean
        format and answer reward, and the share of groups with a signal (see `has_signal`).
    """
    grades = [reward_fn(r, truth) for r, truth in zip(rollout_responses, repeated_ground_truths, strict=True)]
    rewards = torch.tensor([g["reward"] for g in grades], dtype=torch.float32)
    advantages = group_advantages(
        rewards, group_size=group_size, advantage_eps=advantage_eps, normalize_by_std=normalize_by_std
    )
    metadata = {
        "reward_mean": rewards.mean(),
        "reward_std": rewards.std(correction=1 if len(rewards) > 1 else 0),
        "reward_min": rewards.min(),
        "reward_max": rewards.max(),
        "format_reward_mean": sum(g["format_reward"] for g in grades) / len(grades),
        "answer_reward_mean": sum(g["answer_reward"] for g in grades) / len(grades),
        "share_of_groups_with_signal": has_signal(rewards, group_size=group_size).double().mean(),
    }
    return advantages, rewards, {name: float(value) for name, value in metadata.items()}


def group_advantages(
    raw_rewards: Tensor, *, group_size: int, advantage_eps: float = 1e-6, normalize_by_std: bool = True
) -> Tensor:
    """(r - mean(group)) / (std(group) + advantage_eps), or without the division (the handout, equations 28 and 31).

    The standard deviation is the sample's (ddof 1). If all rewards of a group are equal, its advantages are exactly 0, not
    a rounding error divided by `advantage_eps`. The same holds for a group of one.

    Args:
        raw_rewards: (n_groups * group_size,), finite; the rewards of a group next to each other.
        group_size: responses per question.
        advantage_eps: added to the standard deviation, so that a tiny one does not make a huge advantage.
        normalize_by_std: whether to divide; False gives Dr. GRPO's advantage (Liu et al., 2025).

    Returns:
        (n_groups * group_size,), the dtype of the rewards.
    """
    assert len(raw_rewards) % group_size == 0, (len(raw_rewards), group_size)
    assert raw_rewards.isfinite().all(), raw_rewards
    groups = raw_rewards.view(-1, group_size)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if normalize_by_std and group_size > 1:
        advantages = advantages / (groups.std(dim=1, keepdim=True, correction=1) + advantage_eps)
    signal = has_signal(raw_rewards, group_size=group_size)
    return advantages.masked_fill(~signal[:, None], 0.0).flatten()


def batch_normalized(advantages: Tensor, *, advantage_eps: float = 1e-6) -> Tensor:
    """Divide centered advantages by their standard deviation over a whole batch (plus `advantage_eps`).

    REINFORCE++-baseline (Hu et al., 2025) and ScaleRL (Khatri et al., 2025). Every response counts once, whatever its length; the
    standard deviation is the sample's (ddof 1). A single advantage is returned as it is, and so are zeros, also with an eps of 0.

    Args:
        advantages: (responses,), each the reward minus the mean of its group.
        advantage_eps: added to the standard deviation.
    """
    if len(advantages) < 2 or not advantages.any():
        return advantages
    return advantages / (advantages.std(correction=1) + advantage_eps)


def has_signal(raw_rewards: Tensor, *, group_size: int) -> Tensor:
    """Whether the rewards within each group differ, so that its advantages are not all 0; (n_groups,) bool."""
    groups = raw_rewards.view(-1, group_size)
    return groups.amax(dim=1) > groups.amin(dim=1)


def soft_overlong_penalty(lengths: Sequence[int], *, max_tokens: int, buffer: int) -> Tensor:
    """DAPO's soft punishment of long responses (Yu et al., 2025, equation 13).

    0 up to `max_tokens - buffer` tokens, then falling linearly to -1 at `max_tokens`.

    Args:
        lengths: tokens per response.
        max_tokens: the longest response that sampling allows.
        buffer: the number of tokens before `max_tokens` over which the penalty grows.

    Returns:
        (len(lengths),) float64, to be added to the rewards.
    """
    assert 0 < buffer <= max_tokens, (buffer, max_tokens)
    over = torch.tensor(lengths, dtype=torch.float64) - (max_tokens - buffer)
    return 0.0 - (over / buffer).clamp(0, 1)
