"""The options of `rlvr pairwise`."""

from dataclasses import dataclass

from rlvr_cli.config.parsing.options import check_values, knob
from rlvr_cli.config.parsing.sources import is_partial
from rlvr_cli.config.shared.prompt import JudgeOptions, check_judge_endpoint
from rlvr_cli.config.shared.run import RunOptions
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import Phase


@dataclass(frozen=True)
class PairwiseConfig(RunOptions, JudgeOptions):
    """Compare the responses of two runs by a judge, who sees each pair in both orders. Kept as a run.

    Examples:
        rlvr pairwise tuned base --rubric better.md --judge-url http://localhost:8001/v1 --judge-model big
    """

    runs: tuple[str, ...] = knob(
        (), "Two runs, A and B, that have answered the same questions.", group="Data", argument=True, completes="run"
    )
    rubric: str = knob(
        "",
        "Rubric: a Markdown file with {question}, {response_a} and {response_b}, that begins with its scale, such as scale: A/B/tie.",
        group="Grading",
        common=True,
        path=True,
    )
    phase: Phase = knob("eval", "Phase of the responses.", group="Data", common=True)
    step: int | None = knob(
        None, "Step of the responses. Default: the last one of each run.", group="Data", common=True, at_least=0
    )
    limit: int | None = knob(None, "Compare only the first N questions.", group="Data", common=True, at_least=1)

    def __post_init__(self) -> None:
        if is_partial(self):
            return
        check_values(self)
        if len(self.runs) != 2 or self.runs[0] == self.runs[1]:
            raise RlvrError(
                "Two different runs are compared.", "rlvr pairwise RUN_A RUN_B --rubric RUBRIC.md --judge-url URL ..."
            )
        if not self.rubric:
            raise RlvrError(
                "Nothing says how they are compared.", "Add --rubric RUBRIC.md, the file of the judge's prompt."
            )
        check_judge_endpoint(self)
