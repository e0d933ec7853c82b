"""The run: its seed, name and files; and for training its checkpoints, limits and processes."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from rlvr_cli.config.parsing.options import Format, Provenance, knob
from rlvr_cli.errors import RlvrError

StopWhen = Literal["never", "diverged"]
Tracker = Literal["", "wandb", "tensorboard", "trackio"]  # "" for none, where a resumed run has one

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class RunOptions(Provenance):
    seed: int = knob(0, "Seed of every random choice of the run.", group="Run", common=True, at_least=0)
    run: str = knob("", "Name of the run directory. Empty: COMMAND-MODEL-DATASET-DATE-TIME.", group="Run", common=True)
    runs_dir: str = knob(
        "runs",
        "Directory that holds the runs, or s3://BUCKET/PREFIX.",
        group="Run",
        free_on_resume=True,
        path=True,
    )
    config: str = knob("", "TOML file with options; flags override it.", group="Run", free_on_resume=True, path=True)
    preset: str = knob(
        "", "Named set of options; flags and --config override it.", group="Run", common=True, completes="preset"
    )
    format: Format = knob("table", "How result tables are printed.", group="Run", free_on_resume=True)
    resume: str = knob(
        "",
        "Resume this run (name or directory).",
        group="Run",
        common=True,
        completes="run of the command",
        free_on_resume=True,
    )
    track: tuple[Tracker, ...] = knob(
        (),
        "Also send metrics and some responses to this tracker while the run goes on; repeatable; '' for none.",
        group="Run",
        free_on_resume=True,
    )
    track_project: str = knob(
        "", "Project of W&B and Trackio. Empty: WANDB_PROJECT, or rlvr.", group="Run", free_on_resume=True
    )
    stall_minutes: float = knob(
        10.0, "Minutes without progress after which a note says what the run waits for; 0: none.", group="Run", free_on_resume=True, at_least=0,
    )  # fmt: skip


@dataclass(frozen=True)
class TrainingRunOptions(RunOptions):
    checkpoint_every: int = knob(
        10, "Updates between checkpoints; the last two are kept. 0: only when interrupted.", group="Run", free_on_resume=True, at_least=0,
    )  # fmt: skip
    checkpoint_minutes: float | None = knob(
        None,
        "Least minutes between checkpoints; one that is due earlier waits. Default: 20 times as long as the last one took, if over a second.",
        group="Run", free_on_resume=True, at_least=0,
    )  # fmt: skip
    time_limit: str = knob(
        "",
        "Time limit for the whole run, including the last evaluation, such as 4h or 90m.",
        group="Run",
        common=True,
        free_on_resume=True,
    )
    stop_when: StopWhen = knob(
        "never",
        "diverged: end a run, as diverged, once its held-out reward, entropy or gradient norm is past its bounds (docs/algorithms.md).",
        group="Run",
        free_on_resume=True,
    )
    trainers: int = knob(
        1,
        "Trainer processes that divide each update, one per GPU, or on the CPU; the embedded engine samples on all of them.",
        group="Run",
        common=True,
        free_on_resume=True,
        at_least=1,
    )
    fsdp: bool = knob(
        False,
        "Divide weights, gradients and optimizer state over the trainers (FSDP2), instead of a copy for each.",
        group="Run",
        free_on_resume=True,
    )
    dry_run: bool = knob(False, "Print the plan and stop.", group="Run", common=True, free_on_resume=True)
    max_grade_errors: float = knob(
        0.1,
        "Stop before the first update if more than this share of the first batch, or of the first evaluation, cannot be graded.",
        group="Grading",
        free_on_resume=True,
        at_least=0,
        at_most=1,
    )

    @property
    def time_limit_seconds(self) -> float:
        """The time limit in seconds; infinity without one."""
        return _seconds(self.time_limit) if self.time_limit else math.inf


def check_time_limit(config: TrainingRunOptions) -> None:
    if not config.time_limit:
        return
    _seconds(config.time_limit)
    if config.time_limit[-1] not in _SECONDS and config.sources.get("time_limit") != "resumed run":
        text = config.time_limit
        raise RlvrError(
            f"--time-limit is {text!r}, without a unit.",
            f"Write {text}h for hours, {text}m for minutes, or {text}s for seconds.",
        )


def _seconds(text: str) -> float:
    """Parse a duration: "4h", "90m", "1h30m", "45s" or, of a run of an older version, a number of seconds."""
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if text and "".join(n + unit for n, unit in parts) == text:
        seconds = sum(float(n) * _SECONDS[unit] for n, unit in parts)
    elif text.replace(".", "", 1).isdecimal():
        seconds = float(text)
    else:
        seconds = 0.0
    if not seconds > 0:
        raise RlvrError(f"--time-limit is {text!r}.", "Write it as 4h, 90m, 1h30m or 600s.")
    return seconds
