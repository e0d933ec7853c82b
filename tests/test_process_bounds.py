"""Queries that escape DuckDB's own limits end the process without changing the run."""

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from factories import a_rollout
from rlvr_cli.analysis.database import open_runs
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir

ROOT = Path(__file__).parents[1]


def make_run(root, rows=40):
    with RunDir.create(root, "eval", name="r", metadata={"seed": 0, "config": {}, "facts": {}}) as run:
        run.commit_rollouts("eval", 0, [a_rollout(example_id=str(i), response="so " * 20) for i in range(rows)])
        run.commit_metrics(0, "eval", {"reward/mean": 1.0})
    return root / "r"


def digest_of(run):
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(run.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    "bomb",
    [
        "select list_sum(range(300000000))",
        "select length(repeat('ab', 1000000000))",
        "select levenshtein(repeat('a', 100000), repeat('b', 100000))",
        "select max(levenshtein(response || repeat('a', 30000), repeat('b', 30000))) from rollouts",
        "select list(range) from range(1000000000)",
        "select count(*) from range(1000000000000)",
    ],
)
def test_a_bomb_is_stopped_and_the_run_is_untouched(tmp_path, bomb):
    run = make_run(tmp_path / "runs")
    before = digest_of(run)
    done = subprocess.run(
        [sys.executable, "-m", "rlvr_cli", "analyze", bomb, "r", "--timeout-seconds", "1"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "error: The query" in done.stderr
    assert digest_of(run) == before


def test_readers_see_consistent_metrics_during_writes(tmp_path):
    """While metrics are replaced continuously, a reader always sees one complete version, never older than the previous."""
    make_run(tmp_path)
    stop, wrong = threading.Event(), []

    def read():
        newest = 0.0
        while not stop.is_set():
            try:
                with open_runs([read_run(tmp_path / "r")]) as database:
                    ((value, rows),) = database.select("select max(value), count(*) from metrics where name = 'n'").rows
                    if rows and (value < newest or rows != value):
                        wrong.append((value, rows, newest))
                    newest = value or newest
            except Exception as e:
                wrong.append(e)

    reader = threading.Thread(target=read)
    with RunDir.resume(tmp_path / "r") as run:
        reader.start()
        for step in range(1, 301):
            run.commit_metrics(step, "train", {"n": float(step)})
        stop.set()
        reader.join()
    assert wrong == []
