"""What a rollout batch is like by its groups: how many of them have a signal, and how old the policy is that sampled them."""

from collections.abc import Sequence

from rlvr_cli.rollouts.metrics import rollout_metrics
from rlvr_cli.training.credit.advantages import has_signal
from rlvr_cli.training.credit.shaping import rewards_of
from rlvr_cli.training.credit.turns import turn_advantages, turn_returns
from rlvr_cli.types import Rollout


def groups_with_signal(rollouts: Sequence[Rollout], *, group_size: int, by_turn: bool) -> list[bool]:
    """Whether the rewards within each group differ, before they are shaped.

    Args:
        rollouts: of whole groups, each contiguous.
        by_turn: whether turns are compared: then, whether the rewards from a turn on differ, whichever its number.
    """
    if not by_turn:
        return has_signal(rewards_of(rollouts), group_size=group_size).tolist()
    returns = [turn_returns(r) for r in rollouts]
    found = turn_advantages(returns, group_size=group_size, advantage_eps=0.0, normalize_by_std=False)
    return [
        any(any(of_turns) for of_turns in found[first : first + group_size])
        for first in range(0, len(found), group_size)
    ]


def group_metrics(
    rollouts: Sequence[Rollout], *, step: int, group_size: int, shaped: bool, by_turn: bool
) -> dict[str, float]:
    """Return the metrics of the groups that were sampled for a batch, all of them used, in one round of sampling.

    Args:
        rollouts: of whole groups, each contiguous.
        step: updates done before the batch is trained on.
        shaped: whether rewards are shaped.
        by_turn: see `groups_with_signal`.
    """
    groups = [rollouts[first : first + group_size] for first in range(0, len(rollouts), group_size)]
    right = [[(r.reward or 0.0) > 0.5 for r in group] for group in groups]
    metrics = {"groups/sampled": float(len(groups)), "groups/used": float(len(groups)), "sampling/rounds": 1.0}
    if not groups:
        return metrics
    metrics |= rollout_metrics(rollouts) | {
        "groups/signal_share": sum(groups_with_signal(rollouts, group_size=group_size, by_turn=by_turn)) / len(groups),
        "groups/all_correct_share": sum(map(all, right)) / len(groups),
        "groups/all_wrong_share": sum(not any(of_group) for of_group in right) / len(groups),
        "sampling/lag": float(step - min(r.policy_version for r in rollouts)),  # updates since the policy that sampled
    }
    if shaped:
        metrics["reward/shaped"] = sum(r.shaped_reward or 0.0 for r in rollouts) / len(rollouts)
    return metrics
