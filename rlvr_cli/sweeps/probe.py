"""How long a run of a sweep takes: one is begun in a temporary directory, and ended after its first step.

Enters: a run's command. Leaves: a `Pace`. Nothing stays on the disk.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr_cli.config import config_of
from rlvr_cli.config.parsing.command_line import values_of, words_of
from rlvr_cli.errors import RlvrError
from rlvr_cli.process import StopRequest, die_with_parent
from rlvr_cli.runs.manifest import METRICS, RUN_FILE
from rlvr_cli.runs.readers import parsed_table, read_metadata, read_metrics, read_run
from rlvr_cli.types import Metric

NAME, LOG = "probe", "log"
POLL_SECONDS = 0.3
UPDATES = 3  # of a command that does not sample, whose first update alone is slower than the others
Measured = Mapping[tuple[str, str], Sequence[float]]  # (phase, metric) -> its values in the order of the updates


@dataclass(frozen=True)
class Pace:
    """What was measured of a run, in seconds.

    Attributes:
        start: loading; whatever was neither a step nor an evaluation.
        step: of the algorithm; of a command that does not sample an update.
        steps: how many the run has.
        evaluation: one of them, of --eval-examples.
        evaluations: how many the run has, with the last one.
        last: how many times as long the last one takes, by --final-eval-examples.
    """

    start: float
    step: float
    steps: int
    evaluation: float
    evaluations: int
    last: float = 1.0

    @property
    def run(self) -> float:
        """Seconds of the whole run."""
        return self.start + self.steps * self.step + (self.evaluations - 1 + self.last) * self.evaluation

    def __str__(self) -> str:
        of_evaluations = f", an evaluation {self.evaluation:.1f} s" if self.evaluation else ""
        longer = f", the last one {self.last:.2g} times as long" if self.evaluation and self.last != 1 else ""
        return (
            f"loading took {self.start:.1f} s, a step {self.step:.2g} s{of_evaluations}; the run has {self.steps} steps and "
            f"{self.evaluations} evaluations{longer}"
        )


def check_steps(command: Sequence[str]) -> None:
    """Raise RlvrError if a command is an evaluation, which has no steps to measure."""
    if command[1] == "eval":
        raise RlvrError("--probe measures a step of training, and rlvr eval has none.", "Try the run with --limit 64.")


def measured_pace(command: Sequence[str], *, visible: str = "") -> Pace:
    """Begin the run of a command such as `rlvr grpo --group-size 8`, and end it after its first step. No tracker hears of it.

    Args:
        visible: the value of CUDA_VISIBLE_DEVICES; empty: as it is.

    Raises:
        RlvrError: the command fails, or is an evaluation (`check_steps`).
        Interrupted: after a signal.
    """
    check_steps(command)
    parent, began = os.getpid(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlvr-probe-") as folder, StopRequest() as stop:
        run, log = Path(folder) / NAME, Path(folder) / LOG
        kind, own = config_of(command[1]), {"run": NAME, "runs_dir": folder, "checkpoint_every": 0, "track": ()}
        words = words_of(kind, values_of(kind, command[2:], command=command[1]) | own)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "rlvr_cli", command[1], *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **({"CUDA_VISIBLE_DEVICES": visible} if visible else {})},
                preexec_fn=lambda: die_with_parent(parent, by=signal.SIGKILL),
            )
        try:
            found, is_over = _measured(run), False
            while not (has_stepped(found) or is_over):
                stop.check()
                time.sleep(POLL_SECONDS)
                is_over = process.poll() is not None  # before its last metrics are read
                found = _measured(run)
            seconds = time.monotonic() - began
        finally:
            process.kill()  # nothing of it is kept
            process.wait()
        if not has_stepped(found, is_whole=is_over and process.returncode == 0):
            said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-4:]
            raise RlvrError("The probe ended before its first step:\n  " + "\n  ".join(said))
        return pace_of(found, read_metadata(run), seconds=seconds)


def has_stepped(found: Measured, *, is_whole: bool = False) -> bool:
    """Whether a step is complete, or so many updates of a command that does not sample; of a whole run one is enough."""
    if ("train", "reward/mean") in found:
        return ("train", "step/seconds") in found
    return len(found.get(("train", "update/seconds"), ())) >= (1 if is_whole else UPDATES)


def pace_of(found: Measured, metadata: Mapping[str, Any], *, seconds: float) -> Pace:
    """What these metrics say of a whole run.

    Args:
        metadata: of run.json.
        seconds: that passed until they were read.
    """
    updates = found.get(("train", "update/seconds"), ())
    stepped = found.get(("train", "step/seconds"), ())
    evaluated = [
        sum(parts)
        for parts in zip(*(found.get(("eval", f"{n}/seconds"), ()) for n in ("sampling", "grading")), strict=False)
    ]
    timed = (stepped or updates)[1:] or stepped or updates  # the first one is slower
    step = sum(timed) / len(timed)
    of_a_step = max(round(len(updates) / len(stepped)), 1) if stepped else 1
    planned = metadata["planned"]
    steps = planned["steps"] if "steps" in planned else -(-planned["updates"] // of_a_step)
    config = metadata["config"]
    every = config.get("eval_every") or 0
    counted = planned.get("updates", steps)  # what --eval-every counts
    evaluations = 1 + (-(-counted // every) if every else 1) if evaluated else 0
    evaluation, last = (evaluated or [0.0])[0], 1.0
    if final := config.get("final_eval_examples"):
        rows = metadata["facts"]["eval_dataset"]["rows"] if evaluated else 1
        last = min(final, rows) / min(config["eval_examples"], rows)
    spent = sum(stepped or updates) + sum(evaluated)
    return Pace(max(seconds - spent, 0.0), step, steps, evaluation, evaluations, last)


def _measured(run: Path) -> Measured:
    """The metrics that a run has committed so far."""
    if not (run / RUN_FILE).exists():
        return {}
    info = read_run(run)
    if (data := read_metrics(run, info.entries, settled=info.settled)) is None:
        return {}
    columns = ("step", "phase", "name", "value")
    table = parsed_table(data, Metric, path=run / METRICS, columns=columns)
    found: dict[tuple[str, str], list[float]] = {}
    for _, phase, name, value in sorted(zip(*(table[c].to_pylist() for c in columns), strict=True)):
        found.setdefault((phase, name), []).append(value)
    return found
