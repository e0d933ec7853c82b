"""What every engine agrees on: how a prompt becomes ids, how ids become text, and where a response ends.

Enters: prompts, sampled ids, stop strings. Leaves: prompt ids, response text, the stop string that ended it. The rules
are vLLM's, so that one request means the same to every engine:

- a prompt is tokenized with the tokenizer's special tokens in front (a BOS where the tokenizer has one), once;
- special tokens do not show in a response's text;
- a stop string ends a response only after more than `min_tokens` tokens, and only when its last character comes after
  the text of those `min_tokens` tokens; the one that is complete first wins, and of two complete at the same place the
  one listed first. It is kept in the text; what the last token holds after it is cut from the text, not from the ids;
- a token that completes a stop string and is EOS, or the last one allowed, counts as the stop string.

Where a response breaks off within a character, its text ends in U+FFFD, as decoding its ids does; vLLM drops it.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from rlvr_cli.errors import RlvrError
from rlvr_cli.types import Completion, Request, SamplingParams

_UNDECODABLE = "\ufffd"  # what decoding shows for bytes that are no whole character (yet)


def prompt_token_ids(tokenizer: Any, requests: Sequence[Request], *, vocab_size: int | None) -> list[list[int]]:
    """Return the prompt ids of each request: its `prompt_ids` if it has them, else the tokens of its prompt.

    Args:
        vocab_size: all `prompt_ids` must be below it. None: who samples checks them; a model may have more ids than its tokenizer,
            and sample one of these.

    Raises:
        RlvrError: a prompt is not valid Unicode or has no tokens, or a request's ids are not in the vocabulary.
    """
    from rlvr_cli.models.tokens.tokenization import encode_prompts  # here: endpoints do without torch

    texts = {index: request.prompt for index, request in enumerate(requests) if request.prompt_ids is None}
    for index, prompt in texts.items():
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RlvrError(
                f"Prompt {index} is not valid Unicode: a lone surrogate at character {error.start}.",
                "Repair the text in the data set; half of a \\ud83d\\ude00 pair is a common cause.",
            ) from None
    tokenized = iter(encode_prompts(tokenizer, list(texts.values())))
    given = [next(tokenized) if request.prompt_ids is None else request.prompt_ids for request in requests]
    for index, ids in enumerate(given):
        if not ids:
            raise RlvrError(f"Prompt {index} is empty: it has no tokens.", "Give every question a prompt.")
        if index not in texts and vocab_size is not None and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise RlvrError(
                f"Prompt {index} has a token id that the model does not have: its ids are 0 to {vocab_size - 1}.",
                "Use the ids of the tokenizer of the model to sample from.",
            )
    return [list(ids) for ids in given]


def response_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Decode sampled ids, without special tokens; bytes that form no character become U+FFFD."""
    if _has_common_decode(type(tokenizer)):
        return tokenizer.backend_tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


@cache
def _has_common_decode(kind: type) -> bool:
    """Return whether tokenizers of this class use the common `decode` of transformers.

    The `tokenizers` library then decodes to the same text in a third of the time.
    """
    methods = [getattr(kind, name, None) for name in ("decode", "_decode")]
    common = all(getattr(method, "__module__", "").startswith("transformers.tokenization_utils") for method in methods)
    return common and hasattr(kind, "backend_tokenizer")


def first_stop(text: str, stop: Sequence[str], *, start: int = 0) -> tuple[str, int] | None:
    """Find the stop string that is complete first in `text`, and the character index just after it.

    Args:
        start: only a stop string that ends after this index counts; it may begin before.

    Returns:
        None if there is none.
    """
    best: tuple[str, int] | None = None
    for string in stop:
        if string not in text:  # of many, most are not, and this is the fastest way to see it
            continue
        found = text.find(string, max(0, start + 1 - len(string)))
        if found >= 0 and (best is None or found + len(string) < best[1]):
            best = string, found + len(string)
    return best


def as_every_engine(completion: Completion, tokenizer: Any, params: SamplingParams) -> Completion:
    """A completion of a server with the text that every engine gives: its ids decoded, up to the stop string."""
    text, reason = response_text(tokenizer, completion.token_ids), completion.stop_reason
    if reason in params.stop:
        protected = response_text(tokenizer, completion.token_ids[: params.min_tokens])
        found = first_stop(text, params.stop, start=len(protected) if params.min_tokens else 0)
        if found is not None:
            reason, end = found
            text = text[:end]
    return replace(completion, text=text, stop_reason=reason, num_tokens=len(completion.token_ids))


def continued(completion: Completion, tokenizer: Any, params: SamplingParams, *, begun: int) -> Completion:
    """A continuation by an engine that saw only the new tokens, as one by an engine that sees the whole response.

    Its text is that of the whole response. Where a stop string that began before the new tokens is complete in them, it ends.

    Args:
        completion: its token ids are the new ones, and its `prompt_ids` end with the others.
        params: of the whole response, but for `max_tokens`.
        begun: see `types.Request`.
    """
    before = completion.prompt_ids[len(completion.prompt_ids) - begun :]
    protected = len(
        response_text(tokenizer, (*before, *completion.token_ids)[: params.min_tokens]).rstrip(_UNDECODABLE)
    )

    def found_in(tokens: int) -> tuple[str, int] | None:
        text = response_text(tokenizer, (*before, *completion.token_ids[:tokens]))
        return first_stop(text, params.stop, start=protected if params.min_tokens else 0)

    text, end = response_text(tokenizer, (*before, *completion.token_ids)), completion.num_tokens
    found = found_in(end)
    if found is not None and found[1] - len(found[0]) < len(response_text(tokenizer, before)):
        end = next(
            tokens for tokens in range(1, end + 1) if len(before) + tokens > params.min_tokens and found_in(tokens)
        )
        return replace(
            completion,
            text=text[: found[1]],
            token_ids=completion.token_ids[:end],
            logprobs=completion.logprobs[:end],
            num_tokens=end,
            finish_reason="stop",
            stop_reason=found[0],
            mean_entropy=completion.mean_entropy if end == completion.num_tokens else None,
        )
    if completion.stop_reason in params.stop and found is not None:
        text = text[: found[1]]
    return replace(completion, text=text)


class StopStrings:
    """Finds stop strings across token borders without decoding at every token.

    A stop string can only be completed by a token that contains it or that begins with a suffix of it. `candidates`
    marks these tokens (for most vocabularies and `</answer>`, one in a hundred). The response is decoded only after one
    of them, and then as a whole: the search runs on the text of `response_text`, so characters split over tokens are no
    special case.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], *, vocab_size: int) -> None:
        """Build the table of candidates, one decoding per token of the vocabulary.

        Raises:
            RlvrError: a stop string is empty.
        """
        if "" in stop:
            raise RlvrError("A stop string is empty: every response would end at once.", "Remove it.")
        self.tokenizer = tokenizer
        self._stop = tuple(stop)
        self.candidates = np.zeros(vocab_size, dtype=bool)
        if self._stop:
            known = min(vocab_size, len(tokenizer))  # a padded head has more ids than the tokenizer has tokens
            self.candidates[:known] = _may_complete(tokenizer, self._stop, known)

    def find(self, token_ids: Sequence[int], *, min_tokens: int) -> tuple[str, str] | None:
        """Check whether the last of `token_ids`, a candidate, completes a stop string.

        Returns:
            The text up to and including the stop string, and the stop string; None if the response goes on.
        """
        if not self._stop or len(token_ids) <= min_tokens:
            return None
        text = response_text(self.tokenizer, token_ids)
        found = first_stop(text, self._stop)
        if found is not None and min_tokens:  # most candidates complete none: no need to decode the protected part
            protected = len(response_text(self.tokenizer, token_ids[:min_tokens]).rstrip(_UNDECODABLE))
            if found[1] <= protected:
                found = first_stop(text, self._stop, start=protected)
        return None if found is None else (text[: found[1]], found[0])


def _may_complete(tokenizer: Any, stop: Sequence[str], vocab_size: int) -> list[bool]:
    """Return for each id whether a stop string may end in the text that it adds, or in a character that it is part of.

    Each id is decoded after another token, since some decoders treat the first token of a text differently.
    """
    lead = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    pairs = [[*lead, token_id] for token_id in range(vocab_size)]
    texts = (
        tokenizer.backend_tokenizer.decode_batch(pairs, skip_special_tokens=True)
        if _has_common_decode(type(tokenizer))
        else [response_text(tokenizer, pair) for pair in pairs]
    )
    lead_text = response_text(tokenizer, lead)
    last = {string[-1] for string in stop}
    watched = last if all(c.isascii() for c in last) else {*last, _UNDECODABLE}
    in_lead = {c: lead_text.count(c) for c in watched}

    def may(text: str) -> bool:
        if not any(text.count(c) > in_lead[c] for c in watched):
            return False
        if _UNDECODABLE in text or not text.startswith(lead_text):
            return True
        ends = (text[len(lead_text) : i + 1] for i in range(len(lead_text), len(text)) if text[i] in last)
        return any(end.endswith(string) or string.endswith(end) for end in ends for string in stop)

    return [may(text) for text in texts]
