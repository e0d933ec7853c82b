"""Products of matrices on a CPU by oneDNN. PyTorch has it, but uses it for lower precisions than float32 only.

PyTorch multiplies float32 matrices by MKL, which uses half as wide instructions on processors that are not Intel's. With AVX-512
oneDNN takes less than half of the time there. Results differ by rounding, as between any two machines.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_LEAST_ROWS, _LEAST_WEIGHTS = (
    16,
    2**17,
)  # for smaller products the call, and the kernel made for each new shape, cost more
_ROWS_TOGETHER = 32


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of matrices, without gradients."""
    return _multiplied(a, b.T, None) if _is_faster(a, b) else a @ b


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `out`; by other means than oneDNN, without another tensor of its size."""
    if _is_faster(a, b):
        out += _multiplied(a, b.T, None)
    else:
        out.addmm_(a, b)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `torch.nn.functional.linear` does."""
    if not _is_faster(x, weight) or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _Linear.apply(x, weight, bias)  # type: ignore[return-value]  (apply has no types)
    return _multiplied(x, weight, bias)


class Linear(nn.Linear):
    """A linear layer that computes by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def rows_multiple(dtype: torch.dtype, device: torch.device) -> int:
    """Return of which number the rows of products in `dtype` should be a multiple, where they can be chosen.

    oneDNN compiles kernels for each number of rows that it has not seen. In half precision that is all of PyTorch's
    products on a CPU, and for small models it costs as much as the products save.
    """
    return _ROWS_TOGETHER if device.type == "cpu" and dtype.itemsize < 4 else 1


LINEAR = (nn.Linear, Linear)  # the types of layers that compute a linear map of their input, and nothing else


def use_onednn(model: nn.Module, *, but: nn.Module | None = None) -> None:
    """Let a model's linear layers compute by `linear` from now on, if it is on a CPU where that is faster.

    Args:
        but: a layer that stays as it is.
    """
    if next(model.parameters()).device.type == "cpu" and _has_wide_kernels():
        for module in model.modules():
            if type(module) is nn.Linear and module is not but and module.weight.numel() >= _LEAST_WEIGHTS:
                module.__class__ = Linear


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return _multiplied(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[override]  (its base takes any number of gradients)
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            _multiplied(grad, weight.T, None) if of_x else None,
            _multiplied(rows.T, x.reshape(-1, x.shape[-1]).T, None) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _multiplied(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias, (..., in) and (out, in) -> (..., out), of any strides."""
    operator: Any = torch.ops.mkldnn._linear_pointwise
    return operator(x, weight, bias, "none", [], "")


def _is_faster(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN computes x @ weight, or its transpose, in less time: float32, large enough, on such a CPU."""
    if weight.numel() < _LEAST_WEIGHTS or x.numel() < _LEAST_ROWS * x.shape[-1]:
        return False
    plain = (Tensor, nn.Parameter)  # not those of emulated devices, and not shards
    if type(x) not in plain or type(weight) not in plain:
        return False
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and _has_wide_kernels()
    )


@cache
def _has_wide_kernels() -> bool:
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
