"""`rlvr grpo`: sample groups, grade them, reinforce the responses that were better than their group (handout, algorithm 3).

Enters: a GrpoConfig. Leaves: a run directory with every rollout and metric, checkpoints, and the trained model in `model/`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from rlvr_cli.analysis.run_end import report_end
from rlvr_cli.commands.sources import choose_source
from rlvr_cli.commands.sources.sampling import Sampling
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.graders.language import check_detector
from rlvr_cli.models.tokens.tokenization import Batch, pad_id_of
from rlvr_cli.runs.provenance import resumed_config
from rlvr_cli.terminal import console
from rlvr_cli.training.checks import UpdateChecks
from rlvr_cli.training.credit.advantages import GroupOptions, batch_normalized, group_advantages
from rlvr_cli.training.credit.groups import group_metrics
from rlvr_cli.training.credit.shaping import reward_terms, rewards_of
from rlvr_cli.training.credit.turns import with_turn_advantages
from rlvr_cli.training.loop import RolloutLoop, RolloutSource, rollout_loop
from rlvr_cli.training.losses.chosen import own_loss_facts, policy_gradient_loss, policy_gradient_objective
from rlvr_cli.training.losses.policy_gradient import LOSSES, Loss
from rlvr_cli.training.planning.notes import clip_note, grpo_notes
from rlvr_cli.training.planning.plan import grpo_plan, print_plan
from rlvr_cli.training.session import load_inputs, open_trainer
from rlvr_cli.training.trainer import Trainer
from rlvr_cli.training.updates.tensors import rollout_tensors, select_rows, stale_tokens, zero_advantage_rows
from rlvr_cli.types import Rollout

SHOWN = {"entropy": "policy/entropy", "grad": "optimizer/grad_norm"}


def run(config: GrpoConfig) -> None:
    """Train a model. Raises RlvrError for user errors, Interrupted after a signal."""
    config = resumed_config(config, command="grpo")
    loss = policy_gradient_loss(config)
    if config.language_reward:
        check_detector(config.language_detector)
    num_questions = config.n_prompts_per_rollout_batch
    inputs = load_inputs(config, questions_per_batch=num_questions, more_facts=own_loss_facts(config))
    num_updates = config.n_grpo_steps * config.updates_per_rollout_batch
    print_plan(grpo_plan(config, inputs.facts, loss=loss), config, inputs, most_updates=num_updates)
    for note in grpo_notes(config, loss=loss):
        console.say(f"note: {note}")
    if config.dry_run:
        return
    with open_trainer(config, inputs, command="grpo", num_updates=num_updates) as trainer:
        sampling = Sampling(
            trainer,
            inputs,
            num_questions=num_questions,
            group_size=config.group_size,
            order=config.question_order,
            credit=partial(credit, config, loss=loss),
            measure=partial(
                group_metrics,
                group_size=config.group_size,
                shaped=config.shapes_rewards,
                by_turn=config.credit == "turn",
            ),
        )
        train(config, trainer, choose_source(config, sampling), loss=loss)
    report_end(trainer, output=config.format)


def train(config: GrpoConfig, trainer: Trainer, source: RolloutSource, *, loss: Loss) -> None:
    """Algorithm 3; the numbers are those of its lines.

    The source does 3 to 7: it draws questions, gives the sampler the weights of the old policy, samples and grades the groups, and calls
    `credit` for their advantages.
    """
    checks = UpdateChecks(
        trainer,
        ratios=config.loss_type in LOSSES,  # a loss of the user's own may report another ratio
        same_policy=not config.async_steps,  # else an older policy sampled, and they differ
        advice="--importance-correction truncated corrects for it",
        clip_note=partial(clip_note, config, loss=loss),
    )
    with rollout_loop(trainer, source, num_steps=config.n_grpo_steps, checks=checks, shown=SHOWN) as loop:
        for rollouts in loop.batches():  # 2 to 7
            loop.begin_updates(
                len(rollouts), batch_size=config.train_batch_size, epochs=config.epochs_per_rollout_batch
            )
            batch = training_batch(config, trainer, loop, rollouts, loss=loss)  # what 9 needs of the old policy
            for rows in loop.minibatches():  # 8
                loop.update(  # 9
                    select_rows(batch, rows),
                    objective=policy_gradient_objective(config, loss),
                    skip_zero_advantage=loss.skip_zero_advantage,
                    normalization=config.length_normalization,
                    normalize_constant=config.masked_normalize_constant,
                    # Partial rollouts give batches of any size: each row weighs as in a full update.
                    share=len(rows) / config.train_batch_size if config.partial_rollout_tokens else 1.0,
                    temperature=config.sampling_temperature,
                )
    trainer.finish()


def credit(config: GrpoConfig, rollouts: Sequence[Rollout], *, loss: Loss, number: int) -> list[Rollout]:
    """Return the rollouts with their shaped rewards, the terms of these, and their advantages, or those of their turns.

    The advantage is the shaped reward itself for a loss with `raw_rewards`. With --std-normalization batch it is only centered: the
    batch, over which its standard deviation is taken (`training_batch`), is complete later.

    Args:
        rollouts: of whole groups, each group contiguous.
        number: of the rollout batch, from 0.
    """
    terms = reward_terms(rollouts, config, number=number)
    shaped = sum(terms.values(), rewards_of(rollouts))
    how = GroupOptions(
        group_size=config.group_size,
        advantage_eps=config.advantage_eps,
        normalize_by_std=config.std_over == "group",
    )
    advantages = shaped if loss.raw_rewards else group_advantages(shaped, **how)
    columns = {"shaped_reward": shaped, "advantage": advantages, **terms}
    values = zip(*(tensor.tolist() for tensor in columns.values()), strict=True)
    credited = [replace(r, **dict(zip(columns, row, strict=True))) for r, row in zip(rollouts, values, strict=True)]
    return with_turn_advantages(credited, **how) if config.credit == "turn" else credited


def training_batch(
    config: GrpoConfig, trainer: Trainer, loop: RolloutLoop, rollouts: Sequence[Rollout], *, loss: Loss
) -> Batch:
    """Turn rollouts into tensors, with their groups and the log-probabilities that the objective needs.

    `old_log_probs`, of the policy before the first update on the batch, are there only if the batch has several updates: in the first
    one they equal those of the update itself.
    """
    if not rollouts:
        return {}
    with trainer.scoring():
        if config.std_over == "batch" and not loss.raw_rewards:
            centered = torch.tensor([r.advantage or 0.0 for r in rollouts], dtype=torch.float64)
            divided = batch_normalized(centered, advantage_eps=config.advantage_eps).tolist()
            rollouts = [replace(r, advantage=a) for r, a in zip(rollouts, divided, strict=True)]
        batch = rollout_tensors(rollouts, pad_id=pad_id_of(trainer.tokenizer))
        if config.partial_rollout_tokens:
            batch["stale"] = stale_tokens(rollouts, like=batch["response_mask"])
        if config.overlong == "mask":
            batch["response_mask"] &= torch.tensor([[r.finish_reason != "length"] for r in rollouts])
        batch["group"] = torch.arange(len(rollouts))[:, None] // config.group_size
        temperature = config.sampling_temperature
        if config.kl_coef:
            batch["reference_log_probs"] = trainer.log_probs(batch, of="reference", temperature=temperature)
        else:  # a KL penalty has a gradient also where the advantage is 0
            batch["zero_advantage"] = zero_advantage_rows(batch)
        if loop.num_updates > 1:
            batch |= loop.old_scores(batch, temperature=temperature)  # old_log_probs
    return batch
