"""What SFT trains on: filtered as asked, counted, never silently."""

import json

import pytest

from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.prompts import load_prompt
from rlvr_cli.records import Example
from rlvr_cli.traces import choose_examples, keep_correct, load_traces
from rlvr_cli.training import epoch_order

TEMPLATE = load_prompt("r1_zero")


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def test_formatted_prompts_stay_and_duplicates_and_empty_ones_go(tmp_path):
    rows = [
        {"prompt": "P1", "response": " a"},
        {"prompt": "P1", "response": " a"},
        {"prompt": "P1", "response": " b"},
        {"prompt": "P2 {question}", "response": " c", "ground_truth": "3"},
    ]
    traces = load_traces(write(tmp_path / "t.jsonl", rows), TEMPLATE)
    assert [(e.prompt, e.response, e.ground_truth) for e in traces.examples] == [
        ("P1", " a", ""),
        ("P1", " b", ""),
        ("P2 {question}", " c", "3"),
    ]
    assert any("1 trace" in m or "1 traces" in m for m in traces.messages)


def test_generated_traces_get_the_template():
    traces = load_traces("arithmetic:20:3", TEMPLATE)
    assert len(traces.examples) == 20
    assert all(e.prompt == TEMPLATE.fill(e.question) and e.response for e in traces.examples)


def test_correct_only_keeps_what_the_grader_rewards():
    examples = [
        Example("a", "q", "6", prompt="p", response=" </think> <answer> 6 </answer>"),
        Example("b", "q", "6", prompt="p", response=" </think> <answer> 7 </answer>"),
        Example("c", "q", "6", prompt="p", response=" 6"),
    ]
    with GraderPool("r1_zero", workers=1) as pool:
        assert [e.id for e in keep_correct(examples, pool)] == ["a"]
        with pytest.raises(RlvrError, match="None of the 2"):
            keep_correct(examples[1:], pool)
        with pytest.raises(RlvrError, match="ground truth"):
            keep_correct([Example("d", "q", "", prompt="p", response="r")], pool)


def test_a_smaller_choice_is_part_of_a_larger_one():
    examples = [Example(str(i), "q", "1", prompt="p", response=str(i)) for i in range(50)]
    order = epoch_order(50, seed=1, epoch=-1)
    few, more = (choose_examples(examples, n, order=order) for n in ("8", "16"))
    assert set(few) < set(more) < set(examples)
    assert choose_examples(examples, "8", order=epoch_order(50, seed=2, epoch=-1)) != few
    assert choose_examples(examples, "all", order=order) == examples
    with pytest.raises(RlvrError, match="there are 50"):
        choose_examples(examples, "51", order=order)
