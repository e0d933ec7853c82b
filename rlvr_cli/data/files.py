"""Read the rows of a file: JSON lines, a JSON array, CSV or Parquet.

Enters: the path of a .jsonl, .json, .csv or .parquet file, or of a .jsonl.gz or .csv.gz. Leaves: one `Row` or `BadRow` after the
other, each with its place (FILE:LINE where the format has lines); numbers stay as they are written. A bad row does not affect the
others; a file that cannot be read at all raises RlvrError.
"""

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

from rlvr_cli.errors import RlvrError, short_of_resources
from rlvr_cli.text import storable

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".csv.gz")
QUESTION = '{"question": …, "answer": …}'
MAX_LINE_BYTES = 64 * 2**20  # a longer line is a bad row: a file without line ends must not fill the memory


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file, unconverted."""

    where: str
    number: int | str  # ends the id of a row without an id
    values: Mapping[str, Any]
    keys: Sequence[str]  # all keys of the row, also unused ones
    nulls_fill: bool = False  # all rows have the same fields, objects in them too: those that a row lacks are null


class BadRow(Exception):
    """One row that cannot be used: readers yield it, so that the rows after it can still be read."""

    def __init__(self, where: str, problem: str, hint: str = "") -> None:
        super().__init__(where, problem, hint)
        self.where, self.problem, self.hint = where, problem, hint

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


def suffix_of(path: Path) -> str:
    """How a file's name ends, in lower case: one of `SUFFIXES`, or another."""
    return "".join(path.suffixes[-2 if path.suffix.lower() == ".gz" else -1 :]).lower()


def stem_of(path: Path) -> str:
    """A file's name without `suffix_of`."""
    return path.name[: len(path.name) - len(suffix_of(path))]


def file_rows(path: Path, *, header: Sequence[str] = (), like: str = QUESTION) -> Generator[Row | BadRow]:
    """Yield the rows of a file, read lazily. Raises RlvrError when the file as a whole cannot be read.

    Args:
        header: the columns of a CSV file that has no header of its own.
        like: a row of JSON, as errors show it.
    """
    suffix = suffix_of(path)
    try:
        if suffix == ".parquet":
            yield from _parquet_rows(path)
        elif suffix in (".csv", ".csv.gz"):
            yield from _csv_rows(path, header)
        elif suffix == ".json" and _starts_an_array(path):
            yield from _json_array_rows(path, like)
        else:
            yield from _json_line_rows(path, like)
    except OSError as e:
        raise RlvrError(f"Cannot read {path}: {e.strerror or e}.") from e
    except (EOFError, zlib.error) as e:  # of gzip
        raise RlvrError(f"Cannot read {path}: {e}.", "Is it complete?") from e


def _open(path: Path) -> BinaryIO:
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")  # pyright: ignore[reportReturnType]


def _json_line_rows(path: Path, like: str) -> Generator[Row | BadRow]:
    with _open(path) as file:
        for number, line in enumerate(_lines(file), start=1):
            where = f"{path}:{number}"
            if line is None:
                yield BadRow(
                    where, f"the line is longer than {MAX_LINE_BYTES // 2**20} MiB.", "One JSON object per line."
                )
                continue
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                yield _row(_parse_json(line.rstrip(b"\r\n").decode()), where, number, like)
            except UnicodeDecodeError as e:
                yield BadRow(
                    where, f"byte {line[e.start]:#04x} at column {e.start + 1} is not UTF-8.", "Save it as UTF-8."
                )
            except json.JSONDecodeError as e:
                hint = "One JSON object per line." if line.endswith(b"\n") else "The file ends here: is it cut off?"
                yield BadRow(where, f"not valid JSON: {_json_fault(e)}.", hint)
            except _Unusable as e:
                yield BadRow(where, str(e))


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    r"""Yield lines that end in \n (U+2028 and the like do not end a line); None for a line that is too long."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)
        yield None


def _starts_an_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _json_array_rows(path: Path, like: str) -> Generator[Row | BadRow]:
    try:
        items = _parse_json(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        raise RlvrError(
            f"{path} is not UTF-8: byte {e.object[e.start]:#04x} at offset {e.start}.", "Save it as UTF-8."
        ) from e
    except json.JSONDecodeError as e:
        raise RlvrError(f"{path}:{e.lineno}: not valid JSON: {_json_fault(e)}.") from e
    except _Unusable as e:
        raise RlvrError(f"{path}: {e}") from e
    for number, item in enumerate(items, start=1):
        yield _row(item, f"{path}: item {number}", number, like)


def _json_fault(error: json.JSONDecodeError) -> str:
    return f"{error.msg.removesuffix(' at')} at column {error.colno}"


class _Unusable(ValueError):
    """JSON that is refused: nested too deeply, or with a key twice in one object."""


class Moment:
    """A date, a time or a duration of Parquet, which no row is read for: Python cannot hold all of them."""


class Number(str):
    """A number of JSON, as it is written: exact at any length."""

    __slots__ = ()


def _parse_json(text: str) -> Any:
    """Parse JSON with numbers as text. NaN and infinities, which are not JSON, become floats."""
    try:
        return json.loads(text, parse_int=Number, parse_float=Number, object_pairs_hook=_object)
    except RecursionError:
        raise _Unusable("it is nested too deeply.") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _Unusable(
            f"the key {join_names([key for key in keys if keys.count(key) > 1][:1])} occurs more than once."
        )
    return values


def _row(value: Any, where: str, number: int, like: str) -> Row | BadRow:
    if isinstance(value, dict):
        return Row(where, number, value, list(value))
    kind = {list: "an array", type(None): "null", bool: "a truth value"}.get(type(value), "text or a number")
    return BadRow(
        where,
        f"expected a JSON object such as {like}, found {kind}.",
        "A file that is one array must end in .json." if isinstance(value, list) else "",
    )


def _csv_rows(path: Path, given: Sequence[str] = ()) -> Generator[Row | BadRow]:
    # undecodable bytes become lone surrogates, so that the error can name their row
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines: list[str] = []  # of the row being read
        reader = csv.reader((lines.append(line) or line for line in file), strict=True)
        limit = csv.field_size_limit(MAX_LINE_BYTES)
        try:
            header = list(given) or next((cells for cells in reader if not _is_blank(cells)), [])
            if len(set(header)) != len(header):
                raise RlvrError(f"{path}:{reader.line_num}: two columns have the same name: {join_names(header)}.")
            number = 0
            while True:
                lines.clear()
                line = reader.line_num + 1
                try:
                    cells = next(reader, None)
                except csv.Error as e:
                    _refuse_open_quote(e, lines, path, reader.line_num)
                    number += 1
                    yield BadRow(f"{path}:{line}", f"row {number} is not valid CSV: {e}.")
                    continue
                if cells is None:
                    return
                if _is_blank(cells):
                    continue
                number += 1
                yield _csv_row(header, cells, f"{path}:{line}", number)
        except csv.Error as e:
            _refuse_open_quote(e, lines, path, reader.line_num)
            raise RlvrError(f"{path}:{reader.line_num}: the header is not valid CSV: {e}.") from e
        finally:
            csv.field_size_limit(limit)


def _refuse_open_quote(error: csv.Error, lines: list[str], path: Path, last: int) -> None:
    """Raise RlvrError if the file ended inside quotes: all rows since the open quote would be lost as one bad row."""
    if "unexpected end of data" not in str(error):
        return
    *_, cells = csv.reader([*lines, '"'], strict=True)
    swallowed = sum(1 for _ in io.StringIO(cells[-1], newline=""))  # lines, as the file has them
    raise RlvrError(
        f"{path}:{last - max(swallowed, 1) + 1}: the quote that opens here is never closed.",
        'Close it, or write it twice ("") if it is a part of a quoted cell.',
    ) from error


def _is_blank(cells: list[str]) -> bool:
    return not "".join(cells[:1]).strip() and len(cells) < 2


def _csv_row(header: list[str], cells: list[str], where: str, number: int) -> Row | BadRow:
    if len(cells) != len(header):
        return BadRow(
            where, f"row {number} has {len(cells)} cells; the header has {len(header)}: {join_names(header)}."
        )
    for cell in cells:
        if escaped := re.search("[\udc80-\udcff]", cell):
            return BadRow(
                where, f"byte {ord(escaped[0]) - 0xDC00:#04x} in row {number} is not UTF-8.", "Save it as UTF-8."
            )
    return Row(where, number, {key: cell or None for key, cell in zip(header, cells, strict=True)}, header)


def _parquet_rows(path: Path) -> Generator[Row | BadRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            keys = file.schema_arrow.names
            if len(set(keys)) != len(keys):
                raise RlvrError(f"{path}: two columns have the same name: {join_names(keys)}.")
            moments = [place for place, column in enumerate(file.schema_arrow) if pa.types.is_temporal(column.type)]
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for place in moments:
                    batch = batch.set_column(place, keys[place], batch.column(place).is_valid())
                for values in batch.to_pylist():
                    number += 1
                    values |= {keys[place]: Moment() if values[keys[place]] else None for place in moments}
                    yield Row(f"{path}: row {number}", number, values, keys, nulls_fill=True)
    except (pa.ArrowException, UnicodeDecodeError) as e:
        if (short := short_of_resources(e)) is not None:
            raise short from e
        raise RlvrError(f"{path} is not a readable Parquet file: {e}.", "Is it complete?") from e
    except (ValueError, OverflowError) as e:
        raise RlvrError(f"{path} has values that cannot be read: {e}", "Leave out the column that has them.") from e


def ids_of(values: Mapping[str, Any], key: str, *, where: str) -> list[int]:
    """Token ids; empty if there are none. Raises BadRow for anything else. Numbers of JSON come as text."""
    value = values.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(str(i).isdecimal() and len(str(i)) < 10 for i in value):
        raise BadRow(where, f"{key!r} is not a list of token ids.", "Leave it out: the text is tokenized then.")
    return [int(i) for i in value]


def text_of(row: Row, key: str) -> str | None:
    """A field as text, numbers as they are written; None if it is missing or null. Raises BadRow for other types."""
    value = row.values.get(key)
    match value:
        case None:
            return None
        case str():
            return storable(value)
        case bool():
            kind = "a truth value"
        case int():
            return str(value)
        case float() if math.isfinite(value):
            return repr(value)
        case float():
            kind = str(value)
        case Decimal():
            return format(value, "f")
        case list() | tuple():
            kind = "a list"
        case dict():
            kind = "an object"
        case Moment():
            kind = "a date or a time"
        case _:
            kind = type(value).__name__
    hint = "Name another field, flatten it, or write it as JSON text."
    raise BadRow(row.where, f"{key!r} should be text or a number; it is {kind}.", hint)


def join_names(names: Iterable[Any]) -> str:
    """Join names for a message: at most twelve, each cut to 40 characters."""
    shown = [str(name) if len(str(name)) <= 40 else f"{str(name)[:40]}…" for name in names]
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more" if len(shown) > 12 else "") or "none"
