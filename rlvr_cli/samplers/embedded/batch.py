"""The batch of rows that the embedded engine samples together: their state, key-value cache and decoding steps.

Enters: questions whose prompts have been prefilled. Leaves: completions, as soon as their rows end.

Layout of the cache: all rows write the key and value of their newest token into the same column, so a row with n tokens
occupies the n columns up to that one (a batch padded on the left). A step then needs one slice copy per layer and one
slice of a mask that rarely changes. When the columns run out, those in use move back to the beginning.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.compute.device import to_device, to_host
from rlvr_cli.models.compute.prefixes import causal_attention
from rlvr_cli.models.policy import Policy
from rlvr_cli.samplers.embedded.cuda_graphs import FixedShapeStep
from rlvr_cli.samplers.embedded.decode_step import BLOCK, DecodeStep, Window, attend
from rlvr_cli.samplers.embedded.draw import draw_tokens, uniforms
from rlvr_cli.samplers.stop_strings import StopStrings, response_text
from rlvr_cli.types import Completion, FinishReason, SamplingParams

ATTENTION = "rlvr_decode"  # the attention function that a model must use while it runs the steps of a batch
_WORTH_BLOCKS = 0.1  # the least share of columns that reading blocks of rows separately must save


@dataclass(slots=True)
class _Window:
    """The part of the cache that a step reads: rows [0, rows), columns [low, column]; it writes the last one."""

    rows: int = 0
    low: int = 0
    column: int = 0
    lows: tuple[int, ...] = ()  # see `decode_step.Window`


class _SlotLayer(CacheLayerMixin):
    """One layer's keys and values, (rows, key-value heads, columns, head size); `window` is the part in use."""

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, window: _Window, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.window, self.keys, self.values = window, keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("slots are allocated before the first step")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        w = self.window
        keys, values = self.keys[: w.rows, :, w.low : w.column + 1], self.values[: w.rows, :, w.low : w.column + 1]
        keys[:, :, -1:] = key_states
        values[:, :, -1:] = value_states
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.column + 1 - self.window.low, 0

    def get_seq_length(self) -> int:
        return self.window.column - self.window.low

    def get_max_length(self) -> int:
        return self.keys.shape[2]


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


# Per layer: the keys and values of a prompt without its last token, (key-value heads, tokens, head size).
Prefix = list[tuple[torch.Tensor, torch.Tensor]]
# Per layer: memory for the keys and values of rows, (rows, key-value heads, columns, head size).
Slots = list[tuple[torch.Tensor, torch.Tensor]]


def make_slots(
    like: Prefix, *, rows: int, columns: int, device: torch.device | None = None, value: float = 0.0
) -> Slots:
    """Allocate a cache of this size, filled with `value`, with the heads, head sizes and dtypes of `like`."""

    def room(states: torch.Tensor) -> torch.Tensor:
        return states.new_full((rows, states.shape[0], columns, states.shape[2]), value, device=device)

    return [(room(keys), room(values)) for keys, values in like]


class Workspace:
    """What stays in place from step to step on the device; later batches of no more rows and columns may use it again.

    Attributes:
        slots: memory for the cache; it may hold any finite numbers.
        mask: (rows, 1, 1, columns), added to attention scores.
        inputs, positions: (rows, 1), of every row's newest token.
        step: runs the decoding steps; None: the model runs them.
        fixed_step: runs them in a few fixed shapes, on a CUDA device as recorded graphs; None: each in its own.
    """

    def __init__(self, slots: Slots, *, step: DecodeStep | None = None, fixed: bool = False) -> None:
        keys = slots[0][0]
        self.rows, _, self.columns, _ = keys.shape
        self.device = keys.device
        self.slots = slots
        self.mask = torch.full((self.rows, 1, 1, self.columns), -torch.inf, dtype=keys.dtype, device=self.device)
        self.inputs = torch.zeros(self.rows, 1, dtype=torch.int64, device=self.device)
        self.positions = torch.zeros(self.rows, 1, dtype=torch.int64, device=self.device)
        self.take(step, fixed=fixed)

    def take(self, step: DecodeStep | None, *, fixed: bool = False) -> None:
        """Replace the step, and forget the graphs of the one before."""
        self.step, self.fixed_step = step, None
        if step is not None and fixed:
            still = {"tokens": self.inputs, "positions": self.positions, "mask": self.mask, "cache": self.slots}
            self.fixed_step = FixedShapeStep(step, **still)

    @property
    def nbytes(self) -> int:
        """The bytes of the cache and of the step's copies of weights."""
        return sum(t.nbytes for pair in self.slots for t in pair) + (self.step.nbytes if self.step else 0)


@dataclass(slots=True)
class Question:
    """A request in progress: its prompt, and those of its samples that have no row in the batch yet."""

    request_index: int
    prompt_ids: list[int]
    samples: deque[tuple[int, int]]  # (sample index, seed)
    prefix: Prefix | None = None  # None before the prefill
    begun: int = 0  # see `types.Request`

    @property
    def beginning(self) -> list[int]:
        """The tokens of the response that are in the prompt."""
        return self.prompt_ids[len(self.prompt_ids) - self.begun :]


class Batch:
    """Rows that are sampled together. Host arrays have one entry per row; a row that is not `alive` is free.

    The last prompt token is not prefilled: it is a row's first input, so that every token is drawn in a step.
    """

    def __init__(
        self,
        policy: Policy,
        workspace: Workspace,
        *,
        params: SamplingParams,
        eos: Sequence[int],
        stops: StopStrings,
        rows: int | None = None,
        columns: int | None = None,
    ) -> None:
        """Create a batch of free rows.

        Args:
            workspace: no other batch uses it meanwhile.
            rows, columns: the part of it to use; by default all. What is computed does not depend on the rest.
        """
        self._policy, self._params, self._stops = policy, params, stops
        self._step, self._fixed_step = workspace.step, workspace.fixed_step
        rows, columns = rows or workspace.rows, columns or workspace.columns
        self.window = _Window()
        self._slots = [(keys[:rows, :, :columns], values[:rows, :, :columns]) for keys, values in workspace.slots]
        self.layers = [_SlotLayer(self.window, *pair) for pair in self._slots]
        self.cache = Cache(layers=list(self.layers))
        self.columns = columns
        self.mask = workspace.mask[:rows, :, :, :columns].fill_(-torch.inf)
        self.inputs = workspace.inputs[:rows].zero_()
        self.positions = workspace.positions[:rows].zero_()
        self.eos = self._on_device(torch.tensor(eos, dtype=torch.int64))
        self._is_eos = np.zeros(len(stops.candidates), dtype=bool)
        self._is_eos[list(eos)] = True
        self._may_end = self._is_eos | stops.candidates

        self._changed = False  # whether the rows or columns in use may have changed
        self.alive = np.zeros(rows, dtype=bool)
        self.questions: list[Question | None] = [None] * rows
        self.sample = np.zeros(rows, dtype=np.int64)
        self.seed = np.zeros(rows, dtype=np.int64)
        self.start = np.zeros(rows, dtype=np.int64)  # the row's first column
        self.born = np.zeros(rows, dtype=np.int64)  # the step that drew its first token
        self.begun = np.zeros(rows, dtype=np.int64)  # tokens of the response before that one
        self.step = 0
        # Tokens drawn in step s are in column s modulo max_tokens: no row has more tokens than that.
        self.tokens = np.zeros((rows, params.max_tokens), dtype=np.int64)
        self.logprobs = np.zeros((rows, params.max_tokens), dtype=np.float32)
        self.entropy = np.zeros((rows, params.max_tokens), dtype=np.float32)

    @property
    def free(self) -> int:
        return len(self.alive) - int(self.alive.sum())

    @property
    def recording_failure(self) -> str:
        """Why a step could not be recorded as a CUDA graph, and runs without; empty if all could that should."""
        return "" if self._fixed_step is None else self._fixed_step.failure

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return to_device(tensor, self.inputs.device)

    def seat(self, question: Question) -> None:
        """Assign free rows to the question's samples until either run out."""
        w, length = self.window, len(question.prompt_ids) - 1
        rows = np.flatnonzero(~self.alive)[: len(question.samples)]
        assert question.prefix is not None
        assert w.column >= length, (w.column, length)
        together = rows[-1] - rows[0] == len(rows) - 1  # contiguous, as at the start
        at = slice(rows[0], rows[-1] + 1) if together else self._on_device(torch.from_numpy(rows))
        for layer, (keys, values) in zip(self.layers, question.prefix, strict=True):
            layer.keys[at, :, w.column - length : w.column] = keys
            layer.values[at, :, w.column - length : w.column] = values
        self.mask[at] = -torch.inf
        self.mask[at, :, :, w.column - length :] = 0
        self.inputs[at] = question.prompt_ids[-1]
        self.positions[at] = length
        self.alive[rows], self.born[rows], self.start[rows] = True, self.step, w.column - length
        self.begun[rows] = question.begun
        for row in rows:
            self.questions[row] = question
            self.sample[row], self.seed[row] = question.samples.popleft()
        w.rows = max(w.rows, int(rows[-1]) + 1)
        self._changed = True

    def make_room(self, length: int) -> None:
        """Ensure that there are `length` columns before the next one to be written, for a prompt to be added."""
        if self.window.column < length or self.window.column == self.columns:
            self._move_columns(length)

    def forward(self) -> torch.Tensor:
        """Feed every row its newest token; return the logits of the next one, (rows, vocab) float32."""
        w = self.window
        if w.column == self.columns:
            self._move_columns(0)
        self._shrink_window()
        inputs, positions = self.inputs[: w.rows], self.positions[: w.rows]
        mask = self.mask[: w.rows, :, :, w.low : w.column + 1]
        window = Window(w.rows, w.low, w.column + 1, w.lows)
        if self._fixed_step is not None:
            logits = self._fixed_step(window, rows=len(self.alive), columns=self.columns)
        elif self._step is not None:
            logits = self._step(inputs[:, 0], positions[:, 0], mask=mask, cache=self._slots, window=window)
        else:
            out = self._policy.forward(
                input_ids=inputs,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=self.cache,
                use_cache=True,
            )
            logits = out.logits[:, -1].float()
        w.column += 1
        return logits

    def advance(self) -> list[Completion]:
        """Draw one token for every row; return the completions that it ended and free their rows."""
        rows, params = self.window.rows, self._params
        logits = self.forward()
        age = self.step - self.born[:rows]
        u = self._on_device(torch.from_numpy(uniforms(self.seed[:rows], age)))
        with torch.autocast(logits.device.type, enabled=False):  # drawing is float32 whatever the model ran in
            draw = draw_tokens(
                logits,
                u,
                temperature=params.temperature,
                top_p=params.top_p,
                barred=self._barred(age + self.begun[:rows] < params.min_tokens),
            )
        self.inputs[:rows, 0] = draw.tokens
        self.positions[:rows] += 1
        tokens, logprobs, entropy = (drawn.numpy() for drawn in to_host(draw))
        if not np.isfinite(entropy).all():
            raise RlvrError(
                f"The model's logits are not finite (token {int(age[~np.isfinite(entropy)][0])} of a response).",
                "Its weights have diverged, or overflow in this precision: lower the learning rate, or load the model "
                "in float32.",
            )
        slot = self.step % params.max_tokens
        self.tokens[:rows, slot] = tokens
        self.logprobs[:rows, slot] = logprobs
        self.entropy[:rows, slot] = entropy
        self.step += 1
        may_end = self.alive[:rows] & (self._may_end[tokens] | (age + 1 == params.max_tokens))
        completions = [c for row in np.flatnonzero(may_end) if (c := self._finish(int(row))) is not None]
        if completions:
            self.positions[:rows][self._on_device(torch.from_numpy(~self.alive[:rows]))] = 0
            self._changed = True
        return completions

    def compact(self) -> None:
        """Move the last live rows into the free rows before them, so that a step computes live rows only."""
        self._shrink_window()
        live = int(self.alive.sum())
        holes = np.flatnonzero(~self.alive[:live])
        movers = np.flatnonzero(self.alive[live:]) + live
        w = self.window
        if len(holes):
            to, of = (self._on_device(torch.from_numpy(rows)) for rows in (holes, movers))
            for layer in self.layers:
                for slots in (layer.keys, layer.values):
                    slots[:, :, w.low : w.column][to] = slots[:, :, w.low : w.column][of]
            for tensor in (self.mask, self.inputs, self.positions):
                tensor[to] = tensor[of]
            drawn = (self.tokens, self.logprobs, self.entropy)
            for array in (self.sample, self.seed, self.start, self.born, self.begun, *drawn):
                array[holes] = array[movers]
            for hole, mover in zip(holes, movers, strict=True):
                self.questions[hole], self.questions[mover] = self.questions[mover], None
            self.alive[holes], self.alive[movers] = True, False
        w.rows = live
        self._changed = True

    def _barred(self, young: np.ndarray) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (rows, tokens) that must not be drawn: EOS in the rows that are `young`, shorter than `min_tokens`."""
        if not len(self.eos) or not young.any():
            return None
        return self._on_device(torch.from_numpy(np.flatnonzero(young))), self.eos

    def _finish(self, row: int) -> Completion | None:
        """Return the completion of a row if its newest token ended it, else None."""
        params, question = self._params, self.questions[row]
        assert question is not None
        born, count = int(self.born[row]), self.step - int(self.born[row])
        first = born % params.max_tokens
        slots = (
            slice(first, first + count)
            if first + count <= params.max_tokens
            else np.arange(born, self.step) % params.max_tokens
        )
        tokens = self.tokens[row, slots].tolist()
        response = [*question.beginning, *tokens]
        reason: FinishReason = "stop"
        stop: str | None
        # A token may be EOS, or the last one allowed, and complete a stop string: then the stop string is the reason.
        if self._stops.candidates[tokens[-1]] and (found := self._stops.find(response, min_tokens=params.min_tokens)):
            text, stop = found
        elif self._is_eos[tokens[-1]]:
            text, stop = response_text(self._stops.tokenizer, response), "eos"
        elif count == params.max_tokens:
            text, reason, stop = response_text(self._stops.tokenizer, response), "length", None
        else:
            return None
        self.alive[row], self.questions[row] = False, None
        return Completion(
            request_index=question.request_index,
            sample_index=int(self.sample[row]),
            text=text,
            prompt_ids=tuple(question.prompt_ids),
            token_ids=tuple(tokens),
            logprobs=tuple(self.logprobs[row, slots].tolist()),
            num_prompt_tokens=len(question.prompt_ids),
            num_tokens=count,
            finish_reason=reason,
            stop_reason=stop,
            mean_entropy=float(self.entropy[row, slots].sum(dtype=np.float64)) / count,
        )

    def _shrink_window(self) -> None:
        """Begin the window at the first column in use: of all rows or, if that saves enough, of each block of rows."""
        if not self._changed:
            return
        self._changed = False
        w = self.window
        first = np.where(self.alive[: w.rows], self.start[: w.rows], w.column)
        lows = np.minimum.reduceat(first, np.arange(0, w.rows, BLOCK)) if w.rows else np.array([w.column])
        w.low = int(lows.min())
        saved = (lows - w.low).mean() / (w.column + 1 - w.low)
        w.lows = tuple(lows.tolist()) if saved > _WORTH_BLOCKS else ()

    def _move_columns(self, room: int) -> None:
        """Move the columns in use to the beginning, but leave at least `room` columns before the next one."""
        self._shrink_window()
        w = self.window
        length = w.column - w.low
        target = max(0, room - length)
        assert target + length < self.columns, (room, length, self.columns)
        for tensor in (self.mask, *(t for layer in self.layers for t in (layer.keys, layer.values))):
            axis = tensor.dim() - 1 if tensor is self.mask else 2
            live = tensor[: w.rows].narrow(axis, w.low, length).clone()
            tensor[: w.rows].narrow(axis, target, length).copy_(live)
        self.mask[: w.rows, :, :, :target] = -torch.inf
        self.mask[: w.rows, :, :, target + length :] = 0
        self.start[: w.rows] += target - w.low
        w.column = target + length
        self._changed = True
