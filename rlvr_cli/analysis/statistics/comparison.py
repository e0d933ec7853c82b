"""Compare two runs on the same questions: which is better, by how much, and whether the difference is significant.

Enters: an open `Database`, the runs of two arms (several runs of an arm are different seeds), a phase and a step. Leaves: a
`Comparison`, whose `tables` print in any format, and whose `verdict` says it in words.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rlvr_cli.analysis.queries.database import Database
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.analysis.statistics.estimators import (
    FEWEST_DISCORDANT,
    Spread,
    detectable_difference,
    effective_number,
    mcnemar_exact,
    questions_needed,
    share_interval,
    spread_of,
    t_quantile,
    t_test,
)
from rlvr_cli.analysis.statistics.progress import read_progress, shared_steps
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import PValue, Table

FEWEST_SEEDS = 3  # per arm; two hardly show how seeds vary: the interval is wide, and nothing is promised
NOT_PROMISED = f"What could be told with more questions would take {FEWEST_SEEDS} seeds an arm to say."
ONE_RUN = "One run an arm: how much training with another seed would change is not in the interval."
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
    t_p: float  # of the t-test that the interval belongs to
    mcnemar_p: float | None  # None unless each arm is one run with one sample per question
    # The smallest difference that this many questions detect with 80 % power; None if questions or seeds are too few to say.
    detectable: float | None
    # Questions needed to detect a difference as large as this one; None if no number suffices, or if seeds are too few to say.
    needed: int | None
    notes: tuple[str, ...]

    @property
    def p(self) -> float:
        """The two-sided p-value: McNemar's exact one where there is one."""
        return self.t_p if self.mcnemar_p is None else self.mcnemar_p

    @property
    def decided(self) -> bool:
        """Whether the difference is significant: the interval excludes 0, and as many questions differ as an exact test needs."""
        if self.low <= 0 <= self.high:
            return False
        if self.mcnemar_p is not None:
            return self.mcnemar_p < 0.05
        return self.a_better + self.b_better >= FEWEST_DISCORDANT

    @property
    def too_few(self) -> str:
        """Why nothing is decided although the interval excludes 0, or whatever it is with so few questions; else empty."""
        differ = self.a_better + self.b_better
        if self.decided or (self.low <= 0 <= self.high and self.questions >= FEWEST_DISCORDANT):
            return ""
        if differ >= FEWEST_DISCORDANT:
            return f"McNemar's exact test, which decides, does not show it: p = {PValue(self.p).text}."
        count = f"Only {differ} question{'s differ' if differ > 1 else ' differs'}" if differ else "No question differs"
        return f"{count}; at least {FEWEST_DISCORDANT} must."

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
        unsure = (
            f"The data cannot tell which is better: B - A is {_points(self.difference)} points of accuracy ({interval})"
        )
        if self.detectable is None:
            return f"{unsure}. {self.too_few or NOT_PROMISED}"
        seeds = len(self.a.runs) + len(self.b.runs) > 2
        if self.difference == 0:
            more = "here they are equal"
        elif self.needed is None:
            more = "to tell this difference would take more seeds: more questions alone would not do"
        else:
            more = f"to tell this difference would take about {max(self.needed, self.questions + 1):,} questions"
        return (
            f"{unsure}, and {self.questions:,} questions{' and these seeds' if seeds else ''} show one of {100 * self.detectable:.1f} points "
            f"or more in 4 of 5 trials; {more}. {self.too_few}".rstrip()
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
            ("mcnemar_p", None if self.mcnemar_p is None else PValue(self.mcnemar_p), None, None),
            ("detectable_difference", self.detectable, None, None),
            ("questions_needed", self.needed, None, None),
        ]
        return [
            Table(columns, arms, title="arms"),
            Table(("b_minus_a", "value", "low", "high"), measures, title="difference"),
        ]


def compare(
    database: Database,
    arm_a: Sequence[str],
    arm_b: Sequence[str],
    *,
    phase: str = "eval",
    step: int | None = None,
) -> Comparison:
    """Compare the accuracy of two arms on the questions that all of their runs answered.

    Args:
        database: over the runs of both, and perhaps others.
        arm_a, arm_b: ids of runs; several runs are different seeds of the same experiment.
        step: None for each run's last step of that phase.

    Raises:
        RlvrError: a run has no such rollouts, the runs share no question, or the ground truths of a question differ.
    """
    answers = _answers(database, (*arm_a, *arm_b), phase=phase, step=step)
    shared = [question for question in answers[arm_a[0]] if all(question in rows for rows in answers.values())]
    if not shared:
        first, other = (next(iter(answers[run])) for run in (arm_a[0], arm_b[0]))
        raise RlvrError(
            "The runs share no question.", f"For example, {arm_a[0]} has {first!r}, and {arm_b[0]} has {other!r}."
        )
    rephrased = _check_same_questions(answers, shared)

    of_a, of_b = ([_shares(answers[run], shared) for run in arm] for arm in (arm_a, arm_b))  # run -> question -> share
    samples_a, samples_b = (sum(answers[run][q]["samples"] for run in arm for q in shared) for arm in (arm_a, arm_b))
    found = paired_difference(of_a, of_b, sample=len(shared) / min(samples_a, samples_b))
    better_b, better_a = (sum(sign * d > 1e-9 for d in found.by_question) for sign in (1, -1))
    lone = len(arm_a) == len(arm_b) == 1
    promises = lone or min(len(arm_a), len(arm_b)) >= FEWEST_SEEDS
    enough = len(shared) >= FEWEST_DISCORDANT
    single = lone and all(r[q]["samples"] == 1 for r in answers.values() for q in shared)

    def arm(name: str, runs: Sequence[str], of: list[list[float]], samples: int) -> Arm:
        accuracy = math.fsum(map(math.fsum, of)) / (len(of) * len(shared))
        low, high = arm_interval(of, accuracy=accuracy, samples=samples)
        return Arm(
            name=name,
            runs=tuple(runs),
            steps=tuple(dict.fromkeys(answers[run][shared[0]]["step"] for run in runs)),
            samples=samples,
            left_out=len(set().union(*(answers[run] for run in runs))) - len(shared),
            grade_errors=sum(answers[run][question]["grade_errors"] for run in runs for question in shared),
            accuracy=accuracy,
            low=low,
            high=high,
        )

    return Comparison(
        a=arm("A", arm_a, of_a, samples_a),
        b=arm("B", arm_b, of_b, samples_b),
        questions=len(shared),
        difference=found.difference,
        low=found.low,
        high=found.high,
        b_better=better_b,
        a_better=better_a,
        t_p=found.p,
        mcnemar_p=mcnemar_exact(better_a, better_b) if single else None,
        detectable=detectable_difference(found.power, len(shared)) if promises and enough else None,
        needed=questions_needed(found.power, found.difference) if promises else None,
        notes=(
            *_grader_notes(answers, shared),
            *_notes(len(arm_a), len(arm_b), rephrased=rephrased, questions=len(shared)),
        ),
    )


def _answers(
    database: Database, runs: Sequence[str], *, phase: str, step: int | None
) -> dict[str, dict[str, dict[str, Any]]]:
    """Read what each run answered: run -> question -> row of the query `compare`. Raises RlvrError if a run has no such rollouts."""
    table = database.select(named_queries()["compare"].sql, {"phase": phase, "step": step})
    answers: dict[str, dict[str, dict[str, Any]]] = {run: {} for run in runs}
    for values in table.rows:
        row = dict(zip(table.columns, values, strict=True))
        if row["run_id"] in answers:
            answers[row["run_id"]][row["example_id"]] = row
    for run, rows in answers.items():
        if not rows:
            where = f"{phase} rollouts" + ("" if step is None else f" of step {step}")
            raise RlvrError(f"{run} has no {where}.", "--phase and --step choose others.")
    return answers


def held_out_intervals(
    database: Database, arms: Sequence[Sequence[str]], *, of_any_reward: bool = False
) -> dict[tuple[int, int | None], tuple[float, float]]:
    """(number of the arm, updates of its first run) -> 95 % interval of its accuracy at that evaluation, as `compare` has it;
    (number, None) -> of the last evaluation of each of its runs, whatever their updates.

    Where seeds differ in the updates of their rounds, the evaluations after as many rounds belong together. Only of evaluations
    with rollouts of all runs of the arm, over the questions that all of them have.

    Args:
        of_any_reward: also of evaluations with other rewards than 0 and 1, whose accuracy is not the mean reward.
    """
    answers: dict[tuple[str, int], dict[str, tuple[int, int]]] = {}
    fractional = set()
    for run, step, question, samples, correct, binary in database.rows(_EVALUATIONS):
        answers.setdefault((run, step), {})[question] = samples, correct
        if not binary:
            fractional.add((run, step))
    progress = read_progress(database) if any(len(runs) > 1 for runs in arms) else {}
    found = {}
    for number, runs in enumerate(arms):
        steps_of = {run: [step for r, step in answers if r == run] for run in runs}
        last = [max(steps_of[run], default=0) for run in runs]
        for at, steps in [*((steps[0], steps) for steps in shared_steps(progress, steps_of)), (None, last)]:
            evaluations = list(zip(runs, steps, strict=True))
            rows = [answers.get(evaluation, {}) for evaluation in evaluations]
            shared = [question for question in rows[0] if all(question in row for row in rows)]
            if shared and (of_any_reward or fractional.isdisjoint(evaluations)):
                of = [[row[q][1] / row[q][0] for q in shared] for row in rows]
                accuracy = math.fsum(map(math.fsum, of)) / (len(of) * len(shared))
                samples = sum(row[q][0] for row in rows for q in shared)
                found[number, at] = arm_interval(of, accuracy=accuracy, samples=samples)
    return found


_EVALUATIONS = """
    SELECT
        run_id, step, example_id,
        count(*),
        count(*) FILTER (reward > 0.5 AND NOT isnan(reward)),
        bool_and(coalesce(reward, 0) IN (0, 1))
    FROM rollouts
    WHERE phase = 'eval'
    GROUP BY ALL
    ORDER BY ALL
"""


class PairedDifference(NamedTuple):
    """The difference of two arms' accuracies, B minus A, over the same questions."""

    difference: float
    low: float
    high: float
    p: float  # of the t-test that the interval belongs to
    by_question: list[float]
    spread: Spread  # of the interval
    power: Spread  # the same, with the mean square of the questions' differences, for what could be detected


def paired_difference(
    of_a: Sequence[Sequence[float]], of_b: Sequence[Sequence[float]], *, sample: float
) -> PairedDifference:
    """The difference with its 95 % interval: Student's t, with the uncertainty of questions and of seeds counted once each.

    Two questions are added, of which each arm wins one by one sample. With one sample per question this is the interval of Bonett
    and Price (2012) for paired shares: it does not shrink to nothing where few questions differ.

    Args:
        of_a, of_b: for each run of the arm, the share of right samples of each question.
        sample: what one more right sample adds to the share of a question, 1 for one run with one sample.
    """
    import numpy as np

    arms = [_seed_variances(of) for of in (of_a, of_b)]
    differences = np.array(of_b).mean(axis=0) - np.array(of_a).mean(axis=0)
    questions = len(differences)
    padded = np.append(differences, [sample, -sample])
    spread = spread_of(float(padded.var(ddof=1)), questions=questions, arms=arms)
    power = replace(spread, per_question=float((differences * differences).mean()))
    error, df = spread.error(len(padded))
    middle, half = float(padded.mean()), t_quantile(0.975, df) * error
    low, high = max(middle - half, -1.0), min(middle + half, 1.0)
    p = t_test(middle / error, df)
    return PairedDifference(float(differences.mean()), low, high, p, differences.tolist(), spread, power)


def _seed_variances(of: Sequence[Sequence[float]]) -> tuple[float, float, int]:
    """Of an arm's shares (runs, questions): the variance of the runs' means, that which noise alone would give, the runs."""
    import numpy as np

    shares = np.array(of)
    runs, questions = shares.shape
    if runs == 1:
        return 0.0, 0.0, 1
    means = shares.mean(axis=1)
    left = shares - shares.mean(axis=0) - (means - means.mean())[:, None]  # neither the question's nor the run's
    noise = float((left * left).sum() / ((runs - 1) * max(questions - 1, 1)) / questions)
    return float(means.var(ddof=1)), noise, runs


def arm_interval(of: Sequence[Sequence[float]], *, accuracy: float, samples: int) -> tuple[float, float]:
    """The 95 % interval of an arm's accuracy: that of the summary, widened by the spread of its seeds if it has several.

    Args:
        of: for each run of the arm, the share of right samples of each question.
        accuracy: the mean of all these shares.
        samples: of all runs together.
    """
    shares = [math.fsum(of_question) / len(of) for of_question in zip(*of, strict=True)]
    n = effective_number([(share, 1, 1) for share in shares], draws=samples)
    binary = accuracy * (1 - accuracy)
    if len(of) == 1 or not binary:
        return share_interval(accuracy, n)
    spread = spread_of(binary * len(shares) / n, questions=len(shares), arms=[_seed_variances(of)])
    error, df = spread.error(len(shares))
    return share_interval(accuracy, binary / error**2, z=t_quantile(0.975, df))


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


def _grader_notes(answers: Mapping[str, Answers], shared: Sequence[str]) -> list[str]:
    """A note if no grader is common to all runs: an environment's own grades may be of some episodes alone."""
    graders = {run: {rows[question]["grader"] for question in shared} for run, rows in answers.items()}
    if set.intersection(*graders.values()):
        return []
    named = ", ".join(f"{run} by {' and '.join(sorted(of_run))}" for run, of_run in graders.items())
    return [f"The graders differ between the runs: {named}."]


def _notes(runs_a: int, runs_b: int, *, rephrased: int, questions: int) -> list[str]:
    notes = []
    if rephrased:
        notes.append(f"The prompts of {rephrased:,} of the {questions:,} questions differ between the runs.")
    if runs_a == runs_b == 1:
        notes.append(ONE_RUN)
    elif min(runs_a, runs_b) == 1:
        notes.append("One run in an arm: the interval takes the spread of its seeds from the other arm.")
    elif min(runs_a, runs_b) < FEWEST_SEEDS:
        notes.append("Two seeds hardly show how seeds vary: the interval allows for that and is wide.")
    return notes


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"
