"""Groups of options shared by several commands, and their checks."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rlvr_cli.config.endpoint import KEY_ENV, check_address, check_key_name
from rlvr_cli.config.parsing.options import LONGEST, FileFunction, Format, Provenance, check_values, flag, knob
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import ChatThinking, FormatRule, SamplingParams

Engine = Literal["auto", "transformers", "vllm", "openai"]
TrainingEngine = Literal["auto", "transformers", "vllm"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
ParamDtype = Literal["float32", "bfloat16"]
OptimizerKind = Literal["adamw", "adamw_kahan", "adamw_8bit"]
FusedKernels = Literal["auto", "none", "liger"]
ComputeDtype = Literal["auto", "float32", "bfloat16"]
Schedule = Literal["constant", "cosine"]
StopWhen = Literal["never", "diverged"]
Tracker = Literal["", "wandb", "tensorboard", "trackio"]  # "" for none, where a resumed run has one
LengthNormalization = Literal["token_mean", "masked_mean", "masked_normalize"]

GraderName = Literal["r1_zero", "question_only", "math_verify", "gsm8k", "countdown", "python"]  # modules of graders/
GraderChoice = Literal["", GraderName]  # "" where it is not given
FORMAT_RULE = "Format rule of the graders with tags: literal requires exactly '</think> <answer>', lenient allows any white space between."

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class ModelOptions(Provenance):
    model: str = knob(
        "",
        "Local directory or hub id of the model. Empty: the built-in tiny model.",
        group="Model",
        common=True,
        completes="model",
        free_on_resume=True,
    )
    device: str = knob("auto", "Torch device of the model: auto, cpu, cuda, cuda:1.", group="Model")
    max_batch_size: int | None = knob(
        None, "Sequences that the transformers engine decodes at once. Default: chosen from the available memory.",
        group="Model", free_on_resume=True, at_least=1,
    )  # fmt: skip
    cuda_graphs: bool = knob(
        True, "Replay the transformers engine's decode steps as CUDA graphs, without Python overhead.", group="Model", free_on_resume=True
    )  # fmt: skip


@dataclass(frozen=True)
class EngineOptions:
    engine: Engine = knob(
        "auto",
        "Inference engine. auto: openai with --base-url, else vllm if it is installed and there is a CUDA device, else transformers.",
        group="Model",
        free_on_resume=True,
    )
    dtype: Dtype = knob("auto", "Precision for sampling. auto: bfloat16 on CUDA, float32 on CPU.", group="Model")
    max_model_len: int | None = knob(
        None, "Context window given to vLLM, in tokens. Default: the model's own.", group="Model", at_least=1,
    )  # fmt: skip
    gpu_memory_utilization: float = knob(
        0.0,
        "Share of its GPU's memory that vLLM uses. 0 or auto: 0.85, or, beside the trainer, what that leaves.",
        group="Model",
        free_on_resume=True,
        auto=0.0,
    )
    samplers: int = knob(
        1,
        "Processes of the engine that divide the requests, one per GPU, or on the CPU; one that dies is started again.",
        group="Model",
        free_on_resume=True,
        at_least=1,
    )
    sampler_urls: str = knob(
        "",
        "Sample from vLLM servers that you started, such as http://a:8000,http://b:8000, in place of an --engine.",
        group="Model",
        free_on_resume=True,
    )


@dataclass(frozen=True)
class EndpointOptions(EngineOptions, ModelOptions):
    base_url: str = knob(
        "", "Address of an OpenAI-compatible endpoint, such as http://localhost:8000/v1.", group="Model", common=True
    )
    endpoint: Literal["completions", "chat"] = knob(
        "completions", "Endpoint's API: completions (raw prompt) or chat.", group="Model"
    )
    api_key_env: str = knob(
        KEY_ENV, "Environment variable with the endpoint's API key.", group="Model", free_on_resume=True
    )
    request_timeout: float = knob(
        600.0,
        "Seconds that one sample of an endpoint or of --sampler-urls may take, waiting and retries included.",
        group="Model",
        free_on_resume=True,
        above=0,
        at_most=LONGEST,
    )


@dataclass(frozen=True)
class PromptOptions:
    prompt: str = knob(
        "r1_zero",
        "Prompt template: r1_zero, question_only, or a file that contains {question}.",
        group="Data",
        common=True,
        completes="prompt",
    )
    chat: bool = knob(
        False, "Send the prompt as the user's message, in the model's own chat template.", group="Data", common=True
    )
    chat_thinking: ChatThinking = knob(
        "auto",
        "With --chat: the chat template's switch for thinking (Qwen3 has one). auto: as the template has it.",
        group="Data",
    )
    chat_system: str = knob("", "With --chat: the system message. Empty: none but the template's own.", group="Data")
    grader: GraderChoice | FileFunction = knob(
        "", "Grader, or a function of your own. Default: chosen by dataset and prompt.", group="Grading", common=True
    )
    format_rule: FormatRule = knob("literal", FORMAT_RULE, group="Grading")
    grader_timeout: float = knob(
        5.0, "Time limit per grade in seconds; the worker is then killed.", group="Grading", above=0, at_most=LONGEST
    )
    grader_workers: int = knob(2, "Number of grading processes.", group="Grading", free_on_resume=True, at_least=1)


@dataclass(frozen=True)
class SamplingOptions(Provenance):
    sampling_temperature: float = knob(1.0, "Temperature; 0 is greedy.", group="Sampling", common=True, at_least=0)
    sampling_top_p: float = knob(
        1.0, "Nucleus sampling: sample from the smallest set of tokens with this total probability.", group="Sampling"
    )
    sampling_max_tokens: int = knob(
        1024, "Maximum response length in tokens.", group="Sampling", common=True, at_least=1
    )
    sampling_min_tokens: int = knob(
        4, "Minimum number of tokens before a response may end.", group="Sampling", at_least=0
    )
    stop: tuple[str, ...] = knob(
        ("</answer>",), "Stop string: ends a response and is kept in it; repeatable; '' for none.", group="Sampling"
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

    @property
    def eval_sampling_params(self) -> SamplingParams:
        """The sampling parameters for evaluations during training."""
        return self.sampling_params


@dataclass(frozen=True)
class RunOptions(Provenance):
    seed: int = knob(0, "Seed of every random choice of the run.", group="Run", common=True, at_least=0)
    run: str = knob("", "Name of the run directory. Empty: COMMAND-MODEL-DATASET-DATE-TIME.", group="Run", common=True)
    runs_dir: str = knob("runs", "Directory that holds the runs.", group="Run", free_on_resume=True)
    config: str = knob("", "TOML file with options; flags override it.", group="Run", free_on_resume=True)
    preset: str = knob(
        "", "Named set of options; flags and --config override it.", group="Run", common=True, completes="preset"
    )
    format: Format = knob("table", "How result tables are printed.", group="Run", free_on_resume=True)
    resume: str = knob(
        "",
        "Resume this run (name or directory).",
        group="Run",
        common=True,
        completes="run of the command",
        free_on_resume=True,
    )
    track: tuple[Tracker, ...] = knob(
        (),
        "Also send metrics and some responses to this tracker while the run goes on; repeatable; '' for none.",
        group="Run",
        free_on_resume=True,
    )
    track_project: str = knob(
        "", "Project of W&B and Trackio. Empty: WANDB_PROJECT, or rlvr.", group="Run", free_on_resume=True
    )
    stall_minutes: float = knob(
        10.0, "Minutes without progress after which a note says what the run waits for; 0: none.", group="Run", free_on_resume=True, at_least=0,
    )  # fmt: skip


@dataclass(frozen=True)
class QuestionOptions:
    dataset: str = knob(
        "arithmetic",
        "arithmetic, countdown (or NAME:SIZE[:SEED] to generate), gsm8k, math, a .jsonl/.json/.csv/.parquet file, or hf:ORG/NAME.",
        group="Data",
        common=True,
        completes="dataset",
    )
    split: str = knob(
        "",
        "Split of a named dataset. Empty: the training split for training, the evaluation split for rlvr eval.",
        group="Data",
    )
    question_field: str = knob("", "Field that holds the question. Empty: detected by name.", group="Data")
    answer_field: str = knob("", "Field that holds the answer. Empty: detected by name.", group="Data")
    skip_bad_lines: bool = knob(False, "Skip and count unreadable lines instead of stopping.", group="Data")


@dataclass(frozen=True)
class OptimizationOptions:
    learning_rate: float = knob(1e-5, "Peak learning rate of AdamW.", group="Optimization", common=True, above=0)
    optimizer: OptimizerKind = knob(
        "adamw",
        "adamw; adamw_kahan: with --param-dtype bfloat16, keeps what rounding takes from the weights and adds it later; "
        "adamw_8bit: moments of 8 bits (needs bitsandbytes), and with bfloat16 weights keeps the same.",
        group="Optimization",
    )
    offload_optimizer: bool = knob(
        False,
        "With --optimizer adamw: compute its steps on the host, from float32 weights and moments in the host's memory. "
        "The device then holds weights and gradients only.",
        group="Optimization",
    )
    warmup_steps: int = knob(0, "Updates of linear warm-up.", group="Optimization", at_least=0)
    lr_schedule: Schedule = knob(
        "constant", "After warm-up: constant, or cosine decay to a tenth of the peak.", group="Optimization"
    )
    adam_beta1: float = knob(0.9, "AdamW's first beta.", group="Optimization")
    adam_beta2: float = knob(0.95, "AdamW's second beta.", group="Optimization")
    lora_rank: int = knob(
        0,
        "Train a LoRA adapter of this rank on all linear layers but the head, and freeze the model; 0 trains the model itself.",
        group="Optimization",
        common=True,
        at_least=0,
    )
    lora_alpha: int = knob(
        32, "With --lora-rank: what the adapter adds is multiplied by this / rank.", group="Optimization", at_least=1
    )
    lora_merge: bool = knob(
        False,
        "With --lora-rank: save the final model also with the adapter merged into it, in float32, as model-merged/.",
        group="Optimization",
        free_on_resume=True,
    )
    weight_decay: float = knob(0.0, "AdamW's weight decay.", group="Optimization", at_least=0)
    max_grad_norm: float = knob(1.0, "Clip gradients to this norm.", group="Optimization", above=0)
    micro_batch_tokens: int | None = knob(
        None,
        "Tokens per micro-batch, a shared prompt counted once, in place of a number of responses; auto: as many as fit the "
        "device's memory. Does not change the result.",
        group="Optimization",
        free_on_resume=True,
        at_least=0,
        auto=0,
    )
    gradient_checkpointing: bool = knob(
        False,
        "Compute activations again in the backward pass instead of keeping them: less memory, more time, the same result.",
        group="Optimization",
        free_on_resume=True,
    )
    fused_kernels: FusedKernels = knob(
        "auto",
        "Kernels for norms, rotary positions and SwiGLU in updates: liger (needs liger-kernel), or none. auto: liger on CUDA where it "
        "is installed and the model is a Llama, Mistral, Qwen2 or Qwen3.",
        group="Optimization",
    )
    max_skipped_updates: int = knob(
        3,
        "Stop the run after this many consecutive updates with non-finite gradients.",
        group="Optimization",
        at_least=1,
    )
    param_dtype: ParamDtype = knob(
        "float32",
        "Precision of the weights and of AdamW's state; bfloat16 halves the memory, but rounds away most small updates unless with "
        "--optimizer adamw_kahan, adamw_8bit, or --offload-optimizer.",
        group="Optimization",
    )
    compute_dtype: ComputeDtype = knob(
        "auto",
        "Precision of the matrix products of training, and of sampling with transformers; the weights keep theirs. "
        "auto: bfloat16 on CUDA, float32 on CPU.",
        group="Optimization",
    )


@dataclass(frozen=True)
class EvaluationOptions:
    eval_dataset: str = knob(
        "",
        "Evaluation questions. Empty: the evaluation split of a named dataset, else none.",
        group="Evaluation",
        common=True,
        completes="dataset",
    )
    eval_examples: int = knob(
        1024, "Questions per evaluation, the same each time.", group="Evaluation", common=True, at_least=1
    )
    eval_every: int = knob(
        0,
        "Updates between evaluations; 0: only before and after training.",
        group="Evaluation",
        common=True,
        at_least=0,
    )
    final_eval_examples: int | None = knob(
        None,
        "Questions in the last evaluation. Default: --eval-examples.",
        group="Evaluation",
        at_least=1,
    )


@dataclass(frozen=True)
class EvaluationSamplingOptions(SamplingOptions):
    eval_temperature: float | None = knob(
        None,
        "Temperature for evaluations. Default: --sampling-temperature.",
        group="Evaluation",
        at_least=0,
    )
    eval_top_p: float | None = knob(None, "Top-p for evaluations. Default: --sampling-top-p.", group="Evaluation")
    eval_max_tokens: int | None = knob(
        None,
        "Maximum response length in evaluations. Default: --sampling-max-tokens.",
        group="Evaluation",
        at_least=1,
    )
    eval_min_tokens: int | None = knob(
        None,
        "Minimum response length in evaluations. Default: --sampling-min-tokens.",
        group="Evaluation",
        at_least=0,
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
        10, "Updates between checkpoints; the last two are kept. 0: only when interrupted.", group="Run", free_on_resume=True, at_least=0,
    )  # fmt: skip
    checkpoint_minutes: float | None = knob(
        None,
        "Least minutes between checkpoints; one that is due earlier waits. Default: 20 times as long as the last one took, if over a second.",
        group="Run", free_on_resume=True, at_least=0,
    )  # fmt: skip
    time_limit: str = knob(
        "",
        "Time limit for the whole run, including the last evaluation, such as 4h or 90m.",
        group="Run",
        common=True,
        free_on_resume=True,
    )
    stop_when: StopWhen = knob(
        "never",
        "diverged: end a run, as diverged, once its held-out reward, entropy or gradient norm is past its bounds (docs/algorithms.md).",
        group="Run",
        free_on_resume=True,
    )
    trainers: int = knob(
        1,
        "Trainer processes that divide each update, one per GPU, or on the CPU; the embedded engine samples on all of them.",
        group="Run",
        common=True,
        free_on_resume=True,
        at_least=1,
    )
    fsdp: bool = knob(
        False,
        "Divide weights, gradients and optimizer state over the trainers (FSDP2), instead of a copy for each.",
        group="Run",
        free_on_resume=True,
    )
    nodes: int = knob(
        1,
        "Machines that divide the trainers; start the same command on each. The first one has the run.",
        group="Run",
        free_on_resume=True,
        at_least=1,
    )
    rendezvous: str = knob(
        "", "HOST:PORT of the first machine, at which the others find it.", group="Run", free_on_resume=True
    )
    node_rank: int | None = knob(
        None,
        "Number of this machine, from 0. Default: that of Slurm, else 0 where HOST is this machine.",
        group="Run",
        free_on_resume=True,
        at_least=0,
    )
    dry_run: bool = knob(False, "Print the plan and stop.", group="Run", common=True, free_on_resume=True)
    max_grade_errors: float = knob(
        0.1,
        "Stop before the first update if more than this share of the first batch, or of the first evaluation, cannot be graded.",
        group="Grading",
        free_on_resume=True,
        at_least=0,
        at_most=1,
    )

    @property
    def time_limit_seconds(self) -> float:
        """The time limit in seconds; infinity without one."""
        return _seconds(self.time_limit) if self.time_limit else math.inf


@dataclass(frozen=True)
class TrainingEngineOptions(EngineOptions):
    engine: TrainingEngine = knob(
        "auto",
        "Inference engine. auto: vllm if it is installed and there is a CUDA device, else transformers, which shares the trainer's weights.",
        group="Model",
        free_on_resume=True,
    )
    dtype: Dtype = knob(
        "auto",
        "Precision of vLLM. auto: bfloat16 on CUDA, float32 on CPU. (transformers has that of --compute-dtype.)",
        group="Model",
    )
    weights_dir: str = knob(
        "",
        "Directory through which new weights or adapters go to the servers, which they must see too. Empty: that of temporary files.",
        group="Model",
        free_on_resume=True,
    )


@dataclass(frozen=True)
class TrainingConfig(
    TrainingEngineOptions,
    TrainingRunOptions,
    EvaluationOptions,
    SamplingOptions,
    PromptOptions,
    OptimizationOptions,
    ModelOptions,
    QuestionOptions,
):
    """The options shared by all training commands. The constants are options in some of the commands."""

    # Not annotated, so these are not dataclass fields; a command that has the option redefines it as one.
    async_steps = 0
    kl_coef = 0.0
    loaded_teacher = ""
    divergence = "reverse_kl"
    rollout_batch_size = 256
    critic = ""
    critic_learning_rate = 0.0

    @property
    def samples_apart(self) -> bool:
        """Whether the engine is in processes of its own."""
        return bool(self.async_steps) or self.samplers > 1

    @property
    def keeps_reference(self) -> bool:
        """Whether the first policy stays in memory, as the reference."""
        return bool(self.kl_coef)


def check_prompt(config: PromptOptions) -> None:
    given = {"chat_thinking": config.chat_thinking != "auto", "chat_system": bool(config.chat_system)}
    name = next((name for name, is_given in given.items() if is_given), None)
    if name is not None and not config.chat:
        raise RlvrError(f"{flag(name)} needs --chat.", "Add --chat, or leave it out.")


def check_lora(config: OptimizationOptions) -> None:
    given = {"lora_alpha": config.lora_alpha != 32, "lora_merge": config.lora_merge}
    name = next((name for name, is_given in given.items() if is_given), None)
    if name is not None and not config.lora_rank:
        raise RlvrError(f"{flag(name)} needs --lora-rank.", "Add --lora-rank 32, or leave it out.")


def check_engine(config: EngineOptions) -> None:
    if not 0 <= config.gpu_memory_utilization <= 1:
        raise RlvrError(
            f"--gpu-memory-utilization is {config.gpu_memory_utilization}.", "It is a share: between 0 and 1, or auto."
        )


def check_sampling(config: SamplingOptions) -> None:
    if not 0 < config.sampling_top_p <= 1:
        raise RlvrError(f"--sampling-top-p is {config.sampling_top_p}.", "It must be above 0 and at most 1.")
    if config.sampling_min_tokens > config.sampling_max_tokens:
        raise RlvrError(
            f"--sampling-min-tokens {config.sampling_min_tokens} exceeds --sampling-max-tokens {config.sampling_max_tokens}.",
            "Lower --sampling-min-tokens, or raise --sampling-max-tokens.",
        )


def check_endpoint(config: EndpointOptions, *, chat: bool) -> None:
    if config.base_url:
        check_address(config.base_url)
    check_key_name(config.api_key_env)
    if config.sources.get("api_key_env") == "resumed run" and config.api_key_env != KEY_ENV:
        # A run directory may come from someone else, together with the address that would get the variable's value.
        raise RlvrError(
            f"The run was started with the key in {config.api_key_env}, and a run does not choose what is sent.",
            f"To send it to {config.base_url} again: --resume RUN --api-key-env {config.api_key_env}",
        )
    if config.max_model_len and config.engine == "transformers":
        raise RlvrError(
            "--max-model-len applies only to vLLM; --engine transformers sizes its cache to the requests.",
            "Leave it out.",
        )
    if config.engine == "openai" and not config.base_url:
        raise RlvrError("--engine openai needs an endpoint.", "Name it: --base-url http://localhost:8000/v1")
    if config.base_url and config.engine not in ("auto", "openai"):
        raise RlvrError(f"--base-url and --engine {config.engine} cannot be combined.", "Leave one of them out.")
    if config.base_url and (config.samplers > 1 or config.sampler_urls):
        other = "--sampler-urls" if config.sampler_urls else "--samplers"
        raise RlvrError(f"--base-url and {other} cannot be combined.", "Leave one of them out.")
    if config.base_url and chat:
        raise RlvrError(
            "--chat uses a chat template on this machine; an endpoint has its own.",
            "Use --endpoint chat instead: it sends the prompt as the user's message.",
        )
    if (config.base_url or config.engine == "openai") and not config.model:
        raise RlvrError("An endpoint needs the name of its model.", "Name it: --model NAME")


def check_servers(config: EngineOptions) -> None:
    if not config.sampler_urls.strip():
        if config.sampler_urls:
            raise RlvrError("--sampler-urls names no server.", "Give their addresses, or leave it out.")
        return
    if config.engine != "auto":
        raise RlvrError(f"--engine {config.engine} and --sampler-urls exclude each other.", "Leave one of them out.")
    if config.samplers > 1:
        raise RlvrError(
            "--samplers starts processes here, and --sampler-urls names servers that run.", "Leave one of them out."
        )
    urls = [url.strip() for url in config.sampler_urls.split(",")]
    if "" in urls:
        raise RlvrError(
            f"--sampler-urls {config.sampler_urls!r} has an empty address.", "Separate addresses by one comma."
        )
    twice = next((url for url in urls if [u.rstrip("/") for u in urls].count(url.rstrip("/")) > 1), None)
    if twice:
        raise RlvrError(
            f"--sampler-urls names {twice} twice.", "Name each server once: its requests are queued by itself."
        )
    for url in urls:
        check_address(url, option="--sampler-urls")
        if url.strip().rstrip("/").endswith("/v1"):
            raise RlvrError(f"--sampler-urls names {url.strip()}.", "Leave /v1 out: weights are loaded beside it.")


def check_weights_dir(config: TrainingConfig) -> None:
    if config.weights_dir and not config.sampler_urls:
        raise RlvrError("--weights-dir needs --sampler-urls.", "Add --sampler-urls, or leave it out.")
    if config.weights_dir and not Path(config.weights_dir).is_dir():
        raise RlvrError(
            f"--weights-dir {config.weights_dir} is not a directory.", "Make it, where the servers see it too."
        )


def check_nodes(config: TrainingRunOptions) -> None:
    if config.nodes == 1:
        given = {"rendezvous": bool(config.rendezvous), "node_rank": config.node_rank is not None}
        name = next((name for name, is_given in given.items() if is_given), None)
        if name is not None:
            raise RlvrError(f"{flag(name)} needs --nodes.", "Add --nodes, or leave it out.")
        return
    if not re.fullmatch(r"[^\s/]+:[0-9]{1,5}", config.rendezvous):
        raise RlvrError(
            f"--rendezvous is {config.rendezvous!r}, where {config.nodes} machines must meet.",
            "Write the first machine's address and a free port, such as 10.0.0.1:29500.",
        )
    if config.trainers % config.nodes:
        raise RlvrError(
            f"--trainers {config.trainers} cannot be divided evenly among {config.nodes} machines.",
            f"--trainers counts those of all machines: use {config.nodes}, {2 * config.nodes}, ...",
        )


def check_fsdp(config: TrainingConfig) -> None:
    if not config.fsdp:
        return
    if config.trainers == 1:
        raise RlvrError("--fsdp divides the weights over several trainers.", "Add --trainers N, or use --no-fsdp.")
    refused = {
        "lora_rank": "an adapter is small, and its base is not divided",
        "async_steps": "the older weights that it samples with are not divided",
    }
    for name, why in refused.items():
        if getattr(config, name):
            raise RlvrError(f"{flag(name)} and --fsdp exclude each other: {why}.", "Leave one of them out.")
    if config.optimizer == "adamw_8bit":
        raise RlvrError(
            "--optimizer adamw_8bit and --fsdp exclude each other: 256 moments with one scale would depend on the division.",
            "Leave one of them out, or use --optimizer adamw_kahan with --param-dtype bfloat16.",
        )


def check_training(config: TrainingConfig) -> None:
    check_values(config)
    check_prompt(config)
    check_sampling(config)
    check_engine(config)
    check_nodes(config)
    check_lora(config)
    check_fsdp(config)
    check_servers(config)
    check_weights_dir(config)
    if config.samplers > 1 and config.async_steps:
        raise RlvrError(
            f"--samplers {config.samplers} and --async-steps {config.async_steps} cannot be combined: what was sampled ahead by a "
            "process that dies could not be sampled again, because the others have newer weights by then.",
            "Leave one of them out.",
        )
    if config.optimizer == "adamw_kahan" and config.param_dtype != "bfloat16":
        raise RlvrError(
            "--optimizer adamw_kahan keeps what bfloat16 weights round away, and these are float32.",
            "Add --param-dtype bfloat16, or leave --optimizer out.",
        )
    if config.offload_optimizer and config.optimizer != "adamw":
        raise RlvrError(
            f"--offload-optimizer keeps float32 weights and moments on the host: --optimizer {config.optimizer} has no use there.",
            "Leave --optimizer out, or --offload-optimizer.",
        )
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise RlvrError(f"{flag(name)} is {getattr(config, name)}.", "It must be at least 0 and below 1.")
    if (config.param_dtype, config.compute_dtype) == ("bfloat16", "float32"):
        raise RlvrError(
            "--compute-dtype is float32, but --param-dtype bfloat16 rounds the weights to 8 significant bits.",
            "Leave --compute-dtype out, or use --param-dtype float32.",
        )
    if config.time_limit:
        _seconds(config.time_limit)
        if config.time_limit[-1] not in _SECONDS and config.sources.get("time_limit") != "resumed run":
            text = config.time_limit
            raise RlvrError(
                f"--time-limit is {text!r}, without a unit.",
                f"Write {text}h for hours, {text}m for minutes, or {text}s for seconds.",
            )
    if isinstance(config, EvaluationSamplingOptions):
        held_out = config.eval_sampling_params
        if held_out.min_tokens > held_out.max_tokens:
            raise RlvrError(
                f"Evaluation responses need at least {held_out.min_tokens} tokens but may have at most {held_out.max_tokens}.",
                "Make --eval-min-tokens at most --eval-max-tokens.",
            )
        if not 0 < held_out.top_p <= 1:
            raise RlvrError(f"--eval-top-p is {config.eval_top_p}.", "It must be above 0 and at most 1.")


def _seconds(text: str) -> float:
    """Parse a duration: "4h", "90m", "1h30m", "45s" or, of a run of an older version, a number of seconds."""
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if text and "".join(n + unit for n, unit in parts) == text:
        seconds = sum(float(n) * _SECONDS[unit] for n, unit in parts)
    elif text.replace(".", "", 1).isdecimal():
        seconds = float(text)
    else:
        seconds = 0.0
    if not seconds > 0:
        raise RlvrError(f"--time-limit is {text!r}.", "Write it as 4h, 90m, 1h30m or 600s.")
    return seconds
