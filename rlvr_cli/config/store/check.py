"""The options of `rlvr check`."""

from dataclasses import dataclass

from rlvr_cli.config.parsing.options import Format, Provenance, check_count_or_all, check_values, knob


@dataclass(frozen=True)
class CheckConfig(Provenance):
    """Verify a run: every file against its sha256; rows per part; each key once; schema versions, steps and seeds.

    Examples:
        rlvr check
        rlvr check 'abl-*'
        rlvr check my-grpo --replay 3
    """

    runs: tuple[str, ...] = knob(
        (),
        "Runs: names, directories, or patterns in quotes ('*': all). Default: the latest run.",
        group="Data",
        argument=True,
        completes="run",
    )
    runs_dir: str = knob(
        "runs", "Directory that holds the runs, or s3://BUCKET/PREFIX.", group="Data", common=True, path=True
    )
    replay: str = knob(
        "",
        "Also make the run's first N updates again, or all, from its stored rollouts, options and first weights, by other code.",
        group="Data",
        common=True,
    )
    format: Format = knob("table", "How problems are printed.", group="Output", common=True)

    @property
    def replayed_updates(self) -> int | None:
        """The most updates to replay; None for all."""
        return None if self.replay == "all" else int(self.replay or 0)

    def __post_init__(self) -> None:
        check_values(self)
        if self.replay:
            check_count_or_all(self, "replay", at_least=0)
