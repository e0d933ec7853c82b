"""A long run needs no more than a short one: memory, handles, threads and processes stay what they are once it is warm."""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import UTC
from itertools import pairwise
from pathlib import Path

import pytest

from forks import processes_in
from rlvr_cli.runs.readers import read_rollouts

ROOT = Path(__file__).parents[2]
WARM = 0.5  # of the rows: what is imported late, caches and the allocators' pools are full by then; the rest is what counts
MOST = 0.1  # of the memory: what may have been added at the end. Of each step its metrics and its line in the manifest stay: 5 KiB
BLOCKS = 12  # averages of this many equal stretches; neighboring moments are alike, neighboring averages hardly
T_975 = 2.228  # Student's t, 10 degrees of freedom
GRPO = (
    "grpo --dataset arithmetic:64 --n-grpo-steps STEPS --rollout-batch-size 8 --group-size 4 --train-batch-size 8 "
    "--gradient-accumulation-steps 1 --sampling-max-tokens 8 --eval-examples 8 --eval-every 50 --checkpoint-every 50 --run r"
)
EVAL = "eval --dataset arithmetic:9850 --num-samples SAMPLES --sampling-min-tokens 1 --sampling-max-tokens 2 --run r"


@dataclass(frozen=True)
class Moment:
    """What a command and all that it has started hold."""

    at: float  # seconds since 1970
    mebibytes: float  # memory that belongs to no file, with a share of what is shared
    handles: int
    threads: int
    processes: int


def look(folder: Path) -> Moment | None:
    """What the processes in this folder hold; None if one of them just ended."""
    memory, handles, threads, processes = 0, 0, 0, [*processes_in(folder)]
    with suppress(OSError):
        for pid in processes:
            proc = Path(f"/proc/{pid}")
            rollup = (proc / "smaps_rollup").read_text()
            memory += sum(int(rollup.partition(f"{name}:")[2].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))
            handles += len(os.listdir(proc / "fd"))
            threads += len(os.listdir(proc / "task"))
        return Moment(time.time(), memory / 1024, handles, threads, len(processes))
    return None


def watch(folder: Path, command: str) -> list[tuple[float, Moment]]:
    """Run a command; (share of its training or evaluated rows that were sampled, what it held), while it sampled them."""
    moments: list[Moment] = []
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlvr_cli", *command.split()],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            stdout=said,
            stderr=said,
        )
        while process.poll() is None:
            if moment := look(folder):
                moments.append(moment)
            time.sleep(0.1)
    assert process.returncode == 0, (folder / "said").read_text()[-2000:]
    phase = "train" if command.startswith("grpo") else "eval"
    table = read_rollouts(folder / "runs/r", phase=phase)
    sampled = sorted(at.replace(tzinfo=UTC).timestamp() for at in table["sampled_at"].to_pylist())
    inside = [moment for moment in moments if sampled[0] <= moment.at <= sampled[-1]]
    done, shares = 0, []
    for moment in inside:
        while sampled[done] < moment.at:
            done += 1
        shares.append(done / len(sampled))
    return list(zip(shares, inside, strict=True))


def growth(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """How much y grows while x goes from 0 to 1, and the half width of the 95% interval, from averages of `BLOCKS` stretches."""
    low, high = min(xs), max(xs)
    blocks: list[list[tuple[float, float]]] = [[] for _ in range(BLOCKS)]
    for x, y in zip(xs, ys, strict=True):
        blocks[min(int((x - low) / (high - low) * BLOCKS), BLOCKS - 1)].append((x, y))
    means = [tuple(map(statistics.fmean, zip(*block, strict=True))) for block in blocks if block]
    assert len(means) == BLOCKS, "too few moments"
    x, y = map(list, zip(*means, strict=True))
    slope, intercept = statistics.linear_regression(x, y)
    residual = sum((b - intercept - slope * a) ** 2 for a, b in means) / (BLOCKS - 2)
    return slope, T_975 * math.sqrt(residual / (statistics.pvariance(x) * BLOCKS))


def assert_flat(course: list[tuple[float, Moment]], *, what: str, units: int, figures: dict) -> None:
    """Once warm, memory hardly grows with so many units of work, and the last half of them holds no more of anything else."""
    warm = [(share, moment) for share, moment in course if share >= WARM]
    slope, width = growth([share for share, _ in warm], [moment.mebibytes for _, moment in warm])
    memory = statistics.fmean(moment.mebibytes for _, moment in warm)
    added = [(slope + sign * width) * (1 - WARM) for sign in (-1, 0, 1)]
    figures |= {
        what: round(units * (1 - WARM)),
        "memory MB": round(memory),
        "growth MB": "{1:.1f} ({0:.1f} to {2:.1f})".format(*added),
    }
    first, last = (
        [astuple(moment)[2:] for share, moment in warm if (share >= (WARM + 1) / 2) == late] for late in (False, True)
    )
    for number, name in enumerate(("handles", "threads", "processes")):
        held = [round(statistics.median(moment[number] for moment in half)) for half in (first, last)]
        figures |= {f"{name}, first and last half": "{} and {}".format(*held)}
        assert held[1] <= held[0], (name, held)  # of what is held for a moment, the median shows nothing
    assert added[2] <= MOST * memory, figures


def test_growth_of_a_line_with_noise():
    xs = [i / 999 for i in range(1000)]
    slope, width = growth(xs, [3 + 2 * x + (-1) ** i for i, x in enumerate(xs)])
    assert abs(slope - 2) < width < 0.2
    assert growth(xs, [5.0] * 1000) == (0.0, 0.0)


def test_the_watch_sees_what_a_command_takes(tmp_path: Path):
    """A program in the folder that takes 8 MiB, a file and a thread every so often is seen to do so."""
    program = (
        "import sys, threading, time\nheld = []\nprint('ready', flush=True)\n"
        "for line in sys.stdin:\n"
        "    held.append((bytearray(b'x') * 2**23, open('/dev/null'))); threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "    print('more', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        seen = []
        for _ in range(3):
            process.stdout.readline()
            seen.append(look(tmp_path))
            process.stdin.write("\n")
            process.stdin.flush()
        process.kill()
    for before, after in pairwise(seen):
        assert before is not None
        assert after is not None
        assert 7 < after.mebibytes - before.mebibytes < 10
        assert (after.handles - before.handles, after.threads - before.threads, after.processes) == (1, 1, 1)


@pytest.mark.full
def test_500_grpo_steps(tmp_path: Path, figures: dict):
    """500 steps of GRPO, after as many to get warm, take nothing that they keep"""
    course = watch(tmp_path, GRPO.replace("STEPS", "1000"))
    assert_flat(course, what="steps", units=1000, figures=figures)


@pytest.mark.full
def test_200000_evaluated_samples(tmp_path: Path, figures: dict):
    """200,000 evaluated samples, after as many to get warm, take nothing that they keep"""
    course = watch(tmp_path, EVAL.replace("SAMPLES", "42"))
    assert_flat(course, what="samples", units=read_rollouts(tmp_path / "runs/r").num_rows, figures=figures)
