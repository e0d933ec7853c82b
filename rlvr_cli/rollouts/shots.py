"""Few-shot prompts: traces of other questions before the question that is asked (--shots).

Enters: the questions of a dataset, and where their shots come from. Leaves: the same questions, each with its whole prompt. A
shot is what the prompt template makes of its question, and its response; shots and question are apart by an empty line, as
lm-evaluation-harness sets them by default. With --chat all of it is the user's message.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlvr_cli.config.shared.prompt import ShotOptions
from rlvr_cli.config.shared.questions import REASONING_GYM, VERIFIERS
from rlvr_cli.data.datasets import Dataset, load_dataset
from rlvr_cli.data.mmlu import MMLU
from rlvr_cli.data.prompts import SEPARATOR, PromptTemplate, beginnings_of, compared_text, load_prompt, prompt_of
from rlvr_cli.data.traces import response_from_solution
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.multiple_choice import subject_of
from rlvr_cli.runs.storage.spilled import spilled
from rlvr_cli.terminal import console
from rlvr_cli.types import Example


@dataclass(frozen=True)
class Shots:
    """The traces that may precede a question."""

    name: str  # of their dataset
    split: str | None
    count: int  # before each question
    traces: Mapping[str, Sequence[tuple[str, str]]]  # by subject, in order: the text of the question, and the shot
    by_subject: bool  # whether a question has shots of its subject alone
    template: str  # of --prompt

    def before(self, example: Example) -> str:
        """What precedes a question: the first shots that are not of this question itself.

        Raises:
            RlvrError: there are too few.
        """
        subject = subject_of(example.ground_truth) if self.by_subject else ""
        own = compared_text(example, self.template)
        others = [shot for question, shot in self.traces.get(subject, ()) if question != own]
        if len(others) < self.count:
            where = f"{self.name}{f' ({self.split})' if self.split else ''}"
            raise RlvrError(
                f"--shots {self.count}: {where} has {len(others)} traces{f' of {subject!r}' if self.by_subject else ''} "
                f"beside the question {example.id}.",
                f"Ask for {len(others)} or fewer." if others else "Name others with --shots-dataset.",
            )
        return "".join(f"{shot}{SEPARATOR}" for shot in others[: self.count])

    @property
    def facts(self) -> dict[str, Any]:
        """What run.json says of them."""
        digest = hashlib.sha256(json.dumps({s: list(t) for s, t in self.traces.items()}).encode())
        return {"name": self.name, "split": self.split, "count": self.count, "fingerprint": digest.hexdigest()}


def with_shots(
    dataset: Dataset, config: ShotOptions, template: PromptTemplate, *, spec: str, reading: Mapping[str, Any]
) -> Dataset:
    """Give each question its whole prompt, with its shots before it; without --shots the dataset as it is.

    Args:
        template: of --prompt, in the chat template with --chat.
        spec: of the dataset.
        reading: the fields of its rows, which are not those of --shots-dataset, and `skip_bad_lines`, as for `load_dataset`.

    Raises:
        RlvrError: there are no traces, or too few; or a question comes with a prompt of its own.
    """
    if not config.shots:
        return dataset
    formatted = next((e.id for e in dataset.examples if e.prompt is not None), None)
    if formatted is not None:
        raise RlvrError(
            f"The question {formatted} comes with a prompt of its own, before which --shots puts nothing.",
            "Leave --shots out, or if it is the question: --question-field prompt",
        )
    shots = load_shots(config, dataset.examples, spec=spec, reading=reading)
    texts: set[str] = set()  # few: shots differ by subject, and where the question would be one of its own

    def asked(example: Example) -> Example:
        before = shots.before(example)
        texts.add(before)
        return replace(example, prompt=prompt_of(example, template, shots=before))

    examples = spilled(map(asked, dataset.examples), Example)
    return replace(dataset, examples=examples, shots=shots.facts, beginnings=beginnings_of(texts))


def load_shots(config: ShotOptions, examples: Sequence[Example], *, spec: str, reading: Mapping[str, Any]) -> Shots:
    """Read the traces that precede the questions of `examples`: the first rows of --shots-dataset, else of another split of `spec`."""
    source, template = config.shots_dataset or spec, load_prompt(config.prompt)
    by_subject = source.startswith(MMLU)
    if not config.shots_dataset and (source.startswith((REASONING_GYM, VERIFIERS)) or Path(source).is_file()):
        what = "is one file, without another split" if Path(source).is_file() else "has no traces"
        raise RlvrError(
            f"--shots: {source} {what} to take them from.",
            "Name traces with --shots-dataset: a file of {prompt, response} or {question, solution}, or a dataset with a training split.",
        )

    def first(limit: int | None) -> Dataset:
        return load_dataset(
            source,
            split="dev" if by_subject else None,
            limit=limit,
            purpose="traces",
            **({"skip_bad_lines": reading["skip_bad_lines"]} if config.shots_dataset else reading),
        )

    limit = None if by_subject else config.shots + 1  # one of them may be the question
    found = first(limit)
    while limit and found.rows == limit and limit - _most_of_one(examples, found, template) < config.shots:
        limit *= 2  # a question has several traces
        found = first(limit)
    console.report_skipped_lines(found.num_skipped, found.skipped)
    traces: dict[str, list[tuple[str, str]]] = {}
    for example in found.examples:
        traces.setdefault(subject_of(example.ground_truth) if by_subject else "", []).append(
            (compared_text(example, template.text), _shot(example, template))
        )
    return Shots(found.name, found.split, config.shots, traces, by_subject, template.text)


def _most_of_one(examples: Sequence[Example], found: Dataset, template: PromptTemplate) -> int:
    """How many of the traces are of one question of `examples`, at most."""
    counts = Counter(compared_text(e, template.text) for e in found.examples)
    if max(counts.values()) == 1:
        return 1  # whichever it is
    return max(counts[compared_text(e, template.text)] for e in examples)


def _shot(example: Example, template: PromptTemplate) -> str:
    prompt = prompt_of(example, template)
    response = example.response or response_from_solution(replace(example, prompt=prompt))
    if response is None or example.turns is not None or example.conversation is not None:
        raise RlvrError(f"The trace {example.id} is a conversation, and a shot is one question with its response.")
    return f"{prompt}{response}".rstrip()
