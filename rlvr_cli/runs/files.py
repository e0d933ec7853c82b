"""Files that are whole after a power cut, and errors that name the file.

Enters: bytes and paths. Leaves: files replaced atomically, or an RlvrError that says which file and what to do.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from rlvr_cli.errors import RlvrError
from rlvr_cli.faults import fault_point
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
    """Write a file so that at any moment, even after a power cut, it is the old one or the whole new one.

    The temporary file is ``.NAME.tmp`` beside it, and is gone when this returns or raises. For one writer at a time.

    Raises:
        RlvrError: the disk is full, the directory cannot be written, and the like; the old file is as it was, unless
            only the fsync of the directory failed.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with os_errors_as_user_errors(path):
        fault_point("write")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o666), "wb", buffering=0) as file:
                half = len(data) // 2
                write_all(file.fileno(), memoryview(data)[:half], offset=0)
                fault_point("write.torn")
                write_all(file.fileno(), memoryview(data)[half:], offset=half)
                os.fsync(file.fileno())
            fault_point("rename")
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        fault_point("renamed")
        fsync_directory(path.parent)


def write_all(descriptor: int, data: bytes | memoryview, *, offset: int) -> None:
    """Write all of `data` at that offset of an open file. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)  # short when the disk fills up
        view, offset = view[written:], offset + written


_HINTS = {
    errno.ENOSPC: "Free some space on that disk; what rlvr eval, sft, ei and grpo had done goes on with --resume.",
    errno.EDQUOT: "Free some of your disk quota; what rlvr eval, sft, ei and grpo had done goes on with --resume.",
    errno.EFBIG: "The process may not write files of that size (ulimit -f).",
} | dict.fromkeys(
    (errno.EROFS, errno.EACCES, errno.EPERM), "Choose a directory that you may write to, for instance with --runs-dir."
)


@contextmanager
def os_errors_as_user_errors(path: Path, action: str = "write") -> Iterator[None]:
    """Turn the operating system's refusal into an RlvrError that names the file."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = _HINTS.get(error.errno or 0, "") if action == "write" else ""
        raise RlvrError(f"Cannot {action} {shown(path)}: {reason}.", hint) from error


def shown(path: Path | str) -> str:
    """A path, or another name that came from a file, in a message."""
    return printable(str(path), keep="")


def read_regular(run: Path, relative: str) -> bytes:
    """The bytes of a regular file of a run. Links are refused wherever they lead: run directories are passed around.

    Raises:
        RlvrError: it is missing, a symbolic link or in one, or no regular file, or cannot be read.
    """
    path = run / relative
    with os_errors_as_user_errors(path, "read"):
        refuse_links(run, relative)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RlvrError(f"{shown(path)} is not a regular file.")
            return file.read()


def refuse_links(run: Path, relative: str) -> None:
    """Raise an RlvrError when a file of a run, or a directory between them, is a symbolic link."""
    path = str(run)
    for component in relative.split("/"):
        path = f"{path}/{component}"
        if os.path.islink(path):
            raise RlvrError(
                f"{shown(path)} is a symbolic link.",
                "The files of a run must lie in it: replace the link by the file.",
            )


def utc_now() -> str:
    """The time, as files hold it: ISO 8601 with microseconds, in UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")  # sorts as it reads


# The lock

# Descriptors that a forked child must not keep: its copies would hold the lock after the death of this process.
_private: set[int] = set()


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a file, not of a link, that forked children do not keep. Raises OSError."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    _private.add(descriptor)
    return descriptor


def close_private(descriptor: int) -> None:
    """Close a descriptor of `open_private`."""
    _private.discard(descriptor)
    os.close(descriptor)


def _after_fork() -> None:
    while _private:
        with suppress(OSError):
            os.close(_private.pop())


os.register_at_fork(after_in_child=_after_fork)
