"""The options of `rlvr sweep`."""

import re
from dataclasses import dataclass
from typing import Literal

from rlvr_cli.config.parsing.options import Format, Provenance, check_values, knob
from rlvr_cli.errors import RlvrError

Emitted = Literal["", "commands", "slurm"]


@dataclass(frozen=True)
class SweepConfig(Provenance):
    """Run an experiment: runs that differ in an option, with several seeds. The same command goes on where it was interrupted.

    Examples:
        rlvr sweep --list
        rlvr sweep grpo_baselines --model my-model --dataset train.jsonl --eval-dataset test.jsonl
        rlvr sweep mine.toml --seeds 0,1,2 --vary learning_rate=1e-5,3e-5 --dry-run
    """

    experiment: str = knob(
        "", "One of --list, or a TOML file of your own.", group="Query", argument=True, completes="experiment"
    )
    overrides: tuple[str, ...] = knob(
        (),
        "After it: options of the experiment's command, such as --model and --dataset, for all runs.",
        group="Query",
        argument=True,
    )
    list: bool = knob(False, "List the built-in experiments.", group="Query", common=True)
    show: bool = knob(False, "Print the experiment's TOML, to start your own from.", group="Query", common=True)
    vary: tuple[str, ...] = knob(
        (), "OPTION=V1,V2,...: values in place of the experiment's; repeatable.", group="Query", common=True
    )
    seeds: str = knob("", "Seeds of each arm, such as 0,1,2. Empty: the experiment's.", group="Run", common=True)
    name: str = knob("", "Directory of the runs in --runs-dir. Empty: the experiment's name.", group="Run", common=True)
    stages: int = knob(
        0, "Stages of the experiment to run, if it has several; 0: all.", group="Run", common=True, at_least=0
    )
    jobs: int = knob(
        1, "Runs at a time; with --emit slurm, above 1, tasks of the array job.", group="Run", common=True, at_least=1
    )
    devices: str = knob(
        "",
        "GPUs, one for each run at a time, such as 0,1,2,3. Empty: each run sees all, as --trainers and --samplers need.",
        group="Run",
        common=True,
    )
    cluster: str = knob(
        "",
        "Ray cluster on whose nodes the --jobs runs at a time are made: its address, or auto for the one of this machine.",
        group="Run",
        common=True,
    )
    dry_run: bool = knob(False, "Print the runs' commands, and stop.", group="Run", common=True)
    probe: bool = knob(
        False,
        "Print the runs' commands and how long they take, from one step of the first one in a temporary directory; and stop.",
        group="Run",
        common=True,
    )
    emit: Emitted = knob(
        "",
        "Print the commands for a shell, or an array job for SLURM, instead of running them.",
        group="Run",
        common=True,
    )
    runs_dir: str = knob("runs", "Directory that holds the directory of the runs.", group="Run", path=True)
    format: Format = knob("table", "How result tables are printed.", group="Output", common=True)

    def __post_init__(self) -> None:
        check_values(self)
        if not self.experiment and not self.list:
            raise RlvrError("No experiment is named.", "rlvr sweep --list lists the built-in ones.")
        if self.experiment.startswith("-"):
            raise RlvrError(
                f"{self.experiment} comes before the experiment.",
                "Write rlvr sweep EXPERIMENT first, and the options of its command after it.",
            )
        if self.seeds and not re.fullmatch(r"\d{1,9}(,\d{1,9})*", self.seeds):
            raise RlvrError(f"--seeds is {self.seeds!r}.", "Write whole numbers with commas between, such as 0,1,2.")
        if self.devices and not re.fullmatch(r"[A-Za-z0-9-]+(,[A-Za-z0-9-]+)*", self.devices):
            raise RlvrError(f"--devices is {self.devices!r}.", "Write the numbers of GPUs, such as 0,1,2,3.")
        if self.cluster and (self.devices or self.emit):
            other = "--devices names GPUs of this machine" if self.devices else "--emit is for others to start"
            raise RlvrError(f"--cluster chooses where runs are made, and {other}.", "Leave one of them out.")
        here = {"--devices": self.devices, "--probe": self.probe, "--jobs": self.emit == "commands" and self.jobs > 1}
        if self.emit and (other := next((name for name, given in here.items() if given), "")):
            raise RlvrError(
                f"--emit {self.emit} prints what others start, so that {other} has no effect.", "Leave one of them out."
            )
        if self.devices and self.jobs > len(self.devices.split(",")):
            raise RlvrError(
                f"--jobs {self.jobs} is more than the {len(self.devices.split(','))} of --devices.",
                "Leave out --jobs: with --devices each has one run at a time.",
            )
