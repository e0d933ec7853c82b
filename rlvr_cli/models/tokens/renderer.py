"""The package `renderers`, which knows the chat templates of some models: an optional extra.

Enters: the name of a model, its chat template. Leaves: the ids that follow a turn, and the calls in a turn. It is given a tokenizer in which
markers of a message are text (`Markers`); all that it does with ids is its own.
"""

from collections.abc import Sequence
from typing import Any

from rlvr_cli.models.tokens.calls import TOO_DEEP, is_too_deep
from rlvr_cli.models.tokens.chat import ChatTemplate, Message
from rlvr_cli.models.tokens.markers import Markers


class Renderer:
    """What `renderers` knows of a model."""

    def __init__(self, renderer: Any, tools: list[dict[str, Any]]) -> None:
        self._renderer, self._tools = renderer, tools or None

    @classmethod
    def of(cls, model: str, chat: ChatTemplate, markers: Markers) -> "Renderer | None":
        """The renderer of a model; None if the package is not installed or does not know the model."""
        try:
            from renderers import base, configs
        except ImportError:
            return None
        if model not in base.MODEL_RENDERER_MAP:
            return None
        given = {} if chat.thinking == "auto" else {"enable_thinking": chat.thinking == "on"}
        config = configs.AutoRendererConfig(thinking_retention="all")  # of earlier turns, as they were sampled
        tokenizer = _Tokenizer(chat.tokenizer, markers, name=model)
        try:
            return cls(base.create_renderer(tokenizer, config, chat_template_kwargs=given or None), chat.tools)
        except (AssertionError, ValueError):  # it lacks tokens of the model, or the chat template a switch
            return None

    def after(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], messages: Sequence[Message]
    ) -> list[int] | None:
        """The ids that follow; None where it does not know them, or they would change ids so far."""
        before = [*prompt_ids, *response_ids]
        found = self._renderer.bridge_to_next_turn([*prompt_ids], [*response_ids], [*messages], tools=self._tools)
        if found is None or found.token_ids[: len(before)] != before:
            return None
        return found.token_ids[len(before) :]

    def calls(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[dict[str, Any]]:
        """The calls in a turn, as `calls.Call`."""
        try:
            found = self._renderer.parse_response([*ids], tools=self._tools, prompt_ids=[*prompt_ids])
        except RecursionError:
            return [{"name": "", "problem": f"the call cannot be read: {TOO_DEEP}"}]
        return [_read(call) for call in found.tool_calls]


def _read(call: Any) -> dict[str, Any]:
    name = call.name if isinstance(call.name, str) else ""
    if call.status != "ok" or not isinstance(call.arguments, dict):
        problem = f"the call cannot be read ({call.status})"
    elif not isinstance(call.name, str):
        problem = "the call cannot be read: its name is no text"
    elif is_too_deep(call.arguments):
        problem = f"the call cannot be read: {TOO_DEEP}"
    else:
        return {"name": name, "arguments": call.arguments}
    return {"name": name, "problem": problem}


class _Tokenizer:
    """A tokenizer that reads hidden markers as text; without offsets, which the package does not need for ids."""

    def __init__(self, tokenizer: Any, markers: Markers, *, name: str) -> None:
        self._tokenizer, self._markers = tokenizer, markers
        self.name_or_path = name

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":  # with it, the tokenizer would be asked for offsets
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **_: Any) -> list[int]:
        return self._markers.ids(text)
