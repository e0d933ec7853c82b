"""What a query found -> the panels of a picture.

Enters: the rows of a named query. Leaves: panels for `plots.draw`.
"""

from collections.abc import Sequence
from typing import Any

from rlvr_cli.plots import Line, Panel
from rlvr_cli.queries import Table
from rlvr_cli.statistics import wilson_interval

Row = dict[str, Any]


def curves(result: Table) -> list[Panel]:
    """The panels of the query `curves`, the runs overlaid."""
    rows = [dict(zip(result.columns, row, strict=True)) for row in result.rows]
    runs = list(dict.fromkeys(row["run_id"] for row in rows))
    by_run = {run: [row for row in rows if row["run_id"] == run] for run in runs}

    def lines(*names: tuple[str, str]) -> tuple[Line, ...]:
        """One line for each run and (column, label)."""
        found = []
        for run, its in by_run.items():
            for column, label in names:
                points = [row for row in its if row[column] is not None]
                if points:
                    found.append(_line(_label(run, label, runs, names), points, column))
        return tuple(found)

    reward = lines(("eval_reward", "held-out"), ("train_reward", "training"))
    length = lines(("length", "all"), ("length_correct", "correct"), ("length_wrong", "wrong"))
    shares = lines(("groups_with_signal", "groups with a signal"), ("clip_fraction", "clipped tokens"))
    panels = [
        Panel("Reward", "updates", "mean reward", reward, share=True),
        Panel("Response length", "updates", "tokens", length),
        Panel("Entropy of the policy", "updates", "nats per token", lines(("entropy", "entropy"))),
        Panel("What there is to learn from", "updates", "share", shares, share=True),
    ]
    return [panel for panel in panels if panel.lines]


def _line(label: str, points: Sequence[Row], column: str) -> Line:
    x, y = [row["step"] for row in points], [row[column] for row in points]
    if column != "eval_reward":
        return Line(label, x, y)
    intervals = [
        wilson_interval(round(row[column] * row["eval_samples"]), round(row["eval_samples"])) for row in points
    ]
    return Line(label, x, y, low=[low for low, _ in intervals], high=[high for _, high in intervals])


def _label(run: str, label: str, runs: Sequence[str], names: Sequence[object]) -> str:
    """What tells a line from its neighbours: the run, the column, or both."""
    return " ".join(part for part in (run if len(runs) > 1 or not label else "", label) if part)
