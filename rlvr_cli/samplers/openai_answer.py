"""What an endpoint says, read as what it may be: a text from somewhere else, in which every value can be odd.

Enters: the body of a response, and the API key, which an endpoint may repeat. Leaves: an `Answer` of checked values without the
key, or `Unreadable`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlvr_cli.config.shared.addresses import PLACEHOLDER_KEY

_INT32 = range(2**31)
# The least and the most log-probability that is taken for one: some endpoints round, and report -9999 for "never".
_LOGPROBS = (-1e9, 1e-3)
# How a server ends a response that it did not finish: vLLM and SGLang abort theirs when they are shut down or put to sleep.
_BROKEN_OFF = ("abort", "error", "cancelled")


class Unreadable(Exception):
    """A response of status 200 without a readable answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An endpoint's answer as it was read, before its end is interpreted."""

    text: str
    thinking: str  # that an endpoint returns apart from the text; of a chat only
    finish: str
    matched: str | int | None
    says_matched: bool  # whether the endpoint reports at all what ended a response
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_tokens: int

    def is_ambiguous(self, stop: Sequence[str]) -> bool:
        """Whether the response may have ended either at EOS or at a stop string that was cut off."""
        return self.finish == "stop" and not self.says_matched and not self.text.endswith(tuple(stop))


def read_answer(body: str, *, chat: bool, key: str) -> Answer:
    """Read and check an answer. Raises Unreadable if it was broken off, or a value in it has another type or range than it can have."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise Unreadable(f"the answer is not JSON: {error_message(body)}") from None
    choices = data.get("choices") if isinstance(data, dict) else None
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        raise Unreadable(f"the answer has no choices: {error_message(body)}")
    choice, usage = choices[0], _value(data, "usage", dict) or {}
    said = _value(choice, "message", dict) or {} if chat else choice
    names = ("reasoning_content", "reasoning") if chat else ()  # of most endpoints, and of newer ones of vLLM
    thinking = next((found for name in names if (found := _value(said, name, str))), "")
    tokens, logprobs = _scores(choice, chat=chat)
    token_ids = _token_ids(choice, "token_ids")
    prompt_ids = _token_ids(choice, "prompt_token_ids") or _token_ids(data, "prompt_token_ids")
    matches = [_value(choice, name, str, int) for name in ("stop_reason", "matched_stop") if name in choice]
    matched = matches[0] if matches else None
    finish = _value(choice, "finish_reason", str) or "stop"
    if finish in _BROKEN_OFF:
        raise Unreadable(f"the answer was broken off: {finish}")
    return Answer(
        thinking=hide_key(thinking, key),
        text=hide_key(_value(said, "content" if chat else "text", str) or "", key),
        finish=hide_key(finish, key),
        matched=hide_key(matched, key) if isinstance(matched, str) else matched,
        says_matched=bool(matches),
        tokens=tokens,
        logprobs=logprobs if len(logprobs) == len(token_ids) or not token_ids else (),
        token_ids=token_ids,
        prompt_ids=prompt_ids,
        num_prompt_tokens=_count(usage, "prompt_tokens") or len(prompt_ids),
        num_tokens=_count(usage, "completion_tokens") or len(token_ids) or len(logprobs),
    )


def _value(where: dict[str, Any], name: str, *kinds: type) -> Any:
    """Return a field; None if it is null or missing. Raises Unreadable if it has none of these types."""
    value = where.get(name)
    if value is not None and type(value) not in kinds:
        raise _odd(name, value)
    return value


def _odd(name: str, value: Any) -> Unreadable:
    shown = str(value)[:80] if isinstance(value, str | int | float) else f"a {type(value).__name__}"
    return Unreadable(f"the answer's {name} is {shown}")


def _count(usage: dict[str, Any], name: str) -> int:
    value = _value(usage, name, int, float) or 0
    if isinstance(value, float) and value.is_integer():  # some proxies write 7.0
        value = int(value)
    if type(value) is not int or value not in _INT32:
        raise _odd(name, value if type(value) is not int else "out of range")
    return value


def _token_ids(where: dict[str, Any], name: str) -> tuple[int, ...]:
    values = _value(where, name, list) or []
    for value in values:
        if type(value) is not int or value not in _INT32:
            raise _odd(name, value if type(value) is not int else "out of range")
    return tuple(values)


def _scores(choice: dict[str, Any], *, chat: bool) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return the tokens, as text, and their log-probabilities; none if one of these is missing."""
    scores = _value(choice, "logprobs", dict) or {}
    if chat:
        entries = _value(scores, "content", list) or []
        if odd := [entry for entry in entries if type(entry) is not dict]:
            raise _odd("logprobs", odd[0])
        tokens = [_value(entry, "token", str) or "" for entry in entries]
        logprobs = [_value(entry, "logprob", int, float) for entry in entries]
    else:
        tokens, logprobs = _value(scores, "tokens", list) or [], _value(scores, "token_logprobs", list) or []
        tokens = [_value({"tokens": token}, "tokens", str) or "" for token in tokens]
        logprobs = [_value({"token_logprobs": x}, "token_logprobs", int, float) for x in logprobs]
    if None in logprobs:
        return tuple(tokens), ()
    least, most = _LOGPROBS
    if not all(least <= x <= most for x in logprobs):  # also NaN, which JSON does not have and Python reads
        raise Unreadable("the answer has log-probabilities that are none")
    return tuple(tokens), tuple(map(float, logprobs))


def hide_key(text: str, key: str) -> str:
    """Replace the key, which an endpoint may repeat in what it says."""
    return text if key == PLACEHOLDER_KEY else text.replace(key, "[key]")


def error_message(body: str) -> str:
    """Return the message of an error body, shortened."""
    try:
        data = json.loads(body)
        error = data.get("error", data) if isinstance(data, dict) else data
        body = json.dumps(error, ensure_ascii=False) if isinstance(error, dict | list) else str(error)
    except (ValueError, RecursionError):
        pass
    body = " ".join(body.split())
    return body if len(body) <= 500 else body[:500] + "…"
