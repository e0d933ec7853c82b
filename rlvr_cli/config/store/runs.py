"""The options of `rlvr runs`."""

from dataclasses import dataclass
from typing import Literal

from rlvr_cli.config.parsing.options import LONGEST, Format, Provenance, check_values, knob

Order = Literal["newest", "oldest", "name", "status", "best", "worst", "longest", "largest"]


@dataclass(frozen=True)
class RunsConfig(Provenance):
    """List the runs: how far each one is, its accuracy with a 95% interval, and the options in which it differs from the others.

    Examples:
        rlvr runs
        rlvr runs 'abl-*' --sort best
        rlvr runs --where "status = 'killed' OR accuracy < 0.5" --size
    """

    runs: tuple[str, ...] = knob(
        (),
        "Runs to list: names, directories, or patterns in quotes. Default: all of --runs-dir.",
        group="Query",
        argument=True,
        completes="run",
    )
    where: str = knob(
        "",
        "SQL condition on the columns of --format json, such as: command = 'grpo' AND accuracy > 0.5",
        group="Query",
        common=True,
    )
    sort: Order = knob(
        "newest", "Order; best is the highest accuracy; of searches, the highest score.", group="Query", common=True
    )
    size: bool = knob(False, "Also show the size of each run on the disk.", group="Query", common=True)
    timeout_seconds: float = knob(
        30.0, "Seconds after which --where is interrupted.", group="Query", above=0, at_most=LONGEST
    )
    runs_dir: str = knob(
        "runs", "Directory that holds the runs, or s3://BUCKET/PREFIX.", group="Query", common=True, path=True
    )
    limit: int = knob(50, "Runs to show; 0: all.", group="Output", common=True, at_least=0)
    format: Format = knob("table", "How the list is printed.", group="Output", common=True)

    def __post_init__(self) -> None:
        check_values(self)
