"""Help pages: rich panels on a terminal, plain text in a pipe. Option names are never truncated.

Enters: rows under headings. Leaves: the page as one string.
"""

import io
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

WIDEST = 120  # maximum width of a page, in columns
PIPE = 100  # width without a terminal
NARROWEST = 30  # minimum width of a text beside its name; a narrower text goes below the name


class Row(NamedTuple):
    """An entry of the help: names (of an option or a command) and their explanation."""

    names: tuple[str, ...]  # one per line
    text: str


def page(usage: str, summary: str, panels: Mapping[str, Sequence[Row]], *, footer: Sequence[str] = ()) -> str:
    """Format a help page, as wide as the terminal up to `WIDEST`.

    Args:
        panels: heading -> rows; a heading without rows is left out.
        footer: lines at the end, not wrapped, so that they can be copied.
    """
    panels = {heading: rows for heading, rows in panels.items() if rows}
    width = min(shutil.get_terminal_size((PIPE, 24)).columns, WIDEST)
    if sys.stdout.isatty() and sys.stdout.encoding.lower().startswith("utf"):
        return _in_panels(usage, summary, panels, footer=footer, width=width)
    names = _names_width(panels)
    parts = [usage, *(f"  {line}" for line in wrapped(summary, width - 2))]
    for heading, rows in panels.items():
        parts += [
            "",
            f"{heading}:",
            *(f"  {left}{right}" for left, right in _lines(rows, names=names, width=width - 2)),
        ]
    return "\n".join(line.rstrip() for line in [*parts, "", *footer])


def _in_panels(
    usage: str, summary: str, panels: Mapping[str, Sequence[Row]], *, footer: Sequence[str], width: int
) -> str:
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(file=io.StringIO(), force_terminal=True, width=width, markup=False, emoji=False, highlight=False)
    names = _names_width(panels)
    with console.capture() as capture:
        console.print(Text(usage, style="bold"), soft_wrap=True)
        console.print("\n".join(wrapped(summary, width - 1)), soft_wrap=True)
        for heading, rows in panels.items():
            body = Text()
            for left, right in _lines(rows, names=names, width=width - 4):
                body.append(left, style="cyan").append(right).append("\n")
            body.highlight_regex(r"\[[^\[\]]*\|[^\[\]]*\]", "yellow")
            body.highlight_regex(r"\[default: [^\]]*\]", "dim")
            body.rstrip()
            console.print(Panel(body, title=heading, title_align="left", border_style="dim"))
        console.print("\n".join(footer), soft_wrap=True)
    return capture.get()


def _names_width(panels: Mapping[str, Sequence[Row]]) -> int:
    return 2 + max((len(name) for rows in panels.values() for row in rows for name in row.names), default=0)


def _lines(rows: Sequence[Row], *, names: int, width: int) -> Iterator[tuple[str, str]]:
    """Yield the left and the right column of each line."""
    for row in rows:
        if width - names < NARROWEST:
            yield from ((name, "") for name in row.names)
            yield from ((" " * 4, line) for line in wrapped(row.text, max(width - 4, 1)))
            continue
        texts = wrapped(row.text, width - names)
        for i in range(max(len(row.names), len(texts))):
            left = row.names[i] if i < len(row.names) else ""
            yield left.ljust(names), texts[i] if i < len(texts) else ""


def wrapped(text: str, width: int) -> list[str]:
    """Wrap a text at spaces and after the | between choices; words and ``[default: ...]`` are never split."""
    lines = [""]
    for piece in re.findall(r"\[default: [^]]*\] *|[^ |]*(?:\|| +|$)", text):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]
