"""The schemas of the run store's Parquet files, current and older versions, derived from the row dataclasses.

Enters: `Rollout`, `Segment`, `Regrade` or `Metric`. Leaves: its columns, as `Column` objects or as an Arrow schema.
"""

import functools
from dataclasses import MISSING, dataclass, fields
from datetime import datetime
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from rlvr_cli.errors import RlvrError
from rlvr_cli.types import SCHEMA_VERSION, Metric, Regrade, Rollout, Segment, Since

if TYPE_CHECKING:
    import pyarrow as pa

VERSION_KEY = b"rlvr.schema_version"  # in the metadata of a Parquet file
_KINDS = {str: "string", int: "int64", float: "float64", bool: "bool_", datetime: "timestamp"}


class NewerVersion(RlvrError):
    """A newer rlvr wrote the file. It is not damaged, so recovery must not move it away and readers must not skip it."""


def newer_version(what: str, version: int) -> NewerVersion:
    """Return the error for something with a newer schema version."""
    return NewerVersion(
        f"{what} was written by a newer rlvr (schema version {version}).", "Upgrade rlvr-cli to read it."
    )


@dataclass(frozen=True, slots=True)
class Column:
    """How a dataclass field is stored in Parquet."""

    name: str
    kind: str  # list, struct, timestamp (microseconds, no time zone), or the pyarrow name of a type without parameters
    nullable: bool
    children: "tuple[Column, ...]" = ()  # the element of a list, the fields of a struct
    struct: type | None = None  # the NamedTuple of a struct
    since: int = 1  # the schema version that introduced it
    older_value: Any = None  # its value in files of an older version


@functools.cache
def columns_of(record: type) -> tuple[Column, ...]:
    """Return the columns of a dataclass: its fields, in order. A column is nullable if the field's type allows None."""
    return tuple(_column(f.name, f.type, default=f.default) for f in fields(record))


def _column(name: str, annotation: Any, *, default: Any = None) -> Column:
    marks = list(getattr(annotation, "__metadata__", ()))
    since = next((mark.version for mark in marks if isinstance(mark, Since)), 1)
    narrow = next((mark for mark in marks if isinstance(mark, str)), None)
    inner, struct = get_args(annotation)[0] if marks else annotation, None
    if nullable := get_origin(inner) in (Union, UnionType):
        (inner,) = (a for a in get_args(inner) if a is not NoneType)
        column = _column(name, inner)
        kind, children, struct = column.kind, column.children, column.struct
    elif get_origin(inner) is tuple:
        element, _ = get_args(inner)  # tuple[X, ...]
        kind, children = "list", (_column("element", element),)
    elif isinstance(inner, type) and issubclass(inner, tuple):  # a NamedTuple
        struct = inner
        kind, children = "struct", tuple(_column(n, kind) for n, kind in inner.__annotations__.items())
        assert all(child.since == 1 for child in children), (
            f"{name} is one column: its fields cannot have versions of their own"
        )
    else:
        kind, children = narrow or ("string" if get_origin(inner) is Literal else _KINDS[inner]), ()
    if since == 1:
        return Column(name, kind, nullable, children, struct)
    assert default is not MISSING, f"{name} needs a default, its value in files of an older version"
    assert (default is None) == nullable, (
        f"{name}: the default of a nullable column must be None, that of any other column must not"
    )
    return Column(name, kind, nullable, children, struct, since, default)


@functools.cache
def arrow_schema(record: type, *, version: int | None = None) -> "pa.Schema":
    """Return the Arrow schema of a dataclass's rows: the current one, or that of an older schema version."""
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
    """Return the Arrow schema of a rollout part."""
    return arrow_schema(Rollout)


def segment_schema() -> "pa.Schema":
    """Return the Arrow schema of a part of segments."""
    return arrow_schema(Segment)


def grade_schema() -> "pa.Schema":
    """Return the Arrow schema of a grades part."""
    return arrow_schema(Regrade)


def metrics_schema() -> "pa.Schema":
    """Return the Arrow schema of metrics.parquet."""
    return arrow_schema(Metric)
