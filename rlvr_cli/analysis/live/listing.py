"""The list of runs: how far each one is, its accuracy, and what sets it apart.

Enters: run directories, which may be running or damaged. Leaves: a row for each.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.database import open_runs
from rlvr_cli.analysis.report.build import first_and_last
from rlvr_cli.analysis.report.rollouts import of_steps
from rlvr_cli.analysis.summary import share_of
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.lock import holder_of
from rlvr_cli.runs.manifest import ROLLOUTS
from rlvr_cli.runs.readers import RunInfo, read_run
from rlvr_cli.runs.sums import check_sums

COLUMNS = (
    *("run_id", "command", "status", "done", "planned", "unit", "phase", "step", "accuracy", "low", "high", "differs"),
    *("created_at", "problem"),
)
_KINDS = """
    SELECT run_id, phase, step, correct, n, count(*) FROM (
        SELECT run_id, phase, step, count(*) AS n,
            count(*) FILTER (coalesce(reward > 0.5 AND NOT isnan(reward), false)) AS correct
        FROM rollouts GROUP BY run_id, phase, step, example_id
    ) GROUP BY ALL ORDER BY ALL
"""


def list_runs(paths: Sequence[Path], *, timeout_seconds: float) -> list[dict[str, Any]]:
    """What `COLUMNS` says of each run, in the given order; a run that cannot be read is `broken`."""
    infos: dict[Path, RunInfo] = {}
    rows = {path: dict.fromkeys(COLUMNS) | {"run_id": path.name, "status": "broken"} for path in paths}
    for path in paths:
        try:
            info = read_run(path)
            last = of_steps(info, first_and_last(info)[-1:])
            check_sums(path, {e.path: e.sha256 for e in info.entries if path / e.path in last.parts})
            rows[path] |= _described(info)
            infos[path] = replace(last, grades=[], metrics=None)
        except RlvrError as error:
            rows[path] |= {"status": "broken", "problem": error.problem}
    for path, found in _measured(infos, timeout_seconds=timeout_seconds).items():
        rows[path] |= found
    for path, text in _differences({path: info.metadata for path, info in infos.items()}).items():
        rows[path]["differs"] = text
    return list(rows.values())


def _measured(infos: Mapping[Path, RunInfo], *, timeout_seconds: float) -> dict[Path, dict[str, Any]]:
    """The accuracy of each run in the parts that its info has, by one query for all runs whose names differ."""
    found: dict[Path, dict[str, Any]] = {}
    left = {path: info for path, info in infos.items() if info.parts}
    while left:
        paths = {info.id: path for path, info in left.items()}
        with open_runs([left[path] for path in paths.values()], timeout_seconds=timeout_seconds) as database:
            kinds: dict[str, list[tuple[Any, ...]]] = {}
            for run_id, *kind in database.select(_KINDS).rows:
                kinds.setdefault(run_id, []).append(tuple(kind))
        for run_id, rows in kinds.items():
            if run_id in paths:
                share = share_of([(correct, n, questions) for _, _, correct, n, questions in rows])
                phase, step, *_ = rows[0]
                accuracy = {"accuracy": share.value, "low": share.low, "high": share.high}
                found[paths[run_id]] = {"phase": phase, "step": step, **accuracy}
        left = {path: info for path, info in left.items() if path not in paths.values()}
    return found


def _described(info: RunInfo) -> dict[str, Any]:
    metadata = info.metadata
    row: dict[str, Any] = {
        "run_id": info.id,
        "command": metadata["command"],
        "created_at": _time(metadata["created_at"]),
    }
    row["status"] = metadata["status"]
    if row["status"] == "running" and holder_of(info.path) is None:
        row["status"] = "killed"
    return row | _progress(info)


def _progress(info: RunInfo) -> dict[str, Any]:
    """How much is done of how much, and of what."""
    entries = [entry for entry in info.entries if entry.folder == ROLLOUTS]
    trained = {entry.step for entry in entries if entry.phase == "train"}
    if not trained:
        return {"done": sum(entry.rows for entry in entries), "planned": None, "unit": "samples"}
    config = info.metadata.get("config") or {}
    planned = config.get(f"n_{info.metadata['command']}_steps")
    return {"done": len(trained), "planned": planned if isinstance(planned, int) else None, "unit": "steps"}


def _differences(metadata: Mapping[Path, Mapping[str, Any]]) -> dict[Path, str]:
    """The options of each run in which the runs of its command differ."""
    texts = {}
    for path, own in metadata.items():
        configs = [m.get("config") or {} for m in metadata.values() if m["command"] == own["command"]]
        config = own.get("config") or {}
        names = [n for n in config if n not in ("run", "runs_dir") and len({json.dumps(c.get(n)) for c in configs}) > 1]
        texts[path] = ", ".join(f"{name} {config[name]}" for name in names)
    return texts


def _time(text: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
