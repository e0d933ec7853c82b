"""`rlvr ppo`: sample, grade, let a critic judge each token, reinforce what was better than it expected (Schulman et al., 2017).

Enters: a PpoConfig. Leaves: a run directory with every rollout and metric, checkpoints, and the trained model in `model/`.
"""

import time
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from rlvr_cli.analysis.run_end import report_end
from rlvr_cli.config.ppo import PpoConfig
from rlvr_cli.data.order import update_rows
from rlvr_cli.models.tokens.tokenization import Batch, pad_id_of
from rlvr_cli.runs.provenance import resumed_config
from rlvr_cli.terminal import console
from rlvr_cli.training.credit.gae import explained_variance, gae, kl_to_reference, token_rewards, whitened
from rlvr_cli.training.credit.shaping import rewards_of
from rlvr_cli.training.losses.value import actor_critic
from rlvr_cli.training.parallel.nodes import lend_trainers
from rlvr_cli.training.planning.plan import ppo_plan, print_plan, shared_notes
from rlvr_cli.training.session import Inputs, load_inputs, open_trainer, sample_batch
from rlvr_cli.training.tensors import rollout_tensors, select_rows
from rlvr_cli.training.trainer import Trainer
from rlvr_cli.training.update import check_ratios
from rlvr_cli.types import Rollout


def run(config: PpoConfig) -> None:
    """Train a model. Raises RlvrError for user errors, Interrupted after a signal."""
    if lend_trainers(config):
        return
    config = resumed_config(config, command="ppo")
    rows = config.micro_batch_size
    inputs = load_inputs(config, questions_per_batch=config.n_prompts_per_rollout_batch, rows=rows)
    print_plan(ppo_plan(config, inputs.facts), config, inputs, rows=rows)
    for note in shared_notes(config):
        console.say(f"note: {note}")
    if config.dry_run:
        return
    num_updates = config.n_ppo_steps * config.updates_per_rollout_batch
    with open_trainer(config, inputs, command="ppo", num_updates=num_updates) as trainer:
        train(config, trainer, inputs)
    report_end(trainer, output=config.format)


def train(config: PpoConfig, trainer: Trainer, inputs: Inputs) -> None:
    """Train policy and critic. Resumes after an interruption: three counters, the data cursor, determine all data that follow."""
    objective = partial(
        actor_critic,
        cliprange=config.cliprange,
        vf_coef=config.vf_coef,
        vf_cliprange=config.vf_cliprange,
        kl_coef=config.kl_coef if config.kl_in == "loss" else 0.0,
        min_tokens=config.sampling_min_tokens,
    )
    steps, asked, done = (trainer.cursor.get(counter, 0) for counter in ("steps", "asked", "updates_of_batch"))
    longer = f"--n-ppo-steps {2 * config.n_ppo_steps}"
    with trainer.progress("steps", config.n_ppo_steps, done=steps, longer=longer) as bar:
        while steps < config.n_ppo_steps and trainer.has_time():
            sampled_at = trainer.updates - done
            rollouts, asked_after, signals = sample_batch(
                trainer,
                inputs,
                num_questions=config.n_prompts_per_rollout_batch,
                num_samples=config.group_size,
                step=sampled_at,
                asked=asked,
            )
            minibatches = update_rows(
                len(rollouts),
                batch_size=config.train_batch_size,
                epochs=config.epochs_per_rollout_batch,
                seed=config.seed,
                number=steps,
            )
            trainer.evaluate_if_due()
            batch, scores = training_batch(config, trainer, rollouts, minibatches, step=sampled_at)
            after = {"steps": steps + 1, "asked": asked_after, "updates_of_batch": 0}
            for number, rows in enumerate(minibatches[done:], start=done + 1):
                if number > done + 1:
                    trainer.evaluate_if_due()
                last = number == len(minibatches)
                update = trainer.update(
                    select_rows(batch, rows),
                    cursor=after if last else {"steps": steps, "asked": asked, "updates_of_batch": number},
                    tensors={} if last else scores,
                    objective=partial(objective, critic_alone=steps < config.critic_warmup_steps),
                    skip_zero_advantage=False,  # the values have a gradient
                    micro_batch_size=config.micro_batch_size,
                    temperature=config.sampling_temperature,
                )
                if update["update/tokens"]:
                    signals |= {"entropy": update["policy/entropy"], "value loss": update["critic/loss"]}
                    if number == 1:
                        check_ratios(update, dtype=trainer.compute_dtype)
                        trainer.check_mismatch(update)
            trainer.metrics.add(sampled_at, {"step/seconds": trainer.clock.step_seconds})
            steps, asked, done = steps + 1, asked_after, 0
            bar.advance(1, **signals)
    trainer.finish()


def training_batch(
    config: PpoConfig, trainer: Trainer, rollouts: Sequence[Rollout], minibatches: list[list[int]], *, step: int
) -> tuple[Batch, dict[str, Tensor]]:
    """Turn rollouts into tensors, and the critic's values into an advantage and a return for each token.

    Args:
        step: updates done before the batch is trained on.

    Returns:
        The batch; and what policy and critic said of it before the first update, `old_log_probs` and `old_values`. These are computed
        once per batch, and kept in checkpoints within it: a resumed run could not compute them again.
    """
    started = time.perf_counter()
    trainer.weights.sleep()
    batch = rollout_tensors(rollouts, pad_id=pad_id_of(trainer.tokenizer))
    how = {"micro_batch_size": config.micro_batch_size, "temperature": config.sampling_temperature}
    if config.kl_coef:
        batch["reference_log_probs"] = trainer.log_probs(batch, of="reference", **how)
    scores = {name: trainer.tensors[name] for name in ("old_log_probs", "old_values") if name in trainer.tensors}
    if not scores:
        found: dict[str, Tensor] = {}
        for rows in minibatches[: len(minibatches) // config.epochs_per_rollout_batch]:
            for name, scored in trainer.scores(select_rows(batch, rows), **how).items():
                found.setdefault(name, scored.new_zeros(batch["response_mask"].shape))[rows] = scored
        scores = {f"old_{name}": scored for name, scored in found.items()}
    batch |= scores
    trainer.metrics.add(trainer.updates, {"scoring/seconds": time.perf_counter() - started})
    return batch | credit(config, trainer, batch, rewards_of(rollouts), step=step), scores


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
        metrics["reward/kl"] = float(kl[mask].double().mean())
    of_tokens = token_rewards(rewards, mask, kl=kl, kl_coef=config.kl_coef)
    found = gae(of_tokens, values, mask, gamma=config.gamma, gae_lambda=config.gae_lambda)
    if (explained := explained_variance(values, found.returns, mask)) is not None:
        metrics["critic/explained_variance"] = explained
    trainer.metrics.add(step, metrics | {"critic/return_mean": float(found.returns[mask].mean())})
    advantages = whitened(found.advantages, mask) if config.whiten_advantages else found.advantages
    return {"advantages": advantages.to(values.dtype), "returns": found.returns.to(values.dtype)}
