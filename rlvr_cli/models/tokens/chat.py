"""A prompt as the user's message in the model's own chat template: what --chat sends.

Enters: a prompt template, and the path or Hub id of a model. Leaves: the prompt template whose text the chat template
makes of the conversation, with `{question}` still in it. So the chat template is rendered once, and what fills, stores
and compares prompts need not know of it.

A chat template is a program in Jinja that comes with a model. Only transformers runs it, in its sandbox.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlvr_cli.data.prompts import PromptTemplate
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.pretrained import load_tokenizer
from rlvr_cli.models.tokens.tokenization import encode_prompts
from rlvr_cli.text import printable
from rlvr_cli.types import ChatThinking

logger = logging.getLogger(__name__)

# To templates that write the date, so that prompts are the same on every day; Llama 3's own fallback.
TODAY = date(2024, 7, 26)
Message = dict[str, Any]  # {role, content}, as chat templates read them
_PROBE = "What is \"{x}\" if 'é' < 2 & 3 > \\frac{1}{2}?\n\n<b>数</b>"


class ChatTemplate:
    """The chat template of a model, with what every conversation with it has.

    Args:
        path_or_id: of the model.
        thinking: what the chat template is told as `enable_thinking` and as `thinking`, the names in use; auto: nothing.
        system: the system message; empty: none but the chat template's own.
        tools: schemas of the tools that it is told of.
        tokenizer: of the model, if it is loaded.

    Raises:
        RlvrError: there is no such model, or it has no chat template.
    """

    def __init__(
        self,
        path_or_id: str | Path,
        *,
        thinking: ChatThinking = "auto",
        system: str = "",
        tools: Sequence[dict[str, Any]] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.tokenizer, self.name = tokenizer or load_tokenizer(path_or_id), printable(str(path_or_id))
        self.thinking, self.system, self.tools = thinking, system, list(tools)
        if not self.tokenizer.chat_template:
            raise RlvrError(
                f"The model {self.name} has no chat template.",
                "Leave --chat out, or use a model that was tuned to chat.",
            )

    def with_system(self, messages: Sequence[Message]) -> list[Message]:
        """The messages after the system message, if there is one and they have none."""
        given = bool(messages) and messages[0]["role"] == "system"
        return [{"role": "system", "content": self.system}] * (bool(self.system) and not given) + [*messages]

    def render(
        self,
        messages: Sequence[Message],
        *,
        answered: bool = True,
        thinks: ChatThinking | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            answered: end it with what begins an answer.
            thinks, tools: in place of its own.

        Raises:
            RlvrError: the chat template fails.
        """
        tools = self.tools if tools is None else tools
        told = self.thinking if thinks is None else thinks
        values: dict[str, Any] = {"strftime_now": TODAY.strftime, "tools": list(tools) or None}
        if told != "auto":
            values |= dict.fromkeys(("enable_thinking", "thinking"), told == "on")
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=answered, **values
                )
            )
        except Exception as error:  # whatever the program of the model's author does
            raise RlvrError(
                f"The chat template of {self.name} fails ({type(error).__name__}: {printable(str(error), keep='')}).",
                "It may not know system messages: leave --chat-system out." if self.system else "Leave --chat out.",
            ) from error

    def check_tools(self) -> None:
        """Raise RlvrError if the chat template leaves out its tools."""
        asked = self.with_system([{"role": "user", "content": _PROBE}])
        if self.tools and self.render(asked) == self.render(asked, tools=[]):
            raise RlvrError(
                f"The chat template of {self.name} knows no tools: with and without them it writes the same.",
                "Use a model that was tuned to call tools, or an environment of your own, whose texts are the user's messages.",
            )


def chat_prompt(template: PromptTemplate, chat: ChatTemplate) -> PromptTemplate:
    """Put a prompt template into the chat template of a model, up to where the model's answer begins.

    Args:
        template: the user's message. Its questions are inserted as they stand, also where the chat template would strip
            the white space around a message.

    Raises:
        RlvrError: the chat template fails, changes or leaves out a message or the tools, or has no switch for thinking.
    """

    def render(prompt: str, thinks: ChatThinking | None = None) -> str:
        return chat.render(chat.with_system([{"role": "user", "content": prompt}]), thinks=thinks)

    tokenizer, name = chat.tokenizer, chat.name
    rendered = replace(template, text=render(template.text))
    rendered = replace(rendered, start=max(rendered.text.find(template.text.strip()), 0))
    missing = next((message for message in (chat.system, template.text) if message.strip() not in rendered.text), None)
    if missing is not None or rendered.fill(_PROBE) != render(template.fill(_PROBE)):
        raise RlvrError(
            f"The chat template of {name} changes or leaves out the message {missing or _PROBE!r}.",
            "Leave --chat out, or write the conversation into a file for --prompt.",
        )
    if chat.thinking != "auto" and render(template.text, "on") == render(template.text, "off"):
        raise RlvrError(
            f"The chat template of {name} has no switch for thinking: on and off give the same text.",
            "Leave --chat-thinking out.",
        )
    chat.check_tools()
    (ids,), bare = encode_prompts(tokenizer, [rendered.text]), tokenizer(rendered.text, add_special_tokens=False)
    if ids != bare["input_ids"]:
        logger.warning(
            f"The tokenizer of {name} adds special tokens that its chat template does not write: prompts have them, as all "
            "texts of this model do."
        )
    return rendered


def tool_message(name: str, content: str, number: int) -> Message:
    """The answer to a call; `number` is that of the call in its turn, from 0."""
    return {"role": "tool", "name": name, "tool_call_id": f"{number:09d}", "content": content}


def tool_call(name: str, arguments: dict[str, Any], number: int) -> dict[str, Any]:
    """A call, as chat templates read it; `number` is that in its turn, from 0."""
    return {"id": f"{number:09d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Messages whose calls have ids, and whose answers those of the calls in their order: where one is missing, that of an episode."""
    found: list[Message] = []
    ids: list[str] = []  # of the calls that are still to be answered
    for message in messages:
        if calls := message.get("tool_calls"):
            ids = [call.get("id") or f"{number:09d}" for number, call in enumerate(calls)]
            named = [
                call if call.get("id") else {"id": i, **call} | {"id": i} for i, call in zip(ids, calls, strict=True)
            ]
            message = message | {"tool_calls": named}
        elif message["role"] == "tool" and ids:
            own = ids.pop(0)
            message = message | {"tool_call_id": message.get("tool_call_id") or own}
        found.append(message)
    return found


def num_shared(one: Sequence[object], other: Sequence[object]) -> int:
    """How many characters or ids two sequences have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
