"""Verify a run: that every file is as it was committed, and that what the files say is possible.

Enters: a run directory. Leaves: a `Check` with one sentence per problem.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.manifest import METRICS, ROLLOUTS, RUN_FILE, Entry, matches, part_name
from rlvr_cli.runs.readers import (
    ENDED,
    parsed_table,
    part_tables,
    read_index,
    read_metadata,
    read_metrics,
    row_type_of,
)
from rlvr_cli.runs.storage.files import damaged_file, read_regular, refuse_links, shown
from rlvr_cli.runs.storage.keys import KeyBits, bits_of_keys, merge, overlap
from rlvr_cli.runs.storage.parquet import keys_of, version_of
from rlvr_cli.runs.storage.schemas import metrics_schema
from rlvr_cli.runs.storage.spilled import SpillingDict
from rlvr_cli.runs.storage.sums import check_sums
from rlvr_cli.runs.turns import broken_turns
from rlvr_cli.text import printable
from rlvr_cli.types import Metric

if TYPE_CHECKING:
    import pyarrow as pa

POINTS = "points"  # folder with what a search's programs gave: files named by their sha256
MODELS = {
    "model": "model_files",
    "model-merged": "merged_model_files",
}  # folders of the final model -> keys of run.json
SeedOf = Callable[..., int]  # `rollouts.requests.request_seed`


@dataclass(frozen=True, slots=True)
class Check:
    """The result of checking a run; problems and pending parts are one sentence each."""

    files: int  # number of files with a sum: rollouts, segments, grades, metrics, the final model and a search's points
    rows: int  # rollouts
    problems: list[str]  # files that are missing, differ from what was committed, or say what cannot be
    # No errors: what an interrupted commit leaves, such as a part that the manifest does not list, and lost metrics.
    pending: list[str]


def check_run(path: Path | str, *, seed_of: SeedOf | None = None) -> Check:
    """Read every committed file and report what is wrong. Works while the run is being written.

    Of each part: sha256, page checksums, columns, schema version, number of rows, owner and phase and step of its rows,
    keys that occur once, versions of the policy that are not newer than the step, and seeds. Of the manifest: that the
    steps of a phase never go back. Of the metrics: keys that occur once, and a metric of each update. Those before the
    first and after the last one in the file are `pending`, since a resumed run starts metrics over that are missing.

    Args:
        seed_of: the seed that a sample must have, from the run's seed and its key; None: seeds are not checked.
    """
    path = Path(path)
    try:
        metadata, entries, settled, pending = read_index(path)
    except RlvrError as error:
        return Check(0, 0, [error.problem], [])
    problems: list[str] = []
    try:
        data = read_metrics(path, entries, settled=settled)
        metrics = metrics_schema().empty_table()
        if data is not None:
            metrics = parsed_table(data, Metric, path=path / METRICS)
        problems += _metrics_problems(path, metrics)
        pending += _lost_metrics(path, metrics, metadata)
    except RlvrError as error:
        problems.append(error.problem)
    held: dict[tuple[str, str, str, int], KeyBits] = {}
    newest: dict[tuple[str, str], Entry] = {}  # by folder and phase
    unread = False  # whether a part cannot be read
    for entry in entries:
        name = part_name(entry.path)
        if name is None:
            continue
        try:
            problems += _part_problems(path, entry, metadata, held, seed_of=seed_of)
        except RlvrError as error:
            problems.append(error.problem)
            unread = True
        if not name.grader:
            before = newest.setdefault((entry.folder, entry.phase), entry)
            if entry.step < before.step:
                problems.append(f"{shown(path / entry.path)} was committed after {shown(before.path)}, a later step.")
            newest[entry.folder, entry.phase] = entry
    for (_, grader, phase, step), keys in held.items():
        sampled = held.get((ROLLOUTS, "", phase, step), {})
        graded = {who[0]: bits for who, bits in keys.items()} if grader else {}
        if missing := [who for who, bits in graded.items() if bits & ~sampled.get(who, 0)]:
            problems.append(
                f"{shown(path)} has grades by {grader} of {phase} step {step} for rollouts that are not in it, first for "
                f"{shown(missing[0])}."
            )
    trained = [(folder, *file) for folder, key in MODELS.items() for file in metadata.get(key, {}).items()]
    for folder, name, sha256 in trained:
        try:
            check_model_file(path, name, sha256, folder=folder)
        except RlvrError as error:
            problems.append(error.problem)
    rows = sum(e.rows for e in entries if e.folder == ROLLOUTS)
    points = _points_of(path, [] if unread else entries, metadata) if metadata["command"] == "discover" else set()
    problems += [problem for name in sorted(points) if (problem := _points_problem(path, name))]
    return Check(len({e.path for e in entries}) + len(trained) + len(points), rows, problems, pending)


def _points_of(run: Path, entries: Sequence[Entry], metadata: dict[str, Any]) -> set[str]:
    """The files of points/ that a search's rows name, and run.json for the program to start from."""
    tables = part_tables(run, entries, phase=None, step=None, columns=["candidate"])
    tried = [row["candidate"] for table in tables for row in table.to_pylist()]
    named = [found.get("points_sha256") for found in (*tried, metadata.get("start")) if found is not None]
    return {f"{sha256}.json" for sha256 in named if sha256 is not None}


def _points_problem(run: Path, name: str) -> str:
    """Say what is wrong with a file of points/, which is named by its sha256; empty if nothing is."""
    try:
        data = read_regular(run, f"{POINTS}/{name}")
    except RlvrError as error:
        return error.problem
    same = hashlib.sha256(data).hexdigest() == name.removesuffix(".json")
    return "" if same else damaged_file(run / POINTS / name, "its sha256 is not its name").problem


def check_trained_model(directory: Path) -> None:
    """If a directory is the final model of a run that recorded its sums, compare it with them. Raises RlvrError."""
    run = directory.parent
    if directory.name in MODELS and (run / RUN_FILE).is_file():
        refuse_links(run, directory.name)
        sums = read_metadata(run).get(MODELS[directory.name], {})
        check_sums(run, {f"{directory.name}/{_plain(run, name)}": sha256 for name, sha256 in sums.items()})


def base_sha256(directory: Path) -> str | None:
    """Return the sha256 of the weights that the adapter in a folder of a run was trained on; None if no run says so."""
    run = next((folder for folder in directory.parents[:3] if (folder / RUN_FILE).is_file()), None)
    model = (read_metadata(run).get("facts") or {}).get("model") if run is not None else None
    found = model.get("base_sha256") or model.get("sha256") if isinstance(model, dict) else None
    return found if isinstance(found, str) else None


def check_model_file(run: Path, name: str, sha256: str, *, folder: str) -> None:
    """Read a file of the final model and compare it with its sum. Raises RlvrError."""
    import hashlib

    data = read_regular(run, f"{folder}/{_plain(run, name)}")
    if hashlib.sha256(data).hexdigest() != sha256:
        raise RlvrError(f"{shown(run / folder / name)} is damaged: its sha256 is not the one in {RUN_FILE}.")


def _plain(run: Path, name: str) -> str:
    """Return the name of a file of the model, which comes from run.json and must not lead elsewhere. Raises RlvrError."""
    if Path(name).name != name or name in (".", ".."):
        raise RlvrError(f"{shown(run / RUN_FILE)} is damaged: it names {shown(name)} as a file of the model.")
    return name


def _part_problems(
    run: Path,
    entry: Entry,
    metadata: dict[str, Any],
    held: dict[tuple[str, str, str, int], KeyBits],
    *,
    seed_of: SeedOf | None,
) -> list[str]:
    """Check one part, and add its keys to `held`. Raises RlvrError if it cannot be read."""
    name, path = part_name(entry.path), run / entry.path
    assert name is not None
    data = read_regular(run, entry.path)
    if not matches(entry, data):
        return [f"{shown(path)} is damaged: its sha256 differs from the manifest."]
    table = parsed_table(data, row_type_of(entry.folder), path=path)
    found = []
    if table.num_rows != entry.rows:
        found.append(f"has {table.num_rows} rows, but the manifest says {entry.rows}")
    if (version := version_of(data)) != entry.schema_version:
        found.append(f"has schema version {version}, but the manifest says {entry.schema_version}")
    owners = set(zip(*(table[c].to_pylist() for c in ("run_id", "phase", "step")), strict=True))
    if owners != {(metadata["run_id"], entry.phase, entry.step)}:
        found.append("has rows of another run, phase or step")
    keys = keys_of(table)
    if len(keys) < table.num_rows:
        found.append("has two rows with the same key")
    try:
        fresh = bits_of_keys(keys)
    except ValueError as error:
        return [f"{shown(path)} is damaged: {printable(str(error), keep='')}."]
    committed = held.setdefault(name[:4], SpillingDict())
    if twice := overlap(committed, fresh):
        found.append(f"repeats a row of another part: {shown(str(twice[0]))}")
    merge(committed, fresh)
    if name.folder == ROLLOUTS and (broken := _broken_episode(table)):
        found.append(f"has an episode whose turns do not fit: {broken}")
    if not name.grader:
        if any(version > entry.step for version in table["policy_version"].to_pylist()):
            found.append("has rows that a later policy sampled")
        seed = metadata.get("seed")
        # A response that began in an earlier step has the seed of that step, which is the version of its policy.
        begun = name.folder == ROLLOUTS and bool((metadata.get("config") or {}).get("partial_rollout_tokens"))
        steps = table["policy_version"].to_pylist() if begun else [entry.step] * table.num_rows
        if (
            seed_of is not None
            and type(seed) is int
            and (wrong := _wrong_seeds(table, seed, entry.phase, steps, seed_of))
        ):
            found.append(f"has {wrong} rows with a seed that is not the one of their key")
    return [f"{shown(path)} {what}." for what in found]


def _broken_episode(table: "pa.Table") -> str | None:
    """What is wrong with the first episode whose turns are not its response."""
    for row in table.select(["turns", "response_mask", "num_response_tokens", "episode"]).to_pylist():
        if row["episode"] is not None:
            turns = row["turns"] and [tuple(turn.values()) for turn in row["turns"]]
            said = {"tokens": row["num_response_tokens"], "policy_tokens": row["episode"]["num_policy_tokens"]}
            if broken := broken_turns(turns, row["response_mask"], **said):
                return broken
    return None


def _wrong_seeds(table: "pa.Table", seed: int, phase: str, steps: list[int], seed_of: SeedOf) -> int:
    columns = (table[c].to_pylist() for c in ("example_id", "sample_index", "seed"))
    return sum(
        stored != seed_of(seed, phase=phase, step=step, example_id=example_id, sample_index=index)
        for step, example_id, index, stored in zip(steps, *columns, strict=True)
        if "\\ud" not in example_id  # an escaped surrogate: the seed is that of the original
    )


def _metrics_problems(run: Path, table: "pa.Table") -> list[str]:
    path = shown(run / METRICS)
    keys = list(zip(*(table[name].to_pylist() for name in ("step", "phase", "name")), strict=True))
    problems = [f"{path} has two values of one metric at one step."] if len(set(keys)) < len(keys) else []
    updates = _logged_updates(table)
    if updates and updates != list(range(updates[0], updates[-1] + 1)):
        gap = next(a + 1 for a, b in pairwise(updates) if b != a + 1)
        problems.append(f"{path} has no metrics of update {gap}.")
    return problems


def _lost_metrics(run: Path, table: "pa.Table", metadata: dict[str, Any]) -> list[str]:
    """The updates of an ended run before the first and after the last one with metrics, one sentence each."""
    logged, done = _logged_updates(table), metadata.get("updates")
    if metadata["status"] not in ENDED or type(done) is not int:
        return []
    first, last = (logged[0], logged[-1]) if logged else (done, done)
    lost = [(0, first - 1), (last + 1, done - 1)]
    named = [f"update {a}" if a == b else f"updates {a} to {b}" for a, b in lost if a <= b]
    return [f"{shown(run / METRICS)} has no metrics of {updates}." for updates in named]


def _logged_updates(table: "pa.Table") -> list[int]:
    """The updates that have metrics, in ascending order."""
    keys = zip(*(table[name].to_pylist() for name in ("step", "phase", "name")), strict=True)
    return sorted(step for step, *key in keys if key == ["train", "update/tokens"])
