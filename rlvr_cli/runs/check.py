"""Verify a run: read every committed file and compare it with the manifest."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.files import read_regular, shown
from rlvr_cli.runs.manifest import METRICS, Entry, matches
from rlvr_cli.runs.readers import metrics_path, present_parts, read_manifest, read_metadata, read_part


@dataclass(frozen=True, slots=True)
class Check:
    """The result of checking a run; problems and pending parts are one sentence each."""

    files: int  # number of committed files: rollouts, grades and metrics
    problems: list[str]  # committed files that are missing or differ from what was committed
    pending: list[str]  # parts that the manifest does not list yet; not an error


def check_run(path: Path | str) -> Check:
    """Read every committed file and report what is wrong. Works while the run is being written."""
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
                    problems.append(f"{shown(path / entry.path)} has {rows} rows, but the manifest says {entry.rows}.")
    listed = {e.path for e in entries}
    pending = [
        f"{shown(path / p)} is not in the manifest: its commit is in progress, or was interrupted (resuming repairs it)."
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
    # A writer may have committed since `earlier` was read: the file may match any announcement from its second to last on.
    announced = sum(e.path == METRICS for e in earlier)
    candidates = [e for e in read_manifest(run)[0] if e.path == METRICS][max(announced - 2, 0) :]
    if any(matches(e, data) for e in candidates):
        return []
    return [f"{shown(run / METRICS)} is damaged: its sha256 differs from the manifest."]
