"""The options of `rlvr doctor`."""

from dataclasses import dataclass

from rlvr_cli.config.parsing.options import Format, Provenance, check_values, knob
from rlvr_cli.config.shared.engine import TrainingEngine


@dataclass(frozen=True)
class DoctorConfig(Provenance):
    """Say whether this machine can do what rlvr does: what is installed, which devices there are, what would be used, and whether it works.

    Examples:
        rlvr doctor
        rlvr doctor --quick
        rlvr doctor --engine vllm --format json
    """

    engine: TrainingEngine = knob(
        "auto",
        "Inference engine to try beside transformers. auto: the one that training would choose; vllm takes up to a minute to start.",
        group="Model",
        common=True,
    )
    quick: bool = knob(False, "Try nothing: only say what is there and what would be used.", group="Run", common=True)
    runs_dir: str = knob("runs", "Directory that holds the runs: its free space is shown.", group="Data", common=True)
    format: Format = knob("table", "How the findings are printed.", group="Output", common=True)

    def __post_init__(self) -> None:
        check_values(self)
