"""Records <-> tables <-> the bytes of a Parquet file.

Enters: rollouts, grades and metrics, or the bytes of a file. Leaves: those bytes, or the table in them, whose columns and
page checksums were checked. pyarrow costs 0.2 s of CPU and is imported where it is used.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rlvr_cli.runs.schemas import grade_schema, metrics_schema, rollout_schema
from rlvr_cli.text import printable, storable
from rlvr_cli.types import Phase, Regrade, Rollout

if TYPE_CHECKING:
    import pyarrow as pa

_UNIQUE_COLUMNS = {"response", "response_ids", "sampled_logprobs"}  # a dictionary costs time and saves nothing


def rollout_table(rollouts: Sequence[Rollout]) -> "pa.Table":
    """Rollouts as a table of `rollout_schema`; text that UTF-8 cannot hold is escaped."""
    assert all(r.sampled_at.tzinfo is None for r in rollouts), "sampled_at is naive UTC"
    return _table(rollouts, rollout_schema())


def grade_table(grades: Sequence[Regrade]) -> "pa.Table":
    """Grades as a table of `grade_schema`; text that UTF-8 cannot hold is escaped."""
    return _table(grades, grade_schema())


def _table(records: Sequence[Any], schema: "pa.Schema") -> "pa.Table":
    import pyarrow as pa

    columns = []
    for field, values in zip(schema, zip(*map(attrgetter(*schema.names), records), strict=True), strict=True):
        if pa.types.is_string(field.type):
            # Most are the same text over and over.
            escaped = {v: None if v is None else storable(v) for v in set(values)}
            values = [escaped[v] for v in values]
        columns.append(pa.array(values, field.type))
    return pa.table(columns, schema=schema)


def records_parquet(records: Sequence[Mapping[str, Any]]) -> memoryview:
    """The bytes of a Parquet file of these records; a key that one of them lacks is null there."""
    import pyarrow as pa

    names = dict.fromkeys(name for r in records for name in r)
    return to_parquet(pa.table({name: [r.get(name) for r in records] for name in names}))


def to_rollouts(table: "pa.Table") -> list[Rollout]:
    """The rows of a table with all columns of `rollout_schema`, as records."""
    import pyarrow as pa

    columns = [
        map(tuple, column.to_pylist()) if pa.types.is_list(column.type) else column.to_pylist()
        for column in table.select(Rollout.__slots__).columns
    ]
    return [Rollout(*values) for values in zip(*columns, strict=True)]


def keys_of(table: "pa.Table") -> set[tuple[Any, ...]]:
    """The (example_id, sample_index) of rollouts, or the (example_id, sample_index, attempt) of grades."""
    names = [n for n in ("example_id", "sample_index", "attempt") if n in table.column_names]
    return set(zip(*(table[name].to_pylist() for name in names), strict=True))


def with_metrics(
    earlier: "pa.Table",
    rows: Mapping[int, Mapping[str, float]],
    *,
    phase: Phase,
    wall_seconds: Mapping[int, float],
    gpu_seconds: float | None,
) -> "pa.Table":
    """A table of `metrics_schema` with these rows at its end; those of the same step, phase and name are gone from it.

    Args:
        rows: step -> metric name -> value; at least one value.
        wall_seconds: by step.
    """
    import pyarrow as pa

    schema = metrics_schema()
    fresh = {(step, phase, storable(name)): float(v) for step, values in rows.items() for name, v in values.items()}
    columns = zip(*((*key, value, wall_seconds[key[0]], gpu_seconds) for key, value in fresh.items()), strict=True)
    added = pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
    # Most steps are new: asking for them first keeps the commits of a long run quick.
    if not rows.keys().isdisjoint(earlier["step"].unique().to_pylist()):
        keys = zip(*(earlier[name].to_pylist() for name in ("step", "phase", "name")), strict=True)
        earlier = earlier.filter(pa.array([key not in fresh for key in keys]))
    return pa.concat_tables([earlier, added])


def to_parquet(table: "pa.Table") -> memoryview:
    """The bytes of a Parquet file, with a checksum for every page."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    leaves = [f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name for f in table.schema]
    encodings: dict[str, Any] = {
        "use_dictionary": [leaf for leaf in leaves if leaf.partition(".")[0] not in _UNIQUE_COLUMNS],
        "use_byte_stream_split": [leaf for leaf in leaves if leaf.startswith("sampled_logprobs.")],
    }
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True, **encodings)
    return memoryview(sink.getvalue())


def from_parquet(data: bytes, schema: "pa.Schema", *, columns: Sequence[str] | None = None) -> "pa.Table":
    """The table in a Parquet file of that schema, or some of its columns.

    Raises:
        ValueError: the bytes are damaged, or the file has other columns; what is wrong, safe for a terminal.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        if not file.schema_arrow.equals(schema):
            raise ValueError("its columns are not those that rlvr writes")
        table = file.read(columns=None if columns is None else list(columns))
        table.validate(full=True)
        return table
    except (pa.ArrowException, OSError) as error:
        raise ValueError(printable(str(error).rstrip(".\n"), keep="")) from error
