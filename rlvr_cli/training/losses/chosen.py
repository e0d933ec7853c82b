"""The loss that the options ask for, with its parameters.

Enters: the options of a command. Leaves: a loss and the objective of an update, or an RlvrError before anything is loaded.
"""

from functools import partial
from typing import Any

from rlvr_cli.config.dpo import DpoConfig
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.errors import UsageError
from rlvr_cli.training.losses.custom import load_loss, load_preference_loss, loss_facts
from rlvr_cli.training.losses.objectives import Objective, policy_gradient
from rlvr_cli.training.losses.policy_gradient import LOSSES, Loss
from rlvr_cli.training.losses.preference import PREFERENCE_LOSSES, PreferenceLoss, preference


def policy_gradient_loss(config: GrpoConfig) -> Loss:
    """Return the loss of --loss-type.

    Raises:
        RlvrError: a user's own loss does not work (`load_loss`), or the loss does not go with other options.
    """
    loss = LOSSES.get(config.loss_type) or load_loss(
        config.loss_type,
        with_reference=config.kl_coef > 0,
        with_stale=config.partial_rollout_tokens > 0,
        per_token=config.credit == "turn",
    )
    if config.length_normalization != (needed := loss.length_normalization or config.length_normalization):
        raise UsageError(
            f"--length-normalization {config.length_normalization} does not go with {config.loss_type}, whose ratio is that of a "
            "whole response: the mean over its tokens makes its gradient that of the response.",
            f"Use --length-normalization {needed}.",
        )
    if loss.per_row and config.importance_truncation is not None:
        raise UsageError(
            f"{config.loss_type} gives one loss per response; --importance-correction needs one per token.",
            "Use --importance-correction none, or a loss that gives one number per token.",
        )
    if config.group_size == 1 and not loss.raw_rewards:
        without_baseline = " or ".join(name for name, known in LOSSES.items() if known.raw_rewards)
        raise UsageError(
            "With --group-size 1 every advantage is 0, so nothing is learned.",
            f"Use --group-size 8, or --loss-type {without_baseline}.",
        )
    if config.credit == "turn" and loss.raw_rewards:
        raise UsageError(
            f"--credit turn compares the turns of a group, and {config.loss_type} compares nothing: it has no baseline.",
            "Use --credit episode, or --loss-type reinforce_with_baseline.",
        )
    return loss


def policy_gradient_objective(config: GrpoConfig, loss: Loss) -> Objective:
    """Return the objective of an update: the loss, its KL penalty and its importance weights."""
    return partial(
        policy_gradient,
        loss=partial(loss.function, **{name: getattr(config, name) for name in loss.options}),
        kl_coef=config.kl_coef,
        kl_type=config.kl_type,
        importance_cap=config.importance_truncation,
        importance_floor=config.importance_floor,
        importance_masked=config.importance_correction == "masked",
        min_tokens=config.sampling_min_tokens,
    )


def preference_loss(config: DpoConfig) -> tuple[PreferenceLoss, Objective]:
    """Return the loss of --loss-type, and the objective with its options. Raises RlvrError if a user's own loss does not work."""
    loss = PREFERENCE_LOSSES.get(config.loss_type)
    if loss is None:
        return PreferenceLoss(with_reference=True, per_token=False), load_preference_loss(config.loss_type)
    return loss, partial(preference, loss=loss, beta=config.scale, gamma=config.target_margin, nll_coef=config.nll_coef)


def own_loss_facts(config: GrpoConfig | DpoConfig) -> dict[str, Any]:
    """Return the facts of a user's own loss for run.json; none of a built-in one."""
    built_in = config.loss_type in (*LOSSES, *PREFERENCE_LOSSES)
    return {} if built_in else loss_facts(config.loss_type)
