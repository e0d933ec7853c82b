"""`rlvr distill`: on-policy distillation: the student samples, and descends its divergence from a teacher where it went.

Enters: a DistillConfig. Leaves: a run directory with every rollout and metric, checkpoints, and the trained model in `model/`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, compress, repeat
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from rlvr_cli.analysis.run_end import report_end
from rlvr_cli.commands.sources.plain import Plain
from rlvr_cli.commands.sources.sampling import Sampling
from rlvr_cli.config.distill import DistillConfig
from rlvr_cli.config.parsing.options import flag
from rlvr_cli.errors import RlvrError, UsageError
from rlvr_cli.models.directory import check_unquantized
from rlvr_cli.models.divergence import check_teacher
from rlvr_cli.models.identity import model_facts, model_path
from rlvr_cli.models.tokens.tokenization import Batch, pad_id_of
from rlvr_cli.rollouts.prompt_lengths import long_prompts
from rlvr_cli.runs.provenance import resumed_config
from rlvr_cli.runs.remote.store import is_address
from rlvr_cli.samplers.served_teacher import ServedTeacher
from rlvr_cli.terminal import console
from rlvr_cli.training.checks import UpdateChecks
from rlvr_cli.training.credit.advantages import group_advantages
from rlvr_cli.training.credit.shaping import rewards_of
from rlvr_cli.training.loop import RolloutSource, rollout_loop
from rlvr_cli.training.losses.distillation import DIVERGENCES, distillation
from rlvr_cli.training.losses.objectives import policy_gradient
from rlvr_cli.training.planning.plan import distill_plan, print_plan
from rlvr_cli.training.session import Inputs, load_inputs, open_trainer
from rlvr_cli.training.trainer import Trainer
from rlvr_cli.training.updates.tensors import rollout_tensors
from rlvr_cli.types import Rollout

SHOWN = {
    "divergence": "policy/divergence_mean",
    "teacher": "policy/teacher_log_prob_mean",
    "grad": "optimizer/grad_norm",
}


def run(config: DistillConfig) -> None:
    """Train a model. Raises RlvrError for user errors, Interrupted after a signal."""
    config = resumed_config(config, command="distill")
    if not config.teacher:
        raise UsageError("rlvr distill needs a teacher.", "Name one with --teacher: a directory or a hub id.")
    if "://" in config.teacher and not is_address(config.teacher):
        raise UsageError(
            f"--teacher {config.teacher} is an address, and the student's tokens are compared with the teacher's.",
            "Name the model with --teacher, for its tokenizer, and the server with --teacher-url.",
        )
    check_teacher(model_path(config.teacher), student=model_path(config.model))
    num_questions = config.rollout_batch_size // config.group_size
    inputs = load_inputs(
        config,
        questions_per_batch=num_questions,
        more_facts={"teacher": teacher_facts(config)},
    )
    print_plan(distill_plan(config, inputs.facts), config, inputs, most_updates=config.n_distill_steps)
    if config.dry_run:
        return
    served = ServedTeacher(config.teacher_url, config.teacher) if config.teacher_url else None
    with open_trainer(config, inputs, command="distill", num_updates=config.n_distill_steps) as trainer:
        sampling = Sampling(
            trainer,
            inputs,
            num_questions=num_questions,
            group_size=config.group_size,
            credit=partial(credit, config),
        )
        if served is not None:
            check_context(config, inputs, trainer, served=served)
        train(config, trainer, Plain(sampling), served=served)
    report_end(trainer, output=config.format)


def teacher_facts(config: DistillConfig) -> dict[str, Any]:
    """What identifies the teacher in run.json. A served one has no files here, and may move to another address."""
    if config.teacher_url:
        return {"name": config.teacher, "endpoint": "vLLM"}
    facts = model_facts(config.teacher, fetch=not config.dry_run)
    check_unquantized(model_path(config.teacher))
    return facts


def check_context(config: DistillConfig, inputs: Inputs, trainer: Trainer, *, served: ServedTeacher) -> None:
    """Raise RlvrError if the teacher's server takes less than a prompt and the longest response to it; of a run that goes on, say so."""
    if served.context_length is None:
        return
    longest = config.longest_response(config.sampling_max_tokens)
    context = served.context_length
    found = long_prompts(
        inputs.questions, inputs.template, lambda: trainer.tokenizer, max_tokens=longest, context=context
    )
    problem, needed = max(found, key=itemgetter(1), default=("", 0))
    if not problem:
        return
    problem = f"{problem}, and the teacher's server at {served.url} takes {context}."
    larger = f"Start it with --max-model-len {needed + 1} or more"
    if config.resume:  # its responses may all have been shorter
        console.say(f"warning: {problem} {larger}.")
        return
    shorter = flag("max_episode_tokens" if config.max_episode_tokens else "sampling_max_tokens")
    raise RlvrError(problem, f"{larger}, or allow only shorter responses: {shorter}.")


def train(config: DistillConfig, trainer: Trainer, source: RolloutSource, *, served: ServedTeacher | None) -> None:
    """Sample, then update once.

    Args:
        served: the teacher, if it is on a server.
    """
    objective = partial(
        policy_gradient,
        loss=partial(distillation, divergence=config.divergence, task_reward=config.task_reward),
        min_tokens=config.sampling_min_tokens,
    )
    checks = UpdateChecks(trainer, ratios=False)
    with rollout_loop(trainer, source, num_steps=config.n_distill_steps, checks=checks, shown=SHOWN) as loop:
        for rollouts in loop.batches():
            loop.update(
                training_batch(config, trainer, rollouts, served=served),
                objective=objective,
                temperature=config.sampling_temperature,
            )
    trainer.finish()


def credit(config: DistillConfig, rollouts: Sequence[Rollout], *, number: int) -> Sequence[Rollout]:
    """Return the rollouts with the advantages that --task-reward weights: GRPO's, of whole groups, each group contiguous."""
    if not config.task_reward:
        return rollouts
    advantages = group_advantages(rewards_of(rollouts), group_size=config.group_size).tolist()
    return [replace(r, advantage=a) for r, a in zip(rollouts, advantages, strict=True)]


def training_batch(
    config: DistillConfig, trainer: Trainer, rollouts: Sequence[Rollout], *, served: ServedTeacher | None
) -> Batch:
    """Turn rollouts into tensors, for `sampled` with the teacher's log-probabilities of their tokens.

    Args:
        served: the teacher, if it is on a server.

    Raises:
        RlvrError: the student sampled a token that the teacher's vocabulary lacks, or as `ServedTeacher.log_probs`.
    """
    batch = rollout_tensors(rollouts, pad_id=pad_id_of(trainer.tokenizer))
    if served is not None:
        with trainer.scoring():
            return batch | {
                "teacher_log_probs": served_log_probs(trainer, rollouts, batch["response_mask"], served=served)
            }
    teacher = trainer.trainers.replica.teacher
    assert teacher is not None
    if (largest := int(batch["labels"].max())) >= teacher.vocabulary_size:
        raise RlvrError(
            f"The student sampled token {largest}, and the teacher has {teacher.vocabulary_size} tokens.",
            "Its embedding has more rows than its tokenizer has tokens: lower --sampling-top-p, or cut the embedding.",
        )
    if not DIVERGENCES[config.divergence].full:
        with trainer.scoring():
            scored = trainer.log_probs(batch, of="teacher", temperature=config.sampling_temperature)
            batch["teacher_log_probs"] = scored
    return batch


def served_log_probs(trainer: Trainer, rollouts: Sequence[Rollout], mask: Tensor, *, served: ServedTeacher) -> Tensor:
    """Ask the teacher's server for the log-probabilities of the responses' tokens. Returns them where the mask is, (batch, seq)."""
    activity = trainer.run.activity
    with activity.doing("log-probabilities of the teacher", total=len(rollouts), unit="responses"):
        found = served.log_probs([(r.prompt_ids, r.response_ids) for r in rollouts], progress=activity.progress)
    own = (compress(row, r.response_mask or repeat(True)) for r, row in zip(rollouts, found, strict=True))
    flat = torch.tensor([*chain.from_iterable(own)], dtype=torch.float32)
    assert len(flat) == int(mask.sum()), "one for each token that the policy sampled"
    return torch.zeros(mask.shape).masked_scatter(mask, flat)
