"""What a copy of a run consists of: its index, the one object that is ever replaced, and the keys of its files.

Enters: a run's files, the bytes of an index, or the store that has one. Leaves: an `Index`, or an RlvrError if the bytes are none.

A file is an object of its own, whose key has the file's path and the start of its sha256, so that it is never replaced:
`rollouts/train-000000-0000.0f3a….parquet`. A copy is what its index says, the one before or the new one, whenever it is read.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.lock import LOCK
from rlvr_cli.runs.manifest import RESERVE, RUN_FILE
from rlvr_cli.runs.remote.store import Store
from rlvr_cli.runs.storage.files import os_errors_as_user_errors, refuse_links, shown

INDEX, LEASE = "index.json", "lease.json"
CHECKPOINTS = "checkpoints"
FORMAT = 1
READ_AGAIN = 5  # times, where the writer has replaced what an index names
_VERSION = re.compile(r"(?:.*/)?[^/]+\.[0-9a-f]{16}(?:\.[^./]+)?")
_OF_THIS_MACHINE = (LOCK, f"{LOCK}.exclusive", RESERVE)


class File(NamedTuple):
    """A file of a run."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """The files of a copy, and which run it is of."""

    run_id: str
    created_at: str
    wall_seconds: float
    files: Mapping[str, File]  # by path in the run
    lease: str = ""  # whose state it is, of a run that was uploaded while it was written

    @property
    def keys(self) -> dict[str, str]:
        """Path in the run -> key of the object."""
        return {path: key_of(path, file.sha256) for path, file in self.files.items()}


def key_of(path: str, sha256: str) -> str:
    """Return the key of a version of a file."""
    pure = PurePosixPath(path)
    return str(pure.with_name(f"{pure.stem}.{sha256[:16]}{pure.suffix}"))


def is_version(key: str) -> bool:
    """Whether a key is one of `key_of`. What others have put beside a run has other names, and is not ours to remove."""
    return _VERSION.fullmatch(key) is not None


def runs_below(keys: Iterable[str]) -> list[str]:
    """Return the folders, below the one of these keys, that are runs of their own: they have an index, or a lease."""
    return sorted({key.rpartition("/")[0] for key in keys if key.endswith((f"/{INDEX}", f"/{LEASE}"))})


def index_bytes(index: Index) -> bytes:
    files = {path: file._asdict() for path, file in sorted(index.files.items())}
    return json.dumps({"format": FORMAT} | asdict(index) | {"files": files}, indent=1).encode() + b"\n"


def parsed_index(data: bytes, *, where: str) -> Index:
    """Read an index, which may come from anyone. Raises RlvrError, also if a path in it leads out of the run."""
    try:
        record = json.loads(data)
        if record["format"] != FORMAT:
            raise RlvrError(f"{shown(where)} has format {record['format']!r:.20}.", "Upgrade rlvr-cli.")
        files = {str(path): File(int(f["bytes"]), str(f["sha256"])) for path, f in record["files"].items()}
        texts = (str(record["run_id"]), str(record["created_at"]), float(record["wall_seconds"]))
        lease = str(record.get("lease", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RlvrError(f"{shown(where)} is not the index of a run.", "Export the run again.") from None
    for path, file in files.items():
        plain = all(part not in ("", ".", "..") for part in path.split("/")) and path.isprintable() and "\\" not in path
        if not plain or stays_here(path) or file.bytes < 0 or len(file.sha256) != 64:
            raise RlvrError(f"{shown(where)} is damaged: it names a file {shown(path)}.", "Export the run again.")
    return Index(*texts, files, lease)


def read_remote_index(store: Store) -> Index:
    """Return the index of the copy in a store. Raises RlvrError."""
    found = store.read(INDEX)
    if found is None:
        raise RlvrError(f"There is no run at {store.address}.", "rlvr export RUN --to s3://BUCKET/PREFIX makes a copy.")
    index = parsed_index(found[0], where=f"{store.address}/{INDEX}")
    if RUN_FILE not in index.files:
        raise RlvrError(f"{store.address}/{INDEX} is damaged: it names no {RUN_FILE}.", "Export the run again.")
    return index


def local_files(run: Path) -> Iterator[str]:
    """Yield the paths of a run's files, relative to it, but for locks, temporary files and W&B's links. Raises RlvrError at a link or device."""
    with os_errors_as_user_errors(run, "read"):
        for path in sorted(run.rglob("*")):
            relative = path.relative_to(run).as_posix()
            if stays_here(relative) or (path.is_symlink() and may_have_links(relative)):
                continue
            refuse_links(run, relative)
            if path.is_file():
                yield relative
            elif not path.is_dir():
                raise RlvrError(f"{shown(path)} is not a regular file.", "Move it out of the run.")


def stays_here(path: str) -> bool:
    """Whether a file is of the process that writes, or of a write that was cut, and so not of the run."""
    names = path.split("/")
    return path in _OF_THIS_MACHINE or any(n.startswith(".") and n.endswith((".tmp", ".lock")) for n in names)


def may_have_links(path: str) -> bool:
    """Whether a link of this path is left out rather than refused: W&B names its newest files by links."""
    return path.startswith("wandb/")


def received(pieces: Iterable[bytes], write: Callable[[bytes], object] = len) -> File:
    """Return size and sha256 of bytes that arrive, each piece of which is also written."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
        write(piece)
    return File(size, digest.hexdigest())


def first_bytes(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield the next bytes of an open file, so many or all that it has, in pieces."""
    while size > 0 and (piece := file.read(min(size, 2**20))):
        size -= len(piece)
        yield piece


def file_at(path: Path) -> File:
    """Return size and sha256 of a file. Raises RlvrError."""
    with os_errors_as_user_errors(path, "read"), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return File(file.tell(), digest)


def of_run(metadata: Mapping[str, Any], files: Mapping[str, File]) -> Index:
    """Return the index of a run with this run.json and these files."""
    return Index(metadata["run_id"], metadata["created_at"], float(metadata.get("wall_seconds") or 0.0), files)
