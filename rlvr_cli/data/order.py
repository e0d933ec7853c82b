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


def batches(
    examples: Sequence[T], *, batch_size: int, seed: int, epoch: int, start: int = 0, drop_last: bool = False
) -> Iterator[list[T]]:
    """One epoch of `examples`, shuffled, in batches.

    Args:
        examples: the dataset.
        batch_size: examples per batch.
        seed, epoch: they and the number of examples fix the order.
        start: examples of this epoch that were used already. It counts examples, not batches: a run may go on with
            another batch size and still sees each example once per epoch.
        drop_last: what to do with a last batch that is not full: False yields it smaller, True leaves its examples out.
    """
    order = epoch_order(len(examples), seed=seed, epoch=epoch)[start:]
    for first in range(0, len(order), batch_size):
        batch = [examples[index] for index in order[first : first + batch_size]]
        if len(batch) == batch_size or not drop_last:
            yield batch
