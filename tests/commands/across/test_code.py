"""Reinforcement learning on code: from the question to the reward of a program, with the built-in model."""

import json
import random

import pytest

from rlvr_cli.commands import eval as eval_command
from rlvr_cli.commands import grpo, sft
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.runs.readers import read_rollouts

PROGRAMS = {"add two": "x+2", "take one": "x-1", "double": "x*2", "triple": "x*3"}
VALUES = (5, 7, -4)
RIGHT = {"x+2": (7, 9, -2), "x-1": (4, 6, -5), "x*2": (10, 14, -8), "x*3": (15, 21, -12)}


@pytest.fixture
def questions(tmp_path):
    """A file of the four functions to write, and the prompt file."""
    rows = [
        {
            "question": question,
            "answer": "\n".join(f"assert f({v}) == {w}" for v, w in zip(VALUES, RIGHT[e], strict=True)),
        }
        for question, e in PROGRAMS.items()
    ]
    (tmp_path / "code.prompt").write_text("{question}: ")
    path = tmp_path / "asks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "dataset": str(path),
        "prompt": str(tmp_path / "code.prompt"),
        "grader": "python",
        "runs_dir": str(tmp_path),
    }


def test_an_evaluation_says_why_a_program_has_no_reward(questions, tmp_path):
    eval_command.run(EvalConfig(**questions, sampling_max_tokens=16, grader_workers=1, run="r"))
    rows = read_rollouts(tmp_path / "r").to_pylist()
    assert len(rows) == 4
    assert {row["grade_error"] for row in rows} == {None}
    assert {row["failure_kind"] for row in rows} <= {"no_code", "truncated"}


@pytest.mark.slow
def test_grpo_learns_which_program_passes(questions, tmp_path):
    """A model that writes each of nine programs, whatever is asked, comes to write the right one more often.

    Of the traces, repeated ones are left out: what remains is each question with each program.
    """
    draw = random.Random(0)
    traces = []
    for _ in range(512):
        question = draw.choice(list(PROGRAMS))
        e = PROGRAMS[question] if draw.random() < 0.4 else f"x{draw.choice('+-*')}{draw.choice('123')}"
        traces.append({"prompt": f"{question}: ", "response": f"```python\ndef f(x): return {e}\n```"})
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(trace) + "\n" for trace in traces))
    batches = {"train_batch_size": 16, "micro_batch_size": 16, "learning_rate": 2e-3}
    sft.run(SftConfig(**{**questions, "dataset": str(path)}, n_sft_steps=100, run="s", **batches))
    grpo.run(
        GrpoConfig(
            **questions,
            model=str(tmp_path / "s/model"),
            n_grpo_steps=20,
            rollout_batch_size=32,
            group_size=8,
            train_batch_size=32,
            gradient_accumulation_steps=1,
            learning_rate=6e-4,
            sampling_max_tokens=40,
            grader_timeout=60.0,
            run="g",
        )
    )
    rows = read_rollouts(tmp_path / "g", phase="train").to_pylist()
    assert {row["grade_error"] for row in rows} == {None}
    first, last = ([row["reward"] for row in rows if row["step"] in steps] for steps in (range(5), range(15, 20)))
    assert len(first) == len(last) == 160
    assert sum(last) > 1.5 * sum(first), (sum(first), sum(last))
