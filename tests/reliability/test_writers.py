"""Several processes that want to write one run: one wins, and the others are told who it is."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlvr_cli
from checks import findings

SOURCE = Path(rlvr_cli.__file__).parents[1]

RACER = """
import sys
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.run_dir import RunDir
root = sys.argv[1]
for line in sys.stdin:
    how, name = line.split()
    try:
        if how == "create":
            run = RunDir.create(root, "eval", name=name, metadata={})
        else:
            run = RunDir.resume(f"{root}/{name}")
    except RlvrError as error:
        run = None
        print("lost", str(error).replace("\\n", " "), flush=True)
    else:
        print("won", flush=True)
    sys.stdin.readline()
    if run is not None:
        run.close()
    print("done", flush=True)
"""


@pytest.fixture
def racers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[subprocess.Popen]]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(request.param)
    ]
    yield processes
    for process in processes:
        with process:
            process.stdin.close()  # type: ignore[union-attr]
            assert process.wait(timeout=10) == 0


def race(racers: list[subprocess.Popen], order: str) -> dict[int, str]:
    """Send all processes the same order at once; return their replies by process id."""
    for process in racers:
        process.stdin.write(order + "\n")
        process.stdin.flush()
    answers = {process.pid: process.stdout.readline().strip() for process in racers}
    for process in racers:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in racers:
        assert process.stdout.readline() == "done\n"
    return answers


def assert_one_winner(racers: list[subprocess.Popen], root: Path, *, rounds: int) -> None:
    """Race for creating and for resuming a run, so many times each."""
    for number in range(rounds):
        answers = race(racers, f"create run-{number}")
        assert sorted(a.split()[0] for a in answers.values()) == ["lost"] * (len(racers) - 1) + ["won"]
        assert all("exists already" in a for a in answers.values() if a != "won"), answers
        answers = race(racers, f"resume run-{number}")
        assert sorted(a.split()[0] for a in answers.values()) == ["lost"] * (len(racers) - 1) + ["won"]
        winner = next(pid for pid, a in answers.items() if a == "won")
        assert all(f"written by process {winner} on" in a for a in answers.values() if a != "won"), answers
    assert sorted(p.name for p in root.iterdir()) == sorted(f"run-{n}" for n in range(rounds))
    assert all(findings(run) == [] for run in root.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("racers", [3], indirect=True)
def test_exactly_one_of_several_writers_wins(racers: list[subprocess.Popen], tmp_path: Path):
    assert_one_winner(racers, tmp_path, rounds=2)


@pytest.mark.full
@pytest.mark.parametrize("racers", [5], indirect=True)
def test_100_races_of_five_writers_have_one_winner_each(
    racers: list[subprocess.Popen], tmp_path: Path, figures: dict[str, object]
):
    assert_one_winner(racers, tmp_path, rounds=50)
    figures |= {"races": 100, "writers in each": 5, "without exactly one winner": 0}
