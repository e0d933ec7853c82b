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
    theirs: float | None  # None: the peer did not finish, or there is none
    goal: str  # empty: none was set
    cell: str = ""  # of a table that is made of several rows: which one of its lines, such as "25M, short prompts"
    note: str = ""  # in place of a figure that there is not

    @property
    def ratio(self) -> float | None:
        return self.ours / self.theirs if self.theirs else None

    @property
    def missed(self) -> bool:
        if not self.goal or self.ratio is None:
            return False
        sign, bound = self.goal.split()
        return self.ratio < float(bound) if sign == ">=" else self.ratio > float(bound)


def write(path: str | None, rows: Sequence[Row]) -> None:
    """Write the rows as JSON if a path is given."""
    if path:
        Path(path).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def read(path: Path) -> list[Row]:
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
