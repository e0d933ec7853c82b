"""What commands print at their end: its queries have the time that a summary at the end has, since nobody can give them more."""

from dataclasses import replace

import pytest

from factories import a_rollout
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.analysis.statistics import alarms, pairwise, sweep_table
from rlvr_cli.commands import pairwise as comparing
from rlvr_cli.commands import sweep
from rlvr_cli.commands.evaluation import result
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.data.datasets import Dataset
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.sweeps.experiment import Experiment, SweepRun
from rlvr_cli.sweeps.stage import Sweep

ENDLESS = "SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range + b.range = 1"


@pytest.fixture
def stage(tmp_path):
    for name in "rs":
        with RunDir.create(tmp_path, "eval", name=name, metadata={}) as run:
            run.commit_rollouts("eval", 0, [a_rollout(run_id=name)])
            run.commit_metrics(0, "eval", {"reward/mean": 1.0})
            run.finish("finished")
    experiment = Experiment("e", "eval", options={}, arms=[{}], names=["a"], seeds=[0])
    return Sweep(experiment, tmp_path, [SweepRun("r", "a", 0, {})], [])


def test_runs_that_were_never_evaluated_have_a_report_all_the_same(tmp_path, capsys):
    for name in "ab":
        with RunDir.create(tmp_path, "grpo", name=name, metadata={}) as run:
            for step in (1, 2):
                run.commit_metrics(step, "train", {"train/token_entropy": 1.0, "loss/objective": 0.5})
            run.finish("finished")
    experiment = Experiment("e", "grpo", options={}, arms=[{}, {}], names=["a", "b"], seeds=[0], baseline="a")
    stage = Sweep(experiment, tmp_path, [SweepRun("a", "a", 0, {}), SweepRun("b", "b", 0, {})], [])
    (arms,) = sweep.results(stage, [])
    assert [(row["arm"], row["accuracy"], row["updates"]) for row in arms.records()] == [
        ("a", None, None),
        ("b", None, None),
    ]
    assert sweep.reached_by(stage) == {}, "none goes on to a later stage for what it has not"
    said = "b is not compared with a: a has no eval rollouts."
    assert said in capsys.readouterr().err
    assert said in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("command", ["grpo", "eval"])
def test_what_limits_a_comparison_is_said_as_compare_says_it(tmp_path, capsys, command):
    for name in "ab":
        with RunDir.create(tmp_path, command, name=name, metadata={}) as run:
            failed = {"reward": None, "grade_error": "timeout"} if name == "b" else {}
            rows = [
                a_rollout(run_id=name, example_id=f"q{i}", prompt=name, **failed)
                for i in range(2 if name == "a" else 1)
            ]
            run.commit_rollouts("eval", 0, rows)
            run.finish("finished")
    experiment = Experiment("e", command, options={}, arms=[{}, {}], names=["a", "b"], seeds=[0], baseline="b")
    stage = Sweep(experiment, tmp_path, [SweepRun("a", "a", 0, {}), SweepRun("b", "b", 0, {})], [])
    sweep.results(stage, [])
    told = capsys.readouterr().err
    expected = [
        "a and b are compared on what both have, 1 questions: 1 of a and 0 of b are left out.",
        "Failed grades of b, which count as wrong: 1.",
        "The prompts of 1 of the 1 questions differ between the runs.",
    ]
    for sentence in expected:
        assert sentence in told
        assert sentence in (tmp_path / "report.md").read_text()
    assert ("One run an arm: how much training with another seed" in told) is (command == "grpo")
    sweep.results(stage, ["b"])
    assert "No arm is compared: of b, the baseline, no run is finished." in capsys.readouterr().err


ENDS = {
    "of a sweep": (sweep, sweep_table, "_ACCURACY", lambda stage: sweep.results(stage, [])),
    "of a stage": (sweep, sweep_table, "_ACCURACY", sweep.reached_by),
    "report of a sweep": (sweep, alarms, "_CURVES", lambda stage: sweep.results(stage, [])),
    "of pairs": (comparing, pairwise, "_ROWS", lambda s: comparing.report(s.folder / "r", output="json")),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_queries_at_an_end_have_their_own_time(stage, monkeypatch, end):
    ending, asking, query, finish = ENDS[end]
    of_a_run = " AND len($runs) > 0" if "$runs" in getattr(asking, query) else ""
    monkeypatch.setattr(ending, "AT_END_SECONDS", 0.2)
    monkeypatch.setattr(asking, query, ENDLESS + of_a_run)
    with pytest.raises(RlvrError, match=r"stopped after 0\.2 seconds"):
        finish(stage)


def test_the_table_of_datasets_counts_failed_grades(tmp_path):
    with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
        failed = {"reward": None, "grade_error": "timeout", "category": "grade_error"}
        given = ({"reward": 1.0}, failed, failed)
        rows = [a_rollout(run_id="r", phase="eval", step=0, example_id=f"q{i}", **its) for i, its in enumerate(given)]
        run.commit_rollouts("eval", 0, rows)
    (row,) = result.dataset_table({run.path: Dataset("d", None, [], "", "")}).records()
    assert (row["samples"], row["grade_errors"], row["accuracy"]) == (3, 2, pytest.approx(1 / 3))


def test_the_table_of_thinking_budgets_has_the_time_of_an_end(stage, monkeypatch):
    endless = {"thinking_budget": replace(named_queries()["thinking_budget"], sql=ENDLESS)}
    monkeypatch.setattr(result, "named_queries", lambda: endless)
    monkeypatch.setattr(result, "AT_END_SECONDS", 0.2)
    dataset = Dataset("d", None, [], "", "")
    evaluated = {stage.folder / "r": dataset, stage.folder / "s": dataset}
    with pytest.raises(RlvrError, match=r"stopped after 0\.2 seconds"):
        result.print_result(EvalConfig(thinking_budget="1,2"), evaluated)
