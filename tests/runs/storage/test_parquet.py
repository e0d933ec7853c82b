"""Dicts as Parquet files. The run store's columns are tested in test_schemas.py, its rows in test_run_dir.py."""

import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakSet

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from factories import a_rollout
from rlvr_cli.runs.storage.parquet import _reader, rollout_table, to_parquet, with_metrics, write_records
from rlvr_cli.runs.storage.schemas import metrics_schema


@pytest.mark.parametrize("rows_at_once", [1, 2, 10_000])
def test_records_with_any_keys_become_a_file(tmp_path: Path, rows_at_once: int):
    records = [
        {"id": "a", "reward": None},
        {"id": "b", "response": "r", "spans": [[0, 2]], "n": 1},
        {"id": "c", "reward": 1.0, "n": 0.5},
    ]
    with (tmp_path / "rows.parquet").open("wb") as file:
        write_records(iter(records), file, folder=tmp_path, rows_at_once=rows_at_once)
    table = pq.read_table(tmp_path / "rows.parquet")
    assert dict(zip(table.schema.names, table.schema.types, strict=True)) == {
        "id": pa.string(),
        "reward": pa.float64(),
        "response": pa.string(),
        "spans": pa.list_(pa.list_(pa.int64())),
        "n": pa.float64(),
    }
    missing = dict.fromkeys(table.column_names)
    assert table.to_pylist() == [missing | record for record in records]
    assert [p.name for p in tmp_path.iterdir()] == ["rows.parquet"]


def test_no_more_records_are_held_than_a_row_group_has(tmp_path: Path):
    class Record(dict[str, int]):
        __hash__ = object.__hash__

    held, most = WeakSet[Record](), 0

    def records() -> Iterator[Record]:
        nonlocal most
        for i in range(1000):
            record = Record(i=i)
            held.add(record)
            most = max(most, len(held))
            yield record

    with (tmp_path / "rows.parquet").open("wb") as file:
        write_records(records(), file, folder=tmp_path, rows_at_once=100)
    assert most <= 101  # those of a row group, and the one that the generator names
    assert pq.read_table(tmp_path / "rows.parquet")["i"].to_pylist() == list(range(1000))
    assert pq.ParquetFile(tmp_path / "rows.parquet").num_row_groups == 10


def test_texts_and_lists_are_compressed_and_whole_numbers_have_bounds():
    """Single numbers and columns without a value hardly become smaller, and no query asks for the bounds of a text."""
    data = to_parquet(
        rollout_table([a_rollout(example_id=f"q{i}", response="again and again " * 9) for i in range(64)])
    )
    group = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    codecs = {name: column.compression for name, column in columns.items()}
    assert {codecs[name] for name in ("prompt", "response", "response_ids.list.element")} == {"ZSTD"}
    assert {codecs[name] for name in ("reward", "step", "sampled_at", "episode.num_turns")} == {"UNCOMPRESSED"}
    assert columns["response"].total_compressed_size < columns["response"].total_uncompressed_size / 4
    bounded = {name for name, column in columns.items() if column.is_stats_set}
    assert {"phase", "step", "sample_index"} <= bounded
    assert not bounded & {"prompt", "response", "response_ids.list.element", "reward"}


def test_arrows_threads_hold_no_python_object():
    data = bytes(to_parquet(rollout_table([a_rollout()])))
    before = sys.getrefcount(data)
    reader = _reader(data)
    assert sys.getrefcount(data) == before
    assert reader.read() == data


def test_metrics_of_other_steps_are_not_gone_through():
    """A step's metrics come in several commits, so that most commits have a step that is there already."""
    count = 20_000
    columns = range(count), ["train"] * count, ["loss"] * count, [0.5] * count, [1.0] * count, [None] * count
    table = pa.table([*map(pa.array, columns, metrics_schema().types)], schema=metrics_schema())
    tracemalloc.start()
    try:
        after = with_metrics(table, {7: {"loss": 0.25, "seconds": 2.0}}, phase="train", wall_seconds={7: 3.0})
        assert tracemalloc.get_traced_memory()[1] < 2**19
    finally:
        tracemalloc.stop()
    rows = zip(*(after[name].to_pylist() for name in ("step", "name", "value", "wall_seconds")), strict=True)
    others = [(step, "loss", 0.5, 1.0) for step in range(count) if step != 7]
    assert [*rows] == [*others, (7, "loss", 0.25, 3.0), (7, "seconds", 2.0, 3.0)]
