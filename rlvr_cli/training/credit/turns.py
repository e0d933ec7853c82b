"""Credit within episodes: what each turn of the policy is worth, by the rewards from it on (--credit turn).

Enters: graded episodes of whole groups. Leaves: an advantage per turn of the policy, its rewards from there on compared with those
of the group's turns with the same number (DeepSeekMath, section 4.1.3, with turns for steps).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import torch

from rlvr_cli.training.credit.advantages import GroupOptions, group_advantages
from rlvr_cli.types import ENVIRONMENT, Rollout


def turn_returns(rollout: Rollout, *, terms: Sequence[float] = ()) -> list[float]:
    """The sum of the rewards from each turn of the policy on, that turn's included.

    An environment's rewards are those of their turns, and a grader's reward is that of the last turn. Where grading failed, all are 0.

    Args:
        terms: of a shaped reward, added to the reward of the last turn, as they are of the whole response.
    """
    rewards = [0.0] * len(rollout.policy_turns)
    if rollout.reward is not None:
        if rollout.grader == ENVIRONMENT and rollout.episode is not None:
            given = [reward or 0.0 for reward in rollout.episode.turn_rewards or rewards]
            rewards = torch.tensor(given, dtype=torch.float32).tolist()  # as they are stored
        else:
            rewards[-1] = rollout.reward
    return [math.fsum([*rewards[turn:], *terms]) for turn in range(len(rewards))]


def turn_advantages(returns: Sequence[Sequence[float]], **how: Unpack[GroupOptions]) -> list[list[float]]:
    """`group_advantages` of the turns with the same number; 0 for a turn that no other episode of its group has reached.

    Args:
        returns: of each episode, the rewards from each of its turns on; the episodes of a group next to each other.
        how: `group_size` is that of the episodes.
    """
    size = how["group_size"]
    assert len(returns) % size == 0, (len(returns), size)
    found: list[list[float]] = [[] for _ in returns]
    for first in range(0, len(returns), size):
        group = range(first, first + size)
        for turn in range(max(len(returns[i]) for i in group)):
            reached = [i for i in group if turn < len(returns[i])]
            rewards = torch.tensor([returns[i][turn] for i in reached], dtype=torch.float64)
            compared = group_advantages(rewards, **{**how, "group_size": len(reached)})
            for i, advantage in zip(reached, compared.tolist(), strict=True):
                found[i].append(advantage)
    return found


def with_turn_advantages(rollouts: Sequence[Rollout], **how: Unpack[GroupOptions]) -> list[Rollout]:
    """Return the rollouts with the advantages of their turns, and with the mean of these over the policy's tokens as their own.

    Args:
        rollouts: of whole groups, each contiguous, with the terms of their shaped rewards.
        how: see `turn_advantages`.
    """
    # The difference of shaped reward and reward would be rounded otherwise for each reward.
    terms = [(r.format_term, r.length_term, r.language_term, r.overlong_term) for r in rollouts]
    returns = [turn_returns(r, terms=[t or 0.0 for t in own]) for r, own in zip(rollouts, terms, strict=True)]
    credited = []
    for rollout, advantages in zip(rollouts, turn_advantages(returns, **how), strict=True):
        turns = zip(rollout.policy_turns, advantages, strict=True)
        total = math.fsum((turn.end - turn.start) * advantage for turn, advantage in turns)
        mean = total / max(rollout.num_policy_tokens, 1)
        credited.append(replace(rollout, turn_advantages=tuple(advantages), advantage=mean))
    return credited
