"""AdamW and the learning rate."""

import math
from typing import Any

import torch
from transformers import PreTrainedModel

from rlvr_cli.config.shared.optimization import OptimizerKind, Schedule
from rlvr_cli.models.policy import Policy, as_policy
from rlvr_cli.training.optimizers.adamw_8bit import AdamW8bit
from rlvr_cli.training.optimizers.adamw_kahan import AdamWKahan
from rlvr_cli.training.optimizers.offload import OffloadedAdamW

RATE = "relative_learning_rate"  # of a group of parameters, to that of the update


def make_optimizer(
    policy: Policy | PreTrainedModel,
    *,
    learning_rate: float,
    critic_learning_rate: float | None = None,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    kind: OptimizerKind = "adamw",
    offload: bool = False,
) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; its state has the parameters' precision, unless it is offloaded or has 8 bits.

    With "adamw" load the policy in float32: bfloat16 has 8 significant bits, so most steps at a learning rate of 1e-6 to 1e-5
    would be rounded away.

    Args:
        critic_learning_rate: of the critic's parameters; None: that of the others. An update keeps the two in proportion.
        kind: "adamw"; "adamw_kahan", which loses no step of bfloat16 weights; "adamw_8bit", whose moments have 8 bits.
        offload: with "adamw": compute on the host, from float32 weights and moments there.
    """
    groups = as_policy(policy).parameter_groups()
    relative = (1.0, 1.0 if critic_learning_rate is None else critic_learning_rate / learning_rate)
    parameters: list[Any] = [
        {"params": group, RATE: rate} for group, rate in zip(groups, relative[: len(groups)], strict=True)
    ]
    if offload:
        assert kind == "adamw", f"{kind} is not offloaded"
        return OffloadedAdamW(parameters, lr=learning_rate, betas=betas, weight_decay=weight_decay)
    if kind != "adamw":
        ours = {"adamw_kahan": AdamWKahan, "adamw_8bit": AdamW8bit}[kind]
        return ours(parameters, lr=learning_rate, betas=betas, weight_decay=weight_decay)
    fused = groups[0][0].device.type in ("cuda", "cpu")
    return torch.optim.AdamW(parameters, lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=fused)


def learning_rate_at(
    step: int,
    *,
    peak: float,
    num_steps: int,
    warmup_steps: int = 0,
    schedule: Schedule = "constant",
    trained: int | None = None,
) -> float:
    """The learning rate of update `step`, counted from 0.

    Rises linearly over the first `warmup_steps` updates, up to `peak`. Then it stays at `peak` (schedule "constant"), or
    falls along half a cosine to 10 % of `peak` at the last of the `num_steps` updates, and stays there.

    Args:
        step: of `num_steps`, those that were planned and not made included.
        trained: updates made before it, which are what the warm-up counts; None: all that were planned.
    """
    warmed = step if trained is None else trained
    if warmed < warmup_steps:
        return peak * (warmed + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = min((step - warmup_steps) / max(num_steps - 1 - warmup_steps, 1), 1.0)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))
