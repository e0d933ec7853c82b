"""How far a tracker has got: the rank of the last row that it has.

Enters: rows. Leaves: those of a higher rank. Where a tracker cannot be asked what it has, a record in the run's folder `trackers/` says
so, which outlives the process.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rlvr_cli.runs.readers import RunInfo
from rlvr_cli.runs.storage.files import atomic_write
from rlvr_cli.trackers.rows import Row

FOLDER = "trackers"  # in the run: what was sent, locks and logs


class Sent:
    """What one tracker has of a run."""

    def __init__(self, rank: int = -1) -> None:
        """`rank`: of the last row that it has."""
        self._rank = rank

    def left(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that have not been sent."""
        return [row for row in rows if row.rank > self._rank]

    def record(self, rows: Sequence[Row]) -> None:
        """Record that all these rows have been sent."""
        if rows and rows[-1].rank > self._rank:
            self._rank = rows[-1].rank


class Recorded(Sent):
    """What one tracker was sent of a run, by a file in the run: at each place, such as a project, something else.

    An earlier version knew one place. Its record is of the one that the options of the run name or, if these name no such tracker, of
    whichever is asked for.
    """

    def __init__(self, info: RunInfo, name: str, *, project: str, place: Callable[[str], str]) -> None:
        """`place` says where a tracker's project is, in words that hold no secret."""
        self._file, self._place = info.path / FOLDER / f"{name}.json", place(project)
        config = info.metadata.get("config") or {}
        is_tracked = name in (config.get("track") or ())
        self._ranks: dict[str, int] = {}
        self._names: dict[str, str] = {}
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            earlier = place(config.get("track_project") or "") if is_tracked else self._place
            record = json.loads(self._file.read_bytes())
            self._ranks = _ranks(record, earlier)
            self._names = {place: str(name) for place, name in record.get("names", {}).items()}
        super().__init__(self._ranks.get(self._place, -1))

    @property
    def is_begun(self) -> bool:
        """Whether the run is known to be at this place."""
        return self._place in self._ranks or self._place in self._names

    @property
    def name(self) -> str | None:
        """What the run is called at this place, if that was recorded."""
        return self._names.get(self._place)

    def begin(self, name: str) -> None:
        """Record what the run is called at this place. Raises RlvrError."""
        if self.name != name:
            self._names[self._place] = name
            self._write()

    def forget(self) -> None:
        """Count nothing as sent to this place."""
        self._ranks.pop(self._place, None)
        self._rank = -1

    def record(self, rows: Sequence[Row]) -> None:
        super().record(rows)
        if self._ranks.get(self._place, -1) < self._rank:
            self._ranks[self._place] = self._rank
            self._write()

    def _write(self) -> None:
        atomic_write(self._file, json.dumps({"ranks": self._ranks, "names": self._names}).encode())


def _ranks(record: dict[str, Any], earlier: str) -> dict[str, int]:
    """Return place -> rank. `earlier`: the place of a record that names none."""
    if "rank" in record:
        return {earlier: int(record["rank"])}
    return {place: int(rank) for place, rank in record["ranks"].items()}
