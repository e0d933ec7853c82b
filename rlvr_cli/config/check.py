"""The options of `rlvr check`."""

from dataclasses import dataclass

from rlvr_cli.config.options import FORMATS, Provenance, check_values, knob


@dataclass(frozen=True)
class CheckConfig(Provenance):
    """Read every byte of a run again: each file is compared with the sha256 under which it was committed."""

    run: str = knob("", "Run directory or name. None: the latest run.", group="Data", argument=True)
    runs_dir: str = knob("runs", "Directory that holds the runs.", group="Data")
    format: str = knob("table", "How problems are printed.", group="Output", choices=FORMATS)

    def __post_init__(self) -> None:
        check_values(self)
