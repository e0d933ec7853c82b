"""A run that is being written, as it is at one moment: its files with their sums, none of them of another moment.

Enters: a run directory. Leaves: a `Snapshot`, which is what a kill at that moment would leave, so that all that makes runs survive
kills makes them survive being uploaded.

Nothing is locked: the directory is looked at, what is new is read, and it is looked at again; if nothing has changed, what was read
is of one moment. Large files may grow meanwhile, as those of trackers do: what was there at first is read.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.manifest import FOLDERS
from rlvr_cli.runs.remote.index import CHECKPOINTS, File, first_bytes, may_have_links, received, stays_here
from rlvr_cli.runs.storage.files import os_errors_as_user_errors, shown

LOOKS = 20  # until the next time
IN_MEMORY = 2**23  # bytes of a file that is kept as it was read


class Seen(NamedTuple):
    """A file as it was."""

    state: tuple[int, ...]  # changes when the file does
    file: File
    data: bytes | None  # of a small one that may be replaced, until it is sent; parts never are


class Snapshot(NamedTuple):
    """The files of a run at one moment, without its checkpoints, and the folders of these."""

    files: dict[str, Seen]
    checkpoints: list[str]  # oldest first


def take(run: Path, known: dict[str, Seen]) -> Snapshot | None:
    """Look at a run. None if it changed all the time.

    Args:
        known: what was seen before; brought up to date.
    """
    for _ in range(LOOKS):
        try:
            before = dict(_states(run))
            for path, state in before.items():
                if path not in known or known[path].state != state:
                    is_held = state[1] <= IN_MEMORY and path.split("/")[0] not in FOLDERS
                    known[path] = _seen(run / path, state, is_held=is_held)
            if _is_as_before(dict(_states(run)), before):
                for path in known.keys() - before.keys():
                    del known[path]
                return Snapshot(dict(known), checkpoints_of(run))
        except FileNotFoundError:
            continue
    return None


def checkpoints_of(run: Path) -> list[str]:
    """Return the names of the folders of the checkpoints that are complete, oldest first."""
    try:
        return sorted(
            e.name for e in os.scandir(run / CHECKPOINTS) if e.is_dir(follow_symlinks=False) and e.name[0] != "."
        )
    except FileNotFoundError:
        return []


def inode_of(folder: Path) -> int:
    """Return what tells a folder from a later one of the same name; 0 if there is none."""
    try:
        return folder.stat().st_ino
    except FileNotFoundError:
        return 0


def glance(run: Path) -> list[tuple[int, ...]]:
    """Return what changes whenever something is committed; takes a few system calls, however large the run is."""
    folders = [entry.path for entry in os.scandir(run) if entry.is_dir(follow_symlinks=False)]
    found = []
    for path in (run, run / "manifest.jsonl", *sorted(folders)):
        try:
            found.append(_identity(os.lstat(path)))
        except FileNotFoundError:
            found.append(())
    return found


def _states(run: Path, below: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    with os.scandir(run / below) as entries:
        for entry in entries:
            path = f"{below}{entry.name}"
            if stays_here(path) or path == CHECKPOINTS:
                continue
            state = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(state.st_mode):
                yield from _states(run, f"{path}/")
            elif stat.S_ISREG(state.st_mode):
                yield path, _identity(state)
            elif not (stat.S_ISLNK(state.st_mode) and may_have_links(path)):
                raise RlvrError(f"{shown(run / path)} is not a regular file.", "Move it out of the run.")


def _identity(state: os.stat_result) -> tuple[int, ...]:
    return state.st_ino, state.st_size, state.st_mtime_ns


def _is_as_before(now: dict[str, tuple[int, ...]], before: dict[str, tuple[int, ...]]) -> bool:
    """Whether nothing has changed but that large files have grown."""

    def is_same(new: tuple[int, ...], old: tuple[int, ...]) -> bool:
        return new == old or (new[0] == old[0] and new[1] > old[1] > IN_MEMORY)

    return now.keys() == before.keys() and all(is_same(now[path], state) for path, state in before.items())


def _seen(path: Path, state: tuple[int, ...], *, is_held: bool) -> Seen:
    if not is_held:
        if not path.exists():
            raise FileNotFoundError
        with os_errors_as_user_errors(path, "read"), path.open("rb") as file:
            return Seen(state, received(first_bytes(file, state[1])), None)
    data = path.read_bytes()
    return Seen(state, received([data]), data)
