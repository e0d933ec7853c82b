"""A run to object storage and back: its files first, each read back and compared, its index last.

Enters: a run directory and an address, or the other way round. Leaves: the copy, or an RlvrError; whenever either is
ended, what was there before is still whole, and doing it again goes on where it was cut.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rlvr_cli.errors import RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.runs.lock import Lock
from rlvr_cli.runs.manifest import FOLDERS, METRICS, ROLLOUTS, RUN_NAME
from rlvr_cli.runs.readers import read_index, read_metadata
from rlvr_cli.runs.remote.index import (
    INDEX,
    READ_AGAIN,
    File,
    Index,
    file_at,
    index_bytes,
    key_of,
    local_files,
    of_run,
    parsed_index,
    read_remote_index,
    received,
)
from rlvr_cli.runs.remote.store import Address, Store
from rlvr_cli.runs.storage.files import damaged_file, fsync_directory, os_errors_as_user_errors, shown
from rlvr_cli.terminal import console

THREADS = 8


class Sent(NamedTuple):
    """What was done."""

    place: Address  # of the copy
    files: int  # of the run
    moved: int  # of them, those that were not there


def export_run(run: Path, address: Address) -> Sent:
    """Copy a run that nobody writes to `address`/NAME, where an earlier copy of it may be.

    Raises:
        RlvrError: it is being written, one of its committed files is damaged; another run, or rows that this one does not
            have, are at that place; or the store refuses.
    """
    metadata = read_metadata(run)  # first: no lock file in a directory that is not a run
    store = Store(address.below(run.name))
    lock = Lock(run)
    try:
        entries = read_index(run).entries
        index = of_run(metadata, {path: file_at(run / path) for path in local_files(run)})
        for entry in entries:
            if entry.path != METRICS and index.files.get(entry.path) != (entry.bytes, entry.sha256):
                raise damaged_file(run / entry.path, "it is missing, or its sha256 differs from the manifest")
        found = store.read(INDEX)
        before = parsed_index(found[0], where=f"{store.address}/{INDEX}") if found else None
        if before is not None:
            check_continues(index, before, place=store.address)
        known = set(before.keys.values()) if before else set()
        there = store.sizes()
        fresh = [
            path for path, key in index.keys.items() if key not in known or there.get(key) != index.files[path].bytes
        ]
        missing = [path for path in fresh if there.get(index.keys[path]) != index.files[path].bytes]
        _each(partial(_send, store, run, index.files, set(missing)), fresh, what="files sent")
        if before != index:
            fault_point("upload.index")
            store.put(INDEX, index_bytes(index), replaces=found[1] if found else None)
        fault_point("upload.done")
        store.delete(sorted(known & there.keys() - set(index.keys.values())))
        return Sent(store.address, len(index.files), len(missing))
    finally:
        lock.release()


def check_continues(index: Index, before: Index, *, place: Address) -> None:
    """Raise RlvrError unless the run is the one of an earlier copy, with at least the copy's rows."""
    if (index.run_id, index.created_at) != (before.run_id, before.created_at):
        raise RlvrError(f"{place} is another run, created at {shown(before.created_at)}.", "Choose another prefix.")
    parts = {path: file for path, file in before.files.items() if path.split("/")[0] in FOLDERS}
    lost = [path for path, file in parts.items() if index.files.get(path) != file]
    if lost or index.wall_seconds < before.wall_seconds:
        what = f"it has {shown(lost[0])}, which this one has not" if lost else "it was worked on for longer"
        raise RlvrError(f"The copy at {place} has gone on elsewhere: {what}.", f"Get it with rlvr fetch {place}")


def _send(store: Store, run: Path, files: Mapping[str, File], missing: set[str], path: str) -> None:
    """Put a file that is missing, and read it back: only what was seen to be there is named by an index."""
    key, file = key_of(path, files[path].sha256), files[path]
    if path in missing:
        fault_point("upload")
        store.put_file(key, run / path, size=file.bytes)
    if received(store.stream(key, size=file.bytes)) != file:
        store.delete([key])
        raise RlvrError(f"{store.address}/{shown(key)} did not arrive as it was sent.", "Export the run again.")


def fetch_run(place: Address, root: Path) -> tuple[Path, Sent]:
    """Copy a run from object storage to `root`/NAME, which appears when it is whole; where it was cut, it goes on.

    Raises:
        RlvrError: there is none, it is damaged, or another run, or another state of it, has that name here.
    """
    name = place.prefix.rpartition("/")[2]
    if not RUN_NAME.fullmatch(name):
        raise RlvrError(f"{place} does not end with the name of a run.", "Write s3://BUCKET/PREFIX/RUN.")
    store = Store(place)
    index = read_remote_index(store)
    target, temporary = root / name, _unfinished(root, place)
    if os.path.lexists(target):
        if not target.is_dir() or any(_differs(target, *file) for file in index.files.items()):
            raise RlvrError(f"{shown(target)} exists already, and is not as the copy.", "Use another --runs-dir.")
        return target, Sent(place, len(index.files), 0)
    with os_errors_as_user_errors(temporary):
        (temporary / ROLLOUTS).mkdir(parents=True, exist_ok=True)
    lock = Lock(temporary)
    try:
        index, moved = _received_whole(store, temporary, index)
        with os_errors_as_user_errors(target):
            fsync_directory(temporary)
            fault_point("fetch.rename")
            os.rename(temporary, target)
            fsync_directory(root)
        lock.run = target
    finally:
        lock.release()
    return target, Sent(place, len(index.files), moved)


def _received_whole(store: Store, run: Path, index: Index) -> tuple[Index, int]:
    """Fetch what is missing of a run. Returns the index that it is of, newer if the run goes on, and how many files were fetched."""
    moved = 0
    for left in reversed(range(READ_AGAIN)):
        for path in local_files(run):
            if path not in index.files:  # of an earlier state of the copy
                (run / path).unlink()
        missing = [path for path, file in index.files.items() if _differs(run, path, file)]
        try:
            _each(partial(_receive, store, run, index.files), missing, what="files fetched")
            return index, moved + len(missing)
        except RlvrError:
            newer = read_remote_index(store)
            if not left or newer == index:
                raise
        moved += sum(not _differs(run, path, index.files[path]) for path in missing)
        index = newer
    raise AssertionError


def brought_run(place: Address, index: Index, root: Path) -> Path:
    """Return the directory of a run on this machine, at least as far as its index in the store; what is less far is replaced.

    Raises:
        RlvrError: each has what the other has not, or it cannot be fetched.
    """
    name = place.prefix.rpartition("/")[2]
    assert RUN_NAME.fullmatch(name), name
    target, old = root / name, root / f".{name}.old"
    if not os.path.lexists(target):
        return _fetched_beside(old, place, index, root)
    here = of_run(read_metadata(target), {path: file_at(target / path) for path in local_files(target)})
    try:
        check_continues(here, index, place=place)
        return target
    except RlvrError as diverged:
        try:
            check_continues(index, here, place=place)
        except RlvrError:
            raise RlvrError(
                f"{shown(target)}, the run as it was on this machine, has what {place} has not, and the other way round.",
                "Move that directory away to go on with what is in the store.",
            ) from diverged
    shutil.rmtree(old, ignore_errors=True)
    os.rename(target, old)
    return _fetched_beside(old, place, index, root)


def _fetched_beside(old: Path, place: Address, index: Index, root: Path) -> Path:
    """Fetch a run but for what an earlier state of it here, which was put aside, has as the index says; then remove that."""
    temporary = _unfinished(root, place)
    for path in [path for path, file in index.files.items() if old.exists() and not _differs(old, path, file)]:
        with os_errors_as_user_errors(temporary / path):
            (temporary / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(old / path, temporary / path)
    found = fetch_run(place, root)[0]
    shutil.rmtree(old, ignore_errors=True)
    return found


def _unfinished(root: Path, place: Address) -> Path:
    """The directory of a run that is being fetched, until it is whole."""
    return root / f".{place.prefix.rpartition('/')[2]}.fetch"


def _differs(run: Path, path: str, file: File) -> bool:
    """Whether a file of a run is not there as it should be."""
    here = run / path
    return not here.is_file() or here.is_symlink() or here.stat().st_size != file.bytes or file_at(here) != file


def _receive(store: Store, run: Path, files: Mapping[str, File], path: str) -> None:
    fault_point("fetch")
    target, key = run / path, key_of(path, files[path].sha256)
    temporary = target.with_name(f".{target.name}.tmp")
    with os_errors_as_user_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as out:
            found = received(store.stream(key, size=files[path].bytes), out.write)
            out.flush()
            os.fsync(out.fileno())
        if found != files[path]:
            temporary.unlink()
            raise damaged_file(f"{store.address}/{key}", "its sha256 is not the one in the copy's index")
        os.replace(temporary, target)
        fsync_directory(target.parent)


def _each(do: Callable[[str], None], paths: list[str], *, what: str) -> None:
    """Do something with each of some files, several at a time; the first error ends it."""
    with console.progress(what, len(paths)) as bar, ThreadPoolExecutor(THREADS) as pool:
        try:
            for _ in pool.map(do, paths):
                bar.advance(1)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
