"""The weights of linear layers in the precision of matrix products, rounded once for several passes through a model.

Autocast rounds every weight in each pass, and turns each gradient back before it is added. Here the layers hold rounded copies
for a while, and the gradients of the copies are added to those of the weights, in the precision of the weights. Every number
is the same. With `unrounded_gradients`, the product that is a weight's gradient is added to the gradient that is there as it is
computed: it is never rounded, and no other tensor of its size is read or written.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rlvr_cli.models.compute.device import add_product, as_operand, product
from rlvr_cli.models.compute.onednn import LINEAR


@contextlib.contextmanager
def rounded_weights(
    model: nn.Module, dtype: torch.dtype, *, but: nn.Module | None = None, unrounded_gradients: bool = False
) -> Iterator[None]:
    """Let the linear layers of a model hold copies of their weights in `dtype` within the block.

    Autocast must be on, for all that is not a linear layer. The model's first parameter keeps its precision, from which
    transformers takes that of the model.

    Args:
        but: a layer that keeps its weights.
        unrounded_gradients: whether the gradients of weights, but not of biases, are added without having been rounded.
    """
    first = next(model.parameters())
    layers = [module for module in model.modules() if type(module) in LINEAR and module is not but]
    places = [
        (layer, name, weight)
        for layer in layers
        for name, weight in layer._parameters.items()
        if weight is not None and weight is not first and weight.dtype != dtype
    ]
    summed = [(layer, w) for layer, name, w in places if unrounded_gradients and name == "weight" and w.requires_grad]
    try:
        for layer, name, weight in places:
            layer._parameters[name] = _rounded(weight, dtype)  # type: ignore[assignment]  (a Parameter, by its type)
        for layer, weight in summed:
            vars(layer)["forward"] = partial(_linear, layer, weight)
        yield
    finally:
        for layer, name, weight in places:
            layer._parameters[name] = weight
        for layer, _ in summed:
            vars(layer).pop("forward", None)


def _linear(layer: Any, weight: nn.Parameter, x: Tensor) -> Tensor:
    return _UnroundedGradient.apply(x, layer.weight, layer.bias, weight)  # type: ignore[return-value]  (apply has no types)


class _UnroundedGradient(torch.autograd.Function):
    """A linear layer with a rounded weight, whose gradient is added to that of the weight itself."""

    @staticmethod
    def forward(ctx, x, rounded, bias, weight):
        ctx.save_for_backward(x, rounded)
        ctx.weight = weight
        return F.linear(x.to(rounded.dtype), rounded, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[override]  (its base takes any number of gradients)
        x, rounded = ctx.saved_tensors
        of_x, _, of_bias, _ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        a, b = as_operand(rows, rounded.dtype).T, as_operand(x.reshape(-1, x.shape[-1]), rounded.dtype)
        with torch.autocast(x.device.type, enabled=False):
            if ctx.weight.grad is None:
                ctx.weight.grad = product(a, b)
            else:
                add_product(ctx.weight.grad, a, b)
        return (grad @ rounded).to(x.dtype) if of_x else None, None, rows.sum(0) if of_bias else None, None


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
