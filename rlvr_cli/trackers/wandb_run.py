"""Weights & Biases: a run of the same name, its files in the run's folder `wandb/`.

Enters: rows. Leaves: the history of a W&B run, with train/NAME against train_step and eval/NAME against eval_step, its config, and
tables of some responses. A resumed run goes on in the same W&B run. A row's step in W&B's own counting is its rank, so that W&B says
itself up to which row it has got, and ignores a row that it has; what a resumed run measures again keeps the value that was sent first.
Offline there is nobody to ask: a row counts as sent once it is written into W&B's file.
"""

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import wandb

from rlvr_cli.runs.readers import ENDED, RunInfo
from rlvr_cli.runs.storage.files import typed
from rlvr_cli.trackers.rows import SAMPLE_COLUMNS, Row, Samples, described
from rlvr_cli.trackers.sent import Recorded, Sent


class WandB:
    """Sends the rows of one run."""

    def __init__(self, info: RunInfo, *, project: str, live: bool) -> None:
        self._path = info.path
        settings = {
            "console": "off",
            "silent": True,
            "disable_git": True,
            "disable_code": True,
            "x_disable_stats": not live,
            "symlink": False,  # a run directory contains its files
        }
        name, created = info.metadata["run_id"], info.metadata["created_at"]
        self._run: Any = wandb.init(
            project=_project(project),
            dir=str(info.path),
            id=hashlib.sha256(f"{name} {created}".encode()).hexdigest()[:16],
            name=name,
            group=info.metadata["command"],
            config=described(info),
            resume="allow",
            settings=wandb.Settings(**settings),
        )
        for axis in ("train", "eval"):
            self._run.define_metric(f"{axis}_step", hidden=True)
            self._run.define_metric(f"{axis}/*", step_metric=f"{axis}_step")
        self._offline = (
            self._run.offline or self._run.disabled
        )  # as the environment has it, or one of W&B's files of settings
        if self._offline:
            mode = "disabled" if self._run.disabled else "offline"
            self._sent: Sent = Recorded(info, "wandb", project=project, place=lambda project: _place(mode, project))
        else:
            self._sent = Sent(self._run.starting_step - 1)

    @property
    def note(self) -> str:
        if not self._offline:
            return self._run.url or ""
        return f"offline; send it with: wandb sync {typed(self._path / 'wandb')}/offline-run-*"

    def send(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Send the rows that W&B has not, and return them."""
        left = self._sent.left(rows)
        samples = Samples(self._path)
        for row in left:
            values: dict[str, Any] = dict(row.named())
            if shown := samples.of(row):
                values["eval/samples"] = wandb.Table(
                    columns=list(SAMPLE_COLUMNS), data=[list(cells) for cells in shown]
                )
            self._run.log(values, step=row.rank)
        self._sent.record(left)
        return left

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=0 if status in ENDED else 1)


def _project(name: str) -> str:
    return name or os.environ.get("WANDB_PROJECT") or "rlvr"


def _place(mode: str, project: str) -> str:
    """Return where a project's offline files are to go."""
    return f"{mode}: {os.environ.get('WANDB_ENTITY', '')}/{_project(project)}"
