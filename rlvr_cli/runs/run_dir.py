"""The run store: one directory per run, written by one process, readable at any time, consistent after any kill.

Enters: rollouts, metrics and metadata. Leaves: a run directory ::

    run.json                            metadata and status; replaced atomically
    manifest.jsonl                      one line per commit: path, rows, bytes, sha256, schema_version, phase, step
    rollouts/PHASE-STEP-PART.parquet    immutable parts; the columns are the fields of `Rollout`
    grades/GRADER-PHASE-STEP-PART.parquet   immutable parts with later grades by other graders; the fields of `Regrade`
    segments/PHASE-STEP-PART.parquet    immutable parts with the parts of responses (--partial-rollout-tokens); the fields of `Segment`
    metrics.parquet                     long format; replaced atomically by each commit
    set-aside/                          files that recovery found and could not adopt

A part is committed when its manifest line is on disk; readers follow the manifest instead of listing the directory.
The order of a commit: temporary file, fsync, rename, fsync of the directory, manifest line, fsync. So a kill

- before the rename leaves a temporary file, whose name matches neither DuckDB's ``*.parquet`` nor pyarrow's directory
  scan; opening the run for writing deletes it;
- between the rename and the manifest line leaves a complete part that the manifest does not list. Opening the run for
  writing adopts it if it reads without error, belongs to this run and has only new keys, so that nothing is sampled
  twice; otherwise it is moved to ``set-aside/`` with a notice;
- within the manifest line leaves a last line without a newline: readers ignore it; opening for writing cuts it off.

So every row whose `commit_rollouts` returned is stored exactly once, and no key is stored twice. metrics.parquet is
replaced in place, so its new sha256 is announced in the manifest *before* the rename: the file matches the last
announcement or the one before, and opening the run for writing removes an announcement whose file was not written.

run.json ends with its own sha256. When nobody writes the run any more, it records what is committed: the number of parts
and of rollouts, and length and sha256 of the manifest. A manifest that has lost lines since is then recognized, and so are
lost parts and metrics, because the manifest lists them. Opening the run for writing removes the record before the
manifest changes, and closing it writes a new one. While the run is open, the file ``.reserve`` holds the space that
run.json needs to say how the run ended, should the disk be full by then.

A newer rlvr can resume a run of an older one. The old parts stay as they are, and readers fill in the columns that they
lack; new parts have the current columns. Each manifest line has the schema version of its file, and run.json the newest
version that may occur. run.json is updated before anything is added, so that the older rlvr says "upgrade" instead of
reporting damage.
"""

import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.runs.activity import Activity
from rlvr_cli.runs.check import MODELS
from rlvr_cli.runs.commits import OpenManifest, new_entry
from rlvr_cli.runs.lock import Lock
from rlvr_cli.runs.manifest import (
    GRADES,
    MANIFEST,
    RESERVE,
    ROLLOUTS,
    RUN_FILE,
    RUN_NAME,
    SEGMENTS,
    grader_slug,
    part_name,
    part_path,
    record_of,
)
from rlvr_cli.runs.readers import (
    check_record,
    metadata_bytes,
    part_tables,
    present_parts,
    read_cost,
    read_manifest,
    read_metadata,
    read_part,
    run_at,
)
from rlvr_cli.runs.recovery import recover, remove_temporaries, remove_unmade
from rlvr_cli.runs.remote.behind import Upload
from rlvr_cli.runs.remote.lease import Held
from rlvr_cli.runs.remote.store import is_address, parsed_address
from rlvr_cli.runs.remote.work import name_is_taken, work_folder
from rlvr_cli.runs.storage.files import (
    Reserve,
    atomic_write,
    fsync_directory,
    is_full_disk,
    os_errors_as_user_errors,
    read_regular,
    shown,
    utc_now,
)
from rlvr_cli.runs.storage.keys import CommittedKeys, bit_positions, bits_of_keys, merge, overlap
from rlvr_cli.runs.storage.parquet import (
    grade_table,
    keys_of,
    rollout_table,
    segment_table,
    to_parquet,
    to_records,
    with_metrics,
)
from rlvr_cli.runs.storage.sources import source_of
from rlvr_cli.terminal import console
from rlvr_cli.text import storable
from rlvr_cli.types import SCHEMA_VERSION, Phase, Regrade, Rollout, Segment

if TYPE_CHECKING:
    import pyarrow as pa


Status = Literal["running", "finished", "diverged", "failed", "interrupted"]
RolloutKey = tuple[str, int, str, int]  # (phase, step, example_id, sample_index)
RESERVED_BYTES = 2**15  # more than run.json takes
_FIXED_FIELDS = ("schema_version", "run_id", "command", "status", "created_at", "updated_at", "wall_seconds")


def check_new_name(name: str | None, root: Path | str) -> None:
    """Raise RlvrError if no run of this name can be created in `root`; None and "" stand for a generated name."""
    if not name:
        return
    if RUN_NAME.fullmatch(name) is None:
        raise RlvrError(
            f"{name!r} cannot be the name of a run.",
            "Use at most 128 of the characters A-Z a-z 0-9 . _ - and start with a letter or digit.",
        )
    if os.path.lexists(run_at(root, name)):
        raise RlvrError(
            f"{shown(run_at(root, name))} exists already.",
            f"Choose another name with --run, or resume it: --resume {name}",
        )


class Attempt(NamedTuple):
    """An attempt of a grader on a rollout; see `Regrade.attempt`."""

    number: int
    grader_sha256: str | None
    failed: bool


class RunDir:
    """A run opened for writing; the lock keeps other writers out. Use as a context manager, from one thread.

    Leaving the context sets the status, unless `finish` already did: interrupted after `Interrupted` or
    KeyboardInterrupt, failed after any other exception, else finished.

    Attributes:
        path: the run directory.
        notices: the repairs made when the run was opened, one sentence each, to show to the user.
        activity: what the process that has it is doing.
    """

    def __init__(self, path: Path, lock: Lock, *, updates_status: bool = True, upload: Upload | None = None) -> None:
        """Use `create`, `resume` or `annotate` instead. `lock` must be held; it is released if this raises."""
        self.path = path
        self._upload = upload
        self.notices: list[str] = []
        self._updates_status = updates_status
        self._lock, self.activity = lock, Activity(lock)
        self._process = os.getpid()
        self._session_start = time.monotonic()
        self._manifest: OpenManifest | None = None
        self._at_end: list[Callable[[], None]] = []
        self._reserve = Reserve(path / RESERVE)
        self._next_parts: dict[tuple[str, str, str, int], int] = {}  # of groups, once they were needed
        self._costs: dict[Path, dict[str, float]] = {}  # of parts, once they were needed
        try:
            self._metadata = read_metadata(path)
            damage = self._check_record()
            remove_temporaries(path)
            self._reserve.hold(RESERVED_BYTES)
            self._manifest = manifest = OpenManifest(path)
            self._entries = manifest.entries
            before = self._metadata
            now = {k: v for k, v in before.items() if k != "committed"} | {"schema_version": SCHEMA_VERSION}
            if now != before:
                self._replace_metadata(now)
            self._keys = CommittedKeys(path, manifest.entries)
            try:
                self._metrics = recover(path, manifest, self._keys, run_id=self.id, notices=self.notices)
            except RlvrError as error:
                if "committed" in before:
                    self._replace_metadata(before)  # keeps the record, which shows the damage
                raise damage or error from error
            self._earlier_seconds = self._seconds_before()
            if updates_status:
                self._set(status="running")
            if upload is not None:
                upload.start(path)
        except BaseException:
            self._reserve.release()
            self.close()
            raise

    @classmethod
    def create(
        cls,
        root: Path | str,
        command: str,
        *,
        name: str | None = None,
        about: Sequence[str] = (),
        metadata: Mapping[str, Any],
    ) -> "RunDir":
        """Create a new run in `root`, a directory that is created if needed.

        Args:
            root: the directory that holds the runs; or s3://BUCKET/PREFIX, where the run is uploaded while it is written.
            command: the rlvr command.
            name: the id of the run; None or "" makes one, see `made_name`.
            about: what a name that is made also says, such as the model and the dataset.
            metadata: additional fields for run.json; JSON values.

        Raises:
            RlvrError: the name is invalid, a run with that name exists, or the directory cannot be written.
        """
        assert command.isidentifier(), command
        assert not set(_FIXED_FIELDS) & metadata.keys(), metadata.keys()
        check_new_name(name, root)
        address = parsed_address(str(root)) if is_address(str(root)) else None
        root = work_folder(str(root)) if address else Path(root)
        with os_errors_as_user_errors(root):
            root.mkdir(parents=True, exist_ok=True)
        remove_unmade(root)
        made = made_name(command, about)
        for number in count(1):
            run_id = name or (made if number == 1 else f"{made}-{number}")
            now = utc_now()
            head = {"schema_version": SCHEMA_VERSION, "run_id": run_id, "command": command, "status": "running"}
            times = {"created_at": now, "updated_at": now, "wall_seconds": 0.0}
            try:
                upload = Upload.of_new(address.below(run_id)) if address else None
            except Held:
                if name:
                    raise
                continue
            try:
                free = upload is not None or address is None
                lock = _make_run(root / run_id, {**head, **times, **metadata}) if free else None
                if lock is not None:
                    return cls(root / run_id, lock, upload=upload)
            except BaseException:
                _give_up(upload)
                raise
            _give_up(upload)
            if name and address and os.path.lexists(root / name):
                raise name_is_taken(root / name, address)
            check_new_name(name, str(address) if address else root)
        raise AssertionError

    @classmethod
    def resume(cls, path: Path | str) -> "RunDir":
        """Open an existing run to continue it, repairing whatever a kill left behind; see `notices`.

        Raises:
            RlvrError: there is no such run, another process is writing it, or a committed file is missing or damaged.
        """
        return cls._opened(Path(path))

    @classmethod
    def annotate(cls, path: Path | str) -> "RunDir":
        """Open a run to add grades to it. run.json, with its status and wall_seconds, is left unchanged, except for the record of
        what is committed and, in an older run, the schema version.

        Raises:
            RlvrError: as for `resume`.
        """
        return cls._opened(Path(path), updates_status=False)

    @classmethod
    def _opened(cls, path: Path, **how: bool) -> "RunDir":
        read_metadata(path)  # first: no lock file in a directory that is not a run
        source, upload = source_of(path), None
        if source is not None:
            upload, path = Upload.of_known(parsed_address(str(source)))
        try:
            return cls(path, Lock(path), upload=upload, **how)
        except BaseException:
            _give_up(upload)
            raise

    @property
    def place(self) -> str:
        """What names the run in a command: its address or path."""
        return str(self._upload.address) if self._upload else str(self.path)

    @property
    def id(self) -> str:
        return self._metadata["run_id"]

    @property
    def metadata(self) -> dict[str, Any]:
        """The content of run.json. Change it with `update`."""
        return self._metadata

    @property
    def wall_seconds(self) -> float:
        """Seconds that the run has been open for writing, in this process and earlier ones; never decreases."""
        return self._earlier_seconds + time.monotonic() - self._session_start

    def update(self, **values: Any) -> None:
        """Set fields of run.json and rewrite it atomically. Raises RlvrError."""
        assert not set(_FIXED_FIELDS) & values.keys(), values.keys()
        self._set(**values)

    def finish(self, status: Status) -> None:
        """Record how the run ended, before the context is left. Raises RlvrError."""
        assert status in get_args(Status), status
        self._set(status=status)

    def commit_rollouts(
        self, phase: Phase, step: int, rollouts: Sequence[Rollout], *, cost: Mapping[str, float] | None = None
    ) -> Path:
        """Commit rollouts of one phase and step, all or none; when this returns they are durable.

        Args:
            cost: numbers that are stored with the rows, so that a kill cannot part them; see `cost`.

        Returns:
            The path of the new part.

        Raises:
            RlvrError: the part cannot be written; the run is unchanged.
        """
        self._assert_open()
        assert phase in get_args(Phase), phase
        assert step >= 0, step
        assert rollouts, "a part has at least one row"
        places = {(r.run_id, r.phase, r.step) for r in rollouts}
        assert places == {(self.id, phase, step)}, (places, self.id, phase, step)
        path = self._commit_part(rollout_table(rollouts, cost=cost), phase=phase, step=step)
        self._costs[path] = dict(cost or {})
        return path

    def commit_segments(
        self,
        step: int,
        segments: Sequence[Segment],
        *,
        phase: Phase = "train",
        cost: Mapping[str, float] | None = None,
    ) -> Path:
        """Commit the segments of one phase and step, all or none. `cost`, the path and errors: as for `commit_rollouts`."""
        self._assert_open()
        assert segments, "a part has at least one row"
        places = {(s.run_id, s.phase, s.step) for s in segments}
        assert places == {(self.id, phase, step)}, (places, self.id, phase, step)
        self._make_folder(SEGMENTS)
        path = self._commit_part(segment_table(segments, cost=cost), phase=phase, step=step, folder=SEGMENTS)
        self._costs[path] = dict(cost or {})
        return path

    def cost(self, phase: Phase, step: int, *, folder: str = ROLLOUTS) -> dict[str, float]:
        """Return the sum of the costs of all committed rollouts, or segments, of a phase and step, by name.

        Raises:
            RlvrError: a part of an earlier session is damaged.
        """
        total: dict[str, float] = {}
        for entry in self._entries.of(folder, phase, step):
            path = self.path / entry.path
            if path not in self._costs:
                self._costs[path] = read_cost(self.path, entry)
            for name, value in self._costs[path].items():
                total[name] = total.get(name, 0.0) + value
        return total

    def commit_grades(self, phase: Phase, step: int, grades: Sequence[Regrade]) -> Path:
        """Commit grades of one grader's attempt on rollouts of one phase and step, all or none.

        Returns:
            The path of the new part.

        Raises:
            RlvrError: the part cannot be written; the run is unchanged.
        """
        self._assert_open()
        assert grades, "a part has at least one row"
        owners = {(g.run_id, g.phase, g.step, g.grader, g.attempt, g.grader_sha256) for g in grades}
        assert len(owners) == 1, owners
        assert next(iter(owners))[:3] == (self.id, phase, step), (owners, self.id, phase, step)
        self._make_folder(GRADES)
        return self._commit_part(grade_table(grades), phase=phase, step=step, folder=GRADES, grader=grades[0].grader)

    def _make_folder(self, name: str) -> None:
        with os_errors_as_user_errors(self.path / name):
            if not os.path.lexists(self.path / name):
                (self.path / name).mkdir()
                fsync_directory(self.path)

    def commit_metrics(self, step: int, phase: Phase, values: Mapping[str, float]) -> None:
        """Commit the metrics of one step; see `commit_metric_rows`."""
        self.commit_metric_rows(phase, {step: values})

    def commit_metric_rows(
        self,
        phase: Phase,
        rows: Mapping[int, Mapping[str, float]],
        *,
        wall_seconds: Mapping[int, float] | None = None,
    ) -> None:
        """Commit the metrics of several steps, all or none. Metrics with the same step, phase and name are replaced.

        Replacement happens when a resumed run repeats the steps after its last checkpoint.

        Args:
            rows: step -> metric name -> value; NaN and infinities are kept.
            wall_seconds: step -> the run's `wall_seconds` when its metrics were measured. Default: now.

        Raises:
            RlvrError: the file cannot be written; the metrics are unchanged.
        """
        self._assert_open()
        assert phase in get_args(Phase), phase
        assert all(step >= 0 for step in rows), rows.keys()
        if not any(rows.values()):
            return
        walls = dict.fromkeys(rows, self.wall_seconds) | dict(wall_seconds or {})
        table = with_metrics(self._metrics.table, rows, phase=phase, wall_seconds=walls)
        self._metrics.replace(table, phase=phase, step=max(rows))

    def metrics_before(self, step: int) -> Iterator[tuple[str, int, dict[str, float]]]:
        """Yield (phase, step, name -> value) of the committed metrics of all steps before this one."""
        table = self._metrics.table
        found: dict[tuple[str, int], dict[str, float]] = {}
        for at, phase, name, value in zip(
            *(table[c].to_pylist() for c in ("step", "phase", "name", "value")), strict=True
        ):
            if at < step:
                found.setdefault((phase, at), {})[name] = value
        return ((*key, values) for key, values in found.items())

    def committed_keys(self, phase: Phase | None = None, step: int | None = None) -> set[RolloutKey]:
        """Return the keys (phase, step, example_id, sample_index) of committed rollouts, of one phase and step or of all.

        Example ids are as stored: `text.storable` of the original.

        Raises:
            RlvrError: a part is missing or damaged.
        """
        return {
            (p, s, example_id, sample_index)
            for p, s in (self.steps() if phase is None or step is None else [(phase, step)])
            if phase in (None, p) and step in (None, s)
            for example_id, bits in self._keys.committed(p, s).items()
            for sample_index in bit_positions(bits)
        }

    def num_rollouts(self, phase: Phase | None = None, step: int | None = None) -> int:
        """Return the number of committed rollouts, of a phase and step if they are given."""
        return sum(e.rows for e in self._entries.of(ROLLOUTS, phase, step))

    def missing_indices(self, phase: Phase, step: int, example_id: str, *, num_samples: int) -> list[int]:
        """Return the sample indices below `num_samples` that are not committed for a question, in ascending order.

        Raises:
            RlvrError: a part is missing or damaged.
        """
        return list(
            bit_positions(~self._keys.committed(phase, step).get(storable(example_id), 0) & ((1 << num_samples) - 1))
        )

    def steps(self) -> list[tuple[Phase, int]]:
        """Return the (phase, step) pairs of the committed rollouts, in the order of their first commits."""
        return self._entries.steps(ROLLOUTS)  # type: ignore[return-value]  # a phase is checked as its entry is read

    def segment_steps(self) -> list[int]:
        """Return the steps of the committed segments, in the order of their commits."""
        return list(dict.fromkeys(step for _, step in self._entries.steps(SEGMENTS)))

    def segments(self, step: int, *, phase: Phase = "train") -> list[Segment]:
        """Return the segments of a phase and step, in the order of their commit. Raises RlvrError if a part is damaged."""
        entries = self._entries.of(SEGMENTS, phase, step)
        parts = part_tables(self.path, entries, phase=phase, step=step, columns=None, folder=SEGMENTS)
        return [segment for part in parts for segment in to_records(part, Segment)]

    def rollouts(self, phase: Phase, step: int, *, columns: Sequence[str] | None = None) -> "pa.Table":
        """Return these columns of a phase and step, or all, as `read_rollouts` does. Raises RlvrError if a part is damaged."""
        import pyarrow as pa

        return pa.concat_tables(self.parts(phase, step, columns=columns))

    def parts(self, phase: Phase, step: int, *, columns: Sequence[str] | None = None) -> "Iterator[pa.Table]":
        """Yield the tables of `rollouts` part by part, to limit memory, without reading the manifest. The first is always empty."""
        entries = self._entries.of(ROLLOUTS, phase, step)
        return part_tables(self.path, entries, phase=phase, step=step, columns=columns)

    def grade_attempts(self, grader: str, phase: Phase, step: int) -> dict[tuple[str, int], list[Attempt]]:
        """Return the attempts of a grader on the rollouts of a phase and step, by (example_id, sample_index), the last one last.

        Raises:
            RlvrError: a part is missing or damaged.
        """
        found: dict[tuple[str, int], list[Attempt]] = {}
        columns = ("example_id", "sample_index", "attempt", "grader_sha256", "grade_error")
        for entry in self._entries.of(GRADES, phase, step):
            if (name := part_name(entry.path)) and name.grader == grader_slug(grader):
                part = read_part(self.path, entry, columns)
                for example_id, index, number, sha256, error in zip(
                    *(part[c].to_pylist() for c in columns), strict=True
                ):
                    attempt = Attempt(number, sha256, failed=error is not None)
                    found.setdefault((example_id, index), []).append(attempt)
        for attempts in found.values():
            attempts.sort(key=lambda attempt: attempt.number)
        return found

    def at_end(self, do: Callable[[], None]) -> None:
        """Have something done once the status is written, before the last upload and before others may write the run."""
        self._at_end.append(do)

    def close(self) -> None:
        """Release the run for other writers, without changing its status. Calling it again has no effect."""
        if os.getpid() != self._process:  # a forked child holds neither the lock nor the manifest
            return
        if self._manifest is not None:
            if self._manifest.is_in_place:
                self._reserve.release()
            self._manifest.close()
            self._manifest = None
        try:
            while self._at_end:
                self._at_end.pop()()
            if self._upload is not None:
                self._upload.end()
        finally:
            self._lock.release()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._process or self._manifest is None:
            return
        try:
            if not self._updates_status:
                with suppress(RlvrError):  # the rows are committed, and readers need no record
                    self._replace_metadata(self._recorded(self._metadata))
            elif self._metadata["status"] != "running":
                return
            elif error is None:
                self.finish("finished")
            else:
                with suppress(RlvrError):  # a full disk may be the cause; the user must see `error`
                    self.finish("interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed")
        finally:
            try:
                self.close()
            except RlvrError as late:
                if error is None:
                    raise
                if late is not error:  # which must be seen
                    console.say(f"error: {late.problem} {late.hint}")

    def _assert_open(self) -> OpenManifest:
        assert self._manifest is not None, "the run is closed"
        if self._upload is not None:
            self._upload.check()
        assert os.getpid() == self._process, "a forked child may not write its parent's run"
        self.assert_in_place()
        return self._manifest

    def assert_in_place(self) -> None:
        """Raise RlvrError if the run, which is open, is no longer where it was opened, whatever is there now."""
        assert self._manifest is not None, "the run is closed"
        if not self._manifest.is_in_place:
            raise RlvrError(
                f"{shown(self.path)} was moved or deleted while it was being written.",
                "If it was moved, go on where it is now, with --resume, and leave it there while a command writes it.",
            )

    def _check_record(self) -> RlvrError | None:
        """Compare the manifest with the record in run.json.

        A manifest that was cut is accepted if every part is still there: recovery adopts those that it no longer lists.

        Returns:
            The error to raise if recovery fails; None if the manifest is as recorded.

        Raises:
            RlvrError: it is another manifest, or a part is missing.
        """
        record = self._metadata.get("committed")
        if record is None:
            return None
        read_manifest(self.path)  # its error says which line is wrong
        data = read_regular(self.path, MANIFEST)
        try:
            check_record(self.path, data, record)
        except RlvrError as error:
            if not isinstance(record, dict):
                raise
            parts, size = record.get("parts"), record.get("manifest_bytes")
            if not (isinstance(size, int) and isinstance(parts, int)):
                raise
            if len(data) >= size or len(present_parts(self.path)) < parts:
                raise
            return error
        return None

    def _set(self, **values: Any) -> None:
        self._assert_open()
        assert self._updates_status, "run.json cannot be changed in a run opened with annotate"
        times = {"updated_at": utc_now(), "wall_seconds": round(self.wall_seconds, 3)}
        self._replace_metadata(self._recorded(self._metadata | values | times))

    def _recorded(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return the metadata with a record of what is committed, or without one while the run is running."""
        metadata = {k: v for k, v in metadata.items() if k != "committed"}
        if metadata["status"] == "running":
            return metadata
        lines = read_regular(self.path, MANIFEST)[: self._assert_open().size]
        return metadata | {"committed": record_of(lines, self._entries)}

    def _replace_metadata(self, metadata: dict[str, Any]) -> None:
        """Replace run.json; on a full disk with the space that was reserved for it."""
        self.assert_in_place()
        data = metadata_bytes(metadata)
        try:
            atomic_write(self.path / RUN_FILE, data)
        except RlvrError as error:
            if not is_full_disk(error):
                raise
            self._reserve.release()
            atomic_write(self.path / RUN_FILE, data)
            with suppress(RlvrError):
                self._reserve.hold(RESERVED_BYTES)
        self._metadata = metadata

    def _commit_part(
        self, table: "pa.Table", *, phase: Phase, step: int, folder: str = ROLLOUTS, grader: str = ""
    ) -> Path:
        keys = keys_of(table)
        slug = grader and grader_slug(grader)
        fresh, held = bits_of_keys(keys), self._keys.committed(phase, step, folder=folder, grader=slug)
        assert len(keys) == table.num_rows, "two of the rows have the same key"
        assert not (twice := overlap(held, fresh)), f"already committed: {twice[:3]}"

        number = self._next_part((folder, slug, phase, step))
        relative = part_path(phase, step, number, folder=folder, grader=grader)
        path = self.path / relative
        assert not path.exists(), path
        data = to_parquet(table)
        manifest = self._assert_open()
        before = manifest.size
        try:
            atomic_write(path, data)
            manifest.append(new_entry(relative, data, rows=table.num_rows, phase=phase, step=step))
        except BaseException:
            # If the manifest has grown, it may list the part: keep it.
            if manifest.bytes_on_disk == before:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            raise
        merge(held, fresh)
        self._next_parts[folder, slug, phase, step] = number + 1
        return path

    def _next_part(self, group: tuple[str, str, str, int]) -> int:
        """The number of the next part of a folder, grader's slug, phase and step, counted once: an evaluation may have thousands."""
        if group not in self._next_parts:
            folder, _, phase, step = group
            names = [part_name(e.path) for e in self._entries.of(folder, phase, step)]
            self._next_parts[group] = max((n.number for n in names if n and n[:4] == group), default=-1) + 1
        return self._next_parts[group]

    def _seconds_before(self) -> float:
        recorded = self._metadata.get("wall_seconds")
        measured = self._metrics.table["wall_seconds"].to_pylist()
        return max([float(recorded) if isinstance(recorded, int | float) else 0.0, *measured])


def _give_up(upload: Upload | None) -> None:
    if upload is not None:
        upload.give_up()


def made_name(command: str, about: Sequence[str]) -> str:
    """Return a name for a run: ``COMMAND-MODEL-DATASET-YYYYmmdd-HHMM`` in UTC, of characters that are safe everywhere.

    Args:
        about: the model and the dataset: names or paths. Of the path of a run's model, the run's name is taken.
    """
    return "-".join([command, *filter(None, map(short_name, about)), f"{datetime.now(UTC):%Y%m%d-%H%M}"])


def short_name(name: str) -> str:
    """Return up to 32 safe characters of a name or path, such as `q0-sft` of runs/q0-sft/model."""
    parts = [part for part in re.split(r"[/\\]", name.partition(" (")[0]) if part]
    last = parts[-1] if parts else ""
    if last in MODELS and len(parts) > 1:
        last = parts[-2]
    last = re.sub(r"\.(jsonl|json|csv|parquet)(\.gz)?$", "", last)
    return re.sub(r"[^A-Za-z0-9.]+", "-", last.encode("ascii", "ignore").decode())[:32].strip("-.")


def _make_run(path: Path, metadata: Mapping[str, Any]) -> Lock | None:
    """Create a complete, locked run directory atomically under its name; None if the name is taken."""
    import shutil

    text = metadata_bytes(metadata)
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
            Reserve(temporary / RESERVE).hold(RESERVED_BYTES)  # a disk that has no space for it has none for a run
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
