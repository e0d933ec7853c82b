"""The attention of a model that runs this engine's prefills and steps with its own code.

Enters: queries, and the keys and values of the cache. Leaves: what each query attends to.
"""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlvr_cli.models.compute.prefixes import causal_attention
from rlvr_cli.samplers.embedded.decode_step import attend

ATTENTION = "rlvr_decode"  # the attention function that a model must use while it runs the steps of a batch


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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for a prefill (causal, no mask) and for a step (one query per row, additive mask).

    A token sees the last `sliding_window` ones, itself included. A row's tokens lie side by side, so that these are the
    last columns in a step.
    """
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
