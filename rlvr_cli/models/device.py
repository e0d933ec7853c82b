"""Where and in which precision a model computes."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from rlvr_cli.errors import RlvrError
from rlvr_cli.text import printable

TINY_PARAMETERS = 10_000_000


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


def use_few_threads(policy: Any) -> None:
    """One torch thread for a tiny model on the CPU: its operators are too small to share, and waiting costs more than they do."""
    import torch

    if policy.device.type == "cpu" and policy.num_parameters < TINY_PARAMETERS:
        torch.set_num_threads(1)


def on_cuda(device: str) -> bool:
    """Whether a model for `device` goes to a CUDA device."""
    import torch

    return torch.cuda.is_available() if device == "auto" else device.startswith("cuda")


def autocast_dtype(model: PreTrainedModel) -> torch.dtype | None:
    """The precision a policy is computed in where that is not the precision of its weights: bfloat16 for float32 on CUDA."""
    parameter = next(model.parameters())
    return torch.bfloat16 if parameter.is_cuda and parameter.dtype == torch.float32 else None


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|mps|cuda(:[0-9]{1,2})?", name) is None:  # torch knows more, such as meta, that run no model
        raise RlvrError(f"No device {printable(name)!r}.", "Use auto, cpu, cuda, cuda:1 or mps.")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RlvrError(
            f"There is no device {device}: {torch.cuda.device_count()} CUDA devices are visible.",
            "Use --device cpu, or look at CUDA_VISIBLE_DEVICES and whether this PyTorch was built for CUDA.",
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise RlvrError("There is no device mps: this PyTorch sees no Apple GPU.", "Use --device cpu.")
    return device


@contextlib.contextmanager
def explained_memory() -> Iterator[None]:
    """Turn the device's being full into the user's error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RlvrError(
            "The device has too little memory for this micro-batch.",
            "Take smaller ones, which changes no result: a higher --gradient-accumulation-steps, or a lower --micro-batch-size. "
            "Beside vLLM on one device: a lower --gpu-memory-utilization.",
        ) from error


def autocast_context(model: PreTrainedModel) -> contextlib.AbstractContextManager[object]:
    """Compute in `autocast_dtype`, for training and for scoring alike."""
    dtype = autocast_dtype(model)
    return contextlib.nullcontext() if dtype is None else torch.autocast("cuda", dtype=dtype)
