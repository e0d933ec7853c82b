"""Logits in chunks of the vocabulary, over the temperature and in float32 at least: what log-probabilities and divergences share."""

from collections.abc import Iterator

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
