"""One writer per run: an operating-system file lock on the run directory; errors name the process that holds it."""

import errno
import fcntl
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.files import close_private, open_private, os_errors_as_user_errors, shown, utc_now, write_all

LOCK = ".lock"


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
                holder = json.dumps({"pid": os.getpid(), "host": os.uname().nodename, "since": utc_now()}).encode()
                write_all(self._descriptor, holder, offset=0)
                os.ftruncate(self._descriptor, len(holder))
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


def _holder(path: Path, *, alive: bool = True) -> str:
    """Describe the holder from the lock file; with `alive`, wait up to 0.2 s until it names a running process."""
    for _ in range(20):
        with suppress(OSError, ValueError, TypeError, KeyError):
            holder = json.loads(path.read_bytes())
            pid, host = int(holder["pid"]), str(holder["host"])
            if not alive or host != os.uname().nodename or _lives(pid):
                return f"process {pid} on {shown(host)} since {shown(str(holder['since']))}"
        time.sleep(0.01)
    return "another process"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
