"""Commands that are killed, stopped or out of disk, and what they must be like when they have gone on."""

import io
import json
import os
import random
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from checks import findings
from forks import Done, Forks
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.readers import ENDED, read_rollouts, read_run

UNLIKE = ("run_id", "sampled_at")  # what two runs of the same work may differ in
# Of evaluations, whose last bits depend on who is asked together: what was held is not asked again.
ROUNDED = ("sampled_logprobs", "mean_logprob", "mean_entropy")
KEY = ["phase", "step", "example_id", "sample_index"]

# Every point that a training run passes.
POINTS = (
    "create", "write", "write.torn", "rename", "renamed", "manifest", "manifest.torn", "manifest.done", "update", "updated",
    "checkpoint", "checkpoint.torn", "checkpoint.rename", "checkpoint.renamed", "prune", "prune.torn",
    "sampled", "graded", "backward",
)  # fmt: skip
GRPO = shlex.split(
    "grpo --dataset arithmetic:64 --n-grpo-steps 2 --rollout-batch-size 16 --group-size 4 --train-batch-size 8 "
    "--gradient-accumulation-steps 2 --epochs-per-rollout-batch 2 --loss-type grpo_clip --sampling-max-tokens 8 "
    "--learning-rate 2e-4 --eval-examples 8 --eval-every 3 --checkpoint-every 2"
)
PPO = shlex.split(
    "ppo --dataset arithmetic:64 --n-ppo-steps 2 --rollout-batch-size 8 --train-batch-size 4 --micro-batch-size 2 "
    "--epochs-per-rollout-batch 2 --critic-warmup-steps 1 --kl-coef 0.05 --vf-cliprange 0.2 --gae-lambda 0.95 "
    "--sampling-max-tokens 8 --learning-rate 2e-4 --critic-learning-rate 1e-3 --eval-examples 8 --eval-every 3 --checkpoint-every 2"
)
EI = shlex.split(
    "ei --dataset arithmetic:64 --n-ei-steps 2 --ei-batch-size 6 --group-size 4 --train-batch-size 6 --micro-batch-size 3 "
    "--sft-epochs 2 --sampling-max-tokens 8 --learning-rate 1e-3 --eval-examples 8 --checkpoint-every 2"
)
SFT = shlex.split(
    "sft --dataset arithmetic:64 --train-batch-size 8 --micro-batch-size 4 --sft-epochs 2 --learning-rate 1e-3 "
    "--sampling-max-tokens 8 --eval-examples 8 --eval-every 5 --checkpoint-every 3"
)
PACKED = [*SFT, *shlex.split("--packing --packing-length 96 --train-batch-size 2 --micro-batch-size 1")]

# To be run beside `write_pairs`'s file.
DPO = shlex.split(
    "dpo --dataset pairs.jsonl --eval-dataset arithmetic --train-batch-size 4 --micro-batch-size 2 --dpo-epochs 2 "
    "--learning-rate 1e-4 --sampling-max-tokens 8 --eval-examples 8 --eval-every 5 --checkpoint-every 3"
)
ONLINE_DPO = shlex.split(
    "dpo --dataset arithmetic:64 --n-dpo-steps 3 --rollout-batch-size 16 --group-size 4 --train-batch-size 3 --micro-batch-size 2 "
    "--sampling-max-tokens 8 --learning-rate 2e-4 --eval-examples 8 --eval-every 3 --checkpoint-every 2"
)


# To be run beside a `teachers.write_teacher`.
DISTILL = shlex.split(
    "distill --teacher teacher --dataset arithmetic:64 --n-distill-steps 4 --rollout-batch-size 8 --group-size 4 "
    "--micro-batch-size 4 --task-reward 0.1 --sampling-max-tokens 8 --learning-rate 2e-4 --eval-examples 8 --eval-every 3 "
    "--checkpoint-every 2"
)


def write_pairs(folder: Path, *, count: int = 16) -> None:
    """Write `count` pairs to pairs.jsonl."""
    rows = [
        {"question": f"{i}+{i + 1}?", "chosen": f" so {2 * i + 1}" + "." * (i % 3), "rejected": f" it looks like {i}"}
        for i in range(count)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


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
    for row in rows:
        if row["episode"]:
            del row["episode"]["environment_seconds"]
    return sorted(
        (r for r in rows if r["phase"] == phase), key=lambda r: (r["step"], r["example_id"], r["sample_index"])
    )


def weights_of(run: Path) -> bytes:
    """The bytes of all weights of the final model; with an adapter, also of the model into which it is merged."""
    return b"".join(path.read_bytes() for path in sorted(run.glob("model*/*.safetensors")))


def checkpoints_of(run: Path) -> list[str]:
    return sorted(os.listdir(run / "checkpoints")) if (run / "checkpoints").exists() else []


def assert_readable(run: Path) -> None:
    """What anyone sees of a run that was killed: whole rows, each once."""
    if not run.exists():
        return
    keys = Counter(map(tuple, zip(*read_rollouts(run).select(KEY).to_pydict().values(), strict=True)))
    assert set(keys.values()) <= {1}
    assert check_run(run).problems == []


def assert_same_rows(
    whole: Path, run: Path, *, phase: str, near: tuple[str, ...] = ROUNDED, within: float = 1e-5
) -> None:
    """The rows of one run are those of another; some columns as near as this (nats)."""
    for a, b in zip(rows_of(run, phase=phase), rows_of(whole, phase=phase), strict=True):
        assert {k: v for k, v in a.items() if k not in near} == {k: v for k, v in b.items() if k not in near}
        for name in near:
            assert a[name] == pytest.approx(b[name], abs=within), name


def assert_ended_as(
    whole: Path, run: Path, *, checkpoints: tuple[int, ...] = (2,), rounded: tuple[str, ...] = ("eval",)
) -> None:
    """What a run is that was cut short and went on: the one that was not, to the last bit.

    Args:
        rounded: phases whose last bits of log-probabilities depend on who was asked together. The weights must be the same.
    """
    within = 1e-4 if "train" in rounded else 1e-5  # nats: as near as two forward passes of unlike batches are
    assert read_run(run).metadata["status"] == read_run(whole).metadata["status"]
    assert read_run(whole).metadata["status"] in ENDED
    assert findings(run) == []
    assert weights_of(run) == weights_of(whole)
    for phase in ("train", "eval"):
        assert_same_rows(whole, run, phase=phase, near=ROUNDED if phase in rounded else (), within=within)
    metrics, expected = metrics_of(run), metrics_of(whole)
    assert metrics.keys() == expected.keys()
    for key, value in metrics.items():
        exact = key[0] not in rounded
        assert value == pytest.approx(
            expected[key], nan_ok=True, rel=0 if exact else within, abs=0 if exact else within
        ), key
    assert len(checkpoints_of(run)) in checkpoints
    assert set(os.listdir(run)) - {"checkpoints"} == set(os.listdir(whole)) - {"checkpoints"}, "something is left over"


def begin_or_resume(run: Path, command: list[str]) -> list[str]:
    return [command[0], "--resume", str(run)] if run.exists() else [*command, "--run", run.name]


def go_on(forks: Forks, run: Path, command: list[str], *, fault: str = "", status: int = 0) -> Done:
    return forks.run(*begin_or_resume(run, command), cwd=run.parents[1], fault=fault, status=status)


@dataclass
class Whole:
    """GRPO in two runs: one that nothing disturbed in so many seconds, and one that was killed within its second batch."""

    run: Path
    cut: Path
    seconds: float


# For a test that kills at random moments: a few in `-m slow`, others each time; all that are promised in `-m full`.
KILLS = [pytest.param(3, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.full)]


def kill_at_random(
    forks: Forks,
    root: Path,
    whole: Whole,
    *,
    kills: int,
    seed: int,
    command: list[str] = GRPO,
    look: Callable[[], None] = lambda: None,
    rounded: tuple[str, ...] = ("eval",),
) -> None:
    """Kill a run and the run that goes on from it, again and again until it has ended; then the next one.

    Args:
        look: called as soon as a process has ended.
        rounded: as of `assert_ended_as`.
    """
    generator = random.Random(seed)
    killed = 0
    for number in count():
        run = root / f"runs/cut-{number}"
        while killed < kills:
            fault = f"{generator.choice(POINTS)}:{generator.randint(1, 4)}" if generator.random() < 0.3 else None
            call = forks.start(*begin_or_resume(run, command), cwd=root, fault=fault or "")
            if fault is None:
                time.sleep(generator.uniform(0, 0.7 * whole.seconds))
                forks.send(call, signal.SIGKILL)
            status = forks.wait(call).status
            look()
            assert_readable(run)
            if status == 0:
                break
            assert status == -signal.SIGKILL
            killed += 1
        else:
            go_on(forks, run, command)
        assert_ended_as(whole.run, run, rounded=rounded)
        if killed == kills:
            return
