"""`rlvr grpo`: sample groups, grade them, reinforce the responses that were better than their group (handout, algorithm 3).

Enters: a GrpoConfig. Leaves: a run directory with every rollout and metric, checkpoints, and the trained model in `model/`.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from rlvr_cli.analysis.run_end import report_end
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.data.order import update_rows
from rlvr_cli.errors import UsageError
from rlvr_cli.graders.language import check_detector
from rlvr_cli.models.tokens.tokenization import Batch, pad_id_of
from rlvr_cli.rollouts.collect import stored_stats
from rlvr_cli.rollouts.metrics import SamplingStats, rollout_metrics
from rlvr_cli.rollouts.partial import (
    Answers,
    Group,
    Groups,
    extended,
    has_ended,
    partial_metrics,
    sample_segments,
    stored_in_flight,
    with_origin,
)
from rlvr_cli.rollouts.requests import prefetch_groups
from rlvr_cli.runs.manifest import SEGMENTS
from rlvr_cli.runs.provenance import resumed_config
from rlvr_cli.terminal import console
from rlvr_cli.text import storable
from rlvr_cli.training.credit.advantages import batch_normalized, group_advantages, has_signal
from rlvr_cli.training.credit.shaping import reward_terms, rewards_of
from rlvr_cli.training.losses.custom import load_loss, loss_facts
from rlvr_cli.training.losses.objectives import policy_gradient
from rlvr_cli.training.losses.policy_gradient import LOSSES, Loss
from rlvr_cli.training.parallel.nodes import lend_trainers
from rlvr_cli.training.planning.plan import clip_note, grpo_notes, grpo_plan, print_plan
from rlvr_cli.training.question_order import QuestionOrder
from rlvr_cli.training.session import Inputs, load_inputs, open_trainer, sample_questions
from rlvr_cli.training.tensors import rollout_tensors, select_rows, stale_tokens, zero_advantage_rows
from rlvr_cli.training.trainer import Trainer
from rlvr_cli.training.update import check_ratios
from rlvr_cli.types import Rollout


def run(config: GrpoConfig) -> None:
    """Train a model. Raises RlvrError for user errors, Interrupted after a signal."""
    if lend_trainers(config):
        return
    config = resumed_config(config, command="grpo")
    loss = resolve_loss(config)
    if config.language_reward:
        check_detector(config.language_detector)
    rows = config.micro_train_batch_size
    inputs = load_inputs(
        config,
        questions_per_batch=config.n_prompts_per_rollout_batch,
        rows=rows,
        more_facts={} if config.loss_type in LOSSES else loss_facts(config.loss_type),
    )
    print_plan(grpo_plan(config, inputs.facts, loss=loss), config, inputs, rows=rows)
    for note in grpo_notes(config, loss=loss):
        console.say(f"note: {note}")
    if config.dry_run:
        return
    num_updates = config.n_grpo_steps * config.updates_per_rollout_batch
    with open_trainer(config, inputs, command="grpo", num_updates=num_updates) as trainer:
        train(config, trainer, inputs, loss=loss)
    report_end(trainer, output=config.format)


def resolve_loss(config: GrpoConfig) -> Loss:
    """Return the loss of --loss-type.

    Raises:
        RlvrError: a user's own loss does not work (`load_loss`), or the loss does not go with other options.
    """
    loss = LOSSES.get(config.loss_type) or load_loss(config.loss_type, with_reference=config.kl_coef > 0)
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
    return loss


def train(config: GrpoConfig, trainer: Trainer, inputs: Inputs, *, loss: Loss) -> None:
    """Algorithm 3. Resumes after an interruption: three counters, the data cursor, determine all data that follow."""
    objective = partial(
        policy_gradient,
        loss=partial(loss.function, **{name: getattr(config, name) for name in loss.options}),
        kl_coef=config.kl_coef,
        kl_type=config.kl_type,
        importance_cap=config.importance_truncation,
        importance_floor=config.importance_floor,
        importance_masked=config.importance_correction == "masked",
        min_tokens=config.sampling_min_tokens,
    )
    clipping_seen = False
    steps, asked, done = (trainer.cursor.get(counter, 0) for counter in ("steps", "asked", "updates_of_batch"))
    order = QuestionOrder(config, inputs.questions, trainer.run, before=trainer.updates - done)
    flight: dict[str, Group] = {}
    if config.partial_rollout_tokens:
        flight = stored_in_flight(
            trainer.run,
            before=trainer.updates - done,
            group_size=config.group_size,
            max_tokens=config.sampling_max_tokens,
            tokens=config.partial_rollout_tokens,
        )
    longer = f"--n-grpo-steps {2 * config.n_grpo_steps}"
    with trainer.progress("steps", config.n_grpo_steps, done=steps, longer=longer) as bar:
        while steps < config.n_grpo_steps and trainer.has_time():
            sampled_at = trainer.updates - done
            place = {"order": order, "number": steps, "step": sampled_at, "asked": asked}
            if config.partial_rollout_tokens:
                rollouts, asked_after, signals, flight = partial_batch(
                    config, trainer, inputs, loss=loss, flight=flight, **place
                )
            else:
                rollouts, asked_after, signals = rollout_batch(config, trainer, inputs, loss=loss, **place)
            # If no group has a signal, there is one empty update, which is skipped and counted.
            minibatches = update_rows(
                len(rollouts),
                batch_size=config.train_batch_size,
                epochs=config.epochs_per_rollout_batch,
                seed=config.seed,
                number=steps,
            ) or [[]]
            trainer.evaluate_if_due()
            if config.async_steps:
                if not done:
                    trainer.weights.snapshot_policy(trainer.updates)
                if steps + 1 < config.n_grpo_steps:
                    step = sampled_at + len(minibatches)
                    sample_ahead(config, trainer, inputs, order=order, number=steps + 1, step=step, asked=asked_after)
            batch = training_batch(config, trainer, rollouts, minibatches, loss=loss)
            kept = {name: batch[name] for name in batch if name == "old_log_probs"}
            after = {"steps": steps + 1, "asked": asked_after, "updates_of_batch": 0}
            for number, rows in enumerate(minibatches[done:], start=done + 1):
                if number > done + 1:
                    trainer.evaluate_if_due()
                last = number == len(minibatches)
                update = trainer.update(
                    select_rows(batch, rows),
                    cursor=after if last else {"steps": steps, "asked": asked, "updates_of_batch": number},
                    tensors={} if last else kept,
                    objective=objective,
                    skip_zero_advantage=loss.skip_zero_advantage,
                    micro_batch_size=config.micro_train_batch_size,
                    normalization=config.length_normalization,
                    normalize_constant=config.masked_normalize_constant,
                    share=len(rows) / config.train_batch_size if config.partial_rollout_tokens else 1.0,
                    temperature=config.sampling_temperature,
                )
                if update["update/tokens"]:
                    signals |= {"entropy": update["policy/entropy"], "grad": update["optimizer/grad_norm"]}
                    if number == 1:
                        if config.loss_type in LOSSES:  # a loss of the user's own may report another ratio
                            check_ratios(update, dtype=trainer.compute_dtype)
                        if not config.async_steps:  # else an older policy sampled, and they differ
                            trainer.check_mismatch(update, advice="--importance-correction truncated corrects for it")
                    elif not clipping_seen and update["policy/ratio_min"] < update["policy/ratio_max"]:
                        note = clip_note(config, update, loss=loss)
                        # Where no response has an advantage, nothing is cut.
                        clipping_seen = bool(note) or bool(batch["advantages"][rows].any())
                        if note:
                            console.say(f"note: {note}")
            if not rollouts and config.partial_rollout_tokens:
                console.say(f"step {steps}: all {len(flight)} questions go on, so there is nothing to train on yet")
            trainer.metrics.add(sampled_at, {"step/seconds": trainer.clock.step_seconds})
            steps, asked, done = steps + 1, asked_after, 0
            bar.advance(1, **signals)
    if flight:
        console.say(
            f"{len(flight)} questions are unfinished and were not trained on: with more --n-grpo-steps, --resume goes on with them"
        )
    trainer.finish()


def rollout_batch(
    config: GrpoConfig,
    trainer: Trainer,
    inputs: Inputs,
    *,
    loss: Loss,
    order: QuestionOrder,
    number: int,
    step: int,
    asked: int,
) -> tuple[list[Rollout], int, dict[str, float]]:
    """Sample groups, grade them, and store them with their advantages; or read those that an interrupted run stored.

    With dynamic sampling, groups without a signal are dropped, and other questions are sampled until the batch is full.

    Args:
        number: of the batch, from 0.
        step: updates done before the batch is trained on.
        asked: questions used so far, counted over all epochs of the dataset.

    Returns:
        The rollouts to train on, `asked` after them, and the values for the progress bar.
    """
    wanted, size = config.n_prompts_per_rollout_batch, config.group_size
    groups: list[list[Rollout]] = []  # all that were sampled
    used: list[list[Rollout]] = []
    indices: list[int] = []
    rounds = 0
    syncing = trainer.sync_weights(trainer.updates, rollouts=True)
    while len(used) < wanted and rounds < (config.max_sampling_rounds if config.dynamic_sampling else 1):
        fresh, asked = order.draw(wanted - len(used), number=number, start=asked, exclude=indices)
        if not fresh:
            break
        rollouts = sample_questions(
            trainer,
            inputs,
            fresh,
            step=step,
            num_samples=size,
            credit=partial(credit, config, loss=loss, number=number),
        )
        new = [rollouts[first : first + size] for first in range(0, len(rollouts), size)]
        signal = has_signal(rewards_of(rollouts), group_size=size).tolist()
        groups += new
        used += [group for group, kept in zip(new, signal, strict=True) if kept or not config.dynamic_sampling]
        indices, rounds = indices + fresh, rounds + 1
    sampled = [r for group in groups for r in group]
    order.count(sampled)
    metrics = {
        **group_metrics(config, sampled, step=step),
        "groups/used": float(len(used)),
        "sampling/rounds": float(rounds),
        "weight_sync/seconds": syncing,
    }
    stats = stored_stats(trainer.run, phase="train", step=step)
    trainer.metrics.add(step, metrics | stats.metrics)
    return [r for group in used for r in group], asked, signals_of(metrics, stats)


def group_metrics(config: GrpoConfig, rollouts: Sequence[Rollout], *, step: int) -> dict[str, float]:
    """Metrics of the groups of a batch. `step`: updates done before it is trained on."""
    size = config.group_size
    means = [
        sum(r.reward or 0.0 for r in rollouts[first : first + size]) / size for first in range(0, len(rollouts), size)
    ]
    metrics = {"groups/sampled": float(len(means))}
    if not means:
        return metrics
    metrics |= rollout_metrics(rollouts) | {
        "groups/signal_share": sum(has_signal(rewards_of(rollouts), group_size=size).tolist()) / len(means),
        "groups/all_correct_share": sum(mean == 1 for mean in means) / len(means),
        "groups/all_wrong_share": sum(mean == 0 for mean in means) / len(means),
        "sampling/lag": float(step - min(r.policy_version for r in rollouts)),  # updates since the policy that sampled
    }
    if config.shapes_rewards:
        metrics["reward/shaped"] = sum(r.shaped_reward or 0.0 for r in rollouts) / len(rollouts)
    return metrics


def signals_of(metrics: Mapping[str, float], stats: SamplingStats) -> dict[str, float]:
    """The values for the progress bar."""
    shown = {
        "reward": "reward/mean",
        "signal": "groups/signal_share",
        "length": "length/mean",
        "truncated": "length/truncated_share",
        "unfinished": "partial/unfinished_share",
    }
    return {label: metrics[name] for label, name in shown.items() if name in metrics} | {"tokens": float(stats.tokens)}


def partial_batch(
    config: GrpoConfig,
    trainer: Trainer,
    inputs: Inputs,
    *,
    loss: Loss,
    flight: Groups,
    order: QuestionOrder,
    number: int,
    step: int,
    asked: int,
) -> tuple[list[Rollout], int, dict[str, float], dict[str, Group]]:
    """Let every response in flight go on by --partial-rollout-tokens; grade and store the groups whose responses have all ended.

    As many new questions are asked as groups ended in the step before, so that the number in flight stays the same.

    Args:
        flight: the groups in flight before the step.
        number, step, asked: as for `rollout_batch`.

    Returns:
        The rollouts to train on, none if no group has ended; `asked` after them; the values for the progress bar; and the groups that
        are in flight now.
    """
    places = {storable(question.id): index for index, question in enumerate(inputs.questions)}
    begun = [places[name] for name in flight]
    fresh, asked = order.draw(
        config.n_prompts_per_rollout_batch - len(begun), number=number, start=asked, exclude=begun
    )
    syncing = trainer.sync_weights(trainer.updates, rollouts=True)
    segments = sample_segments(
        trainer.run,
        step=step,
        groups=flight,
        questions=[inputs.questions[i] for i in begun + fresh],
        tokens=config.partial_rollout_tokens,
        template=inputs.template,
        num_samples=config.group_size,
        sampler=trainer.sampler,
        params=config.sampling_params,
        seed=config.seed,
        stop=trainer.stop,
    )
    groups = extended(flight, segments, group_size=config.group_size)
    ended = {name: group for name, group in groups.items() if has_ended(group)}
    flight = {name: group for name, group in groups.items() if name not in ended}

    def credited(rollouts: Sequence[Rollout]) -> list[Rollout]:
        own = [with_origin(r, ended[storable(r.example_id)][r.sample_index]) for r in rollouts]
        return credit(config, own, loss=loss, number=number)

    rollouts = sample_questions(
        trainer,
        inputs,
        [places[name] for name in ended],
        step=step,
        num_samples=config.group_size,
        credit=credited,
        sampler=Answers(ended, trainer.sampler),
    )
    order.count(rollouts)
    metrics = {
        **group_metrics(config, rollouts, step=step),
        **partial_metrics(segments, groups=flight, ended=ended),
        "groups/used": float(len(ended)),
        "sampling/rounds": 1.0,
        "weight_sync/seconds": syncing,
    }
    sampling = SamplingStats.of_cost(trainer.run.cost("train", step, folder=SEGMENTS))
    grading = stored_stats(trainer.run, phase="train", step=step)
    stats = replace(sampling, grading_seconds=grading.grading_seconds)
    trainer.metrics.add(step, metrics | stats.metrics)
    return rollouts, asked, signals_of(metrics, stats), flight


def sample_ahead(
    config: GrpoConfig, trainer: Trainer, inputs: Inputs, *, order: QuestionOrder, number: int, step: int, asked: int
) -> None:
    """Let the sampling process start on the next batch's questions while the trainer trains on the current batch."""
    assert trainer.weights.process is not None
    trainer.sync_weights(trainer.updates, rollouts=True)
    indices, _ = order.draw(config.n_prompts_per_rollout_batch, number=number, start=asked, exclude=[])
    prefetch_groups(
        trainer.run,
        step=step,
        examples=[inputs.questions[i] for i in indices],
        num_samples=config.group_size,
        template=inputs.template,
        sampler=trainer.weights.process,
        params=config.sampling_params,
        seed=config.seed,
    )


def credit(config: GrpoConfig, rollouts: Sequence[Rollout], *, loss: Loss, number: int) -> list[Rollout]:
    """Return the rollouts with their shaped rewards, the terms of these, and their advantages.

    The advantage is the shaped reward itself for a loss with `raw_rewards`. With --std-normalization batch it is only centered: the
    batch, over which its standard deviation is taken (`training_batch`), is complete later.

    Args:
        rollouts: of whole groups, each group contiguous.
        number: of the rollout batch, from 0.
    """
    terms = reward_terms(rollouts, config, number=number)
    shaped = sum(terms.values(), rewards_of(rollouts))
    advantages = shaped
    if not loss.raw_rewards:
        advantages = group_advantages(
            shaped,
            group_size=config.group_size,
            advantage_eps=config.advantage_eps,
            normalize_by_std=config.std_over == "group",
        )
    columns = {"shaped_reward": shaped, "advantage": advantages, **terms}
    values = zip(*(tensor.tolist() for tensor in columns.values()), strict=True)
    return [replace(r, **dict(zip(columns, row, strict=True))) for r, row in zip(rollouts, values, strict=True)]


def training_batch(
    config: GrpoConfig,
    trainer: Trainer,
    rollouts: Sequence[Rollout],
    minibatches: list[list[int]],
    *,
    loss: Loss,
) -> Batch:
    """Turn rollouts into tensors, with their groups and the log-probabilities that the objective needs.

    `old_log_probs`, of the policy before the first update on the batch, are computed once per batch, and only if there is more
    than one update: on-policy, they equal those of the update itself. They are kept in checkpoints within the batch: a
    resumed run could not compute them again, because the weights have changed.
    """
    if not rollouts:
        return {}
    started = time.perf_counter()
    trainer.weights.sleep()
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
    if not config.kl_coef:
        batch["zero_advantage"] = zero_advantage_rows(batch)
    log_probs = partial(
        trainer.log_probs,
        micro_batch_size=config.micro_train_batch_size,
        temperature=config.sampling_temperature,
    )
    if config.kl_coef:
        batch["reference_log_probs"] = log_probs(batch, of="reference")
    if len(minibatches) > 1:
        old = trainer.tensors.get("old_log_probs")
        if old is None:
            old = torch.zeros(batch["response_mask"].shape)
            for rows in minibatches[: len(minibatches) // config.epochs_per_rollout_batch]:
                old[rows] = log_probs(select_rows(batch, rows))
        batch["old_log_probs"] = old
    trainer.metrics.add(trainer.updates, {"scoring/seconds": time.perf_counter() - started})
    return batch
