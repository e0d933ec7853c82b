"""The inference engine: which one, in how many processes, or on which servers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlvr_cli.config.parsing.options import LONGEST, NoEffect, Provenance, check_effects, flag, knob
from rlvr_cli.config.shared.addresses import check_address
from rlvr_cli.errors import RlvrError

Engine = Literal["auto", "transformers", "vllm", "openai"]
TrainingEngine = Literal["auto", "transformers", "vllm"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class EngineOptions(Provenance):
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
    cluster: str = knob(
        "",
        "Ray cluster on whose nodes --trainers and --samplers are started: its address, or auto for the one of this machine.",
        group="Model",
        free_on_resume=True,
    )
    sampler_urls: str = knob(
        "",
        "Sample from vLLM servers that you started, such as http://a:8000,http://b:8000, in place of an --engine.",
        group="Model",
        free_on_resume=True,
    )


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
        path=True,
    )
    request_timeout: float = knob(
        600.0,
        "Seconds that one sample of --sampler-urls may take, waiting and retries included.",
        group="Model",
        free_on_resume=True,
        above=0,
        at_most=LONGEST,
    )


def check_engine(config: EngineOptions) -> None:
    if not 0 <= config.gpu_memory_utilization <= 1:
        raise RlvrError(
            f"--gpu-memory-utilization is {config.gpu_memory_utilization}.", "It is a share: between 0 and 1, or auto."
        )
    of_vllm = ["gpu_memory_utilization"]
    if isinstance(config, TrainingEngineOptions):
        of_vllm.append("dtype")
    needs = dict.fromkeys(("max_batch_size", "cuda_graphs"), (config.engine != "vllm", "--engine transformers"))
    check_effects(config, needs | dict.fromkeys(of_vllm, (config.engine != "transformers", "--engine vllm")))


def check_cluster(config: EngineOptions) -> None:
    if not config.cluster:
        return
    if config.sampler_urls:
        raise RlvrError(
            "--cluster starts samplers on its nodes, and --sampler-urls names servers that run.",
            "Leave one of them out.",
        )
    processes = config.samplers > 1 or getattr(config, "trainers", 1) > 1 or getattr(config, "async_steps", 0)
    if not processes:
        raise RlvrError(
            "--cluster has nothing to place: there is one process.",
            "Add --samplers" + (", --trainers or --async-steps." if hasattr(config, "trainers") else "."),
        )


def check_samples_here(config: EngineOptions, *, where: str) -> None:
    """Raise NoEffect for an option of the command line that is of an engine on this machine; the model samples elsewhere.

    Args:
        where: the option that names the place.
    """
    for name in ("dtype", "max_batch_size", "cuda_graphs", "gpu_memory_utilization"):
        if config.sources.get(name) == "flag":
            raise NoEffect(
                f"{flag(name)} has no effect with {where}: the model does not sample here.",
                "Leave it out.",
                option=name,
            )


def check_servers(config: EngineOptions) -> None:
    check_cluster(config)
    if not config.sampler_urls.strip():
        if config.sampler_urls:
            raise RlvrError("--sampler-urls names no server.", "Give their addresses, or leave it out.")
        return
    if config.engine != "auto":
        raise RlvrError(f"--engine {config.engine} and --sampler-urls exclude each other.", "Leave one of them out.")
    check_samples_here(config, where="--sampler-urls")
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


def check_weights_dir(config: TrainingEngineOptions) -> None:
    if config.weights_dir and not config.sampler_urls:
        raise RlvrError("--weights-dir needs --sampler-urls.", "Add --sampler-urls, or leave it out.")
    if config.weights_dir and not Path(config.weights_dir).is_dir():
        raise RlvrError(
            f"--weights-dir {config.weights_dir} is not a directory.", "Make it, where the servers see it too."
        )
