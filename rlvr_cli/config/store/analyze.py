"""The options of `rlvr analyze`."""

from dataclasses import dataclass
from typing import Literal

from rlvr_cli.config.grpo import LossType, StdNormalization
from rlvr_cli.config.parsing.options import LONGEST, Format, Provenance, check_values, knob
from rlvr_cli.config.shared.optimization import LengthNormalization
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import Phase


@dataclass(frozen=True)
class AnalyzeConfig(Provenance):
    """Analyze runs with SQL, named queries or an HTML report. The SQL tables are `rollouts`, `segments`, `grades`, `metrics`
    and `runs`.

    Examples:
        rlvr analyze curves a-s0,a-s1,a-s2 b-s0,b-s1,b-s2 --plot arms.svg --x steps --panels eval_reward
        rlvr analyze "select step, avg(reward) from rollouts group by step" q0-grpo
        rlvr analyze report q0-grpo
    """

    query: str = knob(
        "summary",
        "A named query (--list), a SELECT statement, a .sql file, or report for an HTML page. A run name alone means summary.",
        group="Query",
        argument=True,
        completes="query",
    )
    runs: tuple[str, ...] = knob(
        (),
        "Run directories or names; A1,A2,A3 B1,B2,B3 are arms of several seeds (compare, --plot). Default: the latest run.",
        group="Query",
        argument=True,
        completes="run",
    )
    list: bool = knob(False, "List the named queries.", group="Query", common=True)
    show: bool = knob(False, "Print the named query's SQL instead of running it.", group="Query")
    set: tuple[str, ...] = knob(
        (), "NAME=VALUE sets a parameter of the query (see --list); repeatable. VALUE is read as JSON, else as text.", group="Query", common=True
    )  # fmt: skip
    phase: Phase = knob("eval", "Phase of the rollouts.", group="Query", common=True)
    step: int | None = knob(
        None,
        "Step of the rollouts. Default: the last one; graders, hardest, judge_agreement: all of them.",
        group="Query",
        common=True,
        at_least=0,
    )
    category: str = knob(
        "", "failures, rollouts: show only this category, such as format_0_answer_0.", group="Query", common=True
    )
    failure_kind: str = knob("", "failures, rollouts: show only this kind, such as wrong_answer.", group="Query")
    loss_type: LossType | None = knob(
        None,
        "objective: this loss in place of the run's; only whether it has a baseline, and whether it is kimi or gspo, matters.",
        group="Query",
    )
    length_normalization: LengthNormalization | None = knob(
        None, "objective: this divisor of the summed loss in place of the run's.", group="Query"
    )
    normalize_constant: float | None = knob(
        None, "objective: the divisor of masked_normalize. Default: the run's.", group="Query", above=0
    )
    std_normalization: StdNormalization | None = knob(
        None, "objective: this standard deviation in place of the run's.", group="Query"
    )
    rule: str = knob(
        "",
        "judge_agreement: compare with this grader only, which grades now what has no grade of it.",
        group="Query",
    )
    labels: str = knob(
        "",
        "judge_agreement: compare with the labels in this file: example_id, label, sample_index.",
        group="Query",
        path=True,
    )
    limit: int = knob(50, "Rows to show; 0: all.", group="Output", common=True, at_least=0)
    format: Format = knob("table", "How rows are printed.", group="Output", common=True)
    plot: str = knob(
        "",
        "Also draw the result into this .png or .svg file: curves A1,A2,A3 B1,B2,B3 draws arms of several seeds.",
        group="Output",
        common=True,
        path=True,
    )
    x: Literal["updates", "steps", "rollouts", "tokens", "minutes"] = knob(
        "updates", "--plot: what x is instead of updates: the algorithm's steps, what training sampled, or time.", group="Output", common=True
    )  # fmt: skip
    panels: tuple[str, ...] = knob(
        (), "--plot: only these panels, such as eval_reward,grad_norm; repeatable. A wrong name lists them.", group="Output", common=True
    )  # fmt: skip
    smooth: int = knob(
        1, "--plot: draw lines without intervals as the mean of so many neighboring points, an odd number.", group="Output", at_least=1
    )  # fmt: skip
    log: Literal["", "x", "y", "xy", "none"] = knob(
        "", "--plot: logarithmic axes. Default: x where a run is less than a tenth as long as another.", group="Output"
    )
    title: str = knob("", "--plot: a line above the picture.", group="Output")
    out: str = knob(
        "",
        "report: the HTML file to write. Default: report.html in the first run's directory; of a run in object storage NAME-report.html here.",
        group="Output",
        common=True,
        path=True,
    )
    timeout_seconds: float = knob(
        30.0, "Seconds after which a query is interrupted.", group="Query", above=0, at_most=LONGEST
    )
    runs_dir: str = knob("runs", "Directory that holds the runs, or s3://BUCKET/PREFIX.", group="Query", path=True)

    def __post_init__(self) -> None:
        check_values(self)
        if self.smooth % 2 == 0:
            raise RlvrError(
                f"--smooth is {self.smooth}.",
                f"Give an odd number, such as {self.smooth + 1}: as many points on both sides.",
            )
