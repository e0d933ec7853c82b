"""What a training command prints when its run has ended."""

import duckdb
import pytest

from factories import a_rollout
from rlvr_cli.analysis.run_end import print_findings
from rlvr_cli.analysis.summary import summarize
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.terminal.tables import print_tables


@pytest.fixture
def run(tmp_path):
    """A run whose grader has failed, with the answers to two questions, a thousand each."""
    with RunDir.create(tmp_path, "grpo", name="s", metadata={}) as run:
        rows = [
            a_rollout(run_id="s", phase="eval", step=0, example_id=q, sample_index=i, extracted_answer=str(i % 5))
            for q in "ab"
            for i in range(1000)
        ]
        run.commit_rollouts("eval", 0, rows)
        run.commit_metrics(1, "train", {"reward/samples": 4.0, "reward/grade_errors": 4.0})
    return tmp_path / "s"


@pytest.fixture
def connections(monkeypatch):
    """The limits on memory of the databases that are opened."""
    opened, connect = [], duckdb.connect

    def counted(*arguments, config):
        opened.append(config["memory_limit"])
        return connect(*arguments, config=config)

    monkeypatch.setattr(duckdb, "connect", counted)
    return opened


def test_alarms_and_the_summary_share_a_database(run, connections, capsys):
    print_findings(run, step=0, output="table")
    told = capsys.readouterr()
    assert "grade" in told.err
    assert "pass_at_k" in told.out
    assert connections == ["48MB"]


def test_without_an_evaluation_there_are_alarms_alone(run, connections, capsys):
    for part in (run / "rollouts").iterdir():
        part.write_bytes(bytes(part.stat().st_size))  # no rollouts are read
    print_findings(run, step=None, output="table")
    told = capsys.readouterr()
    assert "grade" in told.err
    assert told.out == ""
    assert connections == ["48MB"]


def test_alarms_are_told_once_if_the_summary_needs_more_memory(run, connections, capsys, monkeypatch):
    print_findings(run, step=0, output="table")
    expected = capsys.readouterr()
    monkeypatch.setattr("rlvr_cli.analysis.queries.database.SPILLING_MB", 1)
    print_findings(run, step=0, output="table")
    assert capsys.readouterr() == expected
    assert connections == ["48MB", "1MB", "2GB"]


def test_what_is_told_reads_the_parts_of_the_last_evaluation_alone(tmp_path, capsys):
    with RunDir.create(tmp_path, "grpo", name="s", metadata={}) as run:
        for step in range(2):
            for phase in ("train", "eval"):
                rows = [a_rollout(run_id="s", phase=phase, step=step, reward=float(step))]
                run.commit_rollouts(phase, step, rows)
        run.commit_metrics(1, "train", {"reward/samples": 4.0, "reward/grade_errors": 4.0})
    print_tables(summarize(tmp_path / "s", step=1).tables(), output="table")
    expected = capsys.readouterr().out
    for part in {*(tmp_path / "s" / "rollouts").iterdir()} - {tmp_path / "s/rollouts/eval-000001-0000.parquet"}:
        part.write_bytes(bytes(part.stat().st_size))
    print_findings(tmp_path / "s", step=1, output="table")
    told = capsys.readouterr()
    assert told.out == expected
    assert "4 of 4 training responses could not be graded" in told.err
