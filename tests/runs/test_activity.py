"""What a run says of itself while it works, and when nothing moves."""

import json
import os
import re
import time
from pathlib import Path

import pytest

from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.commands.store import check
from rlvr_cli.config.store.check import CheckConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.activity import Activity
from rlvr_cli.runs.lock import Lock, holder_of
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir

ACTIVITY = "SELECT activity, activity_since <= last_progress FROM runs"


@pytest.fixture
def lock(tmp_path: Path):
    lock = Lock(tmp_path)
    yield lock
    lock.release()


def said(run: Path) -> str | None:
    holder = holder_of(run)
    assert holder is not None
    assert holder["pid"] == os.getpid()
    return holder.get("activity")


def test_the_lock_file_says_what_its_holder_does(lock: Lock, tmp_path: Path):
    activity = Activity(lock)
    assert said(tmp_path) is None
    with activity.doing("an evaluation"):
        with activity.doing("sampling", total=3, unit="responses"):
            assert said(tmp_path) == "sampling, 0 of 3 responses"
        assert said(tmp_path) == "an evaluation"
        with pytest.raises(ValueError, match="x"), activity.doing("update 2", unit="micro-batch"):
            raise ValueError("x")
        assert said(tmp_path) == "an evaluation"
    assert said(tmp_path) is None
    lock.release()
    assert holder_of(tmp_path) is None


def test_progress_is_written(lock: Lock, tmp_path: Path):
    activity = Activity(lock)
    with activity.doing("sampling", total=3, unit="responses"):
        before = holder_of(tmp_path)
        activity.progress()
        activity.progress(0)
        after = holder_of(tmp_path)
    assert before is not None
    assert after is not None
    assert after["activity"] == "sampling, 1 of 3 responses"
    assert after["last_progress"] > before["last_progress"]
    assert after["activity_since"] == before["activity_since"]


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"7", b'{"pid": 1}', b'{"pid": "x", "host": "%s"}' % os.uname().nodename.encode()]
)
def test_a_lock_file_that_says_nothing_names_nobody(tmp_path: Path, text: bytes):
    (tmp_path / ".lock").write_bytes(text)
    assert holder_of(tmp_path) is None


def test_a_killed_holder_is_none_and_a_strange_file_is_not_read(tmp_path: Path):
    gone = {"pid": 2**22 + 1, "host": os.uname().nodename, "since": "2026-01-01T00:00:00Z", "activity": "update 1"}
    (tmp_path / ".lock").write_text(json.dumps(gone))
    assert holder_of(tmp_path) is None
    (tmp_path / ".lock").write_text(json.dumps(gone | {"host": "another-machine"}))
    assert holder_of(tmp_path) == gone | {"host": "another-machine"}
    (tmp_path / ".lock").unlink()
    os.mkfifo(tmp_path / ".lock")
    assert holder_of(tmp_path) is None


def test_queries_checks_and_other_writers_see_what_a_run_does(tmp_path: Path, capsys):
    with (
        RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run,
        run.activity.doing("update 3 of 8", unit="micro-batch"),
    ):
        with open_runs([read_run(run.path)]) as database:
            assert database.select(ACTIVITY).rows == [("update 3 of 8, micro-batch 0", True)]
        check.run(CheckConfig(runs=(str(run.path),)))
        assert f"it is being written by process {os.getpid()} on " in (said := capsys.readouterr().err)
        assert ": update 3 of 8, micro-batch 0, since 20" in said
        with pytest.raises(RlvrError, match=r"is being written by process .*: update 3 of 8"):
            RunDir.resume(run.path)
    check.run(CheckConfig(runs=(str(run.path),)))
    assert "written by" not in capsys.readouterr().err
    with open_runs([read_run(run.path)]) as database:
        assert database.select(ACTIVITY).rows == [(None, None)]


def notes(capsys, *, until: int) -> list[str]:
    """The lines on stderr, once there are so many."""
    lines, deadline = [], time.monotonic() + 30
    while len(lines) < until and time.monotonic() < deadline:
        lines += capsys.readouterr().err.splitlines()
        time.sleep(0.01)
    return lines


def test_a_note_says_that_nothing_moves_and_who_gives_no_sign_of_life(lock: Lock, capsys):
    activity = Activity(lock)
    with activity.watched(minutes=0.2 / 60), activity.doing("sampling", total=3, unit="responses"):
        activity.late = lambda: ["trainer 1", "trainer 3"]
        activity.progress()
        first, second = notes(capsys, until=2)
        for note in (first, second):
            assert re.match(r"note: no progress for \d+ s: sampling, 1 of 3 responses, since 20", note)
            assert note.endswith("Z; no sign of life from trainer 1, trainer 3")
        activity.progress()
        (on,) = notes(capsys, until=1)
        assert re.fullmatch(r"it goes on after \d+ s: sampling, 2 of 3 responses", on)


@pytest.mark.slow
def test_nothing_is_said_while_it_moves_or_if_it_is_not_wanted(lock: Lock, capsys):
    activity = Activity(lock)
    with activity.watched(minutes=2.0 / 60), activity.doing("sampling", unit="responses"):
        for _ in range(60):
            activity.progress()
            time.sleep(0.05)
    with activity.watched(minutes=0.0), activity.doing("sampling", unit="responses"):
        time.sleep(0.3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "text", ["[" * 20_000, '{"pid": "x", "host": "elsewhere"}', '{"pid": 1, "host": "elsewhere"}', "[]", "null", ""]
)
def test_an_odd_lock_names_nobody(tmp_path, text):
    (tmp_path / ".lock").write_text(text)
    assert holder_of(tmp_path) is None
