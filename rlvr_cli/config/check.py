"""The options of `rlvr check`."""

from dataclasses import dataclass

from rlvr_cli.config.options import Format, Provenance, check_values, knob


@dataclass(frozen=True)
class CheckConfig(Provenance):
    """Verify a run: every file against its sha256; rows per part; each key once; schema versions, steps and seeds.

    Examples:
        rlvr check
        rlvr check my-grpo
    """

    run: str = knob("", "Run directory or name. Default: the latest run.", group="Data", argument=True, completes="run")
    runs_dir: str = knob("runs", "Directory that holds the runs.", group="Data", common=True)
    format: Format = knob("table", "How problems are printed.", group="Output", common=True)

    def __post_init__(self) -> None:
        check_values(self)
