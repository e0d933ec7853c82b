"""Commands that are killed, stopped or out of disk, and what they must be like when they have gone on.

Run as a program this file is the parent of those that are killed: for each order on stdin, one JSON object per line, it
forks a child that has torch imported already and runs a command ({"arguments": [...], "cwd": ..., "output": FILE, "fault":
RLVR_FAULT or null}; answered by the child's pid), or says how one stands ({"poll": pid}; answered by its exit status, null
while it runs).
"""

import contextlib
import io
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

import checks
import rlvr_cli
from checks import findings
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.readers import read_rollouts, read_run

MARK = "RLVR_TEST_OF"  # in the environment of a command and of all that it starts
UNLIKE = ("run_id", "sampled_at")  # what two runs of the same work may differ in
# Of evaluations, whose last bits depend on who is asked together: what was held is not asked again.
ROUNDED = ("sampled_logprobs", "mean_logprob", "mean_entropy")
KEY = ["phase", "step", "example_id", "sample_index"]
LIMIT = 120  # seconds after which a command counts as hung

# Every point that a training run passes.
POINTS = (
    "create", "write", "write.torn", "rename", "renamed", "manifest", "manifest.torn", "manifest.done", "update", "updated",
    "checkpoint", "checkpoint.torn", "checkpoint.rename", "checkpoint.renamed", "prune", "prune.torn",
    "sampled", "graded", "backward",
)  # fmt: skip
GRPO = shlex.split(
    "grpo --dataset arithmetic:64 --n-grpo-steps 4 --rollout-batch-size 16 --group-size 4 --train-batch-size 8 "
    "--gradient-accumulation-steps 2 --epochs-per-rollout-batch 2 --loss-type grpo_clip --sampling-max-tokens 32 "
    "--learning-rate 2e-4 --eval-examples 8 --eval-every 3 --checkpoint-every 2"
)
EI = shlex.split(
    "ei --dataset arithmetic:64 --n-ei-steps 3 --ei-batch-size 12 --group-size 4 --train-batch-size 6 --micro-batch-size 3 "
    "--sft-epochs 2 --sampling-max-tokens 24 --learning-rate 1e-3 --eval-examples 8 --checkpoint-every 2"
)
SFT = shlex.split(
    "sft --dataset arithmetic:64 --train-batch-size 8 --micro-batch-size 4 --sft-epochs 2 --learning-rate 1e-3 "
    "--sampling-max-tokens 24 --eval-examples 8 --eval-every 5 --checkpoint-every 3"
)


@dataclass
class Done:
    """How a command ended, and all that it printed."""

    status: int
    output: str


@dataclass
class Victims:
    """The parent of the commands."""

    process: subprocess.Popen
    outputs: Path

    def __post_init__(self) -> None:
        self._numbers = count()
        self._output: dict[int, Path] = {}
        self._ended: dict[int, int] = {}

    def _order(self, **order: object) -> int | None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    @property
    def running(self) -> list[int]:
        """Those that nobody has waited for."""
        return list(self._output)

    def start(self, cwd: Path, *arguments: object, fault: str | None = None) -> int:
        """Run `rlvr ARGUMENTS` in that directory; its pid."""
        output = self.outputs / str(next(self._numbers))
        pid = self._order(arguments=[*map(str, arguments)], cwd=str(cwd), output=str(output), fault=fault)
        assert pid is not None
        self._ended.pop(pid, None)
        self._output[pid] = output
        return pid

    def status(self, pid: int) -> int | None:
        """The exit status of a command that has ended, negative for a signal; None while it runs."""
        if pid not in self._ended and (status := self._order(poll=pid)) is not None:
            self._ended[pid] = status
        return self._ended.get(pid)

    def wait(self, pid: int) -> Done:
        deadline = time.monotonic() + LIMIT
        while (status := self.status(pid)) is None:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        done = Done(status, self._output.pop(pid).read_text())
        assert time.monotonic() < deadline, f"hung: {done.output}"
        assert "Traceback" not in done.output, done.output
        return done

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a command, unless it has ended."""
        if self.status(pid) is None:
            os.kill(pid, number)

    def run(self, cwd: Path, *arguments: object, fault: str | None = None, status: int = 0) -> Done:
        done = self.wait(self.start(cwd, *arguments, fault=fault))
        assert done.status == status, done.output
        return done


@contextlib.contextmanager
def open_victims(outputs: Path) -> Iterator[Victims]:
    """Start the parent; what it prints for each command goes to a file in `outputs`."""
    paths = [Path(rlvr_cli.__file__).parents[1], Path(checks.__file__).parent]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        victims = Victims(process, outputs)
        yield victims
        for pid in victims.running:
            victims.kill(pid)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=10) == 0


def metrics_of(run: Path) -> dict[tuple[str, int, str], float]:
    """(phase, step, name) -> value, of what is not a duration; of the durations of sampling 0: they must be there."""
    import pyarrow.parquet as pq

    path = read_run(run).metrics
    rows = pq.read_table(io.BytesIO(path.read_bytes())).to_pylist() if path else []  # opened once: it may be replaced
    values = {}
    for r in rows:
        duration = r["name"].endswith(("seconds", "per_second"))
        if not duration or r["name"].startswith(("sampling/", "grading/")):
            values[r["phase"], r["step"], r["name"]] = 0.0 if duration else r["value"]
    return values


def rows_of(run: Path, *, phase: str) -> list[dict]:
    rows = [{k: v for k, v in r.items() if k not in UNLIKE} for r in read_rollouts(run).to_pylist()]
    return sorted(
        (r for r in rows if r["phase"] == phase), key=lambda r: (r["step"], r["example_id"], r["sample_index"])
    )


def weights_of(run: Path) -> bytes:
    return (run / "model/model.safetensors").read_bytes()


def checkpoints_of(run: Path) -> list[str]:
    return sorted(os.listdir(run / "checkpoints")) if (run / "checkpoints").exists() else []


def assert_readable(run: Path) -> None:
    """What anyone sees of a run that was killed: whole rows, each once."""
    if not run.exists():
        return
    keys = Counter(map(tuple, zip(*read_rollouts(run).select(KEY).to_pydict().values(), strict=True)))
    assert set(keys.values()) <= {1}
    assert check_run(run).problems == []


def assert_ended_as(whole: Path, run: Path, *, checkpoints: tuple[int, ...] = (2,)) -> None:
    """What a run is that was cut short and went on: the one that was not, to the last bit."""
    assert read_run(run).metadata["status"] == "finished"
    assert findings(run) == []
    assert weights_of(run) == weights_of(whole)
    assert rows_of(run, phase="train") == rows_of(whole, phase="train")
    for a, b in zip(rows_of(run, phase="eval"), rows_of(whole, phase="eval"), strict=True):
        assert {k: v for k, v in a.items() if k not in ROUNDED} == {k: v for k, v in b.items() if k not in ROUNDED}
        for name in ROUNDED:
            assert a[name] == pytest.approx(b[name], abs=1e-5), name
    metrics, expected = metrics_of(run), metrics_of(whole)
    assert metrics.keys() == expected.keys()
    for key, value in metrics.items():
        exact = key[0] == "train"
        assert value == pytest.approx(expected[key], nan_ok=True, rel=0 if exact else 1e-5, abs=0 if exact else 1e-5), (
            key
        )
    assert len(checkpoints_of(run)) in checkpoints
    assert set(os.listdir(run)) - {"checkpoints"} == set(os.listdir(whole)) - {"checkpoints"}, "something is left over"


def begin_or_resume(run: Path, command: list[str]) -> list[str]:
    return [command[0], "--resume", str(run)] if run.exists() else [*command, "--run", run.name]


def go_on(victims: Victims, run: Path, command: list[str], *, fault: str | None = None, status: int = 0) -> Done:
    return victims.run(run.parents[1], *begin_or_resume(run, command), fault=fault, status=status)


def processes_of(pid: int) -> list[str]:
    """What still runs of all that a command has started."""
    mark, found = f"{MARK}={pid}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text())
    return found


@dataclass
class Whole:
    """GRPO in two runs: one that nothing disturbed in so many seconds, and one that was killed within its third batch."""

    run: Path
    cut: Path
    seconds: float


def kill_at_random(
    victims: Victims, root: Path, whole: Whole, *, kills: int, seed: int, command: list[str] = GRPO
) -> None:
    """Kill a run and the run that goes on from it, again and again until it has ended; then the next one."""
    generator = random.Random(seed)
    killed = 0
    for number in count():
        run = root / f"runs/cut-{number}"
        while killed < kills:
            fault = f"{generator.choice(POINTS)}:{generator.randint(1, 4)}" if generator.random() < 0.3 else None
            pid = victims.start(root, *begin_or_resume(run, command), fault=fault)
            if fault is None:
                time.sleep(generator.uniform(0, 0.7 * whole.seconds))
                victims.kill(pid)
            status = victims.wait(pid).status
            assert_readable(run)
            if status == 0:
                break
            assert status == -signal.SIGKILL
            killed += 1
        else:
            go_on(victims, run, command)
        assert_ended_as(whole.run, run)
        if killed == kills:
            return


# The program


def serve() -> None:
    """The parent of the commands."""
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401
    import torch

    from rlvr_cli.cli import main
    from rlvr_cli.commands import (
        sft,  # noqa: F401
    )
    from rlvr_cli.models.identity import model_path
    from rlvr_cli.models.policy import load_policy

    torch.set_num_threads(1)
    load_policy(model_path(""), dtype="float32", device="cpu")  # imports what transformers imports late
    for line in sys.stdin:
        order = json.loads(line)
        if "poll" in order:
            pid, status = os.waitpid(order["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                _become(main, order)
        os.write(1, json.dumps(answer).encode() + b"\n")


def _become(main: Callable[[], None], order: dict) -> None:
    status = 70
    try:
        os.chdir(order["cwd"])
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT, 0o666)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ[MARK] = os.environ[f"RLVR_GRADER_{MARK}"] = str(os.getpid())  # the second is for graders
        if order["fault"]:
            os.environ["RLVR_FAULT"] = order["fault"]
        sys.argv = ["rlvr", *order["arguments"]]
        main()
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else 0 if e.code is None else 71
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
