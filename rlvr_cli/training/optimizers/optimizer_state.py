"""What an optimizer keeps of a parameter: where it is, how it is saved, and how it gets back to its place.

Enters: an optimizer over parameters that have names. Leaves: its state as tensors called PARAMETER/KEY, or the optimizer
with such a state, bit for bit.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor


class Slot(NamedTuple):
    """A tensor of the state: its shape, precision, and device."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class HasLayout(Protocol):
    """Our own optimizers. Their state has other precisions than the parameters, so `load_state_dict` does not fit."""

    def layout(self, parameter: Tensor) -> dict[str, Slot]: ...


def slot_like(tensor: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Slot:
    """A slot of the tensor's shape and, where nothing else is given, of its precision and on its device."""
    return Slot(tensor.shape, dtype or tensor.dtype, device or tensor.device)


def step_slot(device: torch.device | None = None) -> Slot:
    """The slot of the number of steps, by default on the host."""
    return Slot(torch.Size(()), torch.float32, device or torch.device("cpu"))


def layout(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Slot]:
    """Return what the optimizer keeps of a parameter after its first step, by key."""
    if isinstance(optimizer, torch.optim.AdamW):  # fused: see `make_optimizer`
        own = slot_like(parameter)
        return {"step": step_slot(parameter.device), "exp_avg": own, "exp_avg_sq": own}
    return cast(HasLayout, optimizer).layout(parameter)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the state after the first step."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return sum(slot.nbytes for parameter in parameters for slot in layout(optimizer, parameter).values())


def load_state(optimizer: torch.optim.Optimizer, state: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Replace the state by this one, which has the keys, shapes and precisions of `layout`."""
    optimizer.state.clear()
    for parameter, tensors in state.items():
        slots = layout(optimizer, parameter)
        optimizer.state[parameter] = {key: tensor.to(slots[key].device) for key, tensor in tensors.items()}


@torch.no_grad()
def move_state(optimizer: torch.optim.Optimizer, *, to_host: bool) -> None:
    """Move the optimizer's state to the host's memory, or back to its own devices; values stay the same."""
    for parameter, state in optimizer.state.items():
        slots = layout(optimizer, parameter)
        for name, tensor in state.items():
            if tensor.dim() == 0:  # the number of steps
                continue
            if not to_host:
                state[name] = tensor.to(slots[name].device, non_blocking=True)
            elif tensor.device.type != "cpu":  # pinned memory is copied faster
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                state[name] = pinned.copy_(tensor, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
