"""Verify a run: read every committed file and compare it with the manifest."""

from dataclasses import dataclass
from pathlib import Path

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.files import shown
from rlvr_cli.runs.manifest import METRICS
from rlvr_cli.runs.readers import read_index, read_metrics, read_part


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
        _, entries, settled, pending = read_index(path)
    except RlvrError as error:
        return Check(0, [error.problem], [])
    try:
        read_metrics(path, entries, settled=settled)
    except RlvrError as error:
        problems.append(error.problem)
    for entry in entries:
        if entry.path != METRICS:
            try:
                rows = read_part(path, entry).num_rows
            except RlvrError as error:
                problems.append(error.problem)
            else:
                if rows != entry.rows:
                    problems.append(f"{shown(path / entry.path)} has {rows} rows, but the manifest says {entry.rows}.")
    return Check(len({e.path for e in entries}), problems, pending)
