"""`rlvr ei`: expert iteration: sample, fine-tune on the correct responses, repeat (handout, algorithm 2).

Enters: an EiConfig. Leaves: a run directory with every rollout and metric, checkpoints, and the trained model in `model/`.
"""

from rlvr_cli.analysis.run_end import report_end
from rlvr_cli.config.ei import EiConfig
from rlvr_cli.data.order import batches, next_indices
from rlvr_cli.models.tokens.tokenization import pad_id_of
from rlvr_cli.rollouts.collect import stored_stats
from rlvr_cli.rollouts.metrics import rollout_metrics
from rlvr_cli.runs.provenance import resumed_config
from rlvr_cli.terminal import console
from rlvr_cli.training.parallel.nodes import lend_trainers
from rlvr_cli.training.planning.plan import ei_plan, print_plan
from rlvr_cli.training.session import Inputs, load_inputs, open_trainer, sample_questions
from rlvr_cli.training.tensors import rollout_tensors
from rlvr_cli.training.trainer import Trainer
from rlvr_cli.types import Rollout


def run(config: EiConfig) -> None:
    """Train a model. Raises RlvrError for user errors, Interrupted after a signal."""
    if lend_trainers(config):
        return
    config = resumed_config(config, command="ei")
    rows = config.micro_batch_size
    inputs = load_inputs(config, questions_per_batch=config.ei_batch_size, rows=rows)
    print_plan(ei_plan(config, inputs.facts), config, inputs, rows=rows)
    if config.dry_run:
        return
    with open_trainer(config, inputs, command="ei", num_updates=0) as trainer:
        train(config, trainer, inputs)
    report_end(trainer, output=config.format)


def train(config: EiConfig, trainer: Trainer, inputs: Inputs) -> None:
    """Algorithm 2. Resumes after an interruption: three counters, the data cursor, determine all data that follow."""
    steps, asked, done = (trainer.cursor.get(counter, 0) for counter in ("steps", "asked", "updates_of_step"))
    longer = f"--n-ei-steps {2 * config.n_ei_steps}"
    with trainer.progress("steps", config.n_ei_steps, done=steps, longer=longer) as bar:
        while steps < config.n_ei_steps and trainer.has_time():
            sampled_at = trainer.updates - done
            if config.eval_every and steps % config.eval_every == 0 and not done:
                trainer.evaluate()
            correct, asked_after, signals = expert_rollouts(config, trainer, inputs, step=sampled_at, asked=asked)
            minibatches = [
                rows
                for epoch in range(config.sft_epochs)
                for rows in batches(
                    correct,
                    batch_size=config.train_batch_size,
                    seed=config.seed,
                    epoch=steps * config.sft_epochs + epoch,
                )
            ]
            after = {"steps": steps + 1, "asked": asked_after, "updates_of_step": 0}
            for number, rows in enumerate(minibatches[done:], start=done + 1):
                within = {"steps": steps, "asked": asked, "updates_of_step": number}
                update = trainer.update(
                    rollout_tensors(rows, pad_id=pad_id_of(trainer.tokenizer)),
                    cursor=after if number == len(minibatches) else within,
                    micro_batch_size=config.micro_batch_size,
                )
                signals |= {"nll": update["loss/nll"], "entropy": update["policy/entropy"]}
            if not minibatches:
                console.say(
                    f"step {steps + 1}: no response was correct, so there is nothing to train on; the next step uses other questions.\n"
                    f"  If that goes on: a model that was fine-tuned first (rlvr sft), a larger --group-size, easier questions, or "
                    f"another --prompt or --grader. rlvr analyze failures {trainer.run.path} --phase train shows what was wrong."
                )
                trainer.skip(after)
            trainer.metrics.add(sampled_at, {"step/seconds": trainer.clock.step_seconds})
            steps, asked, done = steps + 1, asked_after, 0
            bar.advance(1, **signals)
    trainer.finish()


def expert_rollouts(
    config: EiConfig, trainer: Trainer, inputs: Inputs, *, step: int, asked: int
) -> tuple[list[Rollout], int, dict[str, float]]:
    """Sample responses to a batch of questions, grade and store them; or read those that an interrupted run stored.

    Args:
        step: updates done so far.
        asked: questions used so far, counted over all epochs of the dataset.

    Returns:
        The correct responses without duplicates, `asked` after them, and the values for the progress bar.
    """
    indices, asked = next_indices(len(inputs.questions), config.ei_batch_size, seed=config.seed, start=asked)
    trainer.sync_weights(trainer.updates)
    rollouts = sample_questions(
        trainer,
        inputs,
        indices,
        step=step,
        num_samples=config.group_size,
        credit=lambda rows: rows,
    )
    correct = [r for r in rollouts if r.reward is not None and r.reward > 0.5]
    distinct = list({(r.prompt_ids, r.response_ids): r for r in correct}.values())
    metrics = rollout_metrics(rollouts) | {
        "experts/correct": float(len(correct)),
        "experts/distinct": float(len(distinct)),
        "experts/solved_share": len({r.example_id for r in correct}) / len(indices),
    }
    stats = stored_stats(trainer.run, phase="train", step=step)
    trainer.metrics.add(step, metrics | stats.metrics)
    signals = {
        "reward": metrics["reward/mean"],
        "kept": float(len(distinct)),
        "length": metrics["length/mean"],
        "tokens": float(stats.tokens),
    }
    return distinct, asked, signals
