"""What our own AdamWs have in common: they update one parameter after another, and say what they keep of it."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rlvr_cli.training.optimizers.optimizer_state import Slot


class ParameterwiseAdamW(torch.optim.Optimizer):
    """AdamW, parameter by parameter.

    Args:
        parameters: of any floating dtype, unless a class says otherwise.
        lr: the learning rate.
        betas: the decay of both moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @abstractmethod
    def layout(self, parameter: Tensor) -> dict[str, Slot]:
        """Return what is kept of a parameter."""

    @abstractmethod
    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter in place, with the options of its group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  (torch's may return a loss)
        """Update every parameter that has a gradient. A closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
