"""`logits.statistics` and `logits.logits_gradient` in one kernel each, by Triton, which comes with liger-kernel.

PyTorch computes each from several operators, which read and write the logits, the largest tensors of an update, again and again. The
kernels read them once, and write the gradient once, in the precision of the products that follow. Results differ by rounding.

The logits are float32, and none is infinite.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlvr_cli.models.compute.logits import Statistics, Toward

_COLUMNS = 2048  # that a program reads at a time


def statistics(z: Tensor, *, with_entropy: bool) -> Statistics:
    """Return the statistics of logits, (positions, chunk), from which nothing is subtracted."""
    rows, columns = z.shape
    normalizer, entropy = z.new_empty(2, rows)
    _statistics[(rows,)](z, normalizer, entropy, columns, BLOCK=_COLUMNS)  # type: ignore[arg-type]  (a constexpr)
    return Statistics(torch.zeros_like(normalizer), normalizer, entropy if with_entropy else None)


def logits_gradient(
    z: Tensor,
    normalizer: Tensor,
    toward: Toward,
    label: tuple[Tensor, Tensor],
    *,
    in_place: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient with respect to logits, see `logits.logits_gradient`.

    Args:
        in_place: without effect; `z` is never written over.
        dtype: of the result.
    """
    rows, columns = z.shape
    grad = torch.empty_like(z, dtype=dtype)
    entropy, g = toward.entropies or (normalizer, normalizer)
    place = torch.where(label[0], label[1][:, 0], -1)
    given = z, grad, normalizer, toward.labels.contiguous(), place, entropy, g.contiguous()
    _gradient[(rows, triton.cdiv(columns, _COLUMNS))](
        *given,
        columns,
        WITH_ENTROPY=toward.entropies is not None,  # type: ignore[arg-type]  (a constexpr)
        BLOCK=_COLUMNS,  # type: ignore[arg-type]  (a constexpr)
    )
    return grad


@triton.jit
def _statistics(z, normalizers, entropies, columns, BLOCK: tl.constexpr):
    """A program for each row. Of the columns so far: their maximum, the sum of exp(z - maximum), and that times z - maximum."""
    row = tl.program_id(0).to(tl.int64)
    top, total, weighted = -1e30, 0.0, 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(z + row * columns + column, mask=inside, other=-float("inf"))
        higher = tl.maximum(top, tl.max(x, 0))
        p, kept = tl.exp(x - higher), tl.exp(top - higher)
        weighted = kept * (weighted + (top - higher) * total) + tl.sum(p * tl.where(inside, x - higher, 0.0), 0)
        total = kept * total + tl.sum(p, 0)
        top = higher
    tl.store(normalizers + row, top + tl.log(total))
    tl.store(entropies + row, tl.log(total) - weighted / total)


@triton.jit
def _gradient(
    z, grad, normalizers, towards, places, entropies, gs, columns, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    """A program for each row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(z + row * columns + column, mask=inside, other=0.0) - tl.load(normalizers + row)
    toward = tl.load(towards + row)
    found = tl.exp(x)
    if WITH_ENTROPY:
        found *= (x + tl.load(entropies + row)) * tl.load(gs + row) - toward
    else:
        found *= -toward
    found = tl.where(column == tl.load(places + row), found + toward, found)
    tl.store(grad + row * columns + column, found.to(grad.dtype.element_ty), mask=inside)
