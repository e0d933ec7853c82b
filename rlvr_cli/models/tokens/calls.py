"""The tool calls in a turn of a chat model.

Enters: the text of a turn, with its special tokens. Leaves: its calls, each {"name", "arguments"}, or {"name", "problem"} if it cannot be read.
Which of the forms a model writes is what its chat template writes for a call.
"""

import json
import re
from collections.abc import Callable
from itertools import chain
from typing import Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.tokens.chat import ChatTemplate, num_shared, tool_call

Call = dict[str, Any]

TOO_DEEP = "it is nested too deeply"
_MOST_NESTED = 100  # lists and objects in each other: what is read here is written as JSON and read again elsewhere


def tagged(text: str) -> list[Call]:
    """The calls `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen and Hermes write them."""
    found = re.findall(r"<tool_call>(.*?)(</tool_call>|\Z)", text, re.DOTALL)
    return [_call(body) if closed else _unread("there is no </tool_call>") for body, closed in found]


def listed(text: str) -> list[Call]:
    """The calls `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, as Mistral writes them."""
    _, found, rest = text.partition("[TOOL_CALLS]")
    if not found:
        return []
    try:
        calls = _parsed(rest)
    except ValueError as problem:
        return [_unread(f"[TOOL_CALLS] is not followed by JSON: {problem}")]
    return [_of_value(call) for call in calls] if isinstance(calls, list) else [_unread("this is no list of calls")]


def bare(text: str) -> list[Call]:
    """The call `{"name": ..., "parameters": {...}}` that a whole turn is, as Llama 3 writes it."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    return [_call(text, "parameters")] if re.match(r'\{\s*"(name|parameters|type)"', text) else []


def form_of(chat: ChatTemplate, *, end: str) -> Callable[[str], list[Call]]:
    """Return what reads the calls that a chat template writes.

    Args:
        end: the token that ends a turn.

    Raises:
        RlvrError: it writes none, or in a form that is not known here.
    """
    expected = {"name": "look_up", "arguments": {"word": "sum"}}
    asked = chat.with_system([{"role": "user", "content": "1 + 1?"}])
    turn = {"role": "assistant", "content": "", "tool_calls": [tool_call(**expected, number=0)]}
    begun, written = chat.render(asked), chat.render([*asked, turn], answered=False)
    text = written[num_shared(begun, written) :].partition(end)[0]
    for form in (tagged, listed, bare):
        if form(text) == [expected]:
            return form
    raise RlvrError(
        f"The chat template of {chat.name} writes the calls of tools in a form that is not known here: {text[:120]!r}.",
        "The package renderers knows the forms of more models: pip install -e '.[renderers]'. Or use an environment of your own.",
    )


def spoken(text: str, *, thinks: bool = False) -> str:
    """A turn without its thinking: what is called there is not called.

    Args:
        thinks: whether the prompt has begun a thinking.
    """
    _, ended, rest = text.rpartition("</think>")
    return "" if "<think>" in rest or (thinks and not ended) else rest


def is_too_deep(value: Any) -> bool:
    """Whether a value of JSON has more lists and objects in each other than a call may have."""
    inner = [value]
    for _ in range(_MOST_NESTED + 1):
        holding = [each for each in inner if isinstance(each, dict | list)]
        inner = list(chain.from_iterable(each.values() if isinstance(each, dict) else each for each in holding))
    return bool(inner)


def _parsed(text: str) -> Any:
    """The value of a policy's JSON. Raises ValueError if it is none, or nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if is_too_deep(value):
        raise ValueError(TOO_DEEP)
    return value


def _call(text: str, arguments: str = "arguments") -> Call:
    try:
        return _of_value(_parsed(text), arguments)
    except ValueError as problem:
        return _unread(str(problem) if str(problem) == TOO_DEEP else f"this is no JSON: {problem}")


def _of_value(value: Any, arguments: str = "arguments") -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _unread(f'this is not {{"name": ..., "{arguments}": {{...}}}}')
    given = value.get(arguments, {})
    if isinstance(given, str):  # JSON in JSON, as some models write it
        try:
            given = _parsed(given)
        except ValueError:
            given = None
    if not isinstance(given, dict):
        return _unread(f"its {arguments} are no JSON object", value["name"])
    return {"name": value["name"], "arguments": given}


def _unread(problem: str, name: str = "") -> Call:
    return {"name": name, "problem": problem}
