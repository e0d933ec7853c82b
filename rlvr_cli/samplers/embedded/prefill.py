"""The keys and values of tokens that are known, computed in one pass for several rows of them.

Enters: prompts, or what follows the tokens of rows whose keys and values are there. Leaves: a `Prefix` of each prompt, or longer rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from rlvr_cli.models.compute.device import to_device
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


def extend(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    slots: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    rows: torch.Tensor,
    held: np.ndarray,
    column: int,
) -> None:
    """Compute the keys and values of tokens that follow those which are known, and move all of them to end before a column.

    Not for models with a sliding window, whose attention to several new tokens at once has no mask for it here.

    Args:
        prompts: all tokens of each row; the first ones are known.
        slots: per layer, the memory for keys and values, (rows, key-value heads, columns, head size).
        rows: of the slots.
        held: (rows, columns) bool, which columns of the slots hold the keys and values that are known, in their order.
        column: at least as many as the longest prompt has tokens.
    """
    known, lengths = held.sum(1), np.array([len(prompt) for prompt in prompts])
    news = [prompt[n:] for prompt, n in zip(prompts, known, strict=True)]  # padded on the right
    some = np.flatnonzero(held.any(0))
    after, low, high = max(1, *map(len, news)), int(some[0]), int(some[-1]) + 1
    held, width = held[:, low:high], high - low
    mask = np.full((len(news), 1, after, width + after), -np.inf, dtype=np.float32)
    mask[..., :width] = np.where(held, 0, -np.inf)[:, None, None]
    mask[..., width:] = np.triu(np.full((after, after), -np.inf), 1)
    # Which token the columns before `column` get, and where it is among the columns from `low` and the new ones behind them.
    token = np.arange(-lengths.max(), 0) + lengths[:, None]
    place_of_known = np.argsort(~held, axis=1, kind="stable")
    old = np.take_along_axis(place_of_known, token.clip(0, width - 1), axis=1)
    order = np.where(token < known[:, None], old, width + token - known[:, None])
    order, device = to_device(torch.from_numpy(order.clip(0)), policy.device), policy.device
    # Of padding they are not beyond those of the prompts, for which a model may have a table.
    positions = np.minimum(known[:, None] + np.arange(after), lengths[:, None] - 1)
    place = {"rows": rows, "known": slice(low, high), "order": order, "column": column}
    policy.body(
        input_ids=to_device(torch.tensor([[*new, *[0] * (after - len(new))] for new in news]), device),
        attention_mask=to_device(torch.from_numpy(mask).to(slots[0][0].dtype), device),
        position_ids=to_device(torch.from_numpy(positions), device),
        past_key_values=Cache(layers=[_LongerLayer(pair, **place) for pair in slots]),
        use_cache=True,
    )


class _LongerLayer(CacheLayerMixin):
    """One layer of rows that get several tokens at once: what is known of them, and behind it what is new.

    They are moved within their rows, so that they end before `column` without a gap.

    Args:
        rows: (rows,) of the slots.
        known: the columns that hold what is known of them.
        order: (rows, length) where the last `length` columns before `column` come from, among the known columns and the new ones.
        column: where the rows end.
    """

    is_sliding = False

    def __init__(
        self,
        slots: tuple[torch.Tensor, torch.Tensor],
        *,
        rows: torch.Tensor,
        known: slice,
        order: torch.Tensor,
        column: int,
    ) -> None:
        super().__init__()
        self._slots, self._rows, self._known, self._order = slots, rows, known, order
        self._to = slice(column - order.shape[1], column)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("slots are allocated before the first step")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        return self._longer(self._slots[0], key_states), self._longer(self._slots[1], value_states)

    def _longer(self, slots: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        both = torch.cat((slots[:, :, self._known].index_select(0, self._rows), new.to(slots.dtype)), dim=2)
        each = torch.arange(len(both), device=both.device)[:, None]
        slots[self._rows, :, self._to] = both.transpose(1, 2)[each, self._order].transpose(1, 2)
        return both

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._known.stop - self._known.start

    def get_max_length(self) -> int:
        return self._slots[0].shape[2]


def _layers(cache: DynamicCache, dtype: torch.dtype) -> Prefix:
    """The keys and values of each layer, in the precision of a batch."""
    # Of a cache that has been used none is None, which its annotation allows.
    states: list[tuple[torch.Tensor, torch.Tensor]] = [(keys, values) for keys, values, *_ in cache]  # type: ignore
    return [(keys.to(dtype), values.to(dtype)) for keys, values in states]
