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


def test_arrows_threads_hold_no_python_object():
    data = bytes(to_parquet(rollout_table([a_rollout()])))
    before = sys.getrefcount(data)
    reader = _reader(data)
    assert sys.getrefcount(data) == before
    assert reader.read() == data
