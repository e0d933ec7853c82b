"""Documents packed without gaps into sequences of one length, as language models are pretrained."""

from collections.abc import Sequence

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
