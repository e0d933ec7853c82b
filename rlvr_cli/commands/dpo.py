"""`rlvr dpo`: preference optimization on pairs of a right and a wrong response, that are given or sampled on-policy.

Enters: a DpoConfig. Leaves: a run directory with metrics, rollouts, and the trained model in `model/`.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from rlvr_cli.analysis.run_end import report_end
from rlvr_cli.commands.sources.plain import Plain
from rlvr_cli.commands.sources.sampling import Sampling
from rlvr_cli.config.dpo import DpoConfig
from rlvr_cli.config.parsing.command_line import typed_options
from rlvr_cli.data.datasets import knows_its_fields
from rlvr_cli.data.order import update_rows
from rlvr_cli.data.pairs import Pairs, load_pairs, pair_up
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.tokens.tokenization import pad_id_of
from rlvr_cli.rollouts.inputs import load_template
from rlvr_cli.runs.provenance import resumed_config
from rlvr_cli.runs.readers import is_run
from rlvr_cli.terminal import console
from rlvr_cli.text import printable
from rlvr_cli.training.loop import RolloutLoop, RolloutSource, data_loop, rollout_loop
from rlvr_cli.training.losses.chosen import own_loss_facts, preference_loss
from rlvr_cli.training.pairs import EncodedPairs
from rlvr_cli.training.planning.notes import length_notes
from rlvr_cli.training.planning.plan import dpo_plan, online_dpo_plan, print_plan
from rlvr_cli.training.read_traces import end_of_turn, opened_twice, recorded_end, recorded_opening
from rlvr_cli.training.session import inputs_of_traces, load_inputs, open_trainer
from rlvr_cli.training.trainer import Trainer
from rlvr_cli.training.updates.tensors import rollout_tensors
from rlvr_cli.types import Rollout

SHOWN = {
    "loss": "loss/objective",
    "margin": "policy/margin_mean",
    "accuracy": "policy/accuracy_mean",
    "chosen": "policy/chosen_log_ratio_mean",
    "rejected": "policy/rejected_log_ratio_mean",
}


def run(config: DpoConfig) -> None:
    """Train a model. Raises RlvrError for user errors, Interrupted after a signal."""
    config = resumed_config(config, command="dpo")
    preference_loss(config)  # raises if a loss of the user's own does not work
    if config.n_dpo_steps:
        run_on_policy(config)
    else:
        run_on_pairs(config)


def run_on_policy(config: DpoConfig) -> None:
    """Train on pairs of responses that the policy samples."""
    num_questions = config.n_prompts_per_rollout_batch
    inputs = load_inputs(config, questions_per_batch=num_questions, more_facts=own_loss_facts(config))
    updates_per_round = config.dpo_epochs * math.ceil(
        num_questions * config.pairs_per_question / config.train_batch_size
    )
    most_updates = config.n_dpo_steps * updates_per_round
    print_plan(online_dpo_plan(config, inputs.facts), config, inputs, most_updates=most_updates)
    if config.dry_run:
        return
    with open_trainer(config, inputs, command="dpo", num_updates=0) as trainer:
        sampling = Sampling(trainer, inputs, num_questions=num_questions, group_size=config.group_size)
        train_on_policy(config, trainer, Plain(sampling))
    report_end(trainer, output=config.format)


def train_on_policy(config: DpoConfig, trainer: Trainer, source: RolloutSource) -> None:
    """Sample, make pairs, update; repeat."""
    loss, objective = preference_loss(config)
    temperature = config.sampling_temperature
    with rollout_loop(trainer, source, num_steps=config.n_dpo_steps, shown=SHOWN) as loop:
        for rollouts in loop.batches():
            pairs = sampled_pairs(config, trainer, loop, rollouts)
            loop.begin_updates(len(pairs), batch_size=config.train_batch_size, epochs=config.dpo_epochs)
            for chosen in loop.minibatches():
                rows = [rollout for pair in chosen for rollout in pairs[pair]]
                batch = rollout_tensors(rows, pad_id=pad_id_of(trainer.tokenizer))
                batch["unit"] = torch.arange(len(rows))[:, None] // 2
                if loss.with_reference:
                    with trainer.scoring():
                        batch["reference_log_probs"] = trainer.log_probs(batch, of="reference", temperature=temperature)
                loop.update(batch, objective=objective, temperature=temperature)
    trainer.finish()


def sampled_pairs(
    config: DpoConfig, trainer: Trainer, loop: RolloutLoop, rollouts: Sequence[Rollout]
) -> list[tuple[Rollout, Rollout]]:
    """Return pairs of a right and a wrong response to one question, and log how many there are."""
    pairs: list[tuple[Rollout, Rollout]] = []
    paired = 0
    for first in range(0, len(rollouts), config.group_size):
        found = pairs_of_question(config, rollouts[first : first + config.group_size])
        pairs += found
        paired += bool(found)
    share = paired / config.n_prompts_per_rollout_batch
    trainer.metrics.add(loop.step, {"pairs/count": float(len(pairs)), "pairs/questions_share": share})
    loop.show(pairs=float(len(pairs)))
    return pairs


def pairs_of_question(config: DpoConfig, rollouts: Sequence[Rollout]) -> list[tuple[Rollout, Rollout]]:
    """Return pairs of a right and a wrong response to one prompt: an environment may have given the rollouts different ones."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for r in rollouts:
        if r.finish_reason != "length" and r.response.strip():
            groups[r.prompt].append({"prompt": r.prompt, "response": r.response, "reward": r.reward, "rollout": r})
    pairs = [
        (right["rollout"], wrong["rollout"])
        for group in groups.values()
        for right, wrong in pair_up(group, count=config.pairs_per_question, seed=config.seed)
    ]
    return pairs[: config.pairs_per_question]


def run_on_pairs(config: DpoConfig) -> None:
    """Train on pairs that are given."""
    template = load_template(config, model=config.model)
    field_is_shared = bool(config.eval_dataset) and not knows_its_fields(config.eval_dataset)
    check_effects_on_pairs(config, field_is_shared=field_is_shared)
    pairs = load_pairs(
        config.dataset,
        template,
        question_field=config.question_field,
        field_is_shared=field_is_shared,
        skip_bad_lines=config.skip_bad_lines,
        runs_dir=config.runs_dir,
        pairs_per_question=config.pairs_per_question,
        seed=config.seed,
        opened_twice=opened_twice(config),
    )
    for message in pairs.messages:
        console.say(message)
    own = sum(e.prompt != template.fill(e.question) for e in pairs.examples) // 2
    if config.chat and own and not pairs.token_ids:  # those of a run stay as they are
        console.say(
            f"note: {own} pairs have a prompt of their own, which --chat leaves as it is; if it is the question: --question-field prompt"
        )
    num_pairs = len(pairs.examples) // 2
    num_updates = config.dpo_epochs * math.ceil(num_pairs / config.train_batch_size)
    dataset = {"name": pairs.name, "rows": num_pairs, "fingerprint": pairs.fingerprint}
    dataset |= recorded_end(config) | recorded_opening(pairs)
    inputs = inputs_of_traces(config, template, pairs.examples, dataset=dataset, more_facts=own_loss_facts(config))
    print_plan(dpo_plan(config, inputs.facts, num_updates=num_updates), config, inputs, most_updates=num_updates)
    for note in length_notes(num_updates, more="a smaller --train-batch-size or more --dpo-epochs"):
        console.say(f"note: {note}")
    if config.dry_run:
        return
    with open_trainer(config, inputs, command="dpo", num_updates=num_updates) as trainer:
        train_on_pairs(config, trainer, pairs)
    report_end(trainer, output=config.format)


def check_effects_on_pairs(config: DpoConfig, *, field_is_shared: bool) -> None:
    """Raise RlvrError for an option of the command line that has no effect on pairs from there.

    Args:
        field_is_shared: see `load_pairs`.
    """
    typed, of_run = typed_options(config), is_run(config.dataset, config.runs_dir)
    if "pairs_per_question" in typed and config.dataset and not of_run:
        raise RlvrError(
            f"--pairs-per-question is of a run, and {printable(config.dataset)} is none: all pairs of a file are taken.",
            "Leave it out; rlvr filter RUN --emit pairs --pairs-per-question N writes such a file.",
        )
    if "question_field" in typed and of_run and not field_is_shared:
        raise RlvrError(
            f"--question-field has no effect: {printable(config.dataset)} is a run, whose prompts are taken as they are, and no "
            "--eval-dataset has such a field.",
            "Leave it out.",
        )


def train_on_pairs(config: DpoConfig, trainer: Trainer, pairs: Pairs) -> None:
    """Minimize the loss of the pairs."""
    loss, objective = preference_loss(config)
    encoded = EncodedPairs(trainer, pairs, append_eos=config.append_eos, end=end_of_turn(config))
    updates = update_rows(
        len(encoded), batch_size=config.train_batch_size, epochs=config.dpo_epochs, seed=config.seed, number=0
    )
    if loss.with_reference:
        encoded.score_reference(updates[: len(updates) // config.dpo_epochs])
    with data_loop(trainer, updates, shown=SHOWN) as loop:
        for chosen in loop.minibatches():
            loop.update(encoded.batch(chosen), tensors=encoded.kept, objective=objective)
    trainer.finish()
