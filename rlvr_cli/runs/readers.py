"""Read a run without its lock: only the files that its manifest lists.

Enters: a run directory or a name. Leaves: `RunInfo` and tables of rollouts, or an RlvrError if a file differs from what
was committed.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.files import os_errors_as_user_errors, read_regular, refuse_links, shown
from rlvr_cli.runs.manifest import GRADES, METRICS, ROLLOUTS, Entry, matches, parse_manifest
from rlvr_cli.runs.parquet import from_parquet
from rlvr_cli.runs.schemas import newer_version, rollout_schema
from rlvr_cli.text import printable
from rlvr_cli.types import SCHEMA_VERSION, Phase, Regrade, Rollout

if TYPE_CHECKING:
    import pyarrow as pa


RUN_FILE, MANIFEST = "run.json", "manifest.jsonl"

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a run contains, read without a lock."""

    path: Path
    id: str
    metadata: dict[str, Any]  # the content of run.json
    parts: list[Path]  # committed rollout parts, in commit order
    grades: list[Path]  # committed grades parts, in commit order
    metrics: Path | None  # None before the first metric
    fingerprint: str  # SHA-256 (hex) of the rollout parts' hashes; changes when rollouts are added


def damaged_file(path: Path, what: str) -> RlvrError:
    return RlvrError(f"{shown(path)} is damaged: {what}.", "Restore the file from a copy, or start a new run.")


def read_manifest(run: Path) -> tuple[list[Entry], int]:
    """Return the entries of the manifest and the length of their lines in bytes."""
    data = read_regular(run, MANIFEST)
    try:
        return parse_manifest(data, newest=SCHEMA_VERSION)
    except ValueError as error:
        raise damaged_file(run / MANIFEST, printable(str(error), keep="")) from error


def read_metadata(run: Path) -> dict[str, Any]:
    path = run / RUN_FILE
    try:
        metadata = json.loads(read_regular(run, RUN_FILE))
    except (ValueError, RecursionError) as error:
        raise damaged_file(path, f"it is not valid JSON ({printable(str(error), keep='')})") from error
    if not isinstance(metadata, dict):
        raise damaged_file(path, "it is not a JSON object")
    version = metadata.get("schema_version")
    if type(version) is int and version > SCHEMA_VERSION:
        raise newer_version(shown(run), version)
    for name in ("run_id", "command", "status", "created_at"):
        if not isinstance(metadata.get(name), str):
            raise damaged_file(path, f"it has no {name}")
    if type(version) is not int or version < 1 or RUN_NAME.fullmatch(metadata["run_id"]) is None:
        raise damaged_file(path, "its schema_version or run_id is not valid")
    _check_values(path, metadata)
    return metadata


def _check_values(path: Path, metadata: dict[str, Any]) -> None:
    """Raise RlvrError if a field that every command may have written has another type: the file may come from someone else."""
    for name in ("config", "sources", "facts", "environment", "sampler"):
        if not isinstance(metadata.get(name, {}), dict):
            raise damaged_file(path, f"its {name} is not an object")
    if type(metadata.get("wall_seconds", 0.0)) not in (int, float):
        raise damaged_file(path, "its wall_seconds is not a number")
    try:
        json.dumps(metadata, allow_nan=False)
    except ValueError:
        raise damaged_file(path, "it has a number that is not finite") from None


def check_part(run: Path, entry: Entry) -> Path:
    """Return the path of a committed part after checking its type and size, but not its content."""
    path = run / entry.path
    with os_errors_as_user_errors(path, "read"):
        refuse_links(run, entry.path)
        state = os.lstat(path)
    if not stat.S_ISREG(state.st_mode):
        raise RlvrError(f"{shown(path)} is not a regular file.", "Restore it from a copy of the run.")
    if state.st_size != entry.bytes:
        raise damaged_file(path, f"it has {state.st_size} bytes, but {entry.bytes} were committed")
    return path


def read_part(run: Path, entry: Entry, columns: Sequence[str] | None = None) -> "pa.Table":
    path = run / entry.path
    data = read_regular(run, entry.path)
    if not matches(entry, data):
        raise damaged_file(path, "its sha256 differs from the manifest")
    return parsed_table(data, row_type_of(entry.folder), path=path, columns=columns)


def row_type_of(folder: str) -> type:
    """Return the row type of the parts in a folder."""
    return Regrade if folder == GRADES else Rollout


def parsed_table(data: bytes, record: type, *, path: Path, columns: Sequence[str] | None = None) -> "pa.Table":
    try:
        return from_parquet(data, record, columns=columns, name=shown(path))
    except ValueError as error:
        raise damaged_file(path, str(error)) from error


# The readers


def read_run(path: Path | str) -> RunInfo:
    """Read what a run contains; works while the run is being written.

    Raises:
        RlvrError: it is not a run, or one of its files is missing, a symbolic link or of the wrong size.
    """
    path = Path(path)
    metadata = read_metadata(path)
    entries, _ = read_manifest(path)
    parts = {folder: [check_part(path, e) for e in entries if e.folder == folder] for folder in (ROLLOUTS, GRADES)}
    digests = "".join(e.sha256 for e in entries if e.folder == ROLLOUTS)
    return RunInfo(
        path=path,
        id=metadata["run_id"],
        metadata=metadata,
        parts=parts[ROLLOUTS],
        grades=parts[GRADES],
        metrics=metrics_path(path, entries),
        fingerprint=hashlib.sha256(digests.encode()).hexdigest(),
    )


def present_parts(run: Path) -> list[str]:
    """Return the relative paths of all ``*.parquet`` files in rollouts/ and grades/, committed or not."""
    found: list[str] = []
    for folder in (ROLLOUTS, GRADES):
        if folder == GRADES and not os.path.lexists(run / folder):
            continue
        refuse_links(run, folder)
        with os_errors_as_user_errors(run / folder, "read"):
            found += sorted(f"{folder}/{n}" for n in os.listdir(run / folder) if n.endswith(".parquet"))
    return found


def metrics_path(run: Path, entries: Sequence[Entry]) -> Path | None:
    path = run / METRICS
    announced = sum(e.path == METRICS for e in entries)
    refuse_links(run, METRICS)
    if announced and path.is_file():
        return path
    if announced > 1:  # after the first announcement alone, the file may not exist yet
        raise RlvrError(
            f"{shown(path)} is missing.",
            "Restore the file from a copy, or resume the run: its metrics then start over.",
        )
    return None


def read_rollouts(
    path: Path | str, *, phase: Phase | None = None, step: int | None = None, columns: Sequence[str] | None = None
) -> "pa.Table":
    """Return the committed rollouts of a run, of one phase and step or of all, in commit order.

    Every part is checked against its sha256 in the manifest and against its page checksums.

    Args:
        columns: names of columns; None for all.

    Raises:
        RlvrError: as for `read_run`, or a part is damaged.
    """
    import pyarrow as pa

    return pa.concat_tables(read_parts(path, phase=phase, step=step, columns=columns))


def read_parts(
    path: Path | str, *, phase: Phase | None = None, step: int | None = None, columns: Sequence[str] | None = None
) -> "Iterator[pa.Table]":
    """Yield the tables of `read_rollouts` part by part, to limit memory. The first table is always empty."""
    path = Path(path)
    read_metadata(path)
    entries, _ = read_manifest(path)
    return part_tables(path, entries, phase=phase, step=step, columns=columns)


def part_tables(
    path: Path, entries: Sequence[Entry], *, phase: Phase | None, step: int | None, columns: Sequence[str] | None
) -> "Iterator[pa.Table]":
    names = rollout_schema().names if columns is None else list(columns)
    assert set(names) <= set(rollout_schema().names), names
    yield rollout_schema().empty_table().select(names)
    for entry in entries:
        if entry.folder == ROLLOUTS and phase in (None, entry.phase) and step in (None, entry.step):
            yield read_part(path, entry, names)


def latest_run(root: Path | str) -> Path:
    """Return the newest run in `root`, by created_at of run.json; runs with an unreadable run.json are skipped.

    Raises:
        RlvrError: there is no run, or none is readable.
    """
    runs = _runs(Path(root))
    if not runs:
        raise RlvrError(
            f"There is no run in {shown(root)}.",
            "Create one, for instance with `rlvr eval`, or give the directory of runs with --runs-dir.",
        )
    readable: list[tuple[str, str, Path]] = []
    unreadable: list[RlvrError] = []
    for run in sorted(runs):
        try:
            readable.append((read_metadata(run)["created_at"], run.name, run))
        except RlvrError as error:
            unreadable.append(error)
    if not readable:
        raise unreadable[0]
    return max(readable)[2]


def resolve_run(name_or_path: str | Path, root: Path | str) -> Path:
    """Return the path of the run with that name in `root`, or else of the run directory at that path.

    Raises:
        RlvrError: there is neither; the hint lists the most similar names, or else the newest runs.
    """
    name, root = str(name_or_path), Path(root)
    if RUN_NAME.fullmatch(name) is not None and os.path.lexists(root / name / RUN_FILE):
        return root / name
    if os.path.lexists(Path(name) / RUN_FILE):
        return Path(name)
    import difflib

    names = run_names(root)
    near = difflib.get_close_matches(name, names, n=3)
    hint = f"Did you mean: {', '.join(near)}?" if near else f"The newest runs: {', '.join(names[:3])}."
    raise RlvrError(
        f"There is no run {name!r}, neither in {shown(root)} nor as a directory.",
        hint if names else "Give the directory of runs with --runs-dir.",
    )


def is_run(name_or_path: str, root: Path | str) -> bool:
    """Whether the text is the name of a run in `root` or the path of a run; False for any other text, such as SQL."""
    if "\0" in name_or_path or len(name_or_path) > 1000:
        return False
    try:
        return any((folder / name_or_path / RUN_FILE).is_file() for folder in (Path(), Path(root)))
    except OSError:
        return False  # for example a path component that is too long


def run_names(root: Path | str) -> list[str]:
    """Return the names of the runs in a directory, the most recently written first."""
    return [run.name for run in sorted(_runs(Path(root)), key=_changed, reverse=True)]


def _runs(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    with os_errors_as_user_errors(root, "read"):
        names = [e.name for e in os.scandir(root) if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
    return [root / name for name in names if os.path.lexists(root / name / RUN_FILE)]


def _changed(run: Path) -> float:
    """Return the modification time of run.json; 0 if the file is gone."""
    with suppress(OSError):
        return os.stat(run / RUN_FILE).st_mtime
    return 0.0
