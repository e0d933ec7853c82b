"""One writer per run: an operating-system file lock on the run directory; its file names the process that holds it, and what that does."""

import errno
import fcntl
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.storage.files import (
    close_private,
    open_private,
    os_errors_as_user_errors,
    read_regular,
    shown,
    utc_now,
    write_all,
)
from rlvr_cli.runs.storage.sources import source_of

LOCK = ".lock"
_CLOCK_SECONDS = 60.0  # by which clocks may have been set since
_SIZE = 1024  # bytes of its text, so that each new one is written whole over the last one


class Lock:
    """Exclusive write access to a run, held from construction until `release` or the end of the process, even when killed.

    This is the operating system's lock on the file ``.lock``, whose text names the holder. Some network file systems
    have no such locks; there the file ``.lock.exclusive``, which only one process can create, replaces it. That file
    survives a killed process; the error then says which file to delete.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._exclusive = False
        path = run / LOCK
        with os_errors_as_user_errors(path):
            self._descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
            try:
                self._acquire()
                self._holder = {"pid": os.getpid(), "host": os.uname().nodename, "since": utc_now()}
                self._write({})
                os.ftruncate(self._descriptor, _SIZE)
            except BaseException:
                self._give_up()
                raise

    def _acquire(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise RlvrError(
                    f"{shown(self.run)} is being written by {_holder(self.run / LOCK)}.",
                    "Wait until that process ends, or stop it. The run can be read in the meantime.",
                ) from error
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL):
                raise
            self._acquire_exclusive()

    def _acquire_exclusive(self) -> None:
        path = self.run / (LOCK + ".exclusive")
        try:
            descriptor = open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError as error:
            raise RlvrError(
                f"{shown(self.run)} is being written by {_holder(path, alive=False)}.",
                f"The file system has no locks that end with the process. If the process has ended, delete {shown(path)}.",
            ) from error
        close_private(self._descriptor)
        self._descriptor, self._exclusive = descriptor, True

    def note(self, facts: Mapping[str, str]) -> None:
        """Say in the file what the holder does (`holder_of`). Nothing depends on it, so that a file that cannot be written is left."""
        with suppress(OSError):
            self._write(facts)

    def _write(self, facts: Mapping[str, str]) -> None:
        text = json.dumps({**self._holder, **facts}).encode().ljust(_SIZE)
        assert len(text) == _SIZE, text
        write_all(self._descriptor, text, offset=0)

    def release(self) -> None:
        """Release the lock. Calling it again has no effect."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)  # no holder: the file names nobody
                # Unlock explicitly: a child that is being forked may hold a copy of the descriptor.
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._give_up()

    def _give_up(self) -> None:
        if self._exclusive:
            with suppress(OSError):
                (self.run / (LOCK + ".exclusive")).unlink()
        close_private(self._descriptor)
        self._descriptor, self._exclusive = -1, False


def is_locked(run: Path) -> bool:
    """Whether a process holds the lock of a run, wherever it is, as far as the file system knows."""
    if (run / (LOCK + ".exclusive")).exists():
        return True
    try:
        descriptor = os.open(run / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
    finally:
        os.close(descriptor)
    return False


def holder_of(run: Path) -> dict[str, Any] | None:
    """Return who writes a run: pid, host, since, and what it said of itself (`Activity`); None if nobody does.

    Of a process on another machine it is not known whether it still runs.
    """
    if source := source_of(run):
        return source.holder()
    for name in (LOCK, LOCK + ".exclusive"):
        with suppress(RlvrError, ValueError, TypeError, KeyError, RecursionError):
            if holder := _read(read_regular(run, name)):
                return holder
    return None


def _read(text: bytes, *, alive: bool = True) -> dict[str, Any] | None:
    """Return what a lock file says of its holder; None if that ran on this machine and has ended. Raises ValueError and the like."""
    holder = json.loads(text)
    host = str(holder["host"])
    facts = {**holder, "host": host, "pid": int(holder["pid"]), "since": str(holder["since"])}
    if alive and host == os.uname().nodename and not (_lives(facts["pid"]) and _may_be_holder(facts)):
        return None
    return facts


def _holder(path: Path, *, alive: bool = True) -> str:
    """Describe the holder from the lock file; with `alive`, wait up to 0.2 s until it names a running process."""
    for _ in range(20):
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            if holder := _read(path.read_bytes(), alive=alive):
                return description(holder)
        time.sleep(0.01)
    return "another process"


def description(holder: Mapping[str, Any]) -> str:
    """Return in words who holds a lock, and what it does."""
    who = f"process {int(holder['pid'])} on {shown(holder['host'])} since {shown(str(holder['since']))}"
    if "activity" not in holder:
        return who
    return f"{who}: {shown(str(holder['activity']))}, since {shown(str(holder.get('activity_since')))}"


def _may_be_holder(facts: Mapping[str, Any]) -> bool:
    """Whether the process of that number was there when the lock was taken: a killed one's number may be another's by now (Linux)."""
    with suppress(OSError, ValueError, IndexError):
        boot = next((line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime ")), "")
        ticks = Path(f"/proc/{facts['pid']}/stat").read_text().rpartition(")")[2].split()[19]
        started = int(boot.split()[1]) + int(ticks) / os.sysconf("SC_CLK_TCK")
        return started <= datetime.fromisoformat(facts["since"]).timestamp() + _CLOCK_SECONDS
    return True


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
