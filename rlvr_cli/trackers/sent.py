"""How far a tracker has got: the rank of the last row that it was sent, in the run's folder `trackers/`.

Enters: rows. Leaves: those of a higher rank, and the record, which outlives the process.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rlvr_cli.runs.storage.files import atomic_write
from rlvr_cli.trackers.rows import Row

FOLDER = "trackers"  # in the run: what was sent, locks and logs


class Sent:
    """The record of one tracker."""

    def __init__(self, run: Path, name: str) -> None:
        self._file = run / FOLDER / f"{name}.json"
        self._rank = -1
        with suppress(OSError, ValueError, KeyError, TypeError):
            self._rank = int(json.loads(self._file.read_bytes())["rank"])

    def left(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that have not been sent."""
        return [row for row in rows if row.rank > self._rank]

    def record(self, rows: Sequence[Row]) -> None:
        """Record that all these rows have been sent."""
        if rows and rows[-1].rank > self._rank:
            self._rank = rows[-1].rank
            atomic_write(self._file, json.dumps({"rank": self._rank}).encode())
