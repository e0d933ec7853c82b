"""Result of a named query -> the panels of a picture.

Enters: the rows of a named query. Leaves: panels for `plots.save_plot`, with several runs overlaid.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlvr_cli.analysis.estimators import share_interval
from rlvr_cli.analysis.plots import Bars, Line, Panel
from rlvr_cli.types import Table

Row = dict[str, Any]
Figure = Callable[[Table], Sequence[Panel | Bars]]


def figures() -> dict[str, Figure]:
    """The named queries that can be drawn, with the functions that make their panels."""
    return {
        "best_at_k": best_at_k,
        "categories": categories,
        "curves": curves,
        "entropy": entropy,
        "length_histogram": length_histogram,
        "pass_at_k": pass_at_k,
        "thinking_budget": thinking_budget,
    }


def curves(result: Table) -> list[Panel]:
    """Rewards against updates and wall-clock, lengths, entropy, signal and gradient norm."""
    reward = _lines(result, "step", {"eval_reward": "held-out", "train_reward": "training"})
    minutes = [
        replace(line, x=[seconds / 60 for seconds in line.x])
        for line in _lines(result, "eval_wall_seconds", {"eval_reward": "held-out"})
    ]
    length = _lines(result, "step", {"length": "all", "length_correct": "correct", "length_wrong": "wrong"})
    shares = _lines(result, "step", {"groups_with_signal": "groups with a signal", "clip_fraction": "clipped tokens"})
    panels = [
        Panel("Reward", "updates", "mean reward", tuple(reward), share=True),
        Panel("Held-out reward by the clock", "minutes of work", "mean reward", tuple(minutes), share=True),
        Panel("Response length", "updates", "tokens", tuple(length)),
        Panel(
            "Entropy of the policy", "updates", "nats per token", tuple(_lines(result, "step", {"entropy": "entropy"}))
        ),
        Panel("What there is to learn from", "updates", "share", tuple(shares), share=True),
        Panel("Gradient norm", "updates", "norm before clipping", tuple(_lines(result, "step", {"grad_norm": "norm"}))),
    ]
    return [panel for panel in panels if panel.lines]


def entropy(result: Table) -> list[Panel]:
    """Entropy against updates, for evaluations and training, and for correct and wrong responses."""
    names = {"entropy": "all", "entropy_correct": "correct", "entropy_wrong": "wrong"}
    phases = [(phase, _only(result, "phase", phase)) for phase in ("eval", "train")]
    panels = [
        Panel(f"Entropy, {phase}", "updates", "nats per token", tuple(_lines(rows, "step", names)))
        for phase, rows in phases
    ]
    return [panel for panel in panels if panel.lines]


def pass_at_k(result: Table) -> list[Panel]:
    """The chance that one of k samples is right, against k."""
    return [
        Panel(
            "pass@k", "samples k", "share of questions", tuple(_lines(result, "k", {"pass_at_k": "pass@k"})), share=True
        )
    ]


def best_at_k(result: Table) -> list[Panel]:
    """The chance that the likeliest of k samples is right, against k."""
    return [
        Panel(
            "best@k", "samples k", "share of questions", tuple(_lines(result, "k", {"best_at_k": "best@k"})), share=True
        )
    ]


def thinking_budget(result: Table) -> list[Panel]:
    """Accuracy against the budget. The runs RUN-128, RUN-512, ... of one evaluation are one line."""
    place, budget = (result.columns.index(column) for column in ("run_id", "thinking_budget"))
    named = [(*row[:place], row[place].removesuffix(f"-{row[budget]}"), *row[place + 1 :]) for row in result.rows]
    lines = _lines(replace(result, rows=named), "thinking_budget", {"accuracy": "accuracy"})
    return [Panel("Accuracy", "thinking budget, tokens", "share of samples", tuple(lines), share=True)]


def categories(result: Table) -> list[Bars]:
    """The share of each category, the runs side by side."""
    rows = list(result.records())
    labels = tuple(dict.fromkeys(row["category"] for row in rows))
    shares = {(row["run_id"], row["category"]): row["share"] for row in rows}
    groups = tuple((run, tuple(shares.get((run, label), 0.0) for label in labels)) for run in _runs(rows))
    return [Bars("Categories", "category", "share of responses", labels, groups)]


def length_histogram(result: Table) -> list[Bars]:
    """Responses by length, correct and wrong ones side by side; a panel for each run."""
    panels = []
    for run in _runs(list(result.records())):
        rows = list(_only(result, "run_id", run).records())
        labels = tuple(str(row["from_tokens"]) for row in rows)
        groups = tuple((name, tuple(float(row[name]) for row in rows)) for name in ("correct", "wrong"))
        panels.append(Bars(run, "tokens, from", "responses", labels, groups))
    return panels


def _runs(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["run_id"] for row in rows))


def _only(result: Table, column: str, value: str) -> Table:
    place = result.columns.index(column)
    return replace(result, rows=[row for row in result.rows if row[place] == value])


def _lines(result: Table, x: str, names: dict[str, str]) -> list[Line]:
    """One line for each run and column that has a value; its label has only the parts that distinguish it from the others."""
    rows, lines = list(result.records()), []
    runs = _runs(rows)
    for run in runs:
        for column, label in names.items():
            points = [row for row in rows if row["run_id"] == run and row[column] is not None]
            parts = (run if len(runs) > 1 else "", label if len(names) > 1 or len(runs) == 1 else "")
            if points:
                lines.append(_line(" ".join(filter(None, parts)), points, x, column))
    return lines


def _line(label: str, points: Sequence[Row], x: str, column: str) -> Line:
    """A line with a 95 % interval: the query's own, else that of a share of evaluated samples, else none."""
    line = Line(label, [row[x] for row in points], [row[column] for row in points])
    if "low" in points[0]:
        return replace(line, low=[row["low"] for row in points], high=[row["high"] for row in points])
    counts = {"eval_reward": "eval_samples"}.get(column)  # evaluations of a training run: one sample per question
    if counts is None or any(row[counts] is None or not 0 <= row[column] <= 1 for row in points):
        return line  # a user's own reward need not be a share
    bounds = [share_interval(row[column], row[counts]) for row in points]
    return replace(line, low=[low for low, _ in bounds], high=[high for _, high in bounds])
