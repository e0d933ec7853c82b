"""Runs on a Ray cluster of two nodes, as a user starts them: the bytes of one machine, and what happens when something dies."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from forks import Call, Done, Forks
from killed import GRPO, assert_ended_as, assert_readable, assert_same_rows, begin_or_resume, rows_of, weights_of

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.slow

NODES = Path(__file__).parents[1] / "helpers/processes/nodes.py"
EVAL = shlex.split("eval --dataset arithmetic:24 --num-samples 2 --sampling-max-tokens 16 --max-batch-size 1")
TWO = shlex.split("--trainers 2 --samplers 2 --kl-coef 0.01 --max-batch-size 1")
ARMS = (
    'command = "eval"\nseeds = [0]\n[grid]\nsampling_temperature = [0.5, 1.0]\n[options]\ndataset = "arithmetic:24"\n'
)
EPISODES = """
from rlvr_cli.environments import Reply

class Sums:
    stop = (",",)
    marker = "(said)"

    def begin(self, example, seed):
        self.seed = seed

    def answer(self, turn):
        return Reply(f"(said) {len(turn)} {self.seed % 7}", reward=float(len(turn) % 2), role="teacher")
"""
IMPATIENT = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",  # else a minute until Ray gives its head up
    "RAY_health_check_period_ms": "300",  # five refused connections are a death: else after 15 seconds
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_enable_worker_prestart": "0",  # else each command starts six processes that nobody needs
    "RAY_prestart_worker_first_driver": "0",
}
EACH_ITS_OWN = """
import json, sys
from rlvr_cli.errors import RlvrError
from rlvr_cli.parallel.start import join, reserve, start_worker

nodes = join(sys.argv[1]).nodes
(name,) = [node.name for node in nodes if node.gpus]
places = [f"{name}/cuda:0", f"{name}/cuda:1", f"{nodes[0].name}/cpu"]
reserve(places)
workers = [start_worker("w", "working:answer", place=at, arguments={"greeting": ""}, title=at, hint="") for at in places]
seen = []
for worker in workers:
    worker.receive()
    worker.send("CUDA_VISIBLE_DEVICES")
    seen.append(worker.receive()["environment"])
worker.send({})
try:
    worker.receive()
except RlvrError as error:
    seen.append(error.problem)
for worker in workers:
    worker.kill()
print(json.dumps(seen))
"""
KILLS, KILL_WITHIN = 20, 25.0  # seconds after the first process has started
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
    pipe = subprocess.PIPE
    environment = {**os.environ, **IMPATIENT}
    with subprocess.Popen([sys.executable, str(NODES)], stdin=pipe, stdout=pipe, text=True, env=environment) as it:
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
    environment = {"RLVR_TEST_MARK": mark, **IMPATIENT}
    return forks.start(*arguments, "--cluster", cluster.address, cwd=cwd, environment=environment, fault=fault)


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


def state_of(pid: str) -> list[str]:
    """A process's state and its parent; empty if it has ended."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(") ")[2].split()[:2]
    except OSError:
        return []


def processor_seconds(pid: int) -> float:
    """What a process has computed so far."""
    ticks = Path("/proc", str(pid), "stat").read_text().rpartition(") ")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def stopped(mark: str) -> set[str]:
    """Those of the workers that were sent SIGSTOP."""
    return {pid for pid in workers(mark) if state_of(pid)[:1] == ["T"]}


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
    assert "died" not in done.err


def test_a_sampler_that_dies_is_started_again_and_episodes_are_those_of_one(forks, rlvr, tmp_path: Path):
    (tmp_path / "mine.py").write_text(EPISODES)
    words = [*EVAL, "--limit", "8", "--environment", "mine.py:Sums", "--max-turns", "3"]
    forks.run(*words, "--run", "one", cwd=tmp_path, status=0)
    done = rlvr(*words, "--samplers", "2", "--run", "two", cwd=tmp_path, fault="sampler1.completion:2")
    assert "ended with status -9" in done.err
    assert "is started again" in done.err
    one, two = (tmp_path / "runs" / name for name in ("one", "two"))
    assert_same_rows(one, two, phase="eval")  # episodes that wait for the environment keep their place in the batch
    assert {row["episode"]["num_turns"] for row in rows_of(one, phase="eval")} - {1}


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
        ("--samplers 2 --cluster [::1]:1", "There is no cluster at [::1]:1: [Errno 111] Connection refused"),
        ("--samplers 2 --cluster ray://a:1", "an address is HOST:PORT, or auto"),
    ):
        assert said in forks.run(*EVAL, *options.split(), cwd=tmp_path, status=1).err
    assert not (tmp_path / "runs").exists()


def test_each_worker_sees_the_gpu_that_is_kept_for_it_and_its_last_words_arrive(cluster):
    cluster.order("gpus")
    path = os.pathsep.join([str(NODES.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", EACH_ITS_OWN, cluster.address]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    cluster.order("no gpus")
    assert done.returncode == 0, done.stderr
    *on_gpus, on_cpu, last_words = json.loads(done.stdout)
    assert sorted(on_gpus) == ["0", "1"]
    assert not on_cpu
    assert ") ended with status 1." in last_words
    assert "TypeError" in last_words


def test_the_doctor_looks_at_each_node(cluster, tmp_path: Path):
    """It looks for few packages here: each is imported in a process of its own. Runs for object storage are made on this machine."""
    pytest.importorskip("obstore", reason="needs the extra storage")
    pytest.importorskip("moto", reason="needs the extra storage-test")
    from s3 import s3_server, variables

    code = "from rlvr_cli.commands import doctor as d; d.PACKAGES, d.EXTRAS = ('pyarrow',), {'ray': 'ray'}"
    words = ["doctor", "--quick", "--format", "json", "--model", "./nowhere", "--cluster", cluster.address]
    words += ["--runs-dir", "s3://bucket/runs"]
    command = [sys.executable, "-c", f"{code}; from rlvr_cli.cli import main; main()", *words]
    with s3_server() as server:
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **variables(server), "RLVR_CACHE_DIR": str(tmp_path)},
            capture_output=True, text=True, timeout=2 * SECONDS, check=False,
        )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "2 things do not work: n1: model; n2: model" in done.stderr
    rows = json.loads(done.stdout)["Cluster"]
    assert [row["what"].partition(" ")[0] for row in rows] == ["n1", "n1:", "n2", "n2:"]
    assert {(row["verdict"], row["found"]) for row in rows[::2]} == {("ok", "3 CPUs, 0 GPUs")}
    assert {row["verdict"] for row in rows[1::2]} == {"problem"}
    assert not list(tmp_path.rglob("*doctor*")), "the file that the nodes looked for"


def test_a_node_that_dies_costs_no_row(forks, cluster, one_sampler: Path, tmp_path: Path):
    """Until it dies, the command waits for it, and does not do so by looking again and again."""
    mark, words = uuid.uuid4().hex, [*EVAL, "--samplers", "2", "--run", "cut"]
    call = begin(forks, cluster, *words, cwd=tmp_path, mark=mark, fault="sampler1.completion:2:stop")
    wait_for(lambda: bool(stopped(mark)))
    time.sleep(2)  # the other one has answered what it was asked
    busy = processor_seconds(call.pid)
    time.sleep(4)
    assert processor_seconds(call.pid) - busy < 0.4
    cluster.order("kill")
    done = forks.wait(call, limit=2 * SECONDS)
    assert done.status == 0, done.said
    assert "n2" in done.err
    assert rows_of(tmp_path / "runs/cut", phase="eval") == rows_of(one_sampler, phase="eval")
    cluster.order("add")


def test_a_trainer_that_dies_ends_the_run_which_goes_on_to_the_same_bytes_on_a_cluster_that_shrank(
    rlvr, cluster, one_machine: Path, tmp_path: Path
):
    done = rlvr(*GRPO, *TWO, "--run", "cut", cwd=tmp_path, status=1, fault="trainer1.backward:3")
    assert "Trainer 1 on n2 (" in done.err
    assert "ended with status -9" in done.err
    cluster.order("kill")
    done = rlvr("grpo", "--resume", "cut", cwd=tmp_path, status=1)
    assert "too little for 2 trainers on CPUs and 2 samplers on CPUs: it has n1 (" in done.err
    rlvr("grpo", "--resume", "cut", "--samplers", "1", cwd=tmp_path)
    assert_ended_as(one_machine, tmp_path / "runs/cut")
    cluster.order("add")


def sweep_words(folder: Path, *options: str) -> list[str]:
    (folder / "arms.toml").write_text(ARMS)
    return ["sweep", "arms.toml", *EVAL[3:], "--format", "json", *options]


def tables_of(done: Done) -> list:
    """The tables that a sweep printed, without how long the runs took."""
    return [{k: v for k, v in row.items() if k != "minutes"} for rows in json.loads(done.out).values() for row in rows]


def test_a_sweep_of_which_a_node_dies_and_comes_back_gives_the_report_of_one_at_a_time(
    forks, cluster, rlvr, tmp_path: Path
):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    alone = forks.run(*sweep_words(one), cwd=one, status=0)
    words, mark = sweep_words(two, "--jobs", "2"), uuid.uuid4().hex
    call = begin(forks, cluster, *words, cwd=two, mark=mark, fault="sampling_temperature-1-s0.sampled:1:stop")
    wait_for(lambda: bool(stopped(mark)))
    (pid,) = stopped(mark)
    there = state_of(pid)
    cluster.order("kill")
    wait_for(lambda: state_of(pid) != there)
    with suppress(ProcessLookupError):
        os.kill(int(pid), signal.SIGKILL)  # its machine would be gone with it
    wait_for(lambda: bool(stopped(mark) - {pid}))  # where it goes on
    (again,) = stopped(mark) - {pid}
    os.kill(int(again), signal.SIGCONT)
    done = forks.wait(call, limit=2 * SECONDS)
    assert done.status == 0, done.said
    assert "): run 0; n2 (" in done.err
    assert "The run sampling_temperature-1-s0 on n2 (" in done.err
    assert "sampling_temperature-1-s0: goes on" in done.err
    assert tables_of(done) == tables_of(alone)
    assert (two / "runs/arms/report.html").exists()
    names = [path.name for path in (one / "runs/arms").glob("*-s0")]
    assert len(names) == 2
    for name in names:
        found, expected = (rows_of(root / "runs/arms" / name, phase="eval") for root in (two, one))
        assert found == expected
    assert "): run 0, run 1\n" in rlvr(*words, "--dry-run", cwd=two).err
    cluster.order("add")
    assert "): run 0; n2 (" in rlvr(*words, "--dry-run", cwd=two).err


def workers_of(mark: str, role: str) -> list[str]:
    found = [pid for pid in workers(mark) if role in cmdline(pid)]
    return sorted(found, key=int)


def cmdline(pid: str) -> str:
    try:
        return Path("/proc", pid, "cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.full
def test_kills_at_random_lose_no_row_and_double_none(forks, cluster, one_machine: Path, tmp_path: Path):
    """A sampler, a trainer, a node or the command dies, at any moment from the start of the first process on."""
    draw, killed, number = random.Random(KILLS), Counter[str](), 0
    while killed.total() < KILLS:
        run, done = tmp_path / f"runs/cut-{number}", None
        while done is None or done.status:
            mark, what = uuid.uuid4().hex, draw.choice(("sampler", "trainer", "node", "command"))
            call = begin(forks, cluster, *begin_or_resume(run, [*GRPO, *TWO]), cwd=tmp_path, mark=mark)
            wait_for(lambda: bool(workers(mark)) or forks.status(call) is not None)  # noqa: B023  # called at once
            time.sleep(draw.uniform(0, KILL_WITHIN))
            role = {"sampler": "samplers.parallel", "trainer": "training.parallel"}.get(what, "")
            if killed.total() < KILLS and forks.status(call) is None and (found := workers_of(mark, role)):
                killed[what] += 1
                if what == "command":
                    forks.send(call, signal.SIGKILL)
                elif what == "node":
                    cluster.order("kill")
                    cluster.order("add")
                else:
                    os.kill(int(draw.choice(found)), signal.SIGKILL)
            done = forks.wait(call, limit=2 * SECONDS)
            assert not done.hung, (what, done.said)
            assert done.status in (0, 1, -signal.SIGKILL), (what, done.said)
            assert "Traceback" not in done.said, (what, done.said)
            wait_for(lambda: not workers(mark), seconds=30)  # noqa: B023  # called at once
            assert_readable(run)
            print(what, done.status, dict(killed), flush=True)
        assert_ended_as(one_machine, run)
        number += 1


def test_a_head_that_dies_ends_the_run_which_goes_on_without_a_cluster(forks, cluster, one_sampler, tmp_path: Path):
    """The last test: nothing is left of the cluster."""
    mark, words = uuid.uuid4().hex, [*EVAL, "--samplers", "2", "--run", "cut"]
    call = begin(forks, cluster, *words, cwd=tmp_path, mark=mark, fault="sampler1.completion:3:stop")
    wait_for(lambda: bool(stopped(mark)))
    cluster.order("head")
    assert forks.wait(call, limit=SECONDS).status == 1
    wait_for(lambda: not workers(mark), seconds=30)
    forks.run("eval", "--resume", "cut", "--cluster", "", "--samplers", "1", cwd=tmp_path, status=0)
    assert rows_of(tmp_path / "runs/cut", phase="eval") == rows_of(one_sampler, phase="eval")
