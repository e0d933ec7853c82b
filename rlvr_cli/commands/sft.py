"""`rlvr sft`: cross-entropy on the response tokens of reasoning traces (handout, algorithm 1), evaluated as it goes.

Enters: an SftConfig. Leaves: a run directory with metrics, the evaluations' rollouts, and the trained model in `model/`.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

from rlvr_cli import display
from rlvr_cli.config import SftConfig
from rlvr_cli.datasets import Dataset, load_dataset
from rlvr_cli.engines import model_facts, model_path, use_few_threads
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.journal import open_run
from rlvr_cli.models import load_policy, save_policy
from rlvr_cli.prompts import load_prompt
from rlvr_cli.records import Example
from rlvr_cli.rollouts import choose_grader, log_generations
from rlvr_cli.samplers.transformers import TransformersSampler
from rlvr_cli.signals import StopRequest
from rlvr_cli.store import RunDir
from rlvr_cli.summary import summarize
from rlvr_cli.tokens import collate, encode, pad_id_of
from rlvr_cli.traces import choose_examples, keep_correct, load_traces
from rlvr_cli.training import autocast_dtype, batches, epoch_order, learning_rate_at, make_optimizer, train_update

FEW_UPDATES = 10  # under which the plan says that they are few
METRICS_SECONDS = 2.0  # how long the metrics of updates may wait to be committed together


def run(config: SftConfig) -> None:
    """Train a model. Raises RlvrError for what the user can put right, Interrupted after a signal."""
    template = load_prompt(config.prompt)
    traces = load_traces(
        config.dataset,
        template,
        split=config.split,
        question_field=config.question_field,
        answer_field=config.answer_field,
        skip_bad_lines=config.skip_bad_lines,
    )
    for message in traces.messages:
        display.say(message)
    examples = traces.examples
    if config.correct_only:
        with grader_pool(config, traces.default_grader) as pool:
            examples = keep_correct(examples, pool)
    order = epoch_order(len(examples), seed=config.seed, epoch=-1)  # of no epoch of training
    examples = choose_examples(examples, config.num_examples, order=order)
    num_steps = config.n_sft_steps or config.sft_epochs * math.ceil(len(examples) / config.train_batch_size)
    questions = evaluation_questions(config)
    pool = grader_pool(config, questions.default_grader if questions else None)
    facts = {
        "dataset": {"name": traces.name, "rows": len(examples), "fingerprint": traces.fingerprint},
        "eval_dataset": questions
        and {"name": questions.name, "rows": questions.rows, "fingerprint": questions.fingerprint},
        "model": model_facts("transformers", config.model),
        "prompt": {"name": template.name, "text": template.text},
        "grader": pool.spec,
        "engine": "transformers",
    }
    for name, value in plan(
        config, facts, examples=len(examples), traces=len(traces.examples), num_steps=num_steps
    ).items():
        display.say(f"{name:<14} {value}")
    if num_steps < FEW_UPDATES:
        display.say(
            f"note: {num_steps} updates move a model little; a smaller --train-batch-size or more --sft-epochs gives more"
        )
    if config.dry_run:
        return
    with pool, StopRequest() as stop, open_run(config, command="sft", facts=facts) as run:
        display.say(f"run            {run.path}")
        train(
            config,
            run,
            examples=examples,
            token_ids=traces.token_ids,
            questions=questions,
            template=template,
            pool=pool,
            stop=stop,
            num_steps=num_steps,
        )
    display.say(f"model    {run.path / 'model'}")
    if questions:
        display.summary(summarize(run.path, step=num_steps), output=config.format)


def train(
    config: SftConfig,
    run: RunDir,
    *,
    examples: list[Example],
    token_ids: Mapping[str, tuple[list[int], list[int]]],
    questions: Dataset | None,
    template: Any,
    pool: GraderPool,
    stop: StopRequest,
    num_steps: int,
) -> None:
    """The loop. Whatever ends it, the weights so far are saved in the run's `model/`."""
    model, tokenizer = load_policy(model_path(config.model), dtype="float32", device=config.device)
    prompt_ids, response_ids = encode_traces(examples, token_ids, tokenizer, append_eos=config.append_eos)
    check_lengths(examples, prompt_ids, response_ids, longest=model.config.max_position_embeddings)
    use_few_threads(model)
    optimizer = make_optimizer(
        model,
        learning_rate=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
    )
    sampler = TransformersSampler(
        model, tokenizer, max_batch_size=config.max_batch_size, autocast_dtype=autocast_dtype(model)
    )
    metrics = MetricsLog(run)

    def evaluate(step: int) -> dict[str, float]:
        if questions is None:
            return {}
        sampler.load_weights(model, step)
        return log_generations(
            run,
            phase="eval",
            step=step,
            examples=questions.examples,
            template=template,
            sampler=sampler,
            params=config.sampling_params,
            num_samples=1,
            grader=pool,
            seed=config.seed,
            stop=stop,
        )

    stream = chain.from_iterable(
        batches(range(len(examples)), batch_size=config.train_batch_size, seed=config.seed, epoch=epoch)
        for epoch in count()
    )
    skipped_in_a_row = 0
    model.eval()  # no dropout: the log-probabilities are the policy's
    try:
        reward = evaluate(0).get("reward/mean")
        with display.progress("updates", num_steps, running_mean=False) as bar:
            for step, rows in enumerate(islice(stream, num_steps)):
                stop.check()
                batch = collate(
                    [prompt_ids[i] for i in rows], [response_ids[i] for i in rows], pad_id=pad_id_of(tokenizer)
                )
                update = train_update(
                    model,
                    optimizer,
                    batch,
                    learning_rate=learning_rate_at(
                        step,
                        peak=config.learning_rate,
                        num_steps=num_steps,
                        warmup_steps=config.warmup_steps,
                        schedule=config.lr_schedule,  # type: ignore[arg-type]
                    ),
                    micro_batch_size=config.micro_batch_size,
                    max_grad_norm=config.max_grad_norm,
                    normalization=config.length_normalization,  # type: ignore[arg-type]
                    normalize_constant=config.normalize_constant
                    if config.length_normalization == "masked_normalize"
                    else None,
                )
                metrics.add(step + 1, update)
                skipped_in_a_row = skipped_in_a_row + 1 if update["update/skipped"] else 0
                if skipped_in_a_row >= config.max_skipped_updates:
                    raise RlvrError(
                        f"{skipped_in_a_row} updates in a row had a loss or gradient that is not finite (update {step + 1}).",
                        f"The weights before them are in {run.path / 'model'}. Try a lower --learning-rate.",
                    )
                is_last = step + 1 == num_steps
                if is_last or (config.eval_every and (step + 1) % config.eval_every == 0):
                    reward = evaluate(step + 1).get("reward/mean")
                signals = {
                    "loss": update["loss/nll"],
                    "entropy": update["policy/entropy"],
                    "grad": update["optimizer/grad_norm"],
                }
                bar.advance(1, **signals, **({} if reward is None else {"reward": reward}))
    finally:
        save_policy(model, tokenizer, run.path / "model")
        metrics.flush()


def grader_pool(config: SftConfig, dataset_grader: str | None) -> GraderPool:
    """The grader that was named, or the one that fits the dataset, in its processes."""
    return GraderPool(
        choose_grader(config.grader, dataset_grader=dataset_grader, prompt=config.prompt),
        format_rule=config.format_rule,  # type: ignore[arg-type]  (one of its choices)
        workers=config.grader_workers,
        timeout=config.grader_timeout,
    )


def encode_traces(
    examples: list[Example],
    token_ids: Mapping[str, tuple[list[int], list[int]]],
    tokenizer: Any,
    *,
    append_eos: bool,
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompt and response ids of each example: those that were sampled, where they are this tokenizer's, else of its text.

    A sampled response need not tokenize back to the ids it was sampled as; trained on are the sampled ones.
    """
    prompts, responses = encode(
        [e.prompt or "" for e in examples], [e.response or "" for e in examples], tokenizer, append_eos=append_eos
    )
    for row, example in enumerate(examples):
        prompt, response = token_ids.get(example.id, ([], []))
        if prompt and tokenizer.decode(prompt) == example.prompt:
            text = tokenizer.decode(response, skip_special_tokens=True)
            if text.startswith(example.response or ""):
                ends = not append_eos or response[-1] == tokenizer.eos_token_id
                prompts[row] = list(prompt)
                responses[row] = list(response) if ends else [*response, tokenizer.eos_token_id]
    return prompts, responses


def plan(config: SftConfig, facts: dict[str, Any], *, examples: int, traces: int, num_steps: int) -> dict[str, str]:
    """What will happen, in words."""
    batch = min(config.train_batch_size, examples)
    questions = facts["eval_dataset"]
    return {
        "model": facts["model"]["name"],
        "examples": f"{examples} of {traces} traces of {facts['dataset']['name']}"
        + (", correct ones only" if config.correct_only else ""),
        "updates": f"{num_steps} of {batch} examples, in micro-batches of {min(config.micro_batch_size, batch)}; "
        f"{num_steps / math.ceil(examples / config.train_batch_size):g} epochs",
        "objective": objective(config),
        "learning rate": f"{config.learning_rate:g}: {config.warmup_steps} updates of warm-up, then {config.lr_schedule}",
        "precision": "float32 weights and optimizer state; bfloat16 autocast on CUDA",
        "evaluation": f"{questions['rows']} questions of {questions['name']}, grader {facts['grader']}"
        if questions
        else "none: name questions with --eval-dataset",
    }


def evaluation_questions(config: SftConfig) -> Dataset | None:
    """The questions named with --eval-dataset, else the evaluation split of a dataset that has a name, else None."""
    name = config.dataset.split(":")[0]
    spec = config.eval_dataset or (name if name in ("arithmetic", "countdown") else "")
    if not spec:
        return None
    questions = load_dataset(spec, limit=config.eval_examples, skip_bad_lines=config.skip_bad_lines)
    display.skipped_lines(questions.num_skipped, questions.skipped)
    return questions


def objective(config: SftConfig) -> str:
    """What is minimised, as a formula."""
    match config.length_normalization:
        case "token_mean":
            return "-(1/T) sum_t log p(o_t | q, o_<t), T the response tokens of the update"
        case "masked_mean":
            return "-(1/B) sum_i (1/|o_i|) sum_t log p(o_i,t | q_i, o_i,<t), B examples an update"
    return f"-(1/(B*{config.normalize_constant:g})) sum_i sum_t log p(o_i,t | q_i, o_i,<t), B examples an update"


def check_lengths(
    examples: list[Example], prompt_ids: list[list[int]], response_ids: list[list[int]], *, longest: int
) -> None:
    """RlvrError when a trace does not fit the model's context."""
    for example, prompt, response in zip(examples, prompt_ids, response_ids, strict=True):
        if len(prompt) + len(response) > longest:
            raise RlvrError(
                f"Trace {example.id} has {len(prompt)} + {len(response)} tokens; the model's context holds {longest}.",
                "Leave it out, or shorten it: a cut trace would teach the model not to finish.",
            )


@dataclass
class MetricsLog:
    """Metrics of quick updates, committed together every few seconds: a commit each would cost more than the update."""

    run: RunDir

    def __post_init__(self) -> None:
        self.waiting: dict[int, dict[str, float]] = {}
        self.flushed = time.monotonic()

    def add(self, step: int, values: dict[str, float]) -> None:
        self.waiting[step] = values
        if time.monotonic() - self.flushed > METRICS_SECONDS:
            self.flush()

    def flush(self) -> None:
        self.run.commit_metric_rows("train", self.waiting)
        self.waiting = {}
        self.flushed = time.monotonic()
