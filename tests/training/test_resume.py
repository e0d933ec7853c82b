"""Training that is killed, stopped, refused or out of disk goes on to the same bits: `rlvr grpo`, `rlvr ei`, `rlvr sft`.

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
import re
import shlex
import shutil
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


@pytest.fixture(scope="module")
def victims(tmp_path_factory) -> Iterator[Victims]:
    paths = [Path(rlvr_cli.__file__).parents[1], Path(checks.__file__).parent]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        victims = Victims(process, tmp_path_factory.mktemp("outputs"))
        yield victims
        for pid in victims.running:
            victims.kill(pid)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=10) == 0


def metrics_of(run: Path) -> dict[tuple[str, int, str], float]:
    """(phase, step, name) -> value, of what is not a measure of the effort: a rollout that is there is not sampled again."""
    import pyarrow.parquet as pq

    path = read_run(run).metrics
    rows = pq.read_table(io.BytesIO(path.read_bytes())).to_pylist() if path else []  # opened once: it may be replaced
    return {
        (r["phase"], r["step"], r["name"]): r["value"]
        for r in rows
        if not r["name"].endswith(("seconds", "per_second")) and r["name"] != "sampling/tokens"
    }


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
    assert [p for p in findings(run) if "is not in the manifest" not in p] == []


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


@pytest.fixture(scope="module")
def whole(victims: Victims, tmp_path_factory) -> Whole:
    root = tmp_path_factory.mktemp("whole")
    victims.run(root, *GRPO, "--run", "whole")
    victims.run(root, *GRPO, "--run", "cut", fault="update:11", status=-signal.SIGKILL)
    whole, cut = root / "runs/whole", root / "runs/cut"
    assert checkpoints_of(cut) == ["step-000008", "step-000010"]
    assert {k[1] for k in metrics_of(whole) if k[2] == "loss/nll"} == set(range(16))
    return Whole(whole, cut, seconds=read_run(whole).metadata["wall_seconds"])


@pytest.fixture
def cut(whole: Whole, tmp_path: Path) -> Path:
    """A copy of the run that was killed."""
    return Path(shutil.copytree(whole.cut, tmp_path / "runs/cut"))


# kill -9


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


def test_grpo_killed_at_30_random_points_ends_the_same(victims: Victims, whole: Whole, tmp_path: Path):
    kill_at_random(victims, tmp_path, whole, kills=30, seed=1)


@pytest.mark.slow
def test_grpo_killed_at_200_random_points_ends_the_same(victims: Victims, whole: Whole, tmp_path: Path):
    kill_at_random(victims, tmp_path, whole, kills=200, seed=2)


def test_grpo_killed_at_every_named_point_in_turn_ends_the_same(victims: Victims, whole: Whole, tmp_path: Path):
    run = tmp_path / "runs/cut"
    passages = (
        "create:1", "write:1", "write.torn:2", "rename:3", "renamed:3", "manifest:1", "manifest.torn:1", "manifest.done:1",
        "update:1", "updated:1", "checkpoint:1", "checkpoint.torn:1", "checkpoint.rename:1", "checkpoint.renamed:2",
        "prune:1", "prune.torn:1",
    )  # fmt: skip
    assert {p.partition(":")[0] for p in passages} == set(POINTS)
    for passage in passages:
        go_on(victims, run, GRPO, fault=passage, status=-signal.SIGKILL)
        assert_readable(run)
    go_on(victims, run, GRPO)
    assert_ended_as(whole.run, run)


@pytest.mark.parametrize(
    "command",
    [
        EI,
        SFT,
        [*GRPO, "--dynamic-sampling", "--max-sampling-rounds", "4"],
        [*GRPO, "--kl-coef", "0.1", "--importance-correction", "truncated"],
        [*GRPO, "--async-steps", "1"],
        pytest.param(
            [*GRPO, "--async-steps", "1", "--dynamic-sampling", "--max-sampling-rounds", "4"], marks=pytest.mark.slow
        ),
    ],
    ids=["ei", "sft", "dynamic-sampling", "kl-and-importance-correction", "async", "async-dynamic-sampling"],
)
def test_other_training_killed_at_some_points_ends_the_same(victims: Victims, tmp_path: Path, command: list[str]):
    whole, run = tmp_path / "runs/whole", tmp_path / "runs/cut"
    go_on(victims, whole, command)
    for fault in ("update:2", "manifest.done:2", "checkpoint.torn:1", "updated:4"):
        go_on(victims, run, command, fault=fault, status=-signal.SIGKILL)
        assert_readable(run)
    go_on(victims, run, command)
    assert_ended_as(whole, run)


@pytest.mark.slow
def test_sampling_ahead_killed_at_40_random_points_ends_the_same(victims: Victims, tmp_path: Path):
    command = [*GRPO, "--async-steps", "1"]
    run = tmp_path / "runs/whole"
    go_on(victims, run, command)
    whole = Whole(run, run, seconds=read_run(run).metadata["wall_seconds"])
    kill_at_random(victims, tmp_path, whole, kills=40, seed=3, command=command)


def test_sampling_ahead_is_stopped_with_its_process(victims: Victims, tmp_path: Path):
    run, command = tmp_path / "runs/cut", [*GRPO, "--async-steps", "1"]
    for fault in ("update:3:term", "update:5"):
        pid = victims.start(tmp_path, *begin_or_resume(run, command), fault=fault)
        while victims.status(pid) is None:
            time.sleep(0.01)
        done = victims.wait(pid)
        assert done.status == (130 if fault.endswith("term") else -signal.SIGKILL), done.output
        deadline = time.monotonic() + 10  # of a process that was killed, the kernel kills the child
        while processes_of(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert processes_of(pid) == []


def test_killed_while_the_final_model_is_written_nothing_is_left_over(victims: Victims, whole: Whole, cut: Path):
    for _ in range(3):
        before = set(os.listdir(cut))
        pid = victims.start(cut.parents[1], "grpo", "--resume", cut)
        while victims.status(pid) is None and not any(p.endswith(".new") for p in set(os.listdir(cut)) - before):
            time.sleep(0.0005)
        victims.kill(pid)
        victims.wait(pid)
    go_on(victims, cut, GRPO)
    assert_ended_as(whole.run, cut)


def test_killed_before_the_last_pruning_two_checkpoints_are_left(victims: Victims, whole: Whole, tmp_path: Path):
    run = tmp_path / "runs/cut"
    go_on(victims, run, GRPO, fault="checkpoint.renamed:8", status=-signal.SIGKILL)
    go_on(victims, run, GRPO)
    assert_ended_as(whole.run, run)


def test_a_finished_run_that_goes_on_stays_as_it_is(victims: Victims, whole: Whole, tmp_path: Path):
    run = Path(shutil.copytree(whole.run, tmp_path / "runs/whole"))
    go_on(victims, run, GRPO)
    assert_ended_as(whole.run, run)


# Responses that are all cut


def test_a_batch_without_a_token_to_train_on_is_skipped(victims: Victims, tiny_model_dir: Path, tmp_path: Path):
    options = [
        "--overlong",
        "mask",
        "--sampling-max-tokens",
        "4",
        "--n-grpo-steps",
        "1",
        "--model",
        str(tiny_model_dir),
    ]
    victims.run(tmp_path, *GRPO, *options, "--run", "r")
    metrics = metrics_of(tmp_path / "runs/r")
    assert [metrics["train", step, "update/skipped"] for step in range(4)] == [1.0] * 4


def test_killed_after_an_update_that_was_skipped_it_ends_the_same(
    victims: Victims, tiny_model_dir: Path, tmp_path: Path
):
    (tmp_path / "odd.py").write_text(
        "def grade(response, truth):\n"
        "    return {'format_reward': 1.0, 'answer_reward': 0.0, 'reward': float(len(response) % 2)}\n"
    )
    command = [
        *GRPO, "--model", str(tiny_model_dir), "--grader", str(tmp_path / "odd.py:grade"), "--overlong", "mask",
        "--sampling-min-tokens", "1", "--sampling-max-tokens", "6", "--stop", "a", "--stop", "e", "--stop", "i", "--stop", "t",
        "--n-grpo-steps", "1", "--group-size", "2", "--train-batch-size", "2", "--gradient-accumulation-steps", "1",
        "--checkpoint-every", "1", "--learning-rate", "1e-3",
    ]  # fmt: skip
    whole, run = tmp_path / "runs/whole", tmp_path / "runs/cut"
    go_on(victims, whole, command)
    metrics = metrics_of(whole)
    skipped = [metrics["train", step, "update/skipped"] for step in range(16)]
    made = skipped[: skipped.index(1.0)].count(0.0)
    assert any(metrics["train", step, "optimizer/grad_norm"] for step in range(made)), "the policy is to move first"
    after_it = f"update:{made + 1}"
    go_on(victims, run, command, fault=after_it, status=-signal.SIGKILL)
    go_on(victims, run, command)
    assert_ended_as(whole, run)


# SIGINT and SIGTERM

LONG = shlex.split(
    "grpo --dataset arithmetic:300 --n-grpo-steps 1 --rollout-batch-size 256 --group-size 8 --train-batch-size 128 "
    "--gradient-accumulation-steps 64 --loss-type grpo_clip --sampling-max-tokens 32 --learning-rate 2e-4 "
    "--eval-dataset arithmetic:1000:7 --eval-examples 1000 --checkpoint-every 0"
)


@pytest.fixture(scope="module")
def long(victims: Victims, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("long") / "runs/long"
    go_on(victims, run, LONG)
    return run


def stop_when(victims: Victims, run: Path, ready: Callable[[], bool], *, number: signal.Signals) -> None:
    """Start the run or go on with it, and stop it by a signal when it is ready."""
    pid = victims.start(run.parents[1], *begin_or_resume(run, LONG))
    while not ready():
        assert victims.status(pid) is None, "it has ended before it could be stopped"
        time.sleep(0.01)
    victims.kill(pid, number)
    assert_stopped(victims.wait(pid), run)
    assert processes_of(pid) == []


def assert_stopped(done: Done, run: Path) -> None:
    assert done.status == 130, done.output
    assert (named := re.search(r"rlvr grpo --resume (\S+)", done.output)), done.output
    assert run.parents[1] / named[1] == run
    assert read_run(run).metadata["status"] == "interrupted"
    assert_readable(run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_grpo_stopped_in_each_phase_goes_on_to_the_same_end(
    victims: Victims, long: Path, tmp_path: Path, number: signal.Signals
):
    run = tmp_path / "runs/cut"
    sampling = lambda: run.exists() and "sampler" in read_run(run).metadata  # noqa: E731
    stop_when(victims, run, sampling, number=number)
    assert read_rollouts(run).num_rows == 0

    evaluating = lambda: (run / "rollouts/eval-000000-0000.parquet").exists()  # noqa: E731
    stop_when(victims, run, evaluating, number=number)
    assert 0 < len(rows_of(run, phase="eval")) < 1000

    updating = lambda: ("eval", 0, "reward/mean") in metrics_of(run)  # noqa: E731
    stop_when(victims, run, updating, number=number)
    assert not (run / "checkpoints").exists()
    assert ("train", 0, "loss/nll") not in metrics_of(run)

    go_on(victims, run, LONG)
    assert_ended_as(long, run, checkpoints=(0,))


def test_a_checkpoint_is_saved_when_training_is_stopped_between_two_updates(
    victims: Victims, long: Path, tmp_path: Path
):
    run = tmp_path / "runs/cut"
    assert_stopped(go_on(victims, run, LONG, fault="update:2:term", status=130), run)
    assert checkpoints_of(run) == ["step-000001"]
    go_on(victims, run, LONG)
    assert_ended_as(long, run, checkpoints=(1,))


@pytest.mark.parametrize(
    "point",
    [
        "updated:3",
        "checkpoint.torn:2",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("write:9", "manifest.torn:2", "prune:1")),
    ],
)
def test_stopped_while_something_is_written_it_goes_on_to_the_same_end(
    victims: Victims, whole: Whole, tmp_path: Path, point: str
):
    run = tmp_path / "runs/cut"
    assert_stopped(go_on(victims, run, GRPO, fault=f"{point}:term", status=130), run)
    go_on(victims, run, GRPO)
    assert_ended_as(whole.run, run)


def test_a_second_ctrl_c_does_not_wait(victims: Victims, tmp_path: Path):
    run = tmp_path / "runs/cut"
    grading = tmp_path / "grading"
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "def grade(response, truth):\n"
        f"    if not pathlib.Path({str(grading)!r}).exists():\n"
        f"        pathlib.Path({str(grading)!r}).touch()\n"
        "        time.sleep(3600)\n"
        "    return {'format_reward': 1.0, 'answer_reward': 0.0, 'reward': float(len(response) % 2)}\n"
    )
    command = [*GRPO, "--grader", str(tmp_path / "slow.py:grade"), "--grader-timeout", "7200"]
    pid = victims.start(tmp_path, *command, "--run", "cut")
    while not grading.exists():
        assert victims.status(pid) is None
        time.sleep(0.01)
    assert processes_of(pid), "the grader's process"
    victims.kill(pid, signal.SIGINT)
    time.sleep(0.2)
    victims.kill(pid, signal.SIGINT)
    assert_stopped(victims.wait(pid), run)
    assert processes_of(pid) == []
    go_on(victims, run, command)
    assert read_run(run).metadata["status"] == "finished"


# What is not gone on with


def refused(victims: Victims, run: Path, *arguments: object, command: str = "grpo") -> str:
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
    done = victims.run(run.parents[1], command, "--resume", run, *arguments, status=1)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"} == before
    return done.output


def test_other_options_are_named(victims: Victims, cut: Path):
    output = refused(victims, cut, "--learning-rate", 2e-3, "--group-size", 8, "--eval-examples", 8)
    assert "--learning-rate 0.0002, not 0.002" in output
    assert "--group-size 4, not 8" in output
    assert "--eval-examples" not in output  # is the same


@pytest.mark.parametrize("command", ["ei", "sft", "eval"])
def test_a_run_of_another_command_is_refused(victims: Victims, cut: Path, command: str):
    assert f"is a run of rlvr grpo, not of rlvr {command}" in refused(victims, cut, command=command)


def test_other_inputs_are_named(victims: Victims, tmp_path: Path):
    from rlvr_cli.models.identity import model_path

    model, data, held_out = tmp_path / "model", tmp_path / "data.jsonl", tmp_path / "held-out.jsonl"
    shutil.copytree(model_path(""), model)
    data.write_text("".join(f'{{"question": "{i} + 3?", "answer": "{i + 3}"}}\n' for i in range(40)))
    held_out.write_text("".join(f'{{"question": "{i} + 4?", "answer": "{i + 4}"}}\n' for i in range(8)))
    command = [*GRPO, "--dataset", "data.jsonl", "--eval-dataset", "held-out.jsonl", "--model", "model"]
    run = tmp_path / "runs/cut"
    victims.run(tmp_path, *command, "--run", "cut", fault="update:3", status=-signal.SIGKILL)
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    for path, changed, named in (
        (data, data.read_bytes().replace(b"7 + 3", b"8 + 3", 1), "its dataset fingerprint was"),
        (held_out, held_out.read_bytes().replace(b"7 + 4", b"8 + 4", 1), "its eval_dataset fingerprint was"),
        (model / "tokenizer_config.json", (model / "tokenizer_config.json").read_bytes() + b"\n", "its model tokenizer_sha256"),
        (model / "model.safetensors", bytes(weights), "its model sha256"),
    ):  # fmt: skip
        was = path.read_bytes()
        path.write_bytes(changed)
        output = refused(victims, run)
        assert named in output
        assert output.count(", now is ") == 1, "only what differs is named"
        path.write_bytes(was)
    go_on(victims, run, command)


def test_two_writers_at_once_are_refused(victims: Victims, whole: Whole, cut: Path):
    pid = victims.start(cut.parents[1], "grpo", "--resume", cut)
    status = read_run(cut).metadata["updated_at"]
    while read_run(cut).metadata["updated_at"] == status:
        assert victims.status(pid) is None
        time.sleep(0.005)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert f"is being written by process {pid}" in refused(victims, cut)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert victims.wait(pid).status == 0
    assert_ended_as(whole.run, cut)


# Checkpoints that are damaged


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    match how:
        case "flipped":
            path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "deleted":
            path.unlink()


@pytest.mark.parametrize(
    ("file", "how"),
    [("model/model.safetensors", "flipped"), ("optimizer.safetensors", "cut"), ("tensors.safetensors", "deleted")],
)
def test_training_goes_on_from_the_checkpoint_before_a_damaged_one(
    victims: Victims, whole: Whole, cut: Path, file: str, how: str
):
    damage(cut / "checkpoints/step-000010" / file, how)
    done = go_on(victims, cut, GRPO)
    assert file in done.output
    assert "Training goes on from step-000008 instead." in done.output
    assert_ended_as(whole.run, cut)


def test_without_an_intact_checkpoint_training_starts_over_from_the_stored_rollouts(
    victims: Victims, whole: Whole, cut: Path
):
    stored = {p.name: (p.stat().st_ino, p.read_bytes()) for p in (cut / "rollouts").iterdir()}
    damage(cut / "checkpoints/step-000010/model/model.safetensors", "flipped")
    damage(cut / "checkpoints/step-000008/state.json", "deleted")
    done = go_on(victims, cut, GRPO)
    assert "training starts over from the stored rollouts" in done.output
    now = {p.name: (p.stat().st_ino, p.read_bytes()) for p in (cut / "rollouts").iterdir()}
    assert stored.items() <= now.items()
    assert_ended_as(whole.run, cut)


# What ends a run early


def assert_newest_checkpoint_is_finite(run: Path) -> None:
    from safetensors.numpy import load_file

    newest = run / "checkpoints" / checkpoints_of(run)[-1]
    for file in ("model/model.safetensors", "optimizer.safetensors"):
        assert all(bool((abs(tensor) < float("inf")).all()) for tensor in load_file(newest / file).values())


def test_updates_that_are_not_finite_end_the_run_and_leave_finite_weights(victims: Victims, tmp_path: Path):
    run = tmp_path / "runs/r"
    options = [
        "--learning-rate",
        "1e30",
        "--epochs-per-rollout-batch",
        "4",
        "--eval-every",
        "0",
        "--checkpoint-every",
        "1",
    ]
    done = go_on(victims, run, [*GRPO, *options], status=1)
    assert "3 updates in a row had a loss or gradient that is not finite" in done.output
    assert "They were skipped, so the checkpoints in runs/r/checkpoints hold finite weights" in done.output
    assert read_run(run).metadata["status"] == "failed"
    assert findings(run) == []
    assert_newest_checkpoint_is_finite(run)
    skipped = [v for k, v in sorted(metrics_of(run).items()) if k[2] == "update/skipped"]
    assert skipped[-3:] == [1.0] * 3
    assert 1.0 not in skipped[:-3]
    assert "not finite" in go_on(victims, run, GRPO, status=1).output


def test_weights_that_have_diverged_are_not_sampled_from(victims: Victims, tmp_path: Path):
    run = tmp_path / "runs/r"
    options = [
        "--learning-rate",
        "1e30",
        "--epochs-per-rollout-batch",
        "1",
        "--train-batch-size",
        "16",
        "--checkpoint-every",
        "1",
    ]
    done = go_on(victims, run, [*GRPO, *options], status=1)
    assert "Its weights have diverged" in done.output
    assert findings(run) == []
    assert_newest_checkpoint_is_finite(run)


def test_a_time_limit_leaves_time_for_the_last_evaluation(victims: Victims, whole: Whole, tmp_path: Path):
    run = tmp_path / "runs/r"
    done = victims.run(tmp_path, *GRPO, "--n-grpo-steps", 100_000, "--time-limit", "3s", "--run", "r")
    assert "time limit 3s: stopping after" in done.output
    metadata = read_run(run).metadata
    assert metadata["status"] == "finished"
    assert metadata["updates"] < 400_000
    assert max(r["step"] for r in rows_of(run, phase="eval")) == metadata["updates"]
    assert len([r for r in rows_of(run, phase="eval") if r["step"] == metadata["updates"]]) == 8
    assert (run / "model/config.json").exists()


def test_a_run_that_ran_out_of_time_goes_on_with_more(victims: Victims, whole: Whole, tmp_path: Path):
    run = tmp_path / "runs/r"
    victims.run(tmp_path, *GRPO, "--time-limit", "0.5s", "--run", "r")
    victims.run(tmp_path, "grpo", "--resume", "r", "--time-limit", "1h")
    assert weights_of(run) == weights_of(whole.run)
    assert rows_of(run, phase="train") == rows_of(whole.run, phase="train")


@pytest.mark.parametrize(
    "point",
    [
        *("write:1", "write:5", "checkpoint.torn:2"),
        *(
            pytest.param(p, marks=pytest.mark.slow)
            for p in ("write:2", "write:3", "write.torn:9", "manifest.torn:2", "checkpoint:1")
        ),
    ],
)
def test_a_full_disk_is_two_lines_and_a_run_that_goes_on(victims: Victims, whole: Whole, tmp_path: Path, point: str):
    run = tmp_path / "runs/cut"
    done = go_on(victims, run, GRPO, fault=f"{point}:enospc", status=1)
    *_, problem, hint = done.output.splitlines()
    assert problem.startswith("error: Cannot write ")
    assert problem.endswith(": No space left on device.")
    assert hint.startswith("  Free some space")
    assert_readable(run)
    go_on(victims, run, GRPO)
    assert_ended_as(whole.run, run)


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
        os.environ[MARK] = str(os.getpid())
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
