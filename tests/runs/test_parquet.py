"""Dicts as Parquet files. The run store's columns are tested in test_schemas.py, its rows in test_run_dir.py."""

import pyarrow as pa
import pyarrow.parquet as pq

from rlvr_cli.runs.parquet import records_parquet


def test_records_with_any_keys_become_a_file():
    records = [{"id": "a", "reward": 1.0}, {"id": "b", "response": "r"}]
    table = pq.read_table(pa.BufferReader(records_parquet(records)))
    assert table.schema == pa.schema([("id", pa.string()), ("reward", pa.float64()), ("response", pa.string())])
    assert table.to_pylist() == [
        {"id": "a", "reward": 1.0, "response": None},
        {"id": "b", "reward": None, "response": "r"},
    ]
