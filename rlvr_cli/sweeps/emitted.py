"""The runs of a sweep for others to start: lines for a shell, or an array job for SLURM.

Enters: the jobs, and the folder of their runs. Leaves: text.
"""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlvr_cli.config.parsing.command_line import words_of
from rlvr_cli.config.parsing.sources import BOUNDS
from rlvr_cli.runs.readers import ENDED
from rlvr_cli.runs.remote.store import is_address
from rlvr_cli.sweeps.schedule import Job, status_of
from rlvr_cli.sweeps.slots import check_servers, gpus_of


def emitted(jobs: Sequence[Job], folder: Path, *, kind: str, at_once: int) -> list[str]:
    """The commands as lines for a shell, or as an array job for SLURM: each goes on with its run if it was begun before.

    SLURM's signal reaches what `srun` starts, not what the batch shell starts itself. All tasks of an array get as many GPUs.

    Args:
        at_once: the most runs of an array job at a time; 1: as SLURM likes.

    Raises:
        RlvrError: of an array job, as `check_servers`.
    """

    def line(job: Job) -> str:
        sources = job.config.sources
        bounds = {
            name: getattr(job.config, name) for name in BOUNDS if sources.get(name, "").startswith(("flag", "config"))
        }
        length = words_of(type(job.config), {**job.lengths, **bounds})
        runs_dir = job.command[job.command.index("--runs-dir") + 1]
        again = [*job.command[:2], "--resume", job.name, "--runs-dir", runs_dir, *length]
        run = shlex.quote(f"{runs_dir}/{job.name}")
        begun = f"rlvr runs {run} > /dev/null 2>&1" if is_address(runs_dir) else f"test -e {run}/run.json"
        return f"if {begun}; then srun {shlex.join(again)}; else srun {shlex.join(job.command)}; fi"

    if kind == "commands":
        return [shlex.join(job.command) for job in jobs]
    left = [job.config for job in jobs if status_of(folder / job.name, job) not in ENDED]
    check_servers(left, at_once=at_once if at_once > 1 else len(left), alone="--emit commands")
    gpus = max(gpus_of(job.config) for job in jobs)
    return [
        "#!/bin/bash",
        f"#SBATCH --job-name={folder.name}",
        f"#SBATCH --array=0-{len(jobs) - 1}{f'%{at_once}' if at_once > 1 else ''}",
        *([f"#SBATCH --gres=gpu:{gpus}"] if gpus else []),
        "#SBATCH --requeue",
        "#SBATCH --signal=USR1@120   # rlvr saves what is done, and the job's next start goes on",
        'case "$SLURM_ARRAY_TASK_ID" in',
        *(f"  {number}) {line(job)} ;;" for number, job in enumerate(jobs)),
        "esac",
    ]


def with_address(jobs: Sequence[Job], here: Path, address: str) -> list[Job]:
    """The jobs with an address wherever their words name the directory on this machine that stands for it, or a path in it."""

    def there(word: str) -> str:
        inside = word == str(here) or word.startswith(f"{here}/")
        return address + word[len(str(here)) :] if inside else word

    return [replace(job, command=[there(word) for word in job.command]) for job in jobs]
