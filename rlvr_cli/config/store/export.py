"""The options of `rlvr export`."""

from dataclasses import dataclass
from typing import Literal

from rlvr_cli.config.parsing.options import Provenance, check_values, knob
from rlvr_cli.errors import RlvrError

Target = Literal["wandb", "tensorboard", "trackio", "csv"]


@dataclass(frozen=True)
class ExportConfig(Provenance):
    """Send runs to W&B, TensorBoard or Trackio, or write CSV: their metrics. What a tracker already has is not sent again.

    Examples:
        rlvr export my-grpo --to tensorboard
        rlvr export 'abl-*' --to csv --out tables
        rlvr export 'abl-*' --to wandb --track-project ablations
    """

    runs: tuple[str, ...] = knob(
        (),
        "Runs: names, directories, or patterns in quotes ('*': all). Default: the latest run.",
        group="Data",
        argument=True,
        completes="run",
    )
    to: tuple[Target, ...] = knob(
        (), "Where to; repeatable. tensorboard and csv write files: see --out.", group="Output", common=True
    )
    out: str = knob(
        "",
        "Directory for tensorboard and csv: a folder for each run. Empty: into the runs.",
        group="Output",
        common=True,
    )
    track_project: str = knob(
        "", "Project of W&B and Trackio. Empty: WANDB_PROJECT, or rlvr.", group="Output", common=True
    )
    runs_dir: str = knob("runs", "Directory that holds the runs.", group="Data", common=True)

    def __post_init__(self) -> None:
        check_values(self)
        if not self.to:
            raise RlvrError("Nothing says where to.", "Add --to wandb, tensorboard, trackio or csv.")
        if self.out and (servers := [name for name in self.to if name in ("wandb", "trackio")]):
            raise RlvrError(f"--out is for files, and {servers[0]} has a place of its own.", "Leave --out out.")
