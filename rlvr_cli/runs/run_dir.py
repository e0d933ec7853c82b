"""The run store: a directory per run, written by one process, readable by anyone at any time, whole after any kill.

Enters: rollouts, metrics, and what describes the run. Leaves: a run directory ::

    run.json                            what the run is and how it stands; replaced atomically
    manifest.jsonl                      one line per commit: path, rows, bytes, sha256, schema_version, phase, step
    rollouts/PHASE-STEP-PART.parquet    parts, which never change; the columns are the fields of `Rollout`
    grades/GRADER-PHASE-STEP-PART.parquet   parts with what other graders said later; the fields of `Regrade`
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

A run may be older than the rlvr that goes on with it. Its parts stay as they are, and readers fill the columns that they lack;
what is added has the columns of today. Each manifest line has the schema version of its file, run.json the newest that may be
among them: it is raised before anything is added, so that the older rlvr says "upgrade" and takes no new part for a damaged one.
"""

import errno
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.runs.commits import OpenManifest, new_entry
from rlvr_cli.runs.files import (
    atomic_write,
    fsync_directory,
    os_errors_as_user_errors,
    shown,
    utc_now,
)
from rlvr_cli.runs.keys import CommittedKeys, held_of, indices, merge, overlap
from rlvr_cli.runs.lock import Lock
from rlvr_cli.runs.manifest import (
    GRADES,
    ROLLOUTS,
    grader_slug,
    part_name,
    part_path,
)
from rlvr_cli.runs.parquet import grade_table, keys_of, rollout_table, to_parquet, with_metrics
from rlvr_cli.runs.readers import (
    MANIFEST,
    RUN_FILE,
    RUN_NAME,
    part_tables,
    read_metadata,
    read_part,
)
from rlvr_cli.runs.recovery import recover, remove_temporaries
from rlvr_cli.text import storable
from rlvr_cli.types import SCHEMA_VERSION, Phase, Regrade, Rollout

if TYPE_CHECKING:
    import pyarrow as pa


Status = Literal["running", "finished", "failed", "interrupted"]
RolloutKey = tuple[str, int, str, int]  # (phase, step, example_id, sample_index)
_FIXED_FIELDS = ("schema_version", "run_id", "command", "status", "created_at", "updated_at", "wall_seconds")


class Attempt(NamedTuple):
    """One go of a grader at the rollouts of a run."""

    number: int
    grader_sha256: str | None


class RunDir:
    """An open run that this process, and no other, is writing. Use as a context manager, from one thread.

    Leaving the context sets the status: interrupted after `Interrupted` or KeyboardInterrupt, failed after any other
    exception, and otherwise finished, unless `finish` was called before.

    Attributes:
        path: the run directory.
        notices: what was found and repaired when the run was opened, one sentence each, to be shown to the user.
    """

    def __init__(self, path: Path, lock: Lock, *, goes_on: bool = True) -> None:
        """Not for callers: see `create`, `resume` and `annotate`. `lock` is held and is given back when this raises."""
        self.path = path
        self.notices: list[str] = []
        self._goes_on = goes_on
        self._lock = lock
        self._process = os.getpid()
        self._session_start = time.monotonic()
        self._manifest: OpenManifest | None = None
        try:
            self._metadata = read_metadata(path)
            remove_temporaries(path)
            self._manifest = manifest = OpenManifest(path)
            self._entries = manifest.entries
            if self._metadata["schema_version"] < SCHEMA_VERSION:
                self._replace_metadata(self._metadata | {"schema_version": SCHEMA_VERSION})
            self._keys = CommittedKeys(path, manifest.entries)
            self._metrics = recover(path, manifest, self._keys, run_id=self.id, notices=self.notices)
            self._earlier_seconds = self._seconds_before()
            if goes_on:
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
        if name and RUN_NAME.fullmatch(name) is None:
            raise RlvrError(
                f"{name!r} cannot be the name of a run.",
                "Use up to 128 of the characters A-Z a-z 0-9 . _ - and start with a letter or digit.",
            )
        root = Path(root)
        with os_errors_as_user_errors(root):
            root.mkdir(parents=True, exist_ok=True)
        while True:
            run_id = name or f"{command}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.urandom(2).hex()}"
            now = utc_now()
            head = {"schema_version": SCHEMA_VERSION, "run_id": run_id, "command": command, "status": "running"}
            times = {"created_at": now, "updated_at": now, "wall_seconds": 0.0}
            lock = _make_run(root / run_id, {**head, **times, **metadata})
            if lock is not None:
                return cls(root / run_id, lock)
            if name:
                raise RlvrError(
                    f"{shown(root / run_id)} exists already.",
                    f"Choose another name with --run, or go on with it: --resume {run_id}",
                )

    @classmethod
    def resume(cls, path: Path | str) -> "RunDir":
        """Open a run to go on with it, whatever state a kill has left it in; see `notices`.

        Raises:
            RlvrError: there is no run, another process is writing it, or a committed file is missing or damaged.
        """
        path = Path(path)
        read_metadata(path)  # before a lock file is made in what may be no run
        return cls(path, Lock(path))

    @classmethod
    def annotate(cls, path: Path | str) -> "RunDir":
        """Open a run that nobody is writing to add grades to it. Its status and its clock stay as they are, and so does run.json
        but for the schema version of a run of an older rlvr.

        Raises:
            RlvrError: as `resume`.
        """
        path = Path(path)
        read_metadata(path)
        return cls(path, Lock(path), goes_on=False)

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
        places = {(r.run_id, r.phase, r.step) for r in rollouts}
        assert places == {(self.id, phase, step)}, (places, self.id, phase, step)
        return self._commit_part(rollout_table(rollouts), phase=phase, step=step)

    def commit_grades(self, phase: Phase, step: int, grades: Sequence[Regrade]) -> Path:
        """Make the verdicts of one grader's attempt on rollouts of one phase and step durable, all or none.

        Returns:
            The new part.

        Raises:
            RlvrError: the part cannot be written; the run is as it was.
        """
        self._assert_open()
        assert grades, "a part has at least one row"
        owners = {(g.run_id, g.phase, g.step, g.grader, g.attempt, g.grader_sha256) for g in grades}
        assert len(owners) == 1, owners
        assert next(iter(owners))[:3] == (self.id, phase, step), (owners, self.id, phase, step)
        with os_errors_as_user_errors(self.path / GRADES):
            if not os.path.lexists(self.path / GRADES):
                (self.path / GRADES).mkdir()
                fsync_directory(self.path)
        return self._commit_part(grade_table(grades), phase=phase, step=step, grader=grades[0].grader)

    def commit_metrics(self, step: int, phase: Phase, values: Mapping[str, float]) -> None:
        """Make metrics of one step durable: `commit_metric_rows` of that step alone."""
        self.commit_metric_rows(phase, {step: values})

    def commit_metric_rows(
        self,
        phase: Phase,
        rows: Mapping[int, Mapping[str, float]],
        *,
        wall_seconds: Mapping[int, float] | None = None,
    ) -> None:
        """Make metrics of several steps durable, all or none; those of the same step, phase and name are replaced.

        A run that was killed and goes on has such: it does again what followed its last checkpoint.

        Args:
            rows: step -> metric name -> value; NaN and infinities are kept.
            wall_seconds: step -> the run's `wall_seconds` when its metrics came; now, where it is not given.

        Raises:
            RlvrError: the file cannot be written; the metrics are as they were.
        """
        self._assert_open()
        assert phase in get_args(Phase), phase
        assert all(step >= 0 for step in rows), rows.keys()
        if not any(rows.values()):
            return
        walls = dict.fromkeys(rows, self.wall_seconds) | dict(wall_seconds or {})
        table = with_metrics(self._metrics.table, rows, phase=phase, wall_seconds=walls)
        self._metrics.replace(table, phase=phase, step=max(rows))

    def committed_keys(self, phase: Phase | None = None, step: int | None = None) -> set[RolloutKey]:
        """The keys (phase, step, example_id, sample_index) of the committed rollouts, of one phase and step or of all.

        Example ids are as stored, which is `text.storable` of what was given.

        Raises:
            RlvrError: a part is missing or damaged.
        """
        return {
            (p, s, example_id, sample_index)
            for p, s in self.steps()
            if phase in (None, p) and step in (None, s)
            for example_id, bits in self._keys.held(p, s).items()
            for sample_index in indices(bits)
        }

    def num_rollouts(self, phase: Phase, step: int) -> int:
        """How many rollouts of that phase and step are committed."""
        return sum(e.rows for e in self._entries if (e.folder, e.phase, e.step) == (ROLLOUTS, phase, step))

    def missing(self, phase: Phase, step: int, example_id: str, *, num_samples: int) -> list[int]:
        """The sample indices below `num_samples` of a question that are not committed, in their order.

        Raises:
            RlvrError: a part is missing or damaged.
        """
        return list(indices(~self._keys.held(phase, step).get(storable(example_id), 0) & ((1 << num_samples) - 1)))

    def steps(self) -> list[tuple[Phase, int]]:
        """The (phase, step) of the committed rollouts, in the order of their first commits."""
        return list(dict.fromkeys((e.phase, e.step) for e in self._entries if e.folder == ROLLOUTS))  # type: ignore[misc]  (their paths hold no other phase)

    def rollouts(self, phase: Phase, step: int, *, columns: Sequence[str]) -> "pa.Table":
        """`read_rollouts` of this run. Raises RlvrError when a part is damaged."""
        import pyarrow as pa

        return pa.concat_tables(part_tables(self.path, self._entries, phase=phase, step=step, columns=columns))

    def last_attempt(self, grader: str, phase: Phase) -> Attempt | None:
        """The last attempt of a grader on the rollouts of a phase; None before the first."""
        slug = grader_slug(grader)
        entries = [e for e in self._entries if (n := part_name(e.path)) and (n.grader, n.phase) == (slug, phase)]
        if not entries:
            return None
        (row, *_) = read_part(self.path, entries[-1], ["attempt", "grader_sha256"]).slice(0, 1).to_pylist()
        return Attempt(row["attempt"], row["grader_sha256"])

    def graded_keys(self, grader: str, phase: Phase, step: int, *, attempt: int) -> set[tuple[str, int]]:
        """The (example_id, sample_index) of the rollouts with a verdict of that attempt of the grader."""
        held = self._keys.held(phase, step, grader=grader_slug(grader))
        return {(e, i) for (e, number), bits in held.items() if number == attempt for i in indices(bits)}

    def close(self) -> None:
        """Let others write the run. The status stays as it is. May be called twice."""
        if os.getpid() != self._process:  # a forked child holds neither the lock nor the manifest
            return
        if self._manifest is not None:
            self._manifest.close()
            self._manifest = None
        self._lock.release()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._process or self._manifest is None:
            return
        try:
            if self._metadata["status"] != "running" or not self._goes_on:
                return
            if error is None:
                self.finish("finished")
            else:
                with suppress(RlvrError):  # the disk may be full, which may be why; `error` is what the user must see
                    self.finish("interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed")
        finally:
            self.close()

    def _assert_open(self) -> OpenManifest:
        assert self._manifest is not None, "the run is closed"
        assert os.getpid() == self._process, "a forked child may not write its parent's run"
        return self._manifest

    def _set(self, **values: Any) -> None:
        self._assert_open()
        assert self._goes_on, "a run that is annotated stays as it is"
        times = {"updated_at": utc_now(), "wall_seconds": round(self.wall_seconds, 3)}
        self._replace_metadata(self._metadata | values | times)

    def _replace_metadata(self, metadata: dict[str, Any]) -> None:
        atomic_write(self.path / RUN_FILE, _json(metadata))
        self._metadata = metadata

    def _commit_part(self, table: "pa.Table", *, phase: Phase, step: int, grader: str = "") -> Path:
        keys = keys_of(table)
        fresh, held = held_of(keys), self._keys.held(phase, step, grader=grader and grader_slug(grader))
        assert len(keys) == table.num_rows, "two of the rows have the same key"
        assert not (twice := overlap(held, fresh)), f"already committed: {twice[:3]}"

        relative = part_path(phase, step, self._next_part(phase, step, grader=grader), grader=grader)
        path = self.path / relative
        assert not path.exists(), path
        data = to_parquet(table)
        manifest = self._assert_open()
        before = manifest.size
        try:
            atomic_write(path, data)
            manifest.append(new_entry(relative, data, rows=table.num_rows, phase=phase, step=step))
        except BaseException:
            # Else the manifest may name the part, which then has to stay.
            if manifest.bytes_on_disk == before:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            raise
        merge(held, fresh)
        return path

    def _next_part(self, phase: str, step: int, *, grader: str) -> int:
        group = (grader and grader_slug(grader), phase, step)
        names = [part_name(e.path) for e in self._entries if (e.phase, e.step) == (phase, step)]
        return max((n.number for n in names if n and n[:3] == group), default=-1) + 1

    def _seconds_before(self) -> float:
        recorded = self._metadata.get("wall_seconds")
        measured = self._metrics.table["wall_seconds"].to_pylist()
        return max([float(recorded) if isinstance(recorded, int | float) else 0.0, *measured])


def _json(value: Mapping[str, Any]) -> bytes:
    return storable(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)).encode() + b"\n"


def _make_run(path: Path, metadata: Mapping[str, Any]) -> Lock | None:
    """Make a run directory, whole and locked, under its name at once; None when something of that name is there."""
    import shutil

    text = _json(metadata)
    if os.path.lexists(path):
        return None
    temporary = path.parent / f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp"
    lock = None
    try:
        with os_errors_as_user_errors(path):
            temporary.mkdir()
            lock = Lock(temporary)
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
