"""Text of models, files and endpoints acts on nothing: no terminal, no table, no spreadsheet, in every format of output."""

import csv
import io
import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

from endpoint import Reply, completion, error, serving
from forks import Forks
from rlvr_cli.terminal import cases, console, tables
from rlvr_cli.text import printable
from rlvr_cli.types import Table
from screens import ESCAPES, MARKUP, PAYLOADS, case_table, terminal, unsafe, without_style


@pytest.fixture(autouse=True)
def _colors(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_the_payloads_are_many():
    assert len(PAYLOADS) >= 200
    assert len([p for p in PAYLOADS if unsafe(p)]) >= 100


@pytest.mark.parametrize("output", ["table", "json", "csv", "markdown"])
def test_no_payload_reaches_a_pipe_unescaped(capsys, output):
    for payload in PAYLOADS:
        tables.print_tables([Table((payload, "after"), [(payload, 1), ("x", 2)], title=payload)] * 2, output=output)
    assert unsafe(capsys.readouterr().out) == set()


@pytest.mark.slow
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


# Through the whole program

FORMATS = ("table", "json", "csv", "markdown")


@pytest.mark.full
def test_no_payload_acts_on_its_way_through_the_program(forks: Forks, tmp_path: Path, figures: dict):
    """As question, answer, response, end, error and names in files; in each output of each command."""
    payloads = [p for p in PAYLOADS if len(p) < 2000]
    data = [{"question": f"{p}?", "answer": p or "7", "id": p} for p in payloads]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    (tmp_path / "bad.jsonl").write_text("".join(f"{p}\n" for p in payloads if "\n" not in p), errors="backslashreplace")
    asked: list[dict] = []

    def answer(body: dict) -> Reply:
        asked.append(body)
        text = payloads[len(asked) % len(payloads)]
        reply = completion(
            f"{text}</think> <answer>{text}</answer>", text if len(asked) % 3 else "stop", stop_reason=text
        )
        if len(asked) % 7 or len(asked) < 3:
            return reply
        return error(400, f"{text} no", **({"x_a": "1"}))

    environment = {"OPENAI_API_KEY": "none"}
    outputs: dict[str, str] = {}
    with serving(answer) as endpoint:

        def call(*words: str) -> None:
            done = forks.run(*words, cwd=tmp_path, environment=environment)
            assert "Traceback" not in done.said, done.said
            assert done.status in (0, 1, 2), done.said
            outputs[" ".join(words) + f" {len(outputs)}"] = done.said

        call("eval", "--model", "m\u202e\x1b[2J", "--base-url", endpoint.url, "--dataset", "d.jsonl", "--run", "r")
        call("eval", "--resume", "r")
        for output in FORMATS:
            for query in (
                "summary",
                "failures",
                "select * from rollouts",
                "select * from runs",
                'select chr(27) || chr(8238) as "\x1b[2J"',
            ):
                call("analyze", query, "r", "--limit", "0", "--format", output)
            call("eval", "--check-dataset", "--dataset", "d.jsonl", "--format", output)
            call("filter", "r", "--phase", "eval", "--out", f"{output}.jsonl", "--format", output)
            call("grade", "r", "--grader", "gsm8k", "--again", "--format", output)
        call("eval", "--check-dataset", "--dataset", "bad.jsonl", "--skip-bad-lines")
        for payload in [p for p in payloads if "\0" not in p][::4]:
            call("analyze", payload, "r")
        for payload in [p for p in ESCAPES if "\0" not in p][::2]:
            call("eval", "--dataset", f"{payload}.jsonl")
            call("analyze", "summary", "--runs-dir", payload)
    assert {name: unsafe(said) for name, said in outputs.items() if unsafe(said)} == {}
    figures |= {"hostile texts": len(payloads), "outputs": len(outputs), "characters that act": 0}
