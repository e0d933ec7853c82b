"""Logits in chunks of the vocabulary, over the temperature and in float32 at least: what log-probabilities and divergences share."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlvr_cli.models.compute.device import product

# The number of logits held at once: the fewest that keep the matrix products fast. On a CPU they then stay in its
# cache; on a GPU each operator still does enough work to be worth its launch.
_LOGITS_ON_CPU, _LOGITS_ON_CUDA = 2**20, 2**26
_MIN_CHUNK = 256  # vocabulary entries, however many positions there are
FLOOR = -1e30  # replaces a logit of -inf: its probability is 0 too, and 0 times it is 0, not NaN


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunk_size_for(hidden: Tensor) -> int:
    """Return how many vocabulary entries are computed at once, for (positions, hidden) states."""
    logits_at_once = _LOGITS_ON_CUDA if hidden.is_cuda else _LOGITS_ON_CPU
    return max(logits_at_once // max(len(hidden), 1), _MIN_CHUNK)


def chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def places(labels: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
    """Return whether each label is in the chunk, (positions,), and its index there, else any index, (positions, 1)."""
    place = labels - chunk.start
    width = chunk.stop - chunk.start
    return (place >= 0) & (place < width), place.clamp(0, width - 1)[:, None]


def scaled_logits(inputs: Tensor, weight: Tensor, bias: Tensor | None, chunk: slice, temperature: float) -> Tensor:
    """(positions, hidden) inputs, (chunk, hidden) weight -> (positions, chunk) scaled logits, float32 or float64."""
    logits = product(inputs, weight.T)
    if bias is not None:
        logits += bias[chunk]
    return logits if temperature == 1 else logits.div_(temperature)


class Statistics(NamedTuple):
    """What follows from the logits of a chunk, each (positions,)."""

    shift: Tensor  # what was subtracted from the logits, in place
    normalizer: Tensor  # the logarithm of the sum of their exponentials
    entropy: Tensor | None  # of the softmax over the chunk


def statistics(z: Tensor, *, with_entropy: bool) -> Statistics:
    """Return the statistics of logits, (positions, chunk), none of them infinite. In place, the maximum at each position is subtracted."""
    top = z.amax(dim=-1)
    z -= top[:, None]
    p = z.exp()  # the chunk's softmax times `total`, which is at least 1
    total = p.sum(dim=-1)
    log_total = total.log()
    return Statistics(top, top + log_total, log_total - p.mul_(z).sum(dim=-1) / total if with_entropy else None)


class Toward(NamedTuple):
    """The gradients of a loss toward what was computed from logits, each (positions,)."""

    labels: Tensor  # of the log-probabilities of labels, over the temperature
    entropies: tuple[Tensor, Tensor] | None  # the entropies, and minus the gradients of them, over the temperature


def logits_gradient(
    z: Tensor, normalizer: Tensor, toward: Toward, label: tuple[Tensor, Tensor], *, in_place: bool
) -> Tensor:
    """Return the gradient of a loss with respect to the logits of a chunk, (positions, chunk).

    Let l = z - normalizer be the log-probabilities, and p = exp(l): it is u (onehot - p) + g p (l + H), where u are the `labels` of
    `toward`, and H and g its `entropies`.

    Args:
        z: the logits.
        normalizer: (positions,), of all logits, less what was subtracted from `z`.
        label: the result of `places`.
        in_place: whether `z` may be written over.
    """
    z = z.sub_(normalizer[:, None]) if in_place else z - normalizer[:, None]
    inside, place = label
    if toward.entropies is None:
        grad = z.exp_().mul_(-toward.labels[:, None])
    else:
        entropy, g = toward.entropies
        grad = z.exp()
        z.clamp_(min=FLOOR).add_(entropy[:, None]).mul_(g[:, None])
        grad *= z.sub_(toward.labels[:, None])
    return grad.scatter_add_(-1, place, torch.where(inside, toward.labels, 0.0)[:, None])
