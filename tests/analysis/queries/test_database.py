"""Queries: what they answer, and what they say of errors. What no query can do: tests/reliability/test_sql.py."""

import re
import time
from dataclasses import field, fields, make_dataclass, replace
from datetime import UTC
from pathlib import Path
from random import Random
from typing import Annotated, NamedTuple

import pyarrow as pa
import pytest

from checks import tree_hash
from factories import a_grade, a_rollout, a_segment
from rlvr_cli.analysis.queries.database import _rows_in, open_examples, open_runs
from rlvr_cli.analysis.queries.named_queries import named_queries, parse_query
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.manifest import entry_of
from rlvr_cli.runs.readers import RunInfo, read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.several import read_runs
from rlvr_cli.runs.storage.schemas import arrow_schema
from rlvr_cli.types import SCHEMA_VERSION, Example, Float32, Int32, Regrade, Rollout, Since

SECRET = "s3cret-canary"


class Span(NamedTuple):
    low: Int32
    high: Int32


def rollout(run_id, example, sample=0, *, reward=1.0, phase="eval", step=0, **changes):
    values = {
        "run_id": run_id, "phase": phase, "step": step, "policy_version": step, "example_id": example,
        "sample_index": sample, "prompt_ids": (1, 2), "response_ids": (3, 4, 5), "sampled_logprobs": (-0.5, -1.0, -1.5),
        "stop_reason": "</answer>", "num_prompt_tokens": 2, "num_response_tokens": 3, "answer_reward": reward, "reward": reward,
        "category": f"format_1_answer_{int(reward or 0)}", "failure_kind": None if reward else "wrong_answer",
        "mean_entropy": 0.5, "seed": 7,
    }  # fmt: skip
    return a_rollout(**{**values, **changes})


def run_of(name, parts=(), metadata=None, versions=None):
    """A run that no directory holds."""
    entries = [
        entry_of(part.read_bytes(), path=str(part), rows=1, phase="eval", step=0, schema_version=version)
        for part, version in zip(parts, versions or [1] * len(parts), strict=True)
    ]
    return RunInfo(Path(name), name, metadata or {}, [*parts], [], [], None, "", entries, settled=0, notices=())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two runs; `a` has 3 rollouts of step 0 and 1 of step 5 in two parts, `b` has 1."""
    root = tmp_path_factory.mktemp("runs [x] it's")  # brackets are a glob pattern, the quote ends an SQL string
    metadata = {"seed": 3, "config": {"num_samples": 1}, "facts": {"model": {"name": "tiny"}, "dataset": {"name": "d"}}}
    with RunDir.create(root, "eval", name="a", metadata=metadata) as run:
        run.commit_rollouts(
            "eval", 0, [rollout("a", "x"), rollout("a", "y", reward=0.0), rollout("a", "z", reward=None)]
        )
        run.commit_rollouts("eval", 5, [rollout("a", "x", step=5)])
        run.commit_metrics(0, "eval", {"sampling/tokens_per_second": 12.5})
    with RunDir.create(root, "eval", name="b", metadata={}) as run:
        run.commit_rollouts("eval", 0, [rollout("b", "x", reward=0.0)])
    (root / "secret.txt").write_text(SECRET)
    (root / "a" / "rollouts" / "secret.txt").write_text(SECRET)
    (root / "a" / "rollouts" / "stray.parquet").write_text("not Parquet, and in no manifest")
    return root


@pytest.fixture(scope="module")
def database(root):
    with open_runs([read_run(root / "a"), read_run(root / "b")], timeout_seconds=2) as opened:
        yield opened


# What queries answer


def test_rollouts_of_several_runs_are_one_view(database):
    table = database.select("SELECT run_id, count(*), count(reward), sum(reward) FROM rollouts GROUP BY 1 ORDER BY 1")
    assert table.rows == [("a", 4, 3, 2.0), ("b", 1, 1, 0.0)]


def test_runs_of_one_name_are_two_in_every_view(root, tmp_path):
    with RunDir.create(tmp_path / "new", "grpo", name="a", metadata={}) as run:
        run.commit_rollouts("train", 0, [rollout("a", "x", phase="train"), rollout("a", "y", 1, phase="train")])
        run.commit_segments(0, [a_segment(run_id="a")])
        for attempt in (1, 2):
            run.commit_grades("train", 0, [a_grade(run_id="a", phase="train", example_id="x", attempt=attempt)])
        run.commit_metrics(0, "train", {"loss": 1.5})
    old = root.name + "/a"
    with open_runs(read_runs([tmp_path / "new/a", root / "a"])) as database:
        counts = {
            view: database.select(f"SELECT run_id, count(*) FROM {view} GROUP BY ALL ORDER BY ALL").rows
            for view in ("rollouts", "segments", "grades", "metrics", "runs")
        }
        assert counts == {
            "rollouts": [("new/a", 2), (old, 4)],
            "segments": [("new/a", 1)],
            "grades": [("new/a", 1)],
            "metrics": [("new/a", 1), (old, 1)],
            "runs": [("new/a", 1), (old, 1)],
        }
        first = database.select("SELECT * FROM rollouts")
    with open_runs([read_run(tmp_path / "new/a")]) as alone:
        assert alone.select("SELECT * FROM rollouts").columns == first.columns
    with pytest.raises(RlvrError, match="named a: their rows would be mixed up"), open_runs([read_run(root / "a")] * 2):
        pass


def test_metrics_have_the_run_they_are_of(database):
    table = database.select("SELECT run_id, step, phase, name, value FROM metrics")
    assert table.rows == [("a", 0, "eval", "sampling/tokens_per_second", 12.5)]


def test_runs_have_their_configs(database):
    table = database.select(
        "SELECT run_id, command, status, seed, model, dataset, config->>'num_samples' FROM runs ORDER BY run_id"
    )
    assert table.rows == [
        ("a", "eval", "finished", 3, "tiny", "d", "1"),
        ("b", "eval", "finished", None, None, None, None),
    ]
    created = database.select("SELECT created_at FROM runs").rows[0][0]
    assert abs(created.replace(tzinfo=UTC).timestamp() - time.time()) < 600


def test_lists_come_back_whole(database):
    table = database.select("SELECT response_ids, sampled_logprobs FROM rollouts LIMIT 1")
    assert table.rows == [([3, 4, 5], [-0.5, -1.0, -1.5])]


def test_limit_says_that_there_is_more(database):
    assert database.select("SELECT * FROM range(10)", limit=10).more is False
    table = database.select("SELECT * FROM range(11)", limit=10)
    assert (len(table.rows), table.more) == (10, True)
    assert len(database.select("SELECT * FROM range(5000)").rows) == 5000


def test_parameters(database):
    sql = "SELECT count(*) FROM rollouts WHERE phase = $phase AND ($step IS NULL OR step = $step)"
    assert database.select(sql, {"phase": "eval", "step": None, "unused": 1}).rows == [(5,)]
    assert database.select(sql, {"phase": "eval", "step": 5}).rows == [(1,)]
    with pytest.raises(RlvrError, match=r"no value for \$step"):
        database.select(sql, {"phase": "eval"})


def test_a_run_without_anything_has_the_same_columns(tmp_path, database):
    RunDir.create(tmp_path, "sft", name="empty", metadata={}).close()
    with open_runs([read_run(tmp_path / "empty")]) as empty:
        for view in ("rollouts", "metrics"):
            table = empty.select(f"SELECT * FROM {view}")
            assert table.rows == []
            assert table.columns == database.select(f"SELECT * FROM {view} LIMIT 1").columns
        kinds = "SELECT column_name, data_type FROM duckdb_columns() WHERE table_name = 'rollouts'"
        assert empty.select(kinds).rows == database.select(kinds).rows
        assert empty.select("SELECT count(*) FROM runs").rows == [(1,)]


def test_columns_are_the_fields_of_a_rollout(database):
    assert database.select("SELECT * FROM rollouts LIMIT 1").columns == tuple(f.name for f in fields(Rollout))


def test_a_part_with_one_more_column(root, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = read_run(root / "a").parts[0]
    wider = pq.read_table(first).append_column("extra", pa.array([1.0, 2.0, 3.0]))
    pq.write_table(wider, tmp_path / "wider.parquet")
    with open_runs([run_of("a", [first, tmp_path / "wider.parquet"], versions=[1, 2])]) as both:
        assert both.select("SELECT count(*), count(extra), sum(extra) FROM rollouts").rows == [(6, 3, 6.0)]


def test_parts_of_an_older_version_alone_have_all_columns(root, tmp_path):
    import pyarrow.parquet as pq

    table = pq.read_table(read_run(root / "a").parts[0])
    pq.write_table(table.drop_columns(["turn_facts"]), tmp_path / "older.parquet")
    with open_runs([run_of("a", [tmp_path / "older.parquet"], versions=[SCHEMA_VERSION - 1])]) as older:
        assert older.select("SELECT turn_facts FROM rollouts").rows == [(None,)] * 3


def test_parts_of_one_version_are_read_when_they_are_asked_for(root, tmp_path):
    first, torn = read_run(root / "a").parts[0], tmp_path / "torn.parquet"
    torn.write_bytes(b"not Parquet")
    with open_runs([run_of("a", [first, torn])]) as opened, pytest.raises(RlvrError, match="torn"):
        opened.select("SELECT count(*) FROM rollouts")
    with pytest.raises(RlvrError, match="torn"), open_runs([run_of("a", [first, torn], versions=[1, 2])]):
        pass  # all footers are read at once


def test_the_footers_of_many_parts_are_not_kept(root, monkeypatch):
    def kept(run):
        with open_runs([run]) as opened:
            ((setting,),) = opened.select("SELECT current_setting('parquet_metadata_cache')").rows
        return setting

    monkeypatch.setattr("rlvr_cli.analysis.queries.database.CACHED_FILES", 1)
    info = read_run(root / "a")
    assert not kept(info)
    assert kept(replace(info, parts=info.parts[:1]))


def test_a_query_gives_the_same_bits_each_time(tmp_path):
    random = Random(1)
    with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
        for part in range(4):
            rows = [rollout("r", f"{part}-{i}", mean_entropy=random.random()) for i in range(10)]
            run.commit_rollouts("eval", 0, rows)
    found = set()
    for _ in range(3):
        with open_runs([read_run(tmp_path / "r")]) as database:
            found.add(database.select("SELECT sum(mean_entropy), current_setting('threads') FROM rollouts").rows[0])
    assert len(found) == 1
    assert found.pop()[1] == 1  # by several, parts come in any order, and so do sums of them


def test_a_query_over_many_rows_has_more_than_one_thread(tmp_path, monkeypatch):
    monkeypatch.setattr("rlvr_cli.analysis.queries.database.ONE_THREAD", 2)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
        run.commit_metrics(0, "eval", {"a": 1.0, "b": 2.0, "c": 3.0})
        for parts, threads in enumerate((1, 1, 3), start=1):
            run.commit_rollouts("eval", parts, [rollout("r", "x", step=parts)])
            with open_runs([read_run(tmp_path / "r")]) as database:
                assert database.select("SELECT current_setting('threads')").rows == [(threads,)]


def test_what_may_spill_has_one_thread_and_memory_as_the_root_of_its_rows(root, monkeypatch):
    monkeypatch.setattr("rlvr_cli.analysis.queries.database.ONE_THREAD", 2)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    info = read_run(root / "a")
    for rows, memory in ((10, "45.7 MiB"), (16_000_000, "183.1 MiB")):  # 48 and 192 MB
        entries = tuple(replace(entry, rows=rows) for entry in info.entries[:1])
        with open_runs([replace(info, entries=entries)], spills=True) as database:
            (settings,) = database.select("SELECT current_setting('threads'), current_setting('memory_limit')").rows
        assert settings == (1, memory)


def test_what_needs_more_than_its_memory_goes_to_disk_in_our_own_queries_alone(root, monkeypatch):
    sql = "SELECT max(n) FROM (SELECT range % 1000000 AS k, count(*) AS n FROM range(1200000) GROUP BY k)"
    monkeypatch.setattr("rlvr_cli.analysis.queries.database.SPILLING_MB", 24)
    monkeypatch.setattr("rlvr_cli.analysis.queries.database.MEMORY_LIMIT", "24MB")
    with open_runs([read_run(root / "a")], spills=True) as opened:
        assert opened.select(sql).rows == [(2,)]
    with open_runs([read_run(root / "a")]) as opened, pytest.raises(RlvrError, match="more than 24MB"):
        opened.select(sql)


@pytest.mark.parametrize("mixed", [False, True])
def test_columns_that_came_later_than_the_parts(root, tmp_path, mixed):
    import duckdb
    import pyarrow as pa
    import pyarrow.parquet as pq

    added = [
        ("later_values", Annotated[tuple[Float32, ...] | None, Since(SCHEMA_VERSION + 1)], None),
        ("later_spans", Annotated[tuple[Span, ...] | None, Since(SCHEMA_VERSION + 1)], None),
        ("later_source", Annotated[str, Since(SCHEMA_VERSION + 2)], "it's"),
    ]
    known = [(f.name, f.type, field(default=f.default)) for f in fields(Rollout)]
    record = make_dataclass("Later", [*known, *added], frozen=True)
    first = read_run(root / "a").parts[0]
    parts = [first]
    if mixed:
        table = pq.read_table(first)
        for name, value in (("later_values", [0.5]), ("later_spans", [(0, 2)]), ("later_source", "tool")):
            place = arrow_schema(record).field(name)
            table = table.append_column(place, pa.array([value] * len(table), place.type))
        parts.append(tmp_path / "newer.parquet")
        pq.write_table(table, parts[1])
    with duckdb.connect(":memory:") as connection:
        rows = connection.sql(_rows_in(parts, record, connection))
        assert rows.columns == [f.name for f in fields(record)]
        assert [str(t) for t in rows.types[-3:]] == ["FLOAT[]", "STRUCT(low INTEGER, high INTEGER)[]", "VARCHAR"]
        found = rows.project("later_values, later_spans, later_source").fetchall()
    newer = [([0.5], [{"low": 0, "high": 2}], "tool")] * 3
    assert found == [(None, None, "it's")] * 3 + (newer if mixed else [])


def test_directories_whose_names_are_patterns(tmp_path):
    for name in ("x[1]", "x1", "x*", "q'", "ü\n{a,b}"):
        with RunDir.create(tmp_path / name, "eval", name="r", metadata={}) as run:
            run.commit_rollouts("eval", 0, [rollout("r", name)])
        with open_runs([read_run(tmp_path / name / "r")]) as opened:
            assert opened.select("SELECT example_id FROM rollouts").rows == [(name,)]


def test_relative_paths(root, monkeypatch):
    monkeypatch.chdir(root)
    with open_runs([read_run(Path("a"))]) as opened:
        assert opened.select("SELECT count(*) FROM rollouts").rows == [(4,)]


def test_two_runs_of_one_name_are_refused(root):
    with pytest.raises(RlvrError, match="are named a"), open_runs([read_run(root / "a")] * 2):
        pass


def test_metadata_that_json_cannot_hold(root):
    with pytest.raises(RlvrError, match=r"run\.json of r"), open_runs([run_of("r", metadata={"x": float("nan")})]):
        pass
    hostile = {"seed": {"not": "a number"}, "created_at": "yesterday", "facts": "none", "command": "\ud800"}
    with open_runs([run_of("r", metadata=hostile)]) as opened:
        assert opened.select("SELECT command, created_at, seed, model FROM runs").rows == [("?", None, None, None)]


def test_a_damaged_part(tmp_path):
    (tmp_path / "p.parquet").write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(RlvrError, match=r"p\.parquet"), open_runs([run_of("r", [tmp_path / "p.parquet"])]):
        pass


def graded(run_id, example, grader, reward, *, attempt=0):
    return a_grade(
        run_id=run_id, example_id=example, grader=grader, answer_reward=reward, reward=reward, attempt=attempt
    )


def test_the_grades_of_a_run_are_a_view_of_their_own(tmp_path, database):
    with RunDir.create(tmp_path, "eval", name="g", metadata={}) as run:
        run.commit_rollouts("eval", 0, [rollout("g", e) for e in "xyz"])
        run.commit_grades("eval", 0, [graded("g", e, "r1_zero", 0.0) for e in "xyz"])
        run.commit_grades("eval", 0, [graded("g", "x", "mine.py:f", 0.5)])
        run.commit_grades("eval", 0, [graded("g", e, "r1_zero", 1.0, attempt=1) for e in "xy"])  # cut short
    with open_runs([read_run(tmp_path / "g")]) as opened:
        table = opened.select("SELECT grader, example_id, reward FROM grades ORDER BY ALL")
        assert table.rows == [
            ("mine.py:f", "x", 0.5),
            ("r1_zero", "x", 1.0),
            ("r1_zero", "y", 1.0),
            ("r1_zero", "z", 0.0),
        ]
        assert opened.select("SELECT count(*) FROM rollouts").rows == [(3,)]
        everything = opened.select("FROM grades")
        assert everything.columns == tuple(f.name for f in fields(Regrade))
        kinds = "SELECT column_name, data_type FROM duckdb_columns() WHERE table_name = 'grades'"
        with_some = opened.select(kinds).rows
        with pytest.raises(RlvrError):
            opened.select(f"SELECT * FROM read_parquet('{next((tmp_path / 'g' / 'grades').iterdir())}')")
    assert database.select("FROM grades").rows == []  # of runs that were never graded again
    assert database.select(kinds).rows == with_some


# Conditions


def test_a_condition_may_ask_anything_of_a_row(database):
    for text in (
        "reward = 1",
        "reward = 1 -- a remark",
        "example_id IN (SELECT example_id FROM grades)",
        "true",
        "NULL::BOOL",
    ):
        assert text in database.condition(text, table="rollouts")
    condition = database.condition("reward = 1 OR\nreward IS NULL", table="rollouts")
    assert sum(row[0] for row in database.rows(f"SELECT coalesce({condition}, false) FROM rollouts")) == 3


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "--", "reward", "1", "'true'", "true, true", "true) OR (true", "(true", "true)", "true AS x", "true x",
        "true) FROM rollouts WHERE (true", "true FROM rollouts", "true WHERE true", "true LIMIT 1", "true ORDER BY 1",
        "true) UNION SELECT (true", "true; SELECT true", "true /*", "'", "count(*) > 1", "row_number() OVER () = 1",
        "unnest([true])", "*", "COLUMNS(*)", "$1", "?", "$phase = 'eval'", "DISTINCT true", "SELECT true", "FROM runs",
        "(WITH a AS (COPY (SELECT 1) TO '{part}' (USE_TMP_FILE false)) SELECT true)", "sleep_ms(1000) IS NULL",
        "EXISTS (FROM read_text('/etc/passwd'))", "reward = 1 \0", "reward = '\ud800'", "true AND " * 9000 + "true",
        "nothing = 1", "getenv('HOME') = ''",
    ],
)  # fmt: skip
def test_what_is_no_condition(root, database, text):
    run = read_run(root / "a")
    before = tree_hash(root)
    with pytest.raises(RlvrError):
        database.condition(text.replace("{part}", str(run.parts[0]).replace("'", "''")), table="rollouts")
    assert tree_hash(root) == before


def test_the_examples_of_a_dataset_are_a_table():
    examples = [Example("a", "q's\ud800", "1"), Example("b", "", "2")]
    with open_examples(examples) as database:
        assert list(database.rows("SELECT rowid, * FROM dataset")) == [(0, "a", "q's\\ud800", "1"), (1, "b", "", "2")]
        assert database.condition("ground_truth::INT > 1", table="dataset")
        with pytest.raises(RlvrError, match="dataset has: id, question, ground_truth"):
            database.condition("reward = 1", table="dataset")
        with pytest.raises(RlvrError):
            database.select("SELECT * FROM read_text('/etc/passwd')")
    with open_examples([]) as database:
        assert list(database.rows("FROM dataset")) == []


# Errors that teach


def test_an_unknown_column_names_the_columns(database):
    with pytest.raises(RlvrError) as caught:
        database.select("SELECT accuracy FROM rollouts")
    assert caught.value.problem.startswith('Referenced column "accuracy" not found')
    assert "answer_reward" in caught.value.hint


def test_an_unknown_table_names_the_tables(database):
    with pytest.raises(RlvrError) as caught:
        database.select("SELECT * FROM rollout")
    assert caught.value.problem.startswith("Table with name rollout does not exist!")
    assert {line.split(" has:")[0] for line in caught.value.hint.splitlines()} == {
        "rollouts",
        "segments",
        "grades",
        "metrics",
        "runs",
    }


def test_a_syntax_error_shows_the_place(database):
    with pytest.raises(RlvrError, match=r'syntax error at or near "selec"\nLINE 1: selec 1\n *\^'):
        database.select("selec 1")


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("", "this is nothing"),
        ("-- a comment", "this is nothing"),
        ("SELECT 1; SELECT 2", "2 statements"),
        ("EXPLAIN SELECT 1", "this is EXPLAIN"),
        ("EXPLAIN ANALYZE COPY (SELECT 1) TO 'x'", "this is EXPLAIN"),
        ("PIVOT rollouts ON step", "PIVOT needs a list"),
        ("SELECT now()", "time zone"),
        ("SELECT {'at': [now()]}", "time zone"),
        ("SELECT 'x'::INT", "Could not convert"),
        ("SELECT sleep_ms(100) FROM range(100000)", "sleep_ms is not allowed in queries"),
        ("SELECT 1 \0 ", "NUL"),
        ("SELECT '\ud800'", "surrogate"),
        ("SELECT " + "1 + " * 20000 + "1", "longer than"),
    ],
)
def test_what_is_refused_says_why(database, sql, message):
    with pytest.raises(RlvrError, match=message):
        database.select(sql)


def test_plain_select_forms_work(database):
    for sql in (
        "FROM rollouts", "TABLE rollouts", "VALUES (1)", "DESCRIBE rollouts", "SHOW TABLES", "SUMMARIZE rollouts",
        "WITH a AS (SELECT 1) FROM a", "SELECT 1 UNION SELECT 2", "PIVOT rollouts ON step IN (0, 5) USING count(*)",
        "SELECT unnest(response_ids) FROM rollouts", "FROM range(3)", "SELECT * FROM rollouts USING SAMPLE 2",
        "SELECT 1;",
        "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < 5) SELECT sum(n) FROM t",
        "FROM histogram_values(rollouts, num_response_tokens)", "SELECT * FROM json_each('[1, 2]')",
    ):  # fmt: skip
        database.select(sql, limit=5)


# Named queries


def test_every_named_query_says_what_it_answers_and_runs(database):
    queries = named_queries()
    assert {"summary", "categories", "failures"} <= queries.keys()
    for name, query in queries.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert query.description.endswith("."), name
        if name == "summary":  # a script
            assert list(database.script(query.sql, query.parameters))
        else:
            kinds = database.arrow(query.sql, query.parameters).schema
            assert not any(pa.types.is_decimal(kind) for kind in kinds.types), f"{name}: sums need ::BIGINT: {kinds}"
        for parameter in query.parameters:
            assert f"${parameter}" in query.sql, f"{name} declares :{parameter} and does not use it"


def test_parse_query():
    query = parse_query("q", '-- What it is.\n-- More.\n-- :k = 8\n-- :phase = "eval"\n\n-- :not = 1\nSELECT $k')
    assert (query.description, dict(query.parameters)) == ("What it is.", {"k": 8, "phase": "eval"})
    assert parse_query("q", "SELECT 1").description == ""
    with pytest.raises(RlvrError, match="not JSON"):
        parse_query("q", "-- What.\n-- :k = eval\nSELECT 1")


def test_categories(database):
    query = named_queries()["categories"]
    table = database.select(query.sql, {**query.parameters, "step": 0})
    shares = [(row[0], row[2], row[3], round(row[4], 6)) for row in table.rows]
    assert shares == [
        ("a", "format_1_answer_1", 1, 0.333333),
        ("a", "format_1_answer_0", 2, 0.666667),
        ("b", "format_1_answer_0", 1, 1.0),
    ]
    latest = database.select(query.sql, query.parameters)  # the last step of each run
    assert [row[:4] for row in latest.rows] == [("a", 5, "format_1_answer_1", 1), ("b", 0, "format_1_answer_0", 1)]


def test_failures(database):
    query = named_queries()["failures"]

    def keys(**parameters):
        table = database.select(query.sql, {**query.parameters, "step": 0, **parameters})
        return [row[table.columns.index("example_id")] for row in table.rows]

    assert keys() == ["y", "z", "x"]  # run a, then run b; a NULL reward is a failure
    assert keys(limit=1) == ["y"]
    assert keys(category="format_1_answer_1") == ["x"]  # of run a: asked for by its category, rewarded or not
    assert keys(failure_kind="wrong_answer") == ["y", "z", "x"]
    assert keys(failure_kind="truncated") == []
