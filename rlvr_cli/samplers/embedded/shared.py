"""Prompts of which there is one copy for all samples of a question, and attention to them.

Enters: prefixes that were prefilled together, and the rows of a batch that begin with each. Leaves: what the newest token of each row
attends to in its prefix, to be merged with what it attends to in the row's own tokens.

Softmax over keys that are in two parts is a mean of the softmaxes over each, weighted by the sums of their exponentiated
scores. The rows of a question ask the same keys, so that a part reads them once for all of them, in larger products.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from rlvr_cli.models.compute.device import to_device
from rlvr_cli.samplers.embedded.attention import Blocks, attention
from rlvr_cli.samplers.embedded.prefill import Prefix


class Part(NamedTuple):
    """What queries attend to in a part of the keys."""

    out: torch.Tensor  # (..., queries, head size), the mean of its values
    log_sum: torch.Tensor  # (..., queries), the logarithm of the sum of its exponentiated scores


def attend_to_part(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, blocks: Blocks = ()
) -> Part:
    """Compute attention on a CPU, with the log-sums; arguments as of `attention`."""
    log_sum = queries.new_empty(queries.shape[:-1])
    return Part(attention(queries, keys, values, mask, blocks, log_sum=log_sum), log_sum)


def merged(one: Part, other: Part) -> torch.Tensor:
    """Return what the queries attend to in both parts."""
    return torch.lerp(one.out, other.out, torch.sigmoid(other.log_sum - one.log_sum)[..., None])


@dataclass(eq=False, slots=True)
class SharedPrefix:
    """A question's prompt without its last token.

    Attributes:
        length: in tokens.
        block: where its keys and values are.
        rows: of the batch, which begin with it.
        awaited: whether more of its rows may come.
    """

    length: int
    block: "Block"
    rows: list[int] = field(default_factory=list)
    awaited: bool = True


class Block:
    """Prefixes in one tensor, padded on the right.

    Attributes:
        prefixes: those that are in it, in their order.
        layers: per layer keys and values, (prefixes, key-value heads, tokens, head size).
        mask: (prefixes, 1, tokens), added to scores; None without padding.
    """

    def __init__(self, prefixes: Sequence[Prefix]) -> None:
        lengths = [prefix[0][0].shape[1] for prefix in prefixes]
        self.prefixes = [SharedPrefix(length, self) for length in lengths]
        self.layers = [
            (_stacked([keys for keys, _ in layer]), _stacked([values for _, values in layer]))
            for layer in zip(*prefixes, strict=True)
        ]
        self.mask = _hidden(lengths, like=self.layers[0][0])

    @property
    def nbytes(self) -> int:
        return sum(states.nbytes for layer in self.layers for states in layer)

    def shrink(self) -> None:
        """Forget prefixes without rows, if that frees half of the memory or more."""
        kept = [index for index, prefix in enumerate(self.prefixes) if prefix.rows or prefix.awaited]
        longest = max((self.prefixes[index].length for index in kept), default=0)
        first, _ = self.layers[0]
        if not kept or 2 * len(kept) * longest > len(self.prefixes) * first.shape[2]:
            return
        self.prefixes, at = [self.prefixes[index] for index in kept], torch.tensor(kept, device=first.device)
        self.layers = [(keys[at, :, :longest], values[at, :, :longest]) for keys, values in self.layers]
        self.mask = _hidden([prefix.length for prefix in self.prefixes], like=first)


class Readers:
    """Which rows read which prefixes in a step: where their queries go, and where what they attend to comes from.

    Args:
        prefixes: of each row of the step; None for a row without.
        heads, kv_heads: of the model.
        device: that of the step.
    """

    def __init__(
        self, prefixes: Sequence[SharedPrefix | None], *, heads: int, kv_heads: int, device: torch.device
    ) -> None:
        self._blocks = list(dict.fromkeys(prefix.block for prefix in prefixes if prefix is not None))
        head = np.arange(heads).reshape(kv_heads, 1, -1)
        back = np.zeros((len(prefixes), heads), dtype=np.int64)
        places, self._sizes, end = [], [], 0
        for block in self._blocks:
            block.shrink()
            most = max(len(prefix.rows) for prefix in block.prefixes)
            rows = np.zeros((len(block.prefixes), most), dtype=np.int64)  # the first row stands in for those that lack
            shape = (len(rows), kv_heads, most, heads // kv_heads)
            places_of = end + np.arange(rows.size * heads).reshape(shape)
            for index, prefix in enumerate(block.prefixes):
                rows[index, : len(prefix.rows)] = prefix.rows
                own = places_of[index, :, : len(prefix.rows)]  # (key-value heads, rows, heads of each)
                back[prefix.rows] = own.swapaxes(0, 1).reshape(-1, heads)
            places.append((rows[:, None, :, None] * heads + head).ravel())
            self._sizes.append(rows.size * heads)
            end += self._sizes[-1]
        lacking = np.array([prefix is None for prefix in prefixes])
        self._places = to_device(torch.from_numpy(np.concatenate(places)), device)
        self._back = to_device(torch.from_numpy(back.ravel()), device)
        self._lacking = to_device(torch.from_numpy(lacking[:, None]), device) if lacking.any() else None

    def attend(self, layer: int, queries: torch.Tensor) -> Part:
        """Return what each row attends to in its prefix.

        Args:
            queries: (rows, heads, head size), as operands, scaled.
        """
        rows, heads, size = queries.shape
        asked = queries.reshape(-1, size).index_select(0, self._places)
        parts = []
        for block, those in zip(self._blocks, asked.split(self._sizes), strict=True):
            keys, values = (states.flatten(0, 1) for states in block.layers[layer])
            parts.append(attend_to_part(those.view(len(keys), -1, size), keys, values, block.mask))
        out = torch.cat([part.out.view(-1, size) for part in parts]).index_select(0, self._back)
        log_sum = torch.cat([part.log_sum.flatten() for part in parts]).index_select(0, self._back).view(rows, heads)
        if self._lacking is not None:
            log_sum.masked_fill_(self._lacking, -torch.inf)
        return Part(out.view(rows, heads, size), log_sum)


def _stacked(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack (key-value heads, tokens, head size) of several prefixes, padded with zeros."""
    longest = max(one.shape[1] for one in states)
    out = states[0].new_zeros((len(states), states[0].shape[0], longest, states[0].shape[2]))
    for place, one in zip(out, states, strict=True):
        place[:, : one.shape[1]] = one
    return out


def _hidden(lengths: Sequence[int], *, like: torch.Tensor) -> torch.Tensor | None:
    """Return the mask of prefixes of these lengths."""
    longest = max(lengths)
    if min(lengths) == longest:
        return None
    mask = like.new_zeros((len(lengths), 1, longest))
    for row, length in zip(mask, lengths, strict=True):
        row[:, length:] = -torch.inf
    return mask
