"""`rlvr_cli.open_run` and `open_runs`: the rows of the command line as Arrow, pandas or Polars, and its pictures."""

import doctest
import io
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import rlvr_cli
from factories import a_rollout
from rlvr_cli.analysis.summary import summarize
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import read_rollouts
from rlvr_cli.runs.run_dir import RunDir


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The runs a-1 and a-2, each with two evaluations."""
    monkeypatch.chdir(tmp_path)
    for name in ("a-1", "a-2"):
        with RunDir.create("runs", "grpo", name=name, metadata={}) as run:
            for step, rewards in ((0, (0.0, 0.0)), (5, (1.0, 0.0))):
                rows = [a_rollout(run_id=name, step=step, example_id=f"q{i}", reward=r) for i, r in enumerate(rewards)]
                run.commit_rollouts("eval", step, rows)
                run.commit_metrics(step, "eval", {"reward/mean": sum(rewards) / 2, "reward/samples": 2.0})
    return tmp_path


BY_STEP = "SELECT step, avg(reward) AS reward FROM rollouts GROUP BY step ORDER BY step"


def test_a_run_by_name_and_by_path(here):
    for name in ("a-1", "runs/a-1", here / "runs" / "a-1"):
        run = rlvr_cli.open_run(name)
        assert list(run.sql(BY_STEP)) == [{"step": 0, "reward": 0.0}, {"step": 5, "reward": 0.5}]
    with pytest.raises(RlvrError, match="There is no run 'a-3'"):
        rlvr_cli.open_run("a-3")
    with pytest.raises(RlvrError, match="No run is named"):
        rlvr_cli.open_runs()


def test_rows_are_arrow_pandas_and_lists(here):
    run = rlvr_cli.open_run("a-1")
    stored = read_rollouts("runs/a-1")
    assert run.rollouts.arrow().select(stored.column_names).to_pylist() == stored.to_pylist()
    assert run.rollouts.arrow()["sampled_at"][0].as_py() == datetime(2026, 1, 2)
    frame = run.metrics.pandas()
    assert frame.columns.tolist() == run.metrics.columns
    assert frame[frame.name == "reward/mean"]["value"].tolist() == [0.0, 0.5]
    assert pa.table(run.metrics).equals(run.metrics.arrow())
    assert len(run.metrics) == 4
    nothing = run.sql("SELECT step, reward FROM rollouts WHERE false").arrow()
    assert (nothing.num_rows, nothing.schema.types) == (0, [pa.int64(), pa.float64()])


def test_rows_are_polars(here):
    pytest.importorskip("polars", reason="needs the extra polars")
    run = rlvr_cli.open_run("a-1")
    assert run.sql(BY_STEP).polars()["reward"].to_list() == [0.0, 0.5]
    assert run.sql("SELECT INTERVAL 1 DAY AS x").polars()["x"].to_list() == [timedelta(days=1)]
    for held in ("INTERVAL 1 MONTH", "[INTERVAL 1 DAY]"):
        with pytest.raises(RlvrError, match=r"(?s)no lists of intervals: x\..*Write epoch\("):
            run.sql(f"SELECT {held} AS x").polars()


def test_a_missing_library_gives_the_line_for_pip(here, monkeypatch):
    rows = rlvr_cli.open_run("a-1").sql(BY_STEP)
    for name in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(RlvrError) as raised:
            getattr(rows, name)()
        assert str(raised.value) == (
            f"{name} is not installed.\nInstall it from the clone of rlvr: pip install -e '.[{name}]'"
        )


def test_named_queries_and_parameters(here):
    run = rlvr_cli.open_run("a-1")
    assert [row["value"] for row in run.sql("metrics", names="reward/mean")] == [0.0, 0.5]
    assert list(run.sql("SELECT $x::INT + step AS y FROM metrics LIMIT 1", x=3)) == [{"y": 3}]
    with pytest.raises(RlvrError, match="metrics has no parameter 'name'"):
        run.sql("metrics", name="x")
    with pytest.raises(RlvrError, match=r"Did you mean curves\?"):
        run.sql("curve")
    assert run.summary() == [summarize("runs/a-1")]
    assert run.summary(step=0)[0].accuracy.value == 0.0
    (at_1,) = run.sql("at_k", k=1)
    assert (at_1["k"], at_1["pass_at_k"]) == (1, run.summary()[0].accuracy.value)
    for k in ("x", 0, [1, None]):
        for query in ("at_k", "pass_at_k"):
            with pytest.raises(RlvrError, match="k must be a whole number, 1 or more, or several"):
                run.sql(query, k=k)
    nothing = run.sql("at_k", step=99)
    assert (len(nothing), nothing.arrow().schema) == (0, run.sql("at_k").arrow().schema)
    for query in ("summary", "compare", "judge_agreement"):
        with pytest.raises(RlvrError, match="several tables"):
            run.sql(query)


@pytest.mark.parametrize(
    ("query", "parameters", "says"),
    [
        ("SELECT count(*) FROM rollouts", {"phase": "eval"}, "This query has no parameter 'phase'"),
        ("pass_at_k", {"step": 0.5}, "step=0.5: step must be a whole number, 0 or more"),
        ("pass_at_k", {"phase": "evl"}, "--phase is 'evl'"),
        ("pass_at_k", {"step": "abc"}, "step='abc': step must be a whole number, 0 or more"),
        ("objective", {"loss_type": "none"}, "--loss-type is 'none'"),
        ("failures", {"limit": "all"}, "failures: limit is 'all'; expected int"),
    ],
)
def test_what_a_parameter_cannot_be(here, query, parameters, says):
    with pytest.raises(RlvrError, match=says):
        rlvr_cli.open_run("a-1").sql(query, **parameters)


def test_a_parameter_of_ones_own_query_is_of_any_type(here):
    query = "SELECT $k AS k, $step AS step, $least AS least, $limit AS limit"
    given = {"k": -1, "step": 2.0, "least": "x", "limit": [0, 5]}
    (row,) = rlvr_cli.open_run("a-1").sql(query, **given)
    assert row == given
    assert isinstance(row["step"], float)


def test_summaries_of_what_cannot_be(here):
    for phase, step, says in (("evl", None, "--phase is 'evl'"), ("eval", -1, "step must be a whole number")):
        with pytest.raises(RlvrError, match=says):
            rlvr_cli.open_run("a-1").summary(phase=phase, step=step)


def test_values_of_numpy_and_whatever_is_several(here):
    run = rlvr_cli.open_run("a-1")
    at_k = list(run.sql("at_k", k=[1, 2]))
    for ks in ((1, np.int64(2)), np.array([1, 2])):
        assert list(run.sql("at_k", k=ks)) == at_k
    assert list(run.sql("SELECT $A AS a, $b AS b", A=np.float32(0.5), b=range(2))) == [{"a": 0.5, "b": [0, 1]}]
    for first in (np.int64(0), np.float64(0.0)):
        given: Any = {"step": first, "k": np.array([first + 1])}  # pandas has floats where a column has gaps
        assert list(run.sql("at_k", **given)) == list(run.sql("at_k", step=0, k=1))
    assert run.summary(step=given["step"]) == run.summary(step=0)
    with pytest.raises(RlvrError, match="it has no rows"):
        run.plot("pass_at_k", step=given["step"] + 7, set=("k=1",))


def test_numbers_are_plain(here):
    """DuckDB has decimals for the sums of whole numbers, which JSON does not take, and pandas does not draw."""
    query = "SELECT sum(step) AS s, count_if(reward > 0) AS n, 1.5 * count(*) AS d, 10::HUGEINT ** 30 AS h, sum(NULL::INT) AS u FROM rollouts"
    rows = rlvr_cli.open_run("a-1").sql(query)
    assert json.dumps(list(rows)) == '[{"s": 10, "n": 1, "d": 6.0, "h": 1e+30, "u": null}]'
    assert [str(kind) for kind in rows.pandas().dtypes[:4]] == ["int64", "int64", "float64", "float64"]
    nested = """
        SELECT list(s) AS l, {'a': [1.5]} AS st, MAP {'k': max(s)} AS m, [1.5]::DECIMAL(4, 1)[1] AS f, 'u'::ENUM ('u') AS e,
        union_value(n := 1) AS u FROM (SELECT sum(step) AS s FROM rollouts)
    """
    (row,) = rlvr_cli.open_run("a-1").sql(nested)
    assert json.dumps(row) == '{"l": [10], "st": {"a": [1.5]}, "m": [["k", 10]], "f": [1.5], "e": "u", "u": 1}'


def test_differences_of_times_are_durations(here):
    """DuckDB has intervals of months, days and microseconds, which Polars does not take."""
    run = rlvr_cli.open_run("a-1")
    query = "SELECT max(sampled_at) - min(sampled_at) + INTERVAL 1 DAY + INTERVAL 2 MICROSECONDS AS x, NULL::INTERVAL AS n FROM rollouts"
    rows = run.sql(query)
    assert rows.arrow().schema.types == [pa.duration("us")] * 2
    assert list(rows) == [{"x": timedelta(days=1, microseconds=2), "n": None}]
    for months in ("INTERVAL 1 MONTH", "INTERVAL 2000000000 DAYS"):
        (row,) = run.sql(f"SELECT {months} AS x")
        assert row["x"].months or row["x"].days


def test_several_runs(here):
    runs = rlvr_cli.open_runs("a-*")
    assert [row["run_id"] for row in runs.sql("SELECT run_id FROM runs ORDER BY run_id")] == ["a-1", "a-2"]
    assert [s.run_id for s in rlvr_cli.open_runs("a-2", "a-1").summary()] == ["a-2", "a-1"]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("DELETE FROM runs", "must be one SELECT"),
        ("SELECT 1; SELECT 2", "2 statements"),
        ("SELECT * FROM read_csv('runs/a-1/run.json')", "not allowed"),
        ("SELECT * FROM 'runs/a-2/metrics.parquet'", "other than the runs"),
        ("WITH a AS (COPY (SELECT 1) TO 'x.csv') SELECT 1", "must be one SELECT"),
    ],
)
def test_the_database_is_sealed(here, query, says):
    with pytest.raises(RlvrError, match=says):
        rlvr_cli.open_run("a-1").sql(query)


def test_a_run_in_progress_is_read_anew(here):
    with RunDir.resume("runs/a-1") as writer:
        run = rlvr_cli.open_run("a-1")
        before = len(run.rollouts)
        writer.commit_rollouts("eval", 9, [a_rollout(run_id="a-1", step=9)])
        assert len(run.rollouts) == before + 1


@pytest.mark.slow
def test_curves_are_the_pictures_of_the_command_line(here, capsys):
    figure = rlvr_cli.open_runs("a-*").curves()
    figure.save("curves.png")
    figure.save("curves.svg")
    assert (here / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert figure._repr_svg_() == (here / "curves.svg").read_text()
    assert "<svg" in figure._repr_svg_()
    assert capsys.readouterr() == ("", "")
    with pytest.raises(RlvrError, match="Cannot write"):
        figure.save("missing/curves.png")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"colour": "red"}, "plot: 'colour' is not an option of rlvr analyze"),
        ({"titel": "x"}, r"Did you mean 'title'\?"),
        ({"step": "a"}, "plot: step is 'a'; expected int"),
        ({"set": "k"}, "--set k has no value"),
        ({"panels": "none"}, "There is no panel 'none'"),
    ],
)
def test_options_of_a_picture_are_those_of_the_command(here, options, says):
    with pytest.raises(RlvrError, match=says):
        rlvr_cli.open_run("a-1").curves(**options)


def test_a_text_is_one_value_of_an_option_that_takes_several(here):
    assert rlvr_cli.open_run("a-1").plot("pass_at_k", set="k=1", step=None).options["set"] == "k=1"


def test_pictures_in_threads_leave_the_streams_as_they_are(here, monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())  # pytest's own come back whatever is lost
    run, streams = rlvr_cli.open_run("a-1"), (sys.stdout, sys.stderr)

    def draw_nothing(of: str) -> None:
        with pytest.raises(RlvrError, match="has no value"):
            run.plot("pass_at_k", set=of)

    switches = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(draw_nothing, ["k"] * 100))
    sys.setswitchinterval(switches)
    assert (sys.stdout, sys.stderr) == streams


def test_the_directory_of_runs_is_that_of_the_environment(here, monkeypatch):
    Path("runs").rename("elsewhere")
    monkeypatch.setenv("RLVR_RUNS_DIR", "elsewhere")
    assert rlvr_cli.open_runs("a-1", "a-2").paths == [Path("elsewhere/a-1"), Path("elsewhere/a-2")]
    assert rlvr_cli.open_run("a-1").paths == [Path("elsewhere/a-1")]
    with pytest.raises(RlvrError, match="neither in runs nor"):
        rlvr_cli.open_run("a-1", runs_dir="runs")
    monkeypatch.setenv("HOME", str(Path.cwd()))
    monkeypatch.setenv("RLVR_RUNS_DIR", "~/elsewhere")
    for opened in (rlvr_cli.open_run("a-1"), rlvr_cli.open_run("~/elsewhere/a-1")):
        assert opened.paths == [Path.cwd() / "elsewhere/a-1"]


def test_several_runs_of_one_name(here):
    Path("runs").rename("old")
    with RunDir.create("runs", "grpo", name="a-1", metadata={}) as run:
        run.commit_rollouts("eval", 0, [a_rollout(run_id="a-1", reward=1.0)])
    runs = rlvr_cli.open_runs("a-1", "old/a-1")
    sums = list(runs.sql("SELECT run_id, sum(reward) AS s FROM rollouts GROUP BY 1 ORDER BY 1"))
    assert sums == [{"run_id": "old/a-1", "s": 1.0}, {"run_id": "runs/a-1", "s": 1.0}]
    assert [s.run_id for s in runs.summary()] == ["runs/a-1", "old/a-1"]


def test_the_examples_of_the_docs(here):
    with RunDir.create("runs", "grpo", name="q0-grpo", metadata={}) as run:
        for step in (0, 5):
            run.commit_rollouts("eval", step, [a_rollout(run_id="q0-grpo", step=step, mean_entropy=0.5)])
            run.commit_metrics(step, "eval", {"reward/mean": 1.0, "reward/samples": 1.0})
    page = (Path(__file__).parents[1] / "docs" / "analysis.md").read_text()
    (examples,) = re.findall(r"^```pycon\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    printed: list[str] = []
    found = doctest.DocTestRunner(verbose=False).run(
        doctest.DocTestParser().get_doctest(examples, {}, "analysis.md", None, 0), out=printed.append
    )
    assert found.attempted >= 9
    assert found.failed == 0, "".join(printed)


def test_what_a_notebook_shows(here):
    rows = rlvr_cli.open_run("a-1").sql("SELECT x, NULL AS y FROM range(30) AS r(x)")
    lines = repr(rows).splitlines()
    assert lines[0].split() == ["x", "y"]
    assert (lines[2].split(), lines[-1]) == (["0", "NULL"], "... 10 more rows")
    assert len(lines) == 23


def test_two_columns_of_one_name_are_both_shown(here):
    rows = rlvr_cli.open_run("a-1").sql("SELECT 1 AS x, 2 AS x, 3 AS y")
    assert list(rows) == [{"x": 1, "x_2": 2, "y": 3}]
    assert [line.split() for line in repr(rows).splitlines()[::2]] == [["x", "x_2", "y"], ["1", "2", "3"]]


def test_the_import_is_quick():
    """`import rlvr_cli` imports nothing that it does not need."""
    code = "import sys, rlvr_cli; print(sorted({m.split('.')[0] for m in sys.modules} & {'duckdb', 'pyarrow', 'torch', 'rich', 'typer'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
