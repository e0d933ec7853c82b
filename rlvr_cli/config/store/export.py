"""The options of `rlvr export`."""

from dataclasses import dataclass

from rlvr_cli.config.parsing.options import Provenance, check_values, knob, nearest
from rlvr_cli.errors import RlvrError
from rlvr_cli.text import redacted

TARGETS = ("wandb", "tensorboard", "trackio", "csv")


@dataclass(frozen=True)
class ExportConfig(Provenance):
    """Send runs to W&B, TensorBoard, Trackio or object storage, or write CSV. What is there already is not sent again.

    Examples:
        rlvr export my-grpo --to tensorboard
        rlvr export 'abl-*' --to csv --out tables
        rlvr export my-grpo --to s3://bucket/runs
    """

    runs: tuple[str, ...] = knob(
        (),
        "Runs: names, directories, or patterns in quotes ('*': all). Default: the latest run.",
        group="Data",
        argument=True,
        completes="run",
    )
    to: tuple[str, ...] = knob(
        (),
        "Where to: wandb, trackio; tensorboard, csv (files: see --out); or s3://BUCKET/PREFIX, below which each whole run is copied. Repeatable.",
        group="Output",
        common=True,
    )
    out: str = knob(
        "",
        "Directory for tensorboard and csv: a folder for each run. Empty: into the runs.",
        group="Output",
        common=True,
        path=True,
    )
    track_project: str = knob(
        "", "Project of W&B and Trackio. Empty: WANDB_PROJECT, or rlvr.", group="Output", common=True
    )
    runs_dir: str = knob("runs", "Directory that holds the runs.", group="Data", common=True, path=True)

    def __post_init__(self) -> None:
        check_values(self)
        if not self.to:
            raise RlvrError(
                "Nothing says where to.", "Add --to wandb, tensorboard, trackio, csv or s3://BUCKET/PREFIX."
            )
        for name in self.to:
            if name not in TARGETS and not name.startswith("s3://"):
                near = nearest(name, TARGETS)
                raise RlvrError(
                    f"--to is {redacted(name)!r}." + (f" Did you mean {near[0]}?" if near else ""),
                    f"Choose one of {', '.join(TARGETS)}, or write s3://BUCKET/PREFIX.",
                )
        if self.out and (others := [name for name in self.to if name not in ("tensorboard", "csv")]):
            raise RlvrError(
                f"--out is for files, and {redacted(others[0])} has a place of its own.", "Leave --out out."
            )
        if self.track_project and not set(self.to) & {"wandb", "trackio"}:
            raise RlvrError(
                f"--track-project is for W&B and Trackio, and --to is {redacted(', '.join(self.to))}.",
                "Leave --track-project out, or add --to wandb or --to trackio.",
            )
