"""`rlvr ppo`: sample, grade, let a critic judge each token, reinforce what was better than it expected (Schulman et al., 2017).

Enters: a PpoConfig. Leaves: a run directory with every rollout and metric, checkpoints, and the trained model in `model/`.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from rlvr_cli.analysis.run_end import report_end
from rlvr_cli.commands.sources.plain import Plain
from rlvr_cli.commands.sources.sampling import Sampling
from rlvr_cli.config.ppo import PpoConfig
from rlvr_cli.models.tokens.tokenization import Batch, pad_id_of
from rlvr_cli.runs.provenance import resumed_config
from rlvr_cli.training.checks import UpdateChecks
from rlvr_cli.training.credit.gae import explained_variance, gae, kl_to_reference, token_rewards, whitened
from rlvr_cli.training.credit.shaping import rewards_of
from rlvr_cli.training.loop import RolloutLoop, RolloutSource, rollout_loop
from rlvr_cli.training.losses.value import actor_critic
from rlvr_cli.training.planning.plan import ppo_plan, print_plan
from rlvr_cli.training.session import load_inputs, open_trainer
from rlvr_cli.training.trainer import Trainer
from rlvr_cli.training.updates.tensors import rollout_tensors, select_rows
from rlvr_cli.types import Rollout

SHOWN = {"entropy": "policy/entropy", "value loss": "critic/loss"}


def run(config: PpoConfig) -> None:
    """Train a model. Raises RlvrError for user errors, Interrupted after a signal."""
    config = resumed_config(config, command="ppo")
    num_questions = config.n_prompts_per_rollout_batch
    inputs = load_inputs(config, questions_per_batch=num_questions)
    num_updates = config.n_ppo_steps * config.updates_per_rollout_batch
    print_plan(ppo_plan(config, inputs.facts), config, inputs, most_updates=num_updates)
    if config.dry_run:
        return
    with open_trainer(config, inputs, command="ppo", num_updates=num_updates) as trainer:
        sampling = Sampling(trainer, inputs, num_questions=num_questions, group_size=config.group_size)
        train(config, trainer, Plain(sampling))
    report_end(trainer, output=config.format)


def train(config: PpoConfig, trainer: Trainer, source: RolloutSource) -> None:
    """Train policy and critic."""
    objective = partial(
        actor_critic,
        cliprange=config.cliprange,
        vf_coef=config.vf_coef,
        vf_cliprange=config.vf_cliprange,
        kl_coef=config.kl_coef if config.kl_in == "loss" else 0.0,
        min_tokens=config.sampling_min_tokens,
    )
    checks = UpdateChecks(trainer)
    with rollout_loop(trainer, source, num_steps=config.n_ppo_steps, checks=checks, shown=SHOWN) as loop:
        for rollouts in loop.batches():
            loop.begin_updates(
                len(rollouts), batch_size=config.train_batch_size, epochs=config.epochs_per_rollout_batch
            )
            batch = scored_batch(config, trainer, loop, rollouts)
            batch |= credit(config, trainer, batch, rewards_of(rollouts), step=loop.step)
            for rows in loop.minibatches():
                loop.update(
                    select_rows(batch, rows),
                    objective=partial(objective, critic_alone=loop.number < config.critic_warmup_steps),
                    skip_zero_advantage=False,  # the values have a gradient
                    temperature=config.sampling_temperature,
                )
    trainer.finish()


def scored_batch(config: PpoConfig, trainer: Trainer, loop: RolloutLoop, rollouts: Sequence[Rollout]) -> Batch:
    """Turn rollouts into tensors, with what reference, policy and critic said of them before the first update."""
    with trainer.scoring():
        batch = rollout_tensors(rollouts, pad_id=pad_id_of(trainer.tokenizer))
        temperature = config.sampling_temperature
        if config.kl_coef:
            batch["reference_log_probs"] = trainer.log_probs(batch, of="reference", temperature=temperature)
        return batch | loop.old_scores(batch, temperature=temperature)


def credit(config: PpoConfig, trainer: Trainer, batch: Batch, rewards: Tensor, *, step: int) -> dict[str, Tensor]:
    """Return the columns `advantages` and `returns` of a rollout batch, (batch, seq), and log what they are like.

    Args:
        rewards: (batch,), of the responses.
        step: updates done before the batch is trained on.
    """
    mask, values, kl = batch["response_mask"], batch["old_values"], None
    metrics: dict[str, float] = {}
    if config.kl_coef and config.kl_in == "reward":
        kl = kl_to_reference(batch["old_log_probs"], batch["reference_log_probs"], clamp=config.kl_clamp)
    of_tokens = token_rewards(rewards, mask, kl=kl, kl_coef=config.kl_coef)
    found = gae(of_tokens, values, mask, gamma=config.gamma, gae_lambda=config.gae_lambda)
    if (explained := explained_variance(values, found.returns, mask)) is not None:
        metrics["critic/explained_variance"] = explained
    if mask.any():  # not if all episodes failed
        metrics["critic/return_mean"] = float(found.returns[mask].mean())
        metrics |= {} if kl is None else {"reward/kl": float(kl[mask].double().mean())}
    trainer.metrics.add(step, metrics)
    advantages = whitened(found.advantages, mask) if config.whiten_advantages else found.advantages
    return {"advantages": advantages.to(values.dtype), "returns": found.returns.to(values.dtype)}
