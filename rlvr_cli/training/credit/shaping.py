"""Shaped rewards: terms that are added to the grader's rewards before advantages are made of them.

Enters: graded rollouts and options. Leaves: the columns `format_term`, `length_term`, `language_term` and `overlong_term`. They are
a function of the rollouts of each group and of the number of the rollout batch alone, so that a resumed run has the same ones.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rlvr_cli.config.grpo import GrpoConfig, overlong_buffer
from rlvr_cli.graders.language import language_share
from rlvr_cli.training.credit.advantages import soft_overlong_penalty
from rlvr_cli.types import Rollout


def rewards_of(rollouts: Sequence[Rollout]) -> Tensor:
    """(rollouts,) float64; the reward of a grade that failed is 0 (`reward/grade_errors` counts these)."""
    return torch.tensor([r.reward or 0.0 for r in rollouts], dtype=torch.float64)


def reward_terms(rollouts: Sequence[Rollout], config: GrpoConfig, *, number: int) -> dict[str, Tensor]:
    """Return the terms that the options ask for, by column: (rollouts,) float64 each, already weighted.

    Args:
        rollouts: of whole groups, each group contiguous.
        number: of the rollout batch, from 0, for --length-reward-after.
    """
    lengths = [r.num_policy_tokens for r in rollouts]
    terms: dict[str, Tensor] = {}
    if config.format_weight:
        formats = [r.format_reward or 0.0 for r in rollouts]
        terms["format_term"] = config.format_weight * torch.tensor(formats, dtype=torch.float64)
    if config.length_reward:
        weight = config.length_reward if number >= config.length_reward_after else 0.0
        correct = (rewards_of(rollouts) > 0.5).tolist()
        terms["length_term"] = weight * length_rewards(lengths, correct, group_size=config.group_size)
    if config.language_reward:
        shares = [language_share(_spoken(r), config.language, detector=config.language_detector) for r in rollouts]
        terms["language_term"] = config.language_reward * torch.tensor(shares, dtype=torch.float64)
    if config.overlong == "soft_punish":
        limit = config.sampling_max_tokens
        buffer = overlong_buffer(config.overlong_buffer, max_tokens=limit)
        terms["overlong_term"] = soft_overlong_penalty(lengths, max_tokens=limit, buffer=buffer)
    return terms


def _spoken(rollout: Rollout) -> str:
    """The text of the policy: the response, of an episode its own turns."""
    if not (rollout.turns and rollout.turn_facts):
        return rollout.response
    ends = (0, *rollout.turn_facts.ends)
    parts = zip(rollout.turns, pairwise(ends), strict=True)
    return "".join(rollout.response[begin:end] for turn, (begin, end) in parts if turn.role == "policy")


def length_rewards(lengths: Sequence[int], correct: Sequence[bool], *, group_size: int) -> Tensor:
    """Kimi k1.5's length reward (2025, section 2.3.3): 1/2 - (length - min) / (max - min) over the group.

    A wrong response gets at most 0. Where all lengths of a group are equal, and where no response is correct, all get 0: else groups
    without a right answer would teach to be short.

    Args:
        lengths: tokens per response, the responses to a question next to each other.
        correct: whether each response was rewarded.
        group_size: responses per question.

    Returns:
        (responses,) float64, each from -1/2 to 1/2.
    """
    tokens = torch.tensor(lengths, dtype=torch.float64).view(-1, group_size)
    right = torch.tensor(correct, dtype=torch.bool).view(-1, group_size)
    shortest, longest = tokens.amin(dim=1, keepdim=True), tokens.amax(dim=1, keepdim=True)
    rewards = 0.5 - (tokens - shortest) / (longest - shortest).clamp(min=1)
    rewards = torch.where(right, rewards, rewards.clamp(max=0))
    return rewards.masked_fill((longest == shortest) | ~right.any(dim=1, keepdim=True), 0.0).flatten()
