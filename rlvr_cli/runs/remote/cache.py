"""The cache of files of runs in object storage: in the user's cache, by sha256, up to a size.

Enters: files with their sums, and what fetches them. Leaves: the same files in directories that stand for runs. ::

    objects/0f/0f3a…    a file, under its sha256
    runs/DIGEST/RUN/    a run as one index has it: links to objects, those that were read
    indexes/DIGEST      the last index of an address, and its tag

RLVR_CACHE_DIR names another place, RLVR_CACHE_GB another size. Nothing in it is needed: it can be removed at any time when no
command runs.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.remote.index import File, received
from rlvr_cli.runs.storage.files import damaged_file, os_errors_as_user_errors, shown, user_cache

SIZE_GB = 10.0
ABANDONED_SECONDS = 24 * 3600.0  # after which a file that is being written is that of a killed process
IN_USE_SECONDS = 3600.0  # after it was last opened a run stays, whatever the size


def most_bytes() -> float:
    """The size of the cache. Raises RlvrError if RLVR_CACHE_GB is no number."""
    text = os.environ.get("RLVR_CACHE_GB", "")
    try:
        return 1e9 * float(text or SIZE_GB)
    except ValueError:
        raise RlvrError(f"RLVR_CACHE_GB is {shown(text)}, no number.", "Write gigabytes, such as 10.") from None


class Cache:
    """The cache of this user on this machine. Several processes and threads may use it at once."""

    def __init__(self) -> None:
        """Nothing is made yet. Raises RlvrError if there is no place for it."""
        folder = user_cache()
        if folder is None:
            raise RlvrError("There is no place for the cache of runs in object storage.", "Name one in RLVR_CACHE_DIR.")
        self.folder = folder / "store"
        self._most = most_bytes()
        self._own: dict[Path, int] = {}  # states that no other process has opened: when this one did
        self._unseen = float("inf")  # bytes that have come since the size was looked at

    def run_directory(self, name: str, state: bytes) -> Path:
        """Return the directory for a run as it is with this index."""
        path = self.folder / "runs" / hashlib.sha256(state).hexdigest()[:32] / name
        with os_errors_as_user_errors(path):
            is_own = not path.parent.exists() or self._is_own(path)
            (path / "rollouts").mkdir(parents=True, exist_ok=True, mode=0o700)
            os.utime(path.parent)
            self._own[path] = path.parent.stat().st_mtime_ns if is_own else 0
        return path

    def drop(self, run: Path) -> None:
        """Remove a directory of `run_directory`, unless another process may be reading it: then `_trim` does so when it is time."""
        with suppress(FileNotFoundError):
            if self._is_own(run) or run.parent.stat().st_mtime < time.time() - IN_USE_SECONDS:
                shutil.rmtree(run.parent, ignore_errors=True)
        self._own.pop(run, None)

    def _is_own(self, run: Path) -> bool:
        return self._own.get(run) == run.parent.stat().st_mtime_ns

    def known(self, place: str) -> tuple[bytes, str] | None:
        """Return the index that an address last had, with its tag."""
        with suppress(OSError):
            tag, _, data = self._index_file(place).read_bytes().partition(b"\n")
            return (data, tag.decode(errors="replace")) if data else None
        return None

    def learn(self, place: str, data: bytes, tag: str) -> None:
        """Keep the index of an address."""
        _write(self._index_file(place), [tag.encode() + b"\n" + data])

    def take(self, file: File, target: Path, pieces: Callable[[], Iterable[bytes]], *, fresh: bool, name: str) -> None:
        """Have a file at a place, from the cache or else by fetching it.

        Args:
            fresh: fetch it in any case.
            name: of what is fetched, for the error.

        Raises:
            RlvrError: it cannot be fetched or written, or has another sum.
        """
        kept = self.folder / "objects" / file.sha256[:2] / file.sha256
        while fresh or not self._linked(kept, target, size=file.bytes):
            found = _write(kept, pieces(), wanted=file)
            if found != file:
                raise damaged_file(name, "its sha256 is not the one in the copy's index")
            if fresh:
                target.unlink(missing_ok=True)
            fresh = False
            self._unseen += file.bytes
        if self._unseen > self._most / 20:
            self._unseen = 0
            self._trim()

    def _linked(self, kept: Path, target: Path, *, size: int) -> bool:
        """Make the link to a file of the cache; whether it is there."""
        with os_errors_as_user_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                if kept.stat().st_size != size:
                    return False
                os.link(kept, target)
            except FileExistsError:
                return True
            except FileNotFoundError:
                return False
            except OSError:  # a file system without links
                _write(target, [kept.read_bytes()])
        return True

    def _trim(self) -> None:
        """Remove the files that no run links to, and then the runs that were not opened for longest, until the rest fits."""
        total, unused = self._sizes()
        if total > self._most:
            total = self._without(unused)
        runs = sorted((state.st_mtime, path) for path, state in _states(self._below("runs")))
        for opened, run in runs:
            if total <= self._most or opened > time.time() - IN_USE_SECONDS:
                break
            shutil.rmtree(run, ignore_errors=True)
            total = self._without(self._sizes()[1])

    def _without(self, unused: list[Path]) -> float:
        """Remove files. Returns the bytes of all that are left."""
        for path in unused:
            path.unlink(missing_ok=True)
        return self._sizes()[0]

    def _sizes(self) -> tuple[int, list[Path]]:
        """Return the bytes of all files, and those that no run links to."""
        states = _states(path for folder in self._below("objects") for path in folder.iterdir())
        old = time.time() - ABANDONED_SECONDS  # what is being written begins with a dot
        unused = [path for path, s in states if s.st_nlink == 1 and (path.name[0] != "." or s.st_mtime < old)]
        return sum(state.st_size for _, state in states), unused

    def _below(self, name: str) -> list[Path]:
        return [*(self.folder / name).iterdir()] if (self.folder / name).is_dir() else []

    def _index_file(self, place: str) -> Path:
        return self.folder / "indexes" / hashlib.sha256(place.encode()).hexdigest()[:32]


def _states(paths: Iterable[Path]) -> list[tuple[Path, os.stat_result]]:
    """The paths with their states, without those that another thread or process has just removed or renamed."""
    found = []
    for path in paths:
        with suppress(FileNotFoundError):
            found.append((path, path.stat()))
    return found


def _write(path: Path, pieces: Iterable[bytes], *, wanted: File | None = None) -> File:
    """Write a file that appears when it is whole and, with `wanted`, as it should be."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    with os_errors_as_user_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with temporary.open("wb") as out:
                found = received(pieces, out.write)
            if wanted in (None, found):
                os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return found
