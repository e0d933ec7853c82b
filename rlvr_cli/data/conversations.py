"""Conversations as traces: rows with `messages`, as chat models and their tools write them.

Enters: a row. Leaves: its conversation, of which the assistant's turns are trained on.
"""

import json
from itertools import pairwise
from typing import Any

from rlvr_cli.data.files import BadRow, Number, Row, join_names
from rlvr_cli.text import storable, with_texts
from rlvr_cli.types import Conversation

_SHAPE = 'Write {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}.'
_TOOLS = 'Leave them out, or write [{"type": "function", "function": {"name": "...", "parameters": {...}}}, ...].'
_ROLES = ("system", "user", "assistant", "tool")


def conversation_of(row: Row) -> Conversation | None:
    """The conversation of a row; None if it has none.

    Raises:
        BadRow: its messages are not a conversation that ends with a turn of the assistant.
    """
    if row.values.get("messages") is None:
        return None
    messages, tools = (with_texts(row.values.get(key), _read) for key in ("messages", "tools"))
    if row.nulls_fill:
        messages, tools = _without_nulls(messages), _without_nulls(tools)
    messages = [_with_text(message) for message in messages] if isinstance(messages, list) else messages
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise BadRow(row.where, f"its messages are not a list of {{role, content}}{_found(messages)}.", _SHAPE)
    if not all(_is_named(call) for message in messages for call in message.get("tool_calls") or []):
        raise BadRow(row.where, "a call in its messages has no name.", 'Write {"function": {"name": "...", ...}}.')
    tools = [_wrapped(tool) for tool in tools] if isinstance(tools, list) else tools
    if tools is not None and not (isinstance(tools, list) and all(map(_is_named, tools))):
        raise BadRow(row.where, "its tools are not a list of JSON schemas with names.", _TOOLS)
    roles = [message["role"] for message in messages]
    own = [place for place, role in enumerate(roles) if role == "assistant"]
    if "user" not in roles[: own[0] if own else 0] or roles[-1] != "assistant":
        raise BadRow(row.where, "its messages do not go from the user to the assistant.", _SHAPE)
    if any(b - a == 1 for a, b in pairwise(own)) or "system" in roles[1:]:
        raise BadRow(row.where, "a turn of its assistant, or its system message, is not where one can be.", _SHAPE)
    return Conversation(tuple(map(_readable, messages)), None if tools is None else tuple(tools))


def _read(text: str) -> Any:
    """A text of a row; a number is a number, since a tool's argument 2 is not the text "2"."""
    return json.loads(text) if isinstance(text, Number) else storable(text)


def _without_nulls(value: Any) -> Any:
    """A value of JSON whose objects have no fields that are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        return False
    calls = message.get("tool_calls") or []
    spoken = isinstance(message.get("content") or "", str) and (message["role"] == "assistant" or not calls)
    return isinstance(calls, list) and spoken and bool(message.get("content") is not None or calls)


def _is_named(tool: object) -> bool:
    """Whether a tool, or a call, names its function."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return isinstance(name, str) and bool(name)


def _wrapped(tool: Any) -> Any:
    """A tool as chat templates read it, where it is the bare schema of a function."""
    if not isinstance(tool, dict) or tool.get("function") is not None or not isinstance(tool.get("name"), str):
        return tool
    return {
        "type": "function",
        "function": {key: value for key, value in tool.items() if key not in ("type", "function")},
    }


def _readable(message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates read it: with a text, and the arguments of a call as an object."""
    message = message | {"content": message.get("content") or ""}
    if not message.get("tool_calls"):
        return {key: value for key, value in message.items() if key != "tool_calls"}
    return message | {
        "tool_calls": [call | {"function": _with_object(call["function"])} for call in message["tool_calls"]]
    }


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        return function
    return function | {"arguments": with_texts(arguments, storable)}


def _with_text(message: Any) -> Any:
    """A message with a text in place of a list of parts that are all texts."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not parts or not isinstance(parts, list) or not all(map(_is_text, parts)):
        return message
    return message | {"content": "".join(part["text"] for part in parts)}


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _found(messages: object) -> str:
    """How an error names the first of these messages that is none."""
    for number, message in enumerate(messages if isinstance(messages, list) else [], start=1):
        if not isinstance(message, dict) or not message.get("role"):
            return f": message {number} has no role"
        if message["role"] not in _ROLES:
            return f": the role of message {number} is {join_names([message['role']])}, and not {join_names(_ROLES)}"
        if isinstance(message.get("content"), list):
            return f": the content of message {number} has parts that are no texts"
        if not _is_message(message):
            return f": message {number} has other content, or calls that are none"
    return ""
