"""A stage of an experiment: its runs, and what has become of them.

Enters: an experiment, and the directory of its runs. Leaves: the status of a run, and the finished runs of each arm.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from rlvr_cli.config.shared.training import TrainingConfig
from rlvr_cli.data.datasets import evaluation_spec
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.manifest import RUN_FILE
from rlvr_cli.runs.readers import ENDED, RunInfo, read_metadata, read_run
from rlvr_cli.runs.remote.work import Mirror
from rlvr_cli.runs.storage.files import shown
from rlvr_cli.sweeps.continued import other_bounds
from rlvr_cli.sweeps.experiment import Experiment, SweepRun
from rlvr_cli.sweeps.schedule import Job, status_of
from rlvr_cli.terminal import console


@dataclass(frozen=True)
class Sweep:
    """An experiment, or a stage of one, with its runs and their directory."""

    experiment: Experiment
    folder: Path
    runs: Sequence[SweepRun]
    jobs: Sequence[Job]

    def status_of(self, job: Job) -> str:
        return status_of(self.folder / job.name, job)

    def check(self, *, compares: bool) -> None:
        """Raise RlvrError if a run that exists is another one than the sweep would make: before any of them goes on.

        So it does if their directory, or that of a later stage, is itself a run; and if arms are to be compared and could not be, and no run
        has begun. Of those that have ended within other limits, it is said.
        """
        names = accumulate((self.folder.name, *(stage.name for stage in self.experiment.stages)), "{}-{}".format)
        for folder in map(self.folder.with_name, names):  # of later stages, too
            if (folder / RUN_FILE).exists():
                raise RlvrError(
                    f"{shown(folder)} is a run, and those of a sweep must not be among its files.",
                    "Choose another directory with --name.",
                )
        if compares and all(self.status_of(job) == "new" for job in self.jobs):
            self.check_evaluated()
        for job in self.jobs:
            if self.status_of(job) in ENDED and (
                other := other_bounds(read_metadata(self.folder / job.name), job.config)
            ):
                console.say(f"note: {job.name} has ended with {'; '.join(other)}: its arm has runs of different limits")

    def check_evaluated(self) -> None:
        """Raise RlvrError if there are several arms, and a run has no questions for evaluations, by which they are compared and chosen."""
        for job in self.jobs if len(self.experiment.arms) > 1 else ():
            config = job.config
            if isinstance(config, TrainingConfig) and not (config.eval_dataset or evaluation_spec(config.dataset)):
                raise RlvrError(
                    f"Arms are compared by evaluations, and {self.folder.name}/{job.name} has no questions for them.",
                    "Give --eval-dataset, with another --name if there are runs without it.",
                )

    def finished_arms(self, *, without: Sequence[str] = ()) -> dict[str, list[RunInfo]]:
        """The runs of each arm, without the arms that have none."""
        names = [
            name for name in self.experiment.names if any(r.arm == name and r.name not in without for r in self.runs)
        ]
        return {
            name: [read_run(self.folder / r.name) for r in self.runs if r.arm == name and r.name not in without]
            for name in names
        }


def looked_up(jobs: Sequence[Job], sweep: str, mirror: Mirror) -> list[Job]:
    """Fetch the runs of a sweep that have ended in object storage.

    Returns:
        The jobs, with those runs that have not ended there, and with what is wrong with those that cannot be fetched; it is told.

    Raises:
        RlvrError: none can be, as if the store fails.
    """
    left_out: dict[str, RlvrError] = {}
    names = [f"{sweep}/{job.name}" for job in jobs]
    there = mirror.bring(names, left_out=left_out)
    if left_out and len(left_out) == len(jobs):
        raise left_out[names[0]]
    for name, error in left_out.items():
        console.say(f"note: {name} is left out: {error.problem} {error.hint}")
    problems = {name: error.problem for name, error in left_out.items()}
    return [replace(job, there=there.get(n), problem=problems.get(n, "")) for job, n in zip(jobs, names, strict=True)]
