"""What a training command reads and opens before its first step.

Enters: a config. Leaves: `Inputs`, or an RlvrError before the model is loaded; then an open `Trainer`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from rlvr_cli.config.parsing.options import flag
from rlvr_cli.config.shared.prompt import ShotOptions
from rlvr_cli.config.shared.training import TrainingConfig
from rlvr_cli.data.datasets import Dataset, evaluation_spec, knows_its_fields, load_dataset
from rlvr_cli.data.prompts import PromptTemplate, compared_text
from rlvr_cli.environments.pool import EnvironmentPool
from rlvr_cli.errors import RlvrError, missing_extra
from rlvr_cli.models.compute.bitsandbytes import check_bitsandbytes
from rlvr_cli.models.compute.device import cuda_devices, dtype_name, faster_in_bfloat16, resolve_device
from rlvr_cli.models.compute.liger import check_liger
from rlvr_cli.models.directory import adapter_settings, check_unquantized
from rlvr_cli.models.identity import model_facts, model_path, model_shape
from rlvr_cli.parallel.start import join
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.grading import grader_pool
from rlvr_cli.rollouts.inputs import (
    check_of_one_kind,
    check_stops,
    input_facts,
    load_questions,
    load_template,
    needs_answers,
)
from rlvr_cli.rollouts.prompt_lengths import check_prompts
from rlvr_cli.rollouts.shots import with_shots
from rlvr_cli.runs.provenance import open_run
from rlvr_cli.runs.readers import read_metadata, resolve_run
from rlvr_cli.runs.storage.files import typed
from rlvr_cli.samplers.episodes.open import environment_facts, open_environment
from rlvr_cli.samplers.open import Engine, choose_engine, engine_kind, sampler_recorded
from rlvr_cli.terminal import console
from rlvr_cli.text import printable
from rlvr_cli.trackers.children import tracked
from rlvr_cli.training.checkpoints import newest_position
from rlvr_cli.training.divergence import Diverged
from rlvr_cli.training.loop import BY_BATCH
from rlvr_cli.training.parallel.placement import Placement, place, place_on
from rlvr_cli.training.planning.memory import MemoryPlan, compute_dtype, memory_plan
from rlvr_cli.training.trainer import Trainer
from rlvr_cli.types import Example, Graders


@dataclass(frozen=True)
class Inputs:
    """The inputs of a training command."""

    template: PromptTemplate
    questions: Sequence[Example]  # that the command samples answers to; empty if it trains on traces
    eval_dataset: Dataset | None  # the evaluation questions
    pool: Graders  # not started yet
    engine: Engine
    placement: Placement
    memory: MemoryPlan
    compute_dtype: str  # of matrix products: --compute-dtype, or what auto is here
    facts: dict[str, Any]  # for run.json


def load_inputs(
    config: TrainingConfig, *, questions_per_batch: int, more_facts: dict[str, Any] | None = None
) -> Inputs:
    """Load the inputs of a command that samples what it trains on.

    Args:
        more_facts: further facts for run.json.

    Raises:
        RlvrError: questions cannot be read or are too few, prompt, grader or engine are unknown, or a device is missing or
            too small.
    """
    template = load_template(config, model=config.model)
    dataset = load_questions(config, purpose="train", template=template)
    if dataset.rows < questions_per_batch:
        raise RlvrError(
            f"A batch needs {questions_per_batch} different questions; {dataset.name} has {dataset.rows}.",
            "Use a smaller batch, a larger --group-size, or a larger --dataset.",
        )
    eval_dataset = load_eval_dataset(config, template)
    warn_of_shared_questions(dataset.examples, eval_dataset, template)
    pool = grader_pool(config, dataset.default_grader)
    other = grader_pool(config, eval_dataset.default_grader) if eval_dataset else pool
    if eval_dataset and other.spec != pool.spec:
        raise RlvrError(
            f"{dataset.name} is graded by {pool.spec}, and {eval_dataset.name} by {other.spec}.",
            "Set one grader for both with --grader, or evaluate on questions of the same kind.",
        )
    engine = choose_engine(
        config.engine,
        base_url="",
        embedded=config.trainers > 1 and not config.samples_apart,
        sampler_urls=config.sampler_urls,
    )
    facts = (
        input_facts(
            {"dataset": dataset.facts, "eval_dataset": eval_dataset and eval_dataset.facts},
            model=model_facts(config.model, fetch=not config.dry_run),
            template=template,
            grader=pool.facts,
            engine=engine.name,
        )
        | environment_facts(config)
        | (more_facts or {})
    )
    check_stops(config, config.model)
    return Inputs(
        template,
        dataset.examples,
        eval_dataset,
        pool,
        engine,
        *divide_devices(config, engine=engine.name),
        facts,
    )


def inputs_of_traces(
    config: TrainingConfig,
    template: PromptTemplate,
    examples: Sequence[Example],
    *,
    dataset: dict[str, Any],
    more_facts: dict[str, Any] | None = None,
) -> Inputs:
    """Return the inputs of a command that trains on responses that are given, and samples only for evaluations.

    Args:
        examples: what is trained on.
        dataset: the facts of these, for run.json.
        more_facts: as for `load_inputs`.

    Raises:
        RlvrError: evaluation questions cannot be read, grader or engine are unknown, or a device is missing or too small.
    """
    eval_dataset = load_eval_dataset(config, template)
    warn_of_shared_questions(examples, eval_dataset, template)
    pool = grader_pool(config, eval_dataset.default_grader if eval_dataset else None)
    engine = evaluation_engine(config, eval_dataset)
    facts = (
        input_facts(
            {"dataset": dataset, "eval_dataset": eval_dataset and eval_dataset.facts},
            model=model_facts(config.model),
            template=template,
            grader=pool.facts,
            engine=engine.name,
        )
        | environment_facts(config)
        | (more_facts or {})
    )
    if eval_dataset is not None:
        check_stops(config, config.model)
    return Inputs(template, [], eval_dataset, pool, engine, *divide_devices(config, engine=engine.name), facts)


def evaluation_engine(config: TrainingConfig, eval_dataset: Dataset | None) -> Engine:
    """Return the engine of a command that samples only for evaluations: transformers, unless another is asked for.

    Raises:
        RlvrError: its package is not installed, there are no evaluations, or an option is of another engine.
    """
    given = {
        "engine": config.engine == "vllm", "samplers": config.samplers > 1, "sampler_urls": bool(config.sampler_urls)
    }  # fmt: skip
    name = next((name for name, is_given in given.items() if is_given), None)
    if name is not None and eval_dataset is None:
        raise RlvrError(
            f"{flag(name)} is for evaluations here, and there are no evaluation questions.",
            "Give them with --eval-dataset, or leave it out.",
        )
    of_vllm = ("dtype", "max_model_len", "gpu_memory_utilization")
    name = next((name for name in of_vllm if config.sources.get(name) == "flag"), None)
    if name is not None and config.engine != "vllm":
        raise RlvrError(
            f"{flag(name)} is of vLLM, which answers evaluations here only with --engine vllm.",
            "Leave it out." if config.sampler_urls else "Leave it out, or add --engine vllm.",
        )
    if config.sampler_urls or config.engine == "vllm":
        return choose_engine(config.engine, base_url="", sampler_urls=config.sampler_urls)
    return Engine("transformers", "not asked for another")


def divide_devices(config: TrainingConfig, *, engine: str) -> tuple[Placement, MemoryPlan, str]:
    """Place trainer and engine on the devices of this machine, plan their memory, and choose the precision of matrix products.

    Raises:
        RlvrError: there is no such device, or it is too small; a package of the options is not installed; or as
            `check_adapter` and `check_unquantized`.
    """
    check_adapter(config)
    check_unquantized(model_path(config.model))
    if config.optimizer == "adamw_8bit":
        check_bitsandbytes()
    if config.fused_kernels == "liger":
        check_liger()
    resolve_device(config.device)
    capacities = cuda_devices()
    how = {"engine": engine, "in_process": not config.samples_apart, "samplers": config.samplers}
    if config.cluster:
        placement = place_on(join(config.cluster).nodes, config.device, trainers=config.trainers, **how)
    else:
        placement = place(config.device, cuda_devices=[*capacities], trainers=config.trainers, **how)
    shape = model_shape(model_path(config.model))
    if _chooses_bfloat16(config, shape, placement, engine=engine):
        config = replace(config, compute_dtype="bfloat16")
    rows = config.micro_batch_rows
    plan = memory_plan(config, shape, placement, engine=engine, rows=rows, capacities=capacities)
    return placement, plan, dtype_name(compute_dtype(config, placement.trainer))


def _chooses_bfloat16(
    config: TrainingConfig, shape: Mapping[str, int] | None, placement: Placement, *, engine: str
) -> bool:
    """Return whether --compute-dtype auto is bfloat16 on this CPU. A run that began on a CPU goes on as it began.

    An engine with weights of its own samples in float32 there.
    """
    if (config.compute_dtype, config.param_dtype, placement.trainer) != ("auto", "float32", "cpu"):
        return False
    if engine_kind(engine).share is None:
        return False
    if config.resume:
        began = read_metadata(resolve_run(config.resume, config.runs_dir)).get("policy", {})
        if began.get("device", "cpu") == "cpu":
            return began.get("compute_dtype") == "bfloat16"
    alike = not placement.nodes  # the processors of a cluster may differ
    return alike and faster_in_bfloat16(shape["parameters"] if shape else 0)


def check_adapter(config: TrainingConfig) -> None:
    """Raise RlvrError if peft is missing, or --model holds an adapter that these options do not go on training."""
    settings = adapter_settings(model_path(config.model))
    if (config.lora_rank or settings is not None) and find_spec("peft") is None:
        raise missing_extra("peft", "lora")
    if settings is None:
        return
    own = f"--lora-rank {settings['r']} --lora-alpha {settings['lora_alpha']:g}"
    if not config.lora_rank:
        raise RlvrError(
            f"{printable(config.model)} holds a LoRA adapter, and without --lora-rank the weights of a model are trained.",
            f"Go on training the adapter with {own}, or start from a merged model: resume its run with --lora-merge.",
        )
    if (config.lora_rank, config.lora_alpha) != (settings["r"], settings["lora_alpha"]):
        raise RlvrError(f"The LoRA adapter in {printable(config.model)} has {own}.", f"Use {own}.")


def load_eval_dataset(config: TrainingConfig, template: PromptTemplate | None = None) -> Dataset | None:
    """Load the questions of --eval-dataset, else the evaluation split of a built-in dataset; None where there is neither."""
    spec = config.eval_dataset or evaluation_spec(config.dataset)
    if not spec:
        return None
    limit = max(config.eval_examples, config.final_eval_examples or 0)
    named = knows_its_fields(spec)
    reading: dict[str, Any] = {
        "question_field": None if named else config.question_field,
        "answer_field": None if named else config.answer_field,
        "skip_bad_lines": config.skip_bad_lines,
    }
    questions = load_dataset(spec, limit=limit, **reading, needs_answers=needs_answers(config))
    console.report_skipped_lines(questions.num_skipped, questions.skipped)
    for note in questions.notes:
        console.say(note)
    check_of_one_kind(config, questions.name, questions.mixed)
    if template is not None and isinstance(config, ShotOptions):
        return with_shots(questions, config, template, spec=spec, reading=reading)
    return questions


def warn_of_shared_questions(
    trained: Sequence[Example], eval_dataset: Dataset | None, template: PromptTemplate | None = None
) -> None:
    """Say how many evaluation questions are also trained on: compared by `compared_text`."""
    if eval_dataset is None:
        return
    text = template.text if template else ""
    known = {compared_text(e, text) for e in trained}
    shared = sum(compared_text(e, text) in known for e in eval_dataset.examples)
    if shared:
        console.say(
            f"warning: {shared} of the {eval_dataset.rows} evaluation questions are also trained on. What the run learns by heart counts "
            "as progress there: give other questions with --eval-dataset."
        )


@contextmanager
def open_trainer(config: TrainingConfig, inputs: Inputs, *, command: str, num_updates: int) -> Iterator[Trainer]:
    """Open a new run, or the one to resume, and its trainer, until the block ends. The run stores how its policy computes.

    A sampler with more to do than evaluations, or with a copy of the weights, is described in the run too, and all its prompts
    must fit the context.
    A run that diverges ends as such: its model is saved and evaluated, and the block is left without an error.

    Raises:
        RlvrError: a run that is resumed is to be shorter than it is already; nothing was written.
    """
    if config.resume:
        _check_length(config, command=command, num_updates=num_updates)
    schedule = {"schedule": BY_BATCH} if config.batches_vary else {}
    samples = inputs.questions or engine_kind(inputs.engine.name).share is None or config.samples_apart
    with (
        inputs.pool,
        StopRequest() as stop,
        tracked(config.track, project=config.track_project) as trackers,
        open_environment(config) as environment,
        open_run(config, command=command, facts=inputs.facts, new=schedule) as run,
        Trainer(
            replace(config, compute_dtype=inputs.compute_dtype),
            run,
            engine=inputs.engine.name,
            placement=inputs.placement.reserved(),
            memory=inputs.memory,
            num_updates=num_updates,
            eval_dataset=inputs.eval_dataset,
            template=inputs.template,
            grader=inputs.pool,
            environment=environment,
            stop=stop,
        ) as trainer,
        sampler_recorded(trainer.sampler, run, reason=inputs.engine.reason) if samples else nullcontext(),
    ):
        trackers.start(run)
        steps = {} if num_updates and not config.batches_vary else {"steps": getattr(config, f"n_{command}_steps")}
        planned = steps | ({"updates": num_updates} if num_updates else {})
        run.update(policy=trainer.policy.facts, planned=planned, divisions=trainer.divisions.stored)
        if samples:
            _check_prompts(config, inputs, trainer, environment)
        try:
            yield trainer
        except Diverged as diverged:
            console.say(
                f"diverged       {diverged}\n    The run ends here (--stop-when diverged). To go on all the same: "
                f"rlvr {command} --resume {typed(run.place)} --stop-when never"
            )
            trainer.save()  # also with --checkpoint-every 0
            trainer.finish()
            run.update(diverged={"updates": trainer.updates, "why": str(diverged)})
            run.finish("diverged")


def _check_length(config: TrainingConfig, *, command: str, num_updates: int) -> None:
    """Raise RlvrError if the run has gone further than it is to go."""
    path = resolve_run(config.resume, config.runs_dir)
    done, cursor = newest_position(path)
    unit, total, option = "update", num_updates, f"n_{command}_steps"
    if "steps" in cursor:
        unit, total = "step", getattr(config, option)
        done = cursor["steps"] + bool(cursor.get("updates_of_batch"))
    if done > total:
        counted = bool(getattr(config, option))  # else the passes over a dataset say how long it is
        raise RlvrError(
            f"{path.name} has come to {unit} {done} already, and is to end after {unit} {total}.",
            f"{flag(option)} must be at least {done}." if counted else "Give a larger --sft-epochs.",
        )


def _check_prompts(
    config: TrainingConfig, inputs: Inputs, trainer: Trainer, environment: EnvironmentPool | None
) -> None:
    """Raise RlvrError if a prompt leaves no room for what must fit beside it, before the first step.

    An episode ends where the policy's context does; a teacher with a shorter one would have to read more than that. With which
    prompts an environment begins is not known: the sampler refuses those that do not fit.
    """
    own, teacher = trainer.policy.context_length or math.inf, trainer.trainers.replica.teacher
    sampled, scored = min(own, config.max_model_len or math.inf), (teacher and teacher.context_length) or math.inf
    if environment is not None and environment.begins and sampled <= scored:
        return
    of_response, names = config.must_fit, ["sampling_max_tokens", "eval_max_tokens"]
    if scored < sampled:
        of_response = config.longest_response
        names = ["max_episode_tokens"] if config.max_episode_tokens else names
    context = min(sampled, scored)
    for examples, params in (
        (inputs.questions, config.sampling_params),
        (inputs.eval_dataset.examples if inputs.eval_dataset else [], config.eval_sampling_params),
    ):
        check_prompts(
            examples,
            inputs.template,
            lambda: trainer.tokenizer,
            max_tokens=of_response(params.max_tokens),
            context=context,
            note=trainer.policy.context_note if context == own else "",
            options=[flag(name) for name in names if hasattr(config, name)],
        )
