"""The process that uploads a run while it is written: `python -m rlvr_cli.runs.remote.follow RUN ADDRESS LEASE PATIENCE`.

Enters: the run's directory, looked at every second, until the standard input closes or the parent is gone. Leaves: in the store the
run as it was at some moment of the last seconds: files first, the index last. Lines for the parent on stdout: `note TEXT`,
`lost TEXT`, `failed TEXT`.

What makes a run is uploaded at once; checkpoints, which may take long, by a thread beside it: until a newer one is there the index names
those that are. Once a run has ended, the index is of all of it.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from rlvr_cli.errors import RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.runs.readers import read_metadata
from rlvr_cli.runs.remote import snapshot
from rlvr_cli.runs.remote.index import (
    CHECKPOINTS,
    INDEX,
    LEASE,
    File,
    Index,
    first_bytes,
    index_bytes,
    is_version,
    key_of,
    of_run,
    parsed_index,
    received,
    runs_below,
)
from rlvr_cli.runs.remote.lease import Lease, lost, renewing
from rlvr_cli.runs.remote.snapshot import Seen
from rlvr_cli.runs.remote.store import Changed, Store, parsed_address
from rlvr_cli.runs.remote.work import uploaded

EVERY = 1.0  # seconds between two looks, at least
SHARE = 0.05  # of a core that looking may take
AGAIN = 1.0  # seconds after a failure at the end
KEPT = 2  # checkpoints in the index
THREADS = 8
LOST = 3  # exit status: another writer has the run
GIVEN_UP = 4  # exit status: the end of the run cannot be uploaded; it has said why


class Uploader:
    """What is in the store, and how to bring it up to date.

    Attributes:
        arrived: the number of files that were sent.
    """

    def __init__(self, run: Path, lease: Lease) -> None:
        """Look at what is there. Raises RlvrError, and Changed if the lease is lost."""
        self._run, self._store, self._lease = run, lease.store, lease
        self.arrived = 0
        lease.renew()  # else the state that is read next may be another writer's, and would be replaced
        self._known: dict[str, Seen] = {}
        found = self._store.read(INDEX)
        self._tag = found[1] if found else None
        before = parsed_index(found[0], where=f"{self._store.address}/{INDEX}") if found else None
        self._index: Index | None = before
        self._there = self._store.sizes()
        self._glance: list[tuple[int, ...]] = []
        self._checkpoints: dict[str, dict[str, File]] = {}
        self._folders: dict[str, int] = {}  # of checkpoints that this process has uploaded: their inodes
        for path, file in (before.files if before else {}).items():
            if path.startswith(f"{CHECKPOINTS}/"):
                self._checkpoints.setdefault(path.split("/")[1], {})[path] = file
        self._worker: threading.Thread | None = None
        self._problem: Exception | None = None  # of the worker
        self._clean()

    def sync(self, *, whole: bool) -> None:
        """Bring the store up to date; with `whole`, to the state of a run that has ended. Raises RlvrError, and Changed if the lease is lost."""
        glance = snapshot.glance(self._run)
        if whole:
            self._upload_checkpoints()
        elif glance == self._glance and (self._worker is None or self._worker.is_alive()):
            return
        else:
            self._upload_beside()
        taken = snapshot.take(self._run, self._known)
        if taken is None and whole:
            raise RlvrError(f"{self._run} still changes.", "")
        if taken is None:
            return
        metadata = read_metadata(self._run)
        ended = metadata["status"] != "running"
        if ended and not whole:
            return  # its last files may still be on their way
        chosen = taken.checkpoints if whole else sorted(self._checkpoints)[-KEPT:]
        files = {path: seen.file for path, seen in taken.files.items()}
        missing = [path for path, file in files.items() if self._there.get(key_of(path, file.sha256)) != file.bytes]
        with ThreadPoolExecutor(THREADS) as pool:
            sent = list(pool.map(lambda path: self._send(path, taken.files[path]), missing))
        if not all(sent) and whole:
            raise RlvrError(f"{self._run} still changes.", "")
        if not all(sent):
            return
        for name in chosen:
            files |= self._checkpoints.get(name, {})
        self._put(of_run(metadata, files))
        self._known = {path: seen._replace(data=None) for path, seen in self._known.items()}
        self._glance = glance

    def _send(self, path: str, seen: Seen) -> bool:
        """Put a file as it was seen; whether it is still there: it may have grown since, but not have been replaced."""
        if seen.data is not None:
            self._upload(path, seen.file, seen.data)
            return True
        with suppress(FileNotFoundError), (self._run / path).open("rb") as file:
            if os.fstat(file.fileno()).st_ino == seen.state[0]:
                pieces = first_bytes(file, seen.file.bytes)
                small = seen.file.bytes <= snapshot.IN_MEMORY  # one put, where pieces take three requests
                self._upload(path, seen.file, b"".join(pieces) if small else pieces)
                return True
        return False

    def _upload(self, path: str, file: File, content: bytes | IO[bytes] | Iterator[bytes]) -> None:
        """Put a file, and read it back: only what was seen to be there is named by an index."""
        key = key_of(path, file.sha256)
        if self._there.get(key) == file.bytes:
            return
        fault_point("upload")
        self._store.put_file(key, content, size=file.bytes)
        if received(self._store.stream(key, size=file.bytes)) != file:
            self._store.delete([key])
            raise RlvrError(f"{self._store.address}/{key} did not arrive as it was sent.", "")
        self._there[key] = file.bytes
        self.arrived += 1

    def _put(self, index: Index) -> None:
        """Replace the index, then remove what only the one before it named."""
        index = Index(index.run_id, index.created_at, index.wall_seconds, index.files, self._lease.id)
        if index == self._index:
            return
        fault_point("upload.index")
        self._tag = self._store.put(INDEX, index_bytes(index), replaces=self._tag)
        old, self._index = self._index, index
        fault_point("upload.done")
        gone = set(old.keys.values() if old else ()) - set(index.keys.values())
        self._store.delete(sorted(gone & self._there.keys()))
        for key in gone:
            self._there.pop(key, None)

    def _clean(self) -> None:
        """Remove what no index names: of a writer that was killed. Runs below this one's name have indexes of their own."""
        others = tuple(f"{folder}/" for folder in runs_below(self._there))
        named = {INDEX, LEASE, *(self._index.keys.values() if self._index else ())}
        stray = [key for key in self._there if key not in named and is_version(key) and not key.startswith(others)]
        self._store.delete(stray)
        for key in stray:
            del self._there[key]

    # Checkpoints

    def _upload_beside(self) -> None:
        if self._worker is not None and self._worker.is_alive():
            return
        if self._problem is not None:
            problem, self._problem, self._worker = self._problem, None, None
            self._glance = []  # it is tried again also where nothing is new
            raise problem
        newest = snapshot.checkpoints_of(self._run)[-1:]
        self._worker = None
        if newest and not self._is_uploaded(newest[0]):
            self._worker = threading.Thread(target=self._work, args=(newest[0],), daemon=True)
            self._worker.start()

    def _is_uploaded(self, name: str) -> bool:
        return self._folders.get(name) == snapshot.inode_of(self._run / CHECKPOINTS / name)

    def _work(self, name: str) -> None:
        try:
            self._upload_checkpoint(name)
        except Exception as error:  # `sync` raises it
            self._problem = error

    def _upload_checkpoints(self) -> None:
        """Upload all that are there."""
        if self._worker is not None:
            self._worker.join()
        for name in snapshot.checkpoints_of(self._run):
            if not self._is_uploaded(name):
                self._upload_checkpoint(name)

    def _upload_checkpoint(self, name: str) -> None:
        """Upload one, whose files are opened first: the run may remove it meanwhile."""
        folder = self._run / CHECKPOINTS / name
        inode = snapshot.inode_of(folder)
        with ExitStack() as opened:
            try:
                paths = sorted(path for path in folder.rglob("*") if path.is_file())
                files = {path: opened.enter_context(path.open("rb")) for path in paths}
            except FileNotFoundError:
                return
            found: dict[str, File] = {}
            for path, content in files.items():
                relative = path.relative_to(self._run).as_posix()
                found[relative] = received(iter(lambda content=content: content.read(2**20), b""))
                content.seek(0)
                self._upload(relative, found[relative], content)
        self._checkpoints[name], self._folders[name] = found, inode


def follow(
    run: Path, lease: Lease, *, patience: float, ended: Callable[[float], bool], say: Callable[[str], None]
) -> None:
    """Upload a run until it has ended.

    Args:
        patience: seconds that a store has after the end, from the first failure on, and again once something has arrived.
        ended: waits up to so many seconds for the end; whether it has come.

    Raises:
        RlvrError: its end cannot be uploaded; or whatever else the last attempt failed with.
        Changed: another writer has it.
    """
    uploader: Uploader | None = None
    over, failing, deadline, took, arrived = False, 0, float("inf"), 0.0, 0
    while True:
        over = over or ended(max(EVERY * min(failing + 1, 5), took / SHARE))
        began = time.process_time()
        try:
            uploader = uploader or Uploader(run, lease)
            uploader.sync(whole=over)
            if failing:
                say(f"the upload to {lease.store.address} goes on")
            failing = 0
        except Changed:
            raise
        except Exception as error:  # whatever it is, the run goes on
            if uploader is not None and uploader.arrived > arrived:
                arrived, deadline = uploader.arrived, float("inf")
            deadline = min(deadline, time.monotonic() + patience) if over else deadline
            if time.monotonic() > deadline:
                raise
            if not failing:
                say(f"the upload waits: {_problem_of(error)} The run goes on, and is uploaded later.")
            failing += 1
            if over:
                time.sleep(AGAIN)
            continue
        took = time.process_time() - began
        if over:
            return


def _problem_of(error: Exception) -> str:
    """Say what an error means. The text of one that is neither ours nor the system's may quote a request."""
    if isinstance(error, RlvrError):
        return error.problem
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else ""
    return f"its process failed with {type(error).__name__}{reason and f' ({reason})'}."


def main() -> None:
    """Follow a run as the child of the process that writes it."""
    run, store, data = Path(sys.argv[1]), Store(parsed_address(sys.argv[2])), sys.argv[3].encode()
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are for the parent, which ends this process
    with suppress(OSError):
        os.nice(5)

    def tell(kind: str, text: str) -> None:
        with suppress(OSError):  # the parent is gone
            os.write(1, f"{kind} {' '.join(text.split())}\n".encode(errors="replace"))

    def is_lost(error: Changed) -> None:
        tell("lost", error.problem)
        os._exit(LOST)

    def ended(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and os.getppid() == parent:
            if select.select([0], [], [], min(left, 0.25))[0]:
                return True
        return os.getppid() != parent

    lease = Lease(store, data)
    renewing(lease, is_lost)
    try:
        follow(run, lease, patience=float(sys.argv[4]), ended=ended, say=lambda text: tell("note", text))
        uploaded(run)
        lease.release()
    except Changed:
        is_lost(lost(store))
    except Exception as error:  # whatever ended it: the parent says it
        tell("failed", _problem_of(error))
        os._exit(GIVEN_UP)
    os._exit(0)  # a thread may be waiting for the store


if __name__ == "__main__":
    main()
