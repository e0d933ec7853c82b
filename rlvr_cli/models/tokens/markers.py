"""Conversations to token ids: the markers that a chat template writes are tokens, the same characters in a message are text.

Enters: messages, and what a chat template makes of them. Leaves: token ids, and a text to be shown.

A text of an environment may hold `<|im_end|>`. Where all is tokenized as one, that would end the turn; where the pieces are tokenized
one by one, other ids come out at their edges than the model was trained on. So a message's markers are replaced by names that nobody
else has before the template is rendered (`hide`), and put back in a tokenizer that knows the template's markers by other names (`ids`).
"""

import json
import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any

from tokenizers import Tokenizer

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.tokens.tokenization import front_of


class Markers:
    """The markers of a tokenizer and its chat template: its special tokens, and other added tokens of some length that the template writes.

    Args:
        tokenizer: with a chat template.
        name: of the model, for errors.

    Raises:
        RlvrError: it is not one of the library `tokenizers`.
    """

    def __init__(self, tokenizer: Any, *, name: str) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RlvrError(
                f"The tokenizer of {name} has no tokenizer.json, without which markers in a text cannot be told from those of its "
                "chat template.",
                "Leave --chat or the environment out.",
            )
        self._tokenizer = tokenizer
        source = str(tokenizer.chat_template)
        added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        special = {
            *tokenizer.all_special_tokens,
            *(t.content for t in tokenizer.added_tokens_decoder.values() if t.special),
        }
        self.ids_of = {text: i for text, i in added.items() if text in special or (text in source and len(text) > 2)}
        self.stem = f"r{secrets.token_hex(8)}"  # the ids do not depend on it
        self._names = {text: f"{self.stem}n{number}n" for number, text in enumerate(self.ids_of)}
        self._hidden = {text: f"{self.stem}h{number}h" for number, text in enumerate(self.ids_of)}
        self._renamed = _renamed(backend, self._names)
        strange = [text for text, name in self._names.items() if self._renamed.token_to_id(name) != self.ids_of[text]]
        if strange:
            raise RlvrError(
                f"The tokenizer of {name} cannot read {strange[0]!r} as text.", "Leave --chat or the environment out."
            )

    def hide(self, text: str, *, only: Collection[str] | None = None) -> str:
        """A message's text, whose markers (all, or these) are to be read as text, for the chat template."""
        return _replaced(text, self._hidden if only is None else {own: self._hidden[own] for own in only})

    def shown(self, rendered: str) -> str:
        """What the chat template made of hidden texts, as one reads it."""
        return _replaced(rendered, {name: text for text, name in self._hidden.items()})

    def ids(self, rendered: str) -> list[int]:
        """The token ids of a conversation or a part of it, as the chat template made it of hidden texts."""
        named = _replaced(rendered, self._names)
        return self._renamed.encode(self.shown(named), add_special_tokens=False).ids

    def ids_behind(self, before: str, rendered: str) -> list[int]:
        """As `ids`, of a part that stands behind another one: without what a tokenizer puts in front of a text, such as `▁`."""
        starts = [found.start() for found in _pattern(self._names).finditer(before)]
        before = before[starts[-1] if starts else 0 :]  # its last marker splits a text, so what precedes it matters not
        for behind in (before, "\n"):  # what precedes may end in a space, which merges with the word that follows
            ids, whole = self.ids(behind), self.ids(behind + rendered)
            if whole[: len(ids)] == ids:
                return whole[len(ids) :]
        return self.ids(rendered)

    def in_order(self, rendered: str) -> list[str]:
        """The markers of a conversation that are tokens."""
        return _pattern(self._names).findall(rendered)

    def prompt_ids(self, rendered: str) -> list[int]:
        """As `ids`, with the special tokens in front that the tokenizer puts before every text (as `encode_prompts`)."""
        ids, front = self.ids(rendered), front_of(self._tokenizer)
        return ids if ids[: len(front)] == front else [*front, *ids]


def _replaced(text: str, names: Mapping[str, str]) -> str:
    return _pattern(names).sub(lambda found: names[found[0]], text) if names else text


def _pattern(names: Mapping[str, str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def _renamed(backend: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """A tokenizer that knows added tokens by other names, with the same ids."""
    content: dict[str, Any] = json.loads(backend.to_str()) | {
        "post_processor": None, "truncation": None, "padding": None
    }  # fmt: skip
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = content["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): i for text, i in vocab.items()}
    else:
        model["vocab"] = [[names.get(text, text), *rest] for text, *rest in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return Tokenizer.from_str(json.dumps(content))
