"""Attention of this engine's steps, and of prefills where the model's own code runs both.

Enters: queries, and the keys and values of the cache. Leaves: what each query attends to.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlvr_cli.models.compute.device import as_operand
from rlvr_cli.models.compute.prefixes import causal_attention

ATTENTION = "rlvr_decode"  # the attention function that a model must use while it runs the steps of a batch

Blocks = Sequence[tuple[slice, slice]]  # (rows, columns) that are read; the mask hides all others


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    scaling: float,
    blocks: Blocks = (),
) -> torch.Tensor:
    """Compute the attention of one new token per row.

    The query heads that share a key-value head become several queries to it. This gives the same numbers as repeating
    keys and values for each query head, without the copies.

    Args:
        query: (rows, heads, head size).
        keys, values: (rows, key-value heads, columns, head size).
        mask: (rows, 1, 1, columns), added to the scores.
        blocks: on a CPU, all that is read, see `Window.places`.

    Returns:
        (rows, heads x head size).
    """
    rows, heads, size = query.shape
    kv_heads = keys.shape[1]
    if query.device.type == "cpu" and (blocks or query.dtype != torch.float64):
        # So few queries do not fill the fused kernel's blocks. In half precision, only the operands are rounded.
        queries = (as_operand(query, keys.dtype) * scaling).reshape(rows * kv_heads, heads // kv_heads, size)
        out = attention(queries, keys.flatten(0, 1), values.flatten(0, 1), mask[:, 0], blocks)
        return out.view(rows, heads * size).to(query.dtype)
    assert not blocks, "only a CPU reads blocks"
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, size)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(rows, heads * size)


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: Blocks = (),
    *,
    log_sum: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention on a CPU.

    Args:
        queries: (n, queries, head size), as operands, scaled.
        keys, values: (n, columns, head size).
        mask: (m, 1, columns), added to the scores, where n is a multiple of m; None: nothing is.
        blocks: they have all rows; empty: all columns of all rows are read.
        log_sum: (n, queries), which gets the logarithms of the sums of exponentiated scores; None: nobody wants them.

    Returns:
        (n, queries, head size).
    """
    out, every = torch.empty_like(queries), slice(0, len(queries))
    heads = 1 if mask is None else len(queries) // len(mask)  # rows of queries with the same row of the mask
    with torch.autocast("cpu", enabled=False):
        for rows, columns in blocks or [(every, slice(None))]:
            scores = torch.bmm(queries[rows], as_operand(keys[rows, columns], keys.dtype).transpose(1, 2))
            if mask is not None:
                hidden = mask[rows.start // heads : rows.stop // heads, :, columns]
                scores.view(len(hidden), -1, hidden.shape[-1]).add_(hidden)
            weights = scores.softmax(-1)
            torch.bmm(weights, as_operand(values[rows, columns], values.dtype), out=out[rows])
            if log_sum is not None:
                torch.sub(scores.amax(-1), weights.amax(-1).log(), out=log_sum[rows])
    return out


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for a prefill (causal, no mask) and for a step (one query per row, additive mask).

    A token sees the last `sliding_window` ones, itself included. A row's tokens lie side by side, so that these are the
    last columns in a step.
    """
    if s_aux is not None:
        raise NotImplementedError("attention sinks")  # the engine refuses the model
    rows, heads, length, size = query.shape
    scale: float = scaling or size**-0.5
    if attention_mask is not None and sliding_window is not None:
        key, value = key[:, :, -sliding_window:], value[:, :, -sliding_window:]
        attention_mask = attention_mask[..., -sliding_window:]
    elif attention_mask is None and (softcap is not None or (sliding_window or length) < length):
        attention_mask = query.new_full((length, length), -torch.inf).triu(1)
        attention_mask += torch.full_like(attention_mask, -torch.inf).tril(-(sliding_window or length))
    if softcap is not None:
        assert attention_mask is not None
        return _capped(query, key, value, attention_mask, scaling=scale, softcap=softcap), None
    if attention_mask is None:
        return causal_attention(module, query, key, value, scaling=scale, **kwargs), None
    if length > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scale, **kwargs)
    out = attend(query[:, :, 0], key, value, attention_mask, scaling=scale)
    return out.view(rows, 1, heads, size), None


def _capped(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, scaling: float, softcap: float
) -> torch.Tensor:
    """Attention whose scores are softly capped, (rows, queries, heads, size)."""
    keys, values = (states.repeat_interleave(query.shape[1] // states.shape[1], dim=1) for states in (keys, values))
    scores = torch.tanh(query @ keys.transpose(2, 3) * (scaling / softcap)) * softcap + mask
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ values).transpose(1, 2)


AttentionInterface.register(ATTENTION, _attend)
