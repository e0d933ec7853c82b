"""The summary of a run: the handout's three categories, accuracy with its interval, pass@k, failures; that of a search: its scores.

Enters: a run directory, a phase and a step. Leaves: a `RunSummary`, whose `tables` print in any format; for a search, its tables.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.queries.database import Database, ask_spilling, open_runs
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.analysis.statistics.at_k import AtK, at_k, questions_of_runs
from rlvr_cli.analysis.statistics.estimators import Estimate, QuestionKinds, mean_of, share_of
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import RunInfo, read_run
from rlvr_cli.runs.storage.files import typed
from rlvr_cli.types import Table

AT_END_SECONDS = 3600.0  # time limit of each query of a summary at the end of a run, which took far longer
SEARCH = "discover"  # the command whose runs are searches
COMPARISON = "pairwise"  # the command whose runs are comparisons of two others
SEARCH_TABLES = ("searches", "attempt_errors", "best_score_at_k")  # the named queries that are the summary of a search
WITHOUT_ACCURACY = {SEARCH: "a search with scores", COMPARISON: "a comparison with wins and ties"}
OF_ANSWERS = {  # queries of right and wrong answers, and the commands whose runs have none
    **dict.fromkeys(("at_k", "best_at_k", "categories", "curves", "hardest"), tuple(WITHOUT_ACCURACY)),
    **dict.fromkeys(("learned_and_forgotten", "length_histogram", "lengths", "migration"), tuple(WITHOUT_ACCURACY)),
    **dict.fromkeys(("pass_at_k", "thinking_budget"), tuple(WITHOUT_ACCURACY)),
    **dict.fromkeys(("failure_kinds", "failures"), (COMPARISON,)),  # of a search: its attempts that are not valid
}
HANDOUT_CATEGORIES = ("format_1_answer_1", "format_1_answer_0", "format_0_answer_0")


@dataclass(frozen=True, slots=True)
class CategoryCount:
    category: str
    samples: int
    share: Estimate
    mean_tokens: float | None  # None when there are no samples


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One phase and step of a run. A NULL reward (the grade failed) counts as 0, and in `grade_errors`."""

    run_id: str
    phase: str
    step: int
    questions: int
    samples: int
    grade_errors: int
    accuracy: Estimate  # share of samples with a reward above 0.5
    mean_reward: Estimate | None  # None if all rewards are 0 or 1: then it equals the accuracy
    categories: tuple[CategoryCount, ...]
    at_k: tuple[AtK, ...]  # empty with one sample per question
    failure_kinds: tuple[tuple[str, int], ...]  # most frequent first
    mean_tokens: float
    mean_tokens_correct: float | None
    mean_tokens_wrong: float | None
    truncated_share: float
    mean_entropy: float | None  # nats per token
    mean_logprob: float | None  # nats per token
    tokens_per_second: float | None  # sampling speed

    def tables(self) -> list[Table]:
        """The summary as rows; a value that does not exist is None."""
        measures: list[tuple[Any, ...]] = [("accuracy", *_cells(self.accuracy))]
        if self.mean_reward is not None:
            measures.append(("mean_reward", *_cells(self.mean_reward)))
        others = {
            "grade_errors": self.grade_errors,
            "mean_tokens": self.mean_tokens,
            "mean_tokens_correct": self.mean_tokens_correct,
            "mean_tokens_wrong": self.mean_tokens_wrong,
            "truncated_share": self.truncated_share,
            "mean_entropy": self.mean_entropy,
            "mean_logprob": self.mean_logprob,
            "tokens_per_second": self.tokens_per_second,
        }
        measures += [(name, value, None, None, None) for name, value in others.items()]
        head = (self.run_id, self.phase, self.step, self.questions, self.samples)
        tables = [
            Table(("run_id", "phase", "step", "questions", "samples"), [head], title="run"),
            Table(
                ("category", "samples", "share", "low", "high", "interval", "mean_tokens"),
                [(c.category, c.samples, *_cells(c.share), c.mean_tokens) for c in self.categories],
                title="categories",
            ),
            Table(("measure", "value", "low", "high", "interval"), measures, title="measures"),
        ]
        if self.at_k:
            columns = ("k", "questions", "pass_at_k", "low", "high", "interval", "best_at_k", "majority_at_k")
            rows = [
                (
                    a.k,
                    a.questions,
                    *_cells(a.pass_at_k),
                    *(found and found.value for found in (a.best_at_k, a.majority_at_k)),
                )
                for a in self.at_k
            ]
            tables.append(Table(columns, rows, title="at_k"))
        if self.failure_kinds:
            rows = [(kind, count, count / self.samples) for kind, count in self.failure_kinds]
            tables.append(Table(("failure_kind", "samples", "share"), rows, title="failures"))
        return tables


def summarize(
    run: RunInfo | Path | str, *, phase: str = "eval", step: int | None = None, timeout_seconds: float = 30.0
) -> RunSummary:
    """Summarize one phase and step of a run.

    Args:
        step: None for the last step of that phase.

    Raises:
        RlvrError: the run has no such rollouts, or cannot be read.
    """
    info = run if isinstance(run, RunInfo) else read_run(run)
    with_accuracy([info])
    return ask_spilling(
        [info], lambda database: summary_of(database, info, phase=phase, step=step), timeout_seconds=timeout_seconds
    )


def with_accuracy(infos: Sequence[RunInfo], query: str = "") -> list[RunInfo]:
    """The runs that have answers, which are right or wrong; those that `query` can be asked of. Raises RlvrError if none has any."""
    without = OF_ANSWERS.get(query, tuple(WITHOUT_ACCURACY))
    answered = [info for info in infos if info.metadata["command"] not in without]
    if infos and not answered:
        first = infos[0]
        raise RlvrError(
            f"{first.id} is {WITHOUT_ACCURACY[first.metadata['command']]}, and has no accuracy.",
            f"rlvr analyze {typed(first.path)} shows what it has.",
        )
    return answered


def check_accuracy(infos: Sequence[RunInfo]) -> None:
    """Raise RlvrError unless all of these runs have answers, which are right or wrong."""
    kept = with_accuracy(infos)
    if left_out := [info for info in infos if info not in kept]:
        raise RlvrError(
            f"compare is of right and wrong answers, which searches and comparisons do not have: {', '.join(info.id for info in left_out)}.",
            f"rlvr analyze {' '.join(typed(info.path) for info in left_out)}",
        )


def search_tables(info: RunInfo, *, timeout_seconds: float = 30.0) -> list[Table]:
    """The summary of a search, all rounds together: its scores, why attempts failed, and the best of k of them. Raises RlvrError."""
    with open_runs([info], timeout_seconds=timeout_seconds) as database:
        queries = [named_queries()[name] for name in SEARCH_TABLES]
        tables = [replace(database.select(q.sql, q.parameters), title=q.name) for q in queries]
    return [table for table in tables if table.rows]


def combined_tables(of_runs: Iterable[tuple[str, Sequence[Table]]]) -> list[Table]:
    """Concatenate the tables of several runs, by title; each row starts with its run, and columns that it lacks are None."""
    records: dict[str, list[dict[str, Any]]] = {}
    for run_id, its in of_runs:
        for table in its:
            records.setdefault(table.title, []).extend({"run_id": run_id} | record for record in table.records())
    tables = []
    for title, rows in records.items():
        if not rows:
            continue
        columns = tuple(dict.fromkeys(column for row in rows for column in row))
        tables.append(Table(columns, [tuple(map(row.get, columns)) for row in rows], title=title))
    return tables


def _cells(estimate: Estimate) -> tuple[float, float | None, float | None, str]:
    return estimate.value, estimate.low, estimate.high, estimate.interval


def summary_of(database: Database, info: RunInfo, *, phase: str = "eval", step: int | None = None) -> RunSummary:
    """Summarize one phase and step of the run in a database that spills, a run with an accuracy. Raises as `summarize`."""
    chosen = {"phase": phase, "step": step}
    of_all, of_questions, of_categories, of_both, of_failures = database.script(named_queries()["summary"].sql, chosen)
    [samples] = of_all.records()
    if not samples["samples"]:
        raise _nothing(database, info, phase=phase, step=step)
    kinds = of_questions.rows  # n, c, total, questions
    questions = sum(count for *_, count in kinds)
    most = max(n for n, *_ in kinds)
    counts = {row["category"]: row for row in of_categories.records()}
    hits: dict[str, list[tuple[float, int, int]]] = {}
    for row in of_both.records():
        hits.setdefault(row["category"], []).append((row["hits"], row["n"], row["questions"]))
    failures = tuple((row["failure_kind"], row["samples"]) for row in of_failures.records())
    asked = [(n, count) for n, _, _, count in kinds]
    by_format = "reward_only" not in counts or not counts.keys() <= {"reward_only", "grade_error"}

    def category(name: str) -> CategoryCount:
        counted = counts.get(name, {"samples": 0, "tokens": None})
        share = share_of(_with_misses(hits.get(name, []), asked))
        return CategoryCount(name, counted["samples"], share, counted["tokens"])

    return RunSummary(
        run_id=info.id,
        phase=phase,
        step=samples["step"],
        questions=questions,
        samples=samples["samples"],
        grade_errors=samples["ungraded"],
        accuracy=share_of([(c, n, count) for n, c, _, count in kinds]),
        mean_reward=None if samples["binary_reward"] else mean_of([(t, n, count) for n, _, t, count in kinds]),
        categories=tuple(
            category(name) for name in dict.fromkeys((*(HANDOUT_CATEGORIES if by_format else ()), *counts))
        ),
        at_k=_at_k(database, chosen) if most > 1 else (),
        failure_kinds=failures,
        mean_tokens=samples["tokens"],
        mean_tokens_correct=samples["tokens_correct"],
        mean_tokens_wrong=samples["tokens_wrong"],
        truncated_share=samples["truncated"],
        mean_entropy=samples["entropy"],
        mean_logprob=samples["logprob"],
        tokens_per_second=samples["tokens_per_second"],
    )


def _at_k(database: Database, chosen: Mapping[str, Any]) -> tuple[AtK, ...]:
    runs = questions_of_runs(database, chosen)
    _, _, questions = next(runs)
    return tuple(at_k(questions)[0])


def _with_misses(hits: Sequence[tuple[float, int, int]], asked: Sequence[tuple[int, int]]) -> QuestionKinds:
    """Add the questions without any sample in a category, which the query leaves out, to those with some."""
    misses = {n: 0 for n, _ in asked}
    for n, count in asked:
        misses[n] += count
    for _, n, count in hits:
        misses[n] -= count
    return [*hits, *((0.0, n, count) for n, count in misses.items() if count)]


def _nothing(database: Database, info: RunInfo, *, phase: str, step: int | None) -> RlvrError:
    found = database.select("SELECT phase, min(step), max(step) FROM rollouts GROUP BY 1 ORDER BY 1").rows
    asked = f"{phase} rollouts" + ("" if step is None else f" of step {step}")
    has = "; ".join(f"{name} rollouts of steps {first} to {last} (--phase {name})" for name, first, last in found)
    return RlvrError(
        f"{info.id} has no {asked}.",
        f"It has {has}."
        if has
        else f'It has no rollouts. For its metrics: rlvr analyze "SELECT * FROM metrics" {typed(info.path)}',
    )
