"""Try a grader before any training.

Enters: a grader pool, and questions or stored responses. Leaves: what the grader makes of a perfect, an empty and a wrong answer
to each question and of each stored response, as tables.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from rlvr_cli.data.prompts import PromptTemplate, prompt_of, stored_prompts
from rlvr_cli.graders import reference_response
from rlvr_cli.rollouts.metrics import mean_or_none
from rlvr_cli.rollouts.regrade import GRADED_COLUMNS, graded_text, known_example
from rlvr_cli.rollouts.requests import request_seed
from rlvr_cli.runs.readers import read_parts, read_run
from rlvr_cli.types import Example, Grade, Graders, Table

SHOWN_CASES = 2  # of each kind


@dataclass(frozen=True, slots=True)
class Case:
    """A response to be graded."""

    kind: str  # perfect, empty, wrong or stored
    response: str
    example: Mapping[str, Any]  # the fields of an `Example`

    @property
    def ground_truth(self) -> str:
        return self.example["ground_truth"]


@dataclass(frozen=True, slots=True)
class Trial:
    """The cases of one kind with their grades."""

    cases: Sequence[Case]
    grades: Sequence[Grade]
    seconds: float  # of all, by one worker

    @property
    def failed(self) -> int:
        return sum(grade.error is not None for grade in self.grades)

    @property
    def mean_reward(self) -> float | None:
        """Of the grades that did not fail."""
        return mean_or_none(grade.reward for grade in self.grades if grade.reward is not None)


def question_cases(examples: Sequence[Example], template: PromptTemplate, *, grader: str) -> list[Case]:
    """Return a perfect, an empty and a wrong answer to each question; the wrong one is the perfect answer to another question.

    A perfect answer has the format that a built-in grader asks for; for a user's function, that of the prompt: a box if the
    prompt is the bare question or asks for one, else the tags of r1_zero.
    """
    boxed = template.name == "question_only" or ("\\boxed" in template.text and "<answer>" not in template.text)
    reader = "question_only" if ".py:" in grader and boxed else grader
    answers = [(e.ground_truth, reference_response(reader, e.ground_truth)) for e in examples]
    cases: dict[str, list[Case]] = {"perfect": [], "empty": [], "wrong": []}
    for number, (example, (truth, perfect)) in enumerate(zip(examples, answers, strict=True)):
        fields = asdict(example) | {"prompt": prompt_of(example, template)}
        others = (a for t, a in answers[number + 1 :] + answers[:number] if a is not None and t != truth)
        texts = {"perfect": perfect, "empty": "", "wrong": next(others, None)}
        for kind, text in texts.items():
            if text is not None:
                cases[kind].append(Case(kind, text, fields))
    return [case for of_kind in cases.values() for case in of_kind]


def stored_cases(run: Path, *, limit: int) -> list[Case]:
    """Draw stored responses of a run, the same each time, as `rlvr grade` gives them to a grader.

    Not the first ones: those that end early are committed early.
    """
    prompts = stored_prompts(read_run(run).metadata)
    drawn: list[tuple[int, dict[str, Any]]] = []
    for part in read_parts(run, columns=("phase", "step", *GRADED_COLUMNS)):
        keys = part.select(["phase", "step", "example_id", "sample_index"]).to_pylist()
        first = sorted((request_seed(0, **key), place) for place, key in enumerate(keys))[:limit]
        drawn += [(turn, part.slice(place, 1).to_pylist()[0]) for turn, place in first]
        drawn = sorted(drawn, key=itemgetter(0))[:limit]
    return [Case("stored", graded_text(row), known_example(row, prompts=prompts)) for _, row in drawn]


def try_grader(pool: Graders, cases: Sequence[Case]) -> list[Trial]:
    """Grade the cases, one kind after the other, and measure the time; if the first one hangs or crashes, only that one.

    Args:
        pool: of one worker, so that its time is that of the grader.
    """
    first = _trial(pool, cases[:1])  # it also pays for the start of the worker
    if first.grades[0].error in ("timeout", "crash"):
        return [first]
    kinds = dict.fromkeys(case.kind for case in cases)
    return [_trial(pool, [case for case in cases if case.kind == kind]) for kind in kinds]


def _trial(pool: Graders, cases: Sequence[Case]) -> Trial:
    started = time.monotonic()
    pairs = [(case.response, case.ground_truth) for case in cases]
    grades = pool.grade(pairs, example_of=lambda i: cases[i].example)
    return Trial(cases, grades, time.monotonic() - started)


def trial_tables(trials: Sequence[Trial]) -> list[Table]:
    """What came back, the first cases of each kind, and the errors with their lines."""
    tables = [
        Table(
            ("responses", "number", "failed", "mean_reward", "lowest", "highest", "ms_each"),
            [_totals(trial) for trial in trials],
            title="rewards",
        ),
        Table(
            ("responses", "example", "ground_truth", "response", "reward", "category", "failure_kind"),
            [
                (c.kind, c.example["id"], c.ground_truth, c.response[-120:], g.reward, g.category, g.failure_kind)
                for trial in trials
                for c, g in islice(zip(trial.cases, trial.grades, strict=True), SHOWN_CASES)
            ],
            title="examples",
        ),
    ]
    if errors := list(_errors(trials)):
        tables.append(Table(("responses", "error", "detail", "times", "example"), errors, title="errors"))
    return tables


def _totals(trial: Trial) -> tuple[Any, ...]:
    rewards = [grade.reward for grade in trial.grades if grade.reward is not None]
    lowest, highest = min(rewards, default=None), max(rewards, default=None)
    each = 1000 * trial.seconds / len(trial.cases)
    return trial.cases[0].kind, len(trial.cases), trial.failed, trial.mean_reward, lowest, highest, each


def _errors(trials: Sequence[Trial]) -> Iterator[tuple[Any, ...]]:
    for trial in trials:
        first: dict[tuple[str, str | None], str] = {}
        times: Counter[tuple[str, str | None]] = Counter()
        for case, grade in zip(trial.cases, trial.grades, strict=True):
            if grade.error is not None:
                first.setdefault((grade.error, grade.error_detail), case.example["id"])
                times[grade.error, grade.error_detail] += 1
        for (error, detail), count in times.most_common(5):
            yield trial.cases[0].kind, error, detail, count, first[error, detail]
