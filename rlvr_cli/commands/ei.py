"""`rlvr ei`: expert iteration: sample, fine-tune on the correct responses, repeat (handout, algorithm 2).

Enters: an EiConfig. Leaves: a run directory with every rollout and metric, checkpoints, and the trained model in `model/`.
"""

import math
from collections.abc import Sequence

from rlvr_cli.analysis.run_end import report_end
from rlvr_cli.commands.sources.plain import Plain
from rlvr_cli.commands.sources.sampling import Sampling
from rlvr_cli.config.ei import EiConfig
from rlvr_cli.models.tokens.tokenization import pad_id_of
from rlvr_cli.runs.provenance import resumed_config
from rlvr_cli.runs.storage.files import typed
from rlvr_cli.terminal import console
from rlvr_cli.training.loop import RolloutLoop, RolloutSource, rollout_loop
from rlvr_cli.training.planning.plan import ei_plan, print_plan
from rlvr_cli.training.session import load_inputs, open_trainer
from rlvr_cli.training.trainer import Trainer
from rlvr_cli.training.updates.tensors import rollout_tensors
from rlvr_cli.types import Rollout

SHOWN = {"nll": "loss/nll", "entropy": "policy/entropy"}


def run(config: EiConfig) -> None:
    """Train a model. Raises RlvrError for user errors, Interrupted after a signal."""
    config = resumed_config(config, command="ei")
    inputs = load_inputs(config, questions_per_batch=config.ei_batch_size)
    updates_per_round = config.sft_epochs * math.ceil(
        config.ei_batch_size * config.group_size / config.train_batch_size
    )
    most_updates = config.n_ei_steps * updates_per_round
    print_plan(ei_plan(config, inputs.facts), config, inputs, most_updates=most_updates)
    if config.dry_run:
        return
    with open_trainer(config, inputs, command="ei", num_updates=0) as trainer:
        sampling = Sampling(trainer, inputs, num_questions=config.ei_batch_size, group_size=config.group_size)
        train(config, trainer, Plain(sampling))
    report_end(trainer, output=config.format)


def train(config: EiConfig, trainer: Trainer, source: RolloutSource) -> None:
    """Algorithm 2: the numbers are those of its lines. Lines 3 to 6, which make a batch, are the source's."""
    steps = config.n_ei_steps
    with rollout_loop(trainer, source, num_steps=steps, shown=SHOWN, evaluate_every="steps") as loop:
        for rollouts in loop.batches():  # 2 to 6
            experts = expert_rollouts(trainer, loop, rollouts)  # 7
            loop.begin_updates(len(experts), batch_size=config.train_batch_size, epochs=config.sft_epochs)
            if not experts:
                say_that_none_was_correct(loop.number + 1, trainer)
            for rows in loop.minibatches():  # 8
                batch = rollout_tensors([experts[row] for row in rows], pad_id=pad_id_of(trainer.tokenizer))
                loop.update(batch)
    trainer.finish()


def expert_rollouts(trainer: Trainer, loop: RolloutLoop, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the correct responses without duplicates, and log how many there are."""
    correct = [r for r in rollouts if r.reward is not None and r.reward > 0.5]
    distinct = list({(r.prompt_ids, r.response_ids): r for r in correct}.values())
    metrics = {
        "experts/correct": float(len(correct)),
        "experts/distinct": float(len(distinct)),
        "experts/solved_share": len({r.example_id for r in correct}) / len({r.example_id for r in rollouts}),
    }
    trainer.metrics.add(loop.step, metrics)
    loop.show(kept=float(len(distinct)))
    return distinct


def say_that_none_was_correct(step: int, trainer: Trainer) -> None:
    """Say that a step has nothing to train on, and what to do. `step` is its number, from 1."""
    console.say(
        f"step {step}: no response was correct, so there is nothing to train on; the next step uses other questions.\n"
        f"  If that goes on: a model that was fine-tuned first (rlvr sft), a larger --group-size, easier questions, or "
        f"another --prompt or --grader. rlvr analyze failures {typed(trainer.run.path)} --phase train shows what was wrong."
    )
