"""AdamW whose moments take 8 bits each, by the kernels of bitsandbytes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rlvr_cli.models.compute.bitsandbytes import import_bitsandbytes
from rlvr_cli.training.optimizers.optimizer_state import Slot, slot_like, step_slot
from rlvr_cli.training.optimizers.parameterwise import ParameterwiseAdamW

_BLOCK = 256  # moments with one scale
_CHUNK = 2**24  # bfloat16 parameters computed at once, in float32; a multiple of _BLOCK
SMALLEST = 4096  # parameters of a tensor whose moments have 8 bits; those of smaller tensors have 32


class AdamW8bit(ParameterwiseAdamW):
    """AdamW with 8-bit moments (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022).

    Each block of 256 moments has a scale, and each moment is one of 256 shares of it: 2 bytes a parameter instead of 8. For
    float32 weights this is `bitsandbytes.optim.AdamW8bit`. A bfloat16 weight also has a `compensation`, as in
    `adamw_kahan`: what rounding takes from the weight is added to its next step, so that no small step is lost.

    Raises:
        RlvrError: bitsandbytes is not installed.
    """

    def __init__(self, parameters: Iterable[Tensor], **options: Any) -> None:
        self._kernels = import_bitsandbytes().functional
        self._shares: dict[torch.device, tuple[Tensor, Tensor]] = {}  # what 8 bits stand for, of either moment
        super().__init__(parameters, **options)

    def layout(self, parameter: Tensor) -> dict[str, Slot]:
        """Return what is kept of a parameter: the scales (`*_scale`) only if its moments have 8 bits."""
        count, wide = parameter.numel(), parameter.dtype == torch.float32
        scale = Slot(torch.Size([-(-count // _BLOCK)]), torch.float32, parameter.device)
        small = count < SMALLEST
        moment = slot_like(parameter, dtype=torch.float32 if small else torch.uint8)
        kept = {"step": step_slot(), "exp_avg": moment, "exp_avg_sq": moment}
        scales = {} if small else {"exp_avg_scale": scale, "exp_avg_sq_scale": scale}
        return kept | scales | ({} if wide else {"compensation": slot_like(parameter)})

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update({key: slot.zeros() for key, slot in self.layout(parameter).items()})
        state["step"] += 1
        keys = [key for key in state if key not in ("step", "compensation")]
        if "compensation" not in state:
            self._launch(parameter, gradient.contiguous(), {key: state[key] for key in keys}, state["step"], group)
            return
        sizes = {key: _CHUNK // _BLOCK if key.endswith("_scale") else _CHUNK for key in keys}
        moments = zip(*(state[key].view(-1).split(size) for key, size in sizes.items()), strict=True)
        flat = [parameter.view(-1), gradient.reshape(-1), state["compensation"].view(-1)]
        for (weight, grad, lost), chunk in zip(
            zip(*(t.split(_CHUNK) for t in flat), strict=True), moments, strict=True
        ):
            wide = weight.float().add_(lost)
            self._launch(wide, grad.float(), dict(zip(keys, chunk, strict=True)), state["step"], group)
            weight.copy_(wide)
            lost.copy_(wide.sub_(weight))

    def _launch(
        self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor], step: Tensor, group: dict[str, Any]
    ) -> None:
        """Update a float32 weight and its moments in place."""
        beta1, beta2 = group["betas"]
        first, second = moments["exp_avg"], moments["exp_avg_sq"]
        common = {"eps": group["eps"], "step": int(step), "lr": group["lr"], "weight_decay": group["weight_decay"]}
        if first.dtype == torch.float32:
            self._kernels.optimizer_update_32bit(
                "adam", gradient, weight, first, beta1=beta1, state2=second, beta2=beta2, **common
            )
            return
        shares = self._shares_on(weight.device)
        self._kernels.optimizer_update_8bit_blockwise(
            "adam", gradient, weight, first, second, beta1=beta1, beta2=beta2, beta3=0.0, alpha=0.0, qmap1=shares[0],
            qmap2=shares[1], absmax1=moments["exp_avg_scale"], absmax2=moments["exp_avg_sq_scale"], **common,
        )  # fmt: skip

    def _shares_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._shares:
            first, second = (self._kernels.create_dynamic_map(signed=signed).to(device) for signed in (True, False))
            self._shares[device] = first, second
        return self._shares[device]
