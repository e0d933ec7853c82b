"""`rlvr dpo`: preference optimization on pairs of a right and a wrong response, that are given or sampled on-policy.

Enters: a DpoConfig. Leaves: a run directory with metrics, rollouts, and the trained model in `model/`.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlvr_cli.analysis.run_end import report_end
from rlvr_cli.config.dpo import DpoConfig
from rlvr_cli.data.order import batches
from rlvr_cli.data.pairs import Pairs, load_pairs, pair_up
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.directory import adapter_settings
from rlvr_cli.models.identity import model_facts
from rlvr_cli.models.tokens.tokenization import Batch, collate, pad_id_of
from rlvr_cli.rollouts.grading import grader_pool
from rlvr_cli.rollouts.inputs import input_facts, load_template
from rlvr_cli.runs.provenance import resumed_config
from rlvr_cli.terminal import console
from rlvr_cli.training.losses.custom import load_preference_loss, loss_facts
from rlvr_cli.training.losses.objectives import Objective
from rlvr_cli.training.losses.preference import PREFERENCE_LOSSES, PreferenceLoss, preference
from rlvr_cli.training.parallel.nodes import lend_trainers
from rlvr_cli.training.planning.plan import FEW_UPDATES, dpo_plan, online_dpo_plan, print_plan, shared_notes
from rlvr_cli.training.session import (
    Inputs,
    divide_devices,
    evaluation_engine,
    load_eval_dataset,
    load_inputs,
    open_trainer,
    sample_batch,
    warn_of_shared_questions,
)
from rlvr_cli.training.tensors import rollout_tensors
from rlvr_cli.training.traces import check_lengths, encode_traces
from rlvr_cli.training.trainer import Trainer
from rlvr_cli.types import Rollout

T = TypeVar("T")


def run(config: DpoConfig) -> None:
    """Train a model. Raises RlvrError for user errors, Interrupted after a signal."""
    if lend_trainers(config):
        return
    config = resumed_config(config, command="dpo")
    objective_of(config)  # raises if a loss of the user's own does not work
    if config.n_dpo_steps:
        run_on_policy(config)
    else:
        run_on_pairs(config)


def run_on_policy(config: DpoConfig) -> None:
    """Train on pairs of responses that the policy samples."""
    rows = 2 * config.micro_batch_size
    if config.keeps_reference and adapter_settings(config.model):
        raise RlvrError(
            f"{config.model} holds a LoRA adapter: without it, as the reference, the model is not the one that the run starts with.",
            "Start from a merged model (--lora-merge), or use --loss-type simpo, which has no reference.",
        )
    own = own_loss_facts(config)
    inputs = load_inputs(config, questions_per_batch=config.n_prompts_per_rollout_batch, rows=rows, more_facts=own)
    print_plan(online_dpo_plan(config, inputs.facts), config, inputs, rows=rows)
    for note in shared_notes(config):
        console.say(f"note: {note}")
    if config.dry_run:
        return
    with open_trainer(config, inputs, command="dpo", num_updates=0) as trainer:
        train_on_policy(config, trainer, inputs)
    report_end(trainer, output=config.format)


def train_on_policy(config: DpoConfig, trainer: Trainer, inputs: Inputs) -> None:
    """Sample, make pairs, update; repeat. Resumes after an interruption: three counters determine all data that follow."""
    loss, objective = objective_of(config)
    steps, asked, done = (trainer.cursor.get(counter, 0) for counter in ("steps", "asked", "updates_of_step"))
    longer = f"--n-dpo-steps {2 * config.n_dpo_steps}"
    with trainer.progress("steps", config.n_dpo_steps, done=steps, longer=longer) as bar:
        while steps < config.n_dpo_steps and trainer.has_time():
            sampled_at = trainer.updates - done
            if not done:
                trainer.evaluate_if_due()
            pairs, asked_after, signals = sampled_pairs(config, trainer, inputs, step=sampled_at, asked=asked)
            minibatches = epochs_of(config, pairs, first=steps * config.dpo_epochs)
            after = {"steps": steps + 1, "asked": asked_after, "updates_of_step": 0}
            for number, chosen in enumerate(minibatches[done:], start=done + 1):
                if number > 1:
                    trainer.evaluate_if_due()
                rows = [rollout for pair in chosen for rollout in pair]
                batch = rollout_tensors(rows, pad_id=pad_id_of(trainer.tokenizer))
                batch["unit"] = torch.arange(len(rows))[:, None] // 2
                how = {
                    "micro_batch_size": 2 * config.micro_batch_size,
                    "temperature": config.sampling_temperature,
                }
                if loss.with_reference:
                    trainer.weights.sleep()
                    batch["reference_log_probs"] = trainer.log_probs(batch, of="reference", **how)
                within = {"steps": steps, "asked": asked, "updates_of_step": number}
                cursor = after if number == len(minibatches) else within
                signals |= signals_of(trainer.update(batch, cursor=cursor, objective=objective, **how))
            if not minibatches:
                trainer.skip(after)  # no question had both a right and a wrong response
            trainer.metrics.add(sampled_at, {"step/seconds": trainer.clock.step_seconds})
            steps, asked, done = steps + 1, asked_after, 0
            bar.advance(1, **signals)
    trainer.finish()


def sampled_pairs(
    config: DpoConfig, trainer: Trainer, inputs: Inputs, *, step: int, asked: int
) -> tuple[list[tuple[Rollout, Rollout]], int, dict[str, float]]:
    """Sample responses to a round's questions, grade and store them, or read those that an interrupted run stored; pair them.

    Args:
        step: updates done so far.
        asked: questions used so far, counted over all epochs of the dataset.

    Returns:
        Pairs of a right and a wrong response to one question, `asked` after them, and the values for the progress bar.
    """
    wanted, size = config.n_prompts_per_rollout_batch, config.group_size
    rollouts, asked, signals = sample_batch(
        trainer, inputs, num_questions=wanted, num_samples=size, step=step, asked=asked
    )
    pairs: list[tuple[Rollout, Rollout]] = []
    paired = 0
    for first in range(0, len(rollouts), size):
        group = [
            {"prompt": r.prompt, "response": r.response, "reward": r.reward, "rollout": r}
            for r in rollouts[first : first + size]
            if r.finish_reason != "length" and r.response.strip()
        ]
        found = pair_up(group, count=config.pairs_per_question, seed=config.seed) if group else []
        pairs += [(right["rollout"], wrong["rollout"]) for right, wrong in found]
        paired += bool(found)
    trainer.metrics.add(step, {"pairs/count": float(len(pairs)), "pairs/questions_share": paired / wanted})
    return pairs, asked, signals | {"pairs": float(len(pairs))}


def run_on_pairs(config: DpoConfig) -> None:
    """Train on pairs that are given."""
    template = load_template(config, model=config.model)
    pairs = load_pairs(
        config.dataset,
        template,
        question_field=config.question_field,
        skip_bad_lines=config.skip_bad_lines,
        runs_dir=config.runs_dir,
        pairs_per_question=config.pairs_per_question,
        seed=config.seed,
    )
    for message in pairs.messages:
        console.say(message)
    own = sum(not e.question for e in pairs.examples) // 2
    if config.chat and own:
        console.say(
            f"note: {own} pairs have a prompt of their own, which --chat leaves as it is; if it is the question: --question-field prompt"
        )
    num_pairs = len(pairs.examples) // 2
    num_updates = config.dpo_epochs * math.ceil(num_pairs / config.train_batch_size)
    eval_dataset = load_eval_dataset(config)
    warn_of_shared_questions(pairs.examples, eval_dataset)
    pool = grader_pool(config, eval_dataset.default_grader if eval_dataset else None)
    rows, engine = 2 * config.micro_batch_size, evaluation_engine(config, eval_dataset)
    facts = input_facts(
        {
            "dataset": {"name": pairs.name, "rows": num_pairs, "fingerprint": pairs.fingerprint},
            "eval_dataset": eval_dataset and eval_dataset.facts,
        },
        model=model_facts(config.model),
        template=template,
        grader=pool.spec,
        engine=engine.name,
    ) | own_loss_facts(config)
    devices = divide_devices(config, engine=engine.name, rows=rows)
    inputs = Inputs(template, [], eval_dataset, pool, engine, *devices, facts)
    print_plan(dpo_plan(config, facts, num_updates=num_updates), config, inputs, rows=rows)
    if num_updates < FEW_UPDATES:
        console.say(
            f"note: {num_updates} updates change a model little; a smaller --train-batch-size or more --dpo-epochs gives more updates"
        )
    if config.dry_run:
        return
    with open_trainer(config, inputs, command="dpo", num_updates=num_updates) as trainer:
        train(config, trainer, pairs)
    report_end(trainer, output=config.format)


def train(config: DpoConfig, trainer: Trainer, pairs: Pairs) -> None:
    """Minimize the loss of the pairs. Resumes after an interruption: the number of updates done determines all data that follow."""
    loss, objective = objective_of(config)
    prompt_ids, response_ids, _ = encode_traces(
        pairs.examples, pairs.token_ids, trainer.tokenizer, append_eos=config.append_eos, end_sampled=False
    )
    own = trainer.policy.context_length or math.inf
    check_lengths(pairs.examples, prompt_ids, response_ids, longest=own, note=trainer.policy.context_note)

    def batch_of(chosen: list[int]) -> Batch:
        """The rows of these pairs, chosen and rejected in turn."""
        rows = [row for pair in chosen for row in (2 * pair, 2 * pair + 1)]
        batch = collate(
            [prompt_ids[row] for row in rows], [response_ids[row] for row in rows], pad_id=pad_id_of(trainer.tokenizer)
        )
        return batch | {"unit": torch.arange(len(rows))[:, None] // 2}

    num_pairs = len(response_ids) // 2
    updates = epochs_of(config, range(num_pairs))
    # Of the policy that the run starts with. Kept in checkpoints: a resumed run could not compute them again.
    reference = trainer.tensors.get("reference_log_probs")
    lengths = [len(response_ids[2 * pair]) + len(response_ids[2 * pair + 1]) for pair in range(num_pairs)]
    if loss.with_reference and reference is None:
        first_epoch = updates[: len(updates) // config.dpo_epochs]
        reference = reference_log_probs(
            trainer,
            ((chosen, batch_of(chosen)) for chosen in first_epoch),
            lengths,
            micro_batch_size=2 * config.micro_batch_size,
        )
    with trainer.progress("updates", trainer.num_updates, done=trainer.updates) as bar:
        for chosen in islice(updates, trainer.updates, None):
            if not trainer.has_time():
                break
            trainer.evaluate_if_due()
            batch, kept = batch_of(chosen), {}
            if reference is not None:
                by_pair, mask = reference.split(lengths), batch["response_mask"]
                flat = torch.cat([by_pair[pair] for pair in chosen])
                batch["reference_log_probs"] = torch.zeros(mask.shape, dtype=flat.dtype).masked_scatter(mask, flat)
                kept = {"reference_log_probs": reference}
            update = trainer.update(
                batch, cursor={}, tensors=kept, objective=objective, micro_batch_size=2 * config.micro_batch_size
            )
            bar.advance(1, **signals_of(update))
    trainer.finish()


def own_loss_facts(config: DpoConfig) -> dict[str, Any]:
    """The facts of a loss of the user's own; none of a built-in one."""
    return {} if config.loss_type in PREFERENCE_LOSSES else loss_facts(config.loss_type)


def objective_of(config: DpoConfig) -> tuple[PreferenceLoss, Objective]:
    """The loss of --loss-type, and the objective with its options. Raises RlvrError if a loss of the user's own does not work."""
    loss = PREFERENCE_LOSSES.get(config.loss_type)
    if loss is None:
        return PreferenceLoss(with_reference=True, per_token=False), load_preference_loss(config.loss_type)
    return loss, partial(preference, loss=loss, beta=config.scale, gamma=config.target_margin, nll_coef=config.nll_coef)


def epochs_of(config: DpoConfig, pairs: Sequence[T], *, first: int = 0) -> list[list[T]]:
    """The pairs of each update, epoch after epoch, in random order. `first` is the number of the first epoch."""
    return [
        chosen
        for epoch in range(first, first + config.dpo_epochs)
        for chosen in batches(pairs, batch_size=config.train_batch_size, seed=config.seed, epoch=epoch)
    ]


def signals_of(update: Mapping[str, float]) -> dict[str, float]:
    """What the progress bar shows of an update."""
    if not update["update/tokens"]:
        return {}
    return {
        "loss": update["loss/objective"],
        "margin": update["policy/margin_mean"],
        "accuracy": update["policy/accuracy_mean"],
        "chosen": update["policy/chosen_log_ratio_mean"],
        "rejected": update["policy/rejected_log_ratio_mean"],
    }


def reference_log_probs(
    trainer: Trainer, batches: Iterable[tuple[list[int], Batch]], lengths: Sequence[int], *, micro_batch_size: int
) -> Tensor:
    """Compute the log-probabilities of all responses under the current policy.

    In the batches in which they are trained on: so the first update finds the same numbers, and every margin is 0.

    Args:
        batches: each pair once: the numbers of a batch's pairs, and the batch.
        lengths: of each pair, the tokens of both responses.

    Returns:
        (tokens,), nats: chosen and rejected response of pair 0, of pair 1, ...
    """
    started = time.perf_counter()
    trainer.weights.sleep()
    found = [torch.empty(0)] * len(lengths)
    for pairs, batch in batches:
        scored = trainer.log_probs(batch, micro_batch_size=micro_batch_size, temperature=1.0)
        of_pairs = scored[batch["response_mask"]].split([lengths[pair] for pair in pairs])
        for pair, log_probs in zip(pairs, of_pairs, strict=True):
            found[pair] = log_probs
    trainer.metrics.add(trainer.updates, {"scoring/seconds": time.perf_counter() - started})
    return torch.cat(found)
