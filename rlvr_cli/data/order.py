"""The order in which examples are used, as pure functions of seed, epoch and position: no RNG state to save."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


@functools.lru_cache(maxsize=4)
def epoch_order(num_examples: int, *, seed: int, epoch: int) -> tuple[int, ...]:
    """A permutation of range(num_examples), a function of (num_examples, seed, epoch) alone.

    Sorted by a hash instead of shuffled by a generator, so that it is the same on every machine and Python version.
    """

    def key(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=16).digest()

    return tuple(sorted(range(num_examples), key=key))


def next_indices(
    num_examples: int, count: int, *, seed: int, start: int, exclude: Sequence[int] = ()
) -> tuple[list[int], int]:
    """Return the next indices of an endless pass over a dataset: one epoch after another, each in its own order.

    No index is returned twice by one call, even if it spans two epochs.

    Args:
        num_examples: size of the dataset.
        count: number of indices to return.
        start: position in the pass at which to start, counted over all epochs from 0.
        exclude: indices to skip.

    Returns:
        `count` indices, fewer if the dataset has no others left, and the position after them.
    """
    seen, drawn = set(exclude) & set(range(num_examples)), []
    position = start
    while len(drawn) < count and len(seen) < num_examples:
        epoch, place = divmod(position, num_examples)
        index = epoch_order(num_examples, seed=seed, epoch=epoch)[place]
        position += 1
        if index not in seen:
            seen.add(index)
            drawn.append(index)
    return drawn, position


def batches(examples: Sequence[T], *, batch_size: int, seed: int, epoch: int) -> Iterator[list[T]]:
    """One epoch of `examples`, shuffled, in batches; the last may be smaller.

    Args:
        examples: the dataset.
        batch_size: examples per batch.
        seed, epoch: with the number of examples, these determine the order.
    """
    order = epoch_order(len(examples), seed=seed, epoch=epoch)
    for first in range(0, len(order), batch_size):
        yield [examples[index] for index in order[first : first + batch_size]]
