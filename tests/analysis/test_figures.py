"""What is drawn of each query: which lines, with which points."""

import pytest

from rlvr_cli.analysis.database import open_runs
from rlvr_cli.analysis.figures import (
    best_at_k,
    categories,
    curves,
    entropy,
    figures,
    length_histogram,
    pass_at_k,
    thinking_budget,
)
from rlvr_cli.analysis.named_queries import named_queries
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Table

CURVES = ("run_id", "step", "eval_wall_seconds", "eval_reward", "eval_samples", "train_reward", "length", "length_correct", "length_wrong",
          "groups_with_signal", "clip_fraction", "entropy", "grad_norm")  # fmt: skip


def test_curves_are_one_line_a_run_and_measure():
    rows = [
        ("a", 0, 60.0, 0.25, 8, 0.5, 10.0, None, 9.0, 1.0, None, 0.7, 1.5),
        ("a", 1, 120.0, None, None, 0.6, 11.0, 12.0, None, 0.5, None, 0.6, 1.0),
        ("b", 0, 30.0, 0.5, 8, None, None, None, None, None, None, None, None),
    ]
    panels = {panel.title: panel for panel in curves(Table(CURVES, rows))}
    reward = {line.label: line for line in panels["Reward"].lines}
    assert list(reward) == ["a held-out", "a training", "b held-out"]
    assert (reward["a training"].x, reward["a training"].y) == ([0, 1], [0.5, 0.6])
    assert reward["a held-out"].low[0] < 0.25 < reward["a held-out"].high[0]
    assert reward["a training"].low is None
    clock = panels["Held-out reward by the clock"].lines
    assert [(line.label, line.x) for line in clock] == [("a", [1.0]), ("b", [0.5])]
    assert [line.label for line in panels["Response length"].lines] == ["a all", "a correct", "a wrong"]
    assert [line.label for line in panels["What there is to learn from"].lines] == ["a groups with a signal"]
    assert curves(Table(CURVES, [])) == []


def test_entropy_has_a_panel_a_phase():
    columns = ("run_id", "phase", "step", "entropy", "entropy_correct", "entropy_wrong")
    rows = [("a", "eval", 0, 0.5, 0.4, None), ("a", "train", 0, 0.6, None, None), ("a", "train", 1, 0.3, None, None)]
    panels = entropy(Table(columns, rows))
    assert [(p.title, [line.label for line in p.lines]) for p in panels] == [
        ("Entropy, eval", ["all", "correct"]),
        ("Entropy, train", ["all"]),
    ]
    assert panels[1].lines[0].y == [0.6, 0.3]


@pytest.mark.parametrize(("figure", "column"), [(pass_at_k, "pass_at_k"), (best_at_k, "best_at_k")])
def test_at_k_is_against_k(figure, column):
    rows = [("a", 0, 1, 10, 0.3), ("a", 0, 2, 10, 0.5), ("b", 0, 1, 10, 0.4)]
    (panel,) = figure(Table(("run_id", "step", "k", "questions", column), rows))
    assert [(line.label, line.x, line.y) for line in panel.lines] == [("a", [1, 2], [0.3, 0.5]), ("b", [1], [0.4])]


def test_the_budgets_of_one_evaluation_are_one_line():
    rows = [("x-8", 8, 0.1), ("y-8", 8, 0.2), ("x-64", 64, 0.5), ("odd", 64, 0.7)]
    (panel,) = thinking_budget(Table(("run_id", "thinking_budget", "accuracy"), rows))
    lines = [(line.label, line.x, line.y) for line in panel.lines]
    assert lines == [("x", [8, 64], [0.1, 0.5]), ("y", [8], [0.2]), ("odd", [64], [0.7])]


def test_bars_stand_side_by_side():
    rows = [("a", "right", 0.75), ("a", "wrong", 0.25), ("b", "wrong", 1.0)]
    (bars,) = categories(Table(("run_id", "category", "share"), rows))
    assert bars.labels == ("right", "wrong")
    assert bars.groups == (("a", (0.75, 0.25)), ("b", (0.0, 1.0)))
    columns = ("run_id", "step", "from_tokens", "to_tokens", "correct", "wrong")
    (bars,) = length_histogram(Table(columns, [("a", 0, 0, 9, 3, 1), ("a", 0, 10, 19, 0, 2)]))
    assert (bars.title, bars.labels) == ("a", ("0", "10"))
    assert bars.groups == (("correct", (3.0, 0.0)), ("wrong", (1.0, 2.0)))


def test_every_picture_is_of_a_query_that_has_its_columns(tmp_path):
    with RunDir.create(tmp_path, "eval", name="r", metadata={"seed": 0, "config": {}, "facts": {}}) as run:
        run.commit_metrics(0, "eval", {"reward/mean": 0.5, "reward/samples": 4})
    with open_runs([read_run(tmp_path / "r")]) as database:
        for name, figure in figures().items():
            query = named_queries()[name]
            figure(database.select(query.sql, {**query.parameters, "limit": None}))


def test_rewards_that_are_no_shares_have_no_interval():
    rows = [("a", 0, 60.0, -0.5, 8, *[None] * 8), ("a", 1, 90.0, 1.5, 8, *[None] * 8)]
    reward = curves(Table(CURVES, rows))[0].lines[0]
    assert reward.y == [-0.5, 1.5]
    assert reward.low is None
