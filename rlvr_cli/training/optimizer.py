"""AdamW and the learning rate."""

import math

import torch
from transformers import PreTrainedModel

from rlvr_cli.config.shared import OptimizerKind, Schedule
from rlvr_cli.models.policy import Policy, as_policy
from rlvr_cli.training.adamw_kahan import AdamWKahan


def make_optimizer(
    policy: Policy | PreTrainedModel,
    *,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    kind: OptimizerKind = "adamw",
) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; its state has the parameters' precision.

    With "adamw" load the policy in float32: bfloat16 has 8 significant bits, so most steps at a learning rate of 1e-6 to 1e-5
    would be rounded away.

    Args:
        kind: "adamw", or "adamw_kahan", which loses no step of bfloat16 weights.
    """
    parameters = list(as_policy(policy).trainable_parameters().values())
    if kind == "adamw_kahan":
        return AdamWKahan(parameters, lr=learning_rate, betas=betas, weight_decay=weight_decay)
    fused = parameters[0].device.type in ("cuda", "cpu")
    return torch.optim.AdamW(parameters, lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=fused)


@torch.no_grad()
def move_state(optimizer: torch.optim.Optimizer, *, to_host: bool) -> None:
    """Move the optimizer's state to the host's memory, or back to the devices of its parameters; values stay the same."""
    for parameter, state in optimizer.state.items():
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:  # the number of steps
                continue
            if not to_host:
                state[name] = tensor.to(parameter.device, non_blocking=True)
            elif tensor.device.type != "cpu":  # pinned memory is copied faster
                state[name] = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def learning_rate_at(
    step: int, *, peak: float, num_steps: int, warmup_steps: int = 0, schedule: Schedule = "constant"
) -> float:
    """The learning rate of update `step`, counted from 0.

    Rises linearly over the first `warmup_steps` updates, up to `peak`. Then it stays at `peak` (schedule "constant"), or
    falls along half a cosine to 10 % of `peak` at the last of the `num_steps` updates, and stays there.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = min((step - warmup_steps) / max(num_steps - 1 - warmup_steps, 1), 1.0)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))
