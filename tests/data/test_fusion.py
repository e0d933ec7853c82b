"""The two forms of an example that thinks."""

import pytest

from rlvr_cli.data.fusion import fused_forms


@pytest.mark.parametrize("begin", ["", "<think>", "<think>\n", "\n<think>", " <think> "])
def test_the_forms_are_those_of_qwen3(begin):
    forms = list(fused_forms("1+1?", f"{begin} one and one </think>\n\nIt is 2. "))
    assert forms == [
        ("think", "1+1? /think", "<think>\none and one\n</think>\n\nIt is 2."),
        ("no_think", "1+1? /no_think", "<think>\n\n</think>\n\nIt is 2."),
    ]


@pytest.mark.parametrize(
    "response", ["2", "thinking on", " </think> 2", "thinking </think> ", "<think>\n\n</think>\n\n2"]
)
def test_what_does_not_think_or_answer_has_no_forms(response):
    assert list(fused_forms("1+1?", response)) == []
