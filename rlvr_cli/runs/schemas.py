"""The columns of the run store's Parquet files, read off the dataclasses that are their rows, and those of older versions.

Enters: `Rollout`, `Regrade` or `Metric`. Leaves: its columns, as `Column` or as an Arrow schema.
"""

import functools
from dataclasses import MISSING, dataclass, fields
from datetime import datetime
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from rlvr_cli.errors import RlvrError
from rlvr_cli.types import SCHEMA_VERSION, Metric, Regrade, Rollout, Since

if TYPE_CHECKING:
    import pyarrow as pa

VERSION_KEY = b"rlvr.schema_version"  # in the metadata of a Parquet file
_KINDS = {str: "string", int: "int64", float: "float64", bool: "bool_", datetime: "timestamp"}


class NewerVersion(RlvrError):
    """Something is of a later rlvr. It is not damaged: nothing may be set aside or passed over for it."""


def newer_version(what: str, version: int) -> NewerVersion:
    """The error for something that is of a later schema version."""
    return NewerVersion(
        f"{what} was written by a newer rlvr (schema version {version}).", "Upgrade rlvr-cli to read it."
    )


@dataclass(frozen=True, slots=True)
class Column:
    """How a field is stored."""

    name: str
    kind: str  # list, struct, timestamp (microseconds, no time zone), or a type without parameters by pyarrow's name
    nullable: bool
    children: "tuple[Column, ...]" = ()  # the element of a list, the fields of a struct
    since: int = 1  # the schema version in which it came
    older: Any = None  # what a file of an older version reads as


@functools.cache
def columns_of(record: type) -> tuple[Column, ...]:
    """The columns of a dataclass: its fields, in their order. A field is nullable where its type has None."""
    return tuple(_column(f.name, f.type, default=f.default) for f in fields(record))


def _column(name: str, annotation: Any, *, default: Any = None) -> Column:
    marks = list(getattr(annotation, "__metadata__", ()))
    since = next((mark.version for mark in marks if isinstance(mark, Since)), 1)
    narrow = next((mark for mark in marks if isinstance(mark, str)), None)
    inner = get_args(annotation)[0] if marks else annotation
    if nullable := get_origin(inner) in (Union, UnionType):
        (inner,) = (a for a in get_args(inner) if a is not NoneType)
        column = _column(name, inner)
        kind, children = column.kind, column.children
    elif get_origin(inner) is tuple:
        element, _ = get_args(inner)  # tuple[X, ...]
        kind, children = "list", (_column("element", element),)
    elif isinstance(inner, type) and issubclass(inner, tuple):  # a NamedTuple
        kind, children = "struct", tuple(_column(n, kind) for n, kind in inner.__annotations__.items())
        assert all(child.since == 1 for child in children), f"{name} cannot grow: it is one column"
    else:
        kind, children = narrow or ("string" if get_origin(inner) is Literal else _KINDS[inner]), ()
    if since == 1:
        return Column(name, kind, nullable, children)
    assert default is not MISSING, f"{name} has no default: what does an older file read as?"
    assert (default is None) == nullable, f"{name} of an older file is NULL where it can be, else its default"
    return Column(name, kind, nullable, children, since, default)


@functools.cache
def arrow_schema(record: type, *, version: int | None = None) -> "pa.Schema":
    """The Arrow schema of a dataclass's rows: as they are written today, or as that older schema version wrote them."""
    import pyarrow as pa

    columns = [_arrow_field(c) for c in columns_of(record) if version is None or c.since <= version]
    return pa.schema(columns, metadata={VERSION_KEY: str(version or SCHEMA_VERSION)})


def _arrow_field(column: Column) -> "pa.Field":
    import pyarrow as pa

    children = [_arrow_field(child) for child in column.children]
    match column.kind:
        case "list":
            kind = pa.list_(children[0])
        case "struct":
            kind = pa.struct(children)
        case "timestamp":
            kind = pa.timestamp("us")
        case name:
            kind = getattr(pa, name)()
    return pa.field(column.name, kind, nullable=column.nullable)


def rollout_schema() -> "pa.Schema":
    """The columns of a rollout part."""
    return arrow_schema(Rollout)


def grade_schema() -> "pa.Schema":
    """The columns of a part of grades."""
    return arrow_schema(Regrade)


def metrics_schema() -> "pa.Schema":
    """The columns of metrics.parquet."""
    return arrow_schema(Metric)
