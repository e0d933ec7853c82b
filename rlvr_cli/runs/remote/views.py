"""Runs in object storage as directories, for everything that reads runs: a file comes when it is first read, by way of the cache.

Enters: s3://BUCKET/PREFIX/RUN, or s3://BUCKET/PREFIX for all runs below it. Leaves: directories with `run.json`, and a `Source` for
the rest. A run is what its index says when it is opened, and stays so in a process until `look_again`.
"""

import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.manifest import MANIFEST, METRICS, RUN_FILE, RUN_NAME
from rlvr_cli.runs.remote.cache import Cache
from rlvr_cli.runs.remote.index import INDEX, READ_AGAIN, Index, key_of, parsed_index, read_remote_index
from rlvr_cli.runs.remote.lease import holder_in
from rlvr_cli.runs.remote.store import Address, Store, parsed_address
from rlvr_cli.runs.storage.files import shown
from rlvr_cli.runs.storage.sources import Source, forget_source, set_source, source_of
from rlvr_cli.terminal import console

THREADS = 16
_LOOKED_INTO, _TRIED = 64, 4  # folders for which runs are looked, and what is tried in each: it may be no place of runs
KEPT = 3  # states of a run that goes on, of those that a process has opened

_cache = cache(Cache)
_store = cache(Store)
_opened: dict[Address, tuple[float, list[Path]]] = {}  # when the index was read; the last states, the newest last
_lock = threading.RLock()


class RemoteRun(Source):
    """A run as an index has it."""

    def __init__(self, store: Store, index: Index, directory: Path) -> None:
        self.address, self.index = store.address, index
        self._store, self._directory = store, directory
        self._sizes = {path: file.bytes for path, file in index.files.items()}

    def __str__(self) -> str:
        return str(self.address)

    def fetch(self, relative: Iterable[str], *, fresh: bool = False) -> None:
        """Have these files in the directory; with `fresh` from the store, whatever is here already. Raises RlvrError."""
        wanted = [path for path in relative if path in self.index.files]
        if not fresh:
            wanted = [path for path in wanted if not os.path.lexists(self._directory / path)]
        if len(wanted) < 2:
            for path in wanted:
                self._take(path, fresh=fresh)
            return
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda path: self._take(path, fresh=fresh), wanted))

    def verify(self) -> list[str]:
        """Fetch every file anew. Returns a sentence for each that is not as the index says; its writer may have replaced it meanwhile."""

        def problem(path: str) -> str:
            try:
                self._take(path, fresh=True)
            except RlvrError as error:
                return error.problem
            return ""

        with ThreadPoolExecutor(THREADS) as pool:
            found = {
                path: text
                for path, text in zip(self.index.files, pool.map(problem, self.index.files), strict=True)
                if text
            }
        now = read_remote_index(self._store).files if found else {}
        return [text for path, text in found.items() if now.get(path) == self.index.files[path]]

    def sizes(self) -> dict[str, int]:
        return self._sizes

    def holder(self) -> dict[str, Any] | None:
        return holder_in(self._store) if self.is_running else None

    @property
    def is_running(self) -> bool:
        """Whether run.json says so."""
        return b'"status": "running"' in (self._directory / RUN_FILE).read_bytes()

    def _take(self, path: str, *, fresh: bool) -> None:
        file = self.index.files[path]
        key = key_of(path, file.sha256)
        _cache().take(
            file,
            self._directory / path,
            lambda: self._store.stream(key, size=file.bytes),
            fresh=fresh,
            name=f"{self._store.address}/{key}",
        )


def view_of(text: str) -> Path | None:
    """Return the directory of the run at an address; None if there is none. Raises RlvrError."""
    address = parsed_address(text)
    above, _, name = address.prefix.rpartition("/")
    return _opened_run(_store(Address(address.bucket, above)), name) if RUN_NAME.fullmatch(name) else None


def views_below(text: str) -> list[Path]:
    """Return the directories of the runs below an address. Raises RlvrError."""
    store = _store(parsed_address(text))
    problems: list[RlvrError] = []

    def opened(name: str) -> Path | None:
        try:
            return _opened_run(store, name)
        except RlvrError as error:
            problems.append(error)
            return None

    with ThreadPoolExecutor(THREADS) as pool:
        names = [name for name in store.folders() if RUN_NAME.fullmatch(name)]
        found = [path for path in pool.map(opened, names) if path is not None]
    if problems and not found:
        raise problems[0]
    for problem in problems:
        console.say(f"left out: {problem.problem}")
    return found


def folders_below(text: str) -> list[str]:
    """Return the names of folders below an address that hold runs, of some that are looked into. Raises RlvrError."""
    store = _store(parsed_address(text))

    def holds_runs(name: str) -> bool:
        folder = store.below(name)
        return any(folder.below(run).read(INDEX) for run in [*filter(RUN_NAME.fullmatch, folder.folders())][:_TRIED])

    with ThreadPoolExecutor(THREADS) as pool:
        names = [*filter(RUN_NAME.fullmatch, store.folders())][:_LOOKED_INTO]
        return [name for name, holds in zip(names, pool.map(holds_runs, names), strict=True) if holds]


def folder_of(text: str) -> Path:
    """Return a folder of a run, such as s3://BUCKET/PREFIX/RUN/model, with all that is in it, as a directory here. Raises RlvrError."""
    place = parsed_address(text)
    parts = place.prefix.split("/")
    for number in reversed(range(1, len(parts))):
        directory = view_of(str(Address(place.bucket, "/".join(parts[:number]))))
        if directory is None:
            continue
        source, folder = source_of(directory), "/".join(parts[number:])
        found = [path for path in source.sizes() if path.startswith(f"{folder}/")] if source else []
        if source is None or not found:
            break
        source.fetch(found)
        return directory / folder
    if view_of(text) is not None:
        raise RlvrError(
            f"{shown(text)} is a run, not a folder of one.", f"Its model, if it has one, is {place.below('model')}."
        )
    raise RlvrError(
        f"There is no {shown(text)}.",
        "Name a folder of a run, such as s3://BUCKET/PREFIX/RUN/model: rlvr runs lists the runs.",
    )


def address_of(folder: Path) -> str | None:
    """Return the address of a folder that `folder_of` returned; None for one that is of this machine."""
    for directory in folder.parents:
        if found := remote_run(directory):
            return str(found.address.below(str(folder.relative_to(directory))))
    return None


def remote_run(path: Path) -> RemoteRun | None:
    """Return the run in object storage that a directory stands for."""
    source = source_of(path)
    return source if isinstance(source, RemoteRun) else None


def newest(path: Path) -> Path:
    """Return the directory of a run as it is now: of one in object storage, after `look_again`."""
    found = remote_run(path)
    return path if found is None else view_of(str(found)) or path


def look_again(*, seconds: float) -> None:
    """Let runs be opened anew whose index was read so long ago."""
    with _lock:
        for address, (at, states) in _opened.items():
            if time.monotonic() - at >= seconds:
                _opened[address] = (float("-inf"), states)


def forget() -> None:
    """Open everything anew: after another environment, say."""
    with _lock:
        for _, states in _opened.values():
            for state in states:
                forget_source(state)
        _opened.clear()
    _cache.cache_clear()
    _store.cache_clear()


def _opened_run(above: Store, name: str) -> Path | None:
    store = above.below(name)
    with _lock:
        at, states = _opened.get(store.address, (float("-inf"), []))
    if states and at > float("-inf"):
        return states[-1]
    place = f"{os.environ.get('AWS_ENDPOINT_URL_S3') or os.environ.get('AWS_ENDPOINT_URL', '')} {store.address}"
    for left in reversed(range(READ_AGAIN)):
        known = _cache().known(place)
        found = store.read(INDEX, known=known)
        if found is None:
            return None
        if found != known:
            _cache().learn(place, *found)
        index = parsed_index(found[0], where=f"{store.address}/{INDEX}")
        path = _cache().run_directory(name, f"{place}\n".encode() + found[0])
        run = RemoteRun(store, index, path)
        try:
            run.fetch([MANIFEST, RUN_FILE])
            if run.is_running:  # its writer will replace this one too
                run.fetch([METRICS])
            return _remembered(run, path)
        except RlvrError:
            if not left or store.read(INDEX, known=found) == found:
                raise
    raise AssertionError


def _remembered(run: RemoteRun, path: Path) -> Path:
    """Let a directory stand for the newest state of a run, and remove states before the last ones, unless other commands read them."""
    set_source(path, run)
    with _lock:
        _, states = _opened.get(run.address, (0.0, []))
        states = [*(state for state in states if state != path), path]
        for old in states[:-KEPT]:
            forget_source(old)  # a source holds the index of all files
            _cache().drop(old)
        _opened[run.address] = (time.monotonic(), states[-KEPT:])
    return path
