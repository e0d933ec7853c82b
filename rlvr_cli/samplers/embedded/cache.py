"""The rows of a batch on the device: the key-value cache, and the steps that read it.

Enters: prompts that have been prefilled, then every row's newest token. Leaves: the logits of the next one.

All rows write the key and value of their newest token into the same column, so a row with n tokens
occupies the n columns up to that one (a batch padded on the left); of one that was parked and went on they are in another order, and
have gaps. A step then needs one slice copy per layer and one slice of a mask that rarely changes. When the columns run out, those in
use move back to the beginning. On a CPU rows are read in blocks, each from the column where its longest row begins; they are ordered by length
now and then, so that a block has rows of about the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from rlvr_cli.models.compute.device import to_device
from rlvr_cli.models.policy import Policy
from rlvr_cli.samplers.embedded.cuda_graphs import FixedShapeStep
from rlvr_cli.samplers.embedded.decode_step import DecodeStep, Window
from rlvr_cli.samplers.embedded.prefill import Prefix, extension, prefill
from rlvr_cli.samplers.embedded.shared import Readers, SharedPrefix

_BLOCK = 32  # rows; blocks side by side may be read together
_BLOCK_BYTES = 2**18  # to read one more block of a layer takes as long as so many bytes of it
_ORDER_COST = 1  # to order the rows takes as long as the reading of so many steps

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
    blocks: tuple[tuple[int, int, int], ...] = ()  # see `decode_step.Window`


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
        self._needed = 0  # columns that a step reads of all rows if they are ordered, the longest first
        self._waste = self._wasted = 0  # those that it reads beyond these, and their sum since rows were ordered last
        keys, _ = self.slots[0]
        in_blocks = self._step is not None and self._fixed_step is None and keys.device.type == "cpu"
        # What another block costs in columns, see `_blocks`; None: steps read all rows as far as the longest one.
        self._block_columns = _BLOCK_BYTES // (2 * keys[0, :, 0].nbytes) if in_blocks else None
        self._changed = False  # whether the rows or columns in use may have changed
        self._freed = False  # whether rows were freed since the last step
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
        if self._freed:  # steps compute free rows too, and each moves them one position on: they begin at 0 again
            free = self.on_device(~(self.alive | self._unread)[: w.rows, None])
            self.positions[: w.rows].masked_fill_(free, 0)
            self._freed = False
        inputs, positions = self.inputs[: w.rows], self.positions[: w.rows]
        mask = self._mask[: w.rows, :, :, w.low : w.column + 1]
        window = Window(w.rows, w.low, w.column + 1, w.blocks)
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
        self._wasted += self._waste
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
        self._changed = self._freed = True

    def park(self, rows: Sequence[int]) -> None:
        """End rows, but keep the keys and values of all their tokens: those of the newest one from the next step on, which reads it."""
        self.alive[rows], self.parked[rows], self._unread[rows] = False, True, True
        self._end[rows] = self.window.column

    def take_out(self, row: int) -> Prefix:
        """Free a parked row; return the keys and values of its tokens."""
        own = slice(int(self._start[row]), int(self._end[row]))
        states = [(keys[row, :, own], values[row, :, own]) for keys, values in self.slots]
        if self._gaps[row]:
            seen = (self._mask[row, 0, 0, own] == 0).nonzero()[:, 0]
            taken = [(keys.index_select(1, seen), values.index_select(1, seen)) for keys, values in states]
        else:
            taken = [(keys.clone(), values.clone()) for keys, values in states]
        self.release([row])
        return taken

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

    @property
    def scattered(self) -> bool:
        """Whether steps have read more of short rows than these need, since rows were ordered last, than ordering them takes."""
        return self._wasted > _ORDER_COST * self._needed

    def arrange(self) -> tuple[np.ndarray, np.ndarray]:
        """Move rows so that a step computes no free ones: the last used ones into the free ones before them or, if rows are
        `scattered`, all that do not stand among rows of about their length.

        Returns:
            The places to which some were moved, and those where they were.
        """
        self._shrink_window()
        used = np.flatnonzero(self.used)
        to, of = np.flatnonzero(~self.used[: len(used)]), used[used >= len(used)]
        if self.scattered:
            to, of = _by_length(used, self._start[used])
            self._wasted = 0
        if len(to):
            self._move_rows(to, of)
            for array in (self.alive, self.parked, self._unread):
                array[len(used) :] = False
        if len(to) or self.window.rows != len(used):
            self.window.rows = len(used)
            self._changed = self._regroup = True
        return to, of

    def _move_rows(self, to: np.ndarray, of: np.ndarray) -> None:
        """Move rows to other places, all at once. Those that come to the same block are copied from where the first of them begins."""
        w = self.window
        blocks = np.split(np.arange(len(to)), np.flatnonzero(np.diff(to // _BLOCK)) + 1)
        moves = [(self.on_device(to[b]), self.on_device(of[b]), int(self._start[of[b]].min())) for b in blocks]
        for slots in (slots for pair in self.slots for slots in pair):
            moved = [slots[:, :, low : w.column].index_select(0, rows) for _, rows, low in moves]
            for (places, _, low), states in zip(moves, moved, strict=True):
                slots[:, :, low : w.column].index_copy_(0, places, states)
        places, rows = self.on_device(to), self.on_device(of)
        for tensor in (self._mask, self.inputs, self.positions):
            tensor[places] = tensor[rows]
        for array in (self._start, self._end, self._gaps, self.alive, self.parked, self._unread):
            array[to] = array[of]
        self._move_readers(dict(zip(of.tolist(), to.tolist(), strict=True)))

    def _move_readers(self, moved: Mapping[int, int]) -> None:
        """Rows are elsewhere now: old place -> new one."""
        reading = [(row, prefix) for row, prefix in enumerate(self._shared) if prefix is not None]
        self._shared: list[SharedPrefix | None] = [None] * len(self._shared)
        for row, prefix in reading:
            self._shared[moved.get(row, row)] = prefix
        for prefix in {prefix for _, prefix in reading}:
            prefix.rows = [moved.get(row, row) for row in prefix.rows]

    def _shrink_window(self) -> None:
        """Begin the window at the first column in use: of all rows or, where steps may read blocks of rows, of each block."""
        if not self._changed:
            return
        self._changed = False
        w = self.window
        used, start = self.used[: w.rows], self._start[: w.rows]
        first = np.where(used, start, w.column)
        w.low, w.blocks = int(first.min(initial=w.column)), ()
        if self._block_columns is not None:
            read, blocks = _blocks(first, w.column + 1, each=self._block_columns)
            w.blocks = blocks if len(blocks) > 1 else ()
            self._needed, _ = _blocks(np.sort(start[used]), w.column + 1, each=self._block_columns)
            self._waste = max(0, read - self._needed)  # below 0 if the longest rows are in a last block of few rows

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


def _blocks(first: np.ndarray, end: int, *, each: int) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """Divide rows into the blocks that are read fastest.

    Args:
        first: (rows,) the first column that each needs.
        end: the column behind the last one.
        each: what a block takes beside what is read, in columns of a row.

    Returns:
        What is read and what blocks take, in columns of a row, and the (first row, end, first column) of each block.
    """
    borders = [*range(0, len(first), _BLOCK), len(first)]
    lows = np.minimum.reduceat(first, borders[:-1]).tolist() if len(first) else []
    # Up to each border: what is read, where the last block begins, and its first column.
    best: list[tuple[int, int, int]] = [(0, 0, end)]
    for j in range(1, len(lows) + 1):
        low, ways = end, []
        for i in reversed(range(j)):
            low = min(low, lows[i])
            ways.append((best[i][0] + each + (borders[j] - borders[i]) * (end - low), i, low))
        best.append(min(ways))
    blocks, j = [], len(lows)
    while j:
        _, i, low = best[j]
        blocks.append((borders[i], borders[j], low))
        j = i
    return best[-1][0], (*reversed(blocks),)


def _by_length(rows: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return places and the rows that are to move there, so that each block of places has rows of similar length.

    The block after another has the next shorter rows, and the first block follows the last one. Of the blocks with which this may begin it is
    the one for which fewest rows move: where the longest rows end, short ones take their places, and all others may stay.

    Args:
        rows, start: the rows that are used, and the first column of each.
    """
    longest_first, places = rows[np.argsort(start, kind="stable")], np.arange(len(rows))
    orders = np.array([np.roll(longest_first, first) for first in range(0, len(rows) or 1, _BLOCK)])
    home = (orders // _BLOCK == places // _BLOCK) & (orders < len(rows))
    best = home.sum(1).argmax()
    return np.setdiff1d(places, orders[best][home[best]]), orders[best][~home[best]]
