"""From options to a sampler: which engine, and why.

Enters: the name of an engine and of a model. Leaves: an open `Sampler`, and which engine was chosen and why.
Torch is imported when a model is opened, so that endpoints do not need it and bad input is reported at once.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

from rlvr_cli.errors import RlvrError, missing_extra
from rlvr_cli.models.device import on_cuda, use_few_threads
from rlvr_cli.models.identity import model_path
from rlvr_cli.types import Sampler


@dataclass(frozen=True)
class Engine:
    """An engine's name and the reason for taking it."""

    name: str
    reason: str


def choose_engine(engine: str, *, base_url: str) -> Engine:
    """Resolve `auto`: an endpoint when one is named, vLLM where it is installed with a CUDA device, else transformers.

    Raises:
        RlvrError: vLLM was asked for and is not installed.
    """
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise missing_extra("vLLM", "vllm")
    if engine != "auto":
        return Engine(engine, "asked for with --engine")
    if base_url:
        return Engine("openai", "--base-url names an endpoint")
    if importlib.util.find_spec("vllm") is None:
        return Engine("transformers", "vLLM is not installed")
    import torch

    if not torch.cuda.is_available():
        return Engine("transformers", "no CUDA device; --engine vllm runs vLLM on the CPU")
    return Engine("vllm", "vLLM is installed and there is a CUDA device")


def open_sampler(
    engine: str,
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_batch_size: int | None = None,
    cuda_graphs: bool = True,
    max_model_len: int | None = None,
    gpu_memory_utilization: float = 0.85,
    seed: int = 0,
    base_url: str = "",
    endpoint: str = "completions",
    api_key_env: str = "OPENAI_API_KEY",
    sleep_mode: bool = False,
) -> Sampler:
    """Load `model` into `engine`.

    Args:
        sleep_mode: make vLLM's `sleep` give the device's memory back.

    Raises:
        RlvrError: a missing extra, an unreadable model, an endpoint without a key.
    """
    match engine:
        case "transformers":
            from rlvr_cli.models.policy import load_policy
            from rlvr_cli.samplers.embedded.engine import TransformersSampler

            policy = load_policy(model_path(model), dtype=_resolve_dtype(dtype, device), device=device)
            use_few_threads(policy)
            return TransformersSampler(policy, max_batch_size=max_batch_size, cuda_graphs=cuda_graphs)
        case "vllm":
            from rlvr_cli.samplers.vllm import VllmSampler

            return VllmSampler(
                model_path(model),
                dtype=_resolve_dtype(dtype, device),
                max_model_len=max_model_len,
                gpu_memory_utilization=gpu_memory_utilization,
                seed=seed,
                enable_sleep_mode=sleep_mode,
            )
        case "openai":
            from rlvr_cli.samplers.openai import OpenAISampler

            return OpenAISampler(model, base_url=base_url, endpoint=endpoint, api_key_env=api_key_env)
    raise RlvrError(f"There is no engine {engine!r}.", "Choose transformers, vllm or openai.")


def _resolve_dtype(dtype: str, device: str) -> str:
    """Resolve `auto`: bfloat16 on CUDA, else float32."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if on_cuda(device) else "float32"


def sampler_facts(sampler: Sampler, *, reason: str) -> dict[str, Any]:
    """Return what run.json stores about a sampler: its engine and why it was chosen, its seeding and its notes."""
    return {
        "engine": sampler.engine,
        "reason": reason,
        "seeding": sampler.seeding,
        "notes": list(sampler.notes),
    }
