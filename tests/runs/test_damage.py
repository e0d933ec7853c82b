"""The run store after a kill, a flipped byte, a hand that changed it, and on a disk that is full or cannot be written."""

import json
import os
import random
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import factories
import rlvr_cli
from checks import findings
from rlvr_cli import faults
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.lock import Lock
from rlvr_cli.runs.readers import (
    metadata_bytes,
    read_metadata,
    read_rollouts,
    read_run,
)
from rlvr_cli.runs.recovery import remove_unmade
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.files import atomic_write
from rlvr_cli.types import SCHEMA_VERSION
from stores import a_grade, a_rollout, as_killed, metrics_of, some_rollouts, tree

SOURCE = Path(rlvr_cli.__file__).parents[1]


@pytest.mark.parametrize("more", ["a line that is there already", "half a line"])
def test_a_finished_run_with_more_than_it_recorded_is_damaged(finished: Path, more: str):
    manifest = finished / "manifest.jsonl"
    data = manifest.read_bytes()
    last = data.splitlines(keepends=True)[-1]
    manifest.write_bytes(data + (last if more.startswith("a") else last[:-20]))
    for read in (read_run, RunDir.resume, RunDir.annotate):
        with pytest.raises(RlvrError, match="it is not the manifest of 3 parts with 9 rollouts"):
            read(finished)


@pytest.mark.parametrize("record", [1.5, "x", [], {}, {"parts": "3", "manifest_bytes": 1.5}, True])
def test_a_record_of_another_kind_is_damage(finished: Path, record):
    metadata = read_metadata(finished) | {"committed": record}
    (finished / "run.json").write_bytes(metadata_bytes(metadata))
    for read in (read_run, RunDir.resume, RunDir.annotate):
        with pytest.raises(RlvrError, match=r"committed is not an object|it is not the manifest of"):
            read(finished)


# Damage by a kill or by hand


def test_a_manifest_torn_at_any_byte_of_its_last_line_loses_nothing(tmp_path: Path):
    with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
        run.commit_rollouts("train", 0, some_rollouts(run))
        whole = (run.path / "manifest.jsonl").read_bytes()
        run.commit_rollouts("train", 1, some_rollouts(run, step=1))
        both = (run.path / "manifest.jsonl").read_bytes()
    as_killed(run.path)
    for end in range(len(whole), len(both), 61):
        copy = tmp_path / f"copy-{end}"
        shutil.copytree(run.path, copy)
        (copy / "manifest.jsonl").write_bytes(both[:end])
        assert read_rollouts(copy).num_rows == 3  # the second commit was not acknowledged
        with RunDir.resume(copy) as resumed:
            assert len(resumed.committed_keys()) == 6  # but its part is whole
            assert any("incomplete line" in n for n in resumed.notices) == (end > len(whole))
            assert any("has been adopted" in n for n in resumed.notices)
        assert (copy / "manifest.jsonl").read_bytes() == both
        assert findings(copy) == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "line 3"),
        (b"", "line 3"),
        (b"[]", "not a JSON object"),
        (b"{}", "keys"),
        (b"\xff\xfe", "line 3"),
        (b"[" * 100_000, "line 3"),
        ("rollouts/../../secret.parquet", "not the path of a part"),
        ("/etc/passwd", "not the path of a part"),
        ("rollouts/train-000000-0000.parquet", "is listed twice"),
        ("rollouts/eval-000000-0000.parquet", "not the path of a part"),
        ("rollouts/train-000009-0000.parquet", "not the path of a part"),
        ("rollouts/train-000000-0000.parquet\n", "not the path of a part"),
        ("run.json", "not the path of a part"),
        (("rows", "3"), "rows is"),
        (("step", True), "step is"),
        (("schema_version", SCHEMA_VERSION + 1), "newer rlvr"),
        (("schema_version", 0), "schema_version is 0"),
    ],
)
def test_a_bad_line_of_the_manifest_is_named(finished: Path, line: bytes | str | tuple, reason: str):
    manifest = finished / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines()
    entry = json.loads(lines[2])
    if isinstance(line, str):
        line = json.dumps(entry | {"path": line}).encode()
    elif isinstance(line, tuple):
        line = json.dumps(entry | {line[0]: line[1]}).encode()
    lines[2] = line
    manifest.write_bytes(b"\n".join(lines) + b"\n")
    for read in (read_run, read_rollouts, RunDir.resume):
        with pytest.raises(RlvrError, match=re.escape(reason)) as caught:
            read(finished)
        assert "newer" in str(caught.value) or "manifest.jsonl" in str(caught.value)
    assert any(reason in problem for problem in findings(finished))


@pytest.mark.parametrize("name", ["run.json", "manifest.jsonl"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff", b"null", b"[" * 100_000])
def test_a_missing_or_broken_index_is_named(finished: Path, name: str, content: bytes | None):
    file = finished / name
    file.unlink()
    if content is not None:
        file.write_bytes(content + b"\n")
    for read in (read_run, read_rollouts, RunDir.resume):
        with pytest.raises(RlvrError, match=re.escape(str(file))):
            read(finished)
    assert any(str(file) in problem for problem in findings(finished))


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": SCHEMA_VERSION + 1},
        {"schema_version": 0},
        {"schema_version": "1"},
        {"run_id": "../x"},
        {"run_id": 3},
        {"created_at": None},
        {"config": None},
        {"facts": [1]},
        {"sampler": "x"},
        {"model_files": [1]},
        {"merged_model_files": 5},
        {"wall_seconds": "1"},
        {"wall_seconds": float("inf")},
        {"facts": {"x": [float("nan")]}},
    ],
)
def test_an_invalid_run_json_is_rejected(finished: Path, change: dict):
    file = finished / "run.json"
    file.write_text(json.dumps(read_metadata(finished) | change))  # without a sha256, which would be the problem
    with pytest.raises(RlvrError, match=re.escape(str(finished))):
        read_run(finished)


def test_any_flipped_byte_of_a_part_is_detected(finished: Path):
    part = finished / "rollouts" / "train-000000-0001.parquet"
    data = part.read_bytes()
    generator = random.Random(0)
    for position in [0, len(data) - 1, *generator.sample(range(len(data)), 12)]:
        broken = bytearray(data)
        broken[position] ^= 1 << generator.randrange(8)
        part.write_bytes(broken)
        assert [p for p in findings(finished) if str(part) in p] == findings(finished) != []
        with pytest.raises(RlvrError, match=re.escape(str(part))):
            read_rollouts(finished)
        read_rollouts(finished, phase="eval")  # the other parts are intact
    part.write_bytes(data)
    assert findings(finished) == []


def test_any_flipped_byte_of_the_metrics_is_detected(finished: Path):
    file = finished / "metrics.parquet"
    data = file.read_bytes()
    for position in range(0, len(data), 997):
        broken = bytearray(data)
        broken[position] ^= 64
        file.write_bytes(broken)
        (problem,) = findings(finished)
        assert str(file) in problem
        manifest = (finished / "manifest.jsonl").read_bytes()
        with pytest.raises(RlvrError, match=re.escape(str(file))):
            RunDir.resume(finished)
        assert (finished / "manifest.jsonl").read_bytes() == manifest
    file.write_bytes(data)
    assert findings(finished) == []


@pytest.mark.parametrize("change", ["truncate", "empty", "delete", "link", "directory", "fifo", "link to itself"])
def test_a_missing_or_truncated_part_is_named(finished: Path, tmp_path: Path, change: str):
    part = finished / "rollouts" / "eval-000001-0000.parquet"
    data = part.read_bytes()
    part.unlink()
    if change == "truncate":
        part.write_bytes(data[:-1])
    elif change == "empty":
        part.touch()
    elif change == "link":
        (tmp_path / "elsewhere.parquet").write_bytes(data)
        part.symlink_to(tmp_path / "elsewhere.parquet")
    elif change == "directory":
        part.mkdir()
    elif change == "fifo":
        os.mkfifo(part)
    elif change == "link to itself":
        part.symlink_to(part)
    for read in (read_run, read_rollouts, RunDir.resume):
        with pytest.raises(RlvrError, match=re.escape(str(part))):
            read(finished)
    assert any(str(part) in problem for problem in findings(finished))


@pytest.mark.parametrize("name", ["rollouts", "run.json", "manifest.jsonl", "metrics.parquet", ".lock"])
def test_links_within_a_run_are_rejected(finished: Path, tmp_path: Path, name: str):
    (finished / name).rename(tmp_path / "moved")
    (finished / name).symlink_to(tmp_path / "moved")
    before = tree(tmp_path)
    with pytest.raises(RlvrError, match=re.escape(str(finished / name))):
        RunDir.resume(finished)
    if name != ".lock":  # readers ignore the lock
        with pytest.raises(RlvrError, match="symbolic link"):
            read_run(finished)
        assert any("symbolic link" in problem for problem in findings(finished))
    assert tree(tmp_path) == before


def test_a_complete_part_missing_from_the_manifest_is_adopted(finished: Path):
    manifest = finished / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines(keepends=True)
    as_killed(finished)
    manifest.write_bytes(b"".join(lines[:3]))  # as after a kill between the rename and the line of eval-000001
    assert len(read_run(finished).parts) == 2
    assert any("eval-000001-0000.parquet is not in the manifest" in p for p in findings(finished))
    # metrics.parquet was announced on a line that is gone: done by hand, not by a kill.
    (finished / "metrics.parquet").unlink()
    with RunDir.resume(finished) as run:
        assert run.committed_keys("eval", 1) == {("eval", 1, f"q{i}", 0) for i in range(3)}
        assert any("eval-000001-0000.parquet" in n and "has been adopted" in n for n in run.notices)
        assert any("metrics.parquet was missing" in n for n in run.notices)
        run.commit_metrics(1, "eval", {"reward/mean": 1.0})
    assert manifest.read_bytes().count(b"eval-000001-0000.parquet") == 1
    assert findings(finished) == []
    assert metrics_of(finished) == {(1, "eval", "reward/mean"): 1.0}


def test_parts_that_cannot_belong_to_the_run_are_set_aside(finished: Path, tmp_path: Path):
    rollouts = finished / "rollouts"
    with RunDir.create(tmp_path / "other", "grpo", name="other", metadata={}) as other:
        foreign = other.commit_rollouts("train", 0, some_rollouts(other))
    strangers = {
        "train-000000-0002.parquet": (rollouts / "train-000000-0000.parquet").read_bytes(),  # existing keys
        "train-000000-0003.parquet": foreign.read_bytes(),
        "train-000005-0000.parquet": (rollouts / "train-000000-0000.parquet").read_bytes(),  # rows of step 0
        "train-000006-0000.parquet": b"",
        "train-000007-0000.parquet": (rollouts / "train-000000-0000.parquet").read_bytes()[:-1],
        "mine.parquet": (rollouts / "train-000000-0000.parquet").read_bytes(),
    }
    pq.write_table(pa.table({"a": [1]}), rollouts / "eval-000009-0000.parquet")
    strangers["eval-000009-0000.parquet"] = (rollouts / "eval-000009-0000.parquet").read_bytes()
    for name, data in strangers.items():
        (rollouts / name).write_bytes(data)
    for leftover in (rollouts / ".train-000008-0000.parquet.tmp", finished / ".run.json.tmp"):
        leftover.write_bytes(b"half")
    with RunDir.resume(finished) as run:
        assert len(run.notices) == len(strangers)
        for name in strangers:
            assert any(name in notice and "set-aside" in notice for notice in run.notices)
        assert len(run.committed_keys()) == 9
        run.commit_rollouts("train", 0, [a_rollout(run.id, 7)])
    assert {p.name: p.read_bytes() for p in (finished / "set-aside").iterdir()} == {
        f"0-{name}": data for name, data in strangers.items()
    }
    assert not list(finished.rglob(".*.tmp"))
    assert findings(finished) == []
    assert duckdb.connect().execute(f"select count(*) from read_parquet('{rollouts}/*.parquet')").fetchall() == [(10,)]


def test_no_directory_scan_matches_the_temporary_name(run: RunDir):
    import pyarrow.dataset as ds

    run.commit_rollouts("train", 0, some_rollouts(run))
    (run.path / "rollouts" / ".train-000001-0000.parquet.tmp").write_bytes(b"PAR1 half a file")
    assert ds.dataset(run.path / "rollouts", format="parquet").count_rows() == 3
    glob = f"{run.path}/rollouts/*.parquet"
    assert duckdb.connect().execute(f"select count(*) from read_parquet('{glob}')").fetchall() == [(3,)]


def test_an_announcement_of_metrics_without_its_file_is_removed(finished: Path):
    as_killed(finished)
    manifest = finished / "manifest.jsonl"
    before = manifest.read_bytes()
    announcement = json.loads(before.splitlines()[-1]) | {"sha256": "0" * 64}
    assert announcement["path"] == "metrics.parquet"
    manifest.write_bytes(before + json.dumps(announcement).encode() + b"\n")
    assert findings(finished) == []  # as while the writer is between the line and the rename
    with RunDir.resume(finished):
        assert manifest.read_bytes() == before
    as_killed(finished)
    # Two announcements without their file cannot come from a kill.
    manifest.write_bytes(before + 2 * (json.dumps(announcement).encode() + b"\n"))
    assert len(findings(finished)) == 1
    with pytest.raises(RlvrError, match=r"metrics\.parquet is damaged"):
        RunDir.resume(finished)


@pytest.mark.parametrize("moment", ["between commits", "before the rename", "after the rename"])
def test_a_run_that_is_moved_while_it_is_written_goes_on_where_it_is(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, moment: str
):
    new, rename = run.path.with_name("moved"), os.replace
    for step in (0, 1):
        run.commit_metrics(step, "train", {"loss": 1.0})

    def moved(source: Path, target: Path) -> None:
        if moment == "before the rename":
            run.path.rename(new)
        rename(source, target)
        run.path.rename(new)

    if moment == "between commits":
        run.path.rename(new)
    else:
        monkeypatch.setattr(os, "replace", moved)
        with pytest.raises(RlvrError, match=r"Cannot write .*metrics\.parquet"):
            run.commit_metrics(2, "train", {"loss": 1.0})
        monkeypatch.undo()
    for step in (2, 3):
        with pytest.raises(RlvrError, match="a-run was moved or deleted while it was being written") as caught:
            run.commit_metrics(step, "train", {"loss": 1.0})
    assert "--resume" in caught.value.hint
    new.rename(run.path)
    if moment != "between commits":
        with pytest.raises(RlvrError, match=r"manifest\.jsonl ends with a line whose file may not have been written"):
            run.commit_rollouts("train", 2, some_rollouts(run, step=2))
    run.path.rename(new)
    run.close()
    assert findings(new) == []
    assert {step for step, *_ in metrics_of(new)} == ({0, 1, 2} if moment == "after the rename" else {0, 1})
    with RunDir.resume(new) as resumed:
        resumed.commit_metrics(2, "train", {"loss": 1.0})
    assert findings(new) == []


@pytest.mark.parametrize("opened", [RunDir.resume, RunDir.annotate])
def test_a_run_that_is_moved_while_it_is_written_leaves_the_one_alone_that_has_its_place(run: RunDir, opened):
    """Neither grades nor its end are written there, and the space that is held for that one stays held."""
    run.commit_rollouts("train", 0, some_rollouts(run))
    run.close()  # as if killed, so that it is running
    moved, new = opened(run.path), run.path.with_name("moved")
    run.path.rename(new)
    with RunDir.create(run.path.parent, "eval", name=run.path.name, metadata={}) as other:
        before = tree(other.path)
        with pytest.raises(RlvrError, match="a-run was moved or deleted while it was being written"), moved:
            moved.commit_grades("train", 0, [a_grade(run.id)])
        assert tree(other.path) == before
    assert findings(run.path) == findings(new) == []


# A disk that is full, read-only, or limited


FAULTY_POINTS = ("write", "write.torn", "rename", "renamed", "manifest", "manifest.torn")


@pytest.mark.parametrize("point", FAULTY_POINTS)
def test_a_full_disk_at_any_point_of_a_commit_changes_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch, point: str):
    run.commit_rollouts("train", 0, some_rollouts(run))
    run.commit_metrics(0, "train", {"loss": 1.0})
    before = tree(run.path)
    more = some_rollouts(run, step=1)
    with monkeypatch.context() as patch:
        patch.setenv("RLVR_FAULT", f"{point}:1:enospc")
        with pytest.raises(RlvrError, match=r"Cannot write .*(train-000001|manifest).*No space left") as caught:
            run.commit_rollouts("train", 1, more)
    assert "Free some space" in caught.value.hint
    assert tree(run.path) == before
    faults.fault_point("")  # without the variable the count starts again from one
    with monkeypatch.context() as patch:
        patch.setenv("RLVR_FAULT", f"{point}:1:enospc")
        with pytest.raises(RlvrError, match=r"(metrics|manifest).*No space left"):
            run.commit_metrics(1, "train", {"loss": 2.0})
    if point != "renamed":
        assert tree(run.path) == before
    assert findings(run.path) == []
    faults.fault_point("")
    with monkeypatch.context() as patch:
        patch.setenv("RLVR_FAULT", f"{point}:1:enospc")
        with pytest.raises(RlvrError, match=r"(grades|manifest).*No space left"):
            run.commit_grades("train", 0, [a_grade(run.id)])
    assert findings(run.path) == []
    run.commit_grades("train", 0, [a_grade(run.id)])
    run.commit_rollouts("train", 1, more)  # once there is space again, the same process continues
    run.commit_metrics(1, "train", {"loss": 3.0})
    assert metrics_of(run.path) == {(0, "train", "loss"): 1.0, (1, "train", "loss"): 3.0}
    assert findings(run.path) == []
    run.close()
    with RunDir.resume(run.path) as resumed:
        assert len(resumed.committed_keys()) == 6
        assert resumed.notices == []


@pytest.mark.parametrize("point", ["create", "write", "write.torn", "rename"])
def test_a_run_that_cannot_be_created_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str):
    with monkeypatch.context() as patch:
        patch.setenv("RLVR_FAULT", f"{point}:1:enospc")
        with pytest.raises(RlvrError, match="No space left"):
            RunDir.create(tmp_path, "eval", name="r", metadata={})
    assert list(tmp_path.iterdir()) == []
    RunDir.create(tmp_path, "eval", name="r", metadata={}).close()


def test_directories_of_runs_that_were_killed_as_they_were_made_are_removed(tmp_path: Path):
    """Those that a process makes at this moment stay, with and without its lock, and so does what has another name."""
    killed, locked, unlocked = (f".a-b.{pid}-0123abcd.tmp" for pid in (1, 2, 3))
    others = (".a-b.tmp", ".a b.4-0123abcd.tmp", "a-b.5-0123abcd.tmp")
    for name in (killed, *others):
        (tmp_path / name / "rollouts").mkdir(parents=True)
        (tmp_path / name / ".lock").write_text("{}")  # the killed process had the lock
    for name in (unlocked, locked, left := ".a-b.6-0123abcd.tmp"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / left, times=(0, 0))  # killed before it had the lock
    lock = Lock(tmp_path / locked)
    RunDir.create(tmp_path, "eval", name="r", metadata={}).close()
    assert set(os.listdir(tmp_path)) == {"r", locked, unlocked, *others}
    lock.release()
    RunDir.create(tmp_path, "eval", name="r2", metadata={}).close()
    assert (tmp_path / locked).exists()  # given back: its process removes it, or makes it the run


def test_a_process_that_gives_a_directory_back_is_not_taken_for_a_killed_one(tmp_path: Path):
    """Another one looks at that moment, again and again: it would remove the directory under its hands."""
    ended = threading.Event()

    def create() -> None:
        while not ended.is_set():
            remove_unmade(tmp_path)

    other = threading.Thread(target=create)
    other.start()
    try:
        for number in range(300):
            directory = tmp_path / f".r.1-{number:08x}.tmp"
            directory.mkdir()
            Lock(directory).release()
            shutil.rmtree(directory)  # raises if something in it is gone
    finally:
        ended.set()
        other.join()


@pytest.mark.parametrize("point", ["write", "write.torn", "rename"])
def test_run_json_survives_a_full_disk(run: RunDir, monkeypatch: pytest.MonkeyPatch, point: str):
    before = tree(run.path)
    with monkeypatch.context() as patch:
        patch.setenv("RLVR_FAULT", f"{point}:1:enospc")
        run.update(note="new")  # in the space that was reserved
    assert tree(run.path).keys() == before.keys()
    assert read_run(run.path).metadata["note"] == "new"


def test_a_full_disk_does_not_hide_the_original_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def work() -> None:
        with RunDir.create(tmp_path, "eval", name="r", metadata={}):
            monkeypatch.setenv("RLVR_FAULT", "write:1:enospc")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    monkeypatch.delenv("RLVR_FAULT")
    RunDir.resume(tmp_path / "r").close()  # the lock was released


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 256 KB."""
    directory = Path(tempfile.mkdtemp())
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory)]
    try:
        mounted = shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0
        if not mounted:
            pytest.skip("mounting a tmpfs takes root")
        yield directory
        subprocess.run(["umount", str(directory)], check=True)
    finally:
        directory.rmdir()


def test_a_disk_that_fills_up_keeps_what_was_committed(small_disk: Path):
    noise = random.Random(0)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(64 * 1024))
    run = RunDir.create(small_disk, "grpo", name="r", metadata={})
    committed = 0

    def fill() -> None:
        nonlocal committed
        while True:
            text = "".join(chr(noise.randrange(32, 0x2000)) for _ in range(3000))
            run.commit_rollouts("train", committed, [a_rollout(run.id, step=committed, response=text)])
            committed += 1

    with pytest.raises(RlvrError, match=rf"Cannot write {run.path}.*No space left on device") as caught:
        fill()
    assert caught.value.hint == "Free some space on that disk."
    assert committed > 3
    for _ in range(3):  # fill the last bytes, then fail
        with pytest.raises(RlvrError, match="No space left"):
            run.update(note="x" * 50_000)
        assert findings(run.path) == []
        assert not list(run.path.rglob("*.tmp"))
        assert read_rollouts(run.path)["step"].to_pylist() == list(range(committed))
    ballast.unlink()
    run.commit_metrics(0, "train", {"loss": 1.0})
    run.finish("finished")
    run.close()
    assert findings(run.path) == []
    with RunDir.resume(run.path) as run:
        assert len(run.committed_keys()) == committed


FILE_LIMIT = """
import resource, sys
sys.path[:0] = sys.argv[2:]
import stores
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.run_dir import RunDir
run = RunDir.create(sys.argv[1], "eval", name="r", metadata={})
run.commit_rollouts("train", 0, stores.some_rollouts(run))
resource.setrlimit(resource.RLIMIT_FSIZE, (24_000, 24_000))
try:
    text = "".join(chr(i) for i in range(32, 0xD000))
    run.commit_rollouts("train", 1, [stores.a_rollout(run.id, step=1, response=text)])
except RlvrError as error:
    print(error)
run.commit_rollouts("train", 2, [stores.a_rollout(run.id, step=2)])
"""


def test_a_file_size_limit_is_reported_like_a_full_disk(tmp_path: Path):
    paths = [SOURCE, Path(factories.__file__).parent]
    command = [sys.executable, "-c", FILE_LIMIT, str(tmp_path), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(r"Cannot write .*train-000001-0000\.parquet: File too large", done.stdout)
    assert "ulimit" in done.stdout
    assert findings(tmp_path / "r") == []
    assert read_rollouts(tmp_path / "r", columns=["step"])["step"].to_pylist() == [0, 0, 0, 2]
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A directory of this process, which drops root for the test, because root may write anywhere."""
    directory = Path(tempfile.mkdtemp())
    user = os.geteuid()
    if user == 0:
        os.chown(directory, 65534, -1)
        os.seteuid(65534)
    yield directory
    os.seteuid(user)
    for path in [directory, *directory.rglob("*")]:
        path.chmod(stat.S_IRWXU)
    shutil.rmtree(directory)


def test_a_directory_that_cannot_be_written_is_named(unprivileged: Path):
    with RunDir.create(unprivileged, "eval", name="r", metadata={}) as run:
        run.commit_rollouts("train", 0, some_rollouts(run))
    unprivileged.chmod(0o555)
    with pytest.raises(RlvrError, match=rf"Cannot write {unprivileged}/s: Permission denied") as caught:
        RunDir.create(unprivileged, "eval", name="s", metadata={})
    assert "--runs-dir" in caught.value.hint
    with pytest.raises(RlvrError, match=rf"Cannot write {unprivileged}/deeper: Permission denied"):
        RunDir.create(unprivileged / "deeper", "eval", metadata={})
    for path in (run.path, run.path / "rollouts"):
        path.chmod(0o555)
    for path in run.path.iterdir():
        if path.is_file():
            path.chmod(0o444)
    with pytest.raises(RlvrError, match=r"Cannot write .*\.lock: Permission denied"):
        RunDir.resume(run.path)
    assert read_rollouts(run.path).num_rows == 3  # reading takes no lock
    assert findings(run.path) == []


def test_each_write_is_durable_before_the_next_step_relies_on_it(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    """A power failure cannot be tested, but the order of the system calls can."""
    calls = []
    fsync, rename, manifest = os.fsync, os.replace, os.stat(run.path / "manifest.jsonl").st_ino

    def spied_fsync(descriptor: int) -> None:
        state = os.fstat(descriptor)
        kind = "manifest" if state.st_ino == manifest else "directory" if stat.S_ISDIR(state.st_mode) else "file"
        calls.append((f"fsync {kind}", state.st_size if kind == "file" else 0))
        fsync(descriptor)

    def spied_rename(source: Path, target: Path) -> None:
        calls.append(("replace", Path(source).stat().st_size))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", spied_fsync)
    monkeypatch.setattr(os, "replace", spied_rename)
    atomic_write(run.path / "x", b"whole")
    assert calls == [("fsync file", 5), ("replace", 5), ("fsync directory", 0)]
    assert (run.path / "x").read_bytes() == b"whole"
    calls.clear()
    size = run.commit_rollouts("train", 0, some_rollouts(run)).stat().st_size
    assert calls == [("fsync file", size), ("replace", size), ("fsync directory", 0), ("fsync manifest", 0)]
    calls.clear()
    run.commit_metrics(0, "train", {"loss": 1.0})
    assert [name for name, _ in calls] == ["fsync manifest", "fsync file", "replace", "fsync directory"]
