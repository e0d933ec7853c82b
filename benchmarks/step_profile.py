"""Where the time of one quickstart GRPO step goes: milliseconds and share of each phase, without nested phases.

    python benchmarks/step_profile.py [--steps 20] [--threads 1]

The work is `rlvr grpo --preset quickstart` on the built-in model, in this process, with a clock around the
functions named below. The first two steps are left out; each figure is the mean over the others.
"""

import argparse
import functools
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from rlvr_cli.commands import grpo
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.models import log_probs
from rlvr_cli.rollouts import collect, grading
from rlvr_cli.runs import metrics_log, run_dir
from rlvr_cli.samplers.embedded import batch, cache, engine
from rlvr_cli.terminal.console import Progress
from rlvr_cli.training import saving, trainer
from rlvr_cli.training.credit import groups
from rlvr_cli.training.parallel import replica, weight_sync
from rlvr_cli.training.updates import micro_batches, scores, update

WARM_UP = 2
STEP = "the step's rest"
PHASES: dict[str, list[tuple[Any, str]]] = {
    "weight sync, check": [(weight_sync.WeightSync, "sync")],
    "sampling: forward": [(cache.RowCache, "forward")],
    "sampling: prefill": [(cache.RowCache, "prefill")],
    "sampling: drawing": [(batch, "draw_tokens"), (batch, "uniforms")],
    "sampling: completions": [(batch.Batch, "_completion")],
    "sampling: seats, loop, prompts": [
        (batch.Batch, "advance"),
        *((of, name) for of in (batch.Batch, cache.RowCache) for name in ("__init__", "seat", "arrange")),
        (cache.RowCache, "_move_columns"),
        (cache.RowCache, "_shrink_window"),
        (engine, "prompt_token_ids"),
        (collect, "collect_batch"),
        (collect, "make_rollout"),
    ],
    "waiting for grades": [(grading, "wait")],
    "store": [(run_dir.RunDir, "commit_rollouts")],
    "metrics": [
        (groups, "rollout_metrics"),
        (update, "token_metrics"),
        (metrics_log.MetricsLog, "flush"),
        (metrics_log.MetricsLog, "add"),
    ],
    "display": [(Progress, "advance")],
    "tensors, cuts, prefixes": [
        (grpo, "rollout_tensors"),
        (grpo, "select_rows"),
        (micro_batches.MicroBatch, "of"),
        *((of, name) for of in (update, scores) for name in ("micro_batches", "wanted_in")),
    ],
    "update: forward, body": [(update, "get_response_log_probs"), (scores, "get_response_log_probs")],
    "update: forward, output layer": [(log_probs, "_linear_log_probs")],
    "update: backward": [(torch.Tensor, "backward")],
    "update: rest": [(replica, "train_update")],
    "checkpoint": [(saving, "save_checkpoint")],
}


class Profile:
    """Measures the exclusive seconds of each phase, with a stack of the running phases."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.steps: list[Counter[str]] = []
        self._running: list[str] = []
        self._since = 0.0

    def clocked(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)
            probing = "weight sync, check" in self._running
            self._switch()
            self._running.append("weight sync, check" if probing else phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._running.pop()

        return run

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def next_step(self) -> None:
        """End a step, or begin the first one."""
        self._switch()
        if self._running:
            self.steps.append(self.seconds)
        self.seconds, self._running = Counter(), [STEP]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    profile = Profile()
    for phase, functions in PHASES.items():
        for owner, name in functions:
            setattr(owner, name, profile.clocked(getattr(owner, name), phase))
    asked = trainer.Trainer.has_time

    def has_time(self: trainer.Trainer, **how: Any) -> bool:
        profile.next_step()
        return asked(self, **how)

    trainer.Trainer.has_time = has_time
    finish = trainer.Trainer.finish

    def finished(self: trainer.Trainer) -> None:
        profile.next_step()
        finish(self)

    trainer.Trainer.finish = finished
    with tempfile.TemporaryDirectory() as directory:
        flags = {"preset": "quickstart", "n_grpo_steps": args.steps, "runs_dir": directory, "run": "r"}
        rarely = {"checkpoint_every": args.steps, "eval_every": 0, "eval_examples": 1}
        grpo.run(resolve(GrpoConfig, flags=flags | rarely, command="grpo"))
    steps = profile.steps[WARM_UP:]
    total = sum(sum(step.values()) for step in steps)
    print(f"\none step: {total / len(steps) * 1e3:.0f} ms, the mean of {len(steps)}; {args.threads} thread(s)")
    for phase in [*PHASES, STEP]:
        seconds = sum(step[phase] for step in steps)
        print(f"{phase:<32} {seconds / len(steps) * 1e3:7.1f} ms {seconds / total:6.1%}")


if __name__ == "__main__":
    main()
