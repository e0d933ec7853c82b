"""What a command that samples reads first."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlvr_cli.commands.discover import run as run_discover
from rlvr_cli.commands.eval import run as run_eval
from rlvr_cli.commands.sft import run as run_sft
from rlvr_cli.config.discover import DiscoverConfig
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.data.prompts import load_prompt
from rlvr_cli.errors import RlvrError
from rlvr_cli.rollouts.inputs import check_stops, load_questions
from rlvr_cli.training.read_traces import read_traces
from rlvr_cli.training.session import load_eval_dataset, load_inputs


def test_questions_for_a_judge_or_an_environment_need_no_answers(tmp_path):
    """As in AlpacaEval, whose rows have an instruction and a reference output, and SimpleSafetyTests."""
    path = str(tmp_path / "alpaca_eval.json")
    (tmp_path / "alpaca_eval.json").write_text(
        json.dumps([{"instruction": "Say hi.", "output": "Hi!", "dataset": "d"}])
    )
    judge: dict[str, Any] = {"grader": "judge:helpful.md", "judge_url": "http://127.0.0.1:9/v1", "judge_model": "big"}
    for answer_field, truth in (("", ""), ("output", "Hi!")):
        config = EvalConfig(dataset=path, answer_field=answer_field, **judge)
        assert [(e.question, e.ground_truth) for e in load_questions(config, purpose="eval").examples] == [
            ("Say hi.", truth)
        ]
    evaluated = load_eval_dataset(GrpoConfig(eval_dataset=path, **judge))
    assert evaluated is not None
    assert evaluated.rows == 1
    environment: dict[str, Any] = {"environment": "verifiers:a", "chat": True, "dataset": path}
    assert len(load_questions(EvalConfig(**environment), purpose="eval").examples) == 1
    with pytest.raises(RlvrError, match="environment verifiers:a gives the rewards, and so does --grader gsm8k"):
        load_questions(EvalConfig(**environment, grader="gsm8k"), purpose="eval")
    begun = EvalConfig(**environment, grader="gsm8k", sources={"grader": "resumed run"})
    assert len(load_questions(begun, purpose="eval").examples) == 1
    for config in (EvalConfig(dataset=path), EvalConfig(dataset=path, grader="gsm8k")):
        with pytest.raises(RlvrError, match="no answer"):
            load_questions(config, purpose="eval")


def test_a_dataset_of_several_kinds_needs_a_grader(tmp_path, capsys):
    path = str(tmp_path / "mix.jsonl")
    rows = [{"question": "Q", "options": options, "answer": "A", "response": "A"} for options in (["a", "b"], None)]
    (tmp_path / "mix.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = "1 of 2 rows are multiple choice, which have a grader of their own, and no grader is of all rows"
    checks = EvalConfig(dataset=path, check_dataset=True)
    for read in (
        lambda: run_eval(checks),
        lambda: load_eval_dataset(GrpoConfig(eval_dataset=path)),
        lambda: read_traces(SftConfig(dataset=path, correct_only=True), load_prompt("r1_zero")),
    ):
        with pytest.raises(RlvrError, match=said) as caught:
            read()
        assert "Split the dataset" in caught.value.hint
    assert load_questions(replace(checks, limit=1), purpose="eval", limit=1).default_grader == "multiple_choice"
    load_questions(EvalConfig(dataset=path, grader="mine.py:reward"), purpose="eval")
    assert said not in capsys.readouterr().err
    load_questions(EvalConfig(dataset=path, sources={"grader": "resumed run"}), purpose="eval")
    assert f"warning: {path}: {said}" in capsys.readouterr().err
    assert len(read_traces(SftConfig(dataset=path), load_prompt("r1_zero"))[1]) == 2, "nothing is graded"


def test_questions_whose_truths_are_unit_tests_say_which_grader_runs_them(tmp_path, capsys):
    file = tmp_path / "code.jsonl"
    test, printed = "import math\nassert f(2) == 4", json.dumps([{"input": "1", "output": "2"}])
    cases: list[tuple[list[str], Any, bool]] = [
        ([test, printed], "", True),
        ([test], "math_verify", True),
        ([test], "python", False),
        ([test], "mine.py:reward", False),
        ([test, "4"], "", False),
        (["[1, 2]"], "", False),
    ]
    for truths, grader, noted in cases:
        file.write_text("".join(json.dumps({"question": "Q", "answer": truth}) + "\n" for truth in truths))
        load_questions(EvalConfig(dataset=str(file), grader=grader), purpose="eval")
        assert ("unit tests: add --grader python" in capsys.readouterr().err) == noted


def test_a_stop_string_that_is_a_special_token_is_refused(tiny_model_dir):
    """The text of a response does not have it: nothing would stop there, and nothing would say so."""
    model = str(tiny_model_dir)
    for config in (
        EvalConfig(stop=("# Query:", "<|pad|>")),
        GrpoConfig(stop=("<|pad|>\n",)),
        DiscoverConfig(stop=("<|pad|>",)),
    ):
        with pytest.raises(RlvrError, match=r"is a special token .* it would end none") as caught:
            check_stops(config, model)
        assert "add its id 1 to eos_token_id" in caught.value.hint
    check_stops(EvalConfig(stop=("<|endoftext|>", "pad", "")), model)  # the first ends responses anyway
    check_stops(EvalConfig(stop=("<|pad|>",), base_url="http://127.0.0.1:9/v1", model="big"), "big")
    check_stops(EvalConfig(stop=("<|pad|>",), sources={"stop": "resumed run"}), model)
    check_stops(EvalConfig(stop=("<|pad|>",), dry_run=True), "org/not-here")


def test_commands_that_sample_refuse_it_before_they_make_a_run(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("traces.jsonl").write_text('{"prompt": "Q", "response": "A", "answer": "1"}\n')
    common: dict[str, Any] = {"model": str(tiny_model_dir), "stop": ("<|pad|>",), "device": "cpu", "runs_dir": "runs"}
    for command in (
        lambda: run_eval(EvalConfig(dataset="arithmetic:4", **common)),
        lambda: load_inputs(GrpoConfig(dataset="arithmetic:64", **common), questions_per_batch=2),
        lambda: run_sft(SftConfig(dataset="traces.jsonl", eval_dataset="arithmetic:4", **common)),
        lambda: run_discover(DiscoverConfig(task="kissing", dim=3, **common)),
    ):
        with pytest.raises(RlvrError, match="special token"):
            command()
    assert not Path("runs").exists() or not list(Path("runs").iterdir())
