"""One step of a Llama-like model: every row's newest token enters, the logits of its next one leave.

A second implementation of what `transformers` has, for the one case that sampling repeats without end: a single token
per row, no gradients. It needs a third of the operators, and its shapes can be held fixed, so that a CUDA graph can
replay it without Python. It knows few architectures and none that somebody has changed (`obstacle` says so), and it is
for its user to compare its logits with the model's own before they are relied on.

Weights may be copies: those of a small model that are read together lie together, and those that products are to be
computed with in another precision are cast once. A step is therefore as old as its weights, and made for one batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from rlvr_cli.models.policy import Policy

KNOWN = ("llama", "mistral", "qwen2", "qwen3")  # `model_type`s whose modules are those that are read here
BLOCK = 32  # rows
_HOMES = ("torch.nn.modules.", "transformers.models.", "transformers.activations")  # where its modules are defined
_JOINED_BELOW = 50_000_000  # parameters; with more of them the time goes into arithmetic, and the memory matters


class Window(NamedTuple):
    """The part of a cache that a step reads: rows [0, rows), columns [low, high).

    Where `lows` are given, each block of `BLOCK` rows reads from a column of its own on.
    """

    rows: int
    low: int
    high: int
    lows: tuple[int, ...] = ()

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """What it shows of keys or values, (rows, key-value heads, columns, head size)."""
        return slots[: self.rows, :, self.low : self.high]


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, scaling: float
) -> torch.Tensor:
    """Attention of one new token per row.

    The query heads that share a key-value head are given as so many queries to it: the same numbers as repeating keys
    and values for each query head, without the copies.

    Args:
        query: (rows, heads, head size).
        keys, values: (rows, key-value heads, columns, head size).
        mask: (rows, 1, 1, columns), added to the scores.

    Returns:
        (rows, heads x head size).
    """
    rows, heads, size = query.shape
    kv_heads = keys.shape[1]
    if (
        query.device.type == "cpu" and query.dtype == torch.float32
    ):  # so few queries do not fill the fused kernel's blocks
        queries = (query * scaling).reshape(rows * kv_heads, heads // kv_heads, size)
        scores = torch.bmm(queries, keys.flatten(0, 1).transpose(1, 2)).view(rows, heads, -1).add_(mask[:, 0])
        weights = scores.softmax(-1).view(rows * kv_heads, heads // kv_heads, -1)
        return torch.bmm(weights, values.flatten(0, 1)).view(rows, heads * size)
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, size)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(rows, heads * size)


class _Linear(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Layer:
    """A decoder layer's weights."""

    before_attention: torch.Tensor  # of the norm
    heads: list[_Linear]  # query, key, value
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attended: _Linear
    before_mlp: torch.Tensor  # of the norm
    gate_up: list[_Linear]
    down: _Linear


def obstacle(policy: Policy) -> str:
    """Why there can be no `Step` of this policy; empty when there can."""
    config = policy.config
    if config.model_type not in KNOWN:
        return f"{config.model_type} is none of {', '.join(KNOWN)}"
    if config.hidden_act != "silu" or config.rope_parameters["rope_type"] in ("dynamic", "longrope"):
        return "its activation or its position embedding is an unusual one"
    for name, module in policy.plain_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"{name or 'the model'} has a hook or a patch"
        if not type(module).__module__.startswith(_HOMES):
            return f"{name} is of {type(module).__name__}, which is not the architecture's own"
    return ""


class Step:
    """A policy's weights as a step reads them.

    Args:
        policy: one without an `obstacle`.
        dtype: in which products are computed.
        positions: more than any token's.
    """

    def __init__(self, policy: Policy, *, dtype: torch.dtype, positions: int) -> None:
        inner, config, weights = policy.backbone, policy.config, policy.weights_for_engine()
        self._embedding = weights["model.embed_tokens.weight"]
        self._head = _cast(weights, "lm_head", dtype)
        self.vocab_size = len(self._head.weight)
        self._norm = weights["model.norm.weight"]
        self._epsilon: float = config.rms_norm_eps
        join = policy.num_parameters < _JOINED_BELOW
        self._layers = [
            _Layer(
                before_attention=weights[f"{layer}.input_layernorm.weight"],
                heads=_side_by_side(weights, [f"{layer}.self_attn.{name}_proj" for name in "qkv"], dtype, join=join),
                query_norm=weights.get(f"{layer}.self_attn.q_norm.weight"),
                key_norm=weights.get(f"{layer}.self_attn.k_norm.weight"),
                attended=_cast(weights, f"{layer}.self_attn.o_proj", dtype),
                before_mlp=weights[f"{layer}.post_attention_layernorm.weight"],
                gate_up=_side_by_side(weights, [f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"], dtype, join=join),
                down=_cast(weights, f"{layer}.mlp.down_proj", dtype),
            )
            for layer in (f"model.layers.{number}" for number in range(config.num_hidden_layers))
        ]
        attention = inner.layers[0].self_attn
        self._size: int = attention.head_dim
        self._scaling: float = attention.scaling
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        every = torch.arange(positions, device=self._embedding.device)[None]
        cos, sin = inner.rotary_emb(self._embedding, every)
        half = self._size // 2
        self._cos = cos[0, :, None]  # (positions, 1, head size)
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)[:, None]  # with the sign of the turn

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        *,
        mask: torch.Tensor,
        cache: Sequence[tuple[torch.Tensor, torch.Tensor]],
        window: Window,
        at: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the tokens' keys and values into the cache, and tell what may follow them.

        Args:
            tokens, positions: (rows,).
            mask: (rows, 1, 1, columns), added to attention scores.
            cache: keys and values of each layer, of which `window` is read.
            at: the column of the window that the new ones are written to, (1,); its last one by default.

        Returns:
            (rows, vocab) float32.
        """
        rows = len(tokens)
        x = F.embedding(tokens, self._embedding)  # (rows, hidden)
        cos, sin = self._cos[positions], self._sin[positions]  # (rows, 1, head size)
        for layer, (all_keys, all_values) in zip(self._layers, cache, strict=True):
            heads = _applied(layer.heads, self._normed(x, layer.before_attention)).view(rows, -1, self._size)
            turning, value = heads.split((self._heads + self._kv_heads, self._kv_heads), 1)
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = turning.split((self._heads, self._kv_heads), 1)
                turning = torch.cat((self._normed(query, layer.query_norm), self._normed(key, layer.key_norm)), 1)
            turning = turning * cos + turning.roll(self._size // 2, -1) * sin
            query, key = turning.split((self._heads, self._kv_heads), 1)
            keys, values = _written(window.of(all_keys), key, at), _written(window.of(all_values), value, at)
            attended = self._attended(query.to(keys.dtype), keys, values, mask, window)
            x = x + F.linear(attended, *layer.attended)
            gate, up = _applied(layer.gate_up, self._normed(x, layer.before_mlp)).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, *layer.down)
        return F.linear(self._normed(x, self._norm), *self._head).float()

    def _attended(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, window: Window
    ) -> torch.Tensor:
        if not window.lows:
            return attend(query, keys, values, mask, scaling=self._scaling)
        blocks = []
        for index, low in enumerate(window.lows):
            rows, columns = slice(index * BLOCK, (index + 1) * BLOCK), slice(low - window.low, None)
            seen = keys[rows, :, columns], values[rows, :, columns], mask[rows, :, :, columns]
            blocks.append(attend(query[rows], *seen, scaling=self._scaling))
        return torch.cat(blocks)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:  # which these models, too, compute in float32
            return weight * F.rms_norm(x.float(), weight.shape, None, self._epsilon).to(x.dtype)
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, self._epsilon)


def _cast(weights: Mapping[str, torch.Tensor], layer: str, dtype: torch.dtype) -> _Linear:
    """A layer's own weights where they have that precision."""
    bias = weights.get(f"{layer}.bias")
    return _Linear(weights[f"{layer}.weight"].to(dtype), None if bias is None else bias.to(dtype))


def _side_by_side(
    weights: Mapping[str, torch.Tensor], layers: Sequence[str], dtype: torch.dtype, *, join: bool
) -> list[_Linear]:
    """Layers of the same input, all with biases or none; `join` makes one of them."""
    parts = [_cast(weights, layer, dtype) for layer in layers]
    if not join:
        return parts
    biases = [part.bias for part in parts if part.bias is not None]
    return [_Linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)]


def _applied(linears: Sequence[_Linear], x: torch.Tensor) -> torch.Tensor:
    """The outputs of the layers, side by side."""
    outputs = [F.linear(x, *linear) for linear in linears]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def _written(slots: torch.Tensor, new: torch.Tensor, at: torch.Tensor | None) -> torch.Tensor:
    """`slots` with `new`, (rows, key-value heads, head size), in the column `at`."""
    if at is None:
        slots[:, :, -1] = new
    else:
        slots.index_copy_(2, at, new[:, :, None].to(slots.dtype))
    return slots
