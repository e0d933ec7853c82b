"""Rows with `messages`: what a conversation is made of, whatever kind of file it is in."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlvr_cli.data.conversations import conversation_of
from rlvr_cli.data.files import BadRow, Row, file_rows

CALC = {"name": "calc", "description": "Calculates.", "parameters": {"type": "object"}}


def talk(name="calc", **arguments):
    """Messages with a call."""
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    return [
        {"role": "user", "content": "2*3?"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "6"},
        {"role": "assistant", "content": "6"},
    ]


def read(**values):
    return conversation_of(Row("t.jsonl:1", 1, values, list(values)))


@pytest.mark.parametrize("tool", [CALC, {"type": "function", **CALC}, {"type": "function", "function": CALC}])
def test_a_tool_may_be_the_bare_schema_of_its_function(tool):
    assert read(messages=talk(), tools=[tool]).tools == ({"type": "function", "function": CALC},)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        *(
            ({"messages": talk(), "tools": tools}, "t.jsonl:1: its tools are not a list of JSON schemas with names.")
            for tools in ([{}], [CALC, {"function": {}}], [{"function": "calc"}], [{"name": 2}], ["calc"], "calc")
        ),
        ({"messages": talk(name="")}, "t.jsonl:1: a call in its messages has no name."),
    ],
)
def test_tools_and_calls_without_a_name_are_refused(values, problem):
    with pytest.raises(BadRow, match=re.escape(problem)):
        read(**values)


def test_a_conversation_of_parquet_has_no_fields_of_other_rows(tmp_path):
    """Of Parquet all rows have the same fields; a null that is meant can stand in arguments that are JSON text."""
    rows = []
    for name, field in (("calc", "expression"), ("look", "word")):
        tool = {"name": name, "parameters": {"properties": {field: {"type": "string"}}, "required": [field]}}
        rows.append({"messages": talk(name, **{field: "2*3"}), "tools": [{"type": "function", "function": tool}]})
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    lines, columns = (
        [conversation_of(row) for row in file_rows(tmp_path / f"d.{end}")] for end in ("jsonl", "parquet")
    )
    assert columns == lines
    assert lines[0].messages == read(messages=talk(expression="2*3")).messages

    said = talk()
    said[1]["tool_calls"][0]["function"]["arguments"] = '{"word": null}'
    pq.write_table(pa.Table.from_pylist([{"messages": said}]), tmp_path / "d.parquet")
    (row,) = file_rows(tmp_path / "d.parquet")
    written = read(messages=talk(word=None)).messages
    assert conversation_of(row).messages == written
    assert written[1]["tool_calls"][0]["function"]["arguments"] == {"word": None}
