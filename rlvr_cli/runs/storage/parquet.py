"""Convert records to Arrow tables and Parquet bytes, and back.

Enters: rollouts, segments, grades and metrics, or the bytes of a Parquet file. Leaves: Parquet bytes, or the table in them, after
checking its columns and page checksums. Importing pyarrow costs 0.2 s of CPU, so functions import it.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

from rlvr_cli.errors import short_of_resources
from rlvr_cli.runs.storage.schemas import (
    VERSION_KEY,
    Column,
    arrow_schema,
    columns_of,
    grade_schema,
    metrics_schema,
    newer_version,
    rollout_schema,
    segment_schema,
)
from rlvr_cli.runs.turns import broken_turns
from rlvr_cli.text import printable, storable
from rlvr_cli.types import SCHEMA_VERSION, Phase, Regrade, Rollout, Segment

if TYPE_CHECKING:
    import pyarrow as pa

_UNIQUE_COLUMNS = {
    "response",
    "response_ids",
    "sampled_logprobs",
}  # (almost) unique values: dictionary encoding costs time and saves nothing


COST_KEY = b"rlvr.cost"  # in the metadata of a part: what its rows cost, as a JSON object of numbers


def rollout_table(rollouts: Sequence[Rollout], *, cost: Mapping[str, float] | None = None) -> "pa.Table":
    """Convert rollouts to a table of `rollout_schema`; lone surrogates in text are escaped.

    Args:
        cost: numbers to store in the metadata of the table, which `cost_of` returns.
    """
    for r in rollouts:
        assert r.sampled_at.tzinfo is None, "sampled_at is naive UTC"
        assert r.response_mask is None or len(r.response_mask) == len(r.response_ids), (
            "response_mask has one element per token"
        )
        assert r.token_versions is None or len(r.token_versions) == len(r.response_ids), (
            "token_versions has one element per token"
        )
        if r.turns is not None:
            places = [0, *(place for turn in r.turns for place in (turn.start, turn.end)), len(r.response_ids)]
            assert places == sorted(places), f"turns must be in order and within the response: {r.turns}"
        if r.episode is not None:
            tokens = {"tokens": len(r.response_ids), "policy_tokens": r.episode.num_policy_tokens}
            assert (broken := broken_turns(r.turns, r.response_mask, **tokens)) is None, broken
    return _with_cost(_table(rollouts, rollout_schema()), cost)


def segment_table(segments: Sequence[Segment], *, cost: Mapping[str, float] | None = None) -> "pa.Table":
    """Convert segments to a table of `segment_schema`. `cost`: as for `rollout_table`."""
    return _with_cost(_table(segments, segment_schema()), cost)


def _with_cost(table: "pa.Table", cost: Mapping[str, float] | None) -> "pa.Table":
    if not cost:
        return table
    return table.replace_schema_metadata({**(table.schema.metadata or {}), COST_KEY: json.dumps(cost).encode()})


def cost_of(data: bytes) -> dict[str, float]:
    """Return what the rows of a part cost; empty if it was not recorded."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = (pq.read_schema(pa.BufferReader(data)).metadata or {}).get(COST_KEY)
    return {} if text is None else json.loads(text)


def grade_table(grades: Sequence[Regrade]) -> "pa.Table":
    """Convert grades to a table of `grade_schema`; lone surrogates in text are escaped."""
    return _table(grades, grade_schema())


def _table(records: Sequence[Any], schema: "pa.Schema") -> "pa.Table":
    import pyarrow as pa

    columns = []
    for field, values in zip(schema, zip(*map(attrgetter(*schema.names), records), strict=True), strict=True):
        if pa.types.is_string(field.type):
            # Escape each distinct text once: most repeat.
            escaped = {v: None if v is None else storable(v) for v in set(values)}
            values = [escaped[v] for v in values]
        columns.append(pa.array(values, field.type))
    return pa.table(columns, schema=schema)


def write_records(
    records: Iterable[Mapping[str, Any]], file: IO[bytes], *, folder: Path, rows_at_once: int = 10_000
) -> None:
    """Write dicts as a Parquet file, in row groups; missing keys become null.

    No more than `rows_at_once` of them are held. A column's type is known once all rows are: until then they wait in a
    temporary file without a name.

    Args:
        folder: the directory of the temporary file.

    Raises:
        OSError: there is no room for the rows.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    records, schemas = iter(records), list[pa.Schema]()
    with TemporaryFile(dir=folder) as waiting:
        while (table := _records_table([*islice(records, rows_at_once)])).num_rows:
            with pa.ipc.new_stream(waiting, table.schema) as stream:
                stream.write_table(table)
            schemas.append(table.schema)
        schema = pa.unify_schemas(schemas, promote_options="permissive")
        waiting.seek(0)
        with pq.ParquetWriter(file, schema, **_encodings(schema, schema.names)) as writer:
            for _ in schemas:
                with pa.ipc.open_stream(waiting) as stream:
                    table = stream.read_all()
                writer.write_table(pa.concat_tables([schema.empty_table(), table], promote_options="permissive"))


def _records_table(records: Sequence[Mapping[str, Any]]) -> "pa.Table":
    import pyarrow as pa

    names = dict.fromkeys(name for r in records for name in r)
    return pa.table({name: [r.get(name) for r in records] for name in names})


def to_rollouts(table: "pa.Table") -> list[Rollout]:
    """Convert a table with all columns of `rollout_schema` to rollouts."""
    return to_records(table, Rollout)


def to_records(table: "pa.Table", record: type) -> list[Any]:
    """Convert a table with all columns of `arrow_schema(record)` to records."""
    columns = []
    for column in columns_of(record):
        values = table[column.name].to_pylist()
        columns.append([_field_value(column, value) for value in values] if column.children else values)
    return [record(*values) for values in zip(*columns, strict=True)]


def _field_value(column: Column, value: Any) -> Any:
    """Convert a value of `to_pylist` to that of the record's field: lists to tuples, dicts to named tuples."""
    if value is None or not column.children:
        return value
    if column.struct is not None:
        return column.struct(*(_field_value(child, value[child.name]) for child in column.children))
    (element,) = column.children
    return tuple([_field_value(element, v) for v in value] if element.children else value)


def keys_of(table: "pa.Table") -> set[tuple[Any, ...]]:
    """Return the (example_id, sample_index) of rollouts, or the (example_id, sample_index, attempt) of grades."""
    names = [n for n in ("example_id", "sample_index", "attempt") if n in table.column_names]
    return set(zip(*(table[name].to_pylist() for name in names), strict=True))


def with_metrics(
    earlier: "pa.Table",
    rows: Mapping[int, Mapping[str, float]],
    *,
    phase: Phase,
    wall_seconds: Mapping[int, float],
) -> "pa.Table":
    """Return the metrics with these rows appended, after removing earlier rows with the same step, phase and name.

    Args:
        earlier: a table of `metrics_schema`.
        rows: step -> metric name -> value; at least one value.
        wall_seconds: step -> wall_seconds.
    """
    import numpy as np
    import pyarrow as pa

    schema = metrics_schema()
    fresh = {(step, phase, storable(name)): float(v) for step, values in rows.items() for name, v in values.items()}
    columns = zip(*((*key, value, wall_seconds[key[0]], None) for key, value in fresh.items()), strict=True)
    added = pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
    # Only the rows of these steps become Python objects: a long run has many others.
    near = np.flatnonzero(np.isin(earlier["step"].to_numpy(), [*rows]))
    keys = zip(*(earlier[name].take(pa.array(near)).to_pylist() for name in ("step", "phase", "name")), strict=True)
    if replaced := [i for i, key in zip(near, keys, strict=True) if key in fresh]:
        kept = np.ones(earlier.num_rows, bool)
        kept[replaced] = False
        earlier = earlier.filter(pa.array(kept))
    return pa.concat_tables([earlier, added])


def to_parquet(table: "pa.Table") -> memoryview:
    """Convert a table to the bytes of a Parquet file with page checksums."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    filled = [name for name in table.column_names if table[name].null_count < table.num_rows]
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **_encodings(table.schema, filled))
    return memoryview(sink.getvalue())


def _encodings(schema: "pa.Schema", filled: Sequence[str]) -> dict[str, Any]:
    """Return how the columns of a schema are written, of which these have values."""
    import pyarrow as pa

    fields = {field.name: _leaves(field) for field in schema}
    leaves = [leaf for of_field in fields.values() for leaf in of_field]
    compressed = [name for name in filled if _is_compressible(schema.field(name))]
    return {
        "write_page_checksum": True,
        "use_dictionary": [leaf for leaf in leaves if leaf.partition(".")[0] not in _UNIQUE_COLUMNS],
        "use_byte_stream_split": [leaf for leaf in leaves if leaf.startswith("sampled_logprobs.")],
        "compression": {leaf: "zstd" for name in compressed for leaf in fields[name]},
        "write_statistics": [f.name for f in schema if f.name == "phase" or pa.types.is_integer(f.type)],
    }


def _is_compressible(field: "pa.Field") -> bool:
    """Whether values are texts, lists or structs; single numbers hardly become smaller."""
    import pyarrow as pa

    return pa.types.is_string(field.type) or pa.types.is_nested(field.type)


def _leaves(field: "pa.Field", prefix: str = "") -> list[str]:
    """Return the paths of the Parquet columns that store a field."""
    import pyarrow as pa

    path = prefix + field.name
    if pa.types.is_list(field.type):
        return _leaves(field.type.value_field, f"{path}.list.")
    if pa.types.is_struct(field.type):
        return [leaf for child in field.type for leaf in _leaves(child, f"{path}.")]
    return [path]


def from_parquet(
    data: bytes, record: type, *, columns: Sequence[str] | None = None, name: str = "The file"
) -> "pa.Table":
    """Read a Parquet file of `record` rows, of the current schema version or an older one.

    Columns that are newer than the file are filled with NULL, or with the default of the record's field.

    Args:
        columns: names of the columns to return, in that order; None for all.
        name: how errors refer to the file.

    Returns:
        A table of `arrow_schema(record)`, or of these columns of it.

    Raises:
        ValueError: the bytes are damaged, or the columns do not match the file's version; the message is safe for a
            terminal.
        RlvrError: a newer rlvr wrote the file; or memory or threads are short.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = arrow_schema(record)
    names = schema.names if columns is None else list(columns)
    try:
        file = pq.ParquetFile(_reader(data), page_checksum_verification=True)
        version = _version_of(file.schema_arrow)
        if version > SCHEMA_VERSION:
            raise newer_version(name, version)
        if not file.schema_arrow.equals(arrow_schema(record, version=version)):
            raise ValueError("its columns do not match its schema version")
        stored = set(file.schema_arrow.names)
        table = file.read(columns=[name for name in names if name in stored])
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        if (short := short_of_resources(error)) is not None:
            raise short from error
        raise ValueError(printable(str(error).rstrip(".\n"), keep="")) from error
    rows = file.metadata.num_rows
    for column in columns_of(record):
        if column.name in names and column.name not in stored:
            table = table.append_column(schema.field(column.name), _older_column(column, schema, rows=rows))
    return table.select(names).replace_schema_metadata(schema.metadata)


def _reader(data: bytes) -> "pa.BufferReader":
    """Return a reader of a copy of these bytes in Arrow's own memory.

    Arrow decodes columns in threads, and the last of them may free the buffer. Freeing a Python object needs the
    interpreter's lock; a thread that asks for it while the interpreter ends aborts the process (exit status 134,
    "terminate called without an active exception").
    """
    import pyarrow as pa

    buffer = pa.allocate_buffer(len(data))
    memoryview(buffer).cast("B")[:] = data
    return pa.BufferReader(buffer)


def _older_column(column: Column, schema: "pa.Schema", *, rows: int) -> "pa.Array":
    import pyarrow as pa

    kind = schema.field(column.name).type
    return pa.nulls(rows, kind) if column.nullable else pa.repeat(pa.scalar(column.older_value, kind), rows)


def version_of(data: bytes) -> int:
    """Return the schema version of a Parquet file that `from_parquet` accepted."""
    import pyarrow.parquet as pq

    return _version_of(pq.read_schema(_reader(data)))


def _version_of(schema: "pa.Schema") -> int:
    text = (schema.metadata or {}).get(VERSION_KEY, b"").decode(errors="replace")
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise ValueError("it has no schema version")
    return int(text)
