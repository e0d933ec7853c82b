"""Rows with `messages`: what a conversation is made of, whatever kind of file it is in."""

import re

import pytest

from rlvr_cli.data.conversations import conversation_of
from rlvr_cli.data.files import BadRow, Row

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
