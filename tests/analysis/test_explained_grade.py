"""Explanations: the steps are the grader's own, and the last one decides exactly where the verdict is a reward."""

import json
from pathlib import Path

import pytest

from rlvr_cli.analysis.explained_grade import explained, response_of
from rlvr_cli.graders import GRADERS, resolve_grader

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "fixtures" / "grading_notation.jsonl").read_text().splitlines()
]


def steps_of(text: str, truth: str, grader: str = "r1_zero", format_rule="literal"):
    response = response_of(text, grader)
    verdict = resolve_grader(grader, format_rule=format_rule)(response, truth)
    steps, table = explained(verdict, response, truth, grader=grader, format_rule=format_rule)
    assert dict(table.rows)["grader"] == grader
    assert dict(table.rows)["reward"] == verdict.reward
    return verdict, steps.rows


def test_a_step_decides_where_there_is_a_reward_and_no_step_where_there_is_none():
    for case in CASES:
        verdict, steps = steps_of(case["answer"], case["ground_truth"])
        decisive = [step[-1].endswith("this decides") for step in steps]
        assert any(decisive) == (verdict.reward == 1.0) == case["right"], case
        assert not any(decisive[:-1]), case  # nothing is tried after it


@pytest.mark.parametrize(
    ("text", "truth", "layers"),
    [
        ("5", "5", ["L0 text"]),
        ("5.0", "5", ["L0 text", "L0 number"]),
        ("$ 5$", "5", ["L0 text", "L0 spelling"]),
        (r"\frac12", r"\dfrac{1}{2}", ["L0 text", "L0 spelling", "L2 value"]),
        ("1/2/2024", "01/02/2024", ["L0 text", "L0 spelling", "L0 date, score or range"]),
        ("Option B", "(B)", ["L0 text", "L0 spelling", "L1 choice letter"]),
        ("Yes, it is.", "yes", ["L0 text", "L0 spelling", "L1 yes or no"]),
        ("{2, 1}", "1, 2", ["L0 text", "L0 spelling", "L1 structure"]),
        (r"<think> 1/2 </think> <answer> \boxed{2/4} </answer>", "1/2", ["L0 text", "L0 spelling", "L2 value"]),
    ],
)
def test_the_layers_are_tried_in_order(text, truth, layers):
    verdict, (_, extracted, *steps) = steps_of(text, truth)
    assert verdict.reward == 1.0
    assert extracted[0] == "extracted"
    assert extracted[2] == truth
    assert [step[0] for step in steps] == layers


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("5 dozen eggs", ("L1 structure", "( 5 ) * ( 12 ) = 60 in ?egg", "9", "not the same (quantity, value)")),
        ("x^2 = 9", ("L1 structure", "x ^ 2 = 9", "9", "not the same (relation, value)")),
        (r"\sqrt{2}", ("L2 value", r"\sqrt 2 = 1.41421356237", "9", "not the same")),
        ("i", ("L2 value", "i = 0+1j", "9", "not the same")),
        ("200!", ("L2 value", "200 ! = a number of about 375 digits", "9", "not the same")),
        ("(1, 2]", ("L1 structure", "(1, 2]", "9", "not the same (group, value)")),
        ("1 or 2", ("L1 structure", "in any order: 1 or 2", "9", "not the same (listing, value)")),
        ("no idea", ("L1 structure", "words: no idea", "9", "not the same (words, value)")),
    ],
)
def test_what_was_read_is_shown(text, last):
    assert steps_of(text, "9")[1][-1] == last


def test_a_response_without_the_format_ends_there():
    verdict, steps = steps_of("so </think><answer> 5 </answer>", "5")
    assert verdict.format_reward == 0.0
    assert [step[0] for step in steps] == ["format"]
    assert steps_of("so </think><answer> 5 </answer>", "5", format_rule="lenient")[0].reward == 1.0
    verdict, steps = steps_of("I give up \\boxed{5", "5", "question_only")
    assert steps[-1][-1].startswith("nothing")


@pytest.mark.parametrize("grader", sorted(set(GRADERS) - {"countdown", "python", "reasoning_gym", "multiple_choice"}))
@pytest.mark.parametrize("text", ["5", "6", "", "five\ud800 \x1b[31m", "\\int x", "it is 5.", "(" * 500])
def test_every_grader_explains_any_text(grader, text):
    verdict, steps = steps_of(text, "5", grader)
    assert steps
    assert any(step[-1].endswith("this decides") for step in steps) == (verdict.reward == 1.0)


def test_a_puzzle_is_graded_by_its_own_rules():
    puzzle = json.dumps({"numbers": [1, 2], "target": 3})
    verdict, steps = steps_of("1 + 2", puzzle, "countdown")
    assert verdict.reward == 1.0
    assert steps[-1][0] == "graded by its own rules"


def test_a_bare_program_is_graded_as_one():
    verdict, steps = steps_of("def f(): return 3", "assert f() == 3", "python")
    assert verdict.reward == 1.0
    assert steps[-1][-1] == "reward 1"
