"""The order in which examples are used, as pure functions of seed, epoch and position: no RNG state to save."""

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def epoch_order(num_examples: int, *, seed: int, epoch: int) -> tuple[int, ...]:
    """A permutation of range(num_examples), a function of (num_examples, seed, epoch) alone.

    Sorted by a hash instead of shuffled by a generator, so that it is the same on every machine and Python version.
    """

    def key(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=16).digest()

    return tuple(sorted(range(num_examples), key=key))


# Of datasets, which each batch draws from: the orders of passes over a batch, used once, would push them out.
_order_of_dataset = functools.lru_cache(maxsize=4)(epoch_order)


def next_indices(
    num_examples: int, count: int, *, seed: int | None, start: int, exclude: Sequence[int] = ()
) -> tuple[list[int], int]:
    """Return the next indices of an endless pass over a dataset: one epoch after another, each in its own order.

    No index is returned twice by one call, even if it spans two epochs.

    Args:
        num_examples: size of the dataset.
        count: number of indices to return.
        seed: of the orders; None: each epoch goes from 0 to num_examples - 1.
        start: position in the pass at which to start, counted over all epochs from 0.
        exclude: indices to skip.

    Returns:
        `count` indices, fewer if the dataset has no others left, and the position after them.
    """
    seen, drawn = {index for index in exclude if 0 <= index < num_examples}, []
    position = start
    while len(drawn) < count and len(seen) < num_examples:
        epoch, place = divmod(position, num_examples)
        index = place if seed is None else _order_of_dataset(num_examples, seed=seed, epoch=epoch)[place]
        position += 1
        if index not in seen:
            seen.add(index)
            drawn.append(index)
    return drawn, position


def weighted_indices(
    weights: Sequence[float], count: int, *, seed: int, draw: int, exclude: Sequence[int] = ()
) -> list[int]:
    """Return different indices, each next one with a probability in proportion to its weight among those that are left.

    Those with the smallest -log(u) / weight, u being a hash in (0, 1) of (seed, draw, index) (Efraimidis and Spirakis, 2006): with
    the indices returned so far in `exclude`, a second call goes on where the first one stopped.

    Args:
        weights: above 0, one per index.
        draw: the number of the draw; every draw is another one.

    Returns:
        `count` indices, fewer if there are no others.
    """

    def key(index: int) -> float:
        digest = hashlib.blake2b(f"{seed}/draw {draw}/{index}".encode(), digest_size=8).digest()
        return -math.log((int.from_bytes(digest, "big") + 0.5) / 2**64) / weights[index]

    left = set(range(len(weights))) - set(exclude)
    return sorted(left, key=lambda index: (key(index), index))[:count]


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


def update_rows(num_examples: int, *, batch_size: int, epochs: int, seed: int, number: int) -> list[list[int]]:
    """The indices of each update on a rollout batch, epoch after epoch, each epoch in another random order.

    Args:
        num_examples: in the rollout batch.
        batch_size: examples per update.
        number: of the rollout batch, from 0.
    """
    return [
        rows
        for epoch in range(epochs)
        for rows in batches(range(num_examples), batch_size=batch_size, seed=seed, epoch=number * epochs + epoch)
    ]
