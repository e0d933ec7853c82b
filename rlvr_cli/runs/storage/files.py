"""Durable, atomic file writes, and file errors that name the file.

Enters: bytes and paths. Leaves: atomically replaced files, or an RlvrError that says which file failed and what to do.
"""

import errno
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from rlvr_cli.errors import RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.runs.storage.sources import fetched, place_of
from rlvr_cli.text import printable

# Durable files


def fsync_directory(path: Path) -> None:
    """Make renames, creations and deletions in a directory durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write(path: Path, data: bytes | memoryview) -> None:
    """Replace a file atomically and durably: even after a power failure it is the old or the complete new file.

    The temporary file is ``.NAME.tmp`` in the same directory; it is removed before this returns or raises. Not safe for
    concurrent writers.

    Raises:
        RlvrError: the disk is full, the directory is not writable, and the like. The old file is unchanged, unless only
            the fsync of the directory failed: then the new file is in place, but may not survive a power failure.
    """
    write_together([(path, data)])


def write_together(files: Sequence[tuple[Path, bytes | memoryview]]) -> None:
    """Replace several files, each as `atomic_write` does, and none before all of them are on the disk.

    They appear in this order. Earlier versions of all but the first are removed before the first appears, so that no file
    is ever beside an earlier version of one before it.

    Raises:
        RlvrError: as for `atomic_write`; the file that could not be written is named, and no file has changed unless a
            rename failed.
    """
    for path, _ in files:
        refuse_special(path)
    temporaries = [path.with_name(f".{path.name}.tmp") for path, _ in files]
    try:
        for (path, data), temporary in zip(files, temporaries, strict=True):
            with os_errors_as_user_errors(path):
                fault_point("write")
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
                with open(os.open(temporary, flags, 0o666), "wb", buffering=0) as file:
                    half = len(data) // 2
                    write_all(file.fileno(), memoryview(data)[:half], offset=0)
                    fault_point("write.torn")
                    write_all(file.fileno(), memoryview(data)[half:], offset=half)
                    os.fsync(file.fileno())
        for path, _ in files[:0:-1]:
            with os_errors_as_user_errors(path):
                path.unlink(missing_ok=True)
        for (path, _), temporary in zip(files, temporaries, strict=True):
            with os_errors_as_user_errors(path):
                fault_point("rename")
                os.replace(temporary, path)
                fault_point("renamed")
                fsync_directory(path.parent)
    except BaseException:
        for temporary in temporaries:
            with suppress(OSError):
                temporary.unlink()
        raise


def refuse_special(path: Path) -> None:
    """Raise RlvrError if replacing `path` would replace a device, a pipe or a link to one, such as /dev/stdout."""
    try:
        special = not stat.S_ISREG(os.stat(path).st_mode) or os.readlink(path).startswith("/proc/")
    except OSError:
        special = False  # there is nothing, or no link
    if special or not path.name:
        raise RlvrError(f"{shown(path)} is not a regular file.", "Choose another name for the file to write.")


def write_all(descriptor: int, data: bytes | memoryview, *, offset: int) -> None:
    """Write all of `data` to an open file, starting at `offset`. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)  # short when the disk fills up
        view, offset = view[written:], offset + written


_HINTS = {
    errno.ENOSPC: "Free some space on that disk.",
    errno.EDQUOT: "Free some of your disk quota.",
    errno.ENOENT: "There is no directory to write it in: make it first, with mkdir -p.",
    errno.EEXIST: "It is a file, not a directory: choose another path.",
    errno.ENOTDIR: "A part of this path is a file, not a directory: choose another path.",
    errno.EFBIG: "The file exceeds the process's limit on file size: raise it with ulimit -f.",
} | dict.fromkeys(
    (errno.EROFS, errno.EACCES, errno.EPERM), "Choose a writable directory, for instance with --runs-dir."
)


@contextmanager
def os_errors_as_user_errors(path: Path, action: str = "write", *, hint: str = "") -> Iterator[None]:
    """Turn an OSError into an RlvrError that names the file; `action` is the verb of the message, `hint` replaces the usual one."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = hint or (_HINTS.get(error.errno or 0, "") if action == "write" else "")
        raise RlvrError(f"Cannot {action} {shown(path)}: {reason}.", hint) from error


def check_can_write(directory: Path, *, file: Path | None = None) -> None:
    """Raise RlvrError if nothing can be written in a directory, which will be made if it is not there. Nothing is written yet.

    Args:
        file: the file to be written in it; then the directory has to be there.
    """
    path = directory.absolute()
    existing = next(p for p in (path, *path.parents) if os.path.lexists(p))
    with os_errors_as_user_errors(file or directory):
        if not existing.is_dir():
            raise OSError(errno.EEXIST if existing == path and file is None else errno.ENOTDIR, "")
        if file is not None and existing != path:
            raise OSError(errno.ENOENT, "")
        pseudo = existing.resolve().is_relative_to("/proc") or existing.resolve().is_relative_to(
            "/sys"
        )  # root may, and yet cannot
        if pseudo or not os.access(existing, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, "")


def is_full_disk(error: BaseException) -> bool:
    """Whether an error of `os_errors_as_user_errors` says that a disk or a quota is full."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


class Reserve:
    """A file that holds some disk space, to be freed for a small last write when the disk is full."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def hold(self, size: int) -> None:
        """Take up `size` bytes, or nothing if they are not free; replaces what a killed process held. Raises RlvrError."""
        self.release()
        with os_errors_as_user_errors(self._path):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                write_all(descriptor, bytes(size), offset=0)  # not fallocate, which some file systems lack
            except OSError:
                self.release()
                raise
            finally:
                os.close(descriptor)

    def release(self) -> None:
        with suppress(OSError):
            self._path.unlink()


def shown(path: Path | str) -> str:
    """Return a path or name, escaped for display in a message; of a run that stands for one elsewhere, its address."""
    return printable(place_of(path), keep="")


def typed(path: Path | str) -> str:
    """Return a path or address as one types it in a command of a shell."""
    return shlex.quote(shown(path))


def read_regular(run: Path, relative: str) -> bytes:
    """Read a regular file of a run. Symbolic links are rejected, because a run directory may come from someone else.

    Raises:
        RlvrError: the file is missing, unreadable or not regular, or it or a directory in `relative` is a symbolic
            link.
    """
    path = run / relative
    fetched(run, relative)
    with os_errors_as_user_errors(path, "read"):
        refuse_links(run, relative)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RlvrError(f"{shown(path)} is not a regular file.", "Restore it from a copy of the run.")
            return file.read()


def damaged_file(path: Path | str, what: str) -> RlvrError:
    """The error for a file of a run that is not as it was written."""
    return RlvrError(f"{shown(path)} is damaged: {what}.", "Restore the file from a copy, or start a new run.")


def refuse_links(run: Path, relative: str) -> None:
    """Raise RlvrError if the file, or a directory between the run and the file, is a symbolic link."""
    path = str(run)
    for component in relative.split("/"):
        path = f"{path}/{component}"
        if os.path.islink(path):
            raise RlvrError(
                f"{shown(path)} is a symbolic link.",
                "A run directory must contain its files: replace the link with the file.",
            )


def user_cache() -> Path | None:
    """Return the directory for what can be made or fetched again: RLVR_CACHE_DIR, or rlvr in the user's cache; None if there is none."""
    if named := os.environ.get("RLVR_CACHE_DIR"):
        return Path(named).absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "rlvr") if os.path.isabs(cache) else None


def utc_now() -> str:
    """Return the current UTC time as ISO 8601 with microseconds, the format stored in files."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")  # sorts chronologically as text


# The lock

# Descriptors that are closed in forked children: their copies would keep the lock held after this process dies.
_private: set[int] = set()


def open_private(path: Path, flags: int) -> int:
    """Open a file, refusing links; forked children close the descriptor. Raises OSError."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    _private.add(descriptor)
    return descriptor


def close_private(descriptor: int) -> None:
    """Close a descriptor opened by `open_private`."""
    _private.discard(descriptor)
    os.close(descriptor)


def _after_fork() -> None:
    while _private:
        with suppress(OSError):
            os.close(_private.pop())


os.register_at_fork(after_in_child=_after_fork)
