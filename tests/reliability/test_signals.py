"""One signal, in any phase of any command, ends it within seconds: work is saved, the status is right, no process is left.

The signals are those of `process.STOP_SIGNALS`: Ctrl-C, the end that a scheduler or a system asks for, a closed terminal,
and the warning that SLURM sends. They are sent at the fault points, by the process to itself.
"""

import re
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import rlvr_cli
from forks import SIGNALED, Done, Forks, processes_in
from rlvr_cli.faults import SIGNALS
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.readers import read_rollouts, read_run

ACTIONS = ("term", "int", "hup", "usr1")
WITHIN = 60.0  # seconds from a signal to the end, on a loaded machine; the figures say how long it was
TINY = "--sampling-max-tokens 8 --learning-rate 1e-4 --eval-examples 4 --checkpoint-every 1"
COMMANDS = {
    "eval": "eval --dataset arithmetic:16 --sampling-max-tokens 8",
    "sft": f"sft --dataset arithmetic:16 --train-batch-size 4 --sft-epochs 1 {TINY}",
    "ei": f"ei --dataset arithmetic:16 --n-ei-steps 2 --ei-batch-size 4 --group-size 4 --train-batch-size 2 {TINY}",
    "grpo": f"grpo --dataset arithmetic:16 --n-grpo-steps 5 --rollout-batch-size 8 --group-size 4 --train-batch-size 8 "
    f"--gradient-accumulation-steps 2 {TINY}",
}
COMMANDS["async"] = f"{COMMANDS['grpo']} --async-steps 1"
POINTS = sorted(
    {
        point
        for file in Path(rlvr_cli.__file__).parent.rglob("*.py")
        for point in re.findall(r'fault_point\("([\w.]+)"\)', file.read_text())
    }
)


def words(command: str) -> list[str]:
    return [*shlex.split(COMMANDS[command]), "--run", "r"]


def end_of(forks: Forks, folder: Path, command: str, *, point: str, action: str) -> tuple[Done, float | None]:
    """Signal a call at this point; how it ends, and how many seconds later. None: it did not pass the point."""
    folder.mkdir(exist_ok=True)
    moment = folder / "moment"
    call = forks.start(
        *words(command), cwd=folder, environment={"RLVR_FAULT": f"{point}:1:{action}", SIGNALED: str(moment)}
    )
    done = forks.wait(call, limit=120)
    return done, time.monotonic() - float(moment.read_text()) if moment.exists() else None


def complain(done: Done, folder: Path, *, seconds: float) -> Iterator[str]:
    """Yield what is wrong with the end of a call that got a signal."""
    if done.hung or seconds > WITHIN:
        yield f"{seconds:.1f} s"
    if "Traceback" in done.said:
        yield done.said[-500:]
    run = folder / "runs/r"
    status = read_run(run).metadata["status"] if run.exists() else "none"
    # The last work of a run may be done when the signal arrives; then it is over.
    if (done.status, status) not in ((130, "interrupted"), (0, "finished"), (130, "none")):
        yield f"status {done.status}, of the run {status}: {done.said[-300:]}"
    if done.status == 130 and status == "interrupted" and "resume with: rlvr" not in done.err:
        yield f"no word of how to go on: {done.err[-300:]}"
    if run.exists() and (problems := check_run(run).problems):
        yield f"damage: {problems}"
    deadline = time.monotonic() + 5
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        yield f"left behind: {left}"


def signal_everywhere(
    forks: Forks, root: Path, cases: Sequence[tuple[str, str, str]]
) -> tuple[dict[tuple[str, str, str], list[str]], list[float]]:
    """Signal a call for each (command, point, action); what is wrong, and the seconds to each end."""
    wrong, took = {}, []
    for number, (command, point, action) in enumerate(cases):
        folder = root / str(number)
        done, seconds = end_of(forks, folder, command, point=point, action=action)
        if seconds is None:
            continue
        took.append(seconds)
        if problems := list(complain(done, folder, seconds=seconds)):
            wrong[command, point, action] = problems
    return wrong, took


def test_the_signals_are_those_that_commands_handle():
    from rlvr_cli.process import STOP_SIGNALS

    assert {SIGNALS[action] for action in ACTIONS} == set(STOP_SIGNALS)


def test_each_signal_saves(forks: Forks, tmp_path: Path):
    cases = [("eval", "manifest", "hup"), ("grpo", "update", "usr1")]
    wrong, took = signal_everywhere(forks, tmp_path, cases)
    assert not wrong
    assert len(took) == len(cases)
    assert read_run(tmp_path / "1/runs/r").metadata["status"] == "interrupted"


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_each_signal_in_each_phase(forks: Forks, tmp_path: Path, figures: dict, command: str):
    cases = [(command, point, action) for point in POINTS for action in ACTIONS]
    wrong, took = signal_everywhere(forks, tmp_path, cases)
    assert not wrong
    assert len(took) >= 4 * 6
    figures |= {"signals": len(took), "longest time to the end, s": round(max(took), 1), "processes left": 0}


def test_a_signal_while_an_engine_process_starts(forks: Forks, tmp_path: Path):
    call = forks.start(*words("async"), cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not any("parallel.serve" in line for line in processes_in(tmp_path).values()):
        assert forks.status(call) is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    sent = time.monotonic()
    forks.send(call, signal.SIGTERM)
    done = forks.wait(call)
    assert list(complain(done, tmp_path, seconds=time.monotonic() - sent)) == []
    assert done.status == 130


def test_an_engine_process_that_is_starting_dies_with_its_parent(forks: Forks, tmp_path: Path):
    """It stands still in its imports, where it cannot read that its parent has gone."""
    (tmp_path / "modules").mkdir()
    started = tmp_path / "started"
    (tmp_path / "modules/torch.py").write_text(
        f"import pathlib, time\npathlib.Path({str(started)!r}).touch()\ntime.sleep(600)\n"
    )
    call = forks.start(*words("async"), cwd=tmp_path, environment={"PYTHONPATH": str(tmp_path / "modules")})
    deadline = time.monotonic() + 60
    while not started.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert any("parallel.serve" in line for line in processes_in(tmp_path).values())
    forks.send(call, signal.SIGKILL)
    forks.wait(call)
    deadline = time.monotonic() + 30
    while processes_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_in(tmp_path) == {}


@pytest.mark.full
@pytest.mark.parametrize(
    "command", ["analyze summary", "analyze report", "check", "filter --emit questions --out x.jsonl"]
)
def test_a_command_that_only_reads_ends_at_a_signal(forks: Forks, tmp_path: Path, command: str):
    """It has nothing to save: the signal itself may end it."""
    forks.run("eval", "--dataset", "arithmetic:4", "--sampling-max-tokens", "4", "--run", "r", cwd=tmp_path)
    call = forks.start(*command.split(), "r", cwd=tmp_path)
    time.sleep(0.05)
    forks.send(call, signal.SIGINT)
    done = forks.wait(call)
    assert done.status in (0, 130)
    assert "Traceback" not in done.said
    assert read_rollouts(tmp_path / "runs/r").num_rows == 4
