"""The runs of a sweep for others to start: lines for a shell, or an array job for SLURM.

Enters: the jobs, and the folder of their runs. Leaves: text.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rlvr_cli.config.parsing.options import flag
from rlvr_cli.sweeps.schedule import Job


def emitted(jobs: Sequence[Job], folder: Path, *, kind: str) -> list[str]:
    """The commands as lines for a shell, or as an array job for SLURM: each goes on with its run if it was begun before.

    SLURM's signal reaches what `srun` starts, not what the batch shell starts itself.
    """

    def line(job: Job) -> str:
        length = [word for name, value in job.lengths.items() for word in (flag(name), str(value))]
        again = [*job.command[:2], "--resume", job.name, "--runs-dir", str(folder), *length]
        begun = shlex.quote(str(folder / job.name / "run.json"))
        return f"if test -e {begun}; then srun {shlex.join(again)}; else srun {shlex.join(job.command)}; fi"

    if kind == "commands":
        return [shlex.join(job.command) for job in jobs]
    return [
        "#!/bin/bash",
        f"#SBATCH --job-name={folder.name}",
        f"#SBATCH --array=0-{len(jobs) - 1}",
        "#SBATCH --gres=gpu:1",
        "#SBATCH --requeue",
        "#SBATCH --signal=USR1@120   # rlvr saves what is done, and the job's next start goes on",
        'case "$SLURM_ARRAY_TASK_ID" in',
        *(f"  {number}) {line(job)} ;;" for number, job in enumerate(jobs)),
        "esac",
    ]
