"""The types of the columns; what goes through them and comes back is in test_run_dir.py."""

import types
import typing
from dataclasses import fields
from datetime import datetime

import pyarrow as pa
import pytest

from rlvr_cli.runs.parquet import from_parquet, records_parquet
from rlvr_cli.runs.schemas import grade_schema, rollout_schema
from rlvr_cli.types import Regrade, Rollout


@pytest.mark.parametrize(("schema", "record"), [(rollout_schema(), Rollout), (grade_schema(), Regrade)])
def test_the_columns_of_a_part_are_the_fields_of_its_record(schema, record):
    assert schema.names == [f.name for f in fields(record)]
    hints = typing.get_type_hints(record)
    kinds = {str: "string", int: "int", float: "double", datetime: "timestamp"}
    for column in schema:
        hint = hints[column.name]
        optional = isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)
        assert column.nullable == optional, column
        inner = next(t for t in typing.get_args(hint) if t is not type(None)) if optional else hint
        if typing.get_origin(inner) is tuple:
            element = {int: pa.int32(), float: pa.float32()}[typing.get_args(inner)[0]]
            assert column.type.value_type == element
            assert not column.type.value_field.nullable
        else:
            python = str if typing.get_origin(inner) is typing.Literal else inner
            assert str(column.type).startswith(kinds[python]), column
    assert "sampled_at" not in schema.names or schema.field("sampled_at").type.tz is None


def test_records_of_any_keys_are_a_file():
    records = [{"id": "a", "reward": 1.0}, {"id": "b", "response": "r"}]
    data = bytes(records_parquet(records))
    schema = pa.schema([("id", pa.string()), ("reward", pa.float64()), ("response", pa.string())])
    assert from_parquet(data, schema).to_pylist() == [
        {"id": "a", "reward": 1.0, "response": None},
        {"id": "b", "reward": None, "response": "r"},
    ]
