"""Token ids of the responses that `rlvr sft` and `rlvr dpo` train on: sampled ids where they are known, else those of the text.

Enters: examples with a prompt and a response, and the sampled ids of some. Leaves: token ids that fit the model's context, packed
into sequences if asked for.
"""

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rlvr_cli.data.order import epoch_order
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.tokens.packing import best_fit, without_gaps
from rlvr_cli.models.tokens.tokenization import encode
from rlvr_cli.types import Conversation, Example, SampledIds

_AT_ONCE = 100  # texts: of all that it is given at once a tokenizer also holds offsets, strings and masks


def encode_traces(
    examples: Sequence[Example],
    token_ids: Mapping[str, SampledIds],
    tokenizer: Any,
    *,
    append_eos: bool,
    end_sampled: bool = True,
    other_ends: Collection[int] = (),
    end: int | None = None,
    chat: Callable[[Conversation], Any] | None = None,
) -> tuple[list["array[int]"], list["array[int]"], list[list[bool] | None]]:
    """Token ids of each example: the sampled ids if they are this tokenizer's, else those of its text.

    The text of a sampled response may tokenize to other ids than those that were sampled, so sampled ids are preferred.

    Args:
        append_eos: whether a response that does not end with the EOS token gets one; not where it ends with what the policy did not sample.
        end_sampled: whether this is so for sampled ids, too; else they stay as they are.
        other_ends: ids besides EOS that end what the model samples, so that nothing comes after them.
        end: the token that is appended in place of EOS.
        chat: the `NextTurn` of a conversation; its turns have their own end.

    Returns:
        The prompts' ids, the responses' ids, 4 bytes each, and the responses' masks (`collate`).

    Raises:
        RlvrError: as `encode`; a chat template cannot write a conversation; or a response has tokens that the policy did not sample, and
            its ids are another tokenizer's, or another text's.
    """
    appended: Any = tokenizer.eos_token_id if end is None else end
    prompts: list[array[int]] = []
    responses: list[array[int]] = []
    masks: list[list[bool] | None] = []
    for example, before, own in _of_texts(examples, tokenizer, append_eos=append_eos, end=end):
        learned = None
        sampled = token_ids.get(example.id, SampledIds([], [], None))
        prompt, response, mask, _ = sampled
        if example.turns is not None and mask is None:
            own, learned = _of_turns(example.turns, tokenizer, append_eos=append_eos, end=appended)
        if example.conversation is not None:
            assert chat is not None, "a conversation without a chat template"
            before, own, learned = _of_conversation(example.id, example.conversation, chat)
        known = prompt and (prompt == before or tokenizer.decode(prompt) == example.prompt)
        if known and _is_spelled(example.response or "", sampled, tokenizer):
            ended = response[-1] in (tokenizer.eos_token_id, *other_ends)
            ends = not (append_eos and end_sampled) or ended or not (mask or [True])[-1]
            before, own = prompt, response if ends else [*response, appended]
            learned = mask if mask is None or ends else [*mask, True]
        if mask is not None and learned is None:
            raise RlvrError(
                f"Trace {example.id} has tokens that the policy did not sample, and its token ids do not spell its text with this tokenizer.",
                "Train the model that sampled the trace, or remove the trace.",
            )
        prompts.append(array("i", before))
        responses.append(array("i", own))
        masks.append(learned)
    return prompts, responses, masks


def _of_texts(
    examples: Sequence[Example], tokenizer: Any, *, append_eos: bool, end: int | None
) -> Iterator[tuple[Example, list[int], list[int]]]:
    """Each example, with the ids of its prompt and of its response."""
    for start in range(0, len(examples), _AT_ONCE):
        some = examples[start : start + _AT_ONCE]
        texts = [e.prompt or "" for e in some], [e.response or "" for e in some]
        yield from zip(some, *encode(*texts, tokenizer, append_eos=append_eos, end=end, first=start), strict=True)


def _is_spelled(text: str, sampled: SampledIds, tokenizer: Any) -> bool:
    """Whether the ids spell the text; the last token of a response, or of a turn, may go on after the stop string that ended it."""

    def spelled(ends: Sequence[tuple[int, int]]) -> bool:
        parts = pairwise([(0, 0), *ends])
        return all(
            tokenizer.decode(sampled.response[i:j], skip_special_tokens=True).startswith(text[begin:end])
            for (i, begin), (j, end) in parts
        )

    whole = [(len(sampled.response), len(text))]
    return any(spelled(ends) for ends in (whole, sampled.ends) if ends)


def _of_conversation(
    name: str, conversation: Conversation, chat: Callable[[Conversation], Any]
) -> tuple[list[int], list[int], list[bool]]:
    """As `NextTurn.conversation`; its errors name the trace."""
    turns = chat(conversation)
    try:
        return turns.conversation(conversation.messages)
    except RlvrError as error:
        raise RlvrError(
            f"Trace {name}: {error.problem}",
            "Remove or change the row, such as into `turns`, or `prompt` and `response`: this chat template cannot write it.",
        ) from error


def _of_turns(
    turns: Sequence[tuple[str, str]], tokenizer: Any, *, append_eos: bool, end: int
) -> tuple[list[int], list[bool]]:
    """The ids of turns, each tokenized alone as in an episode, and which of them are the policy's."""
    ids: list[int] = []
    mask: list[bool] = []
    for role, text in turns:
        own = tokenizer(text, add_special_tokens=False, split_special_tokens=role != "policy")["input_ids"]
        ids += own
        mask += [role == "policy"] * len(own)
    if append_eos and mask[-1:] == [True] and ids[-1] not in (tokenizer.eos_token_id, end):
        return [*ids, end], [*mask, True]
    return ids, mask


def learned_with_prompts(
    prompts: list["array[int]"], responses: list["array[int]"], masks: list[list[bool] | None], *, keep: int
) -> tuple[list["array[int]"], list["array[int]"], list[list[bool] | None]]:
    """Make the tokens of prompts a part of the responses, so that they are learned, but for the first `keep` of each."""
    joined = [prompt[keep:] + response for prompt, response in zip(prompts, responses, strict=True)]
    learned = [
        None if mask is None else [True] * len(prompt[keep:]) + mask
        for prompt, mask in zip(prompts, masks, strict=True)
    ]
    return [prompt[:keep] for prompt in prompts], joined, learned


class Sequences(NamedTuple):
    """What is trained on: the arguments of `collate`, and which of its rows make up each sequence."""

    prompts: list["array[int]"]
    responses: list["array[int]"]
    masks: list[list[bool] | None]
    rows: list[list[int]]  # of each sequence

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(map(len, self.prompts)) + sum(map(len, self.responses))


def pack_whole(
    examples: Sequence[Example],
    prompts: list["array[int]"],
    responses: list["array[int]"],
    masks: list[list[bool] | None],
    *,
    length: int,
    seed: int,
) -> Sequences:
    """Pack traces into sequences of at most `length` tokens (`best_fit`), each trace a row of its own.

    Args:
        prompts, responses, masks: of `encode_traces`.
        seed: of the order in which traces of one length are packed.

    Raises:
        RlvrError: a trace is longer.
    """
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] > length:
        raise RlvrError(
            f"Trace {examples[longest].id} has {lengths[longest]} tokens, and a packed sequence has {length}.",
            f"Use --packing-length {lengths[longest]} or more, or remove it. It is not truncated, because that would teach the model not "
            "to finish.",
        )
    rows = best_fit(lengths, capacity=length, order=_packing_order(len(lengths), seed=seed))
    return Sequences(prompts, responses, masks, rows)


def pack_across(
    prompts: list["array[int]"],
    responses: list["array[int]"],
    masks: list[list[bool] | None],
    *,
    length: int,
    seed: int,
) -> Sequences:
    """Join traces without gaps and cut them into sequences, one row each, with `length` tokens to predict (`without_gaps`).

    The arguments are those of `pack_whole`; `seed` is of the order in which traces are joined.

    Raises:
        RlvrError: the traces are too short for one sequence.
    """
    order = _packing_order(len(prompts), seed=seed)
    learned = [
        [False] * len(prompts[i]) + list([True] * len(responses[i]) if (mask := masks[i]) is None else mask)
        for i in order
    ]
    ids, learned = without_gaps([prompts[i] + responses[i] for i in order], learned, seq_length=length)
    if not ids:
        total = sum(map(len, prompts)) + sum(map(len, responses))
        raise RlvrError(
            f"The {len(prompts)} traces have {total} tokens, too few for a packed sequence of {length} and the token after it.",
            "Use a smaller --packing-length, or more traces.",
        )
    return Sequences(
        [sequence[:1] for sequence in ids],
        [sequence[1:] for sequence in ids],
        [mask[1:] for mask in learned],
        [[row] for row in range(len(ids))],
    )


def _packing_order(count: int, *, seed: int) -> tuple[int, ...]:
    return epoch_order(count, seed=seed, epoch=-2)  # an epoch that neither training nor `choose_examples` uses


def check_lengths(
    examples: Sequence[Example],
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    *,
    longest: float,
    note: str = "",
) -> None:
    """Raise RlvrError if a trace exceeds the model's context; `note` says why this is short."""
    for example, prompt, response in zip(examples, prompt_ids, response_ids, strict=True):
        if len(prompt) + len(response) > longest:
            raise RlvrError(
                f"Trace {example.id} has {len(prompt)} + {len(response)} tokens; the model's context holds {longest}{note}.",
                "Remove or shorten it. It is not truncated, because that would teach the model not to finish.",
            )
