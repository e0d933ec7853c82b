"""From disk to a policy, plain or with an adapter.

Enters: a model directory or Hub id, precisions, a device, and the adapter to train. Leaves: a `Policy`, which can load itself again.
"""

import os
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.adapter import load_adapted
from rlvr_cli.models.directory import base_of, local_directory, weight_files
from rlvr_cli.models.policy import Lora, Policy, first_not_finite
from rlvr_cli.models.pretrained import read_pretrained
from rlvr_cli.process import available_cores, keep_freed_memory
from rlvr_cli.text import printable

TINY_PARAMETERS = 10_000_000


def load_policy(
    path_or_id: str | Path,
    *,
    dtype: str = "float32",
    compute_dtype: str = "auto",
    device: str = "auto",
    lora: Lora | None = None,
) -> Policy:
    """Load a causal language model, in eval mode, and its tokenizer.

    Attention is flash-attention 2 where it can run (CUDA, the package installed, weights in half precision), else
    PyTorch's own, and the eager one of a model that supports neither; `Policy.attention` says which. A tokenizer
    without a padding token pads with EOS.

    Args:
        path_or_id: a model directory, or else a Hugging Face Hub id. A directory is read without any network access. A
            directory may hold an adapter: then its base is loaded with it.
        dtype: of the parameters: float32, bfloat16 or float16.
        compute_dtype: of matrix products: that of the parameters, or bfloat16 for float32 parameters, by autocast.
            `auto`: bfloat16 for float32 parameters on CUDA, else that of the parameters.
        device: `auto` (CUDA if there is one), `cpu`, `cuda`, `cuda:N` or `mps`.
        lora: train an adapter, and freeze the model: a new one, or the one in the directory, which must be of this rank.

    Raises:
        RlvrError: no such model, no safetensors in it, a part of it missing or damaged, a tokenizer that does not
            belong to it, no such device, or parameters that cannot compute in `compute_dtype`.
    """
    if lora is not None or base_of(path_or_id) is not None:
        policy = load_adapted(path_or_id, dtype=dtype, compute_dtype=compute_dtype, device=device, lora=lora)
    else:
        policy = Policy(*read_pretrained(path_or_id, dtype=dtype, device=device), compute_dtype=compute_dtype)
    if policy.device.type == "cpu":
        keep_freed_memory()
    there = str(policy.device)
    policy.load_again = partial(
        load_policy, path_or_id, dtype=dtype, compute_dtype=compute_dtype, device=there, lora=lora
    )
    return policy


def check_finite(policy: Policy, path_or_id: str | Path) -> None:
    """Raise RlvrError if the weights of a model to train hold NaN or infinity: no checkpoint could be written.

    Published models may have them in rows that no token reads, with which everything else works.

    Args:
        path_or_id: where the policy was just loaded from.
    """
    name = first_not_finite(policy.weights())
    if name is None:
        return
    file = _file_with(name, local_directory(path_or_id))
    raise RlvrError(
        f"The weights of {printable(str(path_or_id))} hold NaN or infinity, first in {name}{f' ({file})' * bool(file)}: no checkpoint could "
        "be written.",
        "Copy or download the model again. If it was published like this, in rows that no token uses, write 0 there in a copy of it.",
    )


def _file_with(name: str, directory: Path | None) -> str:
    """Return the weights file that has this tensor; empty if none has it under this name."""
    for path in weight_files(directory) if directory is not None else ():
        with safe_open(path, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                return path.name
    return ""


def load_frozen(path_or_id: str | Path, *, dtype: str, compute_dtype: str, device: str) -> Policy:
    """Load a policy that is not trained; arguments and errors are those of `load_policy`."""
    frozen = load_policy(path_or_id, dtype=dtype, compute_dtype=compute_dtype, device=device)
    frozen.model.requires_grad_(False)
    return frozen


def use_few_threads(policy: Policy, *, processes: int = 1) -> None:
    """Limit torch's threads on the CPU: for a tiny model to one, since synchronizing threads costs more than they save.

    Args:
        processes: how many compute beside each other. If there are several, they divide the cores that this one may use, unless
            OMP_NUM_THREADS says how many threads each has.
    """
    if policy.device.type != "cpu":
        return
    if policy.num_parameters < TINY_PARAMETERS:
        torch.set_num_threads(1)
    elif processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(available_cores() // processes, 1))
