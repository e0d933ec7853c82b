"""Run a prefix that several rows share through the model only once: padded rows -> distinct prefixes -> hidden states.

In a causal model, a token's hidden state depends only on the tokens up to and including it. A common prefix of several
rows (the prompt of a group, the template that all prompts begin with) therefore needs to be computed only once, and
padding not at all. Only attention, which looks back along a row, is computed row by row. Gradients are unchanged: the
gradient of a shared token is the sum over the rows that share it.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlvr_cli.models.compute.device import as_operand, operand_dtype, to_device
from rlvr_cli.models.tokens.tokenization import row_lengths

_ATTENTION = "rlvr_prefixes"
_PROBE = (
    (3, 1, 4, 1, 5),
    (3, 1, 4, 2),
    (3, 1),
    (2, 3, 1, 4, 1),
)  # token ids: two rows share three tokens, one row is a prefix of both, one shares nothing


class Prefixes(NamedTuple):
    """The distinct prefixes of a batch of rows, each given by its last token, and which one ends at each place."""

    tokens: Tensor  # (prefixes,) id of the last token
    positions: Tensor  # (prefixes,) position of that token in its row
    places: Tensor  # (rows, width) -> index of the prefix that ends there; arbitrary in the padding
    spread: Tensor  # (rows x width,) the same indices, with the rows sorted so that neighbors share the most
    origin: Tensor  # (prefixes,) -> index into `spread` where the prefix first occurs
    starts: Tensor | None = None  # (rows + 1,) int32, where rows begin in `spread`, which then has no padding: "packed"

    def to(self, device: torch.device) -> "Prefixes":
        """Copy them to a device, for which the host does not wait."""
        there = {name: to_device(tensor, device) for name, tensor in self._asdict().items() if tensor is not None}
        return self._replace(**there)


class Wanted(NamedTuple):
    """The positions of a batch whose hidden states are wanted, and what the body computes for them."""

    positions: Tensor  # (positions,) index into rows x width, ascending
    ends: Tensor  # (positions,) index into what the body computes: the prefixes or, without them, rows x width
    prefixes: Prefixes | None  # None: the body computes every row in full

    def to(self, device: torch.device) -> "Wanted":
        """Copy it to a device, for which the host does not wait."""
        prefixes = self.prefixes and self.prefixes.to(device)
        return Wanted(to_device(self.positions, device), to_device(self.ends, device), prefixes)


def wanted_positions(ids: Tensor, mask: Tensor, *, shared: bool, packed: bool = False, multiple: int = 1) -> Wanted:
    """Find what the hidden states at the positions in `mask` need, on the CPU.

    Args:
        ids: (rows, width), padded on the right.
        mask: (rows, width).
        shared: whether the model `shares_prefixes`.
        packed: whether it `packs_rows` too.
        multiple: see `distinct_prefixes`.
    """
    ids, mask = ids.cpu(), mask.cpu()
    positions = mask.flatten().nonzero()[:, 0]
    if not shared:
        return Wanted(positions, positions, None)
    lengths = row_lengths(mask)
    lengths[:1].clamp_(min=1)  # a model needs at least one token
    prefixes = distinct_prefixes(ids, lengths, packed=packed, multiple=multiple)
    return Wanted(positions, prefixes.places.flatten()[positions], prefixes)


def distinct_prefixes(ids: Tensor, lengths: Tensor, *, packed: bool = False, multiple: int = 1) -> Prefixes:
    """Find the distinct prefixes of all rows ids[row, :lengths[row]].

    Args:
        ids: (rows, width).
        lengths: (rows,), each at most `width`; the columns after it are padding.
        packed: whether attention is computed for rows without their padding.
        multiple: of this the number of prefixes is one: others, where no row ends, are added to them.
    """
    device = ids.device
    ids, lengths = ids.cpu(), lengths.cpu()
    rows, width = ids.shape
    lines = [line[:length] for line, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
    order = torch.tensor(sorted(range(rows), key=lambda row: lines[row]))
    ids, inside = ids[order], torch.arange(width) < lengths[order, None]
    new = inside.clone()  # whether no earlier row has this prefix
    new[1:] &= ~((ids[1:] == ids[:-1]) & inside[:-1]).cumprod(dim=1).bool()
    number = torch.zeros(rows, width, dtype=torch.int64)
    number[new] = torch.arange(int(new.sum()))
    first = torch.where(new, torch.arange(rows)[:, None], 0).cummax(dim=0).values
    spread = number.gather(0, first)
    places = torch.empty_like(spread)
    places[order] = spread
    where, starts = torch.arange(rows * width).view(rows, width), None
    if packed:
        where = inside.flatten().cumsum(0).view(rows, width) - 1
        starts = F.pad(inside.sum(1).cumsum(0), (1, 0)).int()
    more = (0, -int(new.sum()) % multiple)
    found = Prefixes(
        tokens=F.pad(ids[new], more),
        positions=F.pad(torch.arange(width).expand(rows, width)[new], more),
        places=places,
        spread=spread[inside] if packed else spread.flatten(),
        origin=F.pad(where[new], more),
        starts=starts,
    )
    return found.to(device)


def hidden_states(model: PreTrainedModel, prefixes: Prefixes) -> Tensor:
    """Return the last hidden states of all prefixes, (prefixes, hidden); the model must pass `shares_prefixes`."""
    with attention_function(model, _ATTENTION):
        out = model.base_model(
            input_ids=prefixes.tokens[None], position_ids=prefixes.positions[None], use_cache=False, prefixes=prefixes
        )
    return out.last_hidden_state[0]


def gather(states: Tensor, index: Tensor) -> Tensor:
    """Return states[index], (n, ...) and (m,) -> (m, ...); its gradients are summed in float32 or wider."""
    return _Gather.apply(states, index)  # type: ignore[return-value]  (apply has no types)


_shares: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
_packs: weakref.WeakKeyDictionary[torch.nn.Module, dict[torch.dtype, bool]] = weakref.WeakKeyDictionary()


def shares_prefixes(model: Any) -> bool:
    """Return whether `hidden_states` equals the model's own output; tested once per model, on a few tokens.

    False for a model without ordinary causal attention in all layers, or whose code does not let its attention be
    replaced.
    """
    known = _shares.get(model)
    if known is None:
        known = isinstance(model, PreTrainedModel) and _is_ordinary(model) and _probe(model)
        _shares[model] = known
        if not known:
            warnings.warn(
                f"The attention of {type(model).__name__} is not ordinary causal attention that can be replaced, so "
                "padding and shared prompts are computed for every row: an update takes longer than for other models.",
                stacklevel=3,
            )
    return known


def packs_rows(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Return whether attention in `dtype` may leave out the padding of rows; tested once, on a few tokens.

    It needs flash-attn, a CUDA device that flash-attn supports, and half precision.

    Args:
        model: one that `shares_prefixes`.
    """
    device = next(model.parameters()).device
    if device.type != "cuda" or dtype.itemsize > 2 or find_spec("flash_attn") is None:
        return False
    known = _packs.setdefault(model, {})
    if dtype not in known:
        problem = ""
        try:
            with torch.autocast(device.type, dtype):
                if not _agree(model, _by_prefixes, partial(_by_prefixes, packed=True)):
                    problem = "its numbers differ from those of PyTorch's attention"
        except (ImportError, RuntimeError) as error:
            problem = str(error).strip().partition("\n")[0]
        if problem:
            warnings.warn(f"flash-attn is not used for updates: {problem.rstrip('.')}.", stacklevel=3)
        known[dtype] = not problem
    return known[dtype]


def _is_ordinary(model: PreTrainedModel) -> bool:
    """Return whether the model declares full causal attention in all its layers and accepts `position_ids`."""
    if model.base_model is model or "position_ids" not in signature(model.base_model.forward).parameters:
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


@torch.no_grad()
def _probe(model: PreTrainedModel) -> bool:
    with torch.autocast(next(model.parameters()).device.type, enabled=False):
        try:
            return _agree(model, _plain, _by_prefixes)
        except (TypeError, ValueError, NotImplementedError):  # the model rejects `prefixes`, or `_attend` its arguments
            return False


def _plain(model: PreTrainedModel, ids: Tensor, lengths: Tensor) -> Tensor:
    """Return the hidden states of padded rows, (rows, width, hidden)."""
    return model.base_model(input_ids=ids, use_cache=False).last_hidden_state


def _by_prefixes(model: PreTrainedModel, ids: Tensor, lengths: Tensor, *, packed: bool = False) -> Tensor:
    prefixes = distinct_prefixes(ids, lengths, packed=packed)
    return hidden_states(model, prefixes)[prefixes.places]


@torch.no_grad()
def _agree(model: PreTrainedModel, *ways: Callable[[PreTrainedModel, Tensor, Tensor], Tensor]) -> bool:
    """Return whether two ways to compute the hidden states of `_PROBE` give the same numbers."""
    device = next(model.parameters()).device
    lengths = torch.tensor([len(line) for line in _PROBE])
    ids = torch.tensor([[*line, *[0] * (int(lengths.max()) - len(line))] for line in _PROBE], device=device)
    training = [module for module in model.modules() if module.training]
    model.eval()  # dropout would make any two passes differ
    try:
        plain, ours = (way(model, ids, lengths) for way in ways)
    finally:
        for module in training:
            module.training = True
    inside = torch.arange(ids.shape[1], device=device) < lengths.to(device)[:, None]
    bound = 1e-4 if operand_dtype(plain).itemsize > 2 else 5e-2
    return bool((ours - plain)[inside].abs().max() <= bound * plain[inside].abs().max())


@contextmanager
def attention_function(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Make the model use the attention function registered under `name`; restore the previous one on exit.

    Some models ignore the setting, so the caller must test its effect. (`set_attn_implementation` reports it, but walks
    all modules.)
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
    if unknown:  # such as a sliding window, a soft cap, attention sinks
        raise NotImplementedError(f"attention with {', '.join(sorted(unknown))}")
    rows, width = prefixes.places.shape
    if prefixes.starts is not None:
        packed = [gather(states[0].transpose(0, 1), prefixes.spread) for states in (query, key, value)]
        out = _packed_attention(packed, prefixes.starts, longest=width, dropout=dropout, scaling=scaling)
        return out.index_select(0, prefixes.origin)[None], None

    def as_rows(states: Tensor) -> Tensor:
        heads, size = states.shape[1], states.shape[3]
        return gather(states[0].transpose(0, 1), prefixes.spread).view(rows, width, heads, size).transpose(1, 2)

    out = causal_attention(
        module,
        as_rows(query),
        as_rows(key),
        as_rows(value),
        dropout=dropout,
        scaling=scaling,
        is_causal=width > 1,
    )
    return out.flatten(0, 1).index_select(0, prefixes.origin)[None], None


AttentionInterface.register(_ATTENTION, _attend)


def _packed_attention(
    states: Sequence[Tensor], starts: Tensor, *, longest: int, dropout: float, scaling: float | None
) -> Tensor:
    """Compute causal attention within each row by flash-attn, with operands in the precision of matrix products.

    Args:
        states: query, key and value, (tokens, heads or key-value heads, head size), the rows one after another.
        starts: (rows + 1,) int32, where each row begins.
        longest: no row has more tokens.

    Returns:
        (tokens, heads, head size).
    """
    from flash_attn import flash_attn_varlen_func  # pyright: ignore  (an extra)

    operands = [as_operand(each, operand_dtype(each)) for each in states]
    return flash_attn_varlen_func(
        *operands, starts, starts, longest, longest, dropout_p=dropout, softmax_scale=scaling, causal=True
    )


def causal_attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Compute the attention of `transformers`, without a mask, in the precision of matrix products.

    Its operands are rounded to this precision. On a CPU the rest is float32: PyTorch's backward pass in bfloat16 takes
    five times as long there.

    Args:
        query, key, value: (rows, heads or key-value heads, tokens, head size).
        options: of `sdpa_attention_forward`.

    Returns:
        (rows, tokens, heads, head size).
    """
    dtype = operand_dtype(query)
    query, key, value = (as_operand(states, dtype) for states in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        out, _ = sdpa_attention_forward(module, query, key, value, None, **options)
    return out.to(dtype)


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
