"""The format of a run's manifest (one JSON line per commit) and of part names.

Enters: the bytes of manifest.jsonl, or of a file about to be committed. Leaves: validated entries, or a new entry and
its line. Parts are in ``rollouts/``; in ``grades/``, if they hold later grades by another grader; or in ``segments/``, if they hold
parts of responses.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, get_args

from rlvr_cli.runs.storage.schemas import newer_version
from rlvr_cli.types import Phase

RUN_FILE, MANIFEST, METRICS = "run.json", "manifest.jsonl", "metrics.parquet"
RESERVE = ".reserve"  # removed when the run is closed
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
ROLLOUTS, GRADES, SEGMENTS = FOLDERS = ("rollouts", "grades", "segments")  # of parts

_PART_PATH = re.compile(
    rf"(?:({ROLLOUTS}|{SEGMENTS})/|({GRADES})/([a-z0-9_][A-Za-z0-9_.]{{0,63}})-)"
    rf"({'|'.join(get_args(Phase))})-([0-9]{{6,12}})-([0-9]{{4,9}})\.parquet"
)


class PartName(NamedTuple):
    """The fields encoded in the path of a part."""

    folder: str  # one of FOLDERS
    grader: str  # the `grader_slug`; "" outside of GRADES
    phase: str
    step: int
    number: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the manifest."""

    path: str  # of a part, or METRICS; relative to the run, with "/"
    rows: int
    bytes: int
    sha256: str
    schema_version: int
    phase: str
    step: int

    @property
    def folder(self) -> str:
        """One of FOLDERS; "" for the metrics."""
        return self.path.rpartition("/")[0]


class Entries:
    """The entries of a manifest. Those of a folder, phase and step are found without going through all: a run may have many steps."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._all: list[Entry] = []
        self._groups: dict[tuple[str, str, int], list[Entry]] = {}
        for entry in entries:
            self.append(entry)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._all)

    def append(self, entry: Entry) -> None:
        self._all.append(entry)
        self._groups.setdefault((entry.folder, entry.phase, entry.step), []).append(entry)

    def remove_last(self) -> None:
        entry = self._all.pop()
        group = entry.folder, entry.phase, entry.step
        self._groups[group].pop()
        if not self._groups[group]:
            del self._groups[group]

    @property
    def last(self) -> Entry | None:
        return self._all[-1] if self._all else None

    def of(self, folder: str, phase: str | None = None, step: int | None = None) -> Sequence[Entry]:
        """Return the entries of a folder, and of a phase and step if they are given, in the order of their commits."""
        if phase is not None and step is not None:
            return self._groups.get((folder, phase, step), ())
        return [e for e in self._all if e.folder == folder and phase in (None, e.phase) and step in (None, e.step)]

    def steps(self, folder: str) -> list[tuple[str, int]]:
        """Return the (phase, step) pairs of the entries of a folder, in the order of their first commits."""
        return [(phase, step) for of, phase, step in self._groups if of == folder]


_TYPES = {field.name: field.type for field in fields(Entry)}


def part_path(phase: Phase, step: int, number: int, *, folder: str = ROLLOUTS, grader: str = "") -> str:
    """Return the path of a part relative to its run.

    Args:
        grader: of a part in GRADES.
    """
    assert (folder == GRADES) == bool(grader), (folder, grader)
    name = f"{grader_slug(grader)}-" if grader else ""
    return f"{folder}/{name}{phase}-{step:06d}-{number:04d}.parquet"


def grader_slug(grader: str) -> str:
    """Return a unique file-name form of a grader's name; for ``FILE.py:FUNCTION`` it ends with a hash."""
    if re.fullmatch(r"[a-z0-9_]{1,40}", grader):
        return grader
    tail = re.sub(r"[^A-Za-z0-9_.]", "_", re.split(r"[/\\]", grader)[-1])[-40:]
    return f"_{tail}.{hashlib.sha256(grader.encode(errors='surrogatepass')).hexdigest()[:12]}"


def part_name(path: str) -> PartName | None:
    """Parse the path of a part; None if it is not one."""
    match = _PART_PATH.fullmatch(path)
    if match is None:
        return None
    return PartName(match[1] or match[2], match[3] or "", match[4], int(match[5]), int(match[6]))


def entry_of(data: bytes | memoryview, *, path: str, rows: int, phase: str, step: int, schema_version: int) -> Entry:
    """Return the manifest entry for a file with these bytes."""
    return Entry(path, rows, len(data), hashlib.sha256(data).hexdigest(), schema_version, phase, step)


def matches(entry: Entry, data: bytes) -> bool:
    """Whether these bytes are the committed ones, by length and sha256."""
    return len(data) == entry.bytes and hashlib.sha256(data).hexdigest() == entry.sha256


def line_of(entry: Entry) -> bytes:
    """Return the entry as a manifest line, including the newline."""
    return json.dumps(asdict(entry)).encode() + b"\n"


def record_of(lines: bytes, entries: Iterable[Entry]) -> dict[str, Any]:
    """Return what run.json says of a manifest with these lines when nobody writes the run any more."""
    parts = [e for e in entries if e.path != METRICS]
    digest = hashlib.sha256(lines).hexdigest()
    return {
        "parts": len(parts),
        "rows": sum(e.rows for e in parts if e.folder == ROLLOUTS),
        "manifest_bytes": len(lines),
        "manifest_sha256": digest,
    }


def is_recorded(data: bytes, record: Mapping[str, Any]) -> bool:
    """Whether a manifest is the recorded one."""
    return (len(data), hashlib.sha256(data).hexdigest()) == (
        record.get("manifest_bytes"),
        record.get("manifest_sha256"),
    )


def parse_manifest(data: bytes, *, newest: int) -> tuple[list[Entry], int]:
    """Return the entries of the manifest and the length of their lines in bytes; an incomplete last line is ignored.

    Args:
        newest: the newest schema version that this rlvr reads.

    Raises:
        ValueError: a line is invalid; the message says which and why, and may quote the file (escape it for display).
        NewerVersion: a newer rlvr wrote the manifest.
    """
    end = data.rfind(b"\n") + 1
    entries: list[Entry] = []
    seen: set[str] = set()
    for number, line in enumerate(data[:end].split(b"\n")[:-1], start=1):
        try:
            entry = _parse_line(line, newest=newest)
            if entry.path != METRICS and entry.path in seen:
                raise ValueError(f"{entry.path} is listed twice")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number}: {error}") from error
        seen.add(entry.path)
        entries.append(entry)
    return entries, end


def _parse_line(line: bytes, *, newest: int) -> Entry:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    version = record.get("schema_version")
    if type(version) is int and version > newest:
        raise newer_version("The run", version)
    if record.keys() != _TYPES.keys():
        raise ValueError(f"the keys are {sorted(record)}")
    for name, kind in _TYPES.items():
        if type(record[name]) is not kind:
            raise ValueError(f"{name} is {record[name]!r}")
    entry = Entry(**record)
    if entry.schema_version < 1:
        raise ValueError(f"schema_version is {entry.schema_version}")
    if entry.path != METRICS:
        name = part_name(entry.path)
        if name is None or (name.phase, name.step) != (entry.phase, entry.step):
            raise ValueError(f"{entry.path!r} is not the path of a part of {entry.phase} step {entry.step}")
    return entry
