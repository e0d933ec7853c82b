"""Runs on a Ray cluster of two nodes, as a user starts them: the bytes of one machine, and what happens when something dies."""

import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from killed import GRPO, assert_ended_as, rows_of, weights_of

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.slow

NODES = Path(__file__).parents[1] / "helpers/processes/nodes.py"
EVAL = shlex.split("eval --dataset arithmetic:24 --num-samples 2 --sampling-max-tokens 16 --max-batch-size 1")
TWO = shlex.split("--trainers 2 --samplers 2 --kl-coef 0.01 --max-batch-size 1")


@dataclass
class Nodes:
    """The process of `nodes.py`, and the address of its cluster."""

    process: subprocess.Popen
    address: str

    def kill_the_second(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextmanager
def nodes() -> Iterator[Nodes]:
    with subprocess.Popen([sys.executable, str(NODES)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdin
        assert it.stdout
        try:
            yield Nodes(it, it.stdout.readline().strip())
        finally:
            it.stdin.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with nodes() as cluster:
        yield cluster.address


@dataclass
class Done:
    status: int
    out: str
    err: str


def begin(*arguments: str, cwd: Path, **variables: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "rlvr_cli", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **variables})


def rlvr(*arguments: str, cwd: Path, status: int = 0, **variables: str) -> Done:
    process = begin(*arguments, cwd=cwd, **variables)
    out, err = process.communicate(timeout=300)
    assert process.returncode == status, out + err
    return Done(process.returncode, out, err)


def workers(mark: str) -> set[str]:
    """The workers of the command that was begun with RLVR_TEST_MARK: on the nodes they have the variable from it."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            ours = f"RLVR_TEST_MARK={mark}\0".encode() in path.with_name("environ").read_bytes()
            if ours and b"rlvr_cli.parallel.child" in path.read_bytes():
                found.add(path.parent.name)
        except OSError:
            pass  # it has just ended
    return found


@pytest.fixture(scope="module")
def one_sampler(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("one")
    rlvr(*EVAL, "--run", "one", cwd=root)
    return root / "runs/one"


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("machine")
    rlvr(*GRPO, *TWO, "--run", "one", cwd=root)
    return root / "runs/one"


def test_trainers_and_samplers_on_two_nodes_give_the_bytes_of_one_machine(address, one_machine: Path, tmp_path: Path):
    done = rlvr(*GRPO, *TWO, "--cluster", address, "--run", "two", cwd=tmp_path)
    assert "n1 (" in done.err
    assert "trainer 0, sampler 0; n2 (" in done.err
    assert weights_of(tmp_path / "runs/two") == weights_of(one_machine)
    assert_ended_as(one_machine, tmp_path / "runs/two")
    assert "raylet" not in done.out


def test_a_sampler_that_dies_is_started_again_and_the_rows_are_those_of_one(address, one_sampler, tmp_path: Path):
    done = rlvr(
        *EVAL, "--samplers", "3", "--cluster", address, "--run", "cut", cwd=tmp_path, RLVR_FAULT="sampler1.completion:2"
    )
    assert "ended with status -9" in done.err
    assert "is started again" in done.err
    assert rows_of(tmp_path / "runs/cut", phase="eval") == rows_of(one_sampler, phase="eval")


def test_a_trainer_that_dies_ends_the_run_which_goes_on_to_the_same_bytes(address, one_machine: Path, tmp_path: Path):
    begun = [*GRPO, *TWO, "--cluster", address, "--run", "cut"]
    done = rlvr(*begun, cwd=tmp_path, status=1, RLVR_FAULT="trainer1.backward:3")
    assert "Trainer 1 on n2 (" in done.err
    assert "ended with status -9" in done.err
    rlvr("grpo", "--resume", "cut", cwd=tmp_path)
    assert_ended_as(one_machine, tmp_path / "runs/cut")


def test_a_command_that_is_killed_leaves_nothing_running(address, tmp_path: Path):
    mark, samplers = uuid.uuid4().hex, ["--samplers", "2", "--cluster", address, "--num-samples", "999"]
    command = begin(*EVAL, *samplers, cwd=tmp_path, RLVR_TEST_MARK=mark)
    until = time.monotonic() + 120
    while not workers(mark) and time.monotonic() < until:
        time.sleep(0.1)
    assert workers(mark)
    command.send_signal(signal.SIGKILL)
    command.communicate()
    until = time.monotonic() + 30
    while workers(mark) and time.monotonic() < until:
        time.sleep(0.1)
    assert not workers(mark)


def test_what_goes_wrong_is_told_before_anything_is_loaded(address, tmp_path: Path):
    for options, said in (
        (f"--samplers 9 --cluster {address}", "The cluster has too little for 9 samplers on CPUs"),
        ("--samplers 2 --cluster 127.0.0.1:1", "There is no cluster at 127.0.0.1:1: [Errno 111] Connection refused"),
        ("--samplers 2 --cluster ray://a:1", "an address is HOST:PORT, or auto"),
    ):
        done = rlvr(*EVAL, *options.split(), cwd=tmp_path, status=1)
        assert said in done.err
        assert "Traceback" not in done.err
    assert not (tmp_path / "runs").exists()


def test_a_node_that_dies_costs_no_row(one_sampler: Path, tmp_path: Path):
    with nodes() as cluster:
        options = ["--samplers", "4", "--cluster", cluster.address, "--run", "cut"]
        mark = uuid.uuid4().hex
        stopped = {"RLVR_FAULT": "sampler1.completion:2:stop", "RLVR_TEST_MARK": mark}
        command = begin(*EVAL, *options, cwd=tmp_path, **stopped)
        rows = tmp_path / "runs/cut"
        until = time.monotonic() + 120
        while len(workers(mark)) < 4 and time.monotonic() < until and command.poll() is None:
            time.sleep(0.1)
        cluster.kill_the_second()
        out, err = command.communicate(timeout=200)
        assert command.returncode == 0, out + err
    assert "n2" in err
    assert rows_of(rows, phase="eval") == rows_of(one_sampler, phase="eval")
