"""Which columns of a result are drawn.

Enters: the rows of a query, and its line ``-- plot:``. Leaves: `Columns`, or an error that says what to select.

The rule, which the line may change: x is the column `step`, else the first column of numbers, of those with more than one value.
Each other column of numbers is a panel; columns NAME_low and NAME_high, or low and high behind it, are its interval. The runs are
the series; each combination of the other texts is a line of its own. If no line would have two points, the picture is bars:
x is then the first column of texts.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import NamedTuple

from rlvr_cli.errors import RlvrError
from rlvr_cli.types import Table


class Columns(NamedTuple):
    """Which columns of a result are drawn, and how."""

    x: str
    y: tuple[tuple[str, ...], ...]  # of each panel, the columns that share it
    lines: tuple[str, ...]
    panels: tuple[str, ...]
    bars: bool


def columns_of(result: Table, plot: Mapping[str, str], name: str) -> Columns:
    """Which columns are x, y, lines and panels: by the query's line ``-- plot:``, the rest by the rule."""
    kinds = {column: kind_of(result, column) for column in result.columns}
    numeric = [c for c in result.columns if kinds[c] == "number" and not _bounds_of(result, c)]
    texts = [c for c in result.columns if kinds[c] == "text"]
    asked = [
        c
        for key in ("x", "y", "lines", "panels", "counts", "points")
        for c in plot.get(key, "").replace("+", ",").split(",")
        if c
    ]
    for column in asked:
        if column not in kinds:
            raise RlvrError(f"{name}: the line plot: names {column}, which is no column of the result.")
    panels = tuple(filter(None, plot.get("panels", "").split(",")))
    x = plot.get("x") or _first_x(result, numeric)
    y = tuple(tuple(group.split("+")) for group in plot.get("y", "").split(",") if group)
    rest = [c for c in texts if c not in (x, *panels)]
    lines = tuple(filter(None, plot.get("lines", "").split(","))) or tuple(
        rest if "x" not in plot else [c for c in rest if c == "run_id"]
    )
    bars = plot.get("bars") == "yes"
    if "x" not in plot and (x is None or not _is_curve(result, x, (*lines, *panels))):
        if not texts:
            raise _no_x(name, result)
        x, bars = next((t for t in texts if count_distinct(result, t) > 1), texts[0]), True
        lines = tuple(c for c in lines if c != x)
        numeric = [c for c in numeric if c != "seed"]
    y = y or tuple((c,) for c in numeric if c not in (x, "step"))
    if not y or x is None:
        raise _no_x(name, result)
    needed = [c for c in (*(c for group in y for c in group), plot.get("counts", "")) if c]
    needed += [] if bars or plot.get("places") == "yes" or x == "run_id" else [x]
    for column in needed:
        if not are_numbers(result, column):
            raise RlvrError(
                f"{name}: the line plot: draws {column}, which is no column of numbers.",
                "y and counts are columns of numbers, and x too without bars=yes or places=yes.",
            )
    return Columns(x, y, lines, panels, bars)


def with_wanted(columns: Columns, result: Table, plot: Mapping[str, str], wanted: Sequence[str]) -> Columns:
    """With --panels any column of numbers may be drawn: one that is not by default, or alone one that shares a panel."""
    shared = {c for group in columns.y for c in group if len(group) > 1}
    alone = [c for c in dict.fromkeys(wanted) if c in shared or c in other_columns(result, columns)]
    kept = [group for group in columns.y if len(group) == 1 or not set(group) & set(alone)]
    return columns._replace(y=(*kept, *((c,) for c in alone)))


def other_columns(result: Table, columns: Columns) -> list[str]:
    """The columns of numbers that are not drawn by default, but could be."""
    drawn = {columns.x, *(c for group in columns.y for c in group)}
    return [
        c for c in result.columns if c not in drawn and kind_of(result, c) == "number" and not _bounds_of(result, c)
    ]


def kind_of(result: Table, column: str) -> str:
    place = result.columns.index(column)
    values = [row[place] for row in result.rows if row[place] is not None]
    if values and all(isinstance(v, int | float | Decimal) and not isinstance(v, bool) for v in values):
        return "number"
    return "text" if values and all(isinstance(v, str) for v in values) else "other"


def are_numbers(result: Table, column: str) -> bool:
    """Whether each value that the column has can be drawn."""
    place = result.columns.index(column)
    return all(row[place] is None or isinstance(row[place], int | float | Decimal) for row in result.rows)


def _bounds_of(result: Table, column: str) -> str:
    """The column whose interval this one is a bound of; "" if it is none."""
    names = result.columns
    if column in ("low", "high"):
        at = names.index("low") if "low" in names else 0
        owner = names[at - 1] if at else ""
    else:
        owner = column.removesuffix("_low").removesuffix("_high")
    return owner if owner in names and column in (interval_columns(result, owner) or ()) else ""


def interval_columns(result: Table, column: str) -> tuple[str, str] | None:
    names, after = result.columns, result.columns.index(column) + 1
    own = f"{column}_low", f"{column}_high"
    bounds = own if set(own) <= set(names) else ("low", "high")
    is_there = bounds == own or names[after : after + 2] == bounds
    return bounds if is_there and all(are_numbers(result, c) for c in bounds) else None


def count_distinct(result: Table, column: str) -> int:
    place = result.columns.index(column)
    return len({row[place] for row in result.rows})


def _first_x(result: Table, numeric: Sequence[str]) -> str | None:
    varied = [c for c in numeric if count_distinct(result, c) > 1]
    return "step" if "step" in varied else next(iter(varied), None)


def _is_curve(result: Table, x: str, texts: Sequence[str]) -> bool:
    """Whether a line has two points or more."""
    places = [result.columns.index(c) for c in texts]
    lines = [tuple(row[p] for p in places) for row in result.rows]
    return len(set(lines)) < len(lines)


def _no_x(name: str, result: Table) -> RlvrError:
    return RlvrError(
        f"{name} cannot be drawn: its columns {', '.join(result.columns)} hold no numbers against an x."
        if result.rows
        else f"{name} cannot be drawn: it has no rows.",
        "Select an x such as step, and columns of numbers: SELECT run_id, step, avg(reward) FROM rollouts GROUP BY ALL",
    )


def nothing_to_draw(name: str, result: Table, columns: Columns) -> RlvrError:
    drawn = ", ".join(c for group in columns.y for c in group)
    others = other_columns(result, columns)
    return RlvrError(
        f"{name} cannot be drawn: {drawn} against {columns.x} has no values in these runs.",
        f"--panels draws others: {', '.join(others)}." if others else "",
    )
