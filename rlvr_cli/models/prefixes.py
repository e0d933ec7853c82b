"""Rows that begin alike go through a model's body once: padded rows -> their distinct prefixes -> hidden states.

In a causal model a token's hidden state is a function of the tokens up to it, and of nothing else. So the prompt that the
samples of a group share, the template that all prompts begin with, and whatever else two rows have in common from their first
token on, need be computed once; and padding not at all. Only attention itself, which looks back along a row, is computed row
by row. The gradient is the same: what comes back to a shared token is summed over the rows that share it.
"""

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_ATTENTION = "rlvr_prefixes"
_PROBE = (
    (3, 1, 4, 1, 5),
    (3, 1, 4, 2),
    (3, 1),
    (2, 3, 1, 4, 1),
)  # token ids: two share three, one is a prefix, one nothing


class Prefixes(NamedTuple):
    """The distinct prefixes of some rows, each by its last token; and where each place of the rows finds its own."""

    tokens: Tensor  # (prefixes,) ids
    positions: Tensor  # (prefixes,) in their rows
    places: Tensor  # (rows, width) -> prefix; beyond a row's length any
    spread: Tensor  # (rows x width,) the same, with the rows in the order in which neighbors share most
    origin: Tensor  # (prefixes,) -> the place in `spread` where it first occurs


def distinct_prefixes(ids: Tensor, lengths: Tensor) -> Prefixes:
    """The prefixes of ids[row, :length] of all rows.

    Args:
        ids: (rows, width).
        lengths: (rows,) at most `width`; what follows is padding.
    """
    device = ids.device
    ids, lengths = ids.cpu(), lengths.cpu()
    rows, width = ids.shape
    lines = [line[:length] for line, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
    order = torch.tensor(sorted(range(rows), key=lambda row: lines[row]))
    ids, inside = ids[order], torch.arange(width) < lengths[order, None]
    new = inside.clone()  # the first of its rows to have this prefix
    new[1:] &= ~((ids[1:] == ids[:-1]) & inside[:-1]).cumprod(dim=1).bool()
    number = torch.zeros(rows, width, dtype=torch.int64)
    number[new] = torch.arange(int(new.sum()))
    first = torch.where(new, torch.arange(rows)[:, None], 0).cummax(dim=0).values
    spread = number.gather(0, first)
    places = torch.empty_like(spread)
    places[order] = spread
    found = (
        ids[new],
        torch.arange(width).expand(rows, width)[new],
        places,
        spread.flatten(),
        new.flatten().nonzero()[:, 0],
    )
    return Prefixes(*(tensor.to(device) for tensor in found))


def hidden_states(model: PreTrainedModel, prefixes: Prefixes) -> Tensor:
    """The last hidden states of a model that `shares_prefixes`, (prefixes, hidden)."""
    with attention(model, _ATTENTION):
        out = model.base_model(
            input_ids=prefixes.tokens[None], position_ids=prefixes.positions[None], use_cache=False, prefixes=prefixes
        )
    return out.last_hidden_state[0]


def gather(states: Tensor, index: Tensor) -> Tensor:
    """states[index], (n, ...) and (m,) -> (m, ...), whose gradients are summed in float32 at least."""
    return _Gather.apply(states, index)  # type: ignore[return-value]  (apply has no types)


_shares: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def shares_prefixes(model: Any) -> bool:
    """Whether `hidden_states` are the model's own: it is asked, once, on a few tokens.

    Not so for a model with anything but ordinary causal attention, or whose code does not let its attention be replaced.
    """
    known = _shares.get(model)
    if known is None:
        known = isinstance(model, PreTrainedModel) and _is_ordinary(model) and _probe(model)
        _shares[model] = known
        if not known:
            warnings.warn(
                f"The attention of {type(model).__name__} is not ordinary causal attention that can be replaced, so padding, and "
                "prompts that rows share, go through it row by row: an update takes longer than for other models.",
                stacklevel=3,
            )
    return known


def _is_ordinary(model: PreTrainedModel) -> bool:
    """Whether the model declares full causal attention in all its layers, and takes positions."""
    if model.base_model is model or "position_ids" not in signature(model.base_model.forward).parameters:
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


@torch.no_grad()
def _probe(model: PreTrainedModel) -> bool:
    device = next(model.parameters()).device
    lengths = torch.tensor([len(line) for line in _PROBE])
    ids = torch.tensor([[*line, *[0] * (int(lengths.max()) - len(line))] for line in _PROBE], device=device)
    training = [module for module in model.modules() if module.training]
    model.eval()  # dropout would make any two passes differ
    try:
        with torch.autocast(device.type, enabled=False):
            plain = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            prefixes = distinct_prefixes(ids, lengths)
            ours = hidden_states(model, prefixes)[prefixes.places]
    except (TypeError, ValueError, NotImplementedError):  # it does not take `prefixes`, or `_attend` has refused
        return False
    finally:
        for module in training:
            module.training = True
    inside = torch.arange(ids.shape[1], device=device) < lengths.to(device)[:, None]
    bound = 1e-4 if plain.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((ours - plain)[inside].abs().max() <= bound * plain[inside].abs().max())


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model computes attention with what is registered under `name`; then as before.

    Whether it heeds that is for the caller to find out. (`set_attn_implementation` says so, but walks all modules.)
    """
    config: Any = model.config
    before, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    prefixes: Prefixes,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention along each row: (1, heads, prefixes, size) -> rows -> (1, prefixes, heads, size)."""
    unknown = {name for name, value in kwargs.items() if value is not None} - {"position_ids", "use_cache"}
    if unknown:  # a window, a cap, a sink
        raise NotImplementedError(f"attention with {', '.join(sorted(unknown))}")
    rows, width = prefixes.places.shape

    def as_rows(states: Tensor) -> Tensor:
        heads, size = states.shape[1], states.shape[3]
        return gather(states[0].transpose(0, 1), prefixes.spread).view(rows, width, heads, size).transpose(1, 2)

    out, _ = sdpa_attention_forward(
        module,
        as_rows(query),
        as_rows(key),
        as_rows(value),
        None,
        dropout=dropout,
        scaling=scaling,
        is_causal=width > 1,
    )  # (rows, width, heads, size)
    return out.flatten(0, 1).index_select(0, prefixes.origin)[None], None


AttentionInterface.register(_ATTENTION, _attend)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, index):
        ctx.save_for_backward(index)
        ctx.shape, ctx.dtype = states.shape, states.dtype
        return states.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]  (its base takes any number of gradients)
        (index,) = ctx.saved_tensors
        wide = torch.float64 if ctx.dtype == torch.float64 else torch.float32
        summed = torch.zeros(ctx.shape, dtype=wide, device=grad.device).index_add_(0, index, grad.to(wide))
        return summed.to(ctx.dtype), None
