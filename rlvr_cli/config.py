"""Every knob of every command: one frozen dataclass each, which is the CLI, the TOML file and run.json's `config`.

Enters: flags, a TOML file, a preset, the config of a run to resume. Leaves: a validated config that knows where each value came from.
An option's name is its field's in kebab case; the field names are the handout's hyper-parameter names.
"""

import difflib
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from rlvr_cli.errors import RlvrError
from rlvr_cli.records import SamplingParams

FORMATS = ("table", "json", "csv", "markdown")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def knob(
    default: Any,
    help: str,
    *,
    group: str,
    choices: tuple[str, ...] = (),
    argument: bool = False,
    free_on_resume: bool = False,
) -> Any:
    """A field with its help line, its heading in ``--help``, and whether a resumed run may change it."""
    metadata = {
        "help": help,
        "group": group,
        "choices": choices,
        "argument": argument,
        "free_on_resume": free_on_resume,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Provenance:
    """Not options: where each option's value came from ("flag", "config FILE", "preset NAME", "resumed run" or "default")."""

    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)


C = TypeVar("C", bound=Provenance)


@dataclass(frozen=True)
class ModelOptions:
    model: str = knob(
        "",
        "Local directory or hub id of the model. Empty: the built-in tiny model.",
        group="Model",
        free_on_resume=True,
    )
    device: str = knob("auto", "Torch device of the model: auto, cpu, cuda, cuda:1.", group="Model")
    max_batch_size: int | None = knob(
        None, "Sequences decoded at once by the transformers engine. Default: chosen from memory.", group="Model", free_on_resume=True
    )  # fmt: skip
    cuda_graphs: bool = knob(
        True, "Record the embedded engine's steps as CUDA graphs, which are replayed without Python.", group="Model", free_on_resume=True
    )  # fmt: skip


@dataclass(frozen=True)
class EngineOptions:
    engine: str = knob(
        "auto",
        "Inference engine. auto: openai with --base-url, else vllm where it is installed with a CUDA device, else transformers.",
        group="Model",
        choices=("auto", "transformers", "vllm", "openai"),
    )
    dtype: str = knob(
        "auto",
        "Precision of sampling. auto: bfloat16 on CUDA, float32 on CPU.",
        group="Model",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int | None = knob(
        None, "Context window given to vLLM, in tokens. Default: the model's own.", group="Model"
    )  # fmt: skip
    gpu_memory_utilization: float = knob(
        0.85, "Share of the GPU's memory that vLLM takes.", group="Model", free_on_resume=True
    )


@dataclass(frozen=True)
class PromptOptions:
    prompt: str = knob(
        "r1_zero", "Prompt template: r1_zero, question_only, or a file that holds {question}.", group="Data"
    )
    grader: str = knob(
        "",
        "Grader: r1_zero, question_only, math_verify, gsm8k, countdown, or FILE.py:FUNCTION. Empty: the one that fits the dataset and prompt.",
        group="Grading",
    )
    format_rule: str = knob(
        "literal",
        "r1_zero's format rule: literal wants exactly '</think> <answer>', lenient any white space between the tags.",
        group="Grading",
        choices=("literal", "lenient"),
    )
    grader_timeout: float = knob(5.0, "Seconds that one grade may take before its worker is killed.", group="Grading")
    grader_workers: int = knob(2, "Worker processes that grade.", group="Grading", free_on_resume=True)


@dataclass(frozen=True)
class SamplingOptions:
    sampling_temperature: float = knob(1.0, "Temperature; 0 is greedy.", group="Sampling")
    sampling_top_p: float = knob(
        1.0, "Nucleus: the smallest set of tokens with this much probability.", group="Sampling"
    )
    sampling_max_tokens: int = knob(1024, "Longest response, in tokens.", group="Sampling")
    sampling_min_tokens: int = knob(4, "Tokens before a response may end.", group="Sampling")
    stop: tuple[str, ...] = knob(
        ("</answer>",), "String that ends a response and is kept; repeat for several, '' for none.", group="Sampling"
    )

    @property
    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.sampling_temperature,
            top_p=self.sampling_top_p,
            max_tokens=self.sampling_max_tokens,
            min_tokens=self.sampling_min_tokens,
            stop=tuple(s for s in self.stop if s),
        )


@dataclass(frozen=True)
class RunOptions:
    seed: int = knob(0, "Seed of every random choice of the run.", group="Run")
    run: str = knob("", "Name of the run directory. Empty: COMMAND-DATE-TIME-ID.", group="Run")
    runs_dir: str = knob("runs", "Directory that holds the runs.", group="Run", free_on_resume=True)
    config: str = knob("", "TOML file with options; a flag beats it.", group="Run", free_on_resume=True)
    preset: str = knob("", "Named set of options; a flag or --config beats it.", group="Run")
    format: str = knob("table", "How result tables are printed.", group="Run", choices=FORMATS, free_on_resume=True)


@dataclass(frozen=True)
class QuestionOptions:
    split: str = knob("", "Split of a named dataset. Empty: the one that this command is for.", group="Data")
    question_field: str = knob("", "Field with the question. Empty: found by name.", group="Data")
    answer_field: str = knob("", "Field with the answer. Empty: found by name.", group="Data")
    skip_bad_lines: bool = knob(
        False, "Skip lines that cannot be read, and count them, instead of stopping.", group="Data"
    )


@dataclass(frozen=True)
class OptimisationOptions:
    learning_rate: float = knob(1e-5, "Peak learning rate of AdamW.", group="Optimisation")
    warmup_steps: int = knob(0, "Updates of linear warm-up.", group="Optimisation")
    lr_schedule: str = knob(
        "constant",
        "After warm-up: constant, or cosine down to a tenth.",
        group="Optimisation",
        choices=("constant", "cosine"),
    )
    adam_beta1: float = knob(0.9, "AdamW's first beta.", group="Optimisation")
    adam_beta2: float = knob(0.95, "AdamW's second beta.", group="Optimisation")
    weight_decay: float = knob(0.0, "AdamW's weight decay.", group="Optimisation")
    max_grad_norm: float = knob(1.0, "Gradient norm above which gradients are scaled down.", group="Optimisation")
    max_skipped_updates: int = knob(3, "Non-finite updates in a row that end the run.", group="Optimisation")
    param_dtype: str = knob(
        "float32",
        "Precision of the weights and of AdamW's state; bfloat16 halves the memory and rounds most small steps away.",
        group="Optimisation",
        choices=("float32", "bfloat16"),
    )


@dataclass(frozen=True)
class EvaluationOptions:
    eval_dataset: str = knob(
        "",
        "Questions of the evaluations. Empty: the evaluation split of a named dataset, else none.",
        group="Evaluation",
    )
    eval_examples: int = knob(1024, "Questions per evaluation, the same each time.", group="Evaluation")
    eval_every: int = knob(0, "Updates between evaluations; 0: only before and after training.", group="Evaluation")
    final_eval_examples: int | None = knob(
        None, "Questions of the last evaluation. Default: --eval-examples.", group="Evaluation"
    )


@dataclass(frozen=True)
class EvaluationSamplingOptions(SamplingOptions):
    eval_temperature: float | None = knob(
        None, "Temperature of the evaluations. Default: --sampling-temperature.", group="Evaluation"
    )
    eval_top_p: float | None = knob(None, "Nucleus of the evaluations. Default: --sampling-top-p.", group="Evaluation")
    eval_max_tokens: int | None = knob(
        None, "Longest response of the evaluations. Default: --sampling-max-tokens.", group="Evaluation"
    )
    eval_min_tokens: int | None = knob(
        None, "Shortest response of the evaluations. Default: --sampling-min-tokens.", group="Evaluation"
    )

    @property
    def eval_sampling_params(self) -> SamplingParams:
        given = {
            "temperature": self.eval_temperature,
            "top_p": self.eval_top_p,
            "max_tokens": self.eval_max_tokens,
            "min_tokens": self.eval_min_tokens,
        }
        return replace(self.sampling_params, **{k: v for k, v in given.items() if v is not None})


@dataclass(frozen=True)
class TrainingRunOptions(RunOptions):
    checkpoint_every: int = knob(
        10, "Updates between checkpoints, of which the last two are kept; 0: only when interrupted.", group="Run", free_on_resume=True
    )  # fmt: skip
    time_limit: str = knob(
        "", "Time for the whole run, such as 4h or 90m, its last evaluation included.", group="Run", free_on_resume=True
    )
    resume: str = knob("", "Go on with this run (a name or a directory).", group="Run", free_on_resume=True)
    dry_run: bool = knob(False, "Print the plan and stop.", group="Run", free_on_resume=True)

    @property
    def time_limit_seconds(self) -> float:
        """Infinite without a limit."""
        return _seconds(self.time_limit) if self.time_limit else math.inf


@dataclass(frozen=True)
class EvalConfig(RunOptions, SamplingOptions, PromptOptions, EngineOptions, ModelOptions, QuestionOptions, Provenance):
    """Measure a model on questions: sample, grade, store, and say how many answers are right and how sure that is."""

    dataset: str = knob(
        "arithmetic",
        "arithmetic, countdown (or NAME:SIZE[:SEED] to generate), gsm8k, math, a .jsonl/.json/.csv/.parquet file, or hf:ORG/NAME.",
        group="Data",
    )
    limit: int | None = knob(None, "Use the first N questions.", group="Data")
    check_dataset: bool = knob(
        False, "Only grade every ground truth against itself and list those the grader cannot read; no model.", group="Data"
    )  # fmt: skip
    num_samples: int = knob(
        1, "Samples per question; more than one adds pass@k, best@k and majority@k.", group="Sampling"
    )
    base_url: str = knob(
        "", "Address of an OpenAI-compatible endpoint, such as http://localhost:8000/v1.", group="Model"
    )
    endpoint: str = knob(
        "completions",
        "Endpoint's API: completions (raw prompt) or chat.",
        group="Model",
        choices=("completions", "chat"),
    )
    resume: str = knob(
        "", "Go on with this run (a name or a directory): only what is missing is done.", group="Run", free_on_resume=True
    )  # fmt: skip
    api_key_env: str = knob("OPENAI_API_KEY", "Environment variable that holds the endpoint's key.", group="Model")

    def __post_init__(self) -> None:
        if is_partial(self):
            return
        _check_values(self)
        _check_sampling(self)
        _at_least(self, 1, "num_samples", "grader_workers", "limit", "max_batch_size", "max_model_len")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise RlvrError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization}.", "It must be above 0 and at most 1."
            )
        if self.max_model_len and self.engine == "transformers":
            raise RlvrError(
                "--max-model-len is vLLM's; --engine transformers takes what a question needs.", "Leave it out."
            )
        if self.engine == "openai" and not self.base_url:
            raise RlvrError("--engine openai needs an endpoint.", "Name it: --base-url http://localhost:8000/v1")
        if self.base_url and self.engine not in ("auto", "openai"):
            raise RlvrError(f"--base-url and --engine {self.engine} exclude each other.", "Leave one of them out.")
        if (self.base_url or self.engine == "openai") and not self.model:
            raise RlvrError("An endpoint needs the name of its model.", "Name it: --model NAME")


@dataclass(frozen=True)
class SftConfig(
    TrainingRunOptions,
    EvaluationOptions,
    SamplingOptions,
    PromptOptions,
    OptimisationOptions,
    ModelOptions,
    QuestionOptions,
    Provenance,
):
    """Fine-tune on reasoning traces: cross-entropy on the response tokens, evaluated as it goes (handout, algorithm 1)."""

    dataset: str = knob(
        "arithmetic:8000",
        "Traces: a file of {prompt, response[, ground_truth]}, a run directory, arithmetic:SIZE[:SEED] or countdown:SIZE[:SEED].",
        group="Data",
    )
    num_examples: str = knob(
        "all", "Unique examples to train on: a number (128, 256, 512, 1024, ...) or all.", group="Data"
    )
    correct_only: bool = knob(False, "Train only on traces that the grader rewards.", group="Data")
    sft_epochs: int = knob(1, "Passes over the examples.", group="Optimisation")
    n_sft_steps: int = knob(0, "Updates; 0: as many as --sft-epochs needs.", group="Optimisation")
    train_batch_size: int = knob(256, "Examples per update.", group="Optimisation")
    micro_batch_size: int = knob(
        8, "Examples per forward pass; the result does not depend on it.", group="Optimisation", free_on_resume=True
    )
    length_normalization: str = knob(
        "token_mean",
        "What the summed loss is divided by: token_mean (response tokens of the update), masked_mean (each example's length, then their number), "
        "masked_normalize (--normalize-constant, then the number of examples: the handout's form).",
        group="Optimisation",
        choices=("token_mean", "masked_mean", "masked_normalize"),
    )
    normalize_constant: float = knob(
        1.0, "Divisor of each example's summed loss under masked_normalize.", group="Optimisation"
    )
    append_eos: bool = knob(True, "Teach the end-of-sequence token after each response.", group="Optimisation")

    def __post_init__(self) -> None:
        if is_partial(self):
            return
        _check_training(self)
        _at_least(self, 1, "train_batch_size", "micro_batch_size", "sft_epochs")
        _at_least(self, 0, "n_sft_steps")
        _above_zero(self, "normalize_constant")
        if self.num_examples != "all" and not (
            self.num_examples.isascii() and self.num_examples.isdigit() and int(self.num_examples)
        ):
            raise RlvrError(f"--num-examples is {self.num_examples!r}.", "Give a positive number, or all.")


@dataclass(frozen=True)
class TrainingEngineOptions(EngineOptions):
    engine: str = knob(
        "auto",
        "Inference engine. auto: vllm where it is installed with a CUDA device, else transformers, which samples from the trainer's own weights.",
        group="Model",
        choices=("auto", "transformers", "vllm"),
    )
    dtype: str = knob(
        "auto",
        "Precision of vLLM. auto: bfloat16 on CUDA, float32 on CPU. (transformers computes as the trainer does.)",
        group="Model",
        choices=("auto", "float32", "bfloat16", "float16"),
    )


@dataclass(frozen=True)
class EiConfig(
    TrainingRunOptions,
    EvaluationOptions,
    EvaluationSamplingOptions,
    PromptOptions,
    OptimisationOptions,
    TrainingEngineOptions,
    ModelOptions,
    QuestionOptions,
    Provenance,
):
    """Expert iteration: sample, keep what is correct, fine-tune on it, again (handout, algorithm 2)."""

    dataset: str = knob("arithmetic", "Training questions: as for rlvr eval.", group="Data")
    n_ei_steps: int = knob(5, "Rounds of sampling and fine-tuning.", group="Algorithm", free_on_resume=True)
    ei_batch_size: int = knob(512, "Questions per round.", group="Algorithm")
    group_size: int = knob(8, "Samples per question.", group="Algorithm")
    sft_epochs: int = knob(1, "Passes over a round's correct responses.", group="Algorithm")
    train_batch_size: int = knob(256, "Responses per update.", group="Optimisation")
    micro_batch_size: int = knob(
        8, "Responses per forward pass; the result does not depend on it.", group="Optimisation", free_on_resume=True
    )

    eval_every: int = knob(1, "Rounds between evaluations; 0: only after training.", group="Evaluation")

    def __post_init__(self) -> None:
        if is_partial(self):
            return
        _check_training(self)
        _at_least(
            self, 1, "n_ei_steps", "ei_batch_size", "group_size", "sft_epochs", "train_batch_size", "micro_batch_size"
        )
        if self.lr_schedule != "constant":
            raise RlvrError(
                f"--lr-schedule {self.lr_schedule} needs to know the number of updates, which here is that of correct responses.",
                "Take constant.",
            )


@dataclass(frozen=True)
class GrpoConfig(
    TrainingRunOptions,
    EvaluationOptions,
    EvaluationSamplingOptions,
    PromptOptions,
    OptimisationOptions,
    TrainingEngineOptions,
    ModelOptions,
    QuestionOptions,
    Provenance,
):
    """Policy gradient on groups of graded responses: GRPO, its ablations and its relatives (handout, algorithm 3)."""

    dataset: str = knob("arithmetic", "Training questions: as for rlvr eval.", group="Data")
    n_grpo_steps: int = knob(200, "Rollout batches.", group="Algorithm", free_on_resume=True)
    rollout_batch_size: int = knob(256, "Responses per rollout batch: questions times --group-size.", group="Algorithm")
    group_size: int = knob(8, "Responses per question.", group="Algorithm")
    epochs_per_rollout_batch: int = knob(1, "Passes over each rollout batch; 1 on-policy.", group="Algorithm")
    train_batch_size: int = knob(256, "Responses per update; on-policy that of the rollout batch.", group="Algorithm")
    gradient_accumulation_steps: int = knob(
        128, "Micro-batches per update: train batch / micro-batch size. The result does not depend on it.", group="Optimisation", free_on_resume=True
    )  # fmt: skip
    loss_type: str = knob(
        "reinforce_with_baseline",
        "no_baseline (-r log p), reinforce_with_baseline (-A log p), grpo_clip (PPO's clipped ratio), grpo_no_clip (-ratio A).",
        group="Algorithm",
        choices=("no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip"),
    )
    use_std_normalization: bool = knob(
        True, "Divide advantages by the standard deviation of their group.", group="Algorithm"
    )
    advantage_eps: float = knob(1e-6, "Added to that standard deviation.", group="Algorithm")
    cliprange: float = knob(0.2, "grpo_clip: how far the probability ratio may move.", group="Algorithm")
    cliprange_high: float | None = knob(
        None, "grpo_clip: how far it may rise (DAPO's clip-higher). Default: --cliprange.", group="Algorithm"
    )
    length_normalization: str = knob(
        "masked_mean",
        "What the summed loss is divided by: masked_mean (each response's length, then their number), masked_normalize (--normalize-constant, then "
        "their number), token_mean (response tokens of the update).",
        group="Algorithm",
        choices=("masked_mean", "masked_normalize", "token_mean"),
    )
    normalize_constant: float | None = knob(
        None, "Divisor under masked_normalize. Default: --sampling-max-tokens.", group="Algorithm"
    )
    kl_coef: float = knob(0.0, "Weight of the KL penalty (k3) to the starting model; 0 loads none.", group="Algorithm")
    async_steps: int = knob(
        0, "1: a second process samples the next batch while this one is trained on, one batch behind the policy.", group="Algorithm"
    )  # fmt: skip
    importance_correction: str = knob(
        "auto",
        "Weigh tokens by trainer / sampler probability: none, or truncated at --importance-cap. auto: truncated with --async-steps 1, else none.",
        group="Algorithm",
        choices=("auto", "none", "truncated"),
    )
    importance_cap: float = knob(2.0, "Largest of these weights.", group="Algorithm")
    dynamic_sampling: bool = knob(
        False,
        "Sample on until every group of the batch has a signal (DAPO); counts what that costs.",
        group="Algorithm",
    )
    max_sampling_rounds: int = knob(
        10, "Rounds of sampling per batch that dynamic sampling may take.", group="Algorithm"
    )
    overlong: str = knob(
        "none",
        "Responses cut at the length limit: none (as graded), mask (no loss on them), soft_punish (DAPO: a penalty that grows over the last "
        "--overlong-buffer tokens).",
        group="Algorithm",
        choices=("none", "mask", "soft_punish"),
    )
    overlong_buffer: int | None = knob(
        None, "Tokens before the limit. Default: a fifth of --sampling-max-tokens.", group="Algorithm"
    )
    eval_every: int = knob(10, "Updates between evaluations; 0: only before and after training.", group="Evaluation")

    @property
    def n_prompts_per_rollout_batch(self) -> int:
        return self.rollout_batch_size // self.group_size

    @property
    def micro_train_batch_size(self) -> int:
        return self.train_batch_size // self.gradient_accumulation_steps

    @property
    def updates_per_rollout_batch(self) -> int:
        return self.epochs_per_rollout_batch * self.rollout_batch_size // self.train_batch_size

    @property
    def on_policy(self) -> bool:
        return self.updates_per_rollout_batch == 1

    @property
    def importance_truncation(self) -> float | None:
        """Where importance weights are cut off; None without them."""
        wanted = self.importance_correction == "truncated" or (
            self.importance_correction == "auto" and self.async_steps
        )
        return self.importance_cap if wanted else None

    @property
    def constant(self) -> float | None:
        """What masked_normalize divides by; None for the other normalisations."""
        if self.length_normalization != "masked_normalize":
            return None
        return self.normalize_constant or float(self.sampling_max_tokens)

    def __post_init__(self) -> None:
        if is_partial(self):
            return
        _check_training(self)
        _at_least(
            self,
            1,
            *("n_grpo_steps", "rollout_batch_size", "group_size", "epochs_per_rollout_batch", "train_batch_size"),
            *("gradient_accumulation_steps", "max_sampling_rounds", "overlong_buffer"),
        )
        _at_least(self, 0, "kl_coef", "advantage_eps")
        _above_zero(self, "cliprange", "cliprange_high", "normalize_constant", "importance_cap")
        if self.async_steps not in (0, 1):
            raise RlvrError(
                f"--async-steps is {self.async_steps}.",
                "0 samples and trains in turn; 1 samples the next batch meanwhile, from weights one batch old.",
            )
        _divides(self, "group_size", "rollout_batch_size")
        _divides(self, "train_batch_size", "rollout_batch_size")
        _divides(self, "gradient_accumulation_steps", "train_batch_size")
        if self.train_batch_size < self.group_size:
            raise RlvrError(
                f"--train-batch-size {self.train_batch_size} is smaller than --group-size {self.group_size}.",
                f"Take at least {self.group_size}.",
            )
        if self.sampling_temperature == 0:
            raise RlvrError(
                "--sampling-temperature 0 samples every response of a group alike: there is nothing to compare.",
                "Take 1.",
            )
        if self.group_size == 1 and self.loss_type != "no_baseline":
            raise RlvrError(
                "A group of one has advantage 0: nothing would be learned.",
                "Take --group-size 8, or --loss-type no_baseline.",
            )
        if (self.overlong_buffer or 1) > self.sampling_max_tokens:
            raise RlvrError(
                f"--overlong-buffer {self.overlong_buffer} exceeds --sampling-max-tokens {self.sampling_max_tokens}."
            )


@dataclass(frozen=True)
class QuickstartConfig(Provenance):
    """See reward rise: a tiny model is warmed up on traces and trained with GRPO on a CPU, in about two minutes."""

    seed: int = knob(0, "Seed of the model, the data and the runs.", group="Run")
    name: str = knob("", "What its runs are called: NAME-sft and so on. Empty: quickstart-DATE-TIME.", group="Run")
    runs_dir: str = knob("runs", "Directory that holds the runs.", group="Run")

    def __post_init__(self) -> None:
        _check_values(self)
        _at_least(self, 0, "seed")


@dataclass(frozen=True)
class GradeConfig(Provenance):
    """Grade a run again with another grader: nothing is sampled, the old grades stay, and what changed is printed."""

    run: str = knob("", "Run directory or name. None: the latest run.", group="Data", argument=True)
    phase: str = knob("all", "Rollouts of which phase.", group="Data", choices=("all", "eval", "train"))
    runs_dir: str = knob("runs", "Directory that holds the runs.", group="Data")
    grader: str = knob(
        "", "Grader: r1_zero, question_only, math_verify, gsm8k, countdown, or FILE.py:FUNCTION.", group="Grading"
    )
    format_rule: str = knob(
        "literal",
        "r1_zero's and countdown's format rule: literal wants exactly '</think> <answer>', lenient any white space between the tags.",
        group="Grading",
        choices=("literal", "lenient"),
    )
    again: bool = knob(
        False, "Grade also what this grader has graded already; the new grades take the place of the old.", group="Grading"
    )  # fmt: skip
    grader_timeout: float = knob(5.0, "Seconds that one grade may take before its worker is killed.", group="Grading")
    grader_workers: int = knob(2, "Worker processes that grade.", group="Grading")
    format: str = knob("table", "How result tables are printed.", group="Output", choices=FORMATS)

    def __post_init__(self) -> None:
        _check_values(self)
        _at_least(self, 1, "grader_workers")
        _above_zero(self, "grader_timeout")


@dataclass(frozen=True)
class FilterConfig(Provenance):
    """Make a dataset of what a run sampled, or of another dataset: only what is right, of the right difficulty, not seen in a test."""

    source: tuple[str, ...] = knob(
        (), "Run directories or names, or one dataset (a file or a name).", group="Data", argument=True
    )
    phase: str = knob(
        "", "Rollouts of which phase: train, eval or all. Empty: train where there are some, else eval.", group="Data"
    )
    step: int | None = knob(None, "Rollouts of one step. Default: of all.", group="Data")
    split: str = knob("", "Split of a named dataset. Empty: the one to train on.", group="Data")
    question_field: str = knob("", "Dataset's field with the question. Empty: found by name.", group="Data")
    answer_field: str = knob("", "Dataset's field with the answer. Empty: found by name.", group="Data")
    runs_dir: str = knob("runs", "Directory that holds the runs.", group="Data")
    where: str = knob(
        "", "SQL condition on the columns of rollouts, or on id, question and ground_truth of a dataset.", group="Filter"
    )  # fmt: skip
    correct_only: bool = knob(False, "Keep only rewarded responses.", group="Filter")
    min_pass_rate: float = knob(0.0, "Keep questions with at least this share of right samples.", group="Filter")
    max_pass_rate: float = knob(1.0, "Keep questions with at most this share of right samples.", group="Filter")
    max_per_question: int | None = knob(
        None, "Responses kept of each question, chosen at random. Default: all.", group="Filter"
    )
    shortest: bool = knob(
        False, "Let --max-per-question and --limit choose the shortest responses, not random ones.", group="Filter"
    )
    dedup: bool = knob(
        False, "Drop what is there twice: a question, or a response to it, that differs in case and white space at most.", group="Filter"
    )  # fmt: skip
    decontaminate_against: tuple[str, ...] = knob(
        (), "Dataset whose questions must not occur: equal to one of them, or with --ngram words in common; repeatable.", group="Filter"
    )  # fmt: skip
    ngram: int = knob(13, "Words in a row that count as the same question.", group="Filter")
    limit: int | None = knob(None, "Rows to keep, chosen at random. Default: all.", group="Filter")
    seed: int = knob(0, "Seed of the random choices.", group="Filter")
    out: str = knob("", "File to write: .jsonl or .parquet; FILE.meta.json says how it came about.", group="Output")
    emit: str = knob(
        "traces",
        "Rows: traces (prompt and response, for rlvr sft) or questions (for rlvr grpo, ei and eval).",
        group="Output",
        choices=("traces", "questions"),
    )
    with_control: bool = knob(
        False, "Write FILE-control too: as many rows, chosen at random from the same source.", group="Output"
    )
    overwrite: bool = knob(False, "Replace the files when they are there.", group="Output")
    format: str = knob("table", "How the table of what was kept is printed.", group="Output", choices=FORMATS)

    def __post_init__(self) -> None:
        _check_values(self)
        _at_least(self, 0, "step", "seed", "min_pass_rate")
        _at_least(self, 1, "max_per_question", "ngram", "limit")
        if self.phase not in ("", "all", "train", "eval"):
            raise RlvrError(f"--phase is {self.phase!r}.", "Choose one of train, eval, all.")
        if not self.min_pass_rate <= self.max_pass_rate <= 1:
            raise RlvrError(
                f"--min-pass-rate {self.min_pass_rate:g} and --max-pass-rate {self.max_pass_rate:g} leave nothing.",
                "They are shares between 0 and 1, the smaller one first.",
            )
        if not self.source:
            raise RlvrError("What is to be filtered?", "Name a run or a dataset: rlvr filter RUN --out FILE.jsonl")
        if Path(self.out).suffix not in (".jsonl", ".parquet"):
            raise RlvrError(
                f"--out is {self.out!r}: what kind of file is to be written?" if self.out else "Where to? --out is missing.",
                "Its name must end in .jsonl or .parquet.",
            )  # fmt: skip
        if self.emit == "questions" and (self.max_per_question or self.shortest):
            raise RlvrError(
                "--max-per-question and --shortest choose among responses; --emit questions has none.",
                "Leave them out.",
            )
        if self.shortest and not (self.max_per_question or self.limit):
            raise RlvrError(
                "--shortest says which responses stay when some have to go, and nothing makes them go.",
                "Add --max-per-question 1, or --limit N.",
            )


@dataclass(frozen=True)
class AnalyzeConfig(Provenance):
    """Ask a run what happened: a named query, any SELECT over `rollouts`, `grades`, `metrics` and `runs`, or a report."""

    query: str = knob(
        "summary",
        "A named query (--list), a SELECT statement, a .sql file, or report for an HTML page; a run alone is summarised.",
        group="Query",
        argument=True,
    )
    runs: tuple[str, ...] = knob(
        (), "Run directories or names (compare: A1,A2,A3 B1,B2,B3). None: the latest run.", group="Query", argument=True
    )
    list: bool = knob(False, "List the named queries.", group="Query")
    show: bool = knob(False, "Print the named query's SQL instead of running it.", group="Query")
    set: tuple[str, ...] = knob(
        (), "NAME=VALUE, a parameter of the query (--list); repeat for several. Text that is no JSON is text.", group="Query"
    )  # fmt: skip
    phase: str = knob("eval", "Rollouts of which phase.", group="Query", choices=("eval", "train"))
    step: int | None = knob(None, "Rollouts of which step. Default: the last one.", group="Query")
    category: str = knob("", "failures: only this category, such as format_0_answer_0.", group="Query")
    failure_kind: str = knob("", "failures: only this kind, such as wrong_answer.", group="Query")
    limit: int = knob(50, "Rows to show; 0: all.", group="Output")
    format: str = knob("table", "How rows are printed.", group="Output", choices=FORMATS)
    plot: str = knob(
        "", "Draw it too, in this .png or .svg file: curves, entropy, pass_at_k, best_at_k, categories, length_histogram.", group="Output"
    )  # fmt: skip
    out: str = knob("", "report: the HTML file. Default: report.html in the first run.", group="Output")
    timeout_seconds: float = knob(30.0, "Seconds after which a query is interrupted.", group="Query")
    runs_dir: str = knob("runs", "Directory that holds the runs.", group="Query")

    def __post_init__(self) -> None:
        _check_values(self)
        _at_least(self, 0, "limit", "step")
        if not self.timeout_seconds > 0:
            raise RlvrError(f"--timeout-seconds is {self.timeout_seconds}.", "It must be above 0.")


def is_partial(config: Any) -> bool:
    """Whether a config holds just what was given beside ``--resume``, and makes sense only together with the run's own."""
    return bool(config.resume) and "resumed run" not in config.sources.values()


def flag(name: str) -> str:
    """`field_name` -> ``--option-name``."""
    return "--" + name.replace("_", "-")


def options(config_type: type) -> list[Field[Any]]:
    """The fields of a config that are options, in the order of ``--help``: grouped, groups in order of first use."""
    knobs = [f for f in fields(config_type) if "group" in f.metadata]
    order = (
        "Query",
        "Data",
        "Model",
        "Sampling",
        "Grading",
        "Filter",
        "Algorithm",
        "Optimisation",
        "Evaluation",
        "Output",
        "Run",
    )
    return sorted(knobs, key=lambda f: order.index(f.metadata["group"]))


def value_type(option: Field[Any]) -> tuple[type, bool]:
    """(type of one value, whether several are taken): `int | None` -> (int, False), `tuple[str, ...]` -> (str, True)."""
    kind: Any = option.type
    if typing.get_origin(kind) is types.UnionType:
        kind = next(t for t in typing.get_args(kind) if t is not type(None))
    if typing.get_origin(kind) is tuple:
        return typing.get_args(kind)[0], True
    return kind, False


def resolve(config_type: type[C], *, flags: Mapping[str, Any], command: str) -> C:
    """A config from flags > ``--config FILE`` > ``--preset NAME`` > defaults.

    Args:
        flags: the values given on the command line, by field name; an option that was not given is absent.
        command: the name of the TOML table that may hold this command's options.

    Raises:
        RlvrError: an unreadable file, an unknown key, a value of the wrong type, or one that makes no sense.
    """
    file = flags.get("config")
    from_file = read_toml(config_type, Path(file), command=command) if file else {}
    preset = flags.get("preset") or from_file.get("preset")
    from_preset = read_toml(config_type, preset_path(preset, command=command), command=command) if preset else {}
    sources = {f.name: "default" for f in options(config_type)}
    sources |= dict.fromkeys(from_preset, f"preset {preset}")
    sources |= dict.fromkeys(from_file, f"config {file}")
    sources |= dict.fromkeys(flags, "flag")
    return config_type(**{**from_preset, **from_file, **flags}, sources=sources)


def preset_path(name: str, *, command: str) -> Path:
    """The TOML file of a preset that has a table for the command. Raises RlvrError, which lists those that have one."""
    presets = Path(__file__).parent / "presets"
    fitting = sorted(p.stem for p in presets.glob("*.toml") if command in tomllib.loads(p.read_text()))
    if name not in fitting:
        raise RlvrError(
            f"rlvr {command} has no preset {name!r}.",
            f"Its presets: {', '.join(fitting)}." if fitting else "Give the options themselves, or a --config file.",
        )
    return presets / f"{name}.toml"


def resume(config: C, stored: Mapping[str, Any], *, run: str) -> C:
    """The config of a run that goes on: the stored one; what was given anew must agree with it.

    Options marked `free_on_resume` (batch sizes, workers, output) may change; they do not change what is sampled.

    Raises:
        RlvrError: names every option that was given and differs.
    """
    known = {f.name: f for f in options(type(config))}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items() if k in known}
    given = {k for k, source in config.sources.items() if source != "default"}
    free = {k for k, f in known.items() if f.metadata["free_on_resume"]}
    differing = sorted(k for k in given - free if k in values and getattr(config, k) != values[k])
    if differing:
        raise RlvrError(
            f"{run} was started with other options: "
            + ", ".join(f"{flag(k)} {values[k]!r}, not {getattr(config, k)!r}" for k in differing),
            "Resume it with its own options (rlvr takes them from the run), or start a new run.",
        )
    if values.get("lr_schedule", "constant") != "constant":
        lengths = {"n_grpo_steps", "n_sft_steps", "sft_epochs"} & given
        if changed := sorted(k for k in lengths if getattr(config, k) != values[k]):
            raise RlvrError(
                f"{run} has a {values['lr_schedule']} learning rate over {flag(changed[0])} {values[changed[0]]}: with another number of "
                "updates those that were made would have been others.",
                "Resume it as it is, or start a new run.",
            )
    values |= {k: getattr(config, k) for k in known if k in given & free or k not in values}
    sources = {k: config.sources[k] if k in given & free else "resumed run" for k in known}
    return type(config)(**values, sources=sources)


def read_toml(config_type: type, path: Path, *, command: str) -> dict[str, Any]:
    """The options in a TOML file: its top level, overridden by its table ``[command]``; kebab or snake case."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise RlvrError(f"Cannot read the config file {path}: {e.strerror}.") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise RlvrError(f"{path} is not valid TOML: {e}.") from e
    flat = {k: v for k, v in content.items() if not isinstance(v, dict)}
    if not isinstance(content.get(command, {}), dict):
        raise RlvrError(f"{path}: {command!r} is no option of rlvr {command}; as a table, [{command}], it holds them.")
    given = {**flat, **content.get(command, {})}
    known = {f.name: f for f in options(config_type)}
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in known or name == "config":
            close = difflib.get_close_matches(name, known, n=1)
            raise RlvrError(
                f"{path}: {key!r} is no option of rlvr {command}.",
                f"Did you mean {close[0]!r}?" if close else f"rlvr {command} --help lists them.",
            )
        values[name] = _typed(value, known[name], where=f"{path}: {key}")
    return values


def _typed(value: Any, option: Field[Any], *, where: str) -> Any:
    kind, several = value_type(option)
    items = value if several and isinstance(value, list) else [value]
    right = [
        (isinstance(v, kind) and (kind is bool or not isinstance(v, bool))) or (kind is float and type(v) is int)
        for v in items
    ]
    if not all(right):
        raise RlvrError(f"{where} is {value!r}; expected {kind.__name__}{' or a list of them' if several else ''}.")
    typed = tuple(kind(v) for v in items)
    return typed if several else typed[0]


def _check_values(config: Any) -> None:
    for option in options(type(config)):
        value = getattr(config, option.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise RlvrError(f"{flag(option.name)} is {value}.", "Give a number.")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise RlvrError(f"{flag(option.name)} is {value}.", "Give a number of at most 18 digits.")
        choices = option.metadata["choices"]
        if choices and getattr(config, option.name) not in choices:
            raise RlvrError(
                f"{flag(option.name)} is {getattr(config, option.name)!r}.", f"Choose one of {', '.join(choices)}."
            )


def _at_least(config: Any, minimum: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= minimum:
            raise RlvrError(f"{flag(name)} is {value}.", f"It must be at least {minimum}.")


def _check_sampling(config: Any) -> None:
    _at_least(config, 0, "sampling_temperature", "sampling_min_tokens", "seed")
    _at_least(config, 1, "sampling_max_tokens")
    if not 0 < config.sampling_top_p <= 1:
        raise RlvrError(f"--sampling-top-p is {config.sampling_top_p}.", "It must be above 0 and at most 1.")
    if config.sampling_min_tokens > config.sampling_max_tokens:
        raise RlvrError(
            f"--sampling-min-tokens {config.sampling_min_tokens} exceeds --sampling-max-tokens {config.sampling_max_tokens}."
        )
    if not config.grader_timeout > 0:
        raise RlvrError(f"--grader-timeout is {config.grader_timeout}.", "It must be above 0 seconds.")


def _check_training(config: Any) -> None:
    _check_values(config)
    _check_sampling(config)
    _at_least(
        config, 1, "eval_examples", "final_eval_examples", "max_skipped_updates", "max_batch_size", "grader_workers"
    )
    _at_least(config, 0, "eval_every", "warmup_steps", "weight_decay", "checkpoint_every")
    _above_zero(config, "learning_rate", "max_grad_norm")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise RlvrError(f"{flag(name)} is {getattr(config, name)}.", "It must be at least 0 and below 1.")
    if config.time_limit:
        _seconds(config.time_limit)
    if isinstance(config, EvaluationSamplingOptions):
        _at_least(config, 0, "eval_temperature", "eval_min_tokens")
        _at_least(config, 1, "eval_max_tokens")
        held_out = config.eval_sampling_params
        if held_out.min_tokens > held_out.max_tokens:
            raise RlvrError(
                f"Evaluations would need {held_out.min_tokens} tokens and may have {held_out.max_tokens}.",
                "Make --eval-min-tokens at most --eval-max-tokens.",
            )
        if not 0 < held_out.top_p <= 1:
            raise RlvrError(f"--eval-top-p is {config.eval_top_p}.", "It must be above 0 and at most 1.")


def _above_zero(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise RlvrError(f"{flag(name)} is {value}.", "It must be above 0.")


def _divides(config: Any, divisor: str, dividend: str) -> None:
    """RlvrError with values that would do, unless the one option's value divides the other's."""
    d, n = getattr(config, divisor), getattr(config, dividend)
    if n % d:
        fitting = [k for k in range(1, n + 1) if n % k == 0]
        near = sorted(sorted(fitting, key=lambda k: abs(k - d))[:3])
        raise RlvrError(
            f"{flag(dividend)} {n} is not a multiple of {flag(divisor)} {d}.",
            f"Take {flag(dividend)} {max(n // d, 1) * d}, or {flag(divisor)} {' or '.join(map(str, near))}.",
        )


def _seconds(text: str) -> float:
    """ "4h", "90m", "1h30m", "45s" or a number of seconds."""
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if text and "".join(n + unit for n, unit in parts) == text:
        seconds = sum(float(n) * _SECONDS[unit] for n, unit in parts)
    elif re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        seconds = float(text)
    else:
        seconds = 0.0
    if not seconds > 0:
        raise RlvrError(f"--time-limit is {text!r}.", "Write it as 4h, 90m, 1h30m or 600s.")
    return seconds
