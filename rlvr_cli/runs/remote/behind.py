"""A run that is written here and uploaded behind: what the process that writes it has to do with its upload.

Enters: an address. Leaves: the directory on this machine, and an `Upload` that is ended with the run. The work is done by a process of
its own (`follow`), so that a slow or broken store never delays a step.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlvr_cli.errors import RlvrError
from rlvr_cli.faults import environment_of
from rlvr_cli.runs.remote.copies import brought_run
from rlvr_cli.runs.remote.follow import GIVEN_UP, LOST
from rlvr_cli.runs.remote.index import INDEX, runs_below
from rlvr_cli.runs.remote.lease import Lease, check_free, renewing
from rlvr_cli.runs.remote.store import Address, Store, parsed_address
from rlvr_cli.runs.remote.work import begun, work_folder
from rlvr_cli.runs.storage.files import check_can_write, shown, typed
from rlvr_cli.terminal import console

if TYPE_CHECKING:
    import subprocess

RESTARTS = 5  # of a process that ends too early
PATIENCE = 120.0  # seconds that a store has after the end of a run while nothing arrives
TOLD_AFTER = 2.0  # seconds of waiting at the end


def check_can_upload(text: str, *, run: str = "") -> None:
    """Raise RlvrError unless runs can be written for an address: the store answers, and so does the disk.

    Args:
        run: the address of one that is to go on; that nobody writes it is checked too.
    """
    check_can_write(work_folder(text))
    check_free(Store(parsed_address(run or text)))


class Upload:
    """The upload of one run.

    Attributes:
        address: of the run.
    """

    def __init__(self, lease: Lease) -> None:
        self.address = lease.store.address
        self._lease = lease
        self._run: Path | None = None
        self._child: subprocess.Popen[str] | None = None
        self._watcher: threading.Thread | None = None
        self._ending = False
        self._stopped = False
        self._problem = ""  # why it has not ended well
        self._lost: RlvrError | None = None
        self._process = os.getpid()
        self._renewing = renewing(lease, self._is_lost)  # until the process that uploads does so

    @classmethod
    def of_new(cls, place: Address) -> "Upload | None":
        """Reserve a place for a new run; None if there is a run. Raises Held if it is being written, RlvrError if it has
        runs below it, or the store fails."""
        store = Store(place)
        if store.read(INDEX) is not None:
            return None
        if below := runs_below(store.sizes()):
            raise RlvrError(
                f"{place} has runs below it, such as {shown(str(place.below(below[0])))}, and so cannot be a run.",
                f"Choose another name with --run; or, for a run beside those, --runs-dir {place}",
            )
        upload = cls(Lease.acquire(store))
        if store.read(INDEX) is not None:
            upload.give_up()
            return None
        return upload

    @classmethod
    def of_known(cls, place: Address) -> tuple["Upload", Path]:
        """Take a run over, and bring the directory on this machine up to date. Raises RlvrError."""
        upload = cls(Lease.acquire(Store(place)))
        try:
            index = upload._lease.fence()
            if index is None:
                raise RlvrError(f"There is no run at {place}.", "")
            above = Address(place.bucket, place.prefix.rpartition("/")[0])
            run = brought_run(place, index, work_folder(str(above)))
            upload.check()
            return upload, run
        except BaseException:
            upload.give_up()
            raise

    def start(self, run: Path) -> None:
        """Begin to upload."""
        self._run = run
        begun(run)
        console.say(f"upload   {self.address}, from {run}")
        self._spawn()
        self._renewing.set()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def check(self) -> None:
        """Raise RlvrError if another writer has taken the run over."""
        if self._lost is not None:
            raise self._lost

    def end(self) -> None:
        """Wait until everything is there. Raises RlvrError if it is not."""
        if self._watcher is None or self._run is None or os.getpid() != self._process:
            return
        began = time.monotonic()
        self._ending = True
        try:
            self._close_input()
            self._watcher.join(TOLD_AFTER)
            if self._watcher.is_alive():
                console.say(f"waiting for the upload to {self.address}")
            self._watcher.join()
        except BaseException:
            self._stop()
            raise
        finally:
            self._renewing.set()
            self._watcher = None
        if self._lost is not None:
            raise self._lost
        if self._problem:
            raise self._not_whole(self._problem)
        console.say(f"uploaded to {self.address}, {time.monotonic() - began:.1f} s after the end")

    def _stop(self) -> None:
        """End the upload as it is, and say where the run is unless all of it has arrived."""
        assert self._child is not None
        self._stopped = True
        self._child.kill()
        if self._child.wait() != 0 and self._lost is None:
            error = self._not_whole("the upload was interrupted.")
            console.say(f"note: {error.problem} {error.hint}")

    def give_up(self) -> None:
        """Let others have the place, where nothing was begun."""
        self._renewing.set()
        with suppress(RlvrError):
            self._lease.release()

    def _is_lost(self, error: RlvrError) -> None:
        self._lost = error

    def _not_whole(self, problem: str) -> RlvrError:
        return RlvrError(
            f"The run is not whole at {self.address}: {problem}",
            f"Here it is: {shown(str(self._run))}. Send the rest with: {self._export}",
        )

    @property
    def _export(self) -> str:
        return f"rlvr export {typed(str(self._run))} --to {str(self.address).rpartition('/')[0]}"

    def _spawn(self) -> None:
        import subprocess

        command = [sys.executable, "-m", "rlvr_cli.runs.remote.follow", str(self._run), str(self.address)]
        self._child = subprocess.Popen(
            [*command, self._lease.data.decode(), str(PATIENCE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=environment_of("upload" if self._watcher is None else "upload-again"),
            start_new_session=True,
        )
        if self._ending:
            self._close_input()
        if self._stopped:  # after the one before it was killed
            self._child.kill()

    def _close_input(self) -> None:
        if self._child is not None and self._child.stdin is not None:
            with suppress(OSError):
                self._child.stdin.close()

    def _watch(self) -> None:
        """Pass on what the process says, and start it again if it ends too early; if that does not help, keep the lease from here."""
        for left in reversed(range(RESTARTS)):
            child = self._child
            assert child is not None
            assert child.stdout is not None
            self._problem = ""
            with suppress(ValueError, OSError), child.stdout:
                for line in child.stdout:
                    self._hear(*line.rstrip("\n").partition(" ")[::2])
            status = child.wait()
            self._close_input()
            if self._stopped or status in (0, LOST) or (status == GIVEN_UP and self._problem):
                return
            self._problem = f"its process ended with status {status}."
            if left:
                console.say(f"note: the process of the upload ended with status {status}; another goes on")
                try:
                    self._spawn()
                except OSError as error:
                    self._problem = f"another process cannot be started: {error.strerror}."
                    break
        if not self._ending:
            self._renewing = renewing(self._lease, self._is_lost)
            console.say(
                f"note: the upload to {self.address} has stopped: {self._problem} The run goes on, and nobody else can write it there. "
                f"Once it has ended, send the rest with: {self._export}"
            )

    def _hear(self, kind: str, text: str) -> None:
        if kind == "note":
            console.say(f"note: {text}")
        elif kind == "failed":
            self._problem = text
        elif kind == "lost":
            hint = f"What was not uploaded is in {self._run}. Stop the other one first if this one is to go on."
            self._lost = RlvrError(text, hint)
            console.say(f"note: {text}")
