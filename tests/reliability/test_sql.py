"""No query writes, reads anything but the runs, or runs forever; the parser of queries does not, either."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from checks import tree_hash
from factories import a_rollout
from marks import slow
from rlvr_cli.analysis.queries.database import REFUSED_FUNCTIONS, open_runs
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir

ROOT = Path(__file__).parents[2]
SECRET = "s3cret-canary"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run `a` of 40 rollouts, and secrets beside it and in it."""
    root = tmp_path_factory.mktemp("runs [x] it's")  # brackets are a glob pattern, the quote ends an SQL string
    with RunDir.create(root, "eval", name="a", metadata={"seed": 0, "config": {}, "facts": {}}) as run:
        run.commit_rollouts(
            "eval", 0, [a_rollout(run_id="a", example_id=str(i), response="so " * 20) for i in range(40)]
        )
        run.commit_metrics(0, "eval", {"reward/mean": 1.0})
    (root / "secret.txt").write_text(SECRET)
    (root / "a" / "rollouts" / "secret.txt").write_text(SECRET)
    (root / "a" / "rollouts" / "stray.parquet").write_text("not Parquet, and in no manifest")
    return root


# What no query can do

HOSTILE = r"""
    COPY (SELECT 1) TO '{part}'
    COPY (SELECT 1) TO '{part}' (FORMAT parquet, USE_TMP_FILE false)
    WITH a AS (COPY (SELECT 1 AS one) TO '{part}' (FORMAT parquet, USE_TMP_FILE false)) SELECT * FROM a
    WITH a AS MATERIALIZED (COPY (SELECT 1) TO '{part}' (USE_TMP_FILE false)) SELECT 1
    SELECT (WITH a AS (COPY (SELECT 1) TO '{part}' (USE_TMP_FILE false)) SELECT 1)
    SELECT 1 WHERE 1 IN (WITH a AS (COPY (SELECT 1) TO '{part}' (USE_TMP_FILE false)) SELECT 1)
    SELECT 1 UNION (WITH a AS (COPY (SELECT 1) TO '{part}' (USE_TMP_FILE false)) SELECT 1)
    WITH RECURSIVE a AS (COPY (SELECT 1) TO '{part}' (USE_TMP_FILE false)) SELECT 1
    SELECT * FROM (WITH a AS (COPY rollouts TO '{part}' (USE_TMP_FILE false)) SELECT 1)
    PIVOT (WITH a AS (COPY rollouts TO '{part}' (USE_TMP_FILE false)) SELECT 1 AS k) ON k IN (1) USING count(*)
    DESCRIBE (WITH a AS (COPY rollouts TO '{part}' (USE_TMP_FILE false)) SELECT 1 AS k)
    WITH a AS (COPY (SELECT 1) TO '{root}/new.csv') SELECT 1
    WITH a AS (COPY metrics TO '{metrics}' (FORMAT parquet, USE_TMP_FILE false)) SELECT 1
    WITH a AS (INSERT INTO runs (run_id) VALUES ('x') RETURNING *) SELECT * FROM a
    WITH a AS (DELETE FROM runs RETURNING *) SELECT * FROM a
    WITH a AS (UPDATE runs SET status = 'finished' RETURNING *) SELECT * FROM a
    SELECT * FROM query('COPY (SELECT 1) TO ''{part}'' (USE_TMP_FILE false)')
    SELECT * FROM query('WITH a AS (COPY (SELECT 1) TO ''{part}'' (USE_TMP_FILE false)) SELECT 1')
    SELECT * FROM query_table('{secret}')
    FROM json_execute_serialized_sql(json_serialize_sql('WITH a AS (COPY (SELECT 1) TO ''{part}'') SELECT 1'))
    EXPLAIN ANALYZE COPY (SELECT 1) TO '{root}/x'
    EXPLAIN ANALYZE WITH a AS (COPY (SELECT 1) TO '{part}' (USE_TMP_FILE false)) SELECT 1
    EXPORT DATABASE '{root}/export'
    IMPORT DATABASE '{root}/a'
    ATTACH '{root}/new.db'
    ATTACH '{part}' AS p
    ATTACH ':memory:' AS m
    CREATE TABLE t AS SELECT 1
    CREATE OR REPLACE VIEW rollouts AS SELECT 1
    CREATE MACRO f() AS 1
    CREATE SECRET s (TYPE s3)
    DROP VIEW rollouts
    INSERT INTO runs (run_id) VALUES ('x')
    UPDATE runs SET status = 'finished'
    DELETE FROM runs
    SELECT 1; COPY (SELECT 1) TO '{root}/x'
    COPY runs FROM '{secret}'
    SET enable_external_access = true
    SET lock_configuration = false
    RESET allowed_paths
    SET VARIABLE x = 1
    PRAGMA enable_external_access
    SELECT * FROM enable_logging(storage = 'file', storage_path = '{root}/log')
    SELECT * FROM enable_profiling(save_location = '{root}/profile.json')
    CALL enable_logging()
    INSTALL httpfs
    LOAD httpfs
    LOAD '{secret}'
    CHECKPOINT
    VACUUM
    BEGIN
    PREPARE p AS SELECT 1
    EXECUTE p
    DEALLOCATE p
    USE memory
    SELECT * FROM read_text('{secret}')
    SELECT * FROM read_text('{root}/a/rollouts/secret.txt')
    SELECT * FROM read_blob('{secret}')
    SELECT * FROM read_csv('{secret}')
    SELECT * FROM read_csv_auto('/etc/passwd')
    SELECT * FROM read_json('{secret}')
    SELECT * FROM read_parquet('{root}/a/rollouts/*.parquet')
    SELECT * FROM read_parquet('{part}')
    SELECT * FROM parquet_scan('{secret}')
    SELECT * FROM parquet_metadata('{secret}')
    SELECT * FROM parquet_kv_metadata('{part}')
    SELECT * FROM sniff_csv('{secret}')
    SELECT * FROM glob('/etc/*')
    SELECT * FROM glob('{root}/**')
    SELECT * FROM '{secret}'
    SELECT * FROM '/etc/passwd'
    SELECT * FROM '{root}/a/rollouts/../../secret.txt'
    SELECT * FROM "{root}/secret.csv"
    SELECT * FROM read_duckdb('{secret}')
    SELECT * FROM 'https://example.com/x.parquet'
    SELECT * FROM read_text('https://example.com/')
    SELECT * FROM read_parquet('s3://bucket/x.parquet')
    SELECT * FROM read_text('/proc/self/environ')
    SELECT * FROM read_text(['{secret}'])
    SELECT * FROM system.main.read_text('{secret}')
    SELECT * FROM READ_TEXT('{secret}')
    SELECT * FROM "read_text"('{secret}')
    SELECT read_text('{secret}')
    SELECT (SELECT content FROM read_text('{secret}'))
    SELECT * FROM rollouts, LATERAL (SELECT content FROM read_text('{secret}'))
    SELECT getenv('HOME')
    SELECT * FROM arrow_scan(1, 2, 3)
    SELECT * FROM python_arrow_scan(1, 2, 3)
    SELECT * FROM pandas_scan(1)
    SELECT * FROM python_map_function(1)
    SELECT * FROM canary
    SELECT * FROM root
    SELECT * FROM register_external_resource('x')
    SELECT * FROM copy_database('memory', 'x')
    SELECT * FROM import_database('{root}/a')
    SELECT * FROM force_checkpoint()
    SELECT * FROM duckdb_secrets()
    SELECT * FROM which_secret('s3://x', 's3')
    CALL pragma_version()
    COMMENT ON TABLE runs IS 'x'
    ALTER TABLE runs ADD COLUMN x INT
    ANALYZE
    DETACH memory
    MERGE INTO runs USING runs AS r ON true WHEN MATCHED THEN DELETE
    TRUNCATE runs
    UPDATE EXTENSIONS
    UPDATE EXTENSIONS (httpfs)
    SELECT pg_sleep(1)
    SELECT sleep_ms(1000)
    SELECT list_transform([1000], x -> sleep_ms(x))
    SELECT (1000).sleep_ms()
    SELECT * FROM pg_sleep(1)
    FROM read_json_objects('{secret}')
    FROM read_ndjson_auto('{secret}')
    FROM parquet_schema('{part}')
    FROM parquet_file_metadata('{part}')
    FROM parquet_bloom_probe('{part}', 'run_id', 'a')
    SELECT * FROM json_execute_serialized_sql('{"statements": []}')
    SELECT * FROM duckdb_settings()
    SELECT * FROM duckdb_extensions()
    SELECT * FROM duckdb_logs()
    SELECT * FROM duckdb_temporary_files()
    SELECT * FROM seq_scan('rollouts')
    SELECT * FROM summary((SELECT 1))
    SELECT * FROM test_all_types()
    CREATE TEMP TABLE t AS SELECT 1
    CREATE TYPE t AS ENUM ('a')
    CREATE SCHEMA s
    CREATE SEQUENCE s
    CREATE INDEX i ON runs (run_id)
    INSERT OR REPLACE INTO runs (run_id) VALUES ('x')
    COPY FROM DATABASE memory TO memory
    EXPLAIN SELECT 1
    EXPLAIN ANALYZE DELETE FROM runs
    SET memory_limit = '1TB'
    SET max_execution_time = 0
    SET GLOBAL threads = 100
    RESET ALL
    PRAGMA database_list
    PRAGMA memory_limit = '1TB'
    CALL duckdb_settings()
    ROLLBACK
    COMMIT
    SELECT 1 INTO x
""".strip().splitlines()
WRAPPED = ("{}", "{};", "SELECT 1; {}", "{}; SELECT 1", "WITH a AS ({}) SELECT * FROM a", "EXPLAIN ANALYZE {}",
           "PREPARE p AS {}", "/* SELECT 1 */ {} -- SELECT 1", "SELECT * FROM ({})", "SELECT 1 WHERE EXISTS ({})")  # fmt: skip


def attack(root: Path, statements: list[str], *, monkeypatch, folder: Path) -> int:
    """Try these statements; returns how many were refused, which must be all, with nothing read and nothing written."""
    monkeypatch.chdir(folder)
    canary = [SECRET]  # a Python variable that DuckDB's replacement scans would find
    run = read_run(root / "a")
    names = {"part": run.parts[0], "metrics": run.metrics, "root": root, "secret": root / "secret.txt"}
    before, accepted, refused = tree_hash(root), [], []
    with open_runs([run], timeout_seconds=2) as database:
        runs_before = database.select("FROM runs").rows
        for sql in statements:
            for name, path in names.items():
                sql = sql.replace(f"{{{name}}}", str(path).replace("'", "''"))
            try:
                accepted.append((sql, database.select(sql).rows))
            except RlvrError as e:
                refused.append(str(e))
        assert database.select("SELECT count(*), sum(reward) FROM rollouts").rows == [(40, 40.0)]
        assert database.select("FROM runs").rows == runs_before
    assert accepted == []
    assert SECRET not in "".join(refused)
    assert tree_hash(root) == before
    assert os.listdir(folder) == []
    assert canary
    return len(refused)


def test_hostile_statements_are_refused_and_change_nothing(root, monkeypatch, tmp_path):
    assert len(HOSTILE) >= 100
    attack(root, [s.strip() for s in HOSTILE], monkeypatch=monkeypatch, folder=tmp_path)


@pytest.mark.full
def test_hostile_statements_in_every_wrapping(root, monkeypatch, tmp_path, figures):
    statements = [wrapping.replace("{}", s.strip()) for s in HOSTILE for wrapping in WRAPPED]
    refused = attack(root, statements, monkeypatch=monkeypatch, folder=tmp_path)
    assert refused >= 300
    figures.update({"hostile statements": refused, "bytes read outside": 0, "bytes written": 0})


def test_every_function_that_waits_is_refused():
    import duckdb

    with duckdb.connect(":memory:") as connection:
        rows = connection.execute(
            "SELECT DISTINCT function_name FROM duckdb_functions() WHERE regexp_matches(concat_ws(' ', function_name,"
            " macro_definition), 'sleep|wait|delay|pause')"
        ).fetchall()
    assert {name for (name,) in rows} == REFUSED_FUNCTIONS


def test_without_the_check_of_the_tree_a_part_would_be_lost(root, tmp_path):
    """The statement's type and DuckDB's own settings do not suffice: this is why the parse tree is read."""
    with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
        run.commit_rollouts("eval", 0, [a_rollout(run_id="r", example_id="x")])
    files = read_run(tmp_path / "r")
    sql = f"WITH a AS (COPY (SELECT 1) TO '{files.parts[0]}' (FORMAT parquet, USE_TMP_FILE false)) SELECT * FROM a"
    with open_runs([files]) as database:
        statement = database._connection.extract_statements(sql)[0]
        assert statement.type.name == "SELECT"
        before = files.parts[0].read_bytes()
        database._connection.execute(statement).fetchall()
        assert files.parts[0].read_bytes() != before


SEALED = [
    "SELECT * FROM read_text('{root}/secret.txt')",
    "SELECT * FROM read_text('{root}/a/rollouts/secret.txt')",
    "SELECT * FROM read_parquet('{root}/a/rollouts/*.parquet')",
    "COPY (SELECT 1) TO '{root}/new.csv'",
    "COPY (SELECT 1) TO '{root}/a/rollouts/new.parquet' (USE_TMP_FILE false)",
    "ATTACH '{root}/new.db'",
    "SELECT * FROM 'https://example.com/x.parquet'",
    "LOAD httpfs",
    "SET enable_external_access = true",
    "SET allowed_paths = ['/etc/passwd']",
    "CALL enable_logging(storage = 'file', storage_path = '{root}/log')",
    "FROM canary",
]


def test_the_connection_itself_is_sealed(root):
    """What passes the checks of the statement, if anything ever does, meets a connection without rights."""
    import duckdb

    canary = [SECRET]
    before = tree_hash(root)
    with open_runs([read_run(root / "a")]) as database:
        for sql in SEALED:
            with pytest.raises(duckdb.Error):
                database._connection.execute(sql.replace("{root}", str(root).replace("'", "''"))).fetchall()
    assert tree_hash(root) == before
    assert canary


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT sum(a.range * b.range) FROM range(10000000) a, range(10000000) b WHERE a.range % 7 = b.range % 5",
        slow("WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t"),
    ],
)
def test_endless_queries_are_stopped(root, sql, monkeypatch):
    monkeypatch.setattr("rlvr_cli.analysis.queries.database.MEMORY_LIMIT", "200MB")
    with open_runs([read_run(root / "a")], timeout_seconds=0.2) as database:
        with pytest.raises(RlvrError, match=r"stopped after 0\.2 seconds|needed more than"):
            database.select(sql)
        assert database.select("SELECT count(*) FROM rollouts").rows == [(40,)]


@pytest.mark.parametrize(
    "sql",
    [
        slow("SELECT list(range) FROM range(1000000000)"),
        slow("SELECT string_agg(range::VARCHAR) FROM range(1000000000)"),
        "SELECT range FROM range(1000000000) ORDER BY hash(range) DESC LIMIT 100000000",
    ],
)
def test_memory_is_limited(root, sql, monkeypatch):
    monkeypatch.setattr("rlvr_cli.analysis.queries.database.MEMORY_LIMIT", "100MB")
    with (
        open_runs([read_run(root / "a")], timeout_seconds=20) as database,
        pytest.raises(RlvrError, match="needed more than 100MB"),
    ):
        database.select(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT " + "(" * 20000 + "1" + ")" * 20000,
        slow("SELECT " + "[" * 20000),
        "SELECT " + "NOT " * 12000 + "true",
        "SELECT * FROM " + "(SELECT * FROM " * 2000 + "rollouts" + ")" * 2000,
        slow("SELECT 1" + " UNION SELECT 1" * 1000),
        slow("SELECT " + "-" * 40000 + "1"),
    ],
)
def test_deep_queries_do_not_crash(root, sql):
    with open_runs([read_run(root / "a")], timeout_seconds=2) as database:
        with suppress(RlvrError):  # refused, stopped or, on a fast machine, answered
            database.select(sql)
        assert database.select("SELECT 1").rows == [(1,)]


# Bombs, against the command line: there the limits end the process


class Bomb(NamedTuple):
    sql: str
    how: str = "query"  # query, file or where


OPENED = {  # what the parser needs quadratic time and memory for, at three lengths
    "select {}": "(", "select {} a": "- ", "{} select 1": "with a as (", "values {}": "(", "from {}": "(",
    "select 1 where {}": "(", "select 1 limit {}": "(", "select 1 order by {}": "(", "insert into a values {}": "(",
    "create table a as select {}": "(", "explain select {}": "(", "call f({}": "(", "select {} b": "[",
    "select {} c": "case when ", "select {} d": "f(", "select {} e": "not ", "select {} f": "cast(", "select {} g": "{'a':",
}  # fmt: skip
PARSED = [
    Bomb(text.replace("{}", unit * (n // len(unit)))[:49_999]) for text, unit in OPENED.items() for n in (4_000, 50_000)
]
PARSED += [Bomb("from " + "(" * n + "rollouts" + ")" * n) for n in (900, 8_000, 20_000)]
PARSED += [Bomb("(" * n, how) for how in ("where", "file") for n in (2_000, 20_000, 49_000)]
RUN = """
    select list_sum(range(300000000))
    select length(repeat('ab', 1000000000))
    select levenshtein(repeat('a', 100000), repeat('b', 100000))
    select damerau_levenshtein(repeat('a', 50000), repeat('b', 50000))
    select editdist3(repeat('a', 100000), repeat('b', 100000))
    select jaccard(repeat('ab', 100000000), repeat('b', 100000000))
    select jaro_winkler_similarity(repeat('ab', 200000), repeat('ba', 200000))
    select max(levenshtein(response || repeat('a', 30000), repeat('b', 30000))) from rollouts
    select list(range) from range(1000000000)
    select count(*) from range(1000000000000)
    select count(*) from range(1000000) a, range(1000000) b
    select count(*) from rollouts a, rollouts b, rollouts c, rollouts d, rollouts e, rollouts f, rollouts g
    select * from range(1000000000000)
    select * from range(100000000)
    select string_agg(range::varchar) from range(1000000000)
    select range from range(1000000000) order by hash(range) desc
    select distinct range from range(10000000000)
    select range, count(*) from range(10000000000) group by range
    select mode(range) from range(1000000000)
    select median(range) from range(1000000000)
    select quantile_cont(range, 0.5) from range(1000000000)
    select histogram(range) from range(1000000000)
    select json_group_array(range) from range(1000000000)
    select array_agg(range order by range) from range(1000000000)
    select row_number() over (order by hash(range)) from range(1000000000)
    select sum(range) over (order by range rows between 1000000 preceding and 1000000 following) from range(100000000)
    with recursive t(n) as (select 1 union all select n + 1 from t) select count(*) from t
    with recursive t(n) as (select 1 union all select n + 1 from t, range(10)) select count(*) from t
    with recursive t(n) as (select 'a' union all select n || n from t) select max(length(n)) from t
    with recursive t(n) as (select [1] union all select n || n from t) select max(len(n)) from t
    select lpad('x', 2000000000, 'y')
    select rpad('x', 2000000000, 'y')
    select length(lpad('x', 2000000000, 'y'))
    select list_resize([1], 2000000000)
    select len(list_resize([1], 2000000000, 5))
    select list_sort(range(300000000))
    select list_distinct(range(100000000))
    select list_reverse(range(500000000))
    select list_transform(range(300000000), x -> x * 2)
    select list_filter(range(300000000), x -> x > 2)
    select list_reduce(range(100000000), (x, y) -> x + y)
    select list_zip(range(100000000), range(100000000))
    select flatten([range(200000000), range(200000000)])
    select unnest(range(1000000000))
    select unnest(range(100000)), unnest(range(100000)) from range(1000000)
    select generate_series(1, 1000000000)
    select repeat([1, 2, 3], 500000000)
    select length(replace(repeat('a', 1000000), 'a', repeat('b', 10000)))
    select length(regexp_replace(repeat('a', 10000000), 'a', repeat('b', 1000), 'g'))
    select regexp_extract_all(repeat('a', 100000000), '.')
    select regexp_matches(repeat('a', 100000000), '(a?){500}a{500}')
    select string_split(repeat('a,', 200000000), ',')
    select upper(repeat('a', 2000000000))
    select md5(repeat('a', 4000000000))
    select sha256(repeat('a', 3000000000))
    select hex(repeat('a', 2000000000))
    select to_base64(repeat('a', 2000000000)::blob)
    select reverse(repeat('é', 1000000000))
    select strip_accents(repeat('é', 500000000))
    select translate(repeat('a', 1000000000), 'a', 'b')
    select format('{:>2000000000}', 'x')
    select printf('%2000000000d', 1)
    select bar(1, 0, 1, 1000000000)
    select bitstring('1', 2000000000)
    select repeat(response, 100000000) from rollouts
    select string_agg(repeat(response, 1000000), '') from rollouts
    select factorial(33) * count(*) from range(100000000000)
    select sum(sin(range) * cos(range)) from range(100000000000)
    select count(*) from range(100000) a, range(100000) b, range(100000) c where a.range + b.range = c.range
    select count(*) from range(10000000) a join range(10000000) b on a.range % 7 = b.range % 7
    select count(*) from range(10000000) a join range(10000000) b on a.range < b.range
    select * from range(10000000) a left join range(10000000) b on a.range <> b.range
    select count(distinct hash(a.range * b.range)) from range(1000000) a, range(1000000) b
    select approx_count_distinct(range) from range(10000000000)
    select json_extract(repeat('[', 1000000) || repeat(']', 1000000), '$[0]')
    select json_serialize_sql(repeat('(', 50000))
    select json_deserialize_sql(repeat('[', 1000000))
    select map_from_entries(list_zip(range(50000000), range(50000000)))
    select struct_pack(a := range(300000000), b := range(300000000))
    select * from rollouts using sample 1000000000 rows, range(1000000000000)
    select max(length(x)) from (select repeat('a', range) x from range(1000000))
    select list(repeat('a', 1000000)) from range(1000000)
    select pivoted.* from (pivot (select range % 1000 k, range from range(100000000)) on k in (1, 2) using sum(range)) pivoted
    from range(100000000000) select grouping_id(range % 3), count(*) group by cube (range, range % 3)
    select count(*) from generate_series(timestamp '0001-01-01', timestamp '9999-01-01', interval 1 microsecond)
    select date_diff('day', date '0001-01-01', range::date) from range(100000000000)
""".strip().splitlines()
BOMBS = [
    *PARSED,
    *(Bomb(sql.strip()) for sql in RUN),
    Bomb("levenshtein(repeat('a', 100000), repeat('b', 100000)) > 1", "where"),
]
QUICK = [
    Bomb("select max(levenshtein(response || repeat('a', 30000), repeat('b', 30000))) from rollouts"),
]  # fmt: skip


class Blast(NamedTuple):
    bomb: Bomb
    status: int
    said: str
    seconds: float
    bytes: int  # the most that the process has held


# Exit status and peak memory of a command. Its parent must be small: a process counts what its parent had when it was started.
MEASURED = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss)
"""


def explode(bomb: Bomb, folder: Path, root: Path, *, limit: float = 1) -> Blast:
    """Run one bomb with a limit on its time."""
    query = bomb.sql
    if bomb.how == "file":
        path = folder / f"{threading.get_ident()}.sql"
        path.write_text(query)
        query = str(path)
    limits = ["--timeout-seconds", f"{limit:g}", "--runs-dir", str(root)]
    arguments = (
        ["filter", "a", "--where", query, "--out", str(folder / "out.jsonl"), *limits]
        if bomb.how == "where"
        else ["analyze", query, "a", "--limit", "10", *limits]
    )
    start = time.monotonic()
    with (folder / f"{threading.get_ident()}.txt").open("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", MEASURED, sys.executable, "-m", "rlvr_cli", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        hang = threading.Timer(120, os.killpg, (process.pid, signal.SIGKILL))
        hang.start()
        measured, _ = process.communicate()
        hang.cancel()
        seconds = time.monotonic() - start
        said.seek(0)
        status, kilobytes = map(int, measured.split() or (-signal.SIGKILL, 0))
        return Blast(bomb, status, said.read(), seconds, kilobytes * 1024)


def judged(blasts: list[Blast], before: str, root: Path) -> None:
    """Each bomb was refused, stopped or answered in two lines, and the run is what it was."""
    wrong = [
        (blast.bomb.sql[:80], blast.bomb.how, blast.status, blast.said[-300:])
        for blast in blasts
        if blast.status not in (0, 1) or "Traceback" in blast.said or (blast.status == 1) != ("error: " in blast.said)
    ]
    assert wrong == []
    assert tree_hash(root) == before


def test_bombs_are_stopped_and_the_run_is_untouched(root, tmp_path):
    before = tree_hash(root)
    judged([explode(bomb, tmp_path, root) for bomb in QUICK], before, root)


@pytest.mark.slow
def test_reading_a_query_has_limits_of_its_own(root, tmp_path):
    """A text that only the parser works on ends long before --timeout-seconds, and says why."""
    blast = explode(Bomb("select " + "(" * 8_000), tmp_path, root, limit=60)
    assert blast.status == 1
    assert blast.said.endswith("It may be nested too deeply.\n")
    assert blast.bytes < 1e9


@pytest.mark.full
def test_a_hundred_bombs_end_within_their_limits(root, tmp_path, figures):
    before = tree_hash(root)
    with ThreadPoolExecutor(2) as pool:
        blasts = list(pool.map(lambda bomb: explode(bomb, tmp_path, root), BOMBS))
    judged(blasts, before, root)
    plain = explode(Bomb("select 1"), tmp_path, root)
    assert len(BOMBS) >= 100
    assert max(blast.bytes for blast in blasts) < 7e9
    assert not (tmp_path / "out.jsonl").exists()
    figures.update({
        "bombs": len(BOMBS), "of them for the parser": len(PARSED), "refused or stopped": sum(b.status == 1 for b in blasts),
        "answered": sum(b.status == 0 for b in blasts), "limit in seconds": 1,
        "longest beyond start-up in seconds": round(max(b.seconds for b in blasts) - plain.seconds, 1),
        "most memory in GB": round(max(b.bytes for b in blasts) / 1e9, 1),
    })  # fmt: skip
