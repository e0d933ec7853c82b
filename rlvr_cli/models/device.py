"""Where and in which precision a model computes."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from rlvr_cli.errors import RlvrError
from rlvr_cli.text import printable

if TYPE_CHECKING:
    from rlvr_cli.models.policy import Policy

TINY_PARAMETERS = 10_000_000


def other_cuda_device(device: str) -> str | None:
    """Return a CUDA device other than the trainer's, as CUDA_VISIBLE_DEVICES for a process that runs beside it.

    None if there is no other one: then both processes compute on the same device, or on the CPU.
    """
    import torch

    count = torch.cuda.device_count() if on_cuda(device) else 0
    if count < 2:
        return None
    taken = int(device.removeprefix("cuda:")) if ":" in device else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return visible[(taken + 1) % count]


def use_few_threads(policy: "Policy") -> None:
    """Limit torch to one thread for a tiny model on the CPU, where synchronizing threads costs more than they save."""
    import torch

    if policy.device.type == "cpu" and policy.num_parameters < TINY_PARAMETERS:
        torch.set_num_threads(1)


def on_cuda(device: str) -> bool:
    """Return whether `device`, which may be `auto`, is a CUDA device."""
    import torch

    return torch.cuda.is_available() if device == "auto" else device.startswith("cuda")


def autocast_dtype(model: PreTrainedModel) -> torch.dtype | None:
    """Return the dtype to compute in if it is not that of the weights (bfloat16 for float32 on CUDA), else None."""
    parameter = next(model.parameters())
    return torch.bfloat16 if parameter.is_cuda and parameter.dtype == torch.float32 else None


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|mps|cuda(:[0-9]{1,2})?", name) is None:  # others, such as meta, cannot run a model
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


def current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a CUDA device is the current one, on which streams, graphs and some kernels run.

    Only while computing: another engine in this process may compute on another device.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def out_of_memory_as_user_error(
    problem: str = "The device has too little memory for this micro-batch.",
    hint: str = "Use smaller micro-batches, which give the same result: raise --gradient-accumulation-steps or lower "
    "--micro-batch-size. If vLLM shares the device, lower --gpu-memory-utilization.",
) -> Iterator[None]:
    """Turn an out-of-memory error of the device into a user error, by default that of an update or of scoring."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RlvrError(problem, hint) from error


def autocast_context(model: PreTrainedModel) -> contextlib.AbstractContextManager[object]:
    """Return a context that computes in `autocast_dtype`, for training and scoring alike."""
    dtype = autocast_dtype(model)
    return contextlib.nullcontext() if dtype is None else torch.autocast("cuda", dtype=dtype)
