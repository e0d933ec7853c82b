"""Terminal output: its formats, cases, pager and progress; a pipe gets no escape codes."""

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
from contextlib import suppress
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pytest

from marks import slow
from rlvr_cli.terminal import cases, console, tables
from rlvr_cli.types import PValue, Table
from screens import case_table, terminal, without_style


@pytest.fixture(autouse=True)
def _colors(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_pipe_gets_no_escape_codes(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    tables.print_table(("a", "b"), [(1, "x"), (None, "<answer>")])
    cases.print_cases(case_table("<answer> 7 </answer>"))
    with console.progress("sampling", 3) as bar:
        bar.advance(3, reward=0.5)
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err


# Formats


def test_table(capsys):
    tables.print_table(("name", "n"), [("a", 1), ("bb", 22), (None, None), ("漢字e\u0301", 3)])
    assert capsys.readouterr().out.splitlines() == [
        "name     n",  # the columns are 5 and 2 wide, with 3 between them
        "----------",
        "a        1",
        "bb      22",
        "–        –",
        "漢字e\u0301    3",
    ]


def test_numbers_in_a_table():
    shown = [
        tables._shown(v, "–")
        for v in (None, True, 3, 0.123456, 1234.56, 1e-7, math.nan, math.inf, Decimal("0.5"), 10**20)
    ]
    assert shown == ["–", "true", "3", "0.1235", "1234.6", "1e-07", "nan", "inf", "0.5", "1" + "0" * 20]


def test_p_values_are_for_people_in_tables_and_numbers_elsewhere(capsys):
    ps = [PValue(p) for p in (0.0, 3e-71, 1e-4, 0.0006602, 1.0, math.nan)]
    assert [tables._shown(p, "–") for p in ps] == ["< 0.0001", "< 0.0001", "0.0001", "0.00066", "1", "nan"]
    rows = Table(("p",), [(p,) for p in ps[:2]], title="t")
    assert tables.as_markdown(rows) == "### t\n\n| p |\n|--:|\n| &lt; 0.0001 |\n| &lt; 0.0001 |\n"
    tables.print_tables([rows], output="json")
    assert json.loads(capsys.readouterr().out) == [{"p": 0.0}, {"p": 3e-71}]
    tables.print_tables([rows], output="csv")
    assert capsys.readouterr().out == "p\n0.0\n3e-71\n"


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
    tables.print_table(("command",), [(text,)], whole=True)
    assert text in capsys.readouterr().out
    assert console.shortened("a" * 310, 300) == "a" * 310, "what is left out is longer than the words that say so"


def test_a_wide_table_on_a_terminal_is_divided_by_columns():
    """Each part has the key columns, and none is wider than the terminal."""
    names = ["run_id", "step", *(f"column_{i}" for i in range(12))]
    with terminal() as screen:
        tables.print_table(names, [("a", 0, *range(12)), ("b", 10, *range(100, 112))])
    lines = without_style(screen.getvalue()).splitlines()
    heads = [line.split() for line in lines if "run_id" in line]
    assert [head[:2] for head in heads] == [["run_id", "step"]] * 2
    assert [name for head in heads for name in head[2:]] == names[2:]
    assert [line.split() for line in lines if line.startswith("b")] == [
        ["b", "10", *map(str, range(100, 107))], ["b", "10", *map(str, range(107, 112))]
    ]  # fmt: skip
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("columns", "rows", "repeated"),
    [
        # the first columns, until they tell the rows apart
        (("category", "n"), [("right", 5), ("wrong", 5)], ["category"]),
        (("phase", "kind", "n"), [("eval", "x", 1), ("eval", "y", 1)], ["phase", "kind"]),
        (("phase", "k", "n"), [("eval", 1, 3), ("train", 1, 3)], ["phase"]),
        # run and step are always repeated, wherever they stand, and others only if need be
        (("run_id", "step", "k"), [("r", 0, 1), ("r", 0, 2)], ["run_id", "step", "k"]),
        (("run_id", "phase", "step"), [("r", "eval", 0), ("r", "eval", 1)], ["run_id", "step"]),
        (("n", "run_id"), [(1, "a"), (1, "b")], ["run_id"]),
        # equal rows are not told apart by any column
        (("category", "n"), [("right", 5), ("right", 5), ("wrong", 5)], ["category"]),
    ],
)
def test_each_part_of_a_divided_table_tells_the_rows_apart(columns, rows, repeated):
    names = [*columns, *(f"column_{i}" for i in range(12))]
    with terminal() as screen:
        tables.print_table(names, [(*row, *range(12)) for row in rows])
    lines = without_style(screen.getvalue()).splitlines()
    first, *later = (line.split() for line in lines if "column_" in line)
    assert first[: len(columns)] == list(columns)
    assert later
    assert [head[: len(repeated)] for head in later] == [repeated] * len(later)
    assert [name for head in [first, *later] for name in head if name.startswith("column_")] == names[len(columns) :]
    last = [line.split() for line in lines[-len(rows) :]]
    assert [row[: len(repeated)] for row in last] == [[str(row[columns.index(n)]) for n in repeated] for row in rows]


def test_no_more_columns_are_repeated_than_fit():
    """Twelve columns of eight characters, of which all would be needed, on a hundred."""
    names = [f"number_{i}" for i in range(12)]
    with terminal() as screen:
        tables.print_table(names, [(0,) * 12, (*(0,) * 11, 1)])
    lines = without_style(screen.getvalue()).splitlines()
    heads = [line.split() for line in lines if "number_" in line]
    assert max(map(len, lines)) <= 100
    assert {name for head in heads for name in head} == set(names)
    assert all(head[0] == "number_0" for head in heads)


def test_many_wide_columns_on_a_terminal_are_shown_row_by_row():
    with terminal() as screen:
        tables.print_table([f"column_{i}" for i in range(30)], [(*range(29), "x" * 50), (*range(29), "x" * 50)])
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


TEMPLATE = "Solve it.\nUser: {question}\nAssistant: <think>"


def test_the_template_of_the_prompts_stands_once(capsys):
    result = case_table("x")
    rows = []
    for run, prompt in (("a", "3 + 4?"), ("a", "{question}"), ("b", "1 + 1?"), ("c", "4")):
        text = prompt if run == "c" else TEMPLATE.replace("{question}", prompt)
        row = dict(zip(result.columns, result.rows[0], strict=True)) | {"run_id": run, "prompt": text}
        rows.append(tuple(row.values()))
    templates = {"a": TEMPLATE, "b": TEMPLATE, "c": TEMPLATE}
    cases.print_cases(Table(result.columns, rows), templates=templates)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "prompt, where {question} stands for the question of a case",
        "  Solve it.", "  User: {question}", "  Assistant: <think>", "",
    ]  # fmt: skip
    assert sum("Solve it." in line for line in lines) == 1
    after = [lines[i + 1] for i, line in enumerate(lines) if line in ("question", "prompt")]
    assert after == ["  3 + 4?", "  {question}", "  1 + 1?", "  4"]
    assert lines.count("question") == 3  # the prompt of c is not made from the template


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


@pytest.mark.parametrize(
    ("count", "empty", "stdin_too"), [("1", False, True), slow("3", True, True), slow("3", False, False)]
)
def test_what_is_not_paged(tmp_path, pager, count, empty, stdin_too):
    """No pager for one screen of text, with an empty $PAGER, or if stdin is not a terminal."""
    output, paged = on_a_terminal([count], tmp_path=tmp_path, pager="" if empty else pager, stdin_too=stdin_too)
    assert paged is None
    assert output.count("\x1b[1;32m<answer> 8 </answer>") == int(count)


@pytest.mark.parametrize("pager", [slow("no-such-pager"), "head -n 2"])
def test_a_missing_pager_or_one_that_quits_early(tmp_path, pager):
    output, _ = on_a_terminal(["100"], tmp_path=tmp_path, pager=pager)
    assert output.endswith("after\n")
    assert output.count("example q") == (1 if pager == "head -n 2" else 100)


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


def test_progress_of_work_that_goes_on_shows_the_whole(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with console.progress("steps", 60, done=40) as bar:
        now[0] += 10
        bar.advance(5, reward=0.5)
    assert capsys.readouterr().err == "steps: 45/60 (75%), 0.5/s, 30 s left, reward 0.5\n"
    with console.progress("steps", 60, done=60):
        pass
    assert capsys.readouterr().err == "steps: 60/60 (100%)\n", "nothing was left to do: no rate, no time"
    with terminal() as screen, console.progress("steps", 60, done=40):
        pass
    assert "40/60" in screen.getvalue()


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
    assert console.duration(seconds) == text
