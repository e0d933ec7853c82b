"""AdamW on the host: float32 weights and moments lie in the host's memory, and the device holds what a gradient needs."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rlvr_cli.training.optimizers.optimizer_state import Slot, slot_like, step_slot
from rlvr_cli.training.optimizers.parameterwise import ParameterwiseAdamW

_HOST = torch.device("cpu")


class OffloadedAdamW(ParameterwiseAdamW):
    """AdamW whose state is on the host, where it computes. To the device and back go weights and gradients.

    Of a bfloat16 parameter the host keeps the weight in float32 too, so that no step is rounded away: 12 bytes a
    parameter. A float32 parameter is its own: 8 bytes, and the result is that of AdamW on the host, bit for bit.
    """

    def layout(self, parameter: Tensor) -> dict[str, Slot]:
        """Return what is kept of a parameter, all on the host; `weight` only if its own precision is below float32."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        keys = ["exp_avg", "exp_avg_sq", *(["weight"] if parameter.dtype != wide else [])]
        return {"step": step_slot()} | dict.fromkeys(keys, slot_like(parameter, dtype=wide, device=_HOST))

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter: at any time one tensor is on its way, so that little memory is needed for that."""
        state = self.state[parameter]
        if not state:
            state.update({key: slot.zeros() for key, slot in self.layout(parameter).items()})
            if "weight" in state:
                state["weight"].copy_(parameter)
        weight = state["weight"] if "weight" in state else _on_host(parameter)
        adamw(
            [weight],
            [_on_host(gradient).to(weight.dtype)],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if weight is parameter:
            return
        rounded = _staged(parameter)
        rounded.copy_(weight)
        parameter.copy_(rounded, non_blocking=True)


def _on_host(tensor: Tensor) -> Tensor:
    """The tensor itself if it is on the host, else a copy."""
    return tensor if tensor.device == _HOST else _staged(tensor).copy_(tensor)


def _staged(tensor: Tensor) -> Tensor:
    """Memory on the host for a copy of a tensor, pinned for a CUDA device: it is copied faster, and torch keeps and reuses it.

    Only what is on its way is pinned: torch rounds the size of pinned memory up to a power of 2.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=_HOST, pin_memory=tensor.is_cuda)
