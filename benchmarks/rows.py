"""The results of a benchmark, as rows for `benchmarks/run.py`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One comparison: `ours` and `theirs` in the same `unit`, each a median; `goal` for their ratio, ">= 3" or "<= 0.33"."""

    what: str
    work: str
    beside: str
    unit: str
    ours: float
    theirs: float
    goal: str

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def reached(self) -> bool:
        sign, bound = self.goal.split()
        return self.ratio >= float(bound) if sign == ">=" else self.ratio <= float(bound)


def write(path: str | None, rows: Sequence[Row]) -> None:
    """Write the rows as JSON if a path is given."""
    if path:
        Path(path).write_text(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=1) + "\n")


def read(path: Path) -> list[Row]:
    found = json.loads(path.read_text(encoding="utf-8"))
    return [Row(**{name: value for name, value in row.items() if name != "ratio"}) for row in found]
