"""Every byte of a run read again, against the sha256 of the manifest."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.files import read_regular, shown
from rlvr_cli.runs.manifest import METRICS, Entry, matches
from rlvr_cli.runs.readers import metrics_path, present_parts, read_manifest, read_metadata, read_part


@dataclass(frozen=True, slots=True)
class Check:
    """What was found, a sentence each."""

    files: int  # committed ones, of rollouts, grades and metrics
    problems: list[str]  # committed files that are not what was committed
    pending: list[str]  # parts of which the manifest does not know: nothing that was committed is wrong with them

    @property
    def findings(self) -> list[str]:
        return self.problems + self.pending


def check_run(path: Path | str) -> Check:
    """Read every byte that was committed and say what is wrong. May be used while the run is being written."""
    path = Path(path)
    problems: list[str] = []
    try:
        read_metadata(path)
    except RlvrError as error:
        problems.append(error.problem)
    try:
        earlier, _ = read_manifest(path)
        present = present_parts(path)
        problems += _check_metrics(path, earlier)
        entries, _ = read_manifest(path)
    except RlvrError as error:
        return Check(0, [*problems, error.problem], [])
    for entry in entries:
        if entry.path != METRICS:
            try:
                rows = read_part(path, entry).num_rows
            except RlvrError as error:
                problems.append(error.problem)
            else:
                if rows != entry.rows:
                    problems.append(f"{shown(path / entry.path)} has {rows} rows, and {entry.rows} in the manifest.")
    listed = {e.path for e in entries}
    pending = [
        f"{shown(path / p)} is not in the manifest: its commit is under way, or was cut short and resuming settles it."
        for p in present
        if p not in listed
    ]
    return Check(len(listed), problems, pending)


def _check_metrics(run: Path, earlier: Sequence[Entry]) -> list[str]:
    try:
        if metrics_path(run, earlier) is None:
            return []
        data = read_regular(run, METRICS)
    except RlvrError as error:
        return [error.problem]
    # A writer may have gone on since `earlier` was read: the file is any announced from the one before its last on.
    announced = sum(e.path == METRICS for e in earlier)
    candidates = [e for e in read_manifest(run)[0] if e.path == METRICS][max(announced - 2, 0) :]
    if any(matches(e, data) for e in candidates):
        return []
    return [f"{shown(run / METRICS)} is damaged: its sha256 is not the one in the manifest."]
