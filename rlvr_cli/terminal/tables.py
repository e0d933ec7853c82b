"""Print rows on stdout as a table, JSON, CSV or Markdown.

Enters: columns and rows of any values. Leaves: text; only the table format shortens long cells.
"""

import csv
import io
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from unicodedata import combining, east_asian_width

from rlvr_cli.terminal.console import one_line, rich_console, shortened, write_text
from rlvr_cli.text import printable
from rlvr_cli.types import PValue, Table

if TYPE_CHECKING:
    from rich.console import Console


KEYS = {"run_id", "step"}  # columns that are always repeated where a table is divided
MOST_NARROW = 24  # terminal columns of the widest cell of a column in such a table
MAX_CELL_CHARACTERS = 300  # per cell of the table format; the other formats do not shorten
_PLAIN_NUMBER = re.compile(r"[-+]?[\d.,]+")


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, output: str = "table", whole: bool = False
) -> None:
    """Print rows on stdout as `output`: table, json, csv or markdown."""
    print_tables([Table(tuple(columns), [tuple(row) for row in rows])], output=output, whole=whole)


def print_tables(results: Sequence[Table], *, output: str = "table", missing: str = "–", whole: bool = False) -> None:
    """Print tables on stdout; the table format shows None as `missing`, and long texts shortened unless `whole`.

    As JSON, one table is a list of objects; several tables are an object that maps each title to such a list. As CSV,
    several tables become one with the union of their columns and a first column `table`.
    """
    match output:
        case "json":
            write_text(sys.stdout, _json_text(results))
        case "csv":
            write_text(sys.stdout, _csv_text(results))
        case "markdown":
            write_text(sys.stdout, "\n".join(map(as_markdown, results)))
        case "table":
            _print_tables(results, missing=missing, most=sys.maxsize if whole else MAX_CELL_CHARACTERS)
        case _:
            raise AssertionError(output)


def _print_tables(results: Sequence[Table], *, missing: str, most: int) -> None:
    for index, result in enumerate(results):
        columns = [one_line(shortened(c, most)) for c in result.columns]
        cells = [[one_line(shortened(_shown(v, missing), most)) for v in row] for row in result.rows]
        title = one_line(result.title) if len(results) > 1 else ""
        if index:
            write_text(sys.stdout, "\n")
        if sys.stdout.isatty():
            _print_grid(result, columns, cells, title=title)
        else:
            write_text(sys.stdout, _plain_grid(result, columns, cells, title=title))


def as_text(result: Table) -> str:
    """Return a table as it is printed into a pipe."""
    columns = [one_line(shortened(c, MAX_CELL_CHARACTERS)) for c in result.columns]
    cells = [[one_line(shortened(_shown(v, "NULL"), MAX_CELL_CHARACTERS)) for v in row] for row in result.rows]
    return _plain_grid(result, columns, cells, title="")


def _plain_grid(result: Table, columns: Sequence[str], cells: Sequence[Sequence[str]], *, title: str) -> str:
    """Format a table for a pipe, without width limit or colors; importing rich would cost more than the query."""
    widths = [max(map(_cell_width, [name, *(row[i] for row in cells)])) for i, name in enumerate(columns)]
    right = [_is_numeric(result.rows, i) for i in range(len(columns))]

    def line(texts: Sequence[str]) -> str:
        padding = [" " * (width - _cell_width(text)) for width, text in zip(widths, texts, strict=True)]
        return "   ".join(p + t if r else t + p for t, p, r in zip(texts, padding, right, strict=True)).rstrip()

    rule = "-" * (sum(widths) + 3 * (len(widths) - 1))
    return "\n".join([*([title] if title else []), line(columns), rule, *map(line, cells)]) + "\n"


def _cell_width(text: str) -> int:
    """Return the number of terminal columns that a line of printable text occupies."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def _print_grid(result: Table, columns: Sequence[str], cells: Sequence[Sequence[str]], *, title: str) -> None:
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    console = rich_console(sys.stdout)
    if title:
        console.print(Text(title, style="bold"))
    widths = [max(map(_cell_width, [name, *(row[i] for row in cells)])) for i, name in enumerate(columns)]
    blocks = _blocks(columns, cells, widths, width=console.width) if len(cells) > 1 else []
    if not blocks and sum(widths) + 3 * len(widths) > console.width and 12 * len(columns) > console.width:
        return _print_records(console, columns, cells)  # in a grid every column would be too narrow to read
    for block in blocks or [range(len(columns))]:
        grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for i in block:
            justify = "right" if _is_numeric(result.rows, i) else "left"
            grid.add_column(Text(columns[i]), justify=justify, overflow="fold")
        for row, texts in zip(result.rows, cells, strict=True):
            grid.add_row(*(Text(texts[i], style="dim" if row[i] is None else "") for i in block))
        console.print(grid)
        if blocks and block is not blocks[-1]:
            console.print()


def _blocks(
    columns: Sequence[str], cells: Sequence[Sequence[str]], widths: Sequence[int], *, width: int
) -> list[list[int]]:
    """Divide the columns of a table that is too wide among several tables, each with those that identify a row.

    These are the columns `KEYS`, and the first others until no two different rows are equal in them, as long as they fit.

    Args:
        widths: of the columns' widest cells.
        width: of the terminal.

    Returns:
        the columns of each table, in order; none if that does not help.
    """
    if sum(widths) + 3 * (len(widths) - 1) <= width:
        return []
    keys = [i for i, name in enumerate(columns) if name in KEYS]
    rest = [i for i in range(len(columns)) if i not in keys]
    num_rows = len(set(map(tuple, cells)))
    while rest and len({tuple(row[i] for i in keys) for row in cells}) < num_rows:
        widest = max((widths[i] for i in rest[1:]), default=width)
        if sum(widths[i] + 3 for i in [*keys, rest[0]]) + widest > width:
            break
        keys.append(rest.pop(0))
    taken = sum(widths[i] + 3 for i in keys)
    if not rest or max(widths[i] for i in rest) > min(MOST_NARROW, width - taken):
        return []
    blocks: list[list[int]] = []
    left = 0
    for i in rest:
        if not blocks or left < widths[i] + 3:
            blocks.append([*keys])
            left = width - taken + 3
        blocks[-1].append(i)
        left -= widths[i] + 3
    return [sorted(block) for block in blocks]


def _print_records(console: "Console", columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich.table import Table as Grid
    from rich.text import Text

    for number, row in enumerate(cells, start=1):
        console.print(Text(f"row {number}", style="bold"))
        grid = Grid.grid(padding=(0, 2))
        grid.add_column()
        grid.add_column(overflow="fold")
        for name, cell in zip(columns, row, strict=True):
            grid.add_row(Text(name, style="cyan"), Text(cell))
        console.print(grid)


def _is_numeric(rows: Sequence[tuple[Any, ...]], column: int) -> bool:
    values = [row[column] for row in rows if row[column] is not None]
    return bool(values) and all(_is_number(v) for v in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _shown(value: Any, missing: str) -> str:
    """Format a value as a table cell: floats to 4 significant digits, from 1000 on to one decimal."""
    if value is None:
        return missing
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, PValue):
        return value.text
    if isinstance(value, float | Decimal):
        return f"{value:.1f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"
    return _as_text(value)


def _as_text(value: Any) -> str:
    """Format a value as text without shortening it."""
    if isinstance(value, str):
        return value
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Convert a value to JSON types; NaN and infinities become None."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Decimal():
            return _plain(float(value))
        case datetime():
            return value.isoformat(sep=" ")
        case date() | time_of_day():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case bytes() | bytearray():
            return bytes(value).hex()
        case Mapping():
            return {str(_plain(k)): _plain(v) for k, v in value.items()}
        case list() | tuple() | set():
            return [_plain(v) for v in value]
    return str(value)


def unique(columns: Sequence[str]) -> list[str]:
    """Make column names unique, as JSON, CSV and dicts need them: a second `a` becomes `a_2`."""
    names: list[str] = []
    for column in columns:
        name, number = column, 1
        while name in names:
            number += 1
            name = f"{column}_{number}"
        names.append(name)
    return names


def _json_text(results: Sequence[Table]) -> str:
    objects = {}
    for result in results:
        names = unique(result.columns)
        objects[result.title] = [dict(zip(names, map(_plain, row), strict=True)) for row in result.rows]
    value = objects if len(results) > 1 else next(iter(objects.values()))
    return re.sub(r"[^\n -~]", _json_escape, json.dumps(value, ensure_ascii=False, indent=1)) + "\n"


def _json_escape(match: re.Match[str]) -> str:
    character = match[0]
    if printable(character) == character:
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def _csv_text(results: Sequence[Table]) -> str:
    several = len(results) > 1
    names = list(dict.fromkeys(n for r in results for n in unique(r.columns)))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_csv_cell, ["table", *names] if several else names))
    for result in results:
        for row in result.rows:
            record = dict(zip(unique(result.columns), row, strict=True))
            cells = [_csv_cell(record.get(n)) for n in names]
            writer.writerow([_csv_cell(result.title), *cells] if several else cells)
    return text.getvalue()


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    if _is_number(value):
        return str(value)
    text = _as_text(value)
    if text[:1] in ("=", "+", "-", "@", "\t", "\r") and not _PLAIN_NUMBER.fullmatch(text):
        text = "'" + text  # a spreadsheet would run it as a formula
    return printable(text)


_MARKDOWN = {
    "&": "&amp;",
    "<": "&lt;",
    ">": "&gt;",
    "|": "&#124;",
    "\\": "\\\\",
    "`": "\\`",
    "[": "\\[",
    "\n": "<br>",
    "\t": " ",
}


def as_markdown(result: Table) -> str:
    """Return a table in Markdown, with its title as a heading."""

    def line(cells: Sequence[str]) -> str:
        escaped = ["".join(_MARKDOWN.get(c, c) for c in printable(cell)) for cell in cells]
        return f"| {' | '.join(escaped)} |\n"

    rule = f"|{'|'.join('--:' if _is_numeric(result.rows, i) else '---' for i in range(len(result.columns)))}|\n"
    heading = f"### {one_line(result.title)}\n\n" if result.title else ""
    return heading + line(result.columns) + rule + "".join(line([_shown(v, "") for v in row]) for row in result.rows)
