"""The named queries: one .sql file each, with a description and parameters in its first lines."""

import functools
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlvr_cli.errors import RlvrError

SQL_DIRECTORY = Path(__file__).parent / "sql"

_HEADER_LINE = re.compile(r"--\s?(.*)")
_PARAMETER = re.compile(r":([a-z][a-z0-9_]*)\s*=\s*(.+)")
_PLOT = re.compile(r"plot:\s*(.*)")
PLOT_KEYS = ("x", "y", "lines", "panels", "log", "bars", "places", "counts", "points", "zeros", "title", "y_label")


@dataclass(frozen=True, slots=True)
class NamedQuery:
    """A query with the parameters it takes and their defaults."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    sql: str  # the whole file
    # How --plot draws the result: {} by the general rule of `figures`, None not at all.
    plot: Mapping[str, str] | None = field(default_factory=dict)


@functools.cache
def named_queries() -> Mapping[str, NamedQuery]:
    """Read all queries in ``sql/``, by name, in alphabetical order."""
    files = sorted(SQL_DIRECTORY.glob("*.sql"))
    return MappingProxyType({p.stem: parse_query(p.stem, p.read_text(encoding="utf-8")) for p in files})


def parse_query(name: str, sql: str) -> NamedQuery:
    """Read the description, the parameters and the plot from the comment lines at the head of a query.

    Raises:
        RlvrError: a parameter's default is not JSON, or the line `plot:` has another form.
    """
    description, parameters = "", {}
    plot: dict[str, str] | None = {}
    for line in sql.splitlines():
        comment = _HEADER_LINE.match(line)
        if comment is None:
            break
        if drawn := _PLOT.fullmatch(comment[1].strip()):
            plot = _plot_of(name, drawn[1])
            continue
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
    return NamedQuery(name, description, parameters, sql, plot)


def _plot_of(name: str, text: str) -> dict[str, str] | None:
    """`x=k y=pass_at_k` -> {"x": "k", "y": "pass_at_k"}; `none` -> None."""
    if text == "none":
        return None
    try:
        parts = [word.partition("=") for word in shlex.split(text)]
    except ValueError:
        parts = [("", "", "")]
    if not all(key in PLOT_KEYS and value for key, _, value in parts):
        raise RlvrError(
            f"{name}: the line plot: has another form: {text}",
            f"Write for example  -- plot: x=step y=reward  with {', '.join(PLOT_KEYS)}; or  -- plot: none",
        )
    return {key: value for key, _, value in parts}
