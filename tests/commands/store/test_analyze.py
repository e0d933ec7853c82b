"""`rlvr analyze`: which run and which query are meant, and what goes to stdout and to stderr."""

import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import time
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest

import rlvr_cli
from factories import a_rollout
from marks import slow
from rlvr_cli.analysis.pictures import plots
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.analysis.report.build import charts_of
from rlvr_cli.analysis.summary import OF_ANSWERS
from rlvr_cli.commands.store.analyze import run
from rlvr_cli.commands.store.analyzing.asked import find_query
from rlvr_cli.commands.store.analyzing.said import shown_rows
from rlvr_cli.config.parsing.options import options
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.config.store.analyze import AnalyzeConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Table

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e[red]</think> <answer> 8 </answer>\r\x00"


def rollout(run_id, example, reward, *, step=0, phase="eval", response="</think> <answer> 7 </answer>"):
    return a_rollout(
        run_id=run_id, phase=phase, step=step, policy_version=step, example_id=example, response=response,
        answer_reward=reward, reward=reward, extracted_answer="8", category=f"format_1_answer_{int(reward)}",
        failure_kind=None if reward else "wrong_answer",
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory):
    """`old`: 1 of 2 right; `new`, made later: 0 of 3 right at step 0 (eval), 1 of 1 at step 4 (train)."""
    root = tmp_path_factory.mktemp("runs")
    with RunDir.create(root, "eval", name="old", metadata={}) as old:
        old.commit_rollouts("eval", 0, [rollout("old", "a", 1.0), rollout("old", "b", 0.0)])
    with RunDir.create(root, "grpo", name="new", metadata={}) as new:
        new.commit_rollouts("eval", 0, [rollout("new", e, 0.0, response=HOSTILE) for e in "abc"])
        new.commit_rollouts("train", 4, [rollout("new", "a", 1.0, step=4, phase="train")])
    return root


@pytest.fixture
def analyze(runs_dir, capsys):
    """Calls the command as the command line does; gives stdout and stderr."""

    def call(**flags):
        run(resolve(AnalyzeConfig, flags={"runs_dir": str(runs_dir), **flags}, command="analyze"))
        return capsys.readouterr()

    return call


def test_the_latest_run_is_the_default(analyze, runs_dir):
    captured = analyze(format="json")
    assert captured.err == f"run {runs_dir / 'new'} (finished)\n"
    tables = json.loads(captured.out)
    assert tables["run"] == [{"run_id": "new", "phase": "eval", "step": 0, "questions": 3, "samples": 3}]
    assert tables["measures"][0]["value"] == 0.0


@pytest.mark.parametrize(
    ("select", "said"),
    [
        ("SELECT run_id FROM rollouts WHERE phase = 'train'", "no rows of old\n"),
        ("SELECT count(*) AS n FROM rollouts WHERE phase = 'train'", ""),
        ("SELECT upper(run_id) AS run_id FROM rollouts WHERE phase = 'train'", ""),
    ],
)
def test_a_select_names_the_runs_of_which_it_has_no_rows(analyze, select, said):
    assert analyze(query=select, runs=("old", "new")).err.partition("new (finished)\n")[2] == said


def test_a_run_by_name_and_by_path(analyze, runs_dir):
    for name in ("old", str(runs_dir / "old")):
        captured = analyze(runs=(name,), format="json")
        assert json.loads(captured.out)["measures"][0]["value"] == 0.5
    with pytest.raises(RlvrError, match="no run 'odl'"):
        analyze(runs=("odl",))


@pytest.fixture(scope="module")
def once_mixed(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixed")
    for name in ("a-1", "a-2", "b"):
        with RunDir.create(root, "eval", name=name, metadata={}) as run:
            run.commit_rollouts("eval", 0, [rollout(name, "q", 1.0)])
    (root / "README.md").write_text("no run")
    (root / "notes").mkdir()
    return root


@pytest.fixture
def mixed(once_mixed, tmp_path, monkeypatch):
    """In `runs`: the runs a-1, a-2 and b, and a file and a folder that are no runs."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(once_mixed, "runs"))


RUN_IDS = "SELECT run_id FROM runs ORDER BY run_id"


@pytest.mark.parametrize(
    ("names", "found", "others"),
    [
        (("a-*",), ["a-1", "a-2"], []),
        (("runs/a-*", "b"), ["a-1", "a-2", "b"], []),
        (("*",), ["a-1", "a-2", "b"], ["runs/README.md", "runs/notes"]),
        (("[ab]*", "a-1"), ["a-1", "a-2", "b"], []),
        # what a shell makes of runs/* and of runs/*/
        (
            tuple(f"runs/{n}" for n in ("README.md", "a-1", "a-2", "b", "notes")),
            ["a-1", "a-2", "b"],
            ["README", "notes"],
        ),
        (tuple(f"runs/{n}/" for n in ("a-1", "a-2", "b")), ["a-1", "a-2", "b"], []),
    ],
)
def test_patterns_of_runs(mixed, capsys, names, found, others):
    run(AnalyzeConfig(query=RUN_IDS, runs=names, format="json"))
    said = capsys.readouterr()
    assert [row["run_id"] for row in json.loads(said.out)] == found
    assert said.err.count("passed over") == bool(others)
    assert all(name in said.err for name in others)


@pytest.mark.parametrize(
    "names", [("runs/notes",), ("runs/a-1", "runs/notes"), ("runs/b", "nothing"), ("c-*",), ("n*",)]
)
def test_what_is_typed_and_is_no_run_is_an_error(mixed, names):
    with pytest.raises(RlvrError, match=r"[Nn]o run|is a run"):
        run(AnalyzeConfig(query=RUN_IDS, runs=names))


def test_runs_alone_mean_their_summary(mixed, capsys):
    """Also as a pattern, quoted or not; those that have no such rollouts are passed over."""
    with RunDir.create("runs", "sft", name="without", metadata={}):
        pass
    for first, *more in (["*"], sorted(map(str, mixed.iterdir()))):
        run(AnalyzeConfig(query=first, runs=tuple(more), format="json"))
        said = capsys.readouterr()
        assert [row["run_id"] for row in json.loads(said.out)["run"]] == ["a-1", "a-2", "b"]
        assert "without eval rollouts: without" in said.err
    with pytest.raises(RlvrError, match="without has no eval rollouts"):
        run(AnalyzeConfig(query="without"))


def test_arms_may_be_patterns(mixed, capsys):
    run(AnalyzeConfig(query="compare", runs=("a-*", "b"), format="json"))
    assert "run runs/a-2 (finished)" in capsys.readouterr().err
    with pytest.raises(RlvrError, match="each run only once"):
        run(AnalyzeConfig(query="compare", runs=("a-*", "a-1")))


def test_several_runs_are_compared(analyze):
    captured = analyze(runs=("old", "new"), format="json")
    rows = [r for r in json.loads(captured.out)["measures"] if r["measure"] == "accuracy"]
    assert [(r["run_id"], r["value"]) for r in rows] == [("old", 0.5), ("new", 0.0)]
    table = analyze(runs=("old", "new")).out
    assert "–" in table
    assert "NULL" not in table


def test_the_same_run_twice_is_one(analyze, runs_dir):
    captured = analyze(runs=("old", str(runs_dir / "old")), query="SELECT count(*) AS n FROM rollouts", format="json")
    assert json.loads(captured.out) == [{"n": 2}]


def test_sql(analyze):
    captured = analyze(
        query="select run_id, sum(reward) as total from rollouts group by 1 order by 1",
        runs=("new", "old"),
        format="csv",
    )
    assert captured.out == "run_id,total\nnew,1.0\nold,1.0\n"


def test_sql_may_use_the_options(analyze):
    sql = "SELECT count(*) AS n FROM rollouts WHERE phase = $phase AND step = coalesce($step, step)"
    assert json.loads(analyze(query=sql, format="json").out) == [{"n": 3}]
    assert json.loads(analyze(query=sql, phase="train", step=4, format="json").out) == [{"n": 1}]
    assert json.loads(analyze(query=sql, phase="train", step=5, format="json").out) == [{"n": 0}]


def test_a_file_with_its_own_defaults(analyze, tmp_path):
    file = tmp_path / "mine.sql"
    file.write_text(
        '-- Mine.\n-- :phase = "train"\n-- :least = 0.5\n'
        "SELECT step FROM rollouts WHERE phase = $phase AND reward >= $least"
    )
    assert json.loads(analyze(query=str(file), format="json").out) == [{"step": 4}]  # the file's default
    captured = analyze(query=str(file), phase="eval", format="json")  # a flag goes before it
    assert json.loads(captured.out) == []
    assert "no rows; there are rollouts of " in captured.err


def test_a_file_without_a_header_gets_the_options_whose_names_it_uses(analyze, tmp_path):
    file = tmp_path / "mine.sql"
    file.write_text("SELECT step FROM rollouts WHERE phase = $phase")
    assert json.loads(analyze(query=str(file), phase="train", format="json").out) == [{"step": 4}]
    with pytest.raises(RlvrError, match=r"mine\.sql has no --step\.\n.*WHERE step = \$step"):
        analyze(query=str(file), step=4)


def test_the_limit(analyze):
    captured = analyze(query="FROM range(3)", limit=2, format="csv")
    assert captured.out == "range\n0\n1\n"
    assert "only the first 2 rows are shown; --limit 0 shows all of them" in captured.err
    captured = analyze(query="FROM range(100)", limit=0, format="csv")
    assert len(captured.out.splitlines()) == 101
    assert "--limit" not in captured.err
    captured = analyze(query="failures", limit=2)
    assert captured.out.count("\nwhy ") == 2
    assert "the first 2 rows" in captured.err


def test_the_rows_to_show_are_shared_out_among_the_runs(analyze):
    both = {"query": "categories", "runs": ("old", "new"), "set": ("step=0",), "format": "json"}
    assert len(json.loads(analyze(**both).out)) == 3
    captured = analyze(**both, limit=2)
    assert [row["run_id"] for row in json.loads(captured.out)] == ["old", "new"], "the runs as typed"
    assert "only 2 of 3 rows, the first ones of each run, are shown; --limit 0 shows all of them" in captured.err
    captured = analyze(query="SELECT run_id FROM rollouts ORDER BY run_id", runs=("old", "new"), limit=2, format="csv")
    assert captured.out == "run_id\nnew\nnew\n"
    assert "only the first 2 rows, which are of 1 of the 2 runs, are shown" in captured.err


def test_only_a_query_that_sorts_by_run_has_the_runs_as_typed(analyze, tmp_path):
    file = tmp_path / "mine.sql"
    for order, expected in (("run_id, n", ["old", "new", "new"]), ("n, run_id", ["new", "new", "old"])):
        rows = "SELECT run_id, if(run_id = 'old', 9, step) AS n FROM rollouts WHERE example_id = 'a'"
        file.write_text(f"{rows} ORDER BY {order}\n")
        found = json.loads(analyze(query=str(file), runs=("old", "new"), format="json").out)
        assert [row["run_id"] for row in found] == expected


@pytest.mark.parametrize("query", ["length_histogram", "failures", slow("lengths"), slow("categories")])
def test_runs_are_as_typed_in_the_tables_of_named_queries(query, analyze):
    for typed in (("old", "new"), ("new", "old")):
        found = json.loads(analyze(query=query, runs=typed, phase="eval", format="json").out)
        assert list(dict.fromkeys(row["run_id"] for row in found)) == list(typed)


def test_the_gap_where_the_sampler_forbids_the_end_is_explained(tmp_path, analyze, panels_of):
    for name, fewest, at_1 in (("barred", 4, 0.02), ("small", 4, 1e-7), ("free", 0, 0.02)):
        config = {"sampling_min_tokens": fewest}
        with RunDir.create(tmp_path, "grpo", name=name, metadata={"config": config}) as made:
            values = {"mismatch/position/0001": at_1, "mismatch/position/0004": 3e-7, "mismatch/length/0004": 3e-7}
            made.commit_metrics(1, "train", values)
    captured = analyze(query="mismatch", runs=("barred", "small", "free"), runs_dir=str(tmp_path))
    assert "barred: the largest gap, 0.02 nats (later ones: 3e-07), is at the first 4 positions" in captured.err
    assert "small: " not in captured.err
    assert "free: " not in captured.err
    _, said = panels_of(query="mismatch", runs=("barred",), runs_dir=str(tmp_path))
    assert "the largest gap" in said


@pytest.fixture
def panels_of(analyze, tmp_path, monkeypatch):
    """Calls the command with --plot; gives the panels that were drawn, and stderr."""
    drawn = []
    monkeypatch.setattr(plots, "save_plot", lambda picture, path: drawn.append(picture))

    def call(**flags):
        captured = analyze(plot=str(tmp_path / "p.png"), **flags)
        return {panel.title: panel for panel in drawn.pop().panels}, captured.err

    return call


def test_bars_that_are_all_0_are_no_panel(panels_of):
    shown, said = panels_of(query="repetitions", runs=("old",))
    assert list(shown) == ["Responses that another question also got", "Different words"]
    assert [panel.y_label for panel in shown.values()] == ["share of responses", "share of a response's words"]
    assert (
        "all 0, and not drawn: Responses equal to an earlier one to the question; Responses that repeat words" in said
    )
    shown, said = panels_of(query="repetitions", runs=("old",), panels=("repeating",))
    assert list(shown) == ["Responses that repeat words"], "as asked for"
    assert "not drawn" not in said


def test_without_another_objective_there_are_no_bars_of_one(panels_of, tmp_path):
    config = {
        "loss_type": "reinforce_with_baseline", "length_normalization": "masked_mean", "use_std_normalization": False,
        "sampling_max_tokens": 64,
    }  # fmt: skip
    with RunDir.create(tmp_path, "grpo", name="r", metadata={"config": config}) as made:
        samples = [replace(rollout("r", "a", r, phase="train"), sample_index=i) for i, r in enumerate((1.0, 0.0))]
        made.commit_rollouts("train", 0, samples)
    own = {"query": "objective", "runs": ("r",), "runs_dir": str(tmp_path)}
    for chosen, bars in (
        ({}, 1),
        ({"length_normalization": "token_mean"}, 2),
        ({"set": ("std_normalization=batch",)}, 2),
    ):
        shown, _ = panels_of(**own, **chosen)
        assert {len({line.variant for line in panel.lines}) for panel in shown.values()} == {bars}


def test_a_picture_without_rows_says_what_is_missing(analyze, tmp_path):
    own = {"query": "graders", "plot": str(tmp_path / "p.png")}
    with pytest.raises(RlvrError, match="graders cannot be drawn: it has no rows") as refused:
        analyze(runs=("old",), **own)
    assert re.search(r"rlvr grade \S*/old --grader NAME", refused.value.hint)
    with pytest.raises(RlvrError, match="lengths cannot be drawn: it has no rows") as refused:
        analyze(query="lengths", runs=("old",), phase="train", plot=own["plot"])
    assert "there are rollouts of" in refused.value.hint
    assert "--grader NAME" in analyze(query="graders", runs=("old",)).err


def test_no_query_hides_that_it_sorts_by_run():
    first = {
        name: query.sql.rpartition("ORDER BY")[2].split()[0].rstrip(",;") for name, query in named_queries().items()
    }
    assert [name for name, column in first.items() if column.endswith(".run_id")] == []


def test_the_help_names_the_queries_that_ask_of_all_steps():
    (said,) = (option.metadata["help"] for option in options(AnalyzeConfig) if option.name == "step")
    pooled = [
        q.name for q in named_queries().values() if "$step IS NULL" in q.sql or "coalesce($step::BIGINT, step)" in q.sql
    ]
    assert f"Default: the last one; {', '.join(pooled)}: all of them." in said


def test_a_search_and_a_comparison_have_no_accuracy(tmp_path, analyze):
    for name, command, reward in (("found", "discover", 582.0), ("pairs", "pairwise", 0.5), ("old", "eval", 1.0)):
        with RunDir.create(tmp_path, command, name=name, metadata={}) as made:
            made.commit_rollouts("eval", 0, [rollout(name, "a", reward)])
            made.commit_metrics(0, "eval", {"reward/mean": reward, "discover/best": reward})
    infos = [read_run(tmp_path / name) for name in ("found", "pairs", "old")]
    with open_runs(infos) as database:
        drawn = charts_of(database, [[info] for info in infos])
    values = {panel.title: [line.y for line in panel.lines] for panel in drawn.panels}
    assert values["Held-out reward"] == [[1.0]]
    own = {"runs_dir": str(tmp_path), "format": "json"}
    for query, without in OF_ANSWERS.items():
        with pytest.raises(RlvrError, match="pairs is a comparison with wins and ties, and has no accuracy"):
            analyze(query=query, runs=("pairs",), **own)
        with pytest.raises(RlvrError, match="and has no accuracy"):
            rlvr_cli.open_run(tmp_path / "pairs").sql(query)
        if "discover" in without:
            with pytest.raises(RlvrError, match="found is a search with scores, and has no accuracy"):
                analyze(query=query, runs=("found",), **own)
    # those of a search are the attempts that are not valid
    assert "no failures" in analyze(query="failures", runs=("found",), **own).err
    for query in ("at_k", "categories"):
        captured = analyze(query=query, runs=("found", "pairs", "old"), **own)
        assert "passed over, since searches and comparisons have no accuracy: found, pairs" in captured.err
        assert {row.get("run_id", "old") for row in json.loads(captured.out)} <= {"old"}
    rows = json.loads(analyze(query="curves", runs=("found", "old"), **own).out)
    assert [row["eval_reward"] for row in rows] == [1.0]
    place = (tmp_path / "found").rename(tmp_path / "renamed")
    with pytest.raises(RlvrError, match=f"searches and comparisons do not have: renamed.\nrlvr analyze {place}$"):
        analyze(query="compare", runs=("renamed", "old"), **own)
    with pytest.raises(RlvrError, match=f"rlvr analyze {place} shows what it has"):
        analyze(query="at_k", runs=("renamed",), **own)


@pytest.mark.parametrize(
    ("limit", "kept"), [(3, "abc"), (4, "abac"), (5, "ababc"), (6, "ababac"), (2, "ab"), (9, "abaabaac")]
)
def test_a_run_with_few_rows_leaves_its_share_to_others(limit, kept):
    rows = [(run, i) for i, run in enumerate("abaabaac")]
    shown, which = shown_rows(Table(("run_id", "i"), rows), limit, runs=3)
    letters = "".join(run for run, _ in shown.rows)
    assert sorted(letters) == sorted(kept)
    assert list(shown.rows) == sorted(shown.rows, key=lambda row: row[1])
    assert bool(which) == (limit < 8)


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("values", [(["a"], ["b"], ["b"]), (1, 2, 2)])
def test_rows_whose_run_id_is_no_name_of_a_run_are_the_first_ones(values, more):
    shown, which = shown_rows(Table(("run_id",), [(v,) for v in values], more=more), 2, runs=2)
    assert (shown.rows, which) == ([(v,) for v in values[:2]], "the first 2 rows")


def test_failures_to_read(analyze):
    out = analyze(query="failures").out
    assert out.startswith(
        "1. new step 0, example a, sample 0\nformat_1_answer_0, wrong_answer, 1 tokens, finished by stop\n"
    )
    assert "\\x1b]0;owned\\x07\\x1b[2J\\u202e[red]</think> <answer> 8 </answer>\\x0d\\x00\n" in out
    rows = json.loads(analyze(query="failures", format="json").out)
    assert [r["response"] for r in rows] == [HOSTILE] * 3
    assert {r["why"] for r in rows} == {"the answer differs from the truth"}
    assert json.loads(analyze(query="failures", failure_kind="truncated", format="json").out) == []
    right = analyze(query="failures", category="format_1_answer_1", phase="train", format="json")
    assert [r["step"] for r in json.loads(right.out)] == [4]


def test_failures_show_ten_of_each_category(analyze, tmp_path):
    """Also where one category is a hundred times as frequent as another."""
    rows = [rollout("r", f"w{i:04}", 0.0) for i in range(1200)]
    rows += [
        replace(rollout("r", f"u{i}", 0.0), category="format_0_answer_0", failure_kind="correct_but_unformatted")
        for i in range(12)
    ]
    with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
        run.commit_rollouts("eval", 0, rows)
    captured = analyze(query="failures", runs=(str(tmp_path / "r"),))
    assert captured.out.count("\nformat_0_answer_0, correct_but_unformatted") == 12
    assert captured.out.count("\nformat_1_answer_0, wrong_answer") == 38
    assert captured.out.count("the fault is the parser's, not the model's") == 12
    narrowed = analyze(query="failures", runs=(str(tmp_path / "r"),), category="format_1_answer_0")
    assert narrowed.out.count("\nwhy ") == 50


# Parameters


@pytest.fixture
def file(tmp_path):
    """A query with parameters of its own."""
    path = tmp_path / "mine.sql"
    path.write_text(
        '-- Mine.\n-- :k = 8\n-- :name = "x"\nSELECT $k AS k, $name AS name, $phase AS phase, $extra AS extra'
    )
    return str(path)


def test_a_query_of_ones_own_starts_from_a_named_one(analyze, tmp_path):
    """A copy is what it says, not the named query of its name; and cases stay readable."""
    copy = tmp_path / "failures.sql"
    copy.write_text(analyze(query="failures", show=True).out.replace("ELSE coalesce", "-- mine\n ELSE coalesce"))
    assert analyze(query=str(copy)).out == analyze(query="failures").out
    copy = tmp_path / "compare.sql"
    copy.write_text("SELECT 1 AS mine")
    assert analyze(query=str(copy), format="csv").out == "mine\n1\n"


def test_set(analyze, file):
    captured = analyze(query=file, set=("k=4", "extra=null"), format="json")
    assert json.loads(captured.out) == [{"k": 4, "name": "x", "phase": "eval", "extra": None}]
    captured = analyze(query=file, set=("name=a=b", "extra=[1, 2]", "phase=any"), format="json")
    assert json.loads(captured.out) == [{"k": 8, "name": "a=b", "phase": "any", "extra": [1, 2]}]
    captured = analyze(query=file, set=("extra=not JSON", "name=", 'phase="4"'), format="json")
    assert json.loads(captured.out) == [{"k": 8, "name": "", "phase": "4", "extra": "not JSON"}]
    own = "SELECT $n + 1 AS n, $least AS least"  # of any type in a query of one's own
    shown = analyze(query=own, set=("n=2", "least=0.5"), format="json")
    assert json.loads(shown.out) == [{"n": 3, "least": 0.5}]


def test_set_beats_the_option_of_that_name(analyze):
    captured = analyze(query="categories", phase="eval", set=("phase=train",), format="json")
    assert [(r["step"], r["samples"]) for r in json.loads(captured.out)] == [(4, 1)]
    assert json.loads(analyze(set=("phase=train",), format="json").out)["run"][0]["phase"] == "train"


def test_what_cannot_be_set(analyze, file):
    with pytest.raises(RlvrError) as caught:
        analyze(query=file, set=("kk=4",))
    assert caught.value.problem == f"{file} has no parameter 'kk'."
    assert caught.value.hint == 'Its parameters: extra = null, k = 8, name = "x", phase = null.'
    with pytest.raises(RlvrError, match="--set k has no value"):
        analyze(query=file, set=("k",))
    with pytest.raises(RlvrError) as caught:
        analyze(query="SELECT 1", set=("k=1",))
    assert caught.value.hint == "Its parameters: none."


# Two runs


def test_compare(analyze):
    tables = json.loads(analyze(query="compare", runs=("old", "new"), format="json").out)
    assert [(r["arm"], r["runs"], r["questions"], r["left_out"], r["accuracy"]) for r in tables["arms"]] == [
        ("A", "old", 2, 0, 0.5), ("B", "new", 2, 1, 0.0),
    ]  # fmt: skip
    assert {r["b_minus_a"]: r["value"] for r in tables["difference"]}["mcnemar_p"] == 1.0
    captured = analyze(query="compare", runs=("old", "new"))
    assert " ".join(r["in_words"] for r in tables["verdict"]) in " ".join(captured.out.split())
    assert max(map(len, captured.out.splitlines())) <= 120
    assert "(finished)" in captured.err


def test_compare_arms_of_seeds(analyze, tmp_path):
    for name in ("a1", "a2", "b1", "b2"):
        with RunDir.create(tmp_path, "eval", name=name, metadata={}) as run:
            run.commit_rollouts("eval", 0, [rollout(name, q, float(name[0] == "b")) for q in "xyz"])
    runs = ("a1,a2", "b1,b2")
    tables = json.loads(analyze(query="compare", runs=runs, runs_dir=str(tmp_path), format="json").out)
    assert [(r["runs"], r["samples"], r["accuracy"]) for r in tables["arms"]] == [
        ("a1, a2", 6, 0.0),
        ("b1, b2", 6, 1.0),
    ]


def test_runs_of_one_name_are_compared(analyze, tmp_path):
    for folder in ("st", "st-long"):
        for name in ("x-s0", "x-s1"):
            with RunDir.create(tmp_path / folder, "eval", name=name, metadata={}) as run:
                run.commit_rollouts("eval", 0, [rollout(name, q, float(folder == "st-long")) for q in "xyz"])
    flags = {"runs": ("st/x-s*", "st-long/x-s*"), "runs_dir": str(tmp_path), "format": "json"}
    tables = json.loads(analyze(query="compare", **flags).out)
    assert [(r["runs"], r["accuracy"]) for r in tables["arms"]] == [
        ("st/x-s0, st/x-s1", 0.0),
        ("st-long/x-s0, st-long/x-s1", 1.0),
    ]
    rows = json.loads(analyze(query="pass_at_k", **flags).out)
    assert [(r["run_id"], r["pass_at_k"]) for r in rows] == [
        *((f"st/x-s{i}", 0.0) for i in (0, 1)),
        *((f"st-long/x-s{i}", 1.0) for i in (0, 1)),
    ]
    summary = json.loads(analyze(**flags).out)
    assert [r["run_id"] for r in summary["run"]] == [r["run_id"] for r in rows]
    said = analyze(query="compare", **{**flags, "runs": ("st/x-s0", "st-long/x-s0", "st-long/x-s1")})
    assert [r["arm"] for r in json.loads(said.out)["arms"]] == ["st/x-s0", "st-long/x-s0", "st-long/x-s1"]
    (tmp_path / "st-long/x-s1").rename(tmp_path / "copy")
    tables = json.loads(analyze(query="compare", **{**flags, "runs": ("st/x-s0", "copy")}).out)
    assert [r["runs"] for r in tables["arms"]] == ["x-s0", "copy"], "as their directories are called"


def test_compare_each_of_several_with_the_first(analyze, tmp_path):
    """Of 12 questions a solves none, b 8 (exact p = 2/2^8), c and d 6 (2/2^6): alone they differ from a, of three only b does."""
    for name, solved in (("a", 0), ("b", 8), ("c", 6), ("d", 6)):
        with RunDir.create(tmp_path, "eval", name=name, metadata={}) as run:
            run.commit_rollouts("eval", 0, [rollout(name, f"q{i}", float(i < solved)) for i in range(12)])
    flags = {"query": "compare", "runs": ("a", "b", "c", "d"), "runs_dir": str(tmp_path)}
    tables = json.loads(analyze(**flags, format="json").out)
    accuracies = {r["arm"]: (r["questions"], r["accuracy"]) for r in tables["arms"]}
    assert accuracies == {"a": (12, 0.0), "b": (12, 8 / 12), "c": (12, 0.5), "d": (12, 0.5)}
    found = {r["arm"]: r for r in tables["differences"]}
    assert {r["against"] for r in found.values()} == {"a"}
    assert [found[arm]["p"] for arm in "bcd"] == pytest.approx([2 / 2**8, 2 / 2**6, 2 / 2**6])
    assert [found[arm]["p_holm"] for arm in "bcd"] == pytest.approx([3 * 2 / 2**8, 2 * 2 / 2**6, 2 * 2 / 2**6])
    assert [found[arm]["decided"] for arm in "bcd"] == ["yes", "no", "no"]
    out = " ".join(analyze(**flags).out.split())
    assert "b is better than a: +66.7 points" in out
    assert "Taken alone, c is better than a" in out
    assert "The second p is Holm's" in out
    assert "left out" not in out
    assert "Failed grades" not in out


def test_arms_of_other_questions_say_what_was_left_out(analyze, tmp_path):
    answers = {"a": (1.0, 0.0, 0.0, 0.0), "b": (1.0, 1.0, None, 1.0), "c": (1.0, 1.0)}
    for name, rewards in answers.items():
        with RunDir.create(tmp_path, "eval", name=name, metadata={}) as run:
            rows = [replace(rollout(name, f"q{i}", r or 0.0), reward=r) for i, r in enumerate(rewards)]
            run.commit_rollouts("eval", 0, rows)
    tables = json.loads(analyze(query="compare", runs=tuple("abc"), runs_dir=str(tmp_path), format="json").out)
    found = {r["arm"]: (r["against_accuracy"], r["difference"], r["questions"]) for r in tables["differences"]}
    assert found == {"b": (0.25, 0.5, 4), "c": (0.5, 0.5, 2)}
    told = [row["in_words"] for row in tables["verdict"]]
    assert "c and a are compared on what both have, 2 questions: 0 of c and 2 of a are left out." in told
    assert "Failed grades of b, which count as wrong: 1." in told
    lone = "One run an arm: how much training with another seed would change is not in the interval."
    assert told[-1] == lone
    for other, limits in (
        ("b", "Failed grades of B, which count as wrong: 1."),
        ("c", "B and A are compared on what both have, 2 questions: 0 of B and 2 of A are left out."),
    ):
        tables = json.loads(analyze(query="compare", runs=("a", other), runs_dir=str(tmp_path), format="json").out)
        assert [row["in_words"] for row in tables["verdict"]][1:] == [limits, lone]


@pytest.mark.parametrize(
    "runs", [(), ("old",), ("old", "new", "old"), ("old", "old"), ("old", "old,new"), ("old", ",")]
)
def test_what_cannot_be_compared(analyze, runs):
    with pytest.raises(RlvrError, match="compare needs"):
        analyze(query="compare", runs=runs)


def test_a_lone_pattern_is_one_arm(analyze):
    with pytest.raises(RlvrError, match=r"compare needs two runs or more; one arm of [23] runs was given\."):
        analyze(query="compare", runs=("[on]*",))


def test_list_and_show(analyze):
    captured = analyze(list=True, format="json")
    listed = {r["query"]: r for r in json.loads(captured.out)}
    assert list(listed) == [*sorted(named_queries()), "report"]
    assert listed["pass_at_k"]["parameters"] == 'k = null, phase = "eval", step = null'
    assert listed["pass_at_k"]["answers"] == named_queries()["pass_at_k"].description
    assert captured.err == ""
    assert analyze(query="categories", show=True).out.strip() == named_queries()["categories"].sql.strip()
    assert "pass@k" in analyze(show=True).out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("categorys", "no query named 'categorys', nor a run of this name in nothing. Did you mean categories?"),
        ("a1", "no query named 'a1', nor a run of this name in nothing."),
        ("a1,a2", "no query named 'a1,a2', nor a run of this name in nothing."),
        ("runs", "Did you mean rlvr runs?"),
        ("runs/eval-1", "no query named 'runs/eval-1'"),
        ("nowhere.sql", "Cannot read the query nowhere.sql"),
        ("", "no query named ''"),
    ],
)
def test_what_is_no_query(text, message):
    with pytest.raises(RlvrError) as caught:
        find_query(text, "nothing")
    assert message in caught.value.problem
    assert text.endswith(".sql") or "--runs-dir" in caught.value.hint


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("old categories", "rlvr analyze categories old"),
        ("old new compare", "rlvr analyze compare old new"),
        ("old report", "rlvr analyze report old"),
        ("'o*' summary", "rlvr analyze summary 'o*'"),
        ("old 'select 1, 2'", "rlvr analyze 'select 1, 2' old"),
    ],
)
def test_a_query_after_the_runs(analyze, words, line):
    first, *more = shlex.split(words)
    with pytest.raises(RlvrError, match=f"There is no run '{more[-1]}'") as caught:
        analyze(query=first, runs=tuple(more))
    assert caught.value.hint == f"Did you mean: {line}"


def test_a_run_that_has_the_name_of_a_query(tmp_path, capsys):
    for name in ("first", "categories"):
        with RunDir.create(tmp_path, "eval", name=name, metadata={}) as made:
            made.commit_rollouts("eval", 0, [rollout(name, "q", 1.0)])
    run(AnalyzeConfig(query="first", runs=("categories",), runs_dir=str(tmp_path), format="json"))
    assert [row["run_id"] for row in json.loads(capsys.readouterr().out)["run"]] == ["first", "categories"]


def test_at_k_uses_the_disk_and_queries_of_users_do_not(analyze, monkeypatch):
    sql = "SELECT current_setting('temp_directory') AS folder"
    assert json.loads(analyze(query=sql, runs=("old",), format="json").out) == [{"folder": ""}]
    monkeypatch.setattr("rlvr_cli.analysis.queries.database.MEMORY_LIMIT", "no limit of this database")
    assert json.loads(analyze(query="at_k", runs=("old",), format="json").out)[0]["pass_at_k"] == 0.5


def test_k_above_the_number_of_samples_is_said_to_be_left_out(analyze):
    """`old` and `new` have one sample a question."""
    said = analyze(query="at_k", runs=("old", "new"), set=("k=1,2,4",), format="json")
    assert [(row["run_id"], row["k"]) for row in json.loads(said.out)] == [("old", 1), ("new", 1)]
    for name in ("old", "new"):
        assert f"k=2,4 left out: {name} has at most 1 sample a question\n" in said.err
    assert "no rows" not in analyze(query="at_k", runs=("old",), set=("k=2",)).err  # the reason is said already
    for k in ((), ("k=1",)):
        assert "left out" not in analyze(query="at_k", runs=("old",), set=k).err


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "x.sql").write_bytes(b"\xff\xfe")
    with pytest.raises(RlvrError, match="Cannot read the query"):
        find_query(str(tmp_path / "x.sql"), "runs")


def test_an_empty_directory_of_runs(tmp_path):
    with pytest.raises(RlvrError, match="no run in"):
        run(AnalyzeConfig(runs_dir=str(tmp_path)))


def test_the_timeout(analyze):
    with pytest.raises(RlvrError, match=r"stopped after 0\.2 seconds"):
        analyze(query="SELECT count(*) FROM range(1000000) a, range(1000000) b", timeout_seconds=0.2)


# Pictures


@pytest.mark.parametrize("arguments", [["--show", "pass_at_k"], ["pass_at_k", "--show"]])
def test_show_goes_before_or_after_the_name(forks, tmp_path, arguments):
    done = forks.run("analyze", *arguments, cwd=tmp_path, status=0)
    assert done.out == named_queries()["pass_at_k"].sql


def test_set_on_the_command_line(forks, runs_dir):
    arguments = ["pass_at_k", "old", "--set", "k=1", "--set", "step=0", "--format", "csv", "--runs-dir", runs_dir]
    done = forks.run("analyze", *arguments, cwd=runs_dir, status=0)
    assert done.out.splitlines()[1] == "old,0,1,2,0.5,0.09453120573423074,0.9054687942657693,0,0"


def test_a_pipe_gets_rows_alone(forks, runs_dir):
    done = forks.run("analyze", "failures", "--runs-dir", runs_dir, cwd=runs_dir, status=0)
    assert "\x1b" not in done.said
    assert done.err.startswith("run ")


def test_errors_are_two_lines_and_no_traceback(forks, runs_dir):
    done = forks.run("analyze", "select \x1b[31m from rollouts", "--runs-dir", runs_dir, cwd=runs_dir, status=1)
    assert "\x1b" not in done.err
    assert done.out == ""


def test_a_terminal_gets_colors_of_ours_and_nothing_of_the_models(forks, runs_dir):
    parent, child = pty.openpty()
    os.set_blocking(parent, False)
    how = {"out": os.ttyname(child), "environment": {"TERM": "xterm-256color"}}
    call = forks.start("analyze", "failures", "--runs-dir", runs_dir, cwd=runs_dir, **how)
    output, ended = b"", False
    while not ended:
        ended = forks.status(call) is not None  # after which all that there is can be read
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(parent, 65536):
                output += chunk
        time.sleep(0.01)
    os.close(child)
    os.close(parent)
    assert forks.status(call) == 0
    text = output.decode()
    assert "\x1b[1;32m<answer> 8 </answer>" in text
    assert "\x1b]0" not in text
    assert "\x1b[2J" not in text
    left = re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r\n", "\n")
    assert not {c for c in left if c != "\n" and unicodedata.category(c) in {"Cc", "Cf", "Cs", "Co"}}


def test_analyze_imports_nothing_that_it_does_not_need(runs_dir):
    code = (
        "import sys; from rlvr_cli.commands.store.analyze import run; from rlvr_cli.config.store.analyze import AnalyzeConfig\n"
        f"run(AnalyzeConfig(query='summary', runs=('old',), runs_dir={str(runs_dir)!r}))\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pandas', 'pyarrow', 'sympy', 'vllm'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"query": "curves", "step": 1}, "curves has no --step"),
        ({"query": "lengths", "category": "format_1_answer_1"}, "lengths has no --category"),
        (
            {"query": "SELECT step FROM rollouts", "phase": "train"},
            "This query has no --phase.\n.*WHERE phase = \\$phase",
        ),
        ({"query": "SELECT $phase", "step": 4}, "This query has no --step.\n.*WHERE step = \\$step"),
        ({"query": "SELECT $a", "category": "x"}, "This query has no --category.\n.*WHERE category = \\$category"),
        ({"query": "SELECT 1", "failure_kind": "x"}, "This query has no --failure-kind."),
        ({"query": "SELECT 1", "loss_type": "grpo_clip"}, "This query has no --loss-type."),
        ({"query": "pass_at_k", "set": ("k=abc",)}, "k must be a whole number, 1 or more"),
        ({"query": "at_k", "set": ("k=[1,0]",)}, "k must be a whole number, 1 or more, or several"),
        ({"query": "hardest", "set": ("least=1,2",)}, "least must be a whole number, 0 or more"),
        ({"query": "lengths", "set": ("phase=evl",)}, "--phase is 'evl'"),
        ({"query": "objective", "set": ("normalize_constant=-1",)}, "--normalize-constant"),
        ({"query": "failures", "set": ("limit=x",)}, "failures: limit is 'x'; expected int"),
    ],
)
def test_what_does_not_apply_is_said(runs_dir, given, problem):
    flags = {**given, "runs_dir": str(runs_dir)}
    with pytest.raises(RlvrError, match=problem):
        run(resolve(AnalyzeConfig, flags=flags, command="analyze"))


@pytest.fixture(scope="module")
def handout(tmp_path_factory):
    """The handout's example of length normalization: responses of 4 and 7 tokens with advantage 2."""
    config = {
        "loss_type": "no_baseline", "use_std_normalization": True, "std_normalization": None, "advantage_eps": 1e-6,
        "length_normalization": "masked_mean", "normalize_constant": None, "sampling_max_tokens": 7, "overlong": "none",
    }  # fmt: skip
    with RunDir.create(tmp_path_factory.mktemp("handout"), "grpo", name="two", metadata={"config": config}) as run:
        rows = [
            a_rollout(
                run_id="two", phase="train", example_id="q", sample_index=i, reward=2.0, num_response_tokens=n,
                finish_reason="length" if n == 7 else "stop",
            )
            for i, n in enumerate((4, 7))
        ]  # fmt: skip
        run.commit_rollouts("train", 0, rows)
    return str(run.path)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"length_normalization": "masked_normalize"}, [0.2857, 0.2857]),
        ({"length_normalization": "masked_normalize", "normalize_constant": 4.0}, [0.5, 0.5]),
        ({"length_normalization": "token_mean"}, [0.3636, 0.3636]),
        ({"loss_type": "reinforce_with_baseline"}, [0, 0]),
        ({"std_normalization": "none"}, [0.5, 0.2857]),
    ],
)
def test_another_objective_by_options_as_in_the_handouts_example(analyze, handout, flags, expected):
    shown = analyze(query="objective", runs=(handout,), set=("kind=response",), format="json", **flags)
    rows = json.loads(shown.out)
    assert [round(row["token_weight"], 4) for row in rows] == [0.5, 0.2857]
    assert [round(row["other_token_weight"], 4) for row in rows] == expected
    assert [row["response_weight"] for row in rows] == [2, 2]


def test_another_objective_in_words(analyze, handout):
    shown = analyze(query="objective", runs=(handout,), length_normalization="masked_normalize", format="json")
    assert "two: correct, short quarter (7 tokens on average) would get 64% of the push instead of 50%;" in shown.err
    sentences = {line for line in shown.err.splitlines() if line.startswith("two: ")}
    shown = analyze(query="objective", runs=(handout,), length_normalization="masked_normalize", limit=1)
    assert sentences <= set(shown.err.splitlines())
    shown = analyze(query="objective", runs=(handout,), loss_type="grpo_clip", format="json")
    assert "two: the other objective pushes no response at all." in shown.err
    assert "other objective" not in analyze(query="objective", runs=(handout,), format="json").err
    with pytest.raises(RlvrError, match="has no effect on two without --length-normalization masked_normalize"):
        analyze(query="objective", runs=(handout,), normalize_constant=4.0)
    with pytest.raises(RlvrError, match="lengths has no --loss-type"):
        analyze(query="lengths", runs=(handout,), loss_type="grpo_clip")


def test_responses_that_a_run_left_out_are_not_pushed(analyze, handout):
    with RunDir.resume(handout) as run:
        run.update(config=run.metadata["config"] | {"overlong": "mask"})
    rows = json.loads(analyze(query="objective", runs=(handout,), set=("kind=response",), format="json").out)
    assert [(row["tokens"], row["push_share"]) for row in rows] == [(4, 1), (7, 0)]
