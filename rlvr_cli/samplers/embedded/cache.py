"""The rows of a batch on the device: the key-value cache, and the steps that read it.

Enters: prompts that have been prefilled, then every row's newest token. Leaves: the logits of the next one.

All rows write the key and value of their newest token into the same column, so a row with n tokens
occupies the n columns up to that one (a batch padded on the left); of one that was parked and went on they are in another order, and
have gaps. A step then needs one slice copy per layer and one slice of a mask that rarely changes. When the columns run out, those in
use move back to the beginning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from rlvr_cli.models.compute.device import to_device
from rlvr_cli.models.policy import Policy
from rlvr_cli.samplers.embedded.cuda_graphs import FixedShapeStep
from rlvr_cli.samplers.embedded.decode_step import BLOCK, DecodeStep, Window
from rlvr_cli.samplers.embedded.prefill import Prefix, extension, prefill
from rlvr_cli.samplers.embedded.shared import Readers, SharedPrefix

_WORTH_BLOCKS = 0.1  # the least share of columns that reading blocks of rows separately must save

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


class RowCache:
    """The keys and values of rows that are sampled together, and their newest tokens.

    The last token of a prompt is not prefilled: it is a row's first input, so that every token is drawn in a step.

    Attributes:
        alive: (rows,) bool, which rows are in use.
        parked: (rows,) bool, which rows keep what they have until they go on, see `park`; the others are free.
        inputs, positions: (rows, 1), of every row's newest token, which the next step reads.
    """

    def __init__(
        self, policy: Policy, workspace: Workspace, *, rows: int | None = None, columns: int | None = None
    ) -> None:
        """Create free rows.

        Args:
            workspace: nothing else uses it meanwhile.
            rows, columns: the part of it to use; by default all. What is computed does not depend on the rest.
        """
        rows, self.columns = rows or workspace.rows, columns or workspace.columns
        self._policy, self._step, self._fixed_step = policy, workspace.step, workspace.fixed_step
        self.window = _Window()
        self.slots = [
            (keys[:rows, :, : self.columns], values[:rows, :, : self.columns]) for keys, values in workspace.slots
        ]
        self._cache = Cache(layers=[_SlotLayer(self.window, *pair) for pair in self.slots])
        self._mask = workspace.mask[:rows, :, :, : self.columns].fill_(-torch.inf)
        self.inputs = workspace.inputs[:rows].zero_()
        self.positions = workspace.positions[:rows].zero_()
        self.alive = np.zeros(rows, dtype=bool)
        self.parked = np.zeros(rows, dtype=bool)
        self._start = np.zeros(rows, dtype=np.int64)  # the row's first column
        self._end = np.zeros(rows, dtype=np.int64)  # the column behind its last one, of a parked row
        self._unread = np.zeros(rows, dtype=bool)  # parked rows whose newest token the next step reads
        self._gaps = np.zeros(rows, dtype=np.int64)  # columns between those that are hidden from the row
        self._changed = False  # whether the rows or columns in use may have changed
        self._shared: list[SharedPrefix | None] = [None] * rows  # what each row begins with
        self._readers: Readers | None = None  # None: no row has one
        self._regroup = False  # whether the readers may have changed
        # Of what prompts begin with, see `prefill`.
        self._common: dict[tuple[int, ...], Prefix] = {
            (): [(keys[0, :, :0], values[0, :, :0]) for keys, values in self.slots]
        }

    @property
    def recording_failure(self) -> str:
        """Why a step could not be recorded as a CUDA graph, and runs without; empty if all could that should."""
        return "" if self._fixed_step is None else self._fixed_step.failure

    @property
    def used(self) -> np.ndarray:
        """(rows,) bool, which rows are not free."""
        return self.alive | self.parked

    @property
    def free(self) -> int:
        """How many rows are free."""
        return int((~self.used).sum())

    def on_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self.inputs.device)

    @property
    def shared_bytes(self) -> int:
        """The bytes of the prefixes that rows share."""
        return sum(block.nbytes for block in {shared.block for shared in self._shared if shared is not None})

    def prefill(self, prompts: Sequence[list[int]], *, common: tuple[int, ...] = ()) -> list[Prefix]:
        """Compute the keys and values of prompts.

        Args:
            common: what they begin with, which is computed in the first call that has it. Without a step the model computes each
                prompt whole.
        """
        if self._step is None:
            return prefill(self._policy, prompts) if any(prompts) else [self._common[()] for _ in prompts]
        if common not in self._common:
            (self._common[common],) = self._step.prefill([common], after=self._common[()])
        known, rest = self._common[common], [prompt[len(common) :] for prompt in prompts]
        return self._step.prefill(rest, after=known) if any(rest) else [known for _ in rest]

    def seat(self, prompt_ids: Sequence[int], prefix: Prefix | SharedPrefix, *, most: int) -> np.ndarray:
        """Give free rows the prompt, at most so many. Returns them. A shared prefix is not copied."""
        shared = isinstance(prefix, SharedPrefix)
        w, length = self.window, 0 if shared else len(prompt_ids) - 1
        if w.column < length or w.column == self.columns:
            self._move_columns(length)
        rows = np.flatnonzero(~self.used)[:most]
        together = rows[-1] - rows[0] == len(rows) - 1  # contiguous, as at the start
        at = slice(rows[0], rows[-1] + 1) if together else self.on_device(rows)
        if shared:
            prefix.rows += rows.tolist()
            for row in rows:
                self._shared[row] = prefix
        else:
            for (all_keys, all_values), (keys, values) in zip(self.slots, prefix, strict=True):
                all_keys[at, :, w.column - length : w.column] = keys
                all_values[at, :, w.column - length : w.column] = values
        self._mask[at] = -torch.inf
        self._mask[at, :, :, w.column - length :] = 0
        self.inputs[at] = prompt_ids[-1]
        self.positions[at] = len(prompt_ids) - 1
        self.alive[rows], self._start[rows], self._gaps[rows] = True, w.column - length, 0
        w.rows = max(w.rows, int(rows[-1]) + 1)
        self._changed = self._regroup = True
        return rows

    def forward(self) -> torch.Tensor:
        """Feed every row its newest token; return the logits of the next one, (rows, vocab) float32."""
        w = self.window
        if w.column == self.columns:
            self._move_columns(0)
        self._shrink_window()
        self._group_readers()
        inputs, positions = self.inputs[: w.rows], self.positions[: w.rows]
        mask = self._mask[: w.rows, :, :, w.low : w.column + 1]
        window = Window(w.rows, w.low, w.column + 1, w.lows)
        if self._fixed_step is not None:
            logits = self._fixed_step(window, rows=len(self.alive), columns=self.columns)
        elif self._step is not None:
            seen = {"mask": mask, "cache": self.slots, "window": window, "readers": self._readers}
            logits = self._step(inputs[:, 0], positions[:, 0], **seen)
        else:
            out = self._policy.forward(
                input_ids=inputs,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=self._cache,
                use_cache=True,
            )
            logits = out.logits[:, -1].float()
        w.column += 1
        self._end[self._unread] = w.column
        self._unread[:] = False
        return logits

    def feed(self, tokens: torch.Tensor) -> None:
        """Take the token that was drawn for each row of the window as its newest one."""
        rows = self.window.rows
        self.inputs[:rows, 0] = tokens
        self.positions[:rows] += 1

    def release(self, rows: Sequence[int]) -> None:
        """Free rows."""
        self.alive[rows] = self.parked[rows] = self._unread[rows] = False
        for row in rows:
            if (shared := self._shared[row]) is not None:
                shared.rows.remove(int(row))
                self._shared[row], self._regroup = None, True
        used = self.window.rows
        self.positions[:used][self.on_device(~(self.alive | self._unread)[:used])] = 0
        self._changed = True

    def park(self, rows: Sequence[int]) -> None:
        """End rows, but keep the keys and values of all their tokens: those of the newest one from the next step on, which reads it."""
        self.alive[rows], self.parked[rows], self._unread[rows] = False, True, True
        self._end[rows] = self.window.column

    def take_out(self, row: int) -> Prefix:
        """Free a parked row; return the keys and values of its tokens."""
        seen = self.on_device(np.arange(self.columns) < self._end[row]) & (self._mask[row, 0, 0] == 0)
        at = seen.nonzero()[:, 0]
        self.release([row])
        return [(keys[row].index_select(1, at), values[row].index_select(1, at)) for keys, values in self.slots]

    def put_back(self, prefix: Prefix) -> int:
        """Park what was taken out in a free row, and return it."""
        (row,) = self.seat([0] * (prefix[0][0].shape[1] + 1), prefix, most=1)
        self.alive[row], self.parked[row], self._end[row] = False, True, self.window.column
        return int(row)

    def known(self, row: int) -> int:
        """How many tokens of a parked row have been read."""
        return int(self._end[row] - self._start[row] - self._gaps[row])

    def lacks_step(self, row: int) -> bool:
        """Whether the next step reads a parked row's newest token."""
        return bool(self._unread[row])

    def fits(self, row: int, tokens: int) -> bool:
        """Whether a parked row can go on with so many tokens more."""
        return bool(self.window.column - self._start[row] + tokens < self.columns)

    def resume(self, rows: np.ndarray, prompts: Sequence[Sequence[int]]) -> None:
        """Go on in parked rows, whose tokens the prompts begin with: of the rest, keys and values are computed in one pass.

        Only with a step. The last token of each prompt is its row's next input; where the others go, see `prefill.extension`. What is
        left of the columns since a row ended stays hidden from it.
        """
        assert self._step is not None, "the model itself goes on in no row"
        self._shrink_window()
        w, lengths = self.window, np.array([*map(len, prompts)])
        known = np.array([self.known(row) for row in rows])
        self._end[rows] -= known == lengths  # nothing follows the newest token: it is read again, to draw the next one
        known = np.minimum(known, lengths - 1)
        news = [prompt[n:-1] for prompt, n in zip(prompts, known, strict=True)]
        spare = w.column - self._end[rows] - [*map(len, news)]  # negative: as many go before its first one
        lacking = w.low - int((self._start[rows] + spare.clip(max=0)).min())
        if lacking > w.low:
            self._move_columns(w.column - w.low + lacking)
        if any(news) or spare.any():  # else each row sees what it saw
            where = {"start": self._start[rows], "end": self._end[rows], "column": w.column}
            new = extension(news, rows=rows, known=known, mask=self._mask, **where)
            if any(news):
                self._step.extend(new, cache=self.slots)
            self._mask[new.rows, 0, 0, new.seen] = new.later
        at = self.on_device(rows)
        self.inputs[at, 0] = self.on_device(np.array([prompt[-1] for prompt in prompts]))
        self.positions[at, 0] = self.on_device(lengths - 1)
        self._gaps[rows] += spare.clip(0)
        self._start[rows] += spare.clip(max=0)
        self.alive[rows], self.parked[rows], self._unread[rows] = True, False, False
        w.rows = max(w.rows, int(rows.max()) + 1)
        self._changed = True

    def compact(self) -> tuple[np.ndarray, np.ndarray]:
        """Move the last rows that are used into the free rows before them, so that a step computes none of these.

        Returns:
            The rows to which some were moved, and those where they were.
        """
        self._shrink_window()
        used = int(self.used.sum())
        holes = np.flatnonzero(~self.used[:used])
        movers = np.flatnonzero(self.used[used:]) + used
        w = self.window
        if len(holes):
            to, of = self.on_device(holes), self.on_device(movers)
            for pair in self.slots:
                for slots in pair:
                    slots[:, :, w.low : w.column][to] = slots[:, :, w.low : w.column][of]
            for tensor in (self._mask, self.inputs, self.positions):
                tensor[to] = tensor[of]
            for array in (self._start, self._end, self._gaps, self.alive, self.parked, self._unread):
                array[holes] = array[movers]
            self.alive[movers] = self.parked[movers] = self._unread[movers] = False
            for hole, mover in zip(holes.tolist(), movers.tolist(), strict=True):
                if (shared := self._shared[mover]) is not None:
                    shared.rows[shared.rows.index(mover)] = hole
                self._shared[hole], self._shared[mover] = shared, None
        w.rows = used
        self._changed = self._regroup = True
        return holes, movers

    def _shrink_window(self) -> None:
        """Begin the window at the first column in use: of all rows or, if that saves enough, of each block of rows."""
        if not self._changed:
            return
        self._changed = False
        w = self.window
        first = np.where(self.used[: w.rows], self._start[: w.rows], w.column)
        lows = np.minimum.reduceat(first, np.arange(0, w.rows, BLOCK)) if w.rows else np.array([w.column])
        w.low = int(lows.min())
        saved = (lows - w.low).mean() / (w.column + 1 - w.low)
        w.lows = tuple(lows.tolist()) if saved > _WORTH_BLOCKS else ()

    def _group_readers(self) -> None:
        """Group the rows by what they begin with."""
        if not self._regroup:
            return
        self._regroup, self._readers = False, None
        those = self._shared[: self.window.rows]
        if any(shared is not None for shared in those):
            assert self._step is not None, "the model itself reads no shared prefixes"
            kv_heads, device = self.slots[0][0].shape[1], self.inputs.device
            self._readers = Readers(those, heads=self._step.heads, kv_heads=kv_heads, device=device)

    def _move_columns(self, room: int) -> None:
        """Move the columns in use to the beginning, but leave at least `room` columns before the next one."""
        self._shrink_window()
        w = self.window
        length = w.column - w.low
        target = max(0, room - length)
        assert target + length < self.columns, (room, length, self.columns)
        for tensor in (self._mask, *(t for pair in self.slots for t in pair)):
            axis = tensor.dim() - 1 if tensor is self._mask else 2
            live = tensor[: w.rows].narrow(axis, w.low, length).clone()
            tensor[: w.rows].narrow(axis, target, length).copy_(live)
        self._mask[: w.rows, :, :, :target] = -torch.inf
        self._mask[: w.rows, :, :, target + length :] = 0
        for array in (self._start, self._end):
            array[: w.rows] += target - w.low
        w.column = target + length
        self._changed = True
