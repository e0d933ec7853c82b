"""One decoding step of a Llama-like model: the newest token of every row enters, the logits of the next one leave.

Prompts, and what the environment of an episode answers, pass the same layers, many tokens at a time and without logits.

A second implementation of what `transformers` has, for the case that sampling repeats again and again: one token per
row, no gradients. It needs a third of the operators, and its shapes can be held fixed, so that a CUDA graph can replay
it without Python. It supports unmodified Llama, Mistral, Qwen2 and Qwen3 models only (see `unsupported_reason`).
Callers must compare its logits with the model's own before they use it.

Weights may be copies: in a small model, those that are read together are joined, and those in another precision than
the matrix products are cast once. What an adapter adds stays apart from them, since half precision would round it away.

A step therefore keeps the weights that it was made from: `refresh` it for every batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rlvr_cli.models.compute.device import as_operand, product
from rlvr_cli.models.compute.onednn import linear
from rlvr_cli.models.policy import LowRank, Policy
from rlvr_cli.samplers.embedded.attention import Blocks, attend
from rlvr_cli.samplers.embedded.prefill import Extension, Prefix, packed
from rlvr_cli.samplers.embedded.shared import Part, Readers, attend_to_part, merged

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # values of `model_type`
_KNOWN_PACKAGES = (  # of unmodified modules
    "torch.nn.modules.",
    "transformers.models.",
    "transformers.activations",
    "rlvr_cli.models.compute.onednn",
)
_JOINED_BELOW = 50_000_000  # parameters; larger models gain nothing from joined weights, and the copies cost memory


class Window(NamedTuple):
    """The part of a cache that a step reads: rows [0, rows), columns [low, high).

    If `blocks` is given, (first row, end, low) of each, the rows of a block are read from a column of their own.
    """

    rows: int
    low: int
    high: int
    blocks: tuple[tuple[int, int, int], ...] = ()

    def places(self, kv_heads: int) -> Blocks:
        """Return where the blocks are in keys or values of this part, (rows x key-value heads, columns, head size)."""
        return [(slice(a * kv_heads, b * kv_heads), slice(low - self.low, None)) for a, b, low in self.blocks]

    def select(self, slots: torch.Tensor) -> torch.Tensor:
        """Return this part of keys or values, (rows, key-value heads, columns, head size)."""
        return slots[: self.rows, :, self.low : self.high]


# (layer, query, key, value), each of the latter (tokens, heads, head size) -> what is attended to, (tokens, heads x head size); None: of
# the last layer, keys and values were all that is wanted.
_Attended = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]


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


class _Held:
    """Weights of a policy by their names, as they are or in a copy, and how to copy them again."""

    def __init__(self, weights: Mapping[str, torch.Tensor], added: Mapping[str, LowRank]) -> None:
        """Take what `Policy.factored_weights` returns."""
        self._weights, self._added = weights, added
        self._held: list[tuple[torch.Tensor, Sequence[str], torch.dtype | None]] = []
        self._low_rank: list[tuple[LowRank, Sequence[str]]] = []

    def tensor(self, *names: str, dtype: torch.dtype | None = None, operand: torch.dtype | None = None) -> torch.Tensor:
        """Return these weights below one another, in `dtype`, or as operands of products in `operand`.

        There is no copy of a weight that is alone and has this precision already.
        """
        parts = [self._weights[name] if dtype is None else self._weights[name].to(dtype) for name in names]
        parts = parts if operand is None else [as_operand(part, operand) for part in parts]
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._held.append((found, names, operand))
        return found

    def optional(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        return self.tensor(name, dtype=dtype) if name in self._weights else None

    def linear(self, layer: str, dtype: torch.dtype) -> _Linear:
        bias = self.optional(f"{layer}.bias", dtype)
        return _Linear(self.tensor(f"{layer}.weight", dtype=dtype), bias, self.low_rank([layer], dtype))

    def side_by_side(self, layers: Sequence[str], dtype: torch.dtype, *, join: bool) -> list[_Linear]:
        """Return layers that have the same input, and either all or none a bias; `join` concatenates them into one."""
        if not join:
            return [self.linear(layer, dtype) for layer in layers]
        biases = [f"{layer}.bias" for layer in layers if f"{layer}.bias" in self._weights]
        weight = self.tensor(*(f"{layer}.weight" for layer in layers), dtype=dtype)
        bias = self.tensor(*biases, dtype=dtype) if biases else None
        return [_Linear(weight, bias, self.low_rank(layers, dtype))]

    def low_rank(self, layers: Sequence[str], dtype: torch.dtype) -> LowRank | None:
        """Return a copy of what an adapter adds to the weights of these layers, below one another; None if nothing."""
        if not any(layer in self._added for layer in layers):
            return None
        found = LowRank(*(matrix.to(dtype) for matrix in self._joined(layers)))
        self._low_rank.append((found, layers))
        return found

    def _joined(self, layers: Sequence[str]) -> LowRank:
        parts = [self._added.get(layer) or self._nothing(layer) for layer in layers]
        return LowRank(torch.cat([part.down for part in parts]), torch.block_diag(*(part.up for part in parts)))

    def _nothing(self, layer: str) -> LowRank:
        weight = self._weights[f"{layer}.weight"]
        return LowRank(weight.new_zeros((0, weight.shape[1])), weight.new_zeros((weight.shape[0], 0)))

    @property
    def nbytes(self) -> int:
        copies = [held for held, names, _ in self._held if not self._is_shared(held, names)]
        return sum(held.nbytes for held in [*copies, *(matrix for held, _ in self._low_rank for matrix in held)])

    def refresh(self, weights: Mapping[str, torch.Tensor], added: Mapping[str, LowRank]) -> bool:
        """Copy weights again; False, with nothing copied, if one that is not copied has moved."""
        shared = [self._is_shared(held, names) for held, names, _ in self._held]
        before, self._weights = self._weights, weights
        if shared != [self._is_shared(held, names) for held, names, _ in self._held]:
            self._weights = before
            return False
        self._added = added
        for (held, names, operand), as_they_are in zip(self._held, shared, strict=True):
            if not as_they_are:
                parts = [weights[name] for name in names]
                for place, part in zip(held.split([len(part) for part in parts]), parts, strict=True):
                    place.copy_(part if operand is None else as_operand(part, operand))
        for held, layers in self._low_rank:
            for place, matrix in zip(held, self._joined(layers), strict=True):
                place.copy_(matrix)
        return True

    def _is_shared(self, held: torch.Tensor, names: Sequence[str]) -> bool:
        weight = self._weights[names[0]]
        return len(names) == 1 and held.dtype == weight.dtype and held.data_ptr() == weight.data_ptr()


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

    Attributes:
        heads: of the queries.
    """

    def __init__(self, policy: Policy, *, dtype: torch.dtype, positions: int) -> None:
        inner, config = policy.backbone, policy.config
        held = _Held(*policy.factored_weights())
        self._held = held
        self._embedding = held.tensor("model.embed_tokens.weight")
        self._dtype = dtype
        self._head = _Linear(held.tensor("lm_head.weight", operand=dtype), held.optional("lm_head.bias"))
        self.vocab_size = len(self._head.weight)
        self._norm = held.tensor("model.norm.weight")
        self._epsilon: float = config.rms_norm_eps
        join = policy.num_parameters < _JOINED_BELOW
        self._layers = [
            _Layer(
                before_attention=held.tensor(f"{layer}.input_layernorm.weight"),
                heads=held.side_by_side([f"{layer}.self_attn.{name}_proj" for name in "qkv"], dtype, join=join),
                query_norm=held.optional(f"{layer}.self_attn.q_norm.weight"),
                key_norm=held.optional(f"{layer}.self_attn.k_norm.weight"),
                attended=[held.linear(f"{layer}.self_attn.o_proj", dtype)],
                before_mlp=held.tensor(f"{layer}.post_attention_layernorm.weight"),
                gate_up=held.side_by_side([f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"], dtype, join=join),
                down=[held.linear(f"{layer}.mlp.down_proj", dtype)],
            )
            for layer in (f"model.layers.{number}" for number in range(config.num_hidden_layers))
        ]
        attention = inner.layers[0].self_attn
        self.positions = positions
        self._size: int = attention.head_dim
        self._scaling: float = attention.scaling
        self.heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        every = torch.arange(positions, device=self._embedding.device)[None]
        cos, sin = inner.rotary_emb(self._embedding, every)
        half = self._size // 2
        self._cos = cos[0, :, None]  # (positions, 1, head size)
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)[:, None]  # with the signs of the rotation

    @property
    def nbytes(self) -> int:
        """The bytes of its copies."""
        return self._held.nbytes

    def refresh(self, policy: Policy) -> bool:
        """Copy the policy's weights into the copies, in place; False if it reads weights that are elsewhere now."""
        return self._held.refresh(*policy.factored_weights())

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        *,
        mask: torch.Tensor,
        cache: Sequence[tuple[torch.Tensor, torch.Tensor]],
        window: Window,
        at: torch.Tensor | None = None,
        readers: Readers | None = None,
    ) -> torch.Tensor:
        """Write the keys and values of the tokens into the cache, and return the logits of the next tokens.

        Args:
            tokens, positions: (rows,).
            mask: (rows, 1, 1, columns), added to attention scores.
            cache: keys and values of each layer; only `window` is read.
            at: the window's column to write the new ones to, (1,); default: its last one.
            readers: of prefixes that are not in the cache; None: there are none.

        Returns:
            (rows, vocab) float32.
        """
        rows, blocks = len(tokens), window.places(self._kv_heads)

        def attended(number: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            all_keys, all_values = cache[number]
            keys, values = _written(window.select(all_keys), key, at), _written(window.select(all_values), value, at)
            query = query.to(keys.dtype)
            if readers is None:
                return attend(query, keys, values, mask, scaling=self._scaling, blocks=blocks)
            asked = as_operand(query, keys.dtype) * self._scaling
            queries = asked.reshape(rows * self._kv_heads, -1, self._size)
            own = attend_to_part(queries, keys.flatten(0, 1), values.flatten(0, 1), mask[:, 0], blocks)
            own = Part(own.out.view(asked.shape), own.log_sum.view(asked.shape[:2]))
            return merged(own, readers.attend(number, asked)).view(rows, -1).to(query.dtype)

        x = self._hidden(tokens, positions, attended)
        with torch.autocast(x.device.type, enabled=False):
            logits = product(as_operand(self._normed(x, self._norm), self._dtype), self._head.weight.T).float()
        return logits if self._head.bias is None else logits + self._head.bias

    def prefill(self, prompts: Sequence[Sequence[int]], *, after: Prefix) -> list[Prefix]:
        """Compute the keys and values of prompts that begin with the same tokens, which are known.

        Args:
            prompts: what follows these tokens; some may be empty, but not all.
            after: the keys and values of these tokens, which may be none.

        Returns:
            Those of each prompt, from its first token on.
        """
        before = after[0][0].shape[1]
        new = packed(prompts, known=np.full(len(prompts), before), device=after[0][0].device)
        most, layers = new.places.shape[1], []
        mask = after[0][0].new_full((most, before + most), -torch.inf).triu(before + 1) if before else None

        def attended(number: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
            keys, values = (
                torch.cat((known.expand(len(prompts), -1, -1, -1), new.spread(states.to(known.dtype))), 2)
                for known, states in zip(after[number], (key, value), strict=True)
            )
            layers.append((keys, values))
            if number == len(self._layers) - 1:
                return None
            return new.gathered(self._attended_by_several(new.spread(query), keys, values, mask))

        self._hidden(new.tokens, new.positions, attended)
        ends = [before + len(prompt) for prompt in prompts]
        return [[(keys[row, :, :end], values[row, :, :end]) for keys, values in layers] for row, end in enumerate(ends)]

    def extend(self, extension: Extension, *, cache: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write the keys and values of tokens into the cache, those of each layer, of which a row may get several."""
        new, rows, seen = extension.new, extension.rows, extension.seen

        def attended(number: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
            for slots, states in zip(cache[number], (key, value), strict=True):
                slots[extension.row, :, extension.column] = states.to(slots.dtype)
            if number == len(self._layers) - 1:
                return None
            keys, values = (slots[:, :, seen].index_select(0, rows) for slots in cache[number])
            return new.gathered(self._attended_by_several(new.spread(query), keys, values, extension.mask))

        self._hidden(new.tokens, new.positions, attended)

    def _hidden(self, tokens: torch.Tensor, positions: torch.Tensor, attended: _Attended) -> torch.Tensor:
        """Return what leaves the last layer, (tokens, hidden)."""
        x = F.embedding(tokens, self._embedding)
        cos, sin = self._cos[positions], self._sin[positions]  # (tokens, 1, head size)
        for number, layer in enumerate(self._layers):
            heads = _applied(layer.heads, self._normed(x, layer.before_attention)).view(len(x), -1, self._size)
            turning, value = heads.split((self.heads + self._kv_heads, self._kv_heads), 1)
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = turning.split((self.heads, self._kv_heads), 1)
                turning = torch.cat((self._normed(query, layer.query_norm), self._normed(key, layer.key_norm)), 1)
            turning = turning * cos + turning.roll(self._size // 2, -1) * sin
            query, key = turning.split((self.heads, self._kv_heads), 1)
            if (found := attended(number, query, key, value)) is None:
                break
            x = x + _applied(layer.attended, found)
            gate, up = _applied(layer.gate_up, self._normed(x, layer.before_mlp)).chunk(2, -1)
            x = x + _applied(layer.down, F.silu(gate) * up)
        return x

    def _attended_by_several(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the attention of several tokens per row, (rows, heads, tokens, head size). In half precision, a CPU rounds only the operands.

        Args:
            mask: what is added to the scores; None: there are no other tokens, and each sees those before it.
        """
        asked, keys, values = (as_operand(states, keys.dtype) for states in (query, keys, values))
        flash = (
            mask is None and keys.dtype.itemsize < 4
        )  # of the kernels for CUDA, it alone reads keys for several heads
        grouped = flash or keys.device.type == "cpu"
        if not grouped:
            keys, values = (states.repeat_interleave(self.heads // self._kv_heads, 1) for states in (keys, values))
        mask = None if mask is None else mask.to(asked.dtype)
        how = {"scale": self._scaling, "enable_gqa": grouped}
        with torch.autocast(asked.device.type, enabled=False):
            out = F.scaled_dot_product_attention(asked, keys, values, mask, is_causal=mask is None, **how)
        return out.to(query.dtype)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:  # as in transformers, the norm is computed in float32
            return weight * F.rms_norm(x.float(), weight.shape, None, self._epsilon).to(x.dtype)
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, self._epsilon)


def _applied(linears: Sequence[_Linear], x: torch.Tensor) -> torch.Tensor:
    """Return the concatenated outputs of the layers."""
    outputs = []
    for weight, bias, added in linears:
        output = linear(x, weight, bias)
        outputs.append(output if added is None else output + F.linear(F.linear(x, added.down), added.up))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def _written(slots: torch.Tensor, new: torch.Tensor, at: torch.Tensor | None) -> torch.Tensor:
    """Write `new`, (rows, key-value heads, head size), into column `at` of `slots`, or the last one; return `slots`."""
    if at is None:
        slots[:, :, -1] = new
    else:
        slots.index_copy_(2, at, new[:, :, None].to(slots.dtype))
    return slots
