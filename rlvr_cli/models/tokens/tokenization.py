"""Text or sampled token ids -> right-padded tensors with a mask on the response tokens.

A batch is the dictionary of the handout: `input_ids`, `labels` and `response_mask`, each (batch, seq), where
`labels[b, t]` is the token that follows `input_ids[b, :t + 1]`. Rows are padded on the right, and a causal model cannot
see what is to the right of a token: no attention mask is needed, and no result depends on the padding's width or id.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlvr_cli.errors import RlvrError

Batch = dict[str, Tensor]
_A_TEXT = 2**31  # a token that no tokenizer has


def tokenize_prompt_and_output(
    prompt_strs: list[str], output_strs: list[str], tokenizer: PreTrainedTokenizerBase
) -> Batch:
    """Tokenize prompts and outputs separately, concatenate them, mark the response tokens (the handout, section 4.2).

    Args:
        prompt_strs: one prompt per row.
        output_strs: one output per row; nothing is added to it, in particular no EOS.
        tokenizer: the model's; for the padding see `pad_id_of`.

    Returns:
        `input_ids` and `labels`, int64, and `response_mask`, bool, each (batch, max(prompt_and_output_lens) - 1).

    Raises:
        RlvrError: see `encode` and `pad_id_of`.
    """
    prompt_ids, output_ids = encode(prompt_strs, output_strs, tokenizer)
    return collate(prompt_ids, output_ids, pad_id=pad_id_of(tokenizer))


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of prompts, with the special tokens that the tokenizer puts in front of a text (`front_of`).

    A prompt that begins with them itself, as chat templates write them, does not get them a second time.
    """
    if not prompts:
        return []
    front = front_of(tokenizer)
    encoded = tokenizer(list(prompts), add_special_tokens=False, verbose=False).input_ids
    return [ids if ids[: len(front)] == front else [*front, *ids] for ids in encoded]


def front_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that a tokenizer puts in front of a text (BOS, where it has one), without those behind it (EOS)."""
    own: Any = tokenizer
    backend = getattr(own, "backend_tokenizer", None)
    if backend is None:
        around = own.build_inputs_with_special_tokens([_A_TEXT])
    elif backend.post_processor is None:
        return []
    else:  # which texts it knows cannot be guessed, so the one token is another tokenizer's
        text = Tokenizer(WordLevel({"text": _A_TEXT}, unk_token="text")).encode("text")
        around = backend.post_processor.process(text).ids
    return around[: around.index(_A_TEXT)]


def encode(
    prompt_strs: list[str],
    output_strs: list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    append_eos: bool = False,
    end: int | None = None,
    first: int = 0,
) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of prompts and of outputs, each tokenized on its own.

    A prompt gets its special tokens (`encode_prompts`), an output gets none. For text data only: train on sampled
    responses by their sampled ids, because their text may tokenize to other ids.

    Args:
        prompt_strs: the prompts.
        output_strs: as many outputs.
        tokenizer: the model's.
        append_eos: whether each output that does not end with the EOS token, or with `end`, gets one.
        end: the token that is appended in place of EOS.
        first: the number of the first prompt, for errors.

    Returns:
        The prompts' ids and the outputs' ids.

    Raises:
        RlvrError: a prompt has no token, so that nothing predicts its output's first one; or there is no EOS to append.
    """
    assert len(prompt_strs) == len(output_strs), (len(prompt_strs), len(output_strs))
    if not prompt_strs:
        return [], []
    prompt_ids = encode_prompts(tokenizer, prompt_strs)
    empty = [row for row, ids in enumerate(prompt_ids) if not ids]
    if empty:
        raise RlvrError(
            f"Prompt {first + empty[0]} has no tokens: nothing predicts the first token of its response.",
            "Give every example a prompt that is not empty.",
        )
    output_ids = tokenizer(output_strs, add_special_tokens=False).input_ids
    if append_eos:
        eos: Any = tokenizer.eos_token_id
        end = eos if end is None else end
        if end is None:
            raise RlvrError("The tokenizer has no EOS token to append.", "Train without appending EOS.")
        output_ids = [ids if ids[-1:] in ([eos], [end]) else [*ids, end] for ids in output_ids]
    return prompt_ids, output_ids


def pad_id_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the tokenizer's pad token, else of EOS; raise RlvrError if it has neither."""
    pad_id: Any = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad_id is None:
        raise RlvrError("The tokenizer has neither a pad nor an EOS token.", "Set tokenizer.pad_token to any token.")
    return pad_id


def collate(
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    *,
    pad_id: int,
    response_masks: Sequence[Sequence[bool] | None] | None = None,
) -> Batch:
    """Concatenate the token ids of prompts and responses, and pad on the right to the longest row.

    Args:
        prompt_ids: one non-empty prompt per row.
        response_ids: one response per row; an empty one gives a row without a response token.
        pad_id: any id of the vocabulary; no result depends on it.
        response_masks: per row, which tokens of the response to train on; None: all. The model only reads the others,
            like the prompt.

    Returns:
        `input_ids` and `labels`, int64, and `response_mask`, bool, each (batch, max(len(prompt) + len(response)) - 1).
        `response_mask` marks the tokens of `labels` to train on; the prompt's last token predicts the first response
        token.
    """
    starts = [len(prompt) for prompt in prompt_ids]
    lengths = [start + len(response) for start, response in zip(starts, response_ids, strict=True)]
    empty = [row for row, start in enumerate(starts) if not start]
    assert not empty, f"row {empty[0]}: nothing predicts the first response token of an empty prompt"
    flat = chain.from_iterable(chain.from_iterable(zip(prompt_ids, response_ids, strict=True)))
    start, end = torch.tensor(starts)[:, None], torch.tensor(lengths)[:, None]
    place = torch.arange(max(lengths))
    ids = torch.full((len(lengths), max(lengths)), pad_id, dtype=torch.int64)
    ids.masked_scatter_(place < end, torch.tensor([*flat], dtype=torch.int64))
    mask = (place[1:] >= start) & (place[1:] < end)
    if response_masks is not None and any(row is not None for row in response_masks):
        pairs = zip(response_ids, response_masks, strict=True)
        kept = [[True] * len(response) if row is None else row for response, row in pairs]
        assert [len(row) for row in kept] == [len(response) for response in response_ids], (
            "a response mask has one entry per token"
        )
        mask.masked_scatter_(mask.clone(), torch.tensor([*chain.from_iterable(kept)], dtype=torch.bool))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask}


def row_lengths(mask: Tensor) -> Tensor:
    """Return the number of positions up to the last one in the mask, (batch,); later positions cannot influence it."""
    return (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(dim=1)
