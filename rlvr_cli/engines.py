"""From options to a sampler: which engine, and why.

Enters: the name of an engine and of a model. Leaves: an open `Sampler` and the sentence that says which engine was taken.
Torch is imported when a model is opened, so that an endpoint does without it and bad input is reported at once.
`python -m rlvr_cli.engines` is the other end of a `samplers.process.SamplingProcess`.
"""

import importlib.util
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

from rlvr_cli.errors import RlvrError, missing_extra
from rlvr_cli.records import Sampler
from rlvr_cli.signals import die_with

TINY_PARAMETERS = 10_000_000


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


def model_path(model: str) -> str:
    """The model that was named, or the built-in one."""
    from rlvr_cli.models import builtin_model_path

    return model or str(builtin_model_path())


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
            from rlvr_cli.models import load_policy
            from rlvr_cli.samplers.transformers import TransformersSampler

            policy, tokenizer = load_policy(model_path(model), dtype=_resolved(dtype, device), device=device)
            use_few_threads(policy)
            return TransformersSampler(policy, tokenizer, max_batch_size=max_batch_size, cuda_graphs=cuda_graphs)
        case "vllm":
            from rlvr_cli.samplers.vllm import VllmSampler

            return VllmSampler(
                model_path(model),
                dtype=_resolved(dtype, device),
                max_model_len=max_model_len,
                gpu_memory_utilization=gpu_memory_utilization,
                seed=seed,
                enable_sleep_mode=sleep_mode,
            )
        case "openai":
            from rlvr_cli.samplers.openai import OpenAISampler

            return OpenAISampler(model, base_url=base_url, endpoint=endpoint, api_key_env=api_key_env)
    raise RlvrError(f"There is no engine {engine!r}.", "Choose transformers, vllm or openai.")


def open_apart(
    engine: str,
    model: str,
    *,
    dtype: str,
    param_dtype: str,
    device: str,
    max_batch_size: int | None,
    cuda_graphs: bool,
    max_model_len: int | None,
    gpu_memory_utilization: float,
    seed: int,
) -> tuple[Sampler, Any]:
    """An engine with weights of its own, for a `SamplingProcess`, and the model through which it is given others.

    Args:
        param_dtype: of the policy's weights, as they come.
        device: of the embedded engine; vLLM takes the first that it sees.
    """
    from rlvr_cli.models import autocast_dtype, load_policy

    if engine == "vllm":
        sampler = open_sampler(
            engine,
            model,
            dtype=dtype,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
            seed=seed,
        )
        return sampler, load_policy(model_path(model), dtype=param_dtype, device="cpu").model
    from rlvr_cli.samplers.transformers import TransformersSampler

    policy, tokenizer = load_policy(model_path(model), dtype=param_dtype, device=device)
    use_few_threads(policy)
    how = {"max_batch_size": max_batch_size, "cuda_graphs": cuda_graphs, "autocast_dtype": autocast_dtype(policy)}
    return TransformersSampler(policy, tokenizer, **how), policy


def device_apart(device: str) -> str | None:
    """For CUDA_VISIBLE_DEVICES of a process beside the trainer's: another CUDA device where there are several.

    None: there is none to choose from, and both compute on the same one, or on the CPU.
    """
    import torch

    count = torch.cuda.device_count() if on_cuda(device) else 0
    if count < 2:
        return None
    taken = int(device.removeprefix("cuda:")) if ":" in device else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return visible[(taken + 1) % count]


def use_few_threads(model: Any) -> None:
    """One torch thread for a tiny model on the CPU: its operators are too small to share, and waiting costs more than they do."""
    import torch

    if model.device.type == "cpu" and model.num_parameters() < TINY_PARAMETERS:
        torch.set_num_threads(1)


def on_cuda(device: str) -> bool:
    """Whether a model for `device` goes to a CUDA device."""
    import torch

    return torch.cuda.is_available() if device == "auto" else device.startswith("cuda")


def _resolved(dtype: str, device: str) -> str:
    """`auto` is half precision where the hardware is made for it."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if on_cuda(device) else "float32"


def model_facts(engine: str, model: str, *, base_url: str = "", fetch: bool = True) -> dict[str, Any]:
    """What identifies the model in run.json: its name and, where there are files, their hashes.

    Args:
        fetch: download a hub model that is not on this machine yet, so that its files are known from the start.
    """
    if engine == "openai":
        return {"name": model, "endpoint": base_url}
    from rlvr_cli.models import model_identity

    identity = model_identity(model_path(model), fetch=fetch)
    return {"name": model or "tiny-math (built in; name another with --model)", **identity}


def sampler_facts(sampler: Sampler, *, reason: str) -> dict[str, Any]:
    """How an engine samples, for run.json: whose seeds its draws come from, and what it had to say of itself."""
    return {
        "engine": sampler.engine,
        "reason": reason,
        "seeding": getattr(sampler, "seeding", "per-request"),
        "notes": list(getattr(sampler, "notes", ())),
    }


def main(descriptor: int, parent: int) -> None:
    """A sampling process: open the engine that the parent names, and serve it."""
    from multiprocessing.connection import Connection

    from rlvr_cli.samplers.process import serve

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # both are the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with(parent)
    serve(Connection(descriptor), open_apart)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
