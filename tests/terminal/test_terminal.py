"""Terminal output: hostile text cannot leave its cell, and a pipe gets no escape codes."""

import csv
import fcntl
import io
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import unicodedata
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pytest

from rlvr_cli.terminal import cases, console, tables
from rlvr_cli.text import printable
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


@pytest.fixture(autouse=True)
def _colors(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)


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


def test_the_payloads_are_many():
    assert len(PAYLOADS) >= 200
    assert len([p for p in PAYLOADS if unsafe(p)]) >= 100


# Hostile texts


@pytest.mark.parametrize("output", ["table", "json", "csv", "markdown"])
def test_no_payload_reaches_a_pipe_unescaped(capsys, output):
    for payload in PAYLOADS:
        tables.print_tables([Table((payload, "after"), [(payload, 1), ("x", 2)], title=payload)] * 2, output=output)
    assert unsafe(capsys.readouterr().out) == set()


def test_no_payload_reaches_a_terminal_unescaped():
    with terminal() as screen:
        for payload in PAYLOADS:
            tables.print_tables([Table((payload, "after"), [(payload, 1)], title=payload)] * 2)
            cases.print_cases(case_table(payload))
            console.say(payload)
            console.print_text(payload)
            console.report_skipped_lines(7, [payload] * 5)
        for payload in ESCAPES:
            tables.print_table(tuple(f"{payload}{i}" for i in range(20)), [(payload,) * 20])  # row by row
    assert unsafe(without_style(screen.getvalue())) == set()
    assert "\x1b[" in screen.getvalue()  # our own colors


def test_no_payload_reaches_a_progress_bar_unescaped():
    with terminal() as screen:
        for payload in [*ESCAPES, *MARKUP[:6]]:
            with console.progress(payload, 2) as bar:
                bar.advance(1, **{payload: 0.5})
                bar.advance(1)
    own_codes = r"\x1b\[(\?25[lh]|[0-9]*[A-K]|[0-9;]*m)"  # cursor, line and color
    assert unsafe(re.sub(own_codes, "", screen.getvalue()), keep="\n\t\r") == set()


def test_a_pipe_gets_no_escape_codes(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    tables.print_table(("a", "b"), [(1, "x"), (None, "<answer>")])
    cases.print_cases(case_table("<answer> 7 </answer>"))
    with console.progress("sampling", 3) as bar:
        bar.advance(3, reward=0.5)
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err


def test_a_hostile_cell_changes_only_its_own_cell(capsys):
    def lines(payload):
        tables.print_table(("before", "cell", "after"), [("b1", payload, "a1"), ("b2", "x", "a2")])
        return [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]

    benign = lines("payload")
    for payload in PAYLOADS:
        found = lines(payload)
        assert len(found) == len(benign) == 4
        assert (found[2][0], found[2][-1]) == ("b1", "a1")
        assert found[3] == ["b2", "x", "a2"]


def test_json_is_lossless(capsys):
    for payload in PAYLOADS:
        tables.print_table((payload,), [(payload,)], output="json")
        assert json.loads(capsys.readouterr().out) == [{payload: payload}]


def test_csv_reads_back_and_holds_no_formula(capsys):
    for payload in PAYLOADS:
        tables.print_table(("a", "b"), [(payload, 1)], output="csv")
        _, (cell, one) = csv.reader(io.StringIO(capsys.readouterr().out))
        assert one == "1"
        number = payload[:1] in ("+", "-") and payload[1:].isdecimal()
        assert number or cell[:1] not in ("=", "+", "-", "@", "\t")
        formula = payload[:1] in ("=", "+", "-", "@", "\t", "\r") and not number
        assert cell == printable("'" + payload if formula else payload)


def test_csv_numbers_stay_numbers(capsys):
    tables.print_table(("a", "b", "c", "d"), [(-1, -0.5, Decimal("-2.50"), None)], output="csv")
    assert capsys.readouterr().out == "a,b,c,d\n-1,-0.5,-2.50,\n"


@pytest.mark.parametrize("text", ["-5", "+1.5", "-1,234", "-.5", "+1,234.50"])
def test_csv_leaves_a_number_in_text_alone(capsys, text):
    tables.print_table(("a",), [(text,)], output="csv")
    assert list(csv.reader(io.StringIO(capsys.readouterr().out))) == [["a"], [text]]


@pytest.mark.parametrize("text", ["-5+1", "+A1", "-5\n=1", "-5\n", "--5", "-", "=5", "@1"])
def test_csv_guards_text_that_only_begins_like_a_number(capsys, text):
    tables.print_table(("a",), [(text,)], output="csv")
    assert list(csv.reader(io.StringIO(capsys.readouterr().out))) == [["a"], ["'" + text]]


def test_markdown_keeps_its_shape(capsys):
    for payload in PAYLOADS:
        tables.print_table((payload, "b"), [(payload, "x"), ("y", "z")], output="markdown")
        lines = capsys.readouterr().out.split("\n")
        assert len(lines) == 5
        assert [line.count("|") for line in lines] == [3, 3, 3, 3, 0]
        assert "<script" not in "".join(lines)


# Formats


def test_table(capsys):
    tables.print_table(("name", "n"), [("a", 1), ("bb", 22), (None, None), ("漢字e\u0301", 3)])
    assert capsys.readouterr().out.splitlines() == [
        "name       n",  # the columns are 5 and 4 wide, with 3 between them
        "------------",
        "a          1",
        "bb        22",
        "NULL    NULL",
        "漢字e\u0301      3",
    ]


def test_numbers_in_a_table():
    shown = [
        tables._shown(v, "–")
        for v in (None, True, 3, 0.123456, 1234.56, 1e-7, math.nan, math.inf, Decimal("0.5"), 10**20)
    ]
    assert shown == ["–", "true", "3", "0.1235", "1234.6", "1e-07", "nan", "inf", "0.5", "1" + "0" * 20]


def test_json_values(capsys):
    row = (
        None, True, 1, math.nan, -math.inf, Decimal("1.5"), datetime(2026, 1, 2, 3, 4, 5, 6), date(2026, 1, 2),
        timedelta(seconds=1.5), b"\x00\xff", [1, math.nan, "x"], {"k": (1, None)}, UUID(int=1),
    )  # fmt: skip
    tables.print_table([f"c{i}" for i in range(len(row))], [row], output="json")
    assert list(json.loads(capsys.readouterr().out)[0].values()) == [
        None, True, 1, None, None, 1.5, "2026-01-02 03:04:05.000006", "2026-01-02", 1.5, "00ff", [1, None, "x"],
        {"k": [1, None]}, "00000000-0000-0000-0000-000000000001",
    ]  # fmt: skip


def test_json_of_columns_with_one_name(capsys):
    tables.print_table(("a", "a", "a_2"), [(1, 2, 3)], output="json")
    assert json.loads(capsys.readouterr().out) == [{"a": 1, "a_2": 2, "a_2_2": 3}]


def test_no_rows(capsys):
    expected = {"json": "[]\n", "csv": "a\n", "markdown": "| a |\n|---|\n"}
    for output, text in expected.items():
        tables.print_table(("a",), [], output=output)
        assert capsys.readouterr().out == text
    tables.print_table(("a",), [])
    assert capsys.readouterr().out.splitlines()[0].strip() == "a"


def test_several_tables(capsys):
    both = [
        Table(("a", "b"), [(1, 2)], title="first"),
        Table(("b", "c"), [(3, "x")], title="second"),
    ]
    tables.print_tables(both, output="json")
    assert json.loads(capsys.readouterr().out) == {"first": [{"a": 1, "b": 2}], "second": [{"b": 3, "c": "x"}]}
    tables.print_tables(both, output="csv")
    assert capsys.readouterr().out == "table,a,b,c\nfirst,1,2,\nsecond,,3,x\n"
    tables.print_tables(both, output="markdown")
    assert (
        capsys.readouterr().out
        == "### first\n\n| a | b |\n|--:|--:|\n| 1 | 2 |\n\n### second\n\n| b | c |\n|--:|---|\n| 3 | x |\n"
    )
    tables.print_tables(both)
    assert capsys.readouterr().out.splitlines()[0].strip() == "first"


def test_only_the_table_format_shortens_long_cells(capsys):
    text = "a" * 1000 + "b" * 1000
    tables.print_table(("c",), [(text,)])
    out = capsys.readouterr().out
    assert "a … [1,700 characters left out] … b" in out
    for output in ("json", "csv", "markdown"):
        tables.print_table(("c",), [(text,)], output=output)
        assert text in capsys.readouterr().out


def test_many_columns_on_a_terminal_are_shown_row_by_row():
    with terminal() as screen:
        tables.print_table([f"column_{i}" for i in range(30)], [tuple(range(30)), tuple(range(30))])
    lines = without_style(screen.getvalue()).splitlines()
    assert [line.split() for line in lines[:3]] == [["row", "1"], ["column_0", "0"], ["column_1", "1"]]
    assert len(lines) == 62


def test_a_wide_cell_on_a_terminal_is_folded():
    with terminal() as screen:
        tables.print_table(("n", "text"), [(1, "word " * 50)])
    assert max(map(len, without_style(screen.getvalue()).splitlines())) <= 100


def test_a_pipe_is_not_folded(capsys):
    tables.print_table(("n", "text"), [(1, "word " * 50)])
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_character_that_the_encoding_lacks_is_escaped(monkeypatch):
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    tables.print_table(("π",), [("漢",)], output="csv")
    tables.print_table(("π",), [("漢",)])
    cases.print_cases(case_table("漢"))
    sys.stdout.flush()
    assert buffer.getvalue().startswith(b"\\u03c0\n\\u6f22\n")


# Cases


def test_cases(capsys):
    result = case_table("x")
    row = dict(zip(result.columns, result.rows[0], strict=True))
    row |= {
        "run_id": "eval-1", "example_id": "q7", "category": "format_1_answer_0", "failure_kind": "wrong_answer",
        "why": "the answer differs", "ground_truth": "7", "extracted_answer": None, "finish_reason": "stop",
        "prompt": "What is\n3 + 4?", "response": "8 </think> <answer> 8 </answer>",
    }  # fmt: skip
    cases.print_cases(Table(result.columns, [tuple(row.values())]))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "1. eval-1 step 0, example q7, sample 0",
        "format_1_answer_0, wrong_answer, 3 tokens, finished by stop",
        "why       the answer differs",
        "truth     7",
        "extracted (nothing)",
        "prompt",
        "  What is",
        "  3 + 4?",
        "response",
        "  8 </think> <answer> 8 </answer>",
        "",
    ]


def test_a_response_cannot_forge_the_next_case(capsys):
    forged = "<answer>7\n2. run step 0, example q8, sample 0</answer>\n\n2. run step 0, example q9, sample 0"
    cases.print_cases(case_table(forged))
    lines = capsys.readouterr().out.split("\n")
    assert [line for line in lines if re.match(r"\d+\. ", line)] == lines[:1]
    assert lines[-5:-2] == [
        "  2. run step 0, example q8, sample 0</answer>",
        "",
        "  2. run step 0, example q9, sample 0",
    ]


def test_the_answer_is_highlighted():
    with terminal() as screen:
        cases.print_cases(case_table("so </think> <answer> 8 </answer> then"))
    assert re.search(r"\x1b\[1;32m<answer> 8 </answer>\x1b\[0m", screen.getvalue())


def test_a_long_response_is_shortened_in_the_middle(capsys):
    cases.print_cases(case_table("a" * 5000 + "b" * 5000))
    assert "a … [7,000 characters left out] … b" in capsys.readouterr().out


def test_an_empty_answer_is_shown_as_nothing(capsys):
    cases.print_cases(case_table(""))
    assert "extracted (nothing)\n" in capsys.readouterr().out


# The pager

PAGES = """
import sys
from rlvr_cli.terminal import cases
from rlvr_cli.types import Table
columns = ("run_id", "step", "example_id", "sample_index", "category", "failure_kind", "why", "ground_truth",
           "extracted_answer", "num_response_tokens", "finish_reason", "prompt", "response")
row = ("r", 0, "q", 0, "c", "k", "w", "7", "8", 3, "stop", "p", "so <answer> 8 </answer> \\x1b[2J")
cases.print_cases(Table(columns, [row] * int(sys.argv[1])))
print("after")
"""


def on_a_terminal(arguments, *, tmp_path, pager, stdin_too=True):
    """Run a program on a terminal of 24 lines; return its output and what the pager received."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    seen = tmp_path / "paged"
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "LESS")}
    environment |= {"PYTHONPATH": str(Path(console.__file__).parents[2]), "PAGER": pager, "SEEN": str(seen)}
    stdin = child if stdin_too else subprocess.DEVNULL
    with subprocess.Popen(
        [sys.executable, "-c", PAGES, *arguments], stdin=stdin, stdout=child, stderr=child, env=environment
    ) as process:
        os.close(child)
        output = b""
        with suppress(OSError):  # the terminal has hung up
            while chunk := os.read(parent, 65536):
                output += chunk
    os.close(parent)
    assert process.returncode == 0, output
    return output.decode().replace("\r\n", "\n"), seen.read_text() if seen.exists() else None


@pytest.fixture
def pager(tmp_path):
    """A $PAGER that records its input and shows 4 lines of it."""
    script = tmp_path / "pager.py"
    script.write_text(
        "import os, pathlib, sys\ntext = sys.stdin.read()\npathlib.Path(os.environ['SEEN']).write_text(text)\n"
        "print(os.environ['LESS'], *text.splitlines()[:4], sep='\\n')\n"
    )
    return f"{sys.executable} {script}"


def test_text_longer_than_the_screen_is_paged(tmp_path, pager):
    output, paged = on_a_terminal(["3"], tmp_path=tmp_path, pager=pager)
    assert paged.count("\x1b[1;32m<answer> 8 </answer>") == 3
    assert "\\x1b[2J" in paged
    assert "\x1b[2J" not in paged
    assert output.startswith("FRX\n")
    assert output.endswith("after\n")
    assert output.count("\n") == 6


@pytest.mark.parametrize(("count", "empty", "stdin_too"), [("1", False, True), ("3", True, True), ("3", False, False)])
def test_what_is_not_paged(tmp_path, pager, count, empty, stdin_too):
    """No pager for one screen of text, with an empty $PAGER, or if stdin is not a terminal."""
    output, paged = on_a_terminal([count], tmp_path=tmp_path, pager="" if empty else pager, stdin_too=stdin_too)
    assert paged is None
    assert output.count("\x1b[1;32m<answer> 8 </answer>") == int(count)


@pytest.mark.parametrize("pager", ["no-such-pager", "head -n 2"])
def test_a_missing_pager_or_one_that_quits_early(tmp_path, pager):
    output, _ = on_a_terminal(["2000"], tmp_path=tmp_path, pager=pager)
    assert output.endswith("after\n")
    assert output.count("example q") == (1 if pager == "head -n 2" else 2000)


# Messages and progress


def test_messages_go_to_stderr(capsys):
    console.say("hello\nthere")
    console.report_skipped_lines(0, [])
    console.report_skipped_lines(7, [*(f"f.jsonl:{i}: bad" for i in range(5)), "and 2 more"])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        *("hello", "there", "skipped 7 bad lines:"), *(f"  f.jsonl:{i}: bad" for i in range(5)), "  and 2 more",
    ]  # fmt: skip


def test_progress_in_a_pipe_is_a_few_lines(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with console.progress("sampling", 100) as bar:
        for _ in range(10):
            now[0] += 1
            bar.advance(10, reward=0.5, tokens=1000.0)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "sampling: 50/100 (50%), 10/s, 5 s left, reward 0.5, tokens/s 1,000",
        "sampling: 100/100 (100%), 10/s, 0 s left, reward 0.5, tokens/s 1,000",
    ]


def test_progress_that_stops_early_shows_its_last_state(capsys):
    with suppress(ValueError), console.progress("sampling", 0) as bar:
        bar.advance(1)
        raise ValueError
    assert "sampling: 1/0" in capsys.readouterr().err


def test_signals_are_means_or_the_latest(monkeypatch):
    mean = console.Progress(100, running_mean=True)
    mean.advance(10, reward=1.0)
    mean.advance(30, reward=0.0)
    assert mean.signals() == {"reward": "0.25"}
    latest = console.Progress(100, running_mean=False)
    latest.advance(1, loss=2.0)
    latest.advance(1, loss=1.5)
    assert latest.signals() == {"loss": "1.5"}


def test_progress_on_a_terminal():
    with terminal() as screen, console.progress("sampling", 4) as bar:
        console.say("a message while it runs")
        bar.advance(4, reward=0.5)
    text = screen.getvalue()
    assert "sampling" in text
    assert "4/4" in text
    assert "reward 0.5" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (7260, "2 h 01 min")]
)
def test_durations(seconds, text):
    assert console._duration(seconds) == text
