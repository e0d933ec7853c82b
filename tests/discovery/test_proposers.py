"""Proposers without a model: a mutation changes one parameter, a replay gives what is in the file."""

import json

import pytest

from rlvr_cli.discovery.proposers import mutate, mutated, read_responses, replay
from rlvr_cli.discovery.tasks import load_task
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.answers.extraction import last_code_block
from rlvr_cli.types import Request, SamplingParams

SEARCH = load_task("kissing", dim=11, start="", searches=True, seconds=10.0).program


def test_a_mutation_changes_one_parameter_to_another_of_its_values():
    seen = set()
    for seed in range(200):
        child = mutated(SEARCH, seed=seed)
        changed = [(a, b) for a, b in zip(SEARCH.splitlines(), child.splitlines(), strict=True) if a != b]
        assert len(changed) == 1
        ((before, after),) = changed
        assert before.split(" = ")[0] == after.split(" = ")[0]
        value, choices = after.split(" = ", 1)[1].split("  # one of ")
        assert value in choices.split(", ")
        seen.add(after.split(" = ")[0])
    assert seen == {"NORM", "SEED", "ITERATIONS", "TENURE", "SWAP", "START"}


def test_a_mutation_is_a_function_of_its_seed():
    assert mutated(SEARCH, seed=5) == mutated(SEARCH, seed=5)
    assert len({mutated(SEARCH, seed=seed) for seed in range(20)}) > 5


@pytest.mark.parametrize(
    "program", ["points = []", "N = 4  # one of 4", "N = 4  # one of f(), g()", "N = 4  # one of 1,, 2"]
)
def test_a_program_without_parameters_is_refused(program):
    with pytest.raises(RlvrError, match="finds no parameter"):
        mutated(program, seed=0)


def test_the_mutation_is_of_the_last_program_in_the_prompt():
    prompt = "```python\nN = 1  # one of 1, 2\n```\nand\n```python\nM = 3  # one of 3, 4\n```\n"
    (completion,) = mutate().sample([Request(prompt, (7,))], SamplingParams())
    assert last_code_block(completion.text) == "M = 4  # one of 3, 4"


def test_a_replay_answers_an_attempt_with_its_response(tmp_path):
    path = tmp_path / "responses.jsonl"
    path.write_text("".join(json.dumps({"response": f"r{i}"}) + "\n" for i in range(4)))
    proposer = replay(read_responses(path))
    requests = [Request("p", (1,), "3"), Request("p", (1,), "0")]
    assert [c.text for c in proposer.sample(requests, SamplingParams())] == ["r3", "r0"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows"),
        ('{"answer": "x"}\n', r"responses.jsonl:1: there is no text in the field response"),
        ('{"response": null}\n', r"responses.jsonl:1: there is no text"),
        ('{"response": "a"}\nnot json\n', r"responses.jsonl:2: not valid JSON"),
        ('"a program"\n', r'responses.jsonl:1: expected a JSON object such as \{"response": …\}, found text'),
    ],
)
def test_a_file_that_cannot_be_replayed_is_refused(tmp_path, text, said):
    path = tmp_path / "responses.jsonl"
    path.write_text(text)
    with pytest.raises(RlvrError, match=said):
        read_responses(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RlvrError, match=r"nothing\.jsonl"):
        read_responses(tmp_path / "nothing.jsonl")
