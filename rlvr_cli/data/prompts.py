"""Prompt templates: text with `{question}` in it.

Enters: the name of a built-in template (prompts/NAME.prompt) or a file, and a question. Leaves: the prompt. Only
`{question}` is special in a template, and `{subject}` where the question has one; nothing is special in a question.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.multiple_choice import subject_of
from rlvr_cli.types import Example

PLACEHOLDER, SUBJECT = "{question}", "{subject}"
_DIRECTORY = Path(__file__).parent / "prompts"


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A template, and the built-in name or path that it was loaded by."""

    name: str
    text: str
    start: int = 0  # where the user's message begins, in a chat template

    def fill(self, question: str, *, subject: str = "", shots: str = "") -> str:
        """Replace every `{question}` by `question`, in one pass: the inserted text is not searched again.

        Args:
            subject: replaces every `{subject}`, unless it is empty.
            shots: what precedes the question, in the same message.
        """
        values = {PLACEHOLDER: question} | ({SUBJECT: subject} if subject else {})
        places = re.compile("|".join(map(re.escape, values)))
        parts = (self.text[: self.start], self.text[self.start :])
        before, message = (places.sub(lambda place: values[place[0]], part) for part in parts)
        return before + shots + message


def prompt_names() -> list[str]:
    """The names of the built-in templates."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.prompt"))


def load_prompt(name_or_path: str) -> PromptTemplate:
    """Load a built-in template by name, else the file at this path (UTF-8, unchanged except for a leading BOM).

    Raises:
        RlvrError: no such name or file, a file that cannot be read as UTF-8 text, or one without `{question}`.
    """
    names = prompt_names()
    path = _DIRECTORY / f"{name_or_path}.prompt" if name_or_path in names else Path(name_or_path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as e:
        close = difflib.get_close_matches(name_or_path, names, n=1)
        raise RlvrError(
            f"There is no prompt {name_or_path!r}, neither built in nor as a file.",
            (f"Did you mean {close[0]!r}? " if close else "")
            + f"The built-in prompts are {', '.join(names)}; any other prompt is a file that contains {PLACEHOLDER}.",
        ) from e
    except UnicodeDecodeError as e:
        raise RlvrError(
            f"The prompt file {name_or_path} is not UTF-8: byte {e.object[e.start]:#04x} at offset {e.start}.",
            "Save it as UTF-8.",
        ) from e
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        reason = e.strerror if isinstance(e, OSError) else e
        raise RlvrError(f"Cannot read the prompt file {name_or_path!r}: {reason}.") from e
    if PLACEHOLDER not in text:
        raise RlvrError(
            f"The prompt file {name_or_path} does not say where the question goes.", f"Put {PLACEHOLDER} into it."
        )
    return PromptTemplate(name_or_path, text)


def opens_thinking(prompt: str) -> bool:
    """Whether a prompt ends in <think>, so that a response begins with the thinking."""
    return prompt.rstrip().endswith("<think>")


def after(prompt: str, text: str) -> str:
    """The text as it follows a prompt: after a space, unless the prompt ends in white space."""
    return text if prompt[-1:].isspace() else f" {text}"


def with_thinking(prompt: str, thinking: str, answer: str | None) -> str:
    """The response to a prompt of a thinking and an answer that were given apart, in r1_zero's tags.

    Args:
        prompt: it may open the tag.
        answer: None if the thinking did not end.
    """
    opened = thinking.strip() if opens_thinking(prompt) else f"<think> {thinking.strip()}"
    return after(prompt, opened if answer is None else f"{opened} </think> {answer.lstrip()}")


def prompt_of(example: Example, template: PromptTemplate, *, shots: str = "") -> str:
    """An example's own prompt when it has one, else the template around its question, after the shots."""
    if example.prompt is not None:
        return example.prompt
    subject = subject_of(example.ground_truth) if SUBJECT in template.text else ""
    return template.fill(example.question, subject=subject, shots=shots)
