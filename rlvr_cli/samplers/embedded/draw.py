"""One token per row from logits, as a pure function of (seed, position).

Enters: (rows, vocab) logits and one uniform number per row. Leaves: tokens, their log-probabilities, and the entropies.
An inverse CDF needs one random number per row, where `torch.multinomial` needs one per vocabulary entry, and there is
no generator state to save.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per (seed, position): the same pair gives the same number, always and everywhere.

    Output number `position` of a SplitMix64 generator (Steele, Lea and Flood, OOPSLA 2014,
    https://doi.org/10.1145/2714064.2660195) whose state starts at the mixed seed; the top 53 bits become the fraction.
    Mixing the seed first keeps seeds that differ by a multiple of the generator's increment from sharing numbers.

    Args:
        seeds: (rows,) integers in [0, 2**63).
        positions: (rows,) integers >= 0, the index of the token in its response.

    Returns:
        (rows,) float64.
    """
    increments = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(_mix(seeds.astype(np.uint64)) + increments) >> np.uint64(11)) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first index whose running sum exceeds `uniforms` x the row's total; never one whose weight is zero.

    Running sums are float64. A large vocabulary is searched in two steps, block and then place, which needs one fast pass over
    the weights in place of a running sum over all of them; the sum of each block of 512 is in the precision of the weights, so
    a draw within its rounding of a border between blocks may fall on the other side.

    Args:
        weights: (rows, vocab) >= 0, not all zero in any row; they need not sum to 1.
        uniforms: (rows,) float64 in [0, 1).

    Returns:
        (rows,) int64.
    """
    rows, vocab = weights.shape
    if vocab <= 2048:
        running = weights.cumsum(-1, dtype=torch.float64)
        return _first_above(running, uniforms * running[:, -1])
    size = 512
    blocks = F.pad(weights, (0, -vocab % size)).view(rows, -1, size)
    running = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = uniforms * running[:, -1]
    block = _first_above(running, target)
    before = F.pad(running, (1, 0)).gather(1, block[:, None])[:, 0]
    inside = blocks[torch.arange(rows, device=block.device), block].cumsum(-1, dtype=torch.float64)
    return (block * size + _first_above(inside, target - before)).clamp_(max=vocab - 1)


def _first_above(running: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first index whose running sum is above the target, (rows,).

    The target is kept below the last sum: rounding may not push it past the last weight that is not zero.
    """
    target = torch.minimum(target, torch.nextafter(running[:, -1], running.new_zeros(())))
    return torch.searchsorted(running, target[:, None], right=True)[:, 0].clamp_(max=running.shape[1] - 1)


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero all but the smallest set of most probable tokens that has at least `top_p` in total (Holtzman et al. 2020).

    Args:
        probabilities: (rows, vocab), each row sums to 1. Of equal ones the lower index is kept first.
    """
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = F.pad(ordered.cumsum(-1, dtype=torch.float64)[:, :-1], (1, 0))
    kept = torch.empty_like(before, dtype=torch.bool).scatter_(-1, order, before < top_p)
    return probabilities.masked_fill(~kept, 0.0)


class Draw(NamedTuple):
    """What was drawn for each row of a batch."""

    tokens: torch.Tensor  # (rows,) int64
    logprobs: torch.Tensor  # (rows,) nats, of the distribution that was drawn from
    entropy: torch.Tensor  # (rows,) nats


def draw_tokens(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    temperature: float,
    top_p: float,
    barred: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Draw:
    """Draw one token per row by inverse CDF on the processed distribution.

    Args:
        logits: (rows, vocab) float32; may be overwritten.
        uniforms: (rows,) float64 in [0, 1).
        temperature: divides the logits; 0 takes the most probable token instead, ignores `top_p`, and gives
            log-probabilities and entropy at temperature 1.
        top_p: see `nucleus`; 1 keeps all.
        barred: (indices of rows, ids): tokens that those rows must not draw.

    Returns:
        Log-probabilities are those of the distribution drawn from: at the temperature, without the barred tokens, cut
        to the nucleus. The entropy is the exact one of softmax(logits / temperature), before tokens are barred and the
        nucleus is cut, so that it equals the entropy that a forward pass over the same tokens gives.
    """
    if temperature > 0 and temperature != 1:
        logits.div_(temperature)
    logp = logits.log_softmax(-1).clamp_(min=torch.finfo(logits.dtype).min)  # 0 x log 0 must be 0, not NaN
    p = logp.exp()
    entropy = -torch.linalg.vecdot(p, logp)
    if barred is not None:
        logits[barred[0][:, None], barred[1]] = -torch.inf
        logp = logits.log_softmax(-1)
        p = logp.exp()
    if temperature == 0:
        tokens = logits.argmax(-1)
        return Draw(tokens, logp.gather(1, tokens[:, None])[:, 0], entropy)
    if top_p < 1:
        p = nucleus(p, top_p)
    tokens = inverse_cdf(p, uniforms)
    logprobs = logp.gather(1, tokens[:, None])[:, 0]
    if top_p < 1:
        logprobs = logprobs - p.sum(-1, dtype=torch.float64).log().float()
    return Draw(tokens, logprobs, entropy)
