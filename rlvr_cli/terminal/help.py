"""Help pages: plain text, with bold and colors on a terminal. Option names are never truncated.

Enters: rows under headings. Leaves: the page as one string.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

WIDEST = 120  # maximum width of a page, in columns
PIPE = 100  # width without a terminal
BOLD, DIM, CYAN = "1", "2", "36"  # ANSI
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
    is_styled = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def styled(text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if is_styled and text else text

    names = _names_width(panels)
    parts = [styled(usage, BOLD), *(f"  {line}" for line in wrapped(summary, width - 2))]
    for heading, rows in panels.items():
        parts += ["", styled(f"{heading}:", BOLD)]
        for left, right in _lines(rows, names=names, width=width - 2):
            name = left.rstrip()
            text = re.sub(r"\[default: [^]]*\]", lambda found: styled(found[0], DIM), right)
            parts.append(f"  {styled(name, CYAN)}{left[len(name) :]}{text}".rstrip())
    return "\n".join([*parts, "", *footer])


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
