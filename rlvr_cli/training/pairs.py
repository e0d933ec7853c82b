"""Pairs of responses that are given, as batches of token ids with the reference's log-probabilities.

Enters: pairs, a trainer whose policy is the reference as long as it has not been updated. Leaves: a batch for each update.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

from rlvr_cli.data.pairs import Pairs
from rlvr_cli.models.tokens.tokenization import Batch, collate, pad_id_of
from rlvr_cli.training.traces import check_lengths, encode_traces
from rlvr_cli.training.trainer import Trainer

_REFERENCE = "reference_log_probs"


class EncodedPairs:
    """Pairs as token ids.

    Attributes:
        kept: the reference's log-probabilities of all pairs, if there are any: a checkpoint must have them, since a resumed run could
            not compute them again.
    """

    def __init__(self, trainer: Trainer, pairs: Pairs, *, append_eos: bool, end: int | None = None) -> None:
        """
        Args:
            append_eos, end: see `encode_traces`.

        Raises:
            RlvrError: a response exceeds the model's context.
        """
        self._trainer = trainer
        self._prompt_ids, self._response_ids, _ = encode_traces(
            pairs.examples, pairs.token_ids, trainer.tokenizer, append_eos=append_eos, end_sampled=False, end=end
        )
        policy = trainer.policy
        longest = policy.context_length or math.inf
        check_lengths(pairs.examples, self._prompt_ids, self._response_ids, longest=longest, note=policy.context_note)
        tokens = [len(ids) for ids in self._response_ids]
        self._lengths = [chosen + rejected for chosen, rejected in zip(tokens[::2], tokens[1::2], strict=True)]
        self._starts = [0, *accumulate(self._lengths)]  # of each pair in what is kept
        self.kept = {name: trainer.tensors[name] for name in (_REFERENCE,) if name in trainer.tensors}

    def __len__(self) -> int:
        return len(self._lengths)

    def score_reference(self, minibatches: Iterable[Sequence[int]]) -> None:
        """Compute the log-probabilities of all responses under the policy that the run starts with, unless a checkpoint had them.

        In the minibatches in which they are trained on: so the first update finds the same numbers, and every margin is 0.

        Args:
            minibatches: each pair once.
        """
        if self.kept:
            return
        found = [torch.empty(0)] * len(self)
        with self._trainer.scoring():
            for pairs in minibatches:
                batch = self._tokens(pairs)
                scored = self._trainer.log_probs(batch, temperature=1.0)
                of_pairs = scored[batch["response_mask"]].split([self._lengths[pair] for pair in pairs])
                for pair, log_probs in zip(pairs, of_pairs, strict=True):
                    found[pair] = log_probs
        self.kept = {_REFERENCE: torch.cat(found)}

    def batch(self, pairs: Sequence[int]) -> Batch:
        """The rows of these pairs, chosen and rejected in turn, with the reference's log-probabilities if there are any."""
        batch = self._tokens(pairs)
        for name, of_all in self.kept.items():
            of_pairs = [of_all[self._starts[pair] : self._starts[pair + 1]] for pair in pairs]
            flat, mask = torch.cat(of_pairs), batch["response_mask"]
            batch[name] = torch.zeros(mask.shape, dtype=flat.dtype).masked_scatter(mask, flat)
        return batch

    def _tokens(self, pairs: Sequence[int]) -> Batch:
        rows = [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]
        batch = collate(
            [self._prompt_ids[row] for row in rows],
            [self._response_ids[row] for row in rows],
            pad_id=pad_id_of(self._trainer.tokenizer),
        )
        return batch | {"unit": torch.arange(len(rows))[:, None] // 2}
