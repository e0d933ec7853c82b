"""Dicts as Parquet files. The run store's columns are tested in test_schemas.py, its rows in test_run_dir.py."""

import sys

import pyarrow as pa
import pyarrow.parquet as pq

from factories import a_rollout
from rlvr_cli.runs.storage.parquet import _reader, records_parquet, rollout_table, to_parquet


def test_records_with_any_keys_become_a_file():
    records = [{"id": "a", "reward": 1.0}, {"id": "b", "response": "r"}]
    table = pq.read_table(pa.BufferReader(records_parquet(records)))
    assert table.schema == pa.schema([("id", pa.string()), ("reward", pa.float64()), ("response", pa.string())])
    assert table.to_pylist() == [
        {"id": "a", "reward": 1.0, "response": None},
        {"id": "b", "reward": None, "response": "r"},
    ]


def test_texts_and_lists_are_compressed_and_whole_numbers_have_bounds():
    """Compressing flat numbers, or columns without a value, takes time and no byte less; nothing is asked of a text's bounds."""
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
