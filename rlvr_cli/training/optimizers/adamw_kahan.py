"""AdamW for bfloat16 weights that loses no small step: what rounding takes from a weight is kept and added next time."""

import math
from typing import Any

import torch
from torch import Tensor

from rlvr_cli.training.optimizers.optimizer_state import Slot, slot_like, step_slot
from rlvr_cli.training.optimizers.parameterwise import ParameterwiseAdamW

_CHUNK = 2**24  # parameters computed at once, in float32


class AdamWKahan(ParameterwiseAdamW):
    """AdamW (Loshchilov and Hutter, 2019) with Kahan summation (Zamirai et al., Revisiting BFloat16 Training, 2021).

    A bfloat16 weight has 8 significant bits, so that steps below 1/512 of it are rounded away. Here each weight has a
    `compensation`, the part of its steps so far that it could not hold, so that both together have 16 bits. The moments are
    in the weights' precision too: 8 bytes a parameter with the weight, where float32 takes 12. Nothing is drawn at
    random. For float32 weights it is AdamW up to rounding.

    The moments have no compensation, so that the second one comes to rest before it reaches the mean squared gradient, the earlier
    the nearer beta2 is to 1: with a gradient that stays 1, at 0.961 with beta2 = 0.95, and at 0.25 with 0.999. New runs refuse what
    changes a step by more than 5 % (`rounds_beta2_away`).
    """

    def layout(self, parameter: Tensor) -> dict[str, Slot]:
        """Return what is kept of a parameter."""
        kept = ("exp_avg", "exp_avg_sq", "compensation")
        return {"step": step_slot()} | dict.fromkeys(kept, slot_like(parameter))

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update({key: slot.zeros() for key, slot in self.layout(parameter).items()})
        state["step"] += 1
        steps, (beta1, beta2) = float(state["step"]), group["betas"]
        corrections = 1 - beta1**steps, math.sqrt(1 - beta2**steps)
        flat = [parameter.view(-1), gradient.reshape(-1)]
        flat += [state[name].view(-1) for name in ("exp_avg", "exp_avg_sq", "compensation")]
        for weight, grad, first, second, lost in zip(*(tensor.split(_CHUNK) for tensor in flat), strict=True):
            g, m, v, before = (tensor.to(torch.float32, copy=True) for tensor in (grad, first, second, weight))
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            first.copy_(m)
            second.copy_(v)
            step = m.div_(v.sqrt_().div_(corrections[1]).add_(group["eps"])).mul_(-group["lr"] / corrections[0])
            wanted = step.add_(before, alpha=-group["lr"] * group["weight_decay"]).add_(lost.float())
            weight.copy_(before + wanted)
            lost.copy_(wanted.sub_(weight.float() - before))
