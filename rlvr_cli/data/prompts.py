"""Prompt templates: text with `{question}` in it.

Enters: the name of a built-in template (prompts/NAME.prompt) or a file, and a question. Leaves: the prompt; and of a stored
prompt, the question. Only `{question}` is special in a template, and `{subject}` where the question has one; nothing is special in
a question.
"""

import difflib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.multiple_choice import subject_of
from rlvr_cli.runs.readers import fact_of, prompt_template
from rlvr_cli.text import filled_in
from rlvr_cli.types import Example

PLACEHOLDER, SUBJECT = "{question}", "{subject}"
SEPARATOR = "\n\n"  # after each shot of --shots
_DIGITS = 16  # of the digest of shots
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


@dataclass(frozen=True, slots=True)
class StoredPrompts:
    """How a run has made prompts of its questions, as far as run.json tells."""

    template: str = ""  # empty: unknown
    start: int = 0  # where the user's message begins, in a chat template
    shots: int = 0  # before each question
    beginnings: tuple[tuple[int, str], ...] = ()  # of `beginnings_of`, the shortest first; empty in older runs

    def question_in(self, prompt: str, *, ground_truth: str = "") -> str | None:
        """The question in one of these prompts; None if it is not known.

        With shots it begins where these end, as run.json tells. In older runs it begins after an empty line, as each shot but the
        first does. So as many places fit the template as there are shots, or one if the shots have other prompts; and where the
        template begins with the question, each of its own empty lines is such a place in each shot. If another number fits, since
        a text has empty lines of its own, it is not known.
        """
        before, message = self._parts(ground_truth)
        if not self.shots or not prompt.startswith(before):
            return filled_in(prompt, before + message, placeholder=PLACEHOLDER)
        places = self._ends(prompt) if self.beginnings else _after_empty_lines(prompt, self.start)
        fitting = [at for at in places if filled_in(prompt, message, placeholder=PLACEHOLDER, at=at)]
        known = bool(fitting) if self.beginnings else len(fitting) in (1, self.shots, self._num_places(prompt, message))
        return filled_in(prompt, message, placeholder=PLACEHOLDER, at=fitting[-1]) if known else None

    def question_of(self, row: Mapping[str, Any]) -> str | None:
        """The question of a rollout, by its `prompt`, `own_prompt` and `ground_truth`; None if it is not known."""
        return None if row["own_prompt"] else self.question_in(row["prompt"], ground_truth=row["ground_truth"])

    def asks(self, prompt: str, question: str, *, ground_truth: str = "") -> bool:
        """Whether a prompt ends in the template around this question, at its beginning or after an empty line."""
        before, message = self._parts(ground_truth)
        asked = message.replace(PLACEHOLDER, question)
        rest = prompt.removeprefix(before).removesuffix(asked)
        whole = prompt == before + rest + asked and PLACEHOLDER in message
        return whole and (not rest or rest.endswith(SEPARATOR))

    def question_with_shots_in(self, prompt: str) -> str | None:
        """What stands in the question's place, with the shots before it; None if they are elsewhere."""
        return filled_in(prompt, self.template, placeholder=PLACEHOLDER)

    def _parts(self, ground_truth: str) -> tuple[str, str]:
        """What precedes the user's message in a chat template, and the message, with its subject."""
        before, message = self.template[: self.start], self.template[self.start :]
        subject = subject_of(ground_truth) if SUBJECT in message else ""
        return before, message.replace(SUBJECT, subject) if subject else message

    def _num_places(self, prompt: str, message: str) -> int:
        """How many places of a prompt fit, if its shots are of the same template and only this has empty lines."""
        in_each = message.startswith(PLACEHOLDER) and prompt.count(message.rpartition(PLACEHOLDER)[2]) == self.shots + 1
        return self.shots * (1 + message.count(SEPARATOR) if in_each else 1)

    def _ends(self, prompt: str) -> Iterator[int]:
        """Yield where the shots of a prompt end; hardly ever can they end at several places."""
        digest, at = hashlib.sha256(), self.start
        for length, known in self.beginnings:
            digest.update(_encoded(prompt[at : self.start + length]))
            at = self.start + length
            if digest.hexdigest()[:_DIGITS] == known:
                yield at


def beginnings_of(texts: Iterable[str]) -> list[tuple[int, str]]:
    """What run.json has of the shots that precede questions: the length of each text in characters, and its digest."""
    return sorted((len(text), hashlib.sha256(_encoded(text)).hexdigest()[:_DIGITS]) for text in texts)


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _after_empty_lines(text: str, start: int) -> Iterator[int]:
    return (line.end() for line in re.compile(SEPARATOR).finditer(text, start))


def stored_prompts(metadata: Mapping[str, Any]) -> StoredPrompts:
    """How a run has made its prompts. Where the shots stand in a chat template is known in older runs of a built-in --prompt alone.

    Args:
        metadata: its run.json.
    """
    template, shots = prompt_template(metadata), fact_of(metadata, "dataset", "shots", "count")
    if not isinstance(shots, int) or not shots:
        return StoredPrompts(template)
    name, start = (fact_of(metadata, "prompt", fact) for fact in ("name", "start"))
    if not isinstance(start, int):
        start = template.find(load_prompt(name).text.strip()) if name in prompt_names() else 0
    of_both = (fact_of(metadata, which, "beginnings") for which in ("dataset", "eval_dataset"))
    try:
        beginnings = sorted({(int(length), str(digest)) for of_one in of_both for length, digest in of_one or ()})
    except (TypeError, ValueError):  # damaged
        beginnings = []
    return StoredPrompts(template, max(start, 0), shots, tuple(beginnings))


def prompt_names() -> list[str]:
    """The names of the built-in templates."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.prompt"))


def load_prompt(name_or_path: str) -> PromptTemplate:
    """Load a built-in template by name, else the file at this path (UTF-8, unchanged except for a leading BOM).

    Raises:
        RlvrError: no such name or file, a file that cannot be read as UTF-8 text, or one without `{question}`.
    """
    names = prompt_names()
    if not name_or_path:
        raise RlvrError("The prompt has no name.", f"Give --prompt {', '.join(names)}, or a file.")
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


@cache
def _built_in_texts() -> list[str]:
    texts = (load_prompt(name).text.strip() for name in prompt_names())
    return [text for text in texts if text != PLACEHOLDER]


def question_within(text: str, template: str = "") -> str | None:
    """What was put into a built-in template, or into this one, to make a text; None if it was made with neither."""
    templates = (*_built_in_texts(), template.strip())
    inside = (filled_in(text.strip(), one, placeholder=PLACEHOLDER) for one in templates)
    return next(filter(None, inside), None)


def compared_text(example: Example, template: str = "") -> str:
    """The text by which one question is told from another: white space aside, and what `question_within` takes off."""
    text = example.question or example.prompt or ""
    return " ".join((question_within(text, template) or text).split())


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
