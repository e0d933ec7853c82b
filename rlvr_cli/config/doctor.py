"""The options of `rlvr doctor`."""

from dataclasses import dataclass

from rlvr_cli.config.parsing.options import Format, Provenance, check_values, knob
from rlvr_cli.config.shared.engine import TrainingEngine
from rlvr_cli.errors import RlvrError


@dataclass(frozen=True)
class DoctorConfig(Provenance):
    """Say whether this machine can do what rlvr does: what is installed, which devices there are, what would be used, and whether it works.

    Examples:
        rlvr doctor --quick
        rlvr doctor --engine vllm --format json
        rlvr doctor --quick --cluster auto --model NAME
    """

    engine: TrainingEngine = knob(
        "auto",
        "Inference engine to try beside transformers. auto: the one that training would choose; vllm takes up to a minute to start.",
        group="Model",
        common=True,
    )
    model: str = knob(
        "", "Model that every node of --cluster must find. Empty: the built-in one.", group="Model", common=True
    )
    cluster: str = knob(
        "",
        "Ray cluster whose nodes must fit together: a process is tried on each. Its address, or auto for the one of this machine.",
        group="Model",
        common=True,
    )
    quick: bool = knob(False, "Try nothing: only say what is there and what would be used.", group="Run", common=True)
    runs_dir: str = knob(
        "runs", "Directory that holds the runs: its free space is shown.", group="Data", common=True, path=True
    )
    format: Format = knob("table", "How the findings are printed.", group="Output", common=True)

    def __post_init__(self) -> None:
        check_values(self)
        if self.model and not self.cluster:
            raise RlvrError("--model is looked for on the nodes of --cluster.", "Add --cluster, or leave it out.")
