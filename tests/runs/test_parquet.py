"""Records of any keys as a file; the columns of the run store are in test_schemas.py, what goes through them in test_run_dir.py."""

import pyarrow as pa
import pyarrow.parquet as pq

from rlvr_cli.runs.parquet import records_parquet


def test_records_of_any_keys_are_a_file():
    records = [{"id": "a", "reward": 1.0}, {"id": "b", "response": "r"}]
    table = pq.read_table(pa.BufferReader(records_parquet(records)))
    assert table.schema == pa.schema([("id", pa.string()), ("reward", pa.float64()), ("response", pa.string())])
    assert table.to_pylist() == [
        {"id": "a", "reward": 1.0, "response": None},
        {"id": "b", "reward": None, "response": "r"},
    ]
