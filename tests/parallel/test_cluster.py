"""Runs on a Ray cluster of two nodes, as a user starts them: the bytes of one machine, and what happens when something dies."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forks import Call, Done, Forks
from killed import GRPO, assert_ended_as, rows_of, weights_of

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.slow

NODES = Path(__file__).parents[1] / "helpers/processes/nodes.py"
EVAL = shlex.split("eval --dataset arithmetic:24 --num-samples 2 --sampling-max-tokens 16 --max-batch-size 1")
TWO = shlex.split("--trainers 2 --samplers 2 --kl-coef 0.01 --max-batch-size 1")
ARMS = (
    'command = "eval"\nseeds = [0]\n[grid]\nsampling_temperature = [0.5, 1.0]\n[options]\ndataset = "arithmetic:24"\n'
)
SECONDS = 120.0  # for what must happen


@dataclass
class Nodes:
    """The process of `nodes.py`, and the address of its cluster."""

    process: subprocess.Popen
    address: str

    def order(self, what: str) -> None:
        assert self.process.stdin
        assert self.process.stdout
        print(what, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with subprocess.Popen([sys.executable, str(NODES)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdin
        assert it.stdout
        try:
            yield Nodes(it, it.stdout.readline().strip())
        finally:
            it.stdin.close()


@pytest.fixture(scope="module")
def rlvr(forks: Forks, cluster: Nodes) -> Callable[..., Done]:
    """Runs `rlvr` on the cluster."""

    def run(*arguments: str, cwd: Path, status: int = 0, **how: str) -> Done:
        return forks.run(*arguments, "--cluster", cluster.address, cwd=cwd, status=status, limit=2 * SECONDS, **how)

    return run


def begin(forks: Forks, cluster: Nodes, *arguments: str, cwd: Path, mark: str, fault: str = "") -> Call:
    how = {"environment": {"RLVR_TEST_MARK": mark}, "fault": fault}
    return forks.start(*arguments, "--cluster", cluster.address, cwd=cwd, **how)


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


def wait_for(happened: Callable[[], bool], seconds: float = SECONDS) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.fixture(scope="module")
def one_sampler(forks: Forks, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("one")
    forks.run(*EVAL, "--run", "one", cwd=root, status=0)
    return root / "runs/one"


@pytest.fixture(scope="module")
def one_machine(forks: Forks, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("machine")
    forks.run(*GRPO, *TWO, "--run", "one", cwd=root, status=0)
    return root / "runs/one"


def test_trainers_and_samplers_on_two_nodes_give_the_bytes_of_one_machine(rlvr, one_machine: Path, tmp_path: Path):
    done = rlvr(*GRPO, *TWO, "--run", "two", cwd=tmp_path)
    assert "n1 (" in done.err
    assert "trainer 0, sampler 0; n2 (" in done.err
    assert weights_of(tmp_path / "runs/two") == weights_of(one_machine)
    assert_ended_as(one_machine, tmp_path / "runs/two")
    assert "raylet" not in done.out


def test_a_sampler_that_dies_is_started_again_and_the_rows_are_those_of_one(rlvr, one_sampler, tmp_path: Path):
    done = rlvr(*EVAL, "--samplers", "3", "--run", "cut", cwd=tmp_path, fault="sampler1.completion:2")
    assert "ended with status -9" in done.err
    assert "is started again" in done.err
    assert rows_of(tmp_path / "runs/cut", phase="eval") == rows_of(one_sampler, phase="eval")


def test_a_trainer_that_dies_ends_the_run_which_goes_on_to_the_same_bytes(rlvr, one_machine: Path, tmp_path: Path):
    done = rlvr(*GRPO, *TWO, "--run", "cut", cwd=tmp_path, status=1, fault="trainer1.backward:3")
    assert "Trainer 1 on n2 (" in done.err
    assert "ended with status -9" in done.err
    rlvr("grpo", "--resume", "cut", cwd=tmp_path)
    assert_ended_as(one_machine, tmp_path / "runs/cut")


def test_a_command_that_is_killed_leaves_nothing_running(forks, cluster, tmp_path: Path):
    mark = uuid.uuid4().hex
    call = begin(forks, cluster, *EVAL, "--samplers", "2", "--num-samples", "999", cwd=tmp_path, mark=mark)
    wait_for(lambda: bool(workers(mark)))
    forks.send(call, signal.SIGKILL)
    wait_for(lambda: not workers(mark), seconds=30)
    forks.wait(call)


def test_what_goes_wrong_is_told_before_anything_is_loaded(forks, cluster, tmp_path: Path):
    for options, said in (
        (f"--samplers 9 --cluster {cluster.address}", "The cluster has too little for 9 samplers on CPUs"),
        ("--samplers 2 --cluster 127.0.0.1:1", "There is no cluster at 127.0.0.1:1: [Errno 111] Connection refused"),
        ("--samplers 2 --cluster ray://a:1", "an address is HOST:PORT, or auto"),
    ):
        assert said in forks.run(*EVAL, *options.split(), cwd=tmp_path, status=1).err
    assert not (tmp_path / "runs").exists()


def sweep_words(folder: Path, *options: str) -> list[str]:
    (folder / "arms.toml").write_text(ARMS)
    return ["sweep", "arms.toml", *EVAL[3:], "--format", "json", *options]


@pytest.fixture(scope="module")
def one_at_a_time(forks: Forks, tmp_path_factory) -> tuple[Path, Done]:
    """A sweep of this machine, and what it printed."""
    root = tmp_path_factory.mktemp("sweep")
    return root, forks.run(*sweep_words(root), cwd=root, status=0)


def tables_of(done: Done) -> list:
    """The tables that a sweep printed, without how long the runs took."""
    return [{k: v for k, v in row.items() if k != "minutes"} for rows in json.loads(done.out).values() for row in rows]


def test_a_sweep_on_two_nodes_gives_the_report_of_one_at_a_time(rlvr, one_at_a_time, tmp_path: Path):
    root, one = one_at_a_time
    done = rlvr(*sweep_words(tmp_path, "--jobs", "2"), cwd=tmp_path)
    assert "): run 0; n2 (" in done.err
    assert tables_of(done) == tables_of(one)
    assert (tmp_path / "runs/arms/report.html").exists()
    assert_same_rows(root, tmp_path)


def assert_same_rows(one: Path, other: Path) -> None:
    names = [path.name for path in (one / "runs/arms").glob("*-s0")]
    assert len(names) == 2
    for name in names:
        a, b = (rows_of(root / "runs/arms" / name, phase="eval") for root in (one, other))
        assert a == b


def test_a_sweep_goes_on_elsewhere_when_a_node_dies_and_the_node_that_comes_back_is_used(
    forks, cluster, rlvr, one_at_a_time, tmp_path: Path
):
    root, one = one_at_a_time
    words, mark = sweep_words(tmp_path, "--jobs", "2"), uuid.uuid4().hex
    call = begin(forks, cluster, *words, cwd=tmp_path, mark=mark, fault="sampling_temperature-1-s0.sampled:1:stop")
    wait_for(lambda: bool(stopped(mark)))
    (pid,) = stopped(mark)
    host = parent(pid)
    cluster.order("kill")
    wait_for(lambda: parent(pid) != host)
    os.kill(int(pid), signal.SIGKILL)  # its machine would be gone with it
    wait_for(lambda: bool(stopped(mark) - {pid}))  # where it goes on
    (again,) = stopped(mark) - {pid}
    os.kill(int(again), signal.SIGCONT)
    done = forks.wait(call, limit=2 * SECONDS)
    assert done.status == 0, done.said
    assert "The run sampling_temperature-1-s0 on n2 (" in done.err
    assert "sampling_temperature-1-s0: goes on" in done.err
    assert tables_of(done) == tables_of(one)
    assert_same_rows(root, tmp_path)
    shrunk = rlvr(*words, "--dry-run", cwd=tmp_path, status=0)
    assert "): run 0, run 1\n" in shrunk.err
    cluster.order("add")
    assert "): run 0; n2 (" in rlvr(*words, "--dry-run", cwd=tmp_path, status=0).err


def parent(pid: str) -> str:
    return Path("/proc", pid, "stat").read_text().rpartition(") ")[2].split()[1]


def stopped(mark: str) -> set[str]:
    """Those of the workers that were sent SIGSTOP."""
    return {pid for pid in workers(mark) if Path("/proc", pid, "stat").read_text().rpartition(") ")[2][0] == "T"}


def test_the_doctor_looks_at_each_node(rlvr, tmp_path: Path):
    done = rlvr("doctor", "--quick", "--format", "json", cwd=tmp_path)
    rows = json.loads(done.out)["Cluster"]
    assert [row["what"].partition(" ")[0] for row in rows] == ["n1", "n2"]
    assert {(row["verdict"], row["found"]) for row in rows} == {("ok", "3 CPUs, 0 GPUs")}
    done = rlvr("doctor", "--quick", "--format", "json", "--model", "./nowhere", cwd=tmp_path, status=1)
    rows = {row["what"]: row for row in json.loads(done.out)["Cluster"]}
    assert rows["n2: model"]["verdict"] == "problem"
    assert "n1: model; n2: model" in done.err
    assert list(tmp_path.iterdir()) == []
