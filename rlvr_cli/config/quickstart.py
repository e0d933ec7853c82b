"""The options of `rlvr quickstart`."""

from dataclasses import dataclass

from rlvr_cli.config.parsing.options import Provenance, check_values, knob


@dataclass(frozen=True)
class QuickstartConfig(Provenance):
    """See reward rise: warm up a tiny model on traces, then train it with GRPO, on a CPU in about two minutes.

    Examples:
        rlvr quickstart --name q0
        rlvr quickstart --tools
    """

    tools: bool = knob(
        False,
        "Episodes: the model cannot multiply, and learns to ask a calculator.",
        group="Run",
        common=True,
    )
    seed: int = knob(0, "Seed of the model, the data and the runs.", group="Run", common=True, at_least=0)
    name: str = knob(
        "",
        "Prefix of the run names: NAME-sft and so on; that of an earlier call goes on with its runs. Empty: quickstart-DATE-TIME.",
        group="Run",
        common=True,
    )
    runs_dir: str = knob("runs", "Directory that holds the runs.", group="Run", common=True, path=True)

    def __post_init__(self) -> None:
        check_values(self)
