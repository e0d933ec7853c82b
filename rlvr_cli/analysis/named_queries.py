"""The named queries: one .sql file each, with a description and parameters in its first lines."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr_cli.errors import RlvrError

SQL_DIRECTORY = Path(__file__).parent / "sql"

_HEADER_LINE = re.compile(r"--\s?(.*)")
_PARAMETER = re.compile(r":([a-z][a-z0-9_]*)\s*=\s*(.+)")


@dataclass(frozen=True, slots=True)
class NamedQuery:
    """A query with the parameters it takes and their defaults."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    sql: str  # the whole file


def named_queries() -> dict[str, NamedQuery]:
    """Read all queries in ``sql/``, by name, in alphabetical order."""
    return {p.stem: parse_query(p.stem, p.read_text(encoding="utf-8")) for p in sorted(SQL_DIRECTORY.glob("*.sql"))}


def parse_query(name: str, sql: str) -> NamedQuery:
    """Read the description and the parameters from the comment lines at the head of a query.

    Raises:
        RlvrError: a parameter's default is not JSON.
    """
    description, parameters = "", {}
    for line in sql.splitlines():
        comment = _HEADER_LINE.match(line)
        if comment is None:
            break
        parameter = _PARAMETER.fullmatch(comment[1].strip())
        if parameter is None:
            description = description or comment[1].strip()
            continue
        try:
            parameters[parameter[1]] = json.loads(parameter[2])
        except ValueError as e:
            raise RlvrError(
                f"{name}: the default of :{parameter[1]} is not JSON: {parameter[2]}",
                'Write for example  -- :phase = "eval"  or  -- :step = null',
            ) from e
    return NamedQuery(name, description, parameters, sql)
