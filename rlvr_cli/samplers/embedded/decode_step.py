"""One decoding step of a Llama-like model: the newest token of every row enters, the logits of the next one leave.

A second implementation of what `transformers` has, for the case that sampling repeats again and again: one token per
row, no gradients. It needs a third of the operators, and its shapes can be held fixed, so that a CUDA graph can replay
it without Python. It supports unmodified Llama, Mistral, Qwen2 and Qwen3 models only (see `unsupported_reason`).
Callers must compare its logits with the model's own before they use it.

Weights may be copies: in a small model, those that are read together are joined, and those in another precision than
the matrix products are cast once. What an adapter adds stays apart from them, since half precision would round it away.

A step therefore keeps the weights that it was made from: make a new one for every batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rlvr_cli.models.device import as_operand, product
from rlvr_cli.models.policy import LowRank, Policy

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # values of `model_type`
BLOCK = 32  # rows
_KNOWN_PACKAGES = ("torch.nn.modules.", "transformers.models.", "transformers.activations")  # of unmodified modules
_JOINED_BELOW = 50_000_000  # parameters; larger models gain nothing from joined weights, and the copies cost memory


class Window(NamedTuple):
    """The part of a cache that a step reads: rows [0, rows), columns [low, high).

    If `lows` is given, each block of `BLOCK` rows has its own first column.
    """

    rows: int
    low: int
    high: int
    lows: tuple[int, ...] = ()

    def select(self, slots: torch.Tensor) -> torch.Tensor:
        """Return this part of keys or values, (rows, key-value heads, columns, head size)."""
        return slots[: self.rows, :, self.low : self.high]


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, scaling: float
) -> torch.Tensor:
    """Compute the attention of one new token per row.

    The query heads that share a key-value head become several queries to it. This gives the same numbers as repeating
    keys and values for each query head, without the copies.

    Args:
        query: (rows, heads, head size).
        keys, values: (rows, key-value heads, columns, head size).
        mask: (rows, 1, 1, columns), added to the scores.

    Returns:
        (rows, heads x head size).
    """
    rows, heads, size = query.shape
    kv_heads = keys.shape[1]
    if query.device.type == "cpu" and query.dtype != torch.float64:
        # So few queries do not fill the fused kernel's blocks. In half precision, only the operands are rounded.
        queries, all_keys, all_values = (as_operand(states, keys.dtype) for states in (query, keys, values))
        with torch.autocast("cpu", enabled=False):
            queries = (queries * scaling).reshape(rows * kv_heads, heads // kv_heads, size)
            scores = torch.bmm(queries, all_keys.flatten(0, 1).transpose(1, 2)).view(rows, heads, -1).add_(mask[:, 0])
            weights = scores.softmax(-1).view(rows * kv_heads, heads // kv_heads, -1)
            return torch.bmm(weights, all_values.flatten(0, 1)).view(rows, heads * size).to(query.dtype)
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, size)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(rows, heads * size)


class _Linear(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None
    added: LowRank | None = None  # to the weight


@dataclass(frozen=True, slots=True)
class _Layer:
    """A decoder layer's weights."""

    before_attention: torch.Tensor  # weight of the norm
    heads: list[_Linear]  # query, key, value
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attended: list[_Linear]
    before_mlp: torch.Tensor  # weight of the norm
    gate_up: list[_Linear]
    down: list[_Linear]


def unsupported_reason(policy: Policy) -> str:
    """Return why `DecodeStep` does not support this policy; empty if it does."""
    config = policy.config
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        return f"model type {config.model_type} is none of {', '.join(SUPPORTED_MODEL_TYPES)}"
    if config.hidden_act != "silu" or config.rope_parameters["rope_type"] in ("dynamic", "longrope"):
        return "its activation or position embedding is not supported"
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=config).layers):
        return "its attention has a sliding window"
    for name, module in policy.plain_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"{name or 'the model'} has a hook or a patch"
        if not type(module).__module__.startswith(_KNOWN_PACKAGES):
            return f"{name} has type {type(module).__name__}, which is not part of the architecture"
    return ""


class DecodeStep:
    """The weights of a policy, laid out for decoding steps.

    Args:
        policy: one that `unsupported_reason` accepts.
        dtype: of the matrix products.
        positions: the number of positions; every token's position is below it.
    """

    def __init__(self, policy: Policy, *, dtype: torch.dtype, positions: int) -> None:
        inner, config, (weights, added) = policy.backbone, policy.config, policy.factored_weights()
        self._embedding = weights["model.embed_tokens.weight"]
        self._dtype = dtype
        self._head = _Linear(as_operand(weights["lm_head.weight"], dtype), weights.get("lm_head.bias"))
        self.vocab_size = len(self._head.weight)
        self._norm = weights["model.norm.weight"]
        self._epsilon: float = config.rms_norm_eps
        join = policy.num_parameters < _JOINED_BELOW

        def linears(layer: str, *names: str) -> list[_Linear]:
            return _side_by_side([_cast(weights, added, f"{layer}.{name}_proj", dtype) for name in names], join=join)

        self._layers = [
            _Layer(
                before_attention=weights[f"{layer}.input_layernorm.weight"],
                heads=linears(f"{layer}.self_attn", *"qkv"),
                query_norm=weights.get(f"{layer}.self_attn.q_norm.weight"),
                key_norm=weights.get(f"{layer}.self_attn.k_norm.weight"),
                attended=linears(f"{layer}.self_attn", "o"),
                before_mlp=weights[f"{layer}.post_attention_layernorm.weight"],
                gate_up=linears(f"{layer}.mlp", "gate", "up"),
                down=linears(f"{layer}.mlp", "down"),
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
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)[:, None]  # with the signs of the rotation

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
        """Write the keys and values of the tokens into the cache, and return the logits of the next tokens.

        Args:
            tokens, positions: (rows,).
            mask: (rows, 1, 1, columns), added to attention scores.
            cache: keys and values of each layer; only `window` is read.
            at: the window's column to write the new ones to, (1,); default: its last one.

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
            keys, values = _written(window.select(all_keys), key, at), _written(window.select(all_values), value, at)
            attended = self._attended(query.to(keys.dtype), keys, values, mask, window)
            x = x + _applied(layer.attended, attended)
            gate, up = _applied(layer.gate_up, self._normed(x, layer.before_mlp)).chunk(2, -1)
            x = x + _applied(layer.down, F.silu(gate) * up)
        with torch.autocast(x.device.type, enabled=False):
            logits = product(as_operand(self._normed(x, self._norm), self._dtype), self._head.weight.T).float()
        return logits if self._head.bias is None else logits + self._head.bias

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
        if x.dtype == torch.float64:  # as in transformers, the norm is computed in float32
            return weight * F.rms_norm(x.float(), weight.shape, None, self._epsilon).to(x.dtype)
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, self._epsilon)


def _cast(weights: Mapping[str, torch.Tensor], added: Mapping[str, LowRank], layer: str, dtype: torch.dtype) -> _Linear:
    """Return a layer's weights in this precision, without a copy if they already have it."""
    bias, more = weights.get(f"{layer}.bias"), added.get(layer)
    return _Linear(
        weights[f"{layer}.weight"].to(dtype),
        None if bias is None else bias.to(dtype),
        None if more is None else LowRank(*(matrix.to(dtype) for matrix in more)),
    )


def _side_by_side(parts: list[_Linear], *, join: bool) -> list[_Linear]:
    """Return layers that have the same input, and either all or none a bias; `join` concatenates them into one."""
    if not join or len(parts) == 1:
        return parts
    biases = [part.bias for part in parts if part.bias is not None]
    added = [part.added for part in parts if part.added is not None]
    return [
        _Linear(
            torch.cat([part.weight for part in parts]),
            torch.cat(biases) if biases else None,
            LowRank(torch.cat([a.down for a in added]), torch.block_diag(*(a.up for a in added))) if added else None,
        )
    ]


def _applied(linears: Sequence[_Linear], x: torch.Tensor) -> torch.Tensor:
    """Return the concatenated outputs of the layers."""
    outputs = []
    for weight, bias, added in linears:
        output = F.linear(x, weight, bias)
        outputs.append(output if added is None else output + F.linear(F.linear(x, added.down), added.up))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def _written(slots: torch.Tensor, new: torch.Tensor, at: torch.Tensor | None) -> torch.Tensor:
    """Write `new`, (rows, key-value heads, head size), into column `at` of `slots`, or the last one; return `slots`."""
    if at is None:
        slots[:, :, -1] = new
    else:
        slots.index_copy_(2, at, new[:, :, None].to(slots.dtype))
    return slots
