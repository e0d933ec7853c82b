"""`rlvr runs`: the list of runs.

Enters: a RunsConfig. Leaves: a row for each run on stdout; on stderr what is wrong with damaged ones, and why an accuracy is not known.
As a table and in Markdown it has the columns for reading, as JSON and CSV all of `analysis.queries.run_list.COLUMNS`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.queries.run_list import cut_differences, list_runs, select_runs
from rlvr_cli.config.store.runs import RunsConfig
from rlvr_cli.runs.readers import all_runs, resolve_runs
from rlvr_cli.runs.several import command_below
from rlvr_cli.terminal import console, tables
from rlvr_cli.types import Table

MOST_SHOWN = 60  # characters of what differs, on a terminal


def run(config: RunsConfig) -> None:
    """List runs. Raises RlvrError for user errors; a damaged run is listed as broken."""
    paths = named_runs(config)
    sizes = config.size or config.sort == "largest"
    listed = select_runs(
        list_runs(paths, sizes=sizes),
        where=config.where,
        order=config.sort,
        timeout_seconds=config.timeout_seconds,
    )
    rows = list(listed.records())
    shown = rows[: config.limit or None]
    if config.format in ("json", "csv"):
        tables.print_tables([replace(listed, rows=listed.rows[: config.limit or None])], output=config.format)
    else:
        now = datetime.now(UTC).replace(tzinfo=None)
        differs = [row["differs"] or "" for row in shown]
        if config.format == "table" and sys.stdout.isatty():
            differs = cut_differences(differs, most=MOST_SHOWN)
        cells_of = [dict(_cells(row, now=now, sizes=sizes)) for row in shown]
        records = [record | {"differs": text} for record, text in zip(cells_of, differs, strict=True)]
        columns = ("run", "command", "status", "accuracy", *(["size"] if sizes else []), "age", "differs")
        cells = [tuple(record[column] for column in columns) for record in records]
        tables.print_tables([Table(columns, cells)], output=config.format, whole=True)
    for row in shown:
        if row["problem"]:
            console.say(f"{'broken' if row['status'] == 'broken' else row['run_id']}: {row['problem']}")
    if len(shown) < len(rows):
        console.say(f"only the first {config.limit} of {len(rows)} runs are shown; --limit 0 shows all of them")
    if not rows:
        console.say("no run fits" if paths else _nothing_in(config.runs_dir))


def named_runs(config: RunsConfig) -> Sequence[Path]:
    """Return the directories of the runs to list."""
    if not config.runs:
        return all_runs(config.runs_dir)
    named = resolve_runs(config.runs, config.runs_dir)
    console.report_passed_over(named.others)
    return named.runs


def _nothing_in(root: str) -> str:
    """There is no run in a directory, in words; which command lists those of its folders."""
    below = command_below("runs", root)
    return f"there is no run in {root}{f' itself; those of its folders: {below}' if below else ''}"


def _cells(row: Mapping[str, Any], *, now: datetime, sizes: bool) -> Iterator[tuple[str, Any]]:
    """Yield the columns for reading, but for what differs."""
    yield "run", row["run_id"]
    yield "command", row["command"]
    yield "status", " ".join(filter(None, [row["status"], _progress(row)]))
    yield "accuracy", _accuracy(row)
    if sizes:
        yield "size", _size(row["bytes"])
    yield "age", None if row["created_at"] is None else _age((now - row["created_at"]).total_seconds())


def _progress(row: Mapping[str, Any]) -> str:
    if row["done"] is None:
        return ""
    of = f"/{row['planned']}" if row["planned"] else ""
    return f"{row['done']}{of}"


def _accuracy(row: Mapping[str, Any]) -> str | None:
    if row["best_score"] is not None:
        return f"best score {row['best_score']:g}"
    if row["accuracy"] is None:
        return None
    of = " (training)" if row["phase"] == "train" else ""
    return f"{row['accuracy']:.3f} [{row['low']:.3f}, {row['high']:.3f}]{of}"


def _age(seconds: float) -> str:
    """Return seconds as the largest whole unit, such as 3 h."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds / length)} {unit}"
    return f"{max(int(seconds), 0)} s"


def _size(count: int) -> str:
    for unit, length in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= length:
            return f"{count / length:.3g} {unit}"
    return f"{count} B"
