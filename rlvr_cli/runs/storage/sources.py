"""Directories that stand for a run in object storage: a file of it is fetched when it is first read.

Enters: a run directory and a path in it. Leaves: the file in its place, where a source was set for the directory; for any other
directory nothing happens. Sources are made by `runs.remote.views`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol


class Source(Protocol):
    """A run elsewhere."""

    def __str__(self) -> str:
        """Its address."""
        ...

    def fetch(self, relative: Iterable[str]) -> None:
        """Have these files in the directory, but for those that the run does not have. Raises RlvrError."""
        ...

    def sizes(self) -> dict[str, int]:
        """Path -> bytes of all its files."""
        ...

    def holder(self) -> dict[str, Any] | None:
        """Who writes it, as `lock.holder_of` says it. Raises RlvrError."""
        ...


_sources: dict[Path, Source] = {}


def set_source(run: Path, source: Source) -> None:
    """Let a directory stand for a run elsewhere."""
    _sources[run] = source


def forget_source(run: Path) -> None:
    """Let a directory, such as one that is removed, stand for nothing."""
    _sources.pop(run, None)


def source_of(run: Path) -> Source | None:
    """Return what a directory stands for; None for a run that is here."""
    return _sources.get(run) if _sources else None


def fetched(run: Path, *relative: str) -> None:
    """Fetch files of a run that is elsewhere. Raises RlvrError."""
    if source := source_of(run):
        source.fetch(relative)


def place_of(path: Path | str) -> str:
    """Return a path as the user knows it: the address of a run or file that is elsewhere."""
    for folder in (Path(path), *Path(path).parents) if _sources else ():
        if source := _sources.get(folder):
            below = Path(path).relative_to(folder).as_posix()
            return str(source) if below == "." else f"{source}/{below}"
    return str(path)
