"""How a batch goes through a model: cut into micro-batches, which the ranks divide.

Enters: a batch (`tokenization.Batch`) on the host. Leaves: its micro-batches, each with what the model needs on its device.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rlvr_cli.models.compute.device import to_device
from rlvr_cli.models.policy import Policy
from rlvr_cli.models.sharded import ShardedPolicy
from rlvr_cli.models.tokens.tokenization import Batch, row_lengths
from rlvr_cli.training.parallel.ranks import Ranks


class MicroBatch(NamedTuple):
    """Rows of a batch that go through the model together."""

    rows: Tensor  # (rows,) int64, of the batch
    width: int  # columns, as many as the longest row has
    learning: bool  # whether it needs a backward pass

    def of(self, batch: Batch) -> Batch:
        """Return these rows of the batch, without the columns in which all are padded."""
        return {name: tensor[self.rows, : self.width] for name, tensor in batch.items()}


def micro_batches(
    batch: Batch, size: int | None, *, tokens: int | None, together: bool, ranks: int = 1
) -> list[MicroBatch]:
    """Cut a batch into micro-batches; those that need a backward pass come first.

    A micro-batch has at most `size` rows or, if `tokens` is given, computes at most so many tokens: a prompt once with `together`,
    else all rows padded to the longest. Units are never split.
    They are sorted by their longest row, the longest first, so that a micro-batch too large for the device fails at once; units
    without a response token are left out.
    With `together`, units with the same prompt (that of their first row) are neighbors. If every row is `zero_advantage`, the first
    micro-batch still runs backward: its gradient of 0 lets AdamW's moments decay as usual.

    Args:
        ranks: that will divide them. Where tokens are counted, micro-batches are then as small as lets each rank go through as many
            as it has to, so that none waits for another's larger one.
    """
    mask = batch["response_mask"].bool()
    for name in ("zero_advantage", "unit"):
        assert name not in batch or batch[name].shape == (len(mask), 1), f"{name}: {tuple(batch[name].shape)}"
    lengths, starts = row_lengths(mask).tolist(), mask.int().argmax(dim=1).tolist()
    ids = batch["input_ids"].cpu().numpy()
    zero_advantage = batch["zero_advantage"].flatten().tolist() if "zero_advantage" in batch else [False] * len(lengths)
    prompt_of = [ids[row, : start + 1].tobytes() for row, start in enumerate(starts)]
    count: Callable[[], _Rows] = _Rows
    if tokens is not None:
        responses = [max(length - start - 1, 0) for length, start in zip(lengths, starts, strict=True)]
        count = partial(_Shared, responses, starts, prompt_of) if together else partial(_Padded, lengths)
    most = size if tokens is None else tokens
    assert most is not None, "rows or tokens of a micro-batch"

    units: dict[int, list[int]] = {}
    for row, unit in enumerate(batch["unit"].flatten().tolist() if "unit" in batch else range(len(lengths))):
        units.setdefault(unit, []).append(row)
    longest = {unit: max(lengths[row] for row in rows) for unit, rows in units.items()}
    by_length = sorted((unit for unit in units if longest[unit]), key=lambda unit: -longest[unit])
    cuts: list[tuple[list[int], bool]] = []
    for learning in (True, False):
        prompts: dict[bytes, list[list[int]]] = {}
        for rows in (units[unit] for unit in by_length):
            if all(zero_advantage[row] for row in rows) != learning:
                prompts.setdefault(prompt_of[rows[0]] if together else b"", []).append(rows)
        in_turn = [rows for of_prompt in prompts.values() for rows in of_prompt]
        found = _filled(in_turn, most, count)
        if tokens is not None and ranks > 1:
            found = _even(in_turn, most, count, number=math.ceil(len(found) / ranks) * ranks)
        cuts += [(cut, learning) for cut in found]
    return [
        MicroBatch(torch.tensor(rows, device=mask.device), max(lengths[row] for row in rows), learning or number == 0)
        for number, (rows, learning) in enumerate(cuts)
    ]


class _Rows:
    """How many rows a micro-batch has."""

    def __init__(self) -> None:
        self.rows = 0

    def add(self, rows: Sequence[int]) -> int:
        """Add rows. Returns what the micro-batch now takes."""
        self.rows += len(rows)
        return self.rows


class _Padded(_Rows):
    """How many tokens a micro-batch computes whose rows are padded to the longest."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.lengths, self.width = lengths, 0

    def add(self, rows: Sequence[int]) -> int:
        self.width = max(self.width, *(self.lengths[row] for row in rows))
        return super().add(rows) * self.width


class _Shared(_Rows):
    """How many tokens a micro-batch computes whose rows share their prompts, each computed once."""

    def __init__(self, responses: Sequence[int], starts: Sequence[int], prompt_of: Sequence[bytes]) -> None:
        super().__init__()
        self.responses, self.starts, self.prompt_of = responses, starts, prompt_of
        self.prompts: set[bytes] = set()
        self.tokens = 0

    def add(self, rows: Sequence[int]) -> int:
        for row in rows:
            self.tokens += self.responses[row]
            if self.prompt_of[row] not in self.prompts:
                self.prompts.add(self.prompt_of[row])
                self.tokens += self.starts[row] + 1
        return self.tokens


def _filled(units: Sequence[list[int]], most: int, count: Callable[[], _Rows]) -> list[list[int]]:
    """Put units in turn into micro-batches that take at most so much; a larger one is alone."""
    cuts: list[list[int]] = []
    taken = count()
    for rows in units:
        if cuts and taken.add(rows) <= most:
            cuts[-1].extend(rows)
        else:
            cuts.append([*rows])
            taken = count()
            taken.add(rows)
    return cuts


def _even(units: Sequence[list[int]], most: int, count: Callable[[], _Rows], *, number: int) -> list[list[int]]:
    """The same with the smallest size that gives at most so many micro-batches."""
    sizes = range(1, most)
    at = bisect_left(sizes, True, key=lambda size: len(_filled(units, size, count)) <= number)
    return _filled(units, sizes[at] if at < len(sizes) else most, count)


def dealt(
    cuts: list[MicroBatch], policy: Policy, *, ranks: Ranks, check: Callable[[], None], backward: bool
) -> Iterator[tuple[MicroBatch, bool]]:
    """Go through this rank's micro-batches, with `check` before each one; and whether each counts, or is only gone through.

    Ranks with shards of one policy make equally many passes of each kind, and abandon the batch together.

    Args:
        backward: whether micro-batches that are `learning` also go backward.
    """
    learning = [backward and cut.learning for cut in cuts]
    costs = [len(cut.rows) * cut.width * (3 if learns else 1) for cut, learns in zip(cuts, learning, strict=True)]
    if isinstance(policy, ShardedPolicy):
        own, before = ranks.deal_in_step(costs, learning), lambda: ranks.agree(check)
    else:
        own, before = [(number, True) for number in ranks.deal(costs)], check
    for number, counts in own:
        before()
        yield cuts[number], counts


@contextmanager
def ready(networks: Iterable[Policy]) -> Iterator[None]:
    """Round the networks' weights to what they compute in, and use their fused kernels, for all micro-batches of the block."""
    with ExitStack() as computing:
        for network in networks:
            computing.enter_context(network.rounded_weights())
            computing.enter_context(network.fused_kernels())
        yield


def moved(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on a device."""
    return {name: to_device(tensor, device) for name, tensor in batch.items()}
