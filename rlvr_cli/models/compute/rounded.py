"""The weights of linear layers in the precision of matrix products, rounded once for several passes through a model.

Autocast rounds every weight in each pass, and turns each gradient back before it is added. Here the layers hold rounded copies
for a while, and the gradients of the copies are added to those of the weights, in the precision of the weights. Every number
is the same.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rlvr_cli.models.compute.onednn import LINEAR


@contextlib.contextmanager
def rounded_weights(model: nn.Module, dtype: torch.dtype, *, but: nn.Module | None = None) -> Iterator[None]:
    """Let the linear layers of a model hold copies of their weights in `dtype` within the block.

    Autocast must be on, for all that is not a linear layer. The model's first parameter keeps its precision, from which
    transformers takes that of the model.

    Args:
        but: a layer that keeps its weights.
    """
    first = next(model.parameters())
    layers = [module for module in model.modules() if type(module) in LINEAR and module is not but]
    places = [
        (layer._parameters, name, weight)
        for layer in layers
        for name, weight in layer._parameters.items()
        if weight is not None and weight is not first and weight.dtype != dtype
    ]
    try:
        for parameters, name, weight in places:
            parameters[name] = _rounded(weight, dtype)  # type: ignore[assignment]  (a Parameter, by its type)
        yield
    finally:
        for parameters, name, weight in places:
            parameters[name] = weight


def _rounded(weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Return a copy whose gradient goes to the weight's."""
    copy = weight.detach().to(dtype)
    if weight.requires_grad:

        def give(copy: Tensor) -> None:
            if copy.grad is not None:
                weight.grad = copy.grad.to(weight.dtype) if weight.grad is None else weight.grad.add_(copy.grad)
                copy.grad = None

        copy.requires_grad_().register_post_accumulate_grad_hook(give)
    return copy
