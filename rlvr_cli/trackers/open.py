"""The trackers by name, and how one is opened.

Enters: a name and a run. Leaves: an open `Tracker`, which no other process sends the same run to.
"""

import fcntl
import importlib
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol

from rlvr_cli.errors import RlvrError, missing_extra
from rlvr_cli.runs.readers import RunInfo
from rlvr_cli.runs.storage.files import atomic_write, os_errors_as_user_errors, shown, typed
from rlvr_cli.trackers.rows import Row
from rlvr_cli.trackers.sent import FOLDER

PATIENCE = 60.0  # seconds that one waits for another process, such as that of a run that was killed and resumed

OF_RUN = ".run"  # in a folder of --out: whose metrics it has


class Tracker(Protocol):
    """Gets the rows of one run."""

    @property
    def note(self) -> str:
        """Where its user finds the run."""
        ...

    def send(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Send what is new, and return it. `rows` are all complete rows of the run so far."""
        ...

    def finish(self, status: str) -> None:
        """Wait until all is sent, and end. `status` is the run's."""
        ...


class Kind(NamedTuple):
    """Where a tracker's class is, which package it needs, and in which folder of the run it writes ("": it sends to a server)."""

    module: str
    class_name: str
    package: str
    folder: str = ""


TRACKERS = {
    "wandb": Kind("wandb_run", "WandB", "wandb"),
    "tensorboard": Kind("tensorboard_events", "TensorBoard", "tensorboard", "tensorboard"),
    "trackio": Kind("trackio_run", "Trackio", "trackio"),
    "csv": Kind("csv_tables", "Csv", "", "csv"),
}


def later(run: Path, name: str, project: str) -> str:
    """Return the command that sends what a tracker has not got of a run."""
    of_project = f" --track-project {shlex.quote(project)}" if project and not TRACKERS[name].folder else ""
    return f"rlvr export {typed(run)} --to {name}{of_project}"


def check_installed(names: Sequence[str]) -> None:
    """Raise RlvrError if a package of these trackers is not installed."""
    for name in names:
        package = TRACKERS[name].package
        if package and find_spec(package) is None:
            raise missing_extra(package, package)


def check_folder(folder: Path, info: RunInfo) -> None:
    """Raise RlvrError if another run's metrics are in this folder. One of an earlier version does not say whose it has."""
    file, own = folder / OF_RUN, _identity(info)
    with os_errors_as_user_errors(file, "read"):
        found = file.read_text(encoding="utf-8", errors="replace") if file.exists() else own
    if found != own:
        raise RlvrError(
            f"{shown(folder)} has the metrics of another run: {found}; {shown(info.path)} is {own}.",
            "Give another --out, or remove the folder.",
        )


def _identity(info: RunInfo) -> str:
    return f"{info.id}, created at {info.metadata['created_at']}"  # a renamed run keeps both


@contextmanager
def open_tracker(
    name: str, info: RunInfo, *, project: str, live: bool, patience: float, out: Path | None = None
) -> Iterator[Tracker]:
    """Open a tracker for a run.

    Args:
        project: the tracker's project; empty: its own default.
        live: whether it follows a run in progress on this machine.
        patience: seconds to wait for another process that has it open.
        out: for a tracker that writes files: the folder for them, in place of one in the run.

    Raises:
        RlvrError: the package is not installed, another process still has it open, or as `check_folder`.
    """
    check_installed([name])
    kind = TRACKERS[name]
    folder = info.path / kind.folder if out is None else out
    lock, what = info.path / FOLDER / f"{name}.lock", f"{shown(info.path)} to {name}"
    if out is not None:  # of all trackers: no two may say at once whose metrics the folder has
        lock, what = out / ".lock", f"metrics to {shown(out)}"
    own = {"folder": folder} if kind.folder else {}
    with _locked(lock, what=what, patience=patience):
        if out is not None:
            check_folder(out, info)  # again: another process may have written it since
            atomic_write(out / OF_RUN, _identity(info).encode())
        tracker: Tracker = getattr(importlib.import_module(f"rlvr_cli.trackers.{kind.module}"), kind.class_name)(
            info, project=project, live=live, **own
        )
        yield tracker


@contextmanager
def _locked(path: Path, *, what: str, patience: float) -> Iterator[None]:
    with os_errors_as_user_errors(path.parent):
        path.parent.mkdir(exist_ok=True, parents=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RlvrError(f"Another process sends {what}.", "Wait until it ends, or stop it.") from None
                time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)
