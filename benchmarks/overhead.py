"""The overhead of a GRPO step: store, metrics and display, each in milliseconds and as a share of the step.

    python benchmarks/overhead.py [--steps 20] [--repeats 5] [--json FILE]

The work is quickstart's GRPO, `rlvr grpo --preset quickstart` on the built-in model (256 rollouts a step), with one
question per evaluation. It runs in this process, with a clock around each function that stores or displays something;
stderr is a pseudo-terminal, so that the progress bar is drawn as for a person. These parts are timed:

  commit     rollouts -> columns -> Parquet -> fsync -> rename -> manifest, before each update
  read back  stored rollouts -> records, if a step reads any
  average    rollouts -> metrics
  metrics    logged, and committed every few seconds
  display    lines, the bar's numbers, and the CPU time of the thread that draws it

and the whole step, from its rollouts to the check whether there is time for another one. The first two steps of a run
are left out; evaluations and checkpoints are not part of a step. Each figure is the median over the runs.
"""

import argparse
import functools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the `rlvr` script sets it

import rich.live
from rows import Row, write

from rlvr_cli.cli import invoke
from rlvr_cli.commands.sources.plain import Plain
from rlvr_cli.rollouts import collect
from rlvr_cli.runs import metrics_log
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.terminal import console
from rlvr_cli.training import trainer
from rlvr_cli.training.credit import groups

WARM_UP = 2  # steps
CLOCKED: dict[str, list[tuple[Any, str, Callable[[], float]]]] = {
    "commit": [(RunDir, "commit_rollouts", time.perf_counter)],
    "read back": [(RunDir, "rollouts", time.perf_counter), (collect, "to_rollouts", time.perf_counter)],
    "average": [(groups, "rollout_metrics", time.perf_counter)],
    "metrics": [
        (metrics_log.MetricsLog, "add", time.perf_counter),
        (metrics_log.MetricsLog, "flush", time.perf_counter),
    ],
    "display": [
        (console.Progress, "advance", time.perf_counter),
        (console, "say", time.perf_counter),
        (rich.live.Live, "refresh", time.thread_time),
    ],
}


class Clock:
    """Adds up seconds by name while it runs; of nested clocked functions only the outermost counts."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CLOCKED, 0.0)
        self.running = False
        self._inside = threading.local()

    def around(self, name: str, function: Callable[..., Any], now: Callable[[], float]) -> Callable[..., Any]:
        @functools.wraps(function)
        def clocked(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "name", None):
                return function(*args, **kwargs)
            self._inside.name, started = name, now()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside.name = None
                if self.running:
                    self.seconds[name] += now() - started

        return clocked


@contextmanager
def terminal() -> Iterator[None]:
    """Make stderr a terminal whose output is discarded, and discard stdout."""
    controller, end = os.openpty()

    def drain() -> None:
        try:
            while os.read(controller, 65536):
                pass
        except OSError:  # the other end is closed
            os.close(controller)

    threading.Thread(target=drain, daemon=True).start()
    with (
        os.fdopen(end, "w") as stderr,
        open(os.devnull, "w") as stdout,
        redirect_stderr(stderr),
        redirect_stdout(stdout),
    ):
        yield


def run(steps: int, *, seed: int) -> tuple[dict[str, float], float]:
    """Return the milliseconds per step of each timed part, and of the whole step."""
    clock, count, started, total = Clock(), 0, 0.0, 0.0
    originals = [(owner, name, getattr(owner, name)) for clocked in CLOCKED.values() for owner, name, _ in clocked]
    first, last = Plain.next_batch, trainer.Trainer.has_time  # the first call of a step, and the first one after it

    def begin(*args: Any, **kwargs: Any) -> Any:
        nonlocal started
        clock.running, started = count >= WARM_UP, time.perf_counter()
        return first(*args, **kwargs)

    def end(*args: Any, **kwargs: Any) -> Any:
        nonlocal count, total
        if clock.running:
            total += time.perf_counter() - started
        if started:
            count += 1
        clock.running = False
        return last(*args, **kwargs)

    for what, clocked in CLOCKED.items():
        for owner, name, now in clocked:
            setattr(owner, name, clock.around(what, getattr(owner, name), now))
    Plain.next_batch, trainer.Trainer.has_time = begin, end
    try:
        with tempfile.TemporaryDirectory() as folder, terminal():
            size = ["--n-grpo-steps", str(steps + WARM_UP), "--eval-examples", "1", "--eval-every", "0"]
            where = ["--runs-dir", folder, "--seed", str(seed), "--checkpoint-every", "0"]
            invoke(["grpo", "--preset", "quickstart", *size, *where])
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
        Plain.next_batch, trainer.Trainer.has_time = first, last
    done = count - WARM_UP
    return {what: 1e3 * clock.seconds[what] / done for what in CLOCKED}, 1e3 * total / done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write the row to this file")
    args = parser.parse_args()
    runs = [run(args.steps, seed=seed) for seed in range(args.repeats)]
    step = statistics.median(whole for _, whole in runs)
    print(f"{'':12} {'ms a step':>10} {'share':>8}")
    for what in CLOCKED:
        share = statistics.median(parts[what] / whole for parts, whole in runs)
        print(f"{what:12} {statistics.median(parts[what] for parts, _ in runs):10.2f} {share:8.2%}")
    ours = statistics.median(sum(parts.values()) for parts, _ in runs)
    print(f"{'together':12} {ours:10.2f} {ours / step:8.2%}")
    print(f"{'the step':12} {step:10.2f}")
    work = "quickstart's GRPO: the built-in model, 256 rollouts a step"
    write(args.json, [Row("store + metrics + display", work, "the step itself", "ms", ours, step, "<= 0.01")])


if __name__ == "__main__":
    main()
