"""A teacher for `rlvr distill`: a student's model with other weights."""

from pathlib import Path

import torch

from rlvr_cli.models.load import load_policy
from rlvr_cli.models.policy import distinct_tensors


@torch.no_grad()
def write_teacher(folder: Path, *, of: str | Path, by: float = 0.1) -> Path:
    """Save the model in the directory `of` into `folder`, each weight moved by a random share of at most `by`; returns `folder`."""
    policy = load_policy(of, device="cpu")
    generator = torch.Generator().manual_seed(7)
    for weight in distinct_tensors(policy.weights()).values():
        weight.mul_(1 + by * (2 * torch.rand(weight.shape, generator=generator) - 1))
    policy.save(folder)
    return folder
