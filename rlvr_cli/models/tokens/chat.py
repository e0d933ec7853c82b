"""A prompt as the user's message in the model's own chat template: what --chat sends.

Enters: a prompt template, and the path or Hub id of a model. Leaves: the prompt template whose text the chat template
makes of the conversation, with `{question}` still in it. So the chat template is rendered once, and what fills, stores
and compares prompts need not know of it.

A chat template is a program in Jinja that comes with a model. Only transformers runs it, in its sandbox.
"""

import logging
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from rlvr_cli.data.prompts import PromptTemplate
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.pretrained import load_tokenizer
from rlvr_cli.models.tokens.tokenization import encode_prompts
from rlvr_cli.text import printable
from rlvr_cli.types import ChatThinking

logger = logging.getLogger(__name__)

# To templates that write the date, so that prompts are the same on every day; Llama 3's own fallback.
TODAY = date(2024, 7, 26)
_PROBE = "What is \"{x}\" if 'é' < 2 & 3 > \\frac{1}{2}?\n\n<b>数</b>"


def chat_prompt(
    template: PromptTemplate, path_or_id: str | Path, *, thinking: ChatThinking = "auto", system: str = ""
) -> PromptTemplate:
    """Put a prompt template into the chat template of a model, up to where the model's answer begins.

    Args:
        template: the user's message. Its questions are inserted as they stand, also where the chat template would strip
            the white space around a message.
        thinking: what the chat template is told as `enable_thinking` and as `thinking`, the names in use; auto: nothing.
        system: the system message; empty: none but the chat template's own.

    Raises:
        RlvrError: there is no such model, or it has no chat template; the chat template fails, changes or leaves out a
            message, or has no switch for thinking.
    """
    tokenizer, name = load_tokenizer(path_or_id), printable(str(path_or_id))
    if not tokenizer.chat_template:
        raise RlvrError(
            f"The model {name} has no chat template.", "Leave --chat out, or use a model that was tuned to chat."
        )

    def render(prompt: str, thinks: ChatThinking = thinking) -> str:
        messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": prompt}]
        values: dict[str, Any] = {"strftime_now": TODAY.strftime}
        if thinks != "auto":
            values |= dict.fromkeys(("enable_thinking", "thinking"), thinks == "on")
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **values))
        except Exception as error:  # whatever the program of the model's author does
            raise RlvrError(
                f"The chat template of {name} fails ({type(error).__name__}: {printable(str(error), keep='')}).",
                "It may not know system messages: leave --chat-system out." if system else "Leave --chat out.",
            ) from error

    rendered = replace(template, text=render(template.text))
    missing = next((message for message in (system, template.text) if message.strip() not in rendered.text), None)
    if missing is not None or rendered.fill(_PROBE) != render(template.fill(_PROBE)):
        raise RlvrError(
            f"The chat template of {name} changes or leaves out the message {missing or _PROBE!r}.",
            "Leave --chat out, or write the conversation into a file for --prompt.",
        )
    if thinking != "auto" and render(template.text, "on") == render(template.text, "off"):
        raise RlvrError(
            f"The chat template of {name} has no switch for thinking: on and off give the same text.",
            "Leave --chat-thinking out.",
        )
    (ids,), bare = encode_prompts(tokenizer, [rendered.text]), tokenizer(rendered.text, add_special_tokens=False)
    if ids != bare["input_ids"]:
        logger.warning(
            f"The tokenizer of {name} adds special tokens that its chat template does not write: prompts have them, as all "
            "texts of this model do."
        )
    return rendered
