"""Training batches of rollouts.

Enters: rollouts with their token ids. Leaves: a batch (`tokenization.Batch`) with the columns that losses read.
"""

from collections.abc import Sequence
from itertools import chain, compress

import torch
from torch import Tensor

from rlvr_cli.models.tokens.tokenization import Batch, collate
from rlvr_cli.types import Rollout


def rollout_tensors(rollouts: Sequence[Rollout], *, pad_id: int) -> Batch:
    """Make a training batch of rollouts, from the sampled token ids: text is not tokenized again.

    Tokens that the policy did not sample (`Rollout.response_mask`) are context only: they are outside the batch's mask.

    Returns:
        A `tokenization.Batch` with `advantages`, (batch, 1), and `sampled_log_probs`, (batch, seq), 0 outside the mask; float32. If turns
        have advantages of their own (`Rollout.turn_advantages`), `advantages` is (batch, seq), 0 outside the mask.
    """
    assert all(len(r.response_ids) == len(r.sampled_logprobs) for r in rollouts)
    batch = collate(
        [r.prompt_ids for r in rollouts],
        [r.response_ids for r in rollouts],
        pad_id=pad_id,
        response_masks=[r.response_mask for r in rollouts],
    )
    mask = batch["response_mask"]
    sampled = chain.from_iterable(
        r.sampled_logprobs if r.response_mask is None else compress(r.sampled_logprobs, r.response_mask)
        for r in rollouts
    )
    flat = torch.tensor([*sampled], dtype=torch.float32)
    return batch | {
        "advantages": _advantages(rollouts, mask),
        "sampled_log_probs": torch.zeros(mask.shape).masked_scatter(mask, flat),
    }


def _advantages(rollouts: Sequence[Rollout], mask: Tensor) -> Tensor:
    """(batch, 1), one for each response; or (batch, seq), that of its turn at each token in the mask, and 0 elsewhere."""
    if all(r.turn_advantages is None for r in rollouts):
        return torch.tensor([[r.advantage or 0.0] for r in rollouts], dtype=torch.float32)
    of_tokens = [
        [advantage] * (turn.end - turn.start)
        for r in rollouts
        for turn, advantage in zip(r.policy_turns, r.turn_advantages or (), strict=True)
    ]
    flat = torch.tensor([*chain.from_iterable(of_tokens)], dtype=torch.float32)
    return torch.zeros(mask.shape).masked_scatter(mask, flat)


def stale_tokens(rollouts: Sequence[Rollout], *, like: Tensor) -> Tensor:
    """Return which response tokens an earlier policy sampled than the one that is trained, `Rollout.step`: (batch, seq) bool.

    Args:
        like: the response mask of these rollouts, with every token of the responses in it.
    """
    stale = [
        [version != r.step for version in r.token_versions or [r.policy_version] * len(r.response_ids)]
        for r in rollouts
    ]
    flat = torch.tensor([*chain.from_iterable(stale)], dtype=torch.bool)
    return torch.zeros_like(like, dtype=torch.bool).masked_scatter(like, flat)


def zero_advantage_rows(batch: Batch) -> Tensor:
    """Return which rows have advantage 0 at all their response tokens, (batch, 1) bool, for `zero_advantage`."""
    zero = (batch["advantages"] == 0).expand_as(batch["response_mask"])  # one for each response, or for each token
    return (zero | ~batch["response_mask"].bool()).all(dim=1, keepdim=True)


def select_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Select rows of a batch, in the given order."""
    return {name: tensor[list(rows)] for name, tensor in batch.items()}
