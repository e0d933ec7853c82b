"""The options of `rlvr grade`."""

from dataclasses import dataclass
from typing import Literal

from rlvr_cli.config.options import Format, Provenance, above_zero, at_least, check_values, knob
from rlvr_cli.config.shared import GRADER
from rlvr_cli.types import FormatRule

PhaseChoice = Literal["all", "eval", "train"]


@dataclass(frozen=True)
class GradeConfig(Provenance):
    """Grade a run again with another grader: nothing is sampled, the old grades stay, and what changed is printed.

    Examples:
        rlvr grade my-grpo --grader math_verify
        rlvr grade zero-shot --grader rewards.py:strict --phase eval
    """

    run: str = knob("", "Run directory or name. None: the latest run.", group="Data", argument=True, completes="run")
    phase: PhaseChoice = knob("all", "Rollouts of which phase.", group="Data", common=True)
    runs_dir: str = knob("runs", "Directory that holds the runs.", group="Data")
    grader: str = knob("", GRADER, group="Grading", common=True, completes="grader")
    format_rule: FormatRule = knob(
        "literal",
        "r1_zero's and countdown's format rule: literal wants exactly '</think> <answer>', lenient any white space between the tags.",
        group="Grading",
        common=True,
    )
    again: bool = knob(
        False, "Grade also what this grader has graded already; the new grades take the place of the old.", group="Grading", common=True
    )  # fmt: skip
    grader_timeout: float = knob(5.0, "Seconds that one grade may take before its worker is killed.", group="Grading")
    grader_workers: int = knob(2, "Worker processes that grade.", group="Grading")
    format: Format = knob("table", "How result tables are printed.", group="Output", common=True)

    def __post_init__(self) -> None:
        check_values(self)
        at_least(self, 1, "grader_workers")
        above_zero(self, "grader_timeout")
