"""Compare two runs on the same questions: which is better, by how much, and whether the difference is significant.

Enters: an open `Database`, the runs of two arms (several runs of an arm are different seeds), a phase and a step. Leaves: a
`Comparison`, whose `tables` print in any format; the last table is the verdict in words.
"""

import statistics as moments
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr_cli.analysis.database import Database
from rlvr_cli.analysis.estimators import (
    FEWEST_DISCORDANT,
    detectable_difference,
    mcnemar_exact,
    questions_needed,
    wilson_interval,
)
from rlvr_cli.analysis.named_queries import named_queries
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import Table

RESAMPLES = 2000
FEWEST_SEEDS = 3  # per arm; the spread of two runs is hardly an estimate
Answers = Mapping[str, Mapping[str, Any]]  # question -> row of the query `compare`


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of the comparison, on the shared questions; the accuracy is the mean over its runs and the questions."""

    name: str
    runs: tuple[str, ...]
    steps: tuple[int, ...]
    samples: int
    left_out: int  # questions of this arm that not every run of both arms has
    grade_errors: int  # counted as wrong
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The difference B minus A, paired by question."""

    a: Arm
    b: Arm
    questions: int
    difference: float
    low: float  # of the 95 % interval
    high: float
    b_better: int  # number of questions
    a_better: int
    mcnemar_p: float | None  # None unless each arm is one run with one sample per question
    detectable: float  # the smallest difference that this many questions detect with 80 % power
    needed: int | None  # questions needed to detect a difference as large as this one; None if no number suffices
    notes: tuple[str, ...]

    @property
    def decided(self) -> bool:
        """Whether the difference is significant. With very few discordant questions the bootstrap interval is too narrow."""
        if self.low <= 0 <= self.high:
            return False
        if self.mcnemar_p is not None:
            return self.mcnemar_p < 0.05
        return self.a_better + self.b_better >= FEWEST_DISCORDANT

    @property
    def verdict(self) -> str:
        """Which arm is better, in one sentence."""
        interval = f"95% interval {_points(self.low)} to {_points(self.high)}"
        if self.decided:
            better = self.b if self.difference > 0 else self.a
            return (
                f"{better.name} ({', '.join(better.runs)}) is better: B - A is {_points(self.difference)} points of accuracy "
                f"({interval}) on {self.questions:,} questions."
            )
        seeds = len(self.a.runs) + len(self.b.runs) > 2
        if self.difference == 0:
            more = "here they are equal"
        elif self.needed is None:
            more = "to tell this difference would take more seeds: more questions alone would not do"
        else:
            more = f"to tell this difference would take about {max(self.needed, self.questions + 1):,} questions"
        return (
            f"The data cannot tell which is better: B - A is {_points(self.difference)} points of accuracy ({interval}), and "
            f"{self.questions:,} questions{' and these seeds' if seeds else ''} show one of {100 * self.detectable:.1f} points "
            f"or more in 4 of 5 trials; {more}."
        )

    def tables(self) -> list[Table]:
        """The comparison as rows; values that do not apply are None."""
        arms = [
            (
                arm.name, ", ".join(arm.runs), ", ".join(map(str, arm.steps)), self.questions, arm.left_out, arm.samples,
                arm.grade_errors, arm.accuracy, arm.low, arm.high,
            )
            for arm in (self.a, self.b)
        ]  # fmt: skip
        columns = ("arm", "runs", "step", "questions", "left_out", "samples", "grade_errors", "accuracy", "low", "high")
        measures = [
            ("difference", self.difference, self.low, self.high),
            ("b_better", self.b_better, None, None),
            ("a_better", self.a_better, None, None),
            ("ties", self.questions - self.a_better - self.b_better, None, None),
            ("mcnemar_p", self.mcnemar_p, None, None),
            ("detectable_difference", self.detectable, None, None),
            ("questions_needed", self.needed, None, None),
        ]
        return [
            Table(columns, arms, title="arms"),
            Table(("b_minus_a", "value", "low", "high"), measures, title="difference"),
            Table(("in_words",), [(self.verdict,), *((note,) for note in self.notes)], title="verdict"),
        ]


def compare(
    database: Database,
    arm_a: Sequence[str],
    arm_b: Sequence[str],
    *,
    phase: str = "eval",
    step: int | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Compare the accuracy of two arms on the questions that all of their runs answered.

    Args:
        database: over the runs of both.
        arm_a, arm_b: ids of runs; several runs are different seeds of the same experiment.
        step: None for each run's last step of that phase.

    Raises:
        RlvrError: a run has no such rollouts, the runs share no question, or the ground truths of a question differ.
    """
    table = database.select(named_queries()["compare"].sql, {"phase": phase, "step": step})
    answers: dict[str, dict[str, dict[str, Any]]] = {run: {} for run in (*arm_a, *arm_b)}
    for values in table.rows:
        row = dict(zip(table.columns, values, strict=True))
        answers[row["run_id"]][row["example_id"]] = row
    for run, rows in answers.items():
        if not rows:
            where = f"{phase} rollouts" + ("" if step is None else f" of step {step}")
            raise RlvrError(f"{run} has no {where}.", "--phase and --step choose others.")
    shared = [question for question in answers[arm_a[0]] if all(question in rows for rows in answers.values())]
    if not shared:
        first, other = (next(iter(answers[run])) for run in (arm_a[0], arm_b[0]))
        raise RlvrError(
            "The runs share no question.", f"For example, {arm_a[0]} has {first!r}, and {arm_b[0]} has {other!r}."
        )
    rephrased = _check_same_questions(answers, shared)

    of_a, of_b = ([_shares(answers[run], shared) for run in arm] for arm in (arm_a, arm_b))  # run -> question -> share
    drawn_a, drawn_b = _resampled(of_a, of_b, resamples=resamples, seed=seed)
    means_a, means_b = (_mean_by_question(of) for of in (of_a, of_b))
    differences = [b - a for a, b in zip(means_a, means_b, strict=True)]
    better_b, better_a = (sum(sign * d > 1e-9 for d in differences) for sign in (1, -1))
    single = len(arm_a) == len(arm_b) == 1 and all(r[q]["samples"] == 1 for r in answers.values() for q in shared)
    mean_square = moments.fmean(d * d for d in differences)
    seed_variance = sum(moments.variance(map(moments.fmean, of)) / len(of) for of in (of_a, of_b) if len(of) > 1)
    difference = moments.fmean(differences)
    low, high = _percentile_interval([b - a for a, b in zip(drawn_a, drawn_b, strict=True)])
    if not mean_square:  # all resamples are equal: use the 95 % bound of a share of which none of n was observed
        high = 1 - 0.05 ** (1 / len(shared))
        low = -high

    def arm(name: str, runs: Sequence[str], of: list[list[float]], drawn: list[float]) -> Arm:
        rows = [answers[run][question] for run in runs for question in shared]
        samples, correct = (sum(row[key] for row in rows) for key in ("samples", "correct"))
        alone = samples == len(shared)
        ends = wilson_interval(correct, samples) if alone else _percentile_interval(drawn)
        if ends[0] == ends[1]:  # all resamples are equal: as if a question's samples were all alike, the worst case
            ends = wilson_interval(round(ends[0] * len(shared)), len(shared))
        return Arm(
            name=name,
            runs=tuple(runs),
            steps=tuple(dict.fromkeys(answers[run][shared[0]]["step"] for run in runs)),
            samples=samples,
            left_out=len(set().union(*(answers[run] for run in runs))) - len(shared),
            grade_errors=sum(row["grade_errors"] for row in rows),
            accuracy=moments.fmean(map(moments.fmean, of)),
            low=max(ends[0], 0.0),  # with few seeds the stretched spread can exceed the range
            high=min(ends[1], 1.0),
        )

    return Comparison(
        a=arm("A", arm_a, of_a, drawn_a),
        b=arm("B", arm_b, of_b, drawn_b),
        questions=len(shared),
        difference=difference,
        low=max(low, -1.0),
        high=min(high, 1.0),
        b_better=better_b,
        a_better=better_a,
        mcnemar_p=mcnemar_exact(better_a, better_b) if single else None,
        detectable=detectable_difference(mean_square, len(shared), seed_variance=seed_variance),
        needed=questions_needed(mean_square, difference, seed_variance=seed_variance),
        notes=tuple(_notes(len(arm_a), len(arm_b), rephrased=rephrased, questions=len(shared))),
    )


def _check_same_questions(answers: Mapping[str, Answers], shared: Sequence[str]) -> int:
    """Count the questions whose prompts differ between runs. Raises RlvrError if the ground truths of a question differ."""
    (first, base), *others = answers.items()
    rephrased = set()
    for run, rows in others:
        for question in shared:
            truth, other = base[question]["ground_truth"], rows[question]["ground_truth"]
            if truth != other:
                raise RlvrError(
                    f"The ground truth of question {question} is {truth!r} in {first} and {other!r} in {run}.",
                    "These are different questions with the same id: compare runs on the same dataset and split.",
                )
            if base[question]["prompt"] != rows[question]["prompt"]:
                rephrased.add(question)
    return len(rephrased)


def _shares(rows: Answers, questions: Sequence[str]) -> list[float]:
    return [rows[question]["correct"] / rows[question]["samples"] for question in questions]


def _mean_by_question(of: Sequence[Sequence[float]]) -> list[float]:
    return [moments.fmean(values) for values in zip(*of, strict=True)]


def _resampled(
    of_a: Sequence[Sequence[float]], of_b: Sequence[Sequence[float]], *, resamples: int, seed: int
) -> tuple[list[float], list[float]]:
    """Bootstrap the accuracies of both arms: resample seeds within each arm, and the same questions for both.

    A question is resampled with its samples in all runs. The deviations of an arm's S runs from their mean are stretched by
    sqrt(S / (S - 1)), because a bootstrap of few runs underestimates their spread by that factor.
    """
    import numpy as np

    def stretched(of: Sequence[Sequence[float]]) -> Any:
        values = np.array(of)
        mean = values.mean(axis=0)
        return mean + (values - mean) * np.sqrt(len(of) / max(1, len(of) - 1))

    values = np.concatenate([stretched(of_a), stretched(of_b)])
    questions = values.shape[1]
    rng = np.random.default_rng(seed)
    drawn_a, drawn_b = [], []
    for _ in range(resamples):
        times = np.bincount(rng.integers(questions, size=questions), minlength=questions)
        means = values @ times / questions
        drawn_a.append(float(means[: len(of_a)][rng.integers(len(of_a), size=len(of_a))].mean()))
        drawn_b.append(float(means[len(of_a) :][rng.integers(len(of_b), size=len(of_b))].mean()))
    return drawn_a, drawn_b


def _percentile_interval(drawn: Sequence[float]) -> tuple[float, float]:
    """The 2.5th and the 97.5th percentile."""
    cuts = moments.quantiles(drawn, n=40, method="inclusive")
    return cuts[0], cuts[-1]


def _notes(runs_a: int, runs_b: int, *, rephrased: int, questions: int) -> list[str]:
    notes = []
    if rephrased:
        notes.append(f"The prompts of {rephrased:,} of the {questions:,} questions differ between the runs.")
    if runs_a == runs_b == 1:
        notes.append("One run an arm: how much training with another seed would change is not in the interval.")
    elif min(runs_a, runs_b) < FEWEST_SEEDS:
        notes.append(f"Fewer than {FEWEST_SEEDS} seeds in an arm: the interval is not to be trusted.")
    return notes


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"
