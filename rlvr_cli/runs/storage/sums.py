"""Compare files of a run with their sha256 before something other than `read_part` reads them, such as DuckDB.

Enters: a run and the sha256 of its files, from the manifest or run.json. Leaves: nothing, or an RlvrError that names the
damaged file.

Reading half a gigabyte to hash it takes longer than most queries, so each version of a file is hashed once: what was intact
is noted in the user's cache directory, outside of the run, which may be read-only. A note is a hash of the sha256 and of
the file's device, inode, size, mtime and ctime. Every write through the file system changes the ctime, which no
program can set, so a changed file has no note. A file that changed less than `SETTLED_SECONDS` ago gets none either:
clocks of file systems are coarse, and a second write could leave the same ctime. `rlvr check` ignores the notes, because
a failing disk changes bytes without any write.
"""

import hashlib
import os
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.storage.files import damaged_file, os_errors_as_user_errors, refuse_links, shown, user_cache
from rlvr_cli.runs.storage.sources import fetched

SETTLED_SECONDS = 2.0
MAX_BYTES = 2**24  # of notes, about 500,000 files; then the older half goes

_intact: set[str] | None = None  # the notes, once they have been read


def sums_of(folder: Path) -> dict[str, str]:
    """Return name -> sha256 (hex) of the files in a folder, without those in folders of it."""
    with os_errors_as_user_errors(folder, "read"):
        sums = {}
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            with path.open("rb") as file:
                sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        return sums


def check_sums(run: Path, sums: Mapping[str, str]) -> None:
    """Check files: path in the run -> sha256 (hex).

    Raises:
        RlvrError: the first of them that is missing, not regular, or has another sha256.
    """
    fetched(run, *sums)
    notes = _notes()
    unknown = [path for path in sums if _note(run, path, sums[path]) not in notes]
    if not unknown:
        return
    if len(unknown) == 1:
        found = [_checked(run, unknown[0], sums[unknown[0]])]
    else:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
            found = list(pool.map(lambda path: _checked(run, path, sums[path]), unknown))
    fresh = [note for note in found if note]
    notes.update(fresh)
    _remember(fresh)


def _note(run: Path, relative: str, sha256: str) -> str:
    with os_errors_as_user_errors(run / relative, "read"):
        refuse_links(run, relative)
        return _note_of(os.lstat(run / relative), sha256)


def _note_of(state: os.stat_result, sha256: str) -> str:
    identity = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    return hashlib.sha256(f"{sha256} {identity}".encode()).hexdigest()[:32]


def _checked(run: Path, relative: str, sha256: str) -> str | None:
    """Read the file whole. Returns its note, or None if the file may still be changing."""
    path = run / relative
    with os_errors_as_user_errors(path, "read"):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            before, now = os.fstat(descriptor), time.time_ns()
            if not stat.S_ISREG(before.st_mode):
                raise RlvrError(f"{shown(path)} is not a regular file.", "Restore it from a copy of the run.")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            note = _note_of(os.fstat(descriptor), sha256)
    if digest != sha256:
        raise damaged_file(path, "its sha256 is not the one that was recorded")
    settled = now - before.st_ctime_ns > SETTLED_SECONDS * 1e9
    return note if settled and note == _note_of(before, sha256) else None


def _notes_file() -> Path | None:
    cache = user_cache()
    return cache / "intact-files" if cache else None


def _notes() -> set[str]:
    global _intact
    if _intact is None:
        _intact = set()
        with suppress(OSError):
            if file := _notes_file():
                _intact.update(_newest(file, MAX_BYTES).decode("ascii", "replace").split())
    return _intact


def _newest(file: Path, most: int) -> bytes:
    """The last `most` bytes of the notes; a note that is cut is none."""
    with file.open("rb") as notes:
        notes.seek(max(os.fstat(notes.fileno()).st_size - most, 0))
        return notes.read(most)


def _remember(notes: Sequence[str]) -> None:
    """Add to the notes, if the cache can be written; otherwise the next process hashes again."""
    file = _notes_file()
    if not notes or file is None:
        return
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text, begin = "".join(f"{note}\n" for note in notes).encode()[-MAX_BYTES:], os.O_APPEND
        if file.exists() and file.stat().st_size + len(text) > MAX_BYTES:
            text, begin = _newest(file, max(MAX_BYTES // 2 - len(text), 0)) + text, os.O_TRUNC
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | begin, 0o600)
        with open(descriptor, "wb") as out:
            out.write(text)  # a torn line is no note
