"""The options of `rlvr grade`."""

from dataclasses import dataclass, fields
from typing import Literal

from rlvr_cli.config.parsing.options import (
    LONGEST,
    FileFunction,
    Format,
    JudgeFile,
    Provenance,
    check_values,
    flag,
    knob,
    options,
)
from rlvr_cli.config.shared.prompt import FORMAT_RULE, GraderChoice, JudgeOptions, check_format_rule, check_judge
from rlvr_cli.config.shared.questions import QuestionOptions
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import FormatRule

PhaseChoice = Literal["all", "eval", "train"]
OF_STORED = ("again", "phase", "grader_workers")  # options of grades that are stored
OF_CHECK = {"prompt", "limit", *(f.name for f in fields(QuestionOptions))}  # options that only --check has a use for


@dataclass(frozen=True)
class GradeConfig(QuestionOptions, JudgeOptions, Provenance):
    """Regrade a run with another grader: no sampling, the old grades are kept, and the changes are printed.

    Examples:
        rlvr grade --check rewards.py:reward --dataset arithmetic
        rlvr grade my-grpo 'abl-*' --grader math_verify
        rlvr grade --explain "2/4" "\\frac{1}{2}"
    """

    run: tuple[str, ...] = knob(
        (),
        "Runs: names, directories, or patterns in quotes. Default: the latest run, but none with --check. With --explain: the ground truth.",
        group="Data",
        argument=True,
        completes="run",
    )
    phase: PhaseChoice = knob("all", "Phase of the rollouts.", group="Data", common=True)
    runs_dir: str = knob("runs", "Directory that holds the runs, or s3://BUCKET/PREFIX.", group="Data", path=True)
    grader: GraderChoice | FileFunction | JudgeFile = knob(
        "", "Grader, a function of your own, or another model with a rubric.", group="Grading", common=True
    )
    check: GraderChoice | FileFunction | JudgeFile = knob(
        "", "Try this grader: on perfect, empty and wrong answers to --dataset, and on a run's responses.", group="Grading", common=True
    )  # fmt: skip
    dataset: str = knob(
        "", "With --check: the questions, as for rlvr eval.", group="Data", common=True, completes="dataset"
    )
    prompt: str = knob(
        "r1_zero",
        "With --check: the prompt, whose format the answers have.",
        group="Data",
        completes="prompt",
    )
    limit: int = knob(32, "With --check: questions, and responses of the run.", group="Data", at_least=1)
    format_rule: FormatRule = knob("literal", FORMAT_RULE, group="Grading", common=True)
    explain: str | None = knob(
        None, "Explain the verdict on this answer or response; the ground truth follows, and no run is read.", group="Grading", common=True
    )  # fmt: skip
    again: bool = knob(
        False, "Also regrade rollouts that this grader has graded already; the new grades replace the old ones.", group="Grading", common=True
    )  # fmt: skip
    grader_timeout: float = knob(
        5.0, "Time limit per grade in seconds; the worker is then killed.", group="Grading", above=0, at_most=LONGEST
    )
    grader_workers: int = knob(2, "Number of grading processes.", group="Grading", at_least=1)
    format: Format = knob("table", "How result tables are printed.", group="Output", common=True)

    def __post_init__(self) -> None:
        check_values(self)
        check_judge(self, graders=(self.grader, self.check))
        check_format_rule(self, self.grader or self.check)
        if self.check and (self.explain is not None or self.grader):
            other = "--grader" if self.grader else "--explain"
            raise RlvrError(f"--check and {other} exclude each other.", "--check names the grader itself.")
        other = "--check" if self.check else "--explain" if self.explain is not None else ""
        given = [f.name for f in options(type(self)) if f.name in OF_STORED and getattr(self, f.name) != f.default]
        if given and other:
            raise RlvrError(f"{flag(given[0])} has no effect with {other}: no grades are stored.", "Leave it out.")
        chosen = [f.name for f in options(type(self)) if f.name in OF_CHECK and getattr(self, f.name) != f.default]
        if chosen and not self.check:
            raise RlvrError(f"{flag(chosen[0])} needs --check.", "To measure a model on a dataset: rlvr eval --dataset")
        if self.explain is not None and not (len(self.run) == 1 and self.run[0].strip()):
            raise RlvrError(
                "--explain needs one ground truth, too.",
                'rlvr grade --explain "ANSWER" "TRUTH"; one that starts with - comes after -- : --explain "-5" -- "-5"',
            )
        if self.check and not (self.dataset or self.run):
            raise RlvrError(
                "--check has nothing to grade.",
                "Name questions with --dataset, such as --dataset arithmetic, or a run.",
            )
