"""The options of `rlvr fetch`."""

from dataclasses import dataclass

from rlvr_cli.config.parsing.options import Provenance, check_values, knob
from rlvr_cli.errors import RlvrError


@dataclass(frozen=True)
class FetchConfig(Provenance):
    """Get runs from object storage, to read or to resume them here. `rlvr export` has copied them there.

    Examples:
        rlvr fetch s3://bucket/runs/my-grpo
        rlvr fetch s3://bucket/runs/my-grpo --runs-dir other-runs
    """

    runs: tuple[str, ...] = knob((), "Copies of runs: s3://BUCKET/PREFIX/RUN.", group="Data", argument=True)
    runs_dir: str = knob("runs", "Directory for the runs, on this machine.", group="Data", common=True, path=True)

    def __post_init__(self) -> None:
        check_values(self)
        if not self.runs:
            raise RlvrError("Nothing says what to fetch.", "Write s3://BUCKET/PREFIX/RUN.")
