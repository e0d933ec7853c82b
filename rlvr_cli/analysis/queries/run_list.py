"""The list of runs: how far each one is, what its model can do, and what sets it apart.

Enters: run directories, which may be running or damaged. Leaves: a `Table` with a row for each, of the columns `COLUMNS`.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from rlvr_cli.analysis.queries.database import LimitReached, open_runs, open_table
from rlvr_cli.analysis.summary import SEARCH, WITHOUT_ACCURACY, Estimate, share_of
from rlvr_cli.config import config_of
from rlvr_cli.config.parsing.options import options
from rlvr_cli.config.store.runs import Order
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.lock import holder_of
from rlvr_cli.runs.manifest import MANIFEST, METRICS, ROLLOUTS, RUN_FILE, SEGMENTS, Entry
from rlvr_cli.runs.provenance import name_of
from rlvr_cli.runs.readers import ENDED, RunInfo, parsed_table, read_metrics, read_run
from rlvr_cli.runs.several import telling_names
from rlvr_cli.runs.storage.sources import source_of
from rlvr_cli.runs.storage.sums import check_sums
from rlvr_cli.types import Metric, Table

COLUMNS = {
    "run_id": "VARCHAR",
    "command": "VARCHAR",
    "status": "VARCHAR",  # of run.json, or `killed`, or `broken`
    "done": "BIGINT",
    "planned": "BIGINT",
    "unit": "VARCHAR",  # of these two: updates, steps or samples
    "phase": "VARCHAR",  # of the rollouts that the accuracy is of
    "step": "BIGINT",
    "questions": "BIGINT",
    "accuracy": "DOUBLE",  # share of samples with a reward above 0.5, as in the summary; of `rlvr pairwise` none
    "low": "DOUBLE",
    "high": "DOUBLE",
    "best_score": "DOUBLE",  # of a search, which has no accuracy
    "model": "VARCHAR",
    "dataset": "VARCHAR",
    # Options in which runs of this command differ, the rarest values first, without those that more than half of the runs have.
    "differs": "VARCHAR",
    "created_at": "TIMESTAMP",
    "wall_seconds": "DOUBLE",
    "bytes": "BIGINT",  # of all files, if asked for
    "problem": "VARCHAR",  # of a broken run; of another why its accuracy is not known, if it took too long
    "config": "JSON",
}
_ORDERS: Mapping[Order, str] = {
    "newest": "created_at DESC NULLS LAST",
    "oldest": "created_at NULLS LAST",
    "name": "run_id",
    "status": "status",
    "best": "accuracy DESC NULLS LAST, best_score DESC NULLS LAST",
    "worst": "accuracy NULLS LAST, best_score NULLS LAST",
    "longest": "wall_seconds DESC NULLS LAST",
    "largest": "bytes DESC NULLS LAST",
}
_TOLD = ("model", "engine", "sft_epochs", "n_sft_steps")  # a resumed run may change them, and yet they tell runs apart
assert set(_ORDERS) == set(get_args(Order))
_KINDS_SQL = """
    SELECT run_id, phase, step, n, correct, count(*) AS questions
    FROM (
        SELECT
            run_id, phase, step, count(*) AS n,
            count(*) FILTER (coalesce(reward > 0.5 AND NOT isnan(reward), false)) AS correct
        FROM rollouts
        GROUP BY run_id, phase, step, example_id
    )
    GROUP BY ALL
    ORDER BY ALL
"""


@dataclass(frozen=True)
class _Measured:
    """The accuracy of one phase and step."""

    phase: str
    step: int
    questions: int
    accuracy: Estimate


@dataclass(frozen=True)
class _Read:
    """What is read of one run."""

    row: dict[str, Any]  # of `COLUMNS`, without what needs the other runs, and without its size
    metadata: Mapping[str, Any] | None  # command and config of run.json; None if it cannot be read


class Known:
    """What was read of the runs of the last list, for the next one: a run is read again if its files have changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[Any, ...], _Read]] = {}

    def read(self, paths: Sequence[Path]) -> dict[Path, _Read]:
        """What `_read_runs` returns of these runs."""
        states = {path: state_of(path) for path in paths}  # first: what is committed meanwhile is read the next time
        last = self._known
        kept = {path: last[path][1] for path in paths if path in last and last[path][0] == states[path]}
        read = kept | _read_runs([path for path in paths if path not in kept])
        # A problem may pass without a change of these files.
        self._known = {path: (states[path], one) for path, one in read.items() if one.row["problem"] is None}
        return read


def state_of(path: Path) -> tuple[Any, ...]:
    """What changes when a run commits something, or when somebody begins or ends to write it; its files are not read."""
    return *(_identity(path / file) for file in (RUN_FILE, MANIFEST, METRICS)), (holder_of(path) or {}).get("pid")


def _identity(path: Path) -> tuple[int, ...]:
    try:
        state = os.lstat(path)
    except OSError:
        return ()
    return state.st_ino, state.st_size, state.st_mtime_ns


def list_runs(paths: Sequence[Path], *, sizes: bool = False, known: Known | None = None) -> list[dict[str, Any]]:
    """Return what `COLUMNS` says of each run, in the given order.

    Args:
        sizes: also add up the files of each run.
        known: of the last list, to read only the runs that have changed since.
    """
    read = _read_runs(paths) if known is None else known.read(paths)
    differing = _differing([one.metadata for one in read.values() if one.metadata is not None])
    return [
        read[path].row
        | {"run_id": name, "differs": _differs(read[path], differing), "bytes": _size(path) if sizes else None}
        for path, name in zip(paths, telling_names(paths), strict=True)
    ]


def _read_runs(paths: Sequence[Path]) -> dict[Path, _Read]:
    infos: dict[Path, RunInfo] = {}
    evaluated: dict[Path, RunInfo] = {}
    problems: dict[Path, str] = {}
    for path in paths:
        try:
            info = read_run(path)
            last = _last_parts(info.entries)
            check_sums(path, {entry.path: entry.sha256 for entry in last})
            infos[path] = info
            if info.metadata["command"] not in WITHOUT_ACCURACY:
                evaluated[path] = _only(info, last)
        except RlvrError as error:
            problems[path] = error.problem
    try:
        measured = _measured(evaluated)
    except RlvrError:  # a run was deleted meanwhile, say: each by itself
        measured = {}
        for path, info in evaluated.items():
            try:
                measured |= _measured({path: info})
            except LimitReached as error:
                problems[path] = f"its accuracy is not known: {error.problem}"
            except RlvrError as error:
                problems[path] = error.problem
                del infos[path]
    read = {}
    for path in paths:
        row: dict[str, Any] = dict.fromkeys(COLUMNS) | {"status": "broken"}
        try:
            if path in infos:
                row |= _described(infos[path], measured.get(path))
        except RlvrError as error:
            problems[path] = error.problem
        metadata = {k: infos[path].metadata.get(k) for k in ("command", "config")} if path in infos else None
        read[path] = _Read(row | {"problem": problems.get(path)}, metadata)
    return read


def cut_differences(texts: Sequence[str], *, most: int) -> list[str]:
    """Cut what differs between words, to about `most` characters, but only so far that no two texts become equal that are not."""
    words = [text.split(" ") for text in texts]
    kept = [max([n for n in range(1, len(w) + 1) if len(" ".join(w[:n])) <= most], default=1) for w in words]
    while True:
        cut = [" ".join([*w[:n], *["…"] * (n < len(w))]) for w, n in zip(words, kept, strict=True)]
        alike = Counter(shown for shown, _ in set(zip(cut, texts, strict=True)))
        longer = [i for i, shown in enumerate(cut) if alike[shown] > 1 and kept[i] < len(words[i])]
        if not longer:
            return cut
        for i in longer:
            kept[i] += 1


def select_runs(
    rows: Sequence[Mapping[str, Any]], *, where: str = "", order: Order = "newest", timeout_seconds: float = 30.0
) -> Table:
    """Return the rows that an untrusted SQL condition holds for, in an order.

    Raises:
        RlvrError: the condition cannot be used.
    """
    values = [[row[column] for column in COLUMNS] for row in rows]
    with open_table("runs", COLUMNS, values, timeout_seconds=timeout_seconds) as database:
        condition = database.condition(where, table="runs") if where else "true"
        return database.select(f"SELECT * FROM runs WHERE {condition} ORDER BY {_ORDERS[order]}, run_id")


def _last_parts(entries: Sequence[Entry]) -> list[Entry]:
    """Return the parts of the last evaluation, or else of the last training step."""
    for phase in ("eval", "train"):
        parts = [entry for entry in entries if (entry.folder, entry.phase) == (ROLLOUTS, phase)]
        if parts:
            return [entry for entry in parts if entry.step == parts[-1].step]
    return []


def _only(info: RunInfo, parts: Sequence[Entry]) -> RunInfo:
    return replace(info, parts=[info.path / entry.path for entry in parts], grades=[], segments=[], metrics=None)


def _measured(infos: Mapping[Path, RunInfo]) -> dict[Path, _Measured]:
    """Compute the accuracies of all runs with one query for those whose names differ."""
    found: dict[Path, _Measured] = {}
    left = {path: info for path, info in infos.items() if info.parts}
    while left:
        by_id = {info.id: path for path, info in left.items()}
        with open_runs([left[path] for path in by_id.values()]) as database:
            kinds: dict[str, list[dict[str, Any]]] = {}
            for row in database.select(_KINDS_SQL).records():
                kinds.setdefault(row["run_id"], []).append(row)
        for run_id, rows in kinds.items():
            accuracy = share_of([(row["correct"], row["n"], row["questions"]) for row in rows])
            questions = sum(row["questions"] for row in rows)
            found[by_id[run_id]] = _Measured(rows[0]["phase"], rows[0]["step"], questions, accuracy)
        left = {path: info for path, info in left.items() if path not in by_id.values()}
    return found


def _described(info: RunInfo, measured: _Measured | None) -> dict[str, Any]:
    metadata = info.metadata
    facts = metadata.get("facts") or {}
    done, planned, unit = _progress(info)
    row = {
        "command": metadata["command"],
        "status": _status(info),
        "done": done,
        "planned": planned,
        "unit": unit,
        "model": name_of(facts.get("model")) or None,
        "dataset": name_of(facts.get("dataset")) or None,
        "created_at": _time(metadata["created_at"]),
        "wall_seconds": float(metadata.get("wall_seconds", 0.0)),
        "config": json.dumps(metadata.get("config") or {}),
        "best_score": _best_score(info) if metadata["command"] == SEARCH else None,
    }
    if measured is not None:
        estimate = measured.accuracy
        row |= {"phase": measured.phase, "step": measured.step, "questions": measured.questions}
        row |= {"accuracy": estimate.value, "low": estimate.low, "high": estimate.high}
    return row


def _differs(read: _Read, differing: Mapping[str, Mapping[str, Counter[str]]]) -> str | None:
    """Say in which options a run differs from most others of its command; None of a broken run."""
    if read.metadata is None or read.row["command"] is None:
        return None
    command, config = read.metadata["command"], read.metadata.get("config") or {}
    runs_alike = {
        name: (values[json.dumps(config[name] if name in config else _default(command, name))], values.total())
        for name, values in differing.get(command, {}).items()
    }
    unusual = [name for name, (alike, total) in runs_alike.items() if 2 * alike <= total]
    return ", ".join(_option(name, config) for name in sorted(unusual, key=lambda name: runs_alike[name][0]))


def _status(info: RunInfo) -> str:
    """Return the status; a run that should be running, but that nobody writes, was killed."""
    status = info.metadata["status"]
    return "killed" if status == "running" and holder_of(info.path) is None else status


def _progress(info: RunInfo) -> tuple[int | None, int | None, str | None]:
    """Return how much is done of how much, and of what; None where it is not known."""
    metadata = info.metadata
    planned = metadata.get("planned")
    unit, total = next(iter(planned.items()), (None, None)) if isinstance(planned, dict) else (None, None)
    if metadata["command"] == "eval" or unit == "samples":
        return sum(entry.rows for entry in info.entries if entry.folder == ROLLOUTS), total, "samples"
    if unit == "steps":
        # Of partial rollouts, a step in which no group has ended stores segments alone.
        steps = {
            entry.step for entry in info.entries if entry.folder in (ROLLOUTS, SEGMENTS) and entry.phase == "train"
        }
        return len(steps), total, "steps"
    updates = metadata.get("updates")
    if metadata["status"] in ENDED and isinstance(updates, int):
        return updates, total, "updates"
    if info.metrics is None:
        return (0, total, "updates") if total else (None, None, None)
    return _updates(info), total, "updates"


def _updates(info: RunInfo) -> int:
    """Count the updates that the committed metrics tell of."""
    return len(_metric(info, "update/skipped"))


def _best_score(info: RunInfo) -> float | None:
    """Return the best score of a search's attempts and of its program to start from, if that competes with them."""
    start = info.metadata.get("start") or {}
    of_start = [start["score"]] if start.get("points_sha256") else []
    return max([*_metric(info, "discover/best"), *of_start], default=None)


def _metric(info: RunInfo, name: str) -> list[float]:
    """Return the committed values of a metric."""
    data = read_metrics(info.path, info.entries, settled=info.settled)
    if data is None:
        return []
    rows = parsed_table(data, Metric, path=info.path / METRICS, columns=["name", "value"]).to_pylist()
    return [row["value"] for row in rows if row["name"] == name]


def _differing(metadata: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Counter[str]]]:
    """Return for each command the options in which its runs differ, without those that leave a result as it is.

    Each with its values, as JSON, and how many runs have them.
    """
    differing: dict[str, dict[str, Counter[str]]] = {}
    for command in {m["command"] for m in metadata}:
        configs = [m.get("config") or {} for m in metadata if m["command"] == command]
        try:
            known = options(config_of(command))
        except ModuleNotFoundError:  # what `rlvr quickstart` starts with, or a command of another version
            continue
        names = {o.name: o.default for o in known if o.name in _TOLD or not _is_of_no_effect(o.name, o.metadata)}
        values = {name: Counter(json.dumps(c.get(name, default)) for c in configs) for name, default in names.items()}
        differing[command] = {name: found for name, found in values.items() if len(found) > 1}
    return differing


def _default(command: str, name: str) -> Any:
    return next(option.default for option in options(config_of(command)) if option.name == name)


def _is_of_no_effect(name: str, metadata: Mapping[str, Any]) -> bool:
    return metadata["free_on_resume"] or name in ("run", "config", "preset")


def _option(name: str, config: Mapping[str, Any]) -> str:
    value = config.get(name)
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return f"{name} {'default' if value in (None, '') else f'{value:g}' if isinstance(value, float) else value}"


def _time(text: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time.astimezone(UTC).replace(tzinfo=None) if time.tzinfo else time


def _size(path: Path) -> int:
    """Add up the bytes of all files of a run, of which some may vanish meanwhile."""
    if source := source_of(path):
        return sum(source.sizes().values())
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total
