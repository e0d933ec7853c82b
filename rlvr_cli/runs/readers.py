"""Read a run without its lock: only the files that its manifest lists.

Enters: a run directory or a name. Leaves: `RunInfo` and tables of rollouts, or an RlvrError if a file differs from what
was committed, or if the manifest lists less than was committed.
"""

import hashlib
import json
import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.manifest import (
    FOLDERS,
    GRADES,
    MANIFEST,
    METRICS,
    ROLLOUTS,
    RUN_FILE,
    RUN_NAME,
    SEGMENTS,
    Entry,
    is_recorded,
    matches,
    parse_manifest,
    part_name,
)
from rlvr_cli.runs.remote.store import is_address
from rlvr_cli.runs.remote.views import folders_below, view_of, views_below
from rlvr_cli.runs.storage.files import damaged_file, os_errors_as_user_errors, read_regular, refuse_links, shown
from rlvr_cli.runs.storage.parquet import cost_of, from_parquet
from rlvr_cli.runs.storage.schemas import arrow_schema, newer_version
from rlvr_cli.runs.storage.sources import source_of
from rlvr_cli.text import printable, storable
from rlvr_cli.types import SCHEMA_VERSION, Phase, Regrade, Rollout, Segment

if TYPE_CHECKING:
    import pyarrow as pa


ENDED = ("finished", "diverged")  # states of a run that has nothing left to do


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a run contains, read without a lock."""

    path: Path
    id: str
    metadata: dict[str, Any]  # the content of run.json
    parts: list[Path]  # committed rollout parts, in commit order
    grades: list[Path]  # committed grades parts, in commit order
    segments: list[Path]  # committed parts of segments, in commit order
    metrics: Path | None  # None before the first metric
    fingerprint: str  # SHA-256 (hex) of the rollout parts' hashes; changes when rollouts are added
    entries: Sequence[Entry]  # the manifest
    settled: int  # how many of the manifest's announcements of metrics.parquet are known to be in the file
    notices: Sequence[str]  # what looks like an interrupted commit, one sentence each, to show to the user


def read_manifest(run: Path) -> tuple[list[Entry], int]:
    """Return the entries of the manifest and the length of their lines in bytes."""
    return _parsed_manifest(run, read_regular(run, MANIFEST))


def _parsed_manifest(run: Path, data: bytes) -> tuple[list[Entry], int]:
    try:
        return parse_manifest(data, newest=SCHEMA_VERSION)
    except ValueError as error:
        raise damaged_file(run / MANIFEST, printable(str(error), keep="")) from error


def metadata_bytes(metadata: Mapping[str, Any]) -> bytes:
    """Return the bytes of run.json. Its last line but one is the sha256 of all bytes before that line."""
    text = storable(json.dumps(metadata, indent=2, ensure_ascii=False, allow_nan=False))
    head = text.removesuffix("\n}").encode() + b",\n"
    return head + _sum_line(head)


def _sum_line(head: bytes) -> bytes:
    return b'  "sha256": "%s"\n}\n' % hashlib.sha256(head).hexdigest().encode()


def read_metadata(run: Path) -> dict[str, Any]:
    """Return the content of run.json, without its sha256. That of a run of schema version 1 has none."""
    path = run / RUN_FILE
    data = read_regular(run, RUN_FILE)
    try:
        metadata = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged_file(path, f"it is not valid JSON ({printable(str(error), keep='')})") from error
    if not isinstance(metadata, dict):
        raise damaged_file(path, "it is not a JSON object")
    if metadata.pop("sha256", None) is not None:
        head = data[: data.rfind(b'  "sha256": "')]
        if data != head + _sum_line(head):
            raise damaged_file(path, "its sha256 is not that of its content")
    version = metadata.get("schema_version")
    if type(version) is int and version > SCHEMA_VERSION:
        raise newer_version(shown(run), version)
    for name in ("run_id", "command", "status", "created_at"):
        if not isinstance(metadata.get(name), str):
            raise damaged_file(path, f"it has no {name}")
    if type(version) is not int or version < 1 or RUN_NAME.fullmatch(metadata["run_id"]) is None:
        raise damaged_file(path, "its schema_version or run_id is not valid")
    _check_values(path, metadata)
    return metadata


def _check_values(path: Path, metadata: dict[str, Any]) -> None:
    """Raise RlvrError if a field that every command may have written has another type: the file may come from someone else."""
    models = ("model_files", "merged_model_files")
    for name in ("config", "sources", "facts", "environment", "sampler", "policy", "start", *models):
        if not isinstance(metadata.get(name, {}), dict):
            raise damaged_file(path, f"its {name} is not an object")
    if type(metadata.get("wall_seconds", 0.0)) not in (int, float):
        raise damaged_file(path, "its wall_seconds is not a number")
    try:
        json.dumps(metadata, allow_nan=False)
    except ValueError:
        raise damaged_file(path, "it has a number that is not finite") from None


def fact_of(metadata: Mapping[str, Any], *names: str) -> Any:
    """What run.json has at facts.NAME.NAME…; None if it has nothing there."""
    found = metadata.get("facts")
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def prompt_template(metadata: Mapping[str, Any]) -> str:
    """The text of a run's prompt template; empty if run.json does not tell."""
    text = fact_of(metadata, "prompt", "text")
    return text if isinstance(text, str) else ""


def check_part(run: Path, entry: Entry) -> Path:
    """Return the path of a committed part after checking its type and size, but not its content."""
    path = run / entry.path
    if source := source_of(run):
        size = source.sizes().get(entry.path)
        if size is None:
            raise damaged_file(path, "the index does not name it")
    else:
        with os_errors_as_user_errors(path, "read"):
            refuse_links(run, entry.path)
            state = os.lstat(path)
        if not stat.S_ISREG(state.st_mode):
            raise RlvrError(f"{shown(path)} is not a regular file.", "Restore it from a copy of the run.")
        size = state.st_size
    if size != entry.bytes:
        raise damaged_file(path, f"it has {size} bytes, but {entry.bytes} were committed")
    return path


def read_part(run: Path, entry: Entry, columns: Sequence[str] | None = None) -> "pa.Table":
    path = run / entry.path
    data = read_regular(run, entry.path)
    if not matches(entry, data):
        raise damaged_file(path, "its sha256 differs from the manifest")
    return parsed_table(data, row_type_of(entry.folder), path=path, columns=columns)


def read_cost(run: Path, entry: Entry) -> dict[str, float]:
    """Return what the rows of a part cost; empty if it was not recorded. Raises RlvrError if the part is damaged."""
    data = read_regular(run, entry.path)
    if not matches(entry, data):
        raise damaged_file(run / entry.path, "its sha256 differs from the manifest")
    return cost_of(data)


def row_type_of(folder: str) -> type:
    """Return the row type of the parts in a folder."""
    return {ROLLOUTS: Rollout, GRADES: Regrade, SEGMENTS: Segment}[folder]


def parsed_table(data: bytes, record: type, *, path: Path, columns: Sequence[str] | None = None) -> "pa.Table":
    try:
        return from_parquet(data, record, columns=columns, name=shown(path))
    except ValueError as error:
        raise damaged_file(path, str(error)) from error


# The readers


def read_run(path: Path | str) -> RunInfo:
    """Read what a run contains; works while the run is being written.

    Of the parts only type and size are checked: `sums.check_sums` or `read_part` checks their content.

    Raises:
        RlvrError: it is not a run, one of its files is missing, a symbolic link or of the wrong size, or the manifest
            lists less than was committed.
    """
    path = Path(path)
    metadata, entries, settled, notices = read_index(path)
    parts = {folder: [check_part(path, e) for e in entries if e.folder == folder] for folder in FOLDERS}
    digests = "".join(e.sha256 for e in entries if e.folder == ROLLOUTS)
    return RunInfo(
        path=path,
        id=metadata["run_id"],
        metadata=metadata,
        parts=parts[ROLLOUTS],
        grades=parts[GRADES],
        segments=parts[SEGMENTS],
        metrics=metrics_path(path, settled=settled),
        fingerprint=hashlib.sha256(digests.encode()).hexdigest(),
        entries=entries,
        settled=settled,
        notices=notices,
    )


class Index(NamedTuple):
    """run.json and the manifest of a run, which agree. See `RunInfo` for the other two fields."""

    metadata: dict[str, Any]
    entries: list[Entry]
    settled: int
    notices: list[str]


def read_index(path: Path) -> Index:
    """Read run.json and the manifest, and check that no part or line is missing.

    A writer leaves at most one part that is not listed yet, and one incomplete line. Anything more, or a part that a
    finished run does not list, is damage.

    Raises:
        RlvrError: one of the two is damaged, or the manifest lists less than was committed.
    """
    metadata = read_metadata(path)
    present = present_parts(path)  # before the manifest: what is committed in between is then listed
    data = read_regular(path, MANIFEST)
    entries, end = _parsed_manifest(path, data)
    record = metadata.get("committed")
    if record is not None:
        try:
            check_record(path, data, record)
        except RlvrError:
            if read_metadata(path).get("committed") == record:
                raise
            return read_index(path)  # a writer has opened or closed the run meanwhile
    listed = {e.path for e in entries}
    unlisted = [p for p in present if p not in listed]
    lost = [p for p in unlisted if (name := part_name(p)) and not name.grader]
    # The status is read again, because the run may have been resumed meanwhile.
    if len(lost) > 1 or (lost and read_metadata(path)["status"] in ENDED):
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise damaged_file(path / MANIFEST, f"it does not list {shown(lost[0])}{more}")
    notices = [
        f"{shown(path / p)} is not in the manifest: its commit is in progress, or was interrupted (resuming repairs it)."
        for p in unlisted
    ]
    if len(data) > end:
        notices.append(
            f"{shown(path / MANIFEST)} ends with an incomplete line: a commit is in progress, or was interrupted."
        )
    announced = sum(e.path == METRICS for e in entries)
    settled = announced if metadata["status"] in ENDED else max(announced - 1, 0)
    return Index(metadata, entries, settled, notices)


def check_record(run: Path, data: bytes, record: Any) -> None:
    """Raise RlvrError if the manifest is not the one that run.json records."""
    if not isinstance(record, dict):
        raise damaged_file(run / RUN_FILE, "its field committed is not an object")
    if not is_recorded(data, record):
        raise damaged_file(
            run / MANIFEST,
            f"it is not the manifest of {record.get('parts')!r} parts with {record.get('rows')!r} rollouts that run.json records",
        )


def present_parts(run: Path) -> list[str]:
    """Return the relative paths of all ``*.parquet`` files in the folders of parts, committed or not."""
    found: list[str] = []
    for folder in FOLDERS:
        if folder != ROLLOUTS and not os.path.lexists(run / folder):
            continue
        refuse_links(run, folder)
        with os_errors_as_user_errors(run / folder, "read"):
            found += sorted(f"{folder}/{n}" for n in os.listdir(run / folder) if n.endswith(".parquet"))
    return found


def metrics_path(run: Path, *, settled: int) -> Path | None:
    """Return the path of metrics.parquet; None if it does not exist and no announcement is settled."""
    path = run / METRICS
    source = source_of(run)
    refuse_links(run, METRICS)
    if METRICS in source.sizes() if source else path.is_file():
        return path
    if settled or os.path.lexists(path):
        raise RlvrError(
            f"{shown(path)} is missing.",
            "Restore the file from a copy, or resume the run: its metrics then start over.",
        )
    return None


def read_metrics(run: Path, entries: Sequence[Entry], *, settled: int) -> bytes | None:
    """Return the content of metrics.parquet, or None before the first metric.

    Args:
        entries: the manifest, which may have grown since.
        settled: see `RunInfo`.

    Raises:
        RlvrError: it is missing, or its bytes are not those that the manifest announces.
    """
    if metrics_path(run, settled=settled) is None:
        return None
    data = read_regular(run, METRICS)
    # A writer announces the file before it replaces it, and may have done so again since `entries` were read.
    oldest = max(settled - 1, sum(e.path == METRICS for e in entries) - 2, 0)
    announcements = [e for e in read_manifest(run)[0] if e.path == METRICS]
    if any(matches(e, data) for e in announcements[oldest:]):
        return data
    raise damaged_file(run / METRICS, "its sha256 differs from the manifest")


def read_rollouts(
    path: Path | str,
    *,
    phase: Phase | None = None,
    step: int | None = None,
    columns: Sequence[str] | None = None,
    entries: Sequence[Entry] | None = None,
) -> "pa.Table":
    """Return the committed rollouts of a run, of one phase and step or of all, in commit order.

    Every part is checked against its sha256 in the manifest and against its page checksums.

    Args:
        columns: names of columns; None for all.
        entries: the manifest, for several calls; None to read it.

    Raises:
        RlvrError: as for `read_run`, or a part is damaged.
    """
    import pyarrow as pa

    return pa.concat_tables(read_parts(path, phase=phase, step=step, columns=columns, entries=entries))


def read_parts(
    path: Path | str,
    *,
    phase: Phase | None = None,
    step: int | None = None,
    columns: Sequence[str] | None = None,
    entries: Sequence[Entry] | None = None,
) -> "Iterator[pa.Table]":
    """Yield the tables of `read_rollouts` part by part, to limit memory. The first table is always empty."""
    path = Path(path)
    entries = read_index(path).entries if entries is None else entries
    return part_tables(path, entries, phase=phase, step=step, columns=columns)


def part_tables(
    path: Path,
    entries: Sequence[Entry],
    *,
    phase: Phase | None,
    step: int | None,
    columns: Sequence[str] | None,
    folder: str = ROLLOUTS,
) -> "Iterator[pa.Table]":
    schema = arrow_schema(row_type_of(folder))
    names = schema.names if columns is None else list(columns)
    assert set(names) <= set(schema.names), names
    yield schema.empty_table().select(names)
    for entry in entries:
        if entry.folder == folder and phase in (None, entry.phase) and step in (None, entry.step):
            yield read_part(path, entry, names)


def latest_run(root: Path | str) -> Path:
    """Return the newest run in `root`, by created_at of run.json; runs with an unreadable run.json are skipped.

    Raises:
        RlvrError: there is no run, or none is readable.
    """
    runs = _runs(root)
    if not runs:
        below = folders_of_runs(root)
        raise RlvrError(
            f"There is no run in {shown(root)} itself." if below else f"There is no run in {shown(root)}.",
            f"Name runs of a folder in it: {shlex.quote(pattern_below(root, below[0]))}"
            if below
            else "Create one, for instance with `rlvr eval`, or give the directory of runs with --runs-dir.",
        )
    readable: list[tuple[str, str, Path]] = []
    unreadable: list[RlvrError] = []
    for run in sorted(runs):
        try:
            readable.append((read_metadata(run)["created_at"], run.name, run))
        except RlvrError as error:
            unreadable.append(error)
    if not readable:
        raise unreadable[0]
    return max(readable)[2]


def resolve_run(name_or_path: str | Path, root: Path | str) -> Path:
    """Return the path of the run with that name in `root`, such as `r` or `sweep/r`, or else of the run directory at that path.

    Raises:
        RlvrError: there is neither; the hint lists the most similar names, or else the newest runs.
    """
    name = str(name_or_path)
    for path in (*([run_at(root, name)] if _is_below(name) else []), run_at("", name)):
        if os.path.lexists(path / RUN_FILE):
            return path
        if os.path.lexists(path / MANIFEST):
            raise RlvrError(f"{shown(path / RUN_FILE)} is missing.", "Restore the file from a copy of the run.")
    if is_address(name):
        raise RlvrError(
            f"There is no run at {shown(name)}.",
            "rlvr runs --runs-dir s3://BUCKET/PREFIX lists those below an address.",
        )
    import difflib

    names = run_names(root, like=name)
    near = difflib.get_close_matches(name, names, n=3)
    hint = f"Did you mean: {', '.join(near)}?" if near else f"The newest runs: {', '.join(names[:3])}."
    raise RlvrError(
        f"There is no run {name!r}, neither in {shown(root)} nor as a directory.",
        hint if names else "Give the directory of runs with --runs-dir.",
    )


def _is_below(name: str) -> bool:
    """Whether a name may be one in the directory of runs, or in a folder of it."""
    return not {"", ".", ".."} & set(name.split("/"))


class Named(NamedTuple):
    """What names and patterns stand for."""

    runs: list[Path]  # each once, in the order in which they are named; those of a pattern by name
    others: list[str]  # what a pattern matches besides, which is no run


def resolve_runs(names: Sequence[str], root: Path | str) -> Named:
    """Return the runs of names, paths and patterns. A pattern ('abl-*') is one of names in `root`, or else of paths.

    Raises:
        RlvrError: a name is no run, or a pattern matches none. A path that the shell has written in place of a pattern
            (`runs/*`) may be something else.
    """
    runs: list[Path] = []
    others: list[str] = []
    expanded = expanded_by_shell(names)
    for name in names:
        if is_pattern(name) and not is_run(name, root):
            found, besides = _matching(name, root)
            runs += found
            others += besides
        elif name in expanded and not is_run(name, root):
            others.append(name)
        else:
            runs.append(resolve_run(name, root))
    if names and not runs:
        raise RlvrError(
            f"None of {', '.join(map(shown, others))} is a run.",
            "Name a run, or the directory of runs with --runs-dir.",
        )
    return Named(list({path.resolve(): path for path in runs}.values()), others)


def is_pattern(name: str) -> bool:
    """Whether a text is a pattern of names or paths, such as 'abl-*'; False for SQL, which has spaces, and no directory before them."""
    import glob

    if not re.search(r"[*?\[]", name) or os.path.isfile(name):
        return False
    return not re.search(r"\s", name) or any(glob.iglob(name.rpartition("/")[0]))


def pattern_below(root: Path | str, folder: str) -> str:
    """The pattern of the runs in a folder of a directory or address."""
    import glob

    path = f"{str(root).rstrip('/')}/{folder}"
    return f"{path if is_address(path) else glob.escape(path)}/*"


def _matching(pattern: str, root: Path | str) -> tuple[list[Path], list[str]]:
    """Return the runs that a pattern matches, and what it matches besides."""
    import fnmatch
    import glob

    folder, _, names = pattern.rpartition("/")
    is_below = is_address(str(root)) and all(map(RUN_NAME.fullmatch, folder.split("/") if folder else ()))
    if is_address(pattern) or is_below:
        above = folder if is_address(pattern) else f"{str(root).rstrip('/')}/{folder}"
        if found := [run for run in views_below(above) if fnmatch.fnmatchcase(run.name, names)]:
            return sorted(found, key=lambda run: _natural(run.name)), []
    for base in () if is_address(pattern) else (Path(root), Path()):
        found = sorted(glob.glob(pattern, root_dir=base), key=_natural)
        paths = [base / name for name in found]
        if any(is_run(str(path), root) for path in paths):
            runs = [path for path in paths if _is_run_directory(path)]
            return runs, [str(path) for path in paths if path not in runs]
    raise RlvrError(
        f"No run matches {pattern!r}, neither in {shown(root)} nor as a path.",
        "rlvr runs lists the runs; --runs-dir names another directory of runs.",
    )


def _natural(name: str) -> list[tuple[float, str]]:
    """Sort key of a name by its numbers: sft-128 before sft-1024, lr-3e-5 before lr-1e-4. A dot makes a decimal: v1.10 before v1.9."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", name)
    return [(float(part) if i % 2 else 0.0, part) for i, part in enumerate(parts)]


def expanded_by_shell(names: Sequence[str]) -> set[str]:
    """Return the names that a shell has put in place of a pattern PREFIX*SUFFIX: all that it matches in a directory."""
    folders: dict[str, dict[str, str]] = {}  # folder -> last part of the path -> the name
    for name in names:
        if os.path.lexists(name):
            folder, base = os.path.split(name.rstrip("/"))
            folders.setdefault(folder, {})[base] = name
    expanded: set[str] = set()
    for folder, given in folders.items():
        prefix = _common_start([*given])
        suffix = _common_start([base[::-1] for base in given])[::-1]
        with suppress(OSError):
            present = {
                b for b in os.listdir(folder or ".") if b.startswith(prefix) and b.endswith(suffix) and b[0] != "."
            }
            if len(given) > 1 and present == given.keys():
                expanded.update(given.values())
    return expanded


def _common_start(texts: Sequence[str]) -> str:
    """Return the longest text that all of these begin with."""
    first, last = min(texts), max(texts)
    return next((first[:i] for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), first)


def _is_run_directory(path: Path) -> bool:
    return any(os.path.lexists(path / file) for file in (RUN_FILE, MANIFEST))


def is_run(name_or_path: str, root: Path | str) -> bool:
    """Whether the text is the name of a run in `root` or the path of a run; False for any other text, such as SQL."""
    if "\0" in name_or_path or len(name_or_path) > 1000 or (is_address(name_or_path) and is_pattern(name_or_path)):
        return False
    try:
        folders = (run_at("", name_or_path), run_at(root, name_or_path))
        return any((folder / file).is_file() for folder in folders for file in (RUN_FILE, MANIFEST))
    except OSError:
        return False  # for example a path component that is too long


def all_runs(root: Path | str) -> list[Path]:
    """Return the runs in a directory, each once, damaged ones too. Raises RlvrError if there is no such directory."""
    if is_address(str(root)):
        return views_below(str(root))
    root = Path(root)
    if not root.is_dir():
        raise RlvrError(f"There is no directory {shown(root)}.", "Give the directory of runs with --runs-dir.")
    found = [path for path in sorted(root.iterdir(), reverse=True) if path.name[0] != "." and _is_run_directory(path)]
    found.sort(key=Path.is_symlink, reverse=True)  # the directory is kept, or of links alone the first
    return sorted({path.resolve(): path for path in found}.values())


def folders_of_runs(root: Path | str) -> list[str]:
    """Return the names of the folders in a directory that hold runs, such as those of sweeps."""
    if is_address(str(root)):
        return folders_below(str(root))
    found = {path.parent.parent.name for path in Path(root).glob(f"*/*/{RUN_FILE}")}
    return sorted(name for name in found if name[0] != ".")


def recent_runs(root: Path | str) -> list[Path]:
    """Return the runs in a directory, the most recently written first."""
    return sorted(_runs(root), key=_last_written, reverse=True)


def run_names(root: Path | str, *, like: str = "") -> list[str]:
    """Return the names of the runs in a directory, the most recently written first; of a folder's in it, like `sweep/r`, if it has any."""
    folder = like.rpartition("/")[0]
    if _is_below(like) and folder:
        with suppress(OSError):  # such as a name that is too long
            if below := [f"{folder}/{run.name}" for run in recent_runs(run_at(root, folder))]:
                return below
    return [run.name for run in recent_runs(root)]


def run_at(root: Path | str, name: str) -> Path:
    """Return the directory of a name or path in `root`, or of an address; there may be no run."""
    if not (is_address(name) or (is_address(str(root)) and all(map(RUN_NAME.fullmatch, name.split("/"))))):
        return Path(root) / name
    address = name if is_address(name) else f"{str(root).rstrip('/')}/{name}"
    return view_of(address) or Path(address)


def _runs(root: Path | str) -> list[Path]:
    if is_address(str(root)):
        return views_below(str(root))
    root = Path(root)
    if not root.is_dir():
        return []
    with os_errors_as_user_errors(root, "read"):
        names = [e.name for e in os.scandir(root) if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
    return [root / name for name in names if os.path.lexists(root / name / RUN_FILE)]


def _last_written(run: Path) -> str:
    """Return `updated_at` of run.json, which a copy of the run keeps; "" if the file cannot be read."""
    with suppress(RlvrError):
        return str(read_metadata(run).get("updated_at", ""))
    return ""
