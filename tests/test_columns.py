"""The types of the columns; what goes through them and comes back is in test_store.py."""

import types
import typing
from dataclasses import fields
from datetime import datetime

import pyarrow as pa

from rlvr_cli.columns import rollout_schema
from rlvr_cli.records import Rollout


def test_the_columns_of_a_part_are_the_fields_of_rollout():
    schema = rollout_schema()
    assert schema.names == [f.name for f in fields(Rollout)]
    hints = typing.get_type_hints(Rollout)
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
    assert schema.field("sampled_at").type.tz is None
