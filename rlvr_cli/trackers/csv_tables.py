"""CSV: a table for each axis, train.csv and eval.csv in a folder, a row for each step and a column for each metric.

Enters: rows. Leaves: the files, written anew.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from rlvr_cli.runs.readers import RunInfo
from rlvr_cli.runs.storage.files import atomic_write
from rlvr_cli.trackers.rows import Row


class Csv:
    """Writes the tables of one run."""

    def __init__(self, info: RunInfo, *, project: str, live: bool, folder: Path) -> None:
        self._folder = folder

    @property
    def note(self) -> str:
        return f"in {self._folder}"

    def send(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Write all rows, and return them."""
        self._folder.mkdir(exist_ok=True)
        for axis in ("train", "eval"):
            file = self._folder / f"{axis}.csv"
            of_axis = [row for row in rows if row.axis == axis]
            if not of_axis:  # what is there is of another run, in a folder of an earlier version
                file.unlink(missing_ok=True)
                continue
            names = sorted({name for row in of_axis for name in row.values})
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(["step", "wall_seconds", *names])
            for row in of_axis:
                writer.writerow([row.step, row.seconds, *(row.values.get(name, "") for name in names)])
            atomic_write(file, text.getvalue().encode())
        return rows

    def finish(self, status: str) -> None:
        pass
