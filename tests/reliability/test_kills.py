"""kill -9 anywhere: the run that goes on has the bytes of weights, the rows and the metrics of the one that nothing disturbed.

The quick forms are in tests/training/test_resume.py and tests/runs/test_run_dir_kill.py.
"""

import random
import shlex
import signal
import time
from pathlib import Path

import pytest

from checks import findings
from forks import Forks
from killed import (
    EI,
    GRPO,
    POINTS,
    ROUNDED,
    SFT,
    Whole,
    assert_readable,
    begin_or_resume,
    go_on,
    kill_at_random,
    metrics_of,
    rows_of,
)
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.readers import read_run

ON_POLICY = shlex.split(
    "grpo --dataset arithmetic:64 --n-grpo-steps 6 --rollout-batch-size 16 --group-size 4 --train-batch-size 16 "
    "--gradient-accumulation-steps 2 --sampling-max-tokens 32 --learning-rate 2e-4 --eval-examples 8 --checkpoint-every 2"
)
EVAL = shlex.split("eval --dataset arithmetic:600 --num-samples 4 --sampling-max-tokens 24")
KILLS = 25  # of each of the eight
TRAINING = {
    "sft": SFT,
    "ei": EI,
    "grpo": ON_POLICY,
    "off-policy": GRPO,
    "dynamic sampling": [*GRPO, "--dynamic-sampling", "--max-sampling-rounds", "4"],
    "kl": [*GRPO, "--kl-coef", "0.1", "--importance-correction", "truncated"],
    "async": [*GRPO, "--async-steps", "1"],
}


def killed_at_random(forks: Forks, tmp_path: Path, name: str, kills: int) -> None:
    command, run = TRAINING[name], tmp_path / "runs/whole"
    go_on(forks, run, command)
    whole = Whole(run, run, seconds=read_run(run).metadata["wall_seconds"])
    kill_at_random(forks, tmp_path, whole, kills=kills, seed=len(name), command=command)


@pytest.mark.slow
def test_training_killed_at_random_ends_the_same(forks: Forks, tmp_path: Path):
    """With sampling ahead; without: tests/training/test_resume.py."""
    killed_at_random(forks, tmp_path, "async", kills=6)


@pytest.mark.full
@pytest.mark.parametrize("name", list(TRAINING))
def test_training_killed_at_25_points_ends_the_same(
    forks: Forks, tmp_path: Path, name: str, figures: dict[str, object]
):
    killed_at_random(forks, tmp_path, name, KILLS)
    figures |= {"training": name, "kills": KILLS, "runs that differ in a row, a metric or a byte of weights": 0}


# Answers each sum of the built-in model's, such as 7+7=14; a file beside it says that it is at it.
TOOL = """
import os, random, time
from pathlib import Path
from rlvr_cli.environments import Reply

class Sums:
    stop = (",",)

    def begin(self, example, seed):
        self.random = random.Random(seed)

    def answer(self, turn):
        at_it = Path(__file__).with_name(f"at-it-{os.getpid()}")
        at_it.touch()
        time.sleep(0.1)
        at_it.unlink()
        return Reply(f"({self.random.randint(0, 9)})", role="teacher")
"""


@pytest.mark.full
def test_episodes_killed_at_20_points_end_the_same(forks: Forks, tmp_path: Path, figures: dict[str, object]):
    """Training with an environment killed at 20 points ends the same"""
    (tmp_path / "mine.py").write_text(TOOL)
    command = [
        *ON_POLICY,
        "--environment",
        f"{tmp_path}/mine.py:Sums",
        "--max-turns",
        "4",
        "--environment-workers",
        "2",
    ]
    run = tmp_path / "runs/whole"
    go_on(forks, run, command)
    turns = [row["episode"]["num_turns"] for row in rows_of(run, phase="train")]
    assert sum(turns) > 1.5 * len(turns)
    in_a_tool = 0

    def look() -> None:
        nonlocal in_a_tool
        at_it = [*tmp_path.glob("at-it-*")]
        in_a_tool += bool(at_it)
        for path in at_it:
            path.unlink()

    whole = Whole(run, run, seconds=read_run(run).metadata["wall_seconds"])
    kill_at_random(forks, tmp_path, whole, kills=20, seed=4, command=command, look=look, rounded=("train", "eval"))
    figures |= {
        "kills": 20,
        "while a tool worked": in_a_tool,
        "lost or doubled rows": 0,
        "runs that differ in a token or a byte of weights": 0,
    }


@pytest.mark.full
def test_an_evaluation_killed_at_25_points_ends_the_same(forks: Forks, tmp_path: Path, figures: dict[str, object]):
    whole, generator, killed, number = tmp_path / "runs/whole", random.Random(5), 0, 0
    go_on(forks, whole, EVAL)
    seconds = read_run(whole).metadata["wall_seconds"]
    points = [p for p in POINTS if p.startswith(("create", "write", "rename", "manifest", "sampled", "graded"))]
    while killed < KILLS:
        run = tmp_path / f"runs/cut-{number}"
        status = -signal.SIGKILL
        while status and killed < KILLS:
            fault = f"{generator.choice(points)}:{generator.randint(1, 4)}" if generator.random() < 0.4 else None
            call = forks.start(*begin_or_resume(run, EVAL), cwd=tmp_path, fault=fault)
            if fault is None:
                time.sleep(generator.uniform(0, seconds))
                forks.send(call, signal.SIGKILL)
            status = forks.wait(call).status
            assert status in (0, -signal.SIGKILL)
            assert_readable(run)
            killed += status != 0
        if status:
            go_on(forks, run, EVAL)
        assert findings(run) == []
        for a, b in zip(rows_of(run, phase="eval"), rows_of(whole, phase="eval"), strict=True):
            assert {k: v for k, v in a.items() if k not in ROUNDED} == {k: v for k, v in b.items() if k not in ROUNDED}
        assert metrics_of(run).keys() == metrics_of(whole).keys()
        tokens = "eval", 0, "sampling/tokens"
        assert metrics_of(run)[tokens] == metrics_of(whole)[tokens]
        assert check_run(run).rows == 2400
        number += 1
    figures |= {"command": "eval", "kills": killed, "lost or doubled rows": 0}
