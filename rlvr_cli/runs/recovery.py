"""Repair a run that was killed, when it is opened for writing: adopt, truncate or set aside uncommitted files.

Enters: a run directory and its open manifest. Leaves: a directory in which every file is committed, the metrics, and
one sentence per repair; and nothing of runs that were killed while they were created. Each step leaves the directory
repairable, so recovery itself may be killed at any point.
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.commits import MetricsFile, OpenManifest, new_entry
from rlvr_cli.runs.lock import LOCK, is_locked
from rlvr_cli.runs.manifest import (
    FOLDERS,
    GRADES,
    METRICS,
    ROLLOUTS,
    RUN_NAME,
    SEGMENTS,
    Entry,
    grader_slug,
    matches,
    part_name,
)
from rlvr_cli.runs.readers import check_part, parsed_table, present_parts, row_type_of
from rlvr_cli.runs.storage.files import fsync_directory, os_errors_as_user_errors, read_regular, refuse_links, shown
from rlvr_cli.runs.storage.keys import CommittedKeys, bits_of_keys, merge, overlap
from rlvr_cli.runs.storage.parquet import keys_of, version_of
from rlvr_cli.runs.storage.schemas import NewerVersion, metrics_schema
from rlvr_cli.runs.storage.sums import check_sums
from rlvr_cli.types import Metric

_LEFT_SECONDS = 86_400.0  # clocks of machines that share a directory may differ
_UNMADE = re.compile(rf"\.{RUN_NAME.pattern}\.[0-9]+-[0-9a-f]{{8}}\.tmp")  # `RunDir.create` renames it


def remove_unmade(root: Path) -> None:
    """Delete the directories of runs whose process was killed while it made them (`RunDir.create`). None has a row."""
    import shutil

    with suppress(OSError):
        for item in list(os.scandir(root)):
            if _UNMADE.fullmatch(item.name) and item.is_dir(follow_symlinks=False) and _was_killed(Path(item.path)):
                shutil.rmtree(item.path, ignore_errors=True)


def _was_killed(directory: Path) -> bool:
    """Whether the process that had the lock ended without giving it back. Where none has it, whether the directory is a day old: one
    that has yet to take it, or that has just given it back, is done within seconds.
    """
    lock = directory / LOCK

    def names_a_holder() -> bool:
        return lock.exists() and lock.stat().st_size > 0

    try:
        if names_a_holder():  # one that gives it back empties the file first: looked at again, it names nobody
            return not is_locked(directory) and names_a_holder()
        return time.time() - directory.stat().st_mtime > _LEFT_SECONDS
    except OSError:
        return False


def remove_temporaries(run: Path) -> None:
    """Delete the temporary files of interrupted writes. Raises RlvrError."""
    for name in FOLDERS:
        refuse_links(run, name)
    for name in ("", *FOLDERS):
        folder = run / name
        if name not in ("", ROLLOUTS) and not os.path.lexists(folder):
            continue  # the run has no such rows
        with os_errors_as_user_errors(folder):
            for item in list(os.scandir(folder)):
                if item.name.startswith(".") and item.name.endswith(".tmp") and item.is_file(follow_symlinks=False):
                    os.unlink(item.path)


def recover(run: Path, manifest: OpenManifest, keys: CommittedKeys, *, run_id: str, notices: list[str]) -> MetricsFile:
    """Repair the metrics and the parts.

    Args:
        notices: one sentence is appended per repair.

    Raises:
        RlvrError: a committed file is missing or damaged, or a newer rlvr wrote a part.
    """
    if manifest.had_incomplete_line:
        notices.append(f"{shown(manifest.path)} ended with an incomplete line, which was removed.")
    metrics = _settled_metrics(run, manifest, notices)
    parts = [entry for entry in manifest.entries if entry.path != METRICS]
    for entry in parts:
        check_part(run, entry)
    check_sums(run, {entry.path: entry.sha256 for entry in parts})
    listed = {e.path for e in manifest.entries}
    for relative in sorted((p for p in present_parts(run) if p not in listed), key=_commit_order):
        try:
            entry = _verified(run, relative, keys, run_id=run_id)
        except NewerVersion:
            raise
        except RlvrError as error:
            notices.append(_set_aside(run, relative, why=error.problem))
            continue
        manifest.append(entry)
        notices.append(f"{shown(relative)} was written just before the run was interrupted, and has been adopted.")
    return metrics


def _commit_order(relative: str) -> tuple[str, int, int, int, str]:
    """Sorts parts as they were committed: a step's segments before its rollouts, and these before their grades."""
    name = part_name(relative)
    if name is None:
        return "", 0, 0, 0, relative
    return name.phase, name.step, (SEGMENTS, ROLLOUTS, GRADES).index(name.folder), name.number, relative


def _settled_metrics(run: Path, manifest: OpenManifest, notices: list[str]) -> MetricsFile:
    """Return the committed metrics, after removing the last announcement if the metrics file was never replaced."""
    path = run / METRICS
    announced = [e for e in manifest.entries if e.path == METRICS]
    # Only the last line can be an announcement whose file was not written.
    unsure = bool(announced) and manifest.entries.last is announced[-1]
    if not os.path.lexists(path):
        metrics = MetricsFile(run, manifest, metrics_schema().empty_table())
        if unsure and len(announced) == 1:
            manifest.remove_last()
        elif announced:
            notices.append(f"{shown(path)} was missing; the metrics start over.")
            metrics.replace(metrics.table, phase=announced[-1].phase, step=announced[-1].step)
        return metrics
    data = read_regular(run, METRICS)
    if not announced or not matches(announced[-1], data):
        if not unsure or len(announced) < 2 or not matches(announced[-2], data):
            raise RlvrError(
                f"{shown(path)} is damaged: its sha256 differs from the manifest.",
                "Restore the file from a copy, or move it away to continue without the earlier metrics.",
            )
        manifest.remove_last()
    return MetricsFile(run, manifest, parsed_table(data, Metric, path=path))


def _verified(run: Path, relative: str, keys: CommittedKeys, *, run_id: str) -> Entry:
    """Return a manifest entry for an unlisted part. Raises RlvrError if the part must not be adopted."""
    name = part_name(relative)
    if name is None:
        raise RlvrError("its name is not a part name")
    phase, step = name.phase, name.step
    data = read_regular(run, relative)
    table = parsed_table(data, row_type_of(name.folder), path=run / relative)
    owners = set(zip(*(table[c].to_pylist() for c in ("run_id", "phase", "step")), strict=True))
    if owners != {(run_id, phase, step)}:
        raise RlvrError("its rows belong to another run, phase or step")
    if name.grader and set(map(grader_slug, table["grader"].to_pylist())) != {name.grader}:
        raise RlvrError("its rows belong to another grader")
    found = keys_of(table)
    try:
        fresh, held = bits_of_keys(found), keys.committed(phase, step, folder=name.folder, grader=name.grader)
    except ValueError as error:
        raise RlvrError(str(error)) from error
    if len(found) != table.num_rows or overlap(held, fresh):
        raise RlvrError("some of its rows are already in the run")
    merge(held, fresh)
    return new_entry(relative, data, rows=table.num_rows, phase=phase, step=step, version=version_of(data))


def _set_aside(run: Path, relative: str, *, why: str) -> str:
    folder = run / "set-aside"
    with os_errors_as_user_errors(folder):
        folder.mkdir(exist_ok=True)
        name = Path(relative).name
        target = next(p for p in (folder / f"{i}-{name}" for i in range(1_000_000)) if not os.path.lexists(p))
        os.rename(run / relative, target)
        fsync_directory((run / relative).parent)
    return f"{shown(relative)} was moved to {shown(target)}: {why.rstrip('.')}."
