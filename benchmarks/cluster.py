"""Two nodes of a Ray cluster on this machine beside processes of it: steps, weights, messages and a sweep.

    python benchmarks/cluster.py [--only REGEX] [--steps 6] [--repeats 3] [--megabytes 100 1000] [--requests 50000] [--examples 256] [--json FILE]

Each measurement is made in turns, here and on the cluster, and each figure is the median of the repeats:

  step      seconds of a step of `rlvr grpo --preset quickstart --trainers 2 --samplers 2`, without the first two
  weights   seconds until two samplers' processes have read so many bytes that this process has written
  requests  requests a second: each goes to one of two processes, which answers with 64 tokens and their log-probabilities
  sweep     seconds of 8 evaluations: one at a time here, two at a time on the cluster; once, since it takes minutes
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from rows import Row, write

from rlvr_cli.parallel import worker as messages
from rlvr_cli.parallel.shared_memory import SharedMemory
from rlvr_cli.parallel.start import join, reserve, start_worker
from rlvr_cli.parallel.worker import Worker

ROOM = {"num_cpus": 4, "object_store_memory": 4 * 10**9}
TOKENS = 64
WARM_UP = 2
GRPO = (
    "grpo --preset quickstart --trainers 2 --samplers 2 --eval-every 0 --eval-examples 1 --checkpoint-every 0 --run b"
)
SWEEP = 'command = "eval"\nseeds = [0, 1, 2, 3, 4, 5, 6, 7]\n[options]\ndataset = "arithmetic:{examples}"\n'


def read_weights(connection: Connection, *, weights: int) -> None:
    """A sampler's process: read all bytes whenever it is told to, and say so."""
    memory = SharedMemory(weights)
    while True:
        messages.read(connection)
        messages.write(connection, int(np.frombuffer(memory.mapped(), dtype=np.uint8)[::4096].sum()))


def answer(connection: Connection) -> None:
    """A sampler's process: answer each request with as many tokens as an answer has."""
    said = {"tokens": [12345] * TOKENS, "logprobs": [-0.12345678] * TOKENS}
    while True:
        for number in messages.read(connection):
            messages.write(connection, {"number": number, **said})


@contextmanager
def nodes() -> Iterator[str]:
    """Two nodes of this machine, in a process of their own. Gives the cluster's address."""
    words = [sys.executable, __file__, "--nodes"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def be_nodes() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**ROOM, "include_dashboard": False})
    cluster.add_node(**ROOM)
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


def rlvr(*words: str, folder: str) -> float:
    """Seconds that a command takes."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "rlvr_cli", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return time.perf_counter() - started


def step_seconds(steps: int, *cluster: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        rlvr(*GRPO.split(), "--n-grpo-steps", str(steps + WARM_UP), *cluster, folder=folder)
        query = "SELECT value FROM metrics WHERE phase = 'train' AND name = 'step/seconds' ORDER BY step"
        words = [sys.executable, "-m", "rlvr_cli", "analyze", query, "--format", "json"]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
        return statistics.median(row["value"] for row in json.loads(done.stdout)[WARM_UP:])


def sweep_seconds(examples: int, *how: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "eight.toml").write_text(SWEEP.format(examples=examples))
        return rlvr("sweep", "eight.toml", *how, folder=folder)


@contextmanager
def two_workers(entry: str, places: list[str], memory: SharedMemory | None = None) -> Iterator[list[Worker]]:
    reserve(places)
    workers = [
        start_worker("sampler", f"cluster:{entry}", place=place, arguments={}, title=place, hint="", memory=memory)
        for place in places
    ]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def weights_seconds(size: int, places: list[str], repeats: int) -> float:
    memory, found = SharedMemory(), []
    content = np.random.default_rng(0).integers(256, size=size, dtype=np.uint8).tobytes()
    memory.grow(size)
    with two_workers("read_weights", places, memory) as workers:
        for _ in range(repeats + 1):
            started = time.perf_counter()
            memory.mapped()[:size] = content
            memory.writes += 1
            for worker in workers:
                worker.share()
                worker.send("read")
            sums = {worker.receive(within=300) for worker in workers}
            assert len(sums) == 1
            found.append(time.perf_counter() - started)
    memory.close()
    return statistics.median(found[1:])


def requests_per_second(count: int, places: list[str]) -> float:
    with two_workers("answer", places) as workers:
        for worker in workers:  # they have started
            worker.send([0])
            worker.receive(within=60)
        started = time.perf_counter()
        with ThreadPoolExecutor(len(workers)) as pool:  # as samplers are asked: each in a thread, for all at once
            list(pool.map(ask, workers, [range(n, count, len(workers)) for n in range(len(workers))]))
        return count / (time.perf_counter() - started)


def ask(worker: Worker, numbers: Sequence[int]) -> None:
    worker.send([*numbers])
    for number in numbers:
        said = worker.receive(within=60)
        assert said["number"] == number
        assert len(said["tokens"]) == TOKENS


def in_turns(repeats: int, here: Callable[[], float], there: Callable[[], float]) -> tuple[float, float]:
    """The medians of both, measured in turns: on the cluster, and here."""
    pairs = [(there(), here()) for _ in range(repeats)]
    ours, theirs = zip(*pairs, strict=True)
    return statistics.median(ours), statistics.median(theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of measurements")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--nodes", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.nodes:
        return be_nodes()
    path = (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))  # where workers find this file
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    here, rows = ["cpu", "cpu"], []
    with nodes() as address:
        on = ["--cluster", address]
        two = [f"{node.name}/cpu" for node in join(address).nodes]
        wanted: dict[str, tuple[str, str, str, Callable[[], float], Callable[[], float]]] = {
            "step": ("s", "the same without --cluster", "<= 1.1",
                     lambda: step_seconds(args.steps), lambda: step_seconds(args.steps, *on)),
            "requests": ("requests/s", "processes of this machine", ">= 0.1",
                         lambda: requests_per_second(args.requests, here), lambda: requests_per_second(args.requests, two)),
            "sweep": ("s", "one at a time", "<= 0.588",
                      lambda: sweep_seconds(args.examples), lambda: sweep_seconds(args.examples, "--jobs", "2", *on)),
        }  # fmt: skip
        for size in args.megabytes:
            local, remote = (
                lambda places=places, size=size: weights_seconds(size * 10**6, places, args.repeats)
                for places in (here, two)
            )
            wanted[f"weights, {size} MB"] = ("s", "shared memory", "<= 10", local, remote)
        for what, (unit, beside, goal, local, remote) in wanted.items():
            if re.search(args.only, what):
                ours, theirs = in_turns(1 if what == "sweep" else args.repeats, local, remote)
                rows.append(Row(what, "two nodes of one machine", beside, unit, ours, theirs, goal))
                print(f"{what:18} {ours:10.3f} {theirs:10.3f} {unit:10} {ours / theirs:6.2f}  {goal}", flush=True)
    write(args.json, rows)


if __name__ == "__main__":
    main()
