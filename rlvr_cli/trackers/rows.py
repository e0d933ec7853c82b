"""What a tracker is sent of a run: its committed metrics as rows, its options, and some of its responses.

Enters: a run. Leaves: one `Row` for each axis and step, those that are complete, in an order that never changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from rlvr_cli.runs.manifest import METRICS, Entry
from rlvr_cli.runs.provenance import name_of
from rlvr_cli.runs.readers import ENDED, RunInfo, parsed_table, read_index, read_metrics, read_rollouts
from rlvr_cli.types import Metric

SAMPLES = 8  # responses of an evaluation that are shown
SAMPLE_COLUMNS = ("example_id", "prompt", "response", "ground_truth", "extracted_answer", "category", "reward")
SAMPLED_BY = "reward/mean"  # a step has responses if it has this metric
UPDATED_BY = "update/skipped"  # every update has it


@dataclass(frozen=True)
class Row:
    """The metrics of one axis at one step."""

    axis: str  # train or eval
    step: int  # updates of the measured policy
    seconds: float  # of work when it was measured
    values: Mapping[str, float]  # by name, such as reward/mean

    @property
    def rank(self) -> int:
        """The row's place among all rows of a run: ascending, and the same whenever it is asked for."""
        # An evaluation at a step comes before the update that begins there.
        return 2 * self.step + (self.axis == "train")

    def named(self) -> dict[str, float]:
        """Return the values by the names that trackers show, such as train/reward/mean, with the step of the axis."""
        values = {f"{self.axis}/{name}": value for name, value in self.values.items()}
        return values | {f"{self.axis}/wall_seconds": self.seconds, f"{self.axis}_step": float(self.step)}


def complete_rows(info: RunInfo) -> list[Row]:
    """Return the rows of a run that nothing will be added to, by rank.

    Until a run has ended, its last batch of rollouts (or, without rollouts, its last update) may get more metrics, and what comes
    after it waits for it. A resumed run may still replace rows, when it repeats updates after its last checkpoint.

    Raises:
        RlvrError: metrics.parquet is damaged.
    """
    data = read_metrics(info.path, info.entries, settled=info.settled)
    if data is None:
        return []
    columns = ["step", "phase", "name", "value", "wall_seconds"]
    table = parsed_table(data, Metric, path=info.path / METRICS, columns=columns)
    found: dict[tuple[str, int], dict[str, float]] = {}
    seconds: dict[tuple[str, int], float] = {}
    for step, phase, name, value, wall in zip(*(table[c].to_pylist() for c in columns), strict=True):
        found.setdefault((phase, step), {})[name] = value
        seconds[phase, step] = max(wall, seconds.get((phase, step), 0.0))
    rows = sorted((Row(*key, seconds[key], values) for key, values in found.items()), key=lambda row: row.rank)
    begins = [row for row in rows if row.axis == "train" and SAMPLED_BY in row.values]
    begins = begins or [row for row in rows if row.axis == "train" and UPDATED_BY in row.values]
    if begins and info.metadata["status"] not in ENDED:
        return [row for row in rows if row.rank < begins[-1].rank]
    # What was measured after the last update, of a checkpoint, is of a step that begins only if the run is resumed.
    return [row for row in rows if row.axis == "eval" or {SAMPLED_BY, UPDATED_BY} & row.values.keys()]


class Samples:
    """Some responses of a run's evaluations. The manifest is read at the first one, and so has what was committed before."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, row: Row) -> list[tuple[Any, ...]]:
        """Return some responses of an evaluation, of `SAMPLE_COLUMNS`: the same questions each time. Raises RlvrError."""
        if row.axis != "eval" or SAMPLED_BY not in row.values:
            return []
        columns = [*SAMPLE_COLUMNS, "sample_index"]
        table = read_rollouts(self._path, phase="eval", step=row.step, columns=columns, entries=self._entries)
        first = table.sort_by([("sample_index", "ascending"), ("example_id", "ascending")]).slice(0, SAMPLES)
        return [tuple(record[name] for name in SAMPLE_COLUMNS) for record in first.to_pylist()]

    @cached_property
    def _entries(self) -> Sequence[Entry]:
        return read_index(self._path).entries


def described(info: RunInfo) -> dict[str, Any]:
    """Return the options of a run, and what it was made of, as one flat dict."""
    metadata = info.metadata
    facts = metadata.get("facts") or {}
    about = {kind: name_of(facts.get(kind)) for kind in ("model", "dataset", "eval_dataset", "grader")}
    config = metadata.get("config") or {}
    return {
        "command": metadata["command"],
        "seed": metadata.get("seed"),
        **config,
        **{k: v for k, v in about.items() if v},
    }


def started_at(info: RunInfo) -> float:
    """Return the time at which a run began, in seconds since 1970."""
    return datetime.fromisoformat(info.metadata["created_at"]).timestamp()


def as_markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return rows as a Markdown table."""

    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(c).replace("|", "\\|").replace("\n", "<br>") for c in cells) + " |\n"

    return line(columns) + line(["---"] * len(columns)) + "".join(map(line, rows))
