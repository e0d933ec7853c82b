"""Runs in a notebook or a script: `rlvr_cli.open_run("runs/q0-grpo")`.

Enters: names or directories of runs, and queries as `rlvr analyze` takes them. Leaves: `Rows`, which are Arrow, pandas or
Polars, and pictures. Each query opens the runs anew, in the sealed database of the command line, so that one of a run in
progress has what is committed by then.
"""

import contextlib
import io
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_cli.analysis.queries import database
from rlvr_cli.analysis.queries.named_queries import NamedQuery, named_queries
from rlvr_cli.analysis.statistics.at_k import at_k_table
from rlvr_cli.analysis.summary import OF_ANSWERS, RunSummary, summarize, with_accuracy
from rlvr_cli.commands.store.analyzing.asked import check_parameter
from rlvr_cli.config.parsing.options import nearest
from rlvr_cli.config.parsing.sources import at_home, environment_values, read_options, resolve
from rlvr_cli.config.store.analyze import AnalyzeConfig
from rlvr_cli.errors import RlvrError, missing_extra
from rlvr_cli.runs.readers import RunInfo, resolve_runs
from rlvr_cli.runs.several import read_runs
from rlvr_cli.terminal import tables
from rlvr_cli.types import Table

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow as pa

OF_TABLES = ("compare", "judge_agreement")  # the command line makes several tables of their rows
SHOWN_ROWS = 20  # of `Rows` in a notebook
INTERVAL = "month_day_nano_interval"  # DuckDB's, as Arrow calls it
DAY = 86_400_000_000  # in microseconds
DRAWING = threading.Lock()  # a picture at a time: streams and the settings of matplotlib are those of all threads


def open_run(run: str | Path, *, runs_dir: str | Path | None = None) -> "Runs":
    """Open a run, which may be in progress.

    Args:
        run: its directory, or its name in `runs_dir`.
        runs_dir: None for that of the command line: `RLVR_RUNS_DIR`, or else runs.

    Raises:
        RlvrError: it is no run, or is damaged.
    """
    return open_runs(run, runs_dir=runs_dir)


def open_runs(*runs: str | Path, runs_dir: str | Path | None = None) -> "Runs":
    """Open several runs as one database; a name may be a pattern: `open_runs("abl-*")`. Raises as `open_run`."""
    root = environment_values().get("runs_dir", "runs") if runs_dir is None else runs_dir
    paths = resolve_runs([at_home(str(run)) for run in runs], at_home(str(root))).runs
    if not paths:
        raise RlvrError("No run is named.", 'Name some, or all: open_runs("*")')
    opened = Runs(paths)
    opened.infos()
    return opened


@dataclass(frozen=True)
class Runs:
    """One or several runs, in this order."""

    paths: Sequence[Path]
    timeout_seconds: float = 30.0  # of a query

    def infos(self) -> list[RunInfo]:
        """Return what each run contains by now. Raises RlvrError if one is damaged."""
        return read_runs(self.paths)

    def sql(self, query: str, **parameters: Any) -> "Rows":
        """Answer one SELECT on the tables `rollouts`, `segments`, `grades`, `metrics` and `runs`, or a named query of `rlvr analyze --list`.

        Args:
            parameters: values of $name in the query, also NumPy's; tuples, ranges and arrays are lists.

        Raises:
            RlvrError: as `rlvr analyze`.
        """
        named, infos = named_queries().get(query), self.infos()
        if query == "summary":
            raise RlvrError("The summary is several tables.", "Use .summary().")
        if query in OF_TABLES:
            raise RlvrError(f"{query} is several tables.", f"rlvr analyze {query} --format json prints them.")
        if named is None and query.isidentifier():
            near = "".join(f" Did you mean {name}?" for name in nearest(query, named_queries()))
            raise RlvrError(f"There is no query named {query!r}.{near}", "Give its name, or a SELECT.")
        asked = named or NamedQuery("", "", {}, query)
        parameters = _values(asked, parameters)
        infos = with_accuracy(infos, query) if query in OF_ANSWERS else infos
        if asked.name == "at_k":
            return self._at_k(infos, parameters)
        with database.open_runs(infos, timeout_seconds=self.timeout_seconds) as opened:
            return Rows(opened.arrow(asked.sql, parameters))

    def _at_k(self, infos: Sequence[RunInfo], parameters: Mapping[str, Any]) -> "Rows":
        import pyarrow as pa

        with database.open_runs(infos, timeout_seconds=self.timeout_seconds, spills=True) as opened:
            table, _ = at_k_table(opened, parameters)
        kinds = {"run_id": pa.string(), "step": pa.int64(), "k": pa.int64(), "questions": pa.int64()}
        schema = pa.schema([(name, kinds.get(name, pa.float64())) for name in table.columns])
        return Rows(pa.Table.from_pylist(list(table.records()), schema=schema))

    @property
    def rollouts(self) -> "Rows":
        """All rollouts, a row for each; of large runs select with `sql` instead."""
        return self.sql("SELECT * FROM rollouts")

    @property
    def metrics(self) -> "Rows":
        """All metrics, a row for each number."""
        return self.sql("SELECT * FROM metrics")

    def summary(self, *, phase: str = "eval", step: int | None = None) -> list[RunSummary]:
        """Return the summary of each run, of its last step by default. Raises RlvrError as `rlvr analyze summary`."""
        chosen = _values(named_queries()["summary"], {"phase": phase, "step": step})
        return [summarize(info, **chosen, timeout_seconds=self.timeout_seconds) for info in self.infos()]

    def curves(self, **options: Any) -> "Figure":
        """Return the picture of `rlvr analyze curves`; see `plot`."""
        return self.plot("curves", **options)

    def plot(self, query: str, **options: Any) -> "Figure":
        """Return the picture that `rlvr analyze QUERY --plot` draws.

        Args:
            query: a named query, or a SELECT.
            options: of `rlvr analyze`: ``step=40``, ``set="k=8"``, ``panels=("eval_reward", "entropy")``.

        Raises:
            RlvrError: as `rlvr analyze`.
        """
        figure = Figure(tuple(map(str, self.paths)), query, options)
        figure._repr_svg_()
        return figure


@dataclass(frozen=True)
class Figure:
    """A picture of runs, drawn as they are when it is shown or saved."""

    runs: Sequence[str]
    query: str
    options: dict[str, Any]

    def save(self, path: str | Path) -> None:
        """Draw it into a .png or .svg file. Raises RlvrError if that cannot be written."""
        from rlvr_cli.commands.store import analyze

        chosen = {name: _python(value, counts=True) for name, value in self.options.items() if value is not None}
        given = read_options(chosen, AnalyzeConfig, command="analyze", where="plot")
        flags = {**given, "query": self.query, "runs": tuple(self.runs), "plot": str(path)}
        with DRAWING, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            analyze.run(resolve(AnalyzeConfig, flags=flags, command="analyze"))

    def _repr_svg_(self) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "figure.svg")
            self.save(path)
            return path.read_text(encoding="utf-8")


class Rows:
    """The result of a query; of two columns `a` the second is `a_2`.

    Anything that reads Arrow's C stream takes it, such as `polars.DataFrame(rows)`.
    """

    def __init__(self, table: "pa.Table") -> None:
        table = table.rename_columns(tables.unique(table.column_names))
        self._table = table.from_arrays([*map(_plain, table.columns)], names=table.column_names)

    def arrow(self) -> "pa.Table":
        """Return an Arrow table."""
        return self._table

    def pandas(self) -> "pandas.DataFrame":
        """Return a pandas DataFrame. Raises RlvrError if pandas is not installed."""
        try:
            import pandas  # noqa: F401
        except ModuleNotFoundError as error:
            raise missing_extra("pandas", "pandas") from error
        return self._table.to_pandas()

    def polars(self) -> "polars.DataFrame":
        """Return a Polars DataFrame. Raises RlvrError if Polars is not installed, or a column has months or lists of intervals."""
        try:
            import polars
        except ModuleNotFoundError as error:
            raise missing_extra("polars", "polars") from error
        held = [field.name for field in self._table.schema if INTERVAL in str(field.type)]
        if held:
            raise RlvrError(
                f"Polars takes no months and no lists of intervals: {', '.join(held)}.",
                "Write epoch(...) around the interval, which gives its seconds.",
            )
        return polars.DataFrame(self._table)

    @property
    def columns(self) -> list[str]:
        return self._table.column_names

    def __len__(self) -> int:
        return self._table.num_rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows as dicts."""
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        """The first rows as `rlvr analyze` prints them."""
        first = self._table.slice(0, SHOWN_ROWS).to_pylist()
        shown = Table(tuple(self.columns), [tuple(row.values()) for row in first])
        more = f"... {len(self) - SHOWN_ROWS} more rows\n" if len(self) > SHOWN_ROWS else ""
        return tables.as_text(shown) + more


def _values(query: NamedQuery, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all parameters of a query. Raises RlvrError for what `rlvr analyze` refuses in an option, too."""
    values = {name: _python(value, counts=bool(query.name)) for name, value in given.items()}
    for name, value in values.items():
        check_parameter(query, name, value, given=f"{name}={value!r}")
    return {**query.parameters, **values}


def _python(value: Any, *, counts: bool) -> Any:
    """Numbers of NumPy as those of Python, with `counts` 5.0 as 5; tuples, ranges and arrays as lists."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple | range):
        return [_python(one, counts=counts) for one in value]
    return int(value) if counts and isinstance(value, float) and value.is_integer() else value


def _plain(column: "pa.ChunkedArray") -> "pa.ChunkedArray":
    """Whole numbers or floats in place of decimals, which DuckDB has for the sums of whole numbers: JSON and plots do not take them.
    Durations in place of its intervals, which Polars does not take.
    """
    import pyarrow as pa

    if str(column.type) == INTERVAL:
        return _durations(column)
    kind = _plain_type(column.type, pa.int64())
    if kind == column.type:
        return column
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:  # too large
        return column.cast(_plain_type(column.type, pa.float64()))


def _durations(column: "pa.ChunkedArray") -> "pa.ChunkedArray":
    """Intervals as durations; as they are if there are months among them, whose length depends on the date."""
    import pyarrow as pa

    values = column.to_pylist()
    if any(value.months for value in values if value is not None):
        return column
    numbers = [value and value.days * DAY + value.nanoseconds // 1000 for value in values]
    try:
        return pa.chunked_array([pa.array(numbers, pa.duration("us"))])
    except OverflowError:  # too large
        return column


def _plain_type(kind: "pa.DataType", whole: "pa.DataType") -> "pa.DataType":
    import pyarrow as pa

    def plain(field: "pa.Field") -> "pa.Field":
        return field.with_type(_plain_type(field.type, whole))

    if pa.types.is_decimal(kind):
        return whole if kind.scale == 0 else pa.float64()
    if pa.types.is_list(kind):
        return pa.list_(plain(kind.value_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(plain(kind.value_field), kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct([plain(field) for field in kind])
    return pa.map_(plain(kind.key_field), plain(kind.item_field)) if pa.types.is_map(kind) else kind
