"""AdamW and the learning rate."""

import math

import torch
from transformers import PreTrainedModel

from rlvr_cli.config.shared import Schedule
from rlvr_cli.models.policy import Policy, as_policy


def make_optimizer(
    policy: Policy | PreTrainedModel,
    *,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
) -> torch.optim.AdamW:
    """AdamW over the parameters that want a gradient, in the parameters' own precision.

    Load the policy in float32: bfloat16 weights, of 8 bits, round most steps of a learning rate of 1e-6 to 1e-5 away.
    """
    parameters = list(as_policy(policy).trainable_parameters().values())
    fused = parameters[0].device.type in ("cuda", "cpu")
    return torch.optim.AdamW(parameters, lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=fused)


def learning_rate_at(
    step: int, *, peak: float, num_steps: int, warmup_steps: int = 0, schedule: Schedule = "constant"
) -> float:
    """The learning rate of update `step`, counted from 0.

    Linear over the first `warmup_steps` updates, which end at `peak`; then `peak` for good, or half a cosine
    down to 10 % of it at the last of the `num_steps` updates, and 10 % after that.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = min((step - warmup_steps) / max(num_steps - 1 - warmup_steps, 1), 1.0)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))
