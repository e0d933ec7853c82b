"""Token ids packed into sequences of one length: whole documents where they fit best, or all documents without gaps."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import chain

import torch
from torch import Tensor
from torch.utils.data import Dataset


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Sequences of `seq_length` tokens, cut one after the other from the concatenation of documents.

    Item i is `input_ids`, the tokens from `i * seq_length` on, and `labels`, those that follow each of them; int64,
    (seq_length,) each. A last sequence whose labels would be incomplete is dropped.

    Args:
        documents: the token ids of each.
        seq_length: tokens per sequence, at least 1.
    """

    def __init__(self, documents: Sequence[Tensor], seq_length: int) -> None:
        assert seq_length > 0, seq_length
        self._ids = torch.cat([torch.empty(0, dtype=torch.int64), *documents])
        self._seq_length = seq_length

    def __len__(self) -> int:
        return max(len(self._ids) - 1, 0) // self._seq_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = range(len(self))[index] * self._seq_length  # an IndexError ends an iteration over the dataset
        ids = self._ids[start : start + self._seq_length + 1]
        return {"input_ids": ids[:-1], "labels": ids[1:]}


def best_fit(lengths: Sequence[int], *, capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Pack whole documents, the longest first, each into the fullest sequence that has room (best-fit decreasing).

    Source: Ding et al., 2024, Fewer Truncations Improve Language Modeling, arXiv:2404.10830, section 3.

    Args:
        lengths: tokens of each document, 1 to `capacity`.
        capacity: the most tokens of a sequence.
        order: all documents; those of one length are packed in this order.

    Returns:
        The documents of each sequence.
    """
    sequences: list[list[int]] = []
    rooms: list[int] = []  # tokens that some sequence has left, ascending
    having: dict[int, list[int]] = {}  # by the tokens that are left, the sequences, as a heap
    for document in sorted(order, key=lambda document: -lengths[document]):
        place = bisect_left(rooms, lengths[document])
        if place == len(rooms):
            room, number = capacity, len(sequences)
            sequences.append([])
        else:
            room = rooms[place]
            number = heappop(having[room])
            if not having[room]:
                del rooms[place], having[room]
        sequences[number].append(document)
        left = room - lengths[document]
        if left not in having:
            insort(rooms, left)
        heappush(having.setdefault(left, []), number)
    return sequences


def without_gaps(
    documents: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]], *, seq_length: int
) -> tuple[list["array[int]"], list[list[bool]]]:
    """Cut the concatenation of documents into sequences, with a mask of what is learned; a sequence also has the token after it.

    As `PackedDataset`: each sequence begins with the last token of the one before, and a last incomplete one is dropped.

    Args:
        documents: the token ids of each.
        masks: per document, which of its tokens are learned.
        seq_length: labels of a sequence.

    Returns:
        Per sequence its `seq_length + 1` ids, and as many entries of the mask.
    """
    ids, learned = array("i", chain.from_iterable(documents)), [*chain.from_iterable(masks)]
    assert len(ids) == len(learned), "a mask has one entry per token"
    starts = range(0, (len(ids) - 1) // seq_length * seq_length, seq_length)
    pieces = [slice(start, start + seq_length + 1) for start in starts]
    return [ids[piece] for piece in pieces], [learned[piece] for piece in pieces]
