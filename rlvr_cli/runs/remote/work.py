"""Where runs are written on this machine before they are in object storage, and what of them can go.

Enters: an address. Leaves: the directory here; runs that are wholly uploaded leave it when all of them exceed a size. Also for
commands that make many runs: a `Mirror` brings those that have ended in the store, and sends each that has ended here.
"""

import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.lock import is_locked
from rlvr_cli.runs.manifest import RUN_FILE
from rlvr_cli.runs.readers import ENDED, read_metadata
from rlvr_cli.runs.remote.cache import IN_USE_SECONDS, most_bytes
from rlvr_cli.runs.remote.copies import brought_run, export_run
from rlvr_cli.runs.remote.index import INDEX, Index, file_at
from rlvr_cli.runs.remote.store import Address, Store, parsed_address
from rlvr_cli.runs.remote.views import look_again, remote_run, view_of
from rlvr_cli.runs.storage.files import check_can_write, shown, typed, user_cache
from rlvr_cli.terminal import console

_UPLOADED = ".uploaded"  # behind the name of a run: beside it, a file that says that all of it is in the store


def work_root() -> Path:
    """Return the directory on this machine for runs that are being uploaded. Raises RlvrError."""
    cache = user_cache()
    if cache is None:
        raise RlvrError("There is no place to write runs before they are uploaded.", "Name one in RLVR_CACHE_DIR.")
    return cache / "work"


def work_folder(text: str) -> Path:
    """Return the directory on this machine for the runs of an address. Raises RlvrError."""
    address = parsed_address(text)
    return work_root() / address.bucket / address.prefix


def begun(run: Path) -> None:
    """Keep a run here, of which not all is in the store from now on."""
    _mark(run).unlink(missing_ok=True)


def uploaded(run: Path) -> None:
    """Let a run leave this machine, of which all is in the store; then those go that ended first, until the rest fits.

    Runs of the last hour stay, and those that a process has, or whose directory one has.
    """
    with suppress(OSError):  # what stays costs room, no more
        _mark(run).touch()
        marks = sorted((mark.stat().st_mtime, mark) for mark in work_root().rglob(f".*{_UPLOADED}"))
        size, most = {mark: _bytes_of(_run(mark)) for _, mark in marks}, most_bytes()
        total = sum(size.values())
        for ended, mark in marks:
            path = _run(mark)
            if total <= most or ended > time.time() - IN_USE_SECONDS:
                break
            if not is_locked(path) and not is_locked(path.parent):
                shutil.rmtree(path, ignore_errors=True)
                mark.unlink(missing_ok=True)
                total -= size[mark]


def name_is_taken(run: Path, above: Address) -> RlvrError:
    """The error for a new run whose name a run has here that is not in the store.

    Args:
        above: the address of the runs.
    """
    command, other = f"rlvr export {typed(run)} --to {above}", "or choose another name with --run."
    if _mark(run).exists() and not is_locked(run):
        return RlvrError(
            f"{shown(run)} exists: a run of that name was uploaded once, and is no longer in the store.",
            f"Remove {shown(run)} to make a new run of that name; or send it again with {command}, and resume it; {other}",
        )
    return RlvrError(
        f"{shown(run)} exists: a run of that name was not uploaded.", f"Send it with {command}, and resume it; {other}"
    )


def _mark(run: Path) -> Path:
    return run.with_name(f".{run.name}{_UPLOADED}")


def _run(mark: Path) -> Path:
    return mark.with_name(mark.name[1:].removesuffix(_UPLOADED))


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Mirror:
    """The runs of a command below an address, and the directory here in which it makes them.

    Attributes:
        folder: the directory.
    """

    def __init__(self, text: str) -> None:
        """Raises RlvrError unless the store answers, and the directory can be written."""
        self._address = parsed_address(text)
        self.folder = work_folder(text)
        self._unsent: list[str] = []
        check_can_write(self.folder)
        Store(self._address).read(INDEX)

    def bring(self, names: Iterable[str], *, left_out: dict[str, RlvrError]) -> dict[str, Path]:
        """Fetch the runs of these names, relative to the directory, that have ended in the store and are not here as far.

        Args:
            left_out: gets those of which this is not possible, with the reason: one is damaged in the store, say, or a run here and
                the one there have gone on differently.

        Returns:
            The runs that the store has and that have not ended there, as directories that stand for them: name -> directory.
        """
        look_again(seconds=0)
        going_on = {}
        for name in names:
            try:
                view = self._brought(name)
            except RlvrError as error:
                left_out[name] = error
                continue
            if view is not None:
                going_on[name] = view
        return going_on

    def _brought(self, name: str) -> Path | None:
        """Fetch a run if it has ended in the store. Returns what stands for it if it has not. Raises RlvrError."""
        view = view_of(str(self._below(name)))
        there = remote_run(view) if view else None
        if view is None or there is None:
            return None
        if read_metadata(view)["status"] not in ENDED:
            return view
        if not is_locked(self.folder / name):
            self._fetch(there.address, there.index, self.folder / name)
        return None

    def _fetch(self, place: Address, index: Index, run: Path) -> None:
        """Have a run here that is at least as far as in the store; one that is as far is seen by its run.json."""

        def is_as_there() -> bool:
            return (run / RUN_FILE).exists() and file_at(run / RUN_FILE) == index.files.get(RUN_FILE)

        if not is_as_there():
            brought_run(place, index, run.parent)
            if is_as_there():
                console.say(f"fetched  {place}")

    def send(self, name: str) -> None:
        """Copy a run that nobody writes any more to the store. Raises RlvrError."""
        run = self.folder / name
        place = export_run(run, Address(self._address.bucket, self._below(name).prefix.rpartition("/")[0])).place
        uploaded(run)
        console.say(f"uploaded to {place}")

    def send_now_or_later(self, name: str) -> None:
        """As `send`; if the store fails, it is told, and `finish` tries again."""
        try:
            self.send(name)
        except RlvrError as error:
            self._unsent.append(name)
            console.say(f"note: {name} is uploaded later: {error.problem}")

    def finish(self) -> None:
        """Send what could not be sent before. Raises RlvrError."""
        while self._unsent:
            self.send(self._unsent[-1])
            self._unsent.pop()

    def send_files(self, paths: Iterable[Path]) -> None:
        """Copy files that are beside the runs, such as a report, in place of earlier ones. Raises RlvrError."""
        for path in paths:
            Store(self._address).put_file(path.relative_to(self.folder).as_posix(), path, size=path.stat().st_size)

    def _below(self, name: str) -> Address:
        address = self._address
        for part in name.split("/"):
            address = address.below(part)
        return address
