"""Readers beside a writer."""

import threading

import pytest

from factories import a_rollout
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir


def make_run(root, rows=40):
    with RunDir.create(root, "eval", name="r", metadata={"seed": 0, "config": {}, "facts": {}}) as run:
        run.commit_rollouts("eval", 0, [a_rollout(example_id=str(i), response="so " * 20) for i in range(rows)])
        run.commit_metrics(0, "eval", {"reward/mean": 1.0})
    return root / "r"


@pytest.mark.slow
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
