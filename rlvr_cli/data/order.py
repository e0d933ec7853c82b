"""The order in which examples are used, as pure functions of seed, epoch and position: no generator's state to save."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


@functools.lru_cache(maxsize=4)
def epoch_order(num_examples: int, *, seed: int, epoch: int) -> tuple[int, ...]:
    """A permutation of range(num_examples), a function of (num_examples, seed, epoch) alone.

    Sorted by a hash instead of drawn: no generator's state to save, and the same on every machine and version.
    """

    def key(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=16).digest()

    return tuple(sorted(range(num_examples), key=key))


def draw(num_examples: int, count: int, *, seed: int, start: int, exclude: Sequence[int] = ()) -> tuple[list[int], int]:
    """The next examples of an endless pass over a dataset, epoch after epoch, each in its own order.

    None is drawn twice in a call, also where an epoch ends within it.

    Args:
        num_examples: of the dataset.
        count: how many are wanted.
        start: how far the pass has come, from 0.
        exclude: indices to pass over.

    Returns:
        `count` indices, fewer when there are not as many left, and how far the pass has come.
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
    """One epoch of `examples`, shuffled, in batches, of which the last may be smaller.

    Args:
        examples: the dataset.
        batch_size: examples per batch.
        seed, epoch: they and the number of examples fix the order.
    """
    order = epoch_order(len(examples), seed=seed, epoch=epoch)
    for first in range(0, len(order), batch_size):
        yield [examples[index] for index in order[first : first + batch_size]]
