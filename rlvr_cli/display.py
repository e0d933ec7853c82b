"""The terminal: rows as a table, JSON, CSV or Markdown on stdout, messages and progress on stderr; the home of rich.

Enters: any values and texts, however hostile: a response can hold escape sequences, markup or an endless line.
Leaves: text in which every control character but newline and tab is escaped (`text.printable`), and ANSI codes of our
own only where a person is looking, never in a pipe.
"""

import csv
import io
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Protocol, TextIO
from unicodedata import combining, east_asian_width

from rlvr_cli.text import printable

if TYPE_CHECKING:
    from rich.console import Console

MAX_CELL_CHARACTERS = 300  # of a cell of a table on the terminal; the other formats have it whole
MAX_CASE_CHARACTERS = 3000  # of each text of a case
LOG_SECONDS = 5.0  # between two lines of progress where stderr is no terminal
BAR_RATE = 2  # times a second that a bar is drawn: each takes milliseconds from the work
CASE_COLUMNS = {
    *("run_id", "step", "example_id", "sample_index", "category", "failure_kind", "why", "ground_truth"),
    *("extracted_answer", "num_response_tokens", "finish_reason", "prompt", "response"),
}

_ANSWER = re.compile(r"(<answer>.*?</answer>|\\boxed\{[^{}]*\})", re.DOTALL)
_PLAIN_NUMBER = re.compile(r"[-+]?[\d.,]+")


class Rows(Protocol):
    """What is printed: `queries.Table`."""

    @property
    def title(self) -> str: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def rows(self) -> list[tuple[Any, ...]]: ...


class Summary(Protocol):
    """`summary.RunSummary`."""

    def tables(self) -> Sequence[Rows]: ...


class Result:
    """Columns and rows for `tables`, for callers without a `queries.Table`."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str = "") -> None:
        self.columns = tuple(columns)
        self.rows = [tuple(row) for row in rows]
        self.title = title


def say(text: str) -> None:
    """One message for the person at the terminal, on stderr."""
    _write(sys.stderr, printable(text) + "\n")


def skipped_lines(count: int, reasons: Sequence[str]) -> None:
    """Say how many lines of a data file were left out, and why the first of them were."""
    if count:
        say(f"skipped {count} bad line{'s' if count > 1 else ''}:")
        for reason in reasons:
            say(f"  {reason}")


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, output: str = "table") -> None:
    """Print rows on stdout as `output`: table, json, csv or markdown."""
    tables([Result(columns, rows)], output=output)


def summary(result: Summary, *, output: str = "table") -> None:
    """Print the tables of a summary on stdout."""
    tables(result.tables(), output=output, missing="–")


def tables(results: Sequence[Rows], *, output: str = "table", missing: str = "NULL") -> None:
    """Print tables on stdout; `missing` is shown for None in a table.

    One table is, as JSON, a list of objects. Several are an object with a list for each title; as CSV they are one
    table with a first column `table` and all their columns.
    """
    match output:
        case "json":
            _write(sys.stdout, _json_text(results))
        case "csv":
            _write(sys.stdout, _csv_text(results))
        case "markdown":
            _write(sys.stdout, "\n".join(map(_markdown_text, results)))
        case "table":
            _print_tables(results, missing=missing)
        case _:
            raise AssertionError(output)


def source(text: str) -> None:
    """Print a text on stdout as it is, made printable."""
    _write(sys.stdout, printable(text).rstrip("\n") + "\n")


def cases(result: Rows) -> None:
    """Print rollouts for reading, one below the other: where it stands, why it failed, prompt, response, truth, answer.

    On a terminal the answer's tags are highlighted, and what is longer than the screen goes through a pager. Of a long text
    the middle is left out, with the number of characters.

    Args:
        result: rows with the columns of the query `failures`, `CASE_COLUMNS`.
    """
    shown = [list(_case(i, dict(zip(result.columns, row, strict=True)))) for i, row in enumerate(result.rows, start=1)]
    if not sys.stdout.isatty():
        return _write(sys.stdout, "".join(map(_plain_case, shown)))
    page = io.StringIO()
    for lines in shown:
        _print_case(lines, page)
    _page(page.getvalue())


class Progress:
    """Work that is under way; `progress` makes one."""

    def __init__(self, total: int, *, running_mean: bool) -> None:
        self.total = total
        self.done = 0
        self._running_mean = running_mean
        self._sums: dict[str, tuple[float, int]] = {}
        self._tokens = 0.0
        self._started = time.monotonic()
        self._show: Callable[[], None] = lambda: None

    def advance(self, n: int, **signals: float) -> None:
        """Record that n more items are done.

        Args:
            signals: means over these n items, shown as means over all items so far, or as they are where the progress
                was opened with ``running_mean=False``; `tokens` is a number, shown as tokens per second.
        """
        self.done += n
        self._tokens += signals.pop("tokens", 0.0)
        for name, value in signals.items():
            total, count = self._sums.get(name, (0.0, 0)) if self._running_mean else (0.0, 0)
            self._sums[name] = total + value * n, count + n
        self._show()

    def signals(self) -> dict[str, str]:
        """What is shown beside the bar, by name."""
        shown = {name: f"{total / count:.4g}" for name, (total, count) in self._sums.items() if count}
        seconds = time.monotonic() - self._started
        if self._tokens and seconds > 0:
            shown["tokens/s"] = f"{self._tokens / seconds:,.0f}"
        return shown

    def line(self, description: str) -> str:
        """The state in one line, for a log."""
        seconds = time.monotonic() - self._started
        rate = self.done / seconds if seconds > 0 else 0.0
        left = _duration((self.total - self.done) / rate) if rate else "?"
        share = f" ({self.done / self.total:.0%})" if self.total else ""
        parts = [f"{self.done}/{self.total}{share}", f"{rate:.3g}/s", f"{left} left"]
        return f"{description}: " + ", ".join(parts + [f"{k} {v}" for k, v in self.signals().items()])


@contextmanager
def progress(description: str, total: int, *, running_mean: bool = True) -> Iterator[Progress]:
    """Show on stderr how far long work is: a bar with rate, time left and signals; in a pipe, now and then a line."""
    state = Progress(total, running_mean=running_mean)
    with _bar(description, state) if sys.stderr.isatty() else _log_lines(description, state):
        yield state


@contextmanager
def _log_lines(description: str, state: Progress) -> Iterator[None]:
    shown_at, shown = time.monotonic(), -1

    def show() -> None:
        nonlocal shown_at, shown
        now = time.monotonic()
        if now - shown_at >= LOG_SECONDS or state.done >= state.total > shown:
            shown_at, shown = now, state.done
            say(_one_line(state.line(description)))

    state._show = show
    yield
    if shown != state.done:
        say(_one_line(state.line(description)))


@contextmanager
def _bar(description: str, state: Progress) -> Iterator[None]:
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class Signals(ProgressColumn):
        def render(self, task: Task) -> Text:
            rate = f"{task.speed:.3g}/s" if task.speed else ""
            return Text(_one_line("  ".join([rate, *(f"{k} {v}" for k, v in state.signals().items())])))

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        Signals(),
    )
    console = _console(sys.stderr)
    with RichProgress(*columns, console=console, redirect_stdout=False, refresh_per_second=BAR_RATE) as bars:
        task = bars.add_task(_one_line(description), total=state.total)
        state._show = lambda: bars.update(task, completed=state.done)
        yield


def _console(stream: TextIO) -> "Console":
    """A console on a terminal that takes every text as it is."""
    from rich.console import Console

    return Console(
        file=_tolerant(stream),
        force_terminal=True,
        force_jupyter=False,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
    )


def _write(stream: TextIO, text: str) -> None:
    _tolerant(stream).write(text)
    stream.flush()


def _tolerant(stream: TextIO) -> TextIO:
    """The stream, set to escape what its encoding lacks."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


def _print_tables(results: Sequence[Rows], *, missing: str) -> None:
    for index, result in enumerate(results):
        columns = [_one_line(_shortened(c, MAX_CELL_CHARACTERS)) for c in result.columns]
        cells = [[_one_line(_shortened(_shown(v, missing), MAX_CELL_CHARACTERS)) for v in row] for row in result.rows]
        title = _one_line(result.title) if len(results) > 1 else ""
        if index:
            _write(sys.stdout, "\n")
        if sys.stdout.isatty():
            _print_grid(result, columns, cells, title=title)
        else:
            _write(sys.stdout, _plain_grid(result, columns, cells, title=title))


def _plain_grid(result: Rows, columns: Sequence[str], cells: Sequence[Sequence[str]], *, title: str) -> str:
    """A table for a pipe, which has no width and no colours: loading rich would cost more than the query."""
    widths = [max(map(_cell_width, [name, *(row[i] for row in cells)])) for i, name in enumerate(columns)]
    right = [_is_numeric(result.rows, i) for i in range(len(columns))]

    def line(texts: Sequence[str]) -> str:
        padding = [" " * (width - _cell_width(text)) for width, text in zip(widths, texts, strict=True)]
        return "   ".join(p + t if r else t + p for t, p, r in zip(texts, padding, right, strict=True)).rstrip()

    rule = "-" * (sum(widths) + 3 * (len(widths) - 1))
    return "\n".join([*([title] if title else []), line(columns), rule, *map(line, cells)]) + "\n"


def _cell_width(text: str) -> int:
    """How many columns of a terminal a line of printable text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def _print_grid(result: Rows, columns: Sequence[str], cells: Sequence[Sequence[str]], *, title: str) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = _console(sys.stdout)
    if title:
        console.print(Text(title, style="bold"))
    widths = [max(map(_cell_width, [name, *(row[i] for row in cells)])) for i, name in enumerate(columns)]
    if sum(widths) + 3 * len(widths) > console.width and 12 * len(columns) > console.width:
        return _print_records(console, columns, cells)  # side by side every column would be a thread
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for i, name in enumerate(columns):
        justify = "right" if _is_numeric(result.rows, i) else "left"
        grid.add_column(Text(name), justify=justify, overflow="fold")
    for row, texts in zip(result.rows, cells, strict=True):
        grid.add_row(*(Text(t, style="dim" if v is None else "") for v, t in zip(row, texts, strict=True)))
    console.print(grid)


def _case(number: int, case: Mapping[str, Any]) -> Iterator[list[tuple[str, str]]]:
    """The paragraphs of a case, each in pieces of printable text with a style."""
    place = f"step {case['step']}, example {case['example_id']}, sample {case['sample_index']}"
    yield [(_one_line(f"{number}. {case['run_id']} {place}"), "bold")]
    facts = [case["category"], case["failure_kind"], f"{case['num_response_tokens']} tokens"]
    yield [(_one_line(", ".join([*filter(None, facts), f"finished by {case['finish_reason']}"])), "dim")]
    for label, name in (("why", "why"), ("truth", "ground_truth"), ("extracted", "extracted_answer")):
        value = "(nothing)" if case[name] in (None, "") else _one_line(_shortened(str(case[name]), MAX_CASE_CHARACTERS))
        yield [(f"{label:<10}", "cyan"), (value, "")]
    for name in ("prompt", "response"):
        yield [(name, "cyan")]
        text = printable(_shortened(str(case[name]), MAX_CASE_CHARACTERS))
        styles = ("", "bold green" if name == "response" else "")
        yield [(piece, styles[i % 2]) for i, piece in enumerate(_ANSWER.split(text))]  # every other one is an answer
    yield [("", "")]


def _page(text: str) -> None:
    """Write a text to the terminal: through $PAGER (less) where it is longer than the screen and a person is at the keys."""
    import shlex
    import shutil
    import subprocess

    command = shlex.split(os.environ.get("PAGER", "less"))  # empty: none is wanted
    long = text.count("\n") >= shutil.get_terminal_size().lines
    person = sys.stdin is not None and sys.stdin.isatty()
    if not (long and person and command and shutil.which(command[0])):
        return _write(sys.stdout, text)
    sys.stdout.flush()
    environment = {"LESS": "FRX", **os.environ}  # colours pass, and what fits on one screen does not wait for a key
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as pager:
        assert pager.stdin is not None
        with suppress(OSError, KeyboardInterrupt), pager.stdin:  # it was left before the end
            pager.stdin.write(text.encode(sys.stdout.encoding, "backslashreplace"))
        while pager.poll() is None:
            with suppress(KeyboardInterrupt):  # it is the pager's
                pager.wait()


def _print_case(lines: Sequence[Sequence[tuple[str, str]]], page: TextIO) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console = _console(page)
    for number, line in enumerate(lines):
        console.print(Padding(Text.assemble(*line), (0, 0, 0, 2 if _is_quoted(number, lines) else 0)))


def _plain_case(lines: Sequence[Sequence[tuple[str, str]]]) -> str:
    texts = ["".join(text for text, _ in line) for line in lines]
    return "".join(
        (re.sub(r"(?m)^(?=.)", "  ", text) if _is_quoted(number, lines) else text) + "\n"
        for number, text in enumerate(texts)
    )


def _is_quoted(number: int, lines: Sequence[Sequence[tuple[str, str]]]) -> bool:
    """Whether a paragraph of a case is its prompt or response: indented, so that it cannot look like the next case."""
    return number in (len(lines) - 4, len(lines) - 2)


def _print_records(console: "Console", columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    for number, row in enumerate(cells, start=1):
        console.print(Text(f"row {number}", style="bold"))
        grid = Table.grid(padding=(0, 2))
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
    """A value as the cell of a table: numbers to 4 significant digits."""
    if value is None:
        return missing
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float | Decimal):
        return f"{value:.1f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"
    return _as_text(value)


def _as_text(value: Any) -> str:
    """A value as text, whole."""
    if isinstance(value, str):
        return value
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """A value as JSON has it; what is no number is None."""
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


def _shortened(text: str, limit: int) -> str:
    """The beginning and the end of a long text, and how many characters lie between them."""
    if len(text) <= limit:
        return text
    kept = limit // 2
    return f"{text[:kept]} … [{len(text) - 2 * kept:,} characters left out] … {text[-kept:]}"


def _one_line(text: str) -> str:
    return printable(text.replace("\n", "\\n").replace("\t", "\\t"), keep="")


def _unique(columns: Sequence[str]) -> list[str]:
    """The column names, the second `a` as `a_2`: an object cannot hold both."""
    names: list[str] = []
    for column in columns:
        name, number = column, 1
        while name in names:
            number += 1
            name = f"{column}_{number}"
        names.append(name)
    return names


def _json_text(results: Sequence[Rows]) -> str:
    objects = {}
    for result in results:
        names = _unique(result.columns)
        objects[result.title] = [dict(zip(names, map(_plain, row), strict=True)) for row in result.rows]
    value = objects if len(results) > 1 else next(iter(objects.values()))
    return re.sub(r"[^\n -~]", _json_escape, json.dumps(value, ensure_ascii=False, indent=1)) + "\n"


def _json_escape(match: re.Match[str]) -> str:
    character = match[0]
    if printable(character) == character:
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def _csv_text(results: Sequence[Rows]) -> str:
    several = len(results) > 1
    names = list(dict.fromkeys(n for r in results for n in _unique(r.columns)))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_csv_cell, ["table", *names] if several else names))
    for result in results:
        for row in result.rows:
            record = dict(zip(_unique(result.columns), row, strict=True))
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


def _markdown_text(result: Rows) -> str:
    def line(cells: Sequence[str]) -> str:
        escaped = ["".join(_MARKDOWN.get(c, c) for c in printable(cell)) for cell in cells]
        return f"| {' | '.join(escaped)} |\n"

    rule = f"|{'|'.join('--:' if _is_numeric(result.rows, i) else '---' for i in range(len(result.columns)))}|\n"
    heading = f"### {_one_line(result.title)}\n\n" if result.title else ""
    return heading + line(result.columns) + rule + "".join(line([_shown(v, "") for v in row]) for row in result.rows)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
