"""The embedded engine: requests -> completions, on any decoder-only `transformers` model with ordinary attention.

Continuous batching over a preallocated key-value cache. Each prompt is run through the model once, whatever the number
of its samples; rows that finish leave the batch and waiting ones take their place. A sample's tokens are a function of
the weights, its prompt and its seed alone: every draw is a pure function of (seed, position), so neither the other rows
of the batch nor their number or order matter, up to the rounding of the matrix products.

How rows lie in the cache: all rows write the key and value of their newest token into the same column, so a row that
has n tokens lies in the n columns up to that one (a batch padded on the left). A step is then one slice copy per layer
and one slice of a mask that hardly ever changes. When the columns are used up the live ones move back to the beginning.

What takes the steps is `stepping.Step` where it knows the model, checked against it at the start, on a CUDA device in the
recorded graphs of `graphs`; else the model itself, and `notes` says why.
"""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlvr_cli.errors import RlvrError
from rlvr_cli.records import Completion, FinishReason, Request, SamplingParams
from rlvr_cli.samplers.drawing import draw_tokens, uniforms
from rlvr_cli.samplers.graphs import FixedStep
from rlvr_cli.samplers.probe import Probe, evaluating, probe_params, probe_prompts, prove, take_probe
from rlvr_cli.samplers.stepping import BLOCK, Step, Window, attend, obstacle
from rlvr_cli.samplers.stopping import StopStrings, eos_token_ids, prompt_token_ids, response_text

logger = logging.getLogger(__name__)

_MAX_ROWS = 256  # more rows hardly raise the rate: what a step costs beyond its arithmetic is spread thin by then
_PREFILL_TOKENS = 4096  # prompt tokens per prefill, padding included
_GATHER_SECONDS = 0.03  # how long a completion waits for others before it is handed out
_COMPACT_BELOW = 0.8  # share of live rows under which moving rows costs less than computing dead ones
_WORTH_BLOCKS = 0.1  # share of the columns that reading in blocks of rows has to save
_ATTENTION = "rlvr_decode"
_PROBE_PROMPTS, _PROBE_LENGTH, _PROBE_TOKENS = 2, 8, 4  # few: it is done after every update


@dataclass(slots=True)
class _Window:
    """The part of the cache that a step reads: rows [0, rows), columns [low, column], of which it writes the last."""

    rows: int = 0
    low: int = 0
    column: int = 0
    lows: tuple[int, ...] = ()  # see `stepping.Window`


class _SlotLayer(CacheLayerMixin):
    """One layer's keys and values, (rows, key-value heads, columns, head size); `window` tells what is in use."""

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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for a prefill (causal, no mask) and for a step (one query per row, additive mask)."""
    rows, heads, length, size = query.shape
    if length > 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    out = attend(query[:, :, 0], key, value, attention_mask, scaling=scaling or size**-0.5)
    return out.view(rows, 1, heads, size), None


AttentionInterface.register(_ATTENTION, _attend)


# Per layer the keys and values of a prompt but its last token, (key-value heads, tokens, head size).
_Prefix = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class _Question:
    """A request under way: its prompt, and those of its samples that have no seat in the batch yet."""

    request_index: int
    prompt_ids: list[int]
    samples: deque[tuple[int, int]]  # (sample index, seed)
    prefix: _Prefix | None = None  # once the prompt was run through the model


class _Batch:
    """Rows that are sampled together. Host arrays have one entry per row; a row that is not `alive` is a free seat.

    The last prompt token is not part of the prefill but a row's first input, so every draw comes from a step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        like: _Prefix,
        *,
        rows: int,
        columns: int,
        params: SamplingParams,
        eos: Sequence[int],
        stops: StopStrings,
        step: Step | None = None,
        fixed: bool = False,
    ) -> None:
        """Allocate `rows` x `columns` slots per layer, in the shape of the keys and values in `like`.

        Args:
            step: what takes a step in the model's place.
            fixed: hold its shapes fixed, on a CUDA device in recorded graphs.
        """
        self._model, self._params, self._stops, self._step = model, params, stops, step
        device = model.device
        self.window = _Window()
        # Zeros, since a masked column still enters the weighted sum, with weight 0, and 0 x NaN is NaN.
        self.layers = [
            _SlotLayer(self.window, *(t.new_zeros(rows, t.shape[0], columns, t.shape[-1], device=device) for t in pair))
            for pair in like
        ]
        self.cache = Cache(layers=list(self.layers))
        self.columns = columns
        self.mask = torch.full((rows, 1, 1, columns), -torch.inf, dtype=like[0][0].dtype, device=device)
        self.inputs = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._slots = [(layer.keys, layer.values) for layer in self.layers]
        self._fixed_step = None
        if step is not None and fixed:
            still = {"tokens": self.inputs, "positions": self.positions, "mask": self.mask, "cache": self._slots}
            self._fixed_step = FixedStep(step, **still)
        self.eos = torch.tensor(eos, dtype=torch.int64, device=device)
        self._is_eos = np.zeros(len(stops.candidates), dtype=bool)
        self._is_eos[list(eos)] = True
        self._may_end = self._is_eos | stops.candidates

        self.alive = np.zeros(rows, dtype=bool)
        self.questions: list[_Question | None] = [None] * rows
        self.sample = np.zeros(rows, dtype=np.int64)
        self.seed = np.zeros(rows, dtype=np.int64)
        self.start = np.zeros(rows, dtype=np.int64)  # the row's first column
        self.born = np.zeros(rows, dtype=np.int64)  # the step that drew its first token
        self.step = 0
        # What was drawn in step s stands in column s modulo max_tokens: no row is older than that.
        self.tokens = np.zeros((rows, params.max_tokens), dtype=np.int64)
        self.logprobs = np.zeros((rows, params.max_tokens), dtype=np.float32)
        self.entropy = np.zeros((rows, params.max_tokens), dtype=np.float32)

    @property
    def free(self) -> int:
        return len(self.alive) - int(self.alive.sum())

    def seat(self, question: _Question) -> None:
        """Give free rows to the question's samples, as many as there are of both."""
        w, length = self.window, len(question.prompt_ids) - 1
        rows = np.flatnonzero(~self.alive)[: len(question.samples)]
        assert question.prefix is not None
        assert w.column >= length, (w.column, length)
        at = torch.as_tensor(rows, device=self.inputs.device)
        for layer, (keys, values) in zip(self.layers, question.prefix, strict=True):
            layer.keys[at, :, w.column - length : w.column] = keys
            layer.values[at, :, w.column - length : w.column] = values
        self.mask[at] = -torch.inf
        self.mask[at, :, :, w.column - length :] = 0
        self.inputs[at] = question.prompt_ids[-1]
        self.positions[at] = length
        self.alive[rows], self.born[rows], self.start[rows] = True, self.step, w.column - length
        for row in rows:
            self.questions[row] = question
            self.sample[row], self.seed[row] = question.samples.popleft()
        w.rows = max(w.rows, int(rows[-1]) + 1)
        self._refit()

    def make_room(self, length: int) -> None:
        """Have `length` columns to the left of the next one to be written, for a prompt that is to be seated."""
        if self.window.column < length or self.window.column == self.columns:
            self._move(length)

    def forward(self) -> torch.Tensor:
        """Feed every row its newest token; the logits of the next, (rows, vocab) float32."""
        w = self.window
        if w.column == self.columns:
            self._move(0)
        inputs, positions = self.inputs[: w.rows], self.positions[: w.rows]
        mask = self.mask[: w.rows, :, :, w.low : w.column + 1]
        window = Window(w.rows, w.low, w.column + 1, w.lows)
        if self._fixed_step is not None:
            logits = self._fixed_step(window)
        elif self._step is not None:
            logits = self._step(inputs[:, 0], positions[:, 0], mask=mask, cache=self._slots, window=window)
        else:
            out = self._model(
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
        """Draw one token for every row; the completions that it ended, whose rows are then free."""
        rows, params = self.window.rows, self._params
        logits = self.forward()
        age = self.step - self.born[:rows]
        u = torch.from_numpy(uniforms(self.seed[:rows], age)).to(logits.device)
        with torch.autocast(logits.device.type, enabled=False):  # drawing is float32 whatever the model ran in
            draw = draw_tokens(
                logits,
                u,
                temperature=params.temperature,
                top_p=params.top_p,
                barred=self._barred(age < params.min_tokens),
            )
        self.inputs[:rows, 0] = draw.tokens
        self.positions[:rows] += 1
        tokens = draw.tokens.cpu().numpy()
        entropy = draw.entropy.cpu().numpy()
        if not np.isfinite(entropy).all():
            raise RlvrError(
                f"The model's logits are not finite (token {int(age[~np.isfinite(entropy)][0])} of a response).",
                "Its weights have diverged, or overflow in this precision: lower the learning rate, or load the model "
                "in float32.",
            )
        slot = self.step % params.max_tokens
        self.tokens[:rows, slot] = tokens
        self.logprobs[:rows, slot] = draw.logprobs.cpu().numpy()
        self.entropy[:rows, slot] = entropy
        self.step += 1
        may_end = self.alive[:rows] & (self._may_end[tokens] | (age + 1 == params.max_tokens))
        completions = [c for row in np.flatnonzero(may_end) if (c := self._finish(int(row))) is not None]
        if completions:
            self.positions[:rows][torch.as_tensor(~self.alive[:rows], device=self.positions.device)] = 0
            self._refit()
        return completions

    def compact(self) -> None:
        """Move the last live rows into the free seats before them, so that a step computes live rows only."""
        live = int(self.alive.sum())
        holes = np.flatnonzero(~self.alive[:live])
        movers = np.flatnonzero(self.alive[live:]) + live
        w = self.window
        if len(holes):
            to, of = (torch.as_tensor(rows, device=self.inputs.device) for rows in (holes, movers))
            for layer in self.layers:
                for slots in (layer.keys, layer.values):
                    slots[:, :, w.low : w.column][to] = slots[:, :, w.low : w.column][of]
            for tensor in (self.mask, self.inputs, self.positions):
                tensor[to] = tensor[of]
            for array in (self.sample, self.seed, self.start, self.born, self.tokens, self.logprobs, self.entropy):
                array[holes] = array[movers]
            for hole, mover in zip(holes, movers, strict=True):
                self.questions[hole], self.questions[mover] = self.questions[mover], None
            self.alive[holes], self.alive[movers] = True, False
        w.rows = live
        self._refit()

    def _barred(self, young: np.ndarray) -> tuple[torch.Tensor, torch.Tensor] | None:
        """EOS is barred from responses that are shorter than `min_tokens`."""
        if not len(self.eos) or not young.any():
            return None
        return torch.as_tensor(np.flatnonzero(young), device=self.eos.device), self.eos

    def _finish(self, row: int) -> Completion | None:
        """The completion of a row that its newest token ended; None when it goes on after all."""
        params, question = self._params, self.questions[row]
        assert question is not None
        count = self.step - int(self.born[row])
        slots = np.arange(int(self.born[row]), self.step) % params.max_tokens
        tokens = self.tokens[row, slots].tolist()
        reason: FinishReason = "stop"
        stop: str | None
        # A token may be EOS, or the last one allowed, and complete a stop string: then the stop string is the reason.
        if self._stops.candidates[tokens[-1]] and (found := self._stops.find(tokens, min_tokens=params.min_tokens)):
            text, stop = found
        elif self._is_eos[tokens[-1]]:
            text, stop = response_text(self._stops.tokenizer, tokens), "eos"
        elif count == params.max_tokens:
            text, reason, stop = response_text(self._stops.tokenizer, tokens), "length", None
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
            mean_entropy=float(self.entropy[row, slots].mean(dtype=np.float64)),
        )

    def _refit(self) -> None:
        """Read no column left of the first live one, of all rows or, where it is worth it, of each block of rows."""
        w = self.window
        first = np.where(self.alive[: w.rows], self.start[: w.rows], w.column)
        lows = np.minimum.reduceat(first, np.arange(0, w.rows, BLOCK)) if w.rows else np.array([w.column])
        w.low = int(lows.min())
        saved = (lows - w.low).mean() / (w.column + 1 - w.low)
        w.lows = tuple(lows.tolist()) if saved > _WORTH_BLOCKS else ()

    def _move(self, room: int) -> None:
        """Move the live columns to the beginning, or as far from it as leaves `room` columns before the next one."""
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
        self._refit()


class TransformersSampler:
    """Samples in this process, from the very weights that are trained: there is nothing to copy.

    While completions are being consumed the model may be used for other things (its mode and its attention are put back
    before each of them is handed out), but its weights must not change. Between calls nothing is kept that comes from
    weights or prompts, only tables of the tokenizer.

    Attributes:
        notes: what makes sampling from this model slower than from others, one sentence each.
    """

    engine: Literal["transformers"] = "transformers"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_batch_size: int | None = None,
        kv_memory_bytes: int | None = None,
        autocast_dtype: torch.dtype | None = None,
        cuda_graphs: bool = True,
        policy_version: int = 0,
    ) -> None:
        """Check on a few tokens that the model gives the same logits through the engine's cache as without it.

        Args:
            model: on the device to sample on. It is shared, not copied.
            max_batch_size: samples in the batch at once; by default 256. Fewer when the memory holds no more.
            kv_memory_bytes: what keys, values and logits of a batch may take; by default a quarter of the memory that
                this process may use (CPU), or half of what is free (CUDA) when `sample` is called.
            autocast_dtype: run the model under `torch.autocast` in this precision, as its training does.
            cuda_graphs: on CUDA, take steps in fixed shapes, each recorded once and replayed (`graphs.py`).

        Raises:
            RlvrError: the model is of a kind that this engine cannot run.
        """
        assert max_batch_size is None or max_batch_size > 0, max_batch_size
        self.policy_version = policy_version
        self._model, self._tokenizer = model, tokenizer
        self._max_rows = max_batch_size or _MAX_ROWS
        self._kv_memory_bytes = kv_memory_bytes
        self._autocast_dtype = autocast_dtype
        self._eos = eos_token_ids(model, tokenizer)
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._doubt = ""  # why it is not known which weights the model has
        self._last_probe: Probe | None = None
        self._distrust = ""  # why a step must not be taken in the model's place
        self._fixed = cuda_graphs and model.device.type == "cuda"  # whether steps are taken in fixed shapes
        self.notes: tuple[str, ...] = ()
        self._vocab_size, self._like = self._check()

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Generator[Completion]:
        """Answer every seed of every request; completions come in the order in which they finish.

        A consumer may stop early: closing the iterator gives its memory back.

        Raises:
            RlvrError: before anything is sampled, a prompt that is empty or that leaves no room in the model's context
                for `max_tokens` more, or weights that a failed `load_weights` left in doubt; while sampling, logits that
                are not finite.
        """
        assert params.max_tokens > 0, params
        if params.min_tokens > params.max_tokens:
            raise RlvrError(
                f"At least {params.min_tokens} tokens are asked for, and at most {params.max_tokens}.",
                "Make --sampling-min-tokens at most --sampling-max-tokens.",
            )
        if self._doubt:
            raise RlvrError(f"The engine's weights are in doubt: {self._doubt}", "Load weights again, or start anew.")
        prompts = prompt_token_ids(self._tokenizer, [request.prompt for request in requests])
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        for index, ids in enumerate(prompts):
            if limit is not None and len(ids) + params.max_tokens > limit:
                raise RlvrError(
                    f"Question {requests[index].name or index}: its prompt has {len(ids)} tokens and up to {params.max_tokens} are to be "
                    f"sampled, but the model's context holds {limit}.",
                    f"Set --sampling-max-tokens to at most {limit - len(ids)}, or leave the question out."
                    if len(ids) < limit
                    else "Leave the question out, or take a model with a longer context.",
                )
        questions = [
            _Question(index, ids, deque(enumerate(request.seeds)))
            for index, (request, ids) in enumerate(zip(requests, prompts, strict=True))
            if request.seeds
        ]
        # Longest first: neighbours need about as many columns, and the cache is at once as wide as it will have to be.
        questions.sort(key=lambda question: -len(question.prompt_ids))
        return self._stream(deque(questions), params, eos=self._eos, stops=self._stop_strings(params.stop))

    def load_weights(self, model: PreTrainedModel, policy_version: int) -> None:
        """Sample from `model`'s weights from now on, and prove it: see `probe.prove`.

        They are shared if it is the model given at the start, else copied.

        Raises:
            RlvrError: the weights do not fit the engine's model, or the engine does not serve them.
        """
        if model is not self._model:
            self._doubt = "loading them failed half-way."
            try:
                self._model.load_state_dict(model.state_dict())
            except RuntimeError as e:
                first_lines = " ".join(line.strip() for line in str(e).splitlines()[:2])
                raise RlvrError(
                    f"These weights do not fit the engine's model: {first_lines}",
                    "The policy must have the architecture that the engine was started with.",
                ) from e
        self._doubt = "the engine does not serve those that it was given."
        prompts = probe_prompts(model, self._tokenizer, count=_PROBE_PROMPTS, length=_PROBE_LENGTH)
        questions = deque(_Question(i, ids, deque([(0, 0)])) for i, ids in enumerate(prompts))
        answers = self._stream(questions, probe_params(_PROBE_TOKENS), eos=(), stops=self._stop_strings(()))
        probe = take_probe(model, answers, autocast_dtype=self._autocast_dtype)
        dtypes = self._autocast_dtype or self._model.dtype, self._autocast_dtype or model.dtype
        prove(
            probe,
            self._last_probe,
            precisions=[str(dtype).removeprefix("torch.") for dtype in dtypes],
            version=policy_version,
            served=self.policy_version,
            way_out="Something holds old weights, or changes the model when it reads one token at a time: a hook, a patch, "
            "a cache of its own. Remove it, or use --engine vllm.",
        )
        self._last_probe, self._doubt, self.policy_version = probe, "", policy_version

    def sleep(self) -> None:
        """Nothing to give back: a cache lasts no longer than its call of `sample`, and the weights are the trainer's."""

    def close(self) -> None:
        """Nothing outlives a call of `sample` but the model, which is the caller's."""

    def _stop_strings(self, stop: tuple[str, ...]) -> StopStrings:
        if stop not in self._stops:
            self._stops[stop] = StopStrings(self._tokenizer, stop, vocab_size=self._vocab_size)
        return self._stops[stop]

    def _stream(
        self, waiting: deque[_Question], params: SamplingParams, *, eos: Sequence[int], stops: StopStrings
    ) -> Generator[Completion]:
        version = self.policy_version
        while waiting:
            rows, columns, upcoming = self._plan(waiting, params)
            ready: deque[_Question] = deque()
            with self._sampling():
                batch = _Batch(
                    self._model,
                    self._like,
                    rows=rows,
                    columns=columns,
                    params=params,
                    eos=eos,
                    stops=stops,
                    step=self._step(columns),
                    fixed=self._fixed,
                )
            while upcoming or ready or batch.alive.any():
                done: list[Completion] = []
                due = math.inf
                with self._sampling():
                    while time.monotonic() < due and (upcoming or ready or batch.alive.any()):
                        self._admit(batch, ready, upcoming)
                        done += batch.advance()
                        if (
                            done and due == math.inf
                        ):  # those that finish at almost the same time are handed out together
                            due = time.monotonic() + _GATHER_SECONDS
                yield from done
                assert self.policy_version == version, "the weights changed while completions were being consumed"
            del batch  # its memory, before the next one is planned

    def _plan(self, waiting: deque[_Question], params: SamplingParams) -> tuple[int, int, deque[_Question]]:
        """Rows and columns of the next batch's cache, and the questions that it is for, which leave `waiting`.

        The longest question sets the columns. It sets them for all, unless they are so many that memory limits the
        rows: then questions that need less than half of it wait for a narrower cache with more rows.
        """
        longest = len(waiting[0].prompt_ids) + params.max_tokens
        columns = longest + max(16, longest // 8)  # to spare, so that moving back to the beginning is rare
        columns += -columns % 8  # CUDA kernels want masks aligned
        cache = sum(t.shape[0] * t.shape[2] * t.element_size() for pair in self._like for t in pair)
        row_bytes = columns * cache + 5 * 4 * self._vocab_size  # logits and what drawing from them needs
        budget = self._kv_memory_bytes or _memory_budget(self._model.device)
        affordable = budget // row_bytes
        if affordable == 0:
            raise RlvrError(
                f"One sample of question {waiting[0].request_index} may take {row_bytes / 2**20:.0f} MiB of memory "
                f"({longest} tokens), but only {budget / 2**20:.0f} MiB are set aside for sampling.",
                "Lower --sampling-max-tokens, free memory, or use --engine vllm.",
            )
        samples = sum(len(question.samples) for question in waiting)
        limited = affordable < min(self._max_rows, samples)
        upcoming: deque[_Question] = deque()
        while waiting and (not limited or 2 * (len(waiting[0].prompt_ids) + params.max_tokens) >= longest):
            upcoming.append(waiting.popleft())
        samples = sum(len(question.samples) for question in upcoming)
        return min(self._max_rows, affordable, samples), columns, upcoming

    def _admit(self, batch: _Batch, ready: deque[_Question], upcoming: deque[_Question]) -> None:
        """Once a fifth of the seats is free, give them to waiting samples; without any, draw the live rows together."""
        live = len(batch.alive) - batch.free
        if live <= _COMPACT_BELOW * len(batch.alive):
            while batch.free and (ready or upcoming):
                if not ready:
                    ready.extend(self._prefill(upcoming, batch.free))
                question = ready[0]
                batch.make_room(len(question.prompt_ids) - 1)
                batch.seat(question)
                if not question.samples:
                    question.prefix = None
                    ready.popleft()
        if len(batch.alive) - batch.free < _COMPACT_BELOW * batch.window.rows:
            batch.compact()

    def _prefill(self, upcoming: deque[_Question], free: int) -> list[_Question]:
        """Run the next questions, enough for `free` rows or for one pass, through the model together.

        They are padded on the right, which causal attention needs no mask for.
        """
        questions = [upcoming.popleft()]
        length = len(questions[0].prompt_ids) - 1  # the longest, since they are sorted
        while upcoming and sum(len(q.samples) for q in questions) < free:
            if (len(questions) + 1) * length > _PREFILL_TOKENS:
                break
            questions.append(upcoming.popleft())
        prefixes = self._prefixes([question.prompt_ids[:-1] for question in questions])
        for question, prefix in zip(questions, prefixes, strict=True):
            question.prefix = prefix
        return questions

    def _prefixes(self, prompts: list[list[int]]) -> list[_Prefix]:
        """The keys and values of each prompt."""
        length = max(map(len, prompts))
        if length == 0:
            return [self._like for _ in prompts]
        cache = DynamicCache(config=self._model.config)
        ids = torch.tensor([[*prompt, *[0] * (length - len(prompt))] for prompt in prompts], device=self._model.device)
        self._model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
        dtype = self._autocast_dtype or self._model.dtype
        states: list[tuple[torch.Tensor, torch.Tensor]] = [(keys, values) for keys, values, *_ in cache]  # type: ignore
        pairs = [(keys.to(dtype), values.to(dtype)) for keys, values in states]
        return [
            [(keys[row, :, : len(prompt)], values[row, :, : len(prompt)]) for keys, values in pairs]
            for row, prompt in enumerate(prompts)
        ]

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """The model as sampling needs it: no gradients, no dropout, this engine's attention; all is put back after."""
        model = self._model
        attention = model.config._attn_implementation or "eager"
        autocast = torch.autocast(model.device.type, self._autocast_dtype, enabled=self._autocast_dtype is not None)
        model.set_attn_implementation(_ATTENTION)
        try:
            with evaluating(model), torch.inference_mode(), autocast:
                yield
        finally:
            model.set_attn_implementation(attention)

    def _step(self, columns: int) -> Step | None:
        """What takes a batch's steps in the model's place; None, and a note, when the model has to take them itself."""
        reason = self._distrust or obstacle(self._model)
        dtype = self._autocast_dtype or self._model.dtype
        copies = self._model.num_parameters() * dtype.itemsize if dtype != self._model.dtype else 0
        if not reason and copies > _memory_budget(self._model.device) // 2:
            reason = f"{copies / 2**30:.1f} GiB for its weights in {str(dtype).removeprefix('torch.')} leave too little memory"
        if not reason:
            return Step(self._model, dtype=dtype, positions=columns)
        self._note(f"Sampling is slower than it could be, since the model's own code takes each step: {reason}.")
        return None

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes += (note,)
            logger.warning(note)

    def _check(self) -> tuple[int, _Prefix]:
        """Compare two short prompts' logits through the cache with those of the plain model.

        Returns:
            The number of logits, and a prefix of no tokens in the shapes and types of the model's keys and values.

        Raises:
            RlvrError: they differ, or the model says that it keeps anything but ordinary keys and values.
        """
        name = type(self._model).__name__
        unsupported = RlvrError(
            f"The embedded engine cannot sample from {name}: it runs decoder-only models with ordinary attention (no "
            "encoder, sliding window, or recurrent state).",
            "Use --engine vllm.",
        )
        if not _is_supported(self._model):
            raise unsupported
        prompts = [[3, 1, 4, 1, 5, 9], [2, 7, 1]]
        with self._sampling():
            if self._model.config._attn_implementation != _ATTENTION:
                raise unsupported
            device = self._model.device
            plain = torch.stack(
                [
                    self._model(input_ids=torch.tensor([prompt], device=device)).logits[0, -1].float()
                    for prompt in prompts
                ]
            )
            prefixes = self._prefixes([prompt[:-1] for prompt in prompts])
            like = [(keys[:, :0].clone(), values[:, :0].clone()) for keys, values in prefixes[0]]
            stops = StopStrings(self._tokenizer, (), vocab_size=plain.shape[1])

            def gap(step: Step | None, *, fixed: bool = False) -> float:
                """The largest difference from the plain logits, as a share of the largest of these."""
                options: dict[str, Any] = {"params": SamplingParams(), "eos": (), "stops": stops}
                batch = _Batch(self._model, like, rows=2, columns=8, step=step, fixed=fixed, **options)
                for layer in batch.layers:  # what a mask that is not heeded would show
                    layer.keys.fill_(1.0)
                    layer.values.fill_(1.0)
                for index, (prompt, prefix) in enumerate(zip(prompts, prefixes, strict=True)):
                    batch.make_room(len(prompt) - 1)
                    batch.seat(_Question(index, prompt, deque([(0, 0)]), prefix))
                return float((batch.forward() - plain).abs().max() / plain.abs().max())

            exact = self._model.dtype.itemsize >= 4 and self._autocast_dtype is None
            if gap(None) > (1e-2 if exact else 1e-1):
                raise unsupported
            bound = 1e-4 if exact else 5e-2
            if (step := self._step(8)) is not None and gap(step) > bound:
                self._distrust = "the faster one gives other logits"
                step = self._step(8)
            if step is not None and self._fixed:
                try:
                    failure = "they give other logits" if gap(step, fixed=True) > bound else ""
                except RuntimeError as e:
                    failure = str(e).partition("\n")[0]
                if failure:
                    self._fixed = False
                    self._note(f"Sampling is slower than it could be, since CUDA graphs do not work here: {failure}.")
        return plain.shape[1], like


def _is_supported(model: PreTrainedModel) -> bool:
    """Whether the model declares ordinary causal attention in all its layers, with positions that can be given."""
    if model.config.is_encoder_decoder or not model.can_generate() or model.get_output_embeddings() is None:
        return False
    if not {"position_ids", "past_key_values"} <= set(signature(model.forward).parameters):
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


def _memory_budget(device: torch.device) -> int:
    """Bytes that a batch may take: half of what is free on a CUDA device, else a quarter of this process's memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)) // 2
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")  # a container's share, where there is one
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total // 4
