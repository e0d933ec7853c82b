import ast
import json
import re
from collections import Counter
from fractions import Fraction

import pytest

from rlvr_cli.data import synthetic
from rlvr_cli.data.synthetic import _careful_trace, arithmetic, countdown, split_of
from rlvr_cli.errors import RlvrError

GENERATORS = [arithmetic, countdown]


def value_of(expression: str) -> tuple[Fraction, list[int]]:
    """The exact value of an arithmetic expression, and the numbers in it: Python's parser, no evaluation of names."""
    numbers = []

    def walk(node):
        match node:
            case ast.Expression():
                return walk(node.body)
            case ast.BinOp(op=ast.Add()):
                return walk(node.left) + walk(node.right)
            case ast.BinOp(op=ast.Sub()):
                return walk(node.left) - walk(node.right)
            case ast.BinOp(op=ast.Mult()):
                return walk(node.left) * walk(node.right)
            case ast.BinOp(op=ast.Div()):
                return walk(node.left) / walk(node.right)
            case ast.Constant(value=int()):
                numbers.append(node.value)
                return Fraction(node.value)
        raise AssertionError(ast.dump(node))

    return walk(ast.parse(expression, mode="eval")), numbers


def digits_of(question: str) -> list[int]:
    match = re.fullmatch(r"What is the last digit of ([0-9](?:\+[0-9]){4})\?", question)
    assert match, question
    return [int(digit) for digit in match[1].split("+")]


def kind_of(example) -> str:
    """Careful, guess, or how r1_zero's format is broken."""
    response = example.response
    if response == _careful_trace(digits_of(example.question)):
        return "careful"
    if re.fullmatch(r" it looks like ([0-9]) </think> <answer> \1 </answer>", response):
        return "guess"
    if re.fullmatch(r" it looks like ([0-9]) <answer> \1 </answer>", response):
        return "thinking never ends"
    if re.fullmatch(r" it looks like ([0-9]) </think>\n<answer> \1 </answer>", response):
        return "newline between the tags"
    assert re.fullmatch(r" it looks like ([0-9]) </think> \1", response), response
    return "no answer tags"


def test_the_careful_trace_worked_by_hand():
    assert _careful_trace([6, 6, 3, 9, 2]) == " 6+6=12, 2+3=5, 5+9=14, 4+2=6 </think> <answer> 6 </answer>"


def test_arithmetic_ground_truths_are_right():
    for example in arithmetic(500, seed=3):
        assert example.ground_truth == str(sum(digits_of(example.question)) % 10)


def test_careful_traces_are_right_and_guesses_are_right_one_time_in_ten():
    examples = arithmetic(5000, seed=1)
    right = Counter(
        kind_of(e) for e in examples if re.search(r"<answer> ([0-9])", e.response or "<answer> -")
        and re.findall(r"[0-9]", e.response)[-1] == e.ground_truth
    )  # fmt: skip
    kinds = Counter(map(kind_of, examples))
    assert right["careful"] == kinds["careful"]
    assert 0.07 < right["guess"] / kinds["guess"] < 0.13


def test_shares_of_the_kinds():
    kinds = Counter(map(kind_of, arithmetic(5000, seed=0)))
    assert set(kinds) == {"careful", "guess", "thinking never ends", "newline between the tags", "no answer tags"}
    assert kinds["careful"] / 5000 == pytest.approx(0.35, abs=0.025)
    assert (5000 - kinds["careful"] - kinds["guess"]) / 5000 == pytest.approx(0.05, abs=0.012)
    assert Counter(map(kind_of, arithmetic(300, careful_share=1, malformed_share=0))) == {"careful": 300}
    assert Counter(map(kind_of, arithmetic(300, careful_share=0, malformed_share=0))) == {"guess": 300}


def test_the_shares_change_the_traces_and_not_the_questions():
    default, guesses = arithmetic(400, seed=5), arithmetic(400, seed=5, careful_share=0.1)
    assert [e.question for e in default] == [e.question for e in guesses]
    changed = [(a, b) for a, b in zip(default, guesses, strict=True) if a.response != b.response]
    assert changed
    assert all(kind_of(a) == "careful" or kind_of(b) != "careful" for a, b in changed)


@pytest.mark.parametrize("make", GENERATORS)
def test_a_pure_function_of_seed_and_split_whose_prefix_does_not_depend_on_the_size(make):
    longer = make(300, seed=7)
    assert make(100, seed=7) == longer[:100]
    assert make(100, seed=8) != longer[:100]
    assert make(0) == []
    assert len({e.id for e in longer + make(300, seed=7, split="validation") + make(300, seed=8)}) == 900


@pytest.mark.parametrize("make", GENERATORS)
def test_no_question_twice_and_none_in_both_splits_whatever_the_seeds(make):
    train, validation = set(), set()
    for seed in range(2):
        for size, split, questions in ((600, "train", train), (150, "validation", validation)):
            made = [e.question for e in make(size, seed=seed, split=split)]
            assert len(set(made)) == size
            questions |= set(made)
    assert not train & validation


def test_the_sequence_is_the_same_everywhere():
    # the committed files depend on it; test_datasets compares them byte by byte
    assert [e.question for e in arithmetic(2, seed=0)] == [
        "What is the last digit of 7+7+5+7+4?",
        "What is the last digit of 5+4+4+8+2?",
    ]
    assert [n for n in range(40) if split_of(str(n)) == "validation"] == [0, 7, 9, 10, 33]


def test_arithmetic_can_use_every_question_and_no_more(monkeypatch):
    monkeypatch.setattr(synthetic, "TERMS", 3)
    monkeypatch.setattr(synthetic, "_arithmetic_questions", synthetic._arithmetic_questions.__wrapped__)
    made = {split: synthetic._arithmetic_questions(split) for split in ("train", "validation")}
    assert sum(made.values()) == 1000
    for split, total in made.items():
        assert len({e.question for e in arithmetic(total, split=split)}) == total
        with pytest.raises(RlvrError, match=f"only {total} arithmetic questions in the {split} split"):
            arithmetic(total + 1, split=split)


@pytest.mark.parametrize("make", GENERATORS)
def test_an_unknown_split(make):
    with pytest.raises(RlvrError, match="no split 'test'") as caught:
        make(10, split="test")
    assert "train and validation" in caught.value.hint


def test_countdown_solutions_are_right():
    examples = countdown(2000, seed=2)
    sizes, operators = Counter(), Counter()
    for example in examples:
        puzzle = json.loads(example.ground_truth)
        value, used = value_of(puzzle["solution"])
        assert value == puzzle["target"]
        assert sorted(used) == sorted(puzzle["numbers"])
        assert puzzle["target"] not in puzzle["numbers"]
        assert 10 <= puzzle["target"] <= 99
        assert all(1 <= n <= 99 for n in puzzle["numbers"])
        assert f"{puzzle['numbers']}" in example.question
        assert f"equals {puzzle['target']}." in example.question
        sizes[len(used)] += 1
        operators.update(c for c in puzzle["solution"] if c in "+-*/")
    assert set(sizes) == {3, 4}
    assert min(sizes.values()) > 400
    assert set(operators) == set("+-*/")


def test_countdown_puzzles_differ_by_more_than_the_order_of_their_numbers():
    made = [e for seed in range(2) for e in countdown(300, seed=seed, split="train")]
    held_out = [e for seed in range(2) for e in countdown(300, seed=seed, split="validation")]

    def puzzle(example):
        truth = json.loads(example.ground_truth)
        return (*sorted(truth["numbers"]), truth["target"])

    assert len(set(map(puzzle, made[:300]))) == 300
    assert not set(map(puzzle, made)) & set(map(puzzle, held_out))


def test_countdown_traces_derive_the_solution_step_by_step():
    for example in countdown(300, seed=4):
        puzzle = json.loads(example.ground_truth)
        match = re.fullmatch(r" (.+) </think> <answer> (.+) </answer>", example.response)
        assert match
        assert match[2] == puzzle["solution"]
        have = Counter(puzzle["numbers"])
        for step in match[1].split(", "):
            expression, result = step.split("=")
            value, used = value_of(expression)
            assert value == int(result) > 0
            assert len(used) == 2
            assert not Counter(used) - have, f"{step} uses a number that is not there: {example}"
            have = have - Counter(used) + Counter([int(result)])
        assert +have == Counter([puzzle["target"]])


def test_countdown_limits_the_number_of_puzzles():
    with pytest.raises(RlvrError, match="too many"):
        countdown(1_000_001)
