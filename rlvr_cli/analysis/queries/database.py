"""SQL over runs: committed Parquet parts in, rows out; the only module that uses DuckDB.

Enters: for each run its committed files, and one SELECT over the views `rollouts`, `segments`, `grades`, `metrics` and `runs`; or
rows, such as the examples of a dataset, and a condition on their table. Leaves: a `Table`.

A query cannot write, cannot read any other file, and cannot run forever:

- The statement must be one SELECT, and so must everything inside it. The statement's type does not guarantee that: DuckDB
  gives ``WITH a AS (COPY ... TO 'part.parquet') SELECT ...`` the type SELECT and would replace the part. So the parse tree
  is checked too: it may hold no other kind of query, and no table functions except `TABLE_FUNCTIONS`.
- The connection can access only the committed files, its configuration is locked, it loads no extension, sees no Python
  variable, and has limits on memory and time. DuckDB checks both limits only between batches of rows, so its parser, and
  one function call on a huge value, can exceed them; from the command line such a query ends the process
  (`process.time_and_memory_limit`).

A named query is a file ``sql/NAME.sql``: a comment line with its description, lines ``-- :name = JSON`` for its parameters
(``$name`` in the query) with their defaults, and one SELECT.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from rlvr_cli.errors import RlvrError
from rlvr_cli.process import removed_if_given_up, time_and_memory_limit
from rlvr_cli.runs.lock import holder_of
from rlvr_cli.runs.readers import RunInfo, read_metrics
from rlvr_cli.runs.storage.files import os_errors_as_user_errors
from rlvr_cli.runs.storage.schemas import Column, columns_of
from rlvr_cli.runs.storage.sums import check_sums
from rlvr_cli.text import storable
from rlvr_cli.types import SCHEMA_VERSION, Example, Metric, Regrade, Rollout, Segment, Table

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

T = TypeVar("T")
MAX_SQL_CHARACTERS = 50_000  # the parser takes quadratic time and memory for parentheses
MEMORY_LIMIT = "2GB"  # of DuckDB
# DuckDB's memory in MB where it may spill to disk. Above a million rows it grows as their square root: sorting them needs so much.
SPILLING_MB = 48
ONE_THREAD = 100_000  # rows that one thread reads, in their order: so a query gives the same bits each time
CACHED_FILES = 256  # whose Parquet footers are kept between the queries on one database, 160 KB each
PROCESS_BYTES = 4_000_000_000  # memory that a query may add to the process, including memory that DuckDB does not count
PARSER_SECONDS, PARSER_BYTES = 1.0, 600_000_000  # for a query's text: parsing one that is meant takes milliseconds
QUERY_NODES = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}
TABLE_FUNCTIONS = {
    *("range", "generate_series", "unnest", "repeat", "repeat_row", "json_each", "json_tree"),
    *("histogram", "histogram_values", "duckdb_columns", "duckdb_functions", "duckdb_tables", "duckdb_types"),
}
# DuckDB checks the time limit only between batches of 2048 rows, and each row would sleep.
REFUSED_FUNCTIONS = {"sleep_ms", "pg_sleep"}
_SQL_TYPES = {
    **{"string": "VARCHAR", "bool_": "BOOLEAN", "timestamp": "TIMESTAMP"},
    **{"int32": "INTEGER", "int64": "BIGINT", "float32": "FLOAT", "float64": "DOUBLE"},
}
# Why a response got its reward, in words.
_WHY_GRADED = """
CREATE MACRO why_graded(reward, error, detail, kind, tokens) AS
CASE
    WHEN kind = 'environment_error' THEN 'the environment failed: ' || error || coalesce(': ' || detail, '')
    WHEN reward IS NULL THEN 'the grade failed: ' || coalesce(error, 'unknown') || coalesce(': ' || detail, '')
    WHEN reward > 0.5 AND NOT isnan(reward) THEN 'it was rewarded'
    WHEN kind = 'truncated' THEN 'cut off after ' || tokens || ' tokens, before its answer'
    WHEN kind = 'out_of_turns' THEN 'the episode was out of turns before its answer'
    WHEN kind = 'no_tool_call' THEN 'the answer is wrong, and the environment was never called'
    WHEN kind = 'tool_error' THEN 'the answer is wrong, and a call of the last turn with calls failed'
    WHEN kind = 'empty' THEN 'there is nothing in the answer'
    WHEN kind = 'no_think_close' THEN 'the thinking is never closed: there is no </think>'
    WHEN kind = 'no_answer_tags' THEN 'there is no answer where the grader looks: in <answer> tags, or in \\boxed{} for question_only'
    WHEN kind = 'malformed_tags' THEN 'the tags are there, but not as "</think> <answer>" ... "</answer>"'
    WHEN kind = 'multiple_answers' THEN 'there is more than one answer'
    WHEN kind = 'unparsed_answer' THEN 'the answer cannot be read as mathematics'
    WHEN kind = 'no_code' THEN 'there is no program in the answer'
    WHEN kind = 'exception' THEN 'the program raised an exception, or ended without a result'
    WHEN kind = 'timeout' THEN 'the program did not end in time'
    WHEN kind = 'memory' THEN 'the program needed more memory than it may have'
    WHEN kind = 'output_too_large' THEN 'the program gave more output than it may'
    WHEN kind = 'no_format' THEN 'the format is wrong, and the grader said no more'
    WHEN kind = 'low_reward' THEN 'the reward is ' || reward || ', and the grader said no more'
    WHEN kind = 'wrong_answer' THEN 'the answer differs from the truth'
    WHEN kind = 'correct_but_unformatted' THEN 'the answer is right, but stands where the format does not allow it: '
        || 'the fault is the parser''s, not the model''s'
    ELSE coalesce(kind, 'unknown')
END
"""
_DATASET_COLUMNS: tuple[str, ...] = ("id", "question", "ground_truth")
# A response's length is that of what the policy wrote, also in an episode (`Rollout.num_policy_tokens`).
_POLICY_TOKENS = (
    "CREATE MACRO policy_tokens(episode, tokens) AS coalesce(struct_extract(episode, 'num_policy_tokens'), tokens)"
)
# The kind of failure that tables name, also of a failed grade; NULL of a response with a reward.
_KIND_OF_FAILURE = """
CREATE MACRO kind_of_failure(reward, kind, error) AS
CASE WHEN (reward > 0.5 AND NOT isnan(reward)) IS NOT TRUE THEN coalesce(kind, 'grade_error: ' || error, 'unknown') END
"""
# The score of a search's program to start from, with which attempts compete; NULL if it is not valid, or an earlier version began the search.
_COMPETING_START = """
CREATE MACRO competing_start(metadata) AS
CASE WHEN metadata ->> '$.start.points_sha256' IS NOT NULL THEN (metadata ->> '$.start.score')::DOUBLE END
"""
# The interval of a share, as in `estimators.share_interval`; n is the effective number of trials.
_MACROS = """
    CREATE MACRO share_center(share, n) AS (share * n + 1.959963984540054 ** 2 / 2) / (n + 1.959963984540054 ** 2);
    CREATE MACRO share_half(center, n) AS sqrt(1.959963984540054 ** 2 * center * (1 - center) / (n + 1.959963984540054 ** 2));
    CREATE MACRO share_low(share, n) AS greatest(share_center(share, n) - share_half(share_center(share, n), n), 0);
    CREATE MACRO share_high(share, n) AS least(share_center(share, n) + share_half(share_center(share, n), n), 1);
"""
_RUNS_COLUMNS = """
    run_id VARCHAR, command VARCHAR, status VARCHAR, created_at TIMESTAMP, wall_seconds DOUBLE, seed BIGINT,
    model VARCHAR, dataset VARCHAR, config JSON, metadata JSON,
    activity VARCHAR, activity_since TIMESTAMP, last_progress TIMESTAMP
"""


class LimitReached(RlvrError):
    """A query needs more time or memory than it may have."""


class MemoryNeeded(LimitReached):
    """A query needs more memory than it may have."""


@contextmanager
def open_runs(runs: Sequence[RunInfo], *, timeout_seconds: float = 30.0, spills: bool = False) -> Iterator["Database"]:
    """Open a sealed database with the views `rollouts`, `segments`, `grades`, `metrics` and `runs` over these runs.

    Args:
        spills: for trusted queries alone: one thread, and what needs more memory than `SPILLING_MB` goes to a temporary folder.

    Raises:
        RlvrError: two runs have the same id, or a file is not as it was committed.
    """
    ids = [r.id for r in runs]
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise RlvrError(f"Two of the runs are named {twice}: their rows would be mixed up.", "Name each run once.")
    with (
        tempfile.TemporaryDirectory(prefix="rlvr-") as folder,
        removed_if_given_up(Path(folder)),
        _connection(
            rows=sum(entry.rows for run in runs for entry in run.entries if entry.folder),
            timeout_seconds=timeout_seconds,
            spill=f"{folder}/spill" if spills else "",
        ) as (database, connection),
    ):
        # DuckDB opens a file more than once, and a run in progress replaces its metrics file: copy it, to see one version.
        runs = [replace(r, metrics=_copied_metrics(r, Path(folder) / f"{i}.parquet")) for i, r in enumerate(runs)]
        check_parts(runs)
        with database.explained_errors():
            _create_views(connection, runs)
            paths = [p for r in runs for p in (*r.parts, *r.segments, *r.grades, *([r.metrics] if r.metrics else []))]
            _seal(connection, paths, timeout_seconds=timeout_seconds)
        yield database


def check_parts(runs: Sequence[RunInfo]) -> None:
    """Compare the parts of runs with what was committed. Raises RlvrError, which names the first that is damaged."""
    for run in runs:
        read = {*run.parts, *run.segments, *run.grades}
        check_sums(run.path, {e.path: e.sha256 for e in run.entries if run.path / e.path in read})


def ask_spilling(runs: Sequence[RunInfo], ask: Callable[["Database"], T], *, timeout_seconds: float) -> T:
    """Return what `ask` makes of a database over these runs that spills or, where that does not do, of one with more memory.

    Raises as `open_runs`.
    """
    try:
        with open_runs(runs, timeout_seconds=timeout_seconds, spills=True) as database:
            return ask(database)
    except MemoryNeeded:  # such as where a part has very long answers
        with open_runs(runs, timeout_seconds=timeout_seconds) as database:
            return ask(database)


@contextmanager
def open_examples(examples: Sequence[Example], *, timeout_seconds: float = 30.0) -> Iterator["Database"]:
    """Open a sealed database with the table `dataset` of these examples, in order; its columns are `_DATASET_COLUMNS`."""
    rows = [tuple(storable(getattr(e, name)) for name in _DATASET_COLUMNS) for e in examples]
    columns = dict.fromkeys(_DATASET_COLUMNS, "VARCHAR")
    with open_table("dataset", columns, rows, timeout_seconds=timeout_seconds) as database:
        yield database


@contextmanager
def open_table(
    name: str, columns: Mapping[str, str], rows: Sequence[Sequence[Any]], *, timeout_seconds: float = 30.0
) -> Iterator["Database"]:
    """Open a sealed database with one table, its rows in order.

    Args:
        columns: name -> SQL type.
    """
    with _connection(rows=len(rows), timeout_seconds=timeout_seconds) as (database, connection):
        with database.explained_errors():
            values = [[row[i] for row in rows] for i in range(len(columns))]
            unnested = ", ".join(f"unnest(?::{kind}[]) AS {column}" for column, kind in columns.items())
            connection.execute(f"CREATE TABLE {name} AS SELECT {unnested}", values)
            _seal(connection, [], timeout_seconds=timeout_seconds)
        yield database


@contextmanager
def _connection(
    *, rows: int, timeout_seconds: float, spill: str = ""
) -> Iterator[tuple["Database", "duckdb.DuckDBPyConnection"]]:
    import duckdb

    memory = f"{SPILLING_MB * max(1, rows / 1e6) ** 0.5:.0f}MB" if spill else MEMORY_LIMIT
    config: dict[str, Any] = {
        "threads": "1" if spill or rows <= ONE_THREAD else str(min(8, os.cpu_count() or 1)),
        "memory_limit": memory,
        "temp_directory": spill,  # empty: no spilling to disk
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "allow_community_extensions": "false",
        "allow_persistent_secrets": "false",
        "python_enable_replacements": "false",
    }
    connection = duckdb.connect(":memory:", config=config)
    try:
        yield Database(connection, timeout_seconds=timeout_seconds, memory=memory), connection
    finally:
        connection.close()


class Database:
    """A sealed connection, made by `open_runs`, `open_examples` or `open_table`."""

    def __init__(self, connection: "duckdb.DuckDBPyConnection", *, timeout_seconds: float, memory: str) -> None:
        self._connection = connection
        self._timeout_seconds, self._memory = timeout_seconds, memory

    def stop(self) -> None:
        """End the query that another thread runs at this moment, as if it had reached its limit on time."""
        self._connection.interrupt()

    def select(self, sql: str, parameters: Mapping[str, Any] | None = None, *, limit: int = 0) -> Table:
        """Run one untrusted SELECT.

        Args:
            sql: the statement; ``$name`` stands for a parameter.
            parameters: values by name; parameters that the statement does not use are ignored.
            limit: rows to fetch; 0 for all.

        Raises:
            MemoryNeeded: it exceeds the limit on memory.
            LimitReached: it exceeds the limit on time.
            RlvrError: the statement is not one SELECT, or has an error.
        """
        with self.explained_errors(), self._bounded():
            statement = self._checked_statement(sql)
            return self._fetch(statement, parameters or {}, limit=limit)

    def arrow(self, sql: str, parameters: Mapping[str, Any] | None = None) -> "pa.Table":
        """Run one untrusted SELECT as `select` does, and return all rows as an Arrow table. Raises RlvrError."""
        with self.explained_errors(), self._bounded():
            values = _values(self._checked_statement(sql), parameters or {})
            return self._connection.sql(sql, params=values).to_arrow_table()

    def script(self, sql: str, parameters: Mapping[str, Any]) -> Iterator[Table]:
        """Run a trusted script, which may make temporary tables, and yield the result of each SELECT.

        Raises:
            RlvrError: it exceeds the limit on time or memory, or a part is damaged.
        """
        import duckdb

        with self.explained_errors():
            for statement in self._connection.extract_statements(sql):
                with self._bounded():
                    table = self._fetch(statement, parameters, limit=0)
                if statement.type == duckdb.StatementType.SELECT:
                    yield table

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> Iterator[tuple[Any, ...]]:
        """Run one trusted SELECT and yield its rows, fetched in batches: the result need not fit into memory.

        Raises:
            RlvrError: it exceeds the limit on time or memory, or a part is damaged.
        """
        with self.explained_errors():
            with self._bounded():
                cursor = self._connection.execute(sql, dict(parameters or {}))
            while True:
                with self._bounded():
                    batch = cursor.fetchmany(2048)
                if not batch:
                    return
                yield from batch

    def condition(self, text: str, *, table: str) -> str:
        """Check an untrusted condition on the rows of a table. Returns it in parentheses, for use in a trusted SELECT.

        Raises:
            RlvrError: the text is not one boolean expression over the columns of the table.
        """
        hint = "Write what would stand after WHERE, such as: reward = 1 AND num_response_tokens < 500"
        with self.explained_errors(), self._bounded():
            try:
                self._parse(f"SELECT\n{text}\n")  # it must parse alone: else it could close the parenthesis around it
                checked = f"(\n{text}\n)"
                statement = self._checked_statement(f"SELECT 1 FROM {table} WHERE {checked} LIMIT 0")
            except RlvrError as e:
                raise RlvrError(f"The condition cannot be used. {e.problem}", e.hint or hint) from e
            if statement.named_parameters:
                raise RlvrError("The condition has a parameter, but no values can be set.", "Write the value itself.")
            self._connection.execute(statement)  # fails if the condition has an aggregate
            kind = str((self._connection.execute(f"SELECT {checked} FROM {table} LIMIT 0").description or [])[0][1])
            if kind.upper() not in ("BOOLEAN", "BOOL"):
                raise RlvrError(f"The condition is {kind}, not true or false.", hint)
            return checked

    def _checked_statement(self, sql: str) -> "duckdb.Statement":
        tree = self._parse(sql)
        statements = self._connection.extract_statements(sql)
        if len(statements) != 1:
            found = f"{len(statements)} statements" if statements else "nothing"
            raise RlvrError(f"A query must be one SELECT statement; this is {found}.")
        try:
            kind = statements[0].type.name
        except ValueError:  # DuckDB's parser knows more types than its Python package, such as UPDATE EXTENSIONS
            kind = "a statement of another type"
        if kind == "MULTI":  # PIVOT without values: DuckDB turns it into several statements, which create a type first
            raise RlvrError("PIVOT needs a list of values.", "For example: PIVOT t ON step IN (0, 10) USING ...")
        if kind != "SELECT" or tree is None:
            raise RlvrError(f"A query must be one SELECT statement; this is {kind}.", "Queries can only read runs.")
        _check_tree(tree)
        return statements[0]

    def _parse(self, sql: str) -> Any:
        """The parse tree of an untrusted text; None if it has a statement that is no SELECT.

        The parser can be stopped only here, inside of a query: `extract_statements`, which keeps the interpreter's lock,
        must not see a text before this.

        Raises:
            RlvrError: it is too long, is no text, has a syntax error, or is nested too deeply.
        """
        if len(sql) > MAX_SQL_CHARACTERS:
            raise RlvrError(f"The query is longer than {MAX_SQL_CHARACTERS:,} characters.")
        if "\0" in sql or storable(sql) != sql:
            raise RlvrError("The query has a character that SQL does not allow: NUL or a lone surrogate.")
        with time_and_memory_limit(
            seconds=min(PARSER_SECONDS, self._timeout_seconds),
            bytes=PARSER_BYTES,
            problem="The query takes too long to be read.",
            hint="It may be nested too deeply.",
            computing=True,
        ):
            ((serialized,),) = self._connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchall()
        try:
            tree = json.loads(serialized)
        except RecursionError:
            raise RlvrError("The query is nested too deeply.") from None
        if not tree["error"]:
            return tree
        match tree["error_type"]:
            case "not implemented":
                return None
            case "out of memory":
                raise RlvrError("The query needs too much memory to be read.", "It may be nested too deeply.")
            case _:
                raise RlvrError(tree["error_message"] + _place(sql, tree.get("position")))

    def _bounded(self) -> AbstractContextManager[None]:
        """Limit what DuckDB's own limits do not: the parser and a single function call check neither time nor memory."""
        return time_and_memory_limit(
            seconds=self._timeout_seconds,
            bytes=PROCESS_BYTES,
            problem=f"The query ran for more than {self._timeout_seconds:g} s.",
            hint="Make it smaller, or give it more time: --timeout-seconds.",
        )

    def _fetch(self, statement: "duckdb.Statement", parameters: Mapping[str, Any], *, limit: int) -> Table:
        cursor = self._connection.execute(statement, _values(statement, parameters))
        described = cursor.description or []
        # Some versions of DuckDB need another package for its values, and all take the zone from the machine's settings.
        if any("TIMESTAMP WITH TIME ZONE" in str(kind) for _, kind, *_ in described):
            raise RlvrError(
                "The result has a timestamp with a time zone, which cannot be shown.", "Cast it: now()::TIMESTAMP."
            )
        columns = tuple(name for name, *_ in described)
        if not limit:
            return Table(columns, cursor.fetchall())
        rows = cursor.fetchmany(limit + 1)
        return Table(columns, rows[:limit], more=len(rows) > limit)

    @contextmanager
    def explained_errors(self) -> Iterator[None]:
        """Turn DuckDB's errors into RlvrErrors; for an unknown name the hint lists tables and columns."""
        import duckdb

        try:
            yield
        except duckdb.InterruptException as e:
            raise LimitReached(
                f"The query was stopped after {self._timeout_seconds:g} seconds.",
                "Select fewer rows or columns, or give rlvr analyze more time: --timeout-seconds.",
            ) from e
        except duckdb.OutOfMemoryException as e:
            raise MemoryNeeded(
                f"The query needed more than {self._memory} of memory.",
                "Select fewer rows or columns, or aggregate.",
            ) from e
        except duckdb.PermissionException as e:
            raise RlvrError(
                f"The query tries to read something other than the runs: {_first_line(e)}",
                "It may read the tables rollouts, segments, grades, metrics and runs.",
            ) from e
        except duckdb.Error as e:
            unknown = re.search(r"Referenced (column|table) |Table with name |does not have a column", str(e))
            raise RlvrError(_cleaned(e), self._known_columns() if unknown else "") from e

    def _known_columns(self) -> str:
        columns = self._connection.execute(
            "SELECT table_name, string_agg(column_name, ', ' ORDER BY column_index) FROM duckdb_columns()"
            " WHERE NOT internal AND database_name <> 'temp' GROUP BY 1 ORDER BY 1 DESC"
        ).fetchall()
        return "\n".join(f"{table} has: {names}" for table, names in columns)


def _values(statement: "duckdb.Statement", parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a statement's parameters. Raises RlvrError if it has one without a value."""
    missing = sorted(statement.named_parameters - parameters.keys())
    if missing:
        known = ", ".join(f"${name}" for name in sorted(parameters)) or "none"
        raise RlvrError(f"The query has no value for ${missing[0]}.", f"Parameters with a value: {known}.")
    return {name: parameters[name] for name in statement.named_parameters}


def _check_tree(tree: Any) -> None:
    """Refuse a parse tree that holds anything but SELECTs and harmless table functions."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            kind = node.get("type")
            if ("cte_map" in node or str(kind).endswith("_QUERY_NODE")) and kind not in QUERY_NODES:
                raise RlvrError(
                    f"A query must be one SELECT statement; this one has {str(kind).removesuffix('_QUERY_NODE')} inside.",
                    "Queries can only read runs.",
                )
            if kind == "FUNCTION" and (name := str(node.get("function_name")).lower()) in REFUSED_FUNCTIONS:
                raise RlvrError(f"The function {name} is not allowed in queries.")
            if kind == "TABLE_FUNCTION" and (name := node["function"]["function_name"].lower()) not in TABLE_FUNCTIONS:
                raise RlvrError(
                    f"The table function {name} is not allowed in queries.",
                    f"Tables: rollouts, segments, grades, metrics, runs. Table functions: {', '.join(sorted(TABLE_FUNCTIONS))}.",
                )
            pending += node.values()


def _place(sql: str, position: str | None) -> str:
    """The line of a query around a position, in bytes, with a mark below it; "" if the position is unknown."""
    if position is None or not position.isdigit():
        return ""
    before = sql.encode()[: int(position)].decode(errors="replace")
    start = max(before.rfind("\n") + 1, len(before) - 60)
    head = f"LINE {before.count(chr(10)) + 1}: " + ("..." if start > before.rfind("\n") + 1 else "")
    line = sql[start : start + 120].split("\n")[0]
    return f"\n{head}{line}\n{' ' * (len(head) + len(before) - start)}^"


def _create_views(connection: "duckdb.DuckDBPyConnection", runs: Sequence[RunInfo]) -> None:
    parts = [p for r in runs for p in (*r.parts, *r.segments, *r.grades)]
    connection.execute(f"SET parquet_metadata_cache = {len(parts) <= CACHED_FILES}")
    versions = {run.path / entry.path: entry.schema_version for run in runs for entry in run.entries if entry.folder}
    for run in runs:
        announced = {entry.schema_version for entry in run.entries if not entry.folder}
        if run.metrics and len(announced) == 1:
            versions[run.metrics] = announced.pop()
    connection.execute(_WHY_GRADED)
    connection.execute(_MACROS)
    connection.execute(_POLICY_TOKENS)
    connection.execute(_KIND_OF_FAILURE)
    connection.execute(_COMPETING_START)
    key = "run_id, grader, phase, step, example_id, sample_index"
    last = f"QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY attempt DESC) = 1"
    views: dict[str, tuple[type, Mapping[str, list[Path]], str]] = {
        "rollouts": (Rollout, {r.id: r.parts for r in runs}, ""),
        "segments": (Segment, {r.id: r.segments for r in runs}, ""),
        "grades": (Regrade, {r.id: r.grades for r in runs}, last),
    }
    are_renamed = any(r.id != r.metadata.get("run_id", r.id) for r in runs)
    for name, (record, parts, kept) in views.items():
        if not any(parts.values()):
            connection.execute(f"CREATE TABLE {name} ({_typed(columns_of(record))})")
            continue
        rows = _rows_in([path for paths in parts.values() for path in paths], record, connection, versions)
        if are_renamed:
            each = [(run, _rows_in(paths, record, connection, versions)) for run, paths in parts.items() if paths]
            renamed = [f"SELECT * REPLACE ({_literal(run)} AS run_id) FROM ({own})" for run, own in each]
            rows = " UNION ALL BY NAME ".join(renamed)
        connection.execute(f"CREATE VIEW {name} AS SELECT * FROM ({rows}) {kept}")
    metrics = [
        f"SELECT {_literal(r.id)} AS run_id, * FROM ({_rows_in([r.metrics], Metric, connection, versions)})"
        for r in runs
        if r.metrics
    ]
    if metrics:
        connection.execute(f"CREATE VIEW metrics AS {' UNION ALL BY NAME '.join(metrics)}")
    else:
        connection.execute(f"CREATE TABLE metrics (run_id VARCHAR, {_typed(columns_of(Metric))})")
    connection.execute(f"CREATE TABLE runs ({_RUNS_COLUMNS})")
    if runs:
        column = "unnest(?::VARCHAR[])"
        stamp = f"TRY_CAST({column} AS TIMESTAMP)"
        connection.execute(
            f"INSERT INTO runs SELECT {column}, {column}, {column}, {stamp}, TRY_CAST({column} AS DOUBLE), TRY_CAST({column} AS BIGINT),"
            f" {column}, {column}, {column}, {column}, {column}, {stamp}, {stamp}",
            [list(values) for values in zip(*map(_runs_row, runs), strict=True)],
        )


def _copied_metrics(run: RunInfo, copy: Path) -> Path | None:
    data = None if run.metrics is None else read_metrics(run.path, run.entries, settled=run.settled)
    if data is None:
        return None
    with os_errors_as_user_errors(copy):
        copy.write_bytes(data)
    return copy


def _seal(connection: "duckdb.DuckDBPyConnection", paths: Sequence[Path], *, timeout_seconds: float) -> None:
    allowed = {text for p in paths for text in (_absolute(p), _pattern(p))}
    connection.execute(f"SET allowed_paths = [{', '.join(map(_literal, sorted(allowed)))}]")
    connection.execute(f"SET max_execution_time = {max(1, round(timeout_seconds * 1000))}")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _typed(columns: Sequence[Column]) -> str:
    return ", ".join(f'"{column.name}" {_sql_type(column)}' for column in columns)


def _sql_type(column: Column) -> str:
    match column.kind:
        case "list":
            return f"{_sql_type(column.children[0])}[]"
        case "struct":
            return f"STRUCT({_typed(column.children)})"
        case kind:
            return _SQL_TYPES[kind]


def _rows_in(
    paths: Sequence[Path],
    record: type,
    connection: "duckdb.DuckDBPyConnection",
    versions: Mapping[Path, int] = MappingProxyType({}),
) -> str:
    """A SELECT of all rows of these files, with all columns of `record`, even those that files of older schema versions lack.

    Args:
        versions: the schema versions of files. Where it is one, the first file has the columns of all, which are known if it is the
            current one; else, or where it is not known, the footers of all are read before the query, and held.
    """
    known = {versions.get(path) for path in paths}
    files = _read_parquet(paths, differ=len(known) > 1 or None in known)
    columns = columns_of(record)
    if known == {SCHEMA_VERSION}:
        stored = {column.name for column in columns}
    else:
        stored = {row[0] for row in connection.execute(f"DESCRIBE FROM {files}").fetchall()}
    missing, filled = [], []
    for column in columns:
        older = "NULL" if column.older_value is None else _literal(str(column.older_value))
        if column.name not in stored:
            missing.append(f'{older}::{_sql_type(column)} AS "{column.name}"')
        elif column.older_value is not None:  # NULL in the rows of files that lack the column
            filled.append(f'coalesce("{column.name}", {older}::{_sql_type(column)}) AS "{column.name}"')
    every = f"* REPLACE ({', '.join(filled)})" if filled else "*"
    return f"SELECT {', '.join([every, *missing])} FROM {files}"


def _runs_row(run: RunInfo) -> list[Any]:
    def text(value: Any) -> str | None:
        return None if value is None else str(value).encode(errors="replace").decode()

    def name(key: str) -> Any:
        facts = run.metadata.get("facts")
        fact = facts.get(key) if isinstance(facts, Mapping) else None
        return fact.get("name") if isinstance(fact, Mapping) else fact

    plain = [run.metadata.get(key) for key in ("command", "status", "created_at", "wall_seconds", "seed")]
    documents = [_json(value, run=run.id) for value in (run.metadata.get("config"), run.metadata)]
    holder = holder_of(run.path) or {}
    doing = [text(holder.get(key)) for key in ("activity", "activity_since", "last_progress")]
    return [run.id, *map(text, plain), text(name("model")), text(name("dataset")), *documents, *doing]


def _json(value: Any, *, run: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as e:
        raise RlvrError(f"run.json of {run} has a number that is not valid JSON: {e}") from e
    return text.encode(errors="replace").decode()  # DuckDB rejects JSON with a lone surrogate


def _read_parquet(paths: Sequence[Path], *, differ: bool) -> str:
    files = ", ".join(_literal(_pattern(p)) for p in paths)
    return f"read_parquet([{files}], union_by_name = {differ}, hive_partitioning = false)"


def _absolute(path: Path) -> str:
    text = os.path.abspath(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RlvrError(f"The path {text!r} is not UTF-8.", "Rename the directory.") from None
    return text


def _pattern(path: Path) -> str:
    """The glob pattern that matches only this path, because `read_parquet` takes patterns."""
    return re.sub(r"[*?\[]", r"[\g<0>]", _absolute(path))


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _cleaned(error: Exception) -> str:
    """DuckDB's message without the error class and the candidates, but with the line of the query that it points at."""
    text = re.sub(r"^[A-Za-z ]*Error: ", "", str(error).strip())
    text = re.sub(r"\n+(Candidate bindings|Did you mean)[^\n]*", "", text)
    return re.sub(r"\n{2,}", "\n", text)


def _first_line(error: Exception) -> str:
    return _cleaned(error).split("\n")[0]
