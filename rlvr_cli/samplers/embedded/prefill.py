"""The keys and values of tokens that are known, computed in one pass for several rows of them.

Enters: prompts, or what follows the tokens of rows. Leaves: a `Prefix` of each prompt, or what `decode_step.DecodeStep` needs
for its passes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import DynamicCache

from rlvr_cli.models.compute.device import to_device, to_host
from rlvr_cli.models.policy import Policy

# Per layer: the keys and values of a prompt without its last token, (key-value heads, tokens, head size).
Prefix = list[tuple[torch.Tensor, torch.Tensor]]


def prefill(policy: Policy, prompts: Sequence[list[int]]) -> list[Prefix]:
    """Compute the keys and values of each prompt. They are padded on the right, so causal attention needs no mask."""
    length = max(map(len, prompts))
    cache = DynamicCache()  # without the config it keeps what lies before a sliding window, as the batch does
    padded = torch.tensor([[*prompt, *[0] * (length - len(prompt))] for prompt in prompts])
    policy.body(input_ids=to_device(padded, policy.device), past_key_values=cache, use_cache=True)
    layers = _layers(cache, policy.compute_dtype)
    return [
        [(keys[row, :, : len(prompt)], values[row, :, : len(prompt)]) for keys, values in layers]
        for row, prompt in enumerate(prompts)
    ]


class Packed(NamedTuple):
    """The tokens of several rows, side by side without padding, and how they lie in padded rows.

    Attributes:
        tokens, positions: (tokens,).
        places: (n, most), the token that is there; any one where a row has fewer.
        back: (tokens,), where each is among those of `places`.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    back: torch.Tensor

    def spread(self, states: torch.Tensor) -> torch.Tensor:
        """Put (tokens, heads, head size) into padded rows, (n, heads, most, head size)."""
        rows = states.index_select(0, self.places.flatten())
        return rows.view(*self.places.shape, *states.shape[1:]).transpose(1, 2)

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Take the tokens out of padded rows: (n, heads, most, head size) -> (tokens, heads x head size)."""
        return rows.transpose(1, 2).reshape(self.places.numel(), -1).index_select(0, self.back)


def packed(rows: Sequence[Sequence[int]], *, known: np.ndarray, device: torch.device) -> Packed:
    """Lay the tokens of rows side by side.

    Args:
        known: (n,), how many tokens precede those of each row.
    """
    of, nth = _numbered(rows)
    most = max(1, *map(len, rows))
    places = np.zeros((len(rows), most), dtype=np.int64)
    places[of, nth] = np.arange(len(of))
    tokens = np.array([token for row in rows for token in row], dtype=np.int64)
    arrays = (tokens, known[of] + nth, places, of * most + nth)
    return Packed(*(to_device(torch.from_numpy(array), device) for array in arrays))


def _numbered(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return of which row each token is, and its place in that row."""
    counts = np.array([*map(len, rows)])
    starts = counts.cumsum() - counts
    return np.repeat(np.arange(len(rows)), counts), np.arange(counts.sum()) - np.repeat(starts, counts)


class Extension(NamedTuple):
    """Tokens that follow those of rows of a cache, several to a row: where they go, and what they see.

    Attributes:
        new: the tokens.
        row, column: (tokens,), of the cache, where each goes.
        rows: (n,), of the cache: those that go on.
        seen: the columns that the tokens see or go to.
        mask: (n, 1, most, columns seen), added to attention scores.
        later: (n, columns seen), added to those of each row's later tokens.
    """

    new: Packed
    row: torch.Tensor
    column: torch.Tensor
    rows: torch.Tensor
    seen: slice
    mask: torch.Tensor
    later: torch.Tensor


def extension(
    news: Sequence[Sequence[int]],
    *,
    rows: np.ndarray,
    known: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    column: int,
    mask: torch.Tensor,
) -> Extension:
    """Place the tokens that follow those of rows: into the columns since a row ended and, if these are too few, those before its first.

    A key knows its position, so that columns need no order.

    Args:
        news: the tokens of each row.
        rows: of the cache.
        known: (n,), how many tokens each row has.
        start, end: (n,), the columns of its first token and behind its last one.
        column: behind those that it may take.
        mask: (rows of the cache, 1, 1, columns), what each of them sees.
    """
    of, nth = _numbered(news)
    counts, gap = np.array([*map(len, news)]), column - end
    most = max(1, counts.max())
    low = int((start - (counts - gap).clip(0)).min())
    columns = np.where(nth < gap[of], end[of] + nth, start[of] - 1 - (nth - gap[of]))

    def placed(array: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(array), mask.device)

    def added(hidden: np.ndarray) -> torch.Tensor:
        return mask.new_zeros(hidden.shape).masked_fill_(placed(hidden), -torch.inf)

    at = placed(rows)
    seen = to_host([mask[at, 0, 0, low:column] == 0])[0].numpy()
    since = np.where(seen & (np.arange(low, column) < end[:, None]), -1, most)  # the new token that sees a column first
    since[of, columns - low] = nth
    return Extension(
        new=packed(news, known=known, device=mask.device),
        row=placed(rows[of]),
        column=placed(columns),
        rows=at,
        seen=slice(low, column),
        mask=added(since[:, None, None] > np.arange(most)[:, None]),
        later=added(since == most),
    )


def _layers(cache: DynamicCache, dtype: torch.dtype) -> Prefix:
    """The keys and values of each layer, in the precision of a batch."""
    # Of a cache that has been used none is None, which its annotation allows.
    states: list[tuple[torch.Tensor, torch.Tensor]] = [(keys, values) for keys, values, *_ in cache]  # type: ignore
    return [(keys.to(dtype), values.to(dtype)) for keys, values in states]
