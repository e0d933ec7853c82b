"""A terminal that remembers what it was sent, and text that would act on one."""

import io
import re
import unicodedata
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from rlvr_cli.types import Table

ESCAPES = [
    "\x1b[2J", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\",
    "\x1b[1A\x1b[2K", "\x1bc", "\x1bP1$r\x1b\\", "\x1b[?1049h", "\x1b]52;c;cm0=\x07", "\x9b31m", "\x9d0;t\x9c",
    "\r overwritten", "a\bb", "\x07", "\x00", "\x0b\x0c", "\x7f", "\x85", "\u2028", "\u2029", "\u202e reversed",
    "\u2066\u2067\u2068\u2069", "\u200b\u200c\u200d\ufeff",
    "\u061c", "\U000e0041\U000e007f", "\ue000", "\U0010ffff", "\ud800", "\udfff\ud800", "\u180e",
]  # fmt: skip
MARKUP = [
    "[red]x[/red]", "[/x]", "[link=http://evil]x[/link]", "[bold", ":boom:", "[@click=app.quit]x[/]", "\\[x]", "[[[]]]",
    "| pipe | pipe |", "\\| \\\\|", "<script>alert(1)</script>", "![i](http://evil)", "[l](javascript:x)", "`code`",
    "a & b &lt;", "=cmd|' /C calc'!A0", "+1", "-1", "@SUM(1)", "\t=1", "'quoted'", '"double"', "a,b", "a\nb\r\nc",
    "\n\n\n", "\t\t", "", "x" * 100_000, "\n" * 1000, "é" * 5000, "漢字" * 500, "😀👩‍👩‍👧", "a\u0301" * 200,
    "</think> <answer> 7 </answer>", r"\boxed{7}", "{question}", "%s %n", "${HOME}", "$(id)", "\\x1b[2J",
]  # fmt: skip
PAYLOADS = [*ESCAPES, *MARKUP, *(chr(c) for c in range(0xA0)), *(f"a{e}b{m}c" for e in ESCAPES for m in MARKUP[:3])]


def unsafe(text, *, keep="\n\t"):
    """Return the characters that a terminal would act on."""
    return {c for c in text if c not in keep and unicodedata.category(c) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def without_style(text):
    """Remove the color codes, which are the only codes that rich may write."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@contextmanager
def terminal():
    out = Terminal()
    with redirect_stdout(out), redirect_stderr(out):
        yield out


def case_table(text):
    columns = (
        *("run_id", "step", "example_id", "sample_index", "category", "failure_kind", "why", "ground_truth"),
        *("extracted_answer", "num_response_tokens", "finish_reason", "prompt", "response"),
    )
    return Table(columns, [(text, 0, text, 0, text, text, text, text, text, 3, text, text, text)])
