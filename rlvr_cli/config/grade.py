"""The options of `rlvr grade`."""

from dataclasses import dataclass

from rlvr_cli.config.options import FORMATS, Provenance, above_zero, at_least, check_values, knob


@dataclass(frozen=True)
class GradeConfig(Provenance):
    """Grade a run again with another grader: nothing is sampled, the old grades stay, and what changed is printed."""

    run: str = knob("", "Run directory or name. None: the latest run.", group="Data", argument=True)
    phase: str = knob("all", "Rollouts of which phase.", group="Data", choices=("all", "eval", "train"))
    runs_dir: str = knob("runs", "Directory that holds the runs.", group="Data")
    grader: str = knob(
        "", "Grader: r1_zero, question_only, math_verify, gsm8k, countdown, or FILE.py:FUNCTION.", group="Grading"
    )
    format_rule: str = knob(
        "literal",
        "r1_zero's and countdown's format rule: literal wants exactly '</think> <answer>', lenient any white space between the tags.",
        group="Grading",
        choices=("literal", "lenient"),
    )
    again: bool = knob(
        False, "Grade also what this grader has graded already; the new grades take the place of the old.", group="Grading"
    )  # fmt: skip
    grader_timeout: float = knob(5.0, "Seconds that one grade may take before its worker is killed.", group="Grading")
    grader_workers: int = knob(2, "Worker processes that grade.", group="Grading")
    format: str = knob("table", "How result tables are printed.", group="Output", choices=FORMATS)

    def __post_init__(self) -> None:
        check_values(self)
        at_least(self, 1, "grader_workers")
        above_zero(self, "grader_timeout")
