"""The options of `rlvr analyze`."""

from dataclasses import dataclass

from rlvr_cli.config.options import LONGEST, Format, Provenance, check_values, knob
from rlvr_cli.types import Phase


@dataclass(frozen=True)
class AnalyzeConfig(Provenance):
    """Analyze runs with SQL, named queries or an HTML report. The SQL tables are `rollouts`, `grades`, `metrics` and `runs`.

    Examples:
        rlvr analyze curves q0-sft q0-grpo --plot curves.png
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
        "Run directories or names (compare: A1,A2,A3 B1,B2,B3). Default: the latest run.",
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
        None, "Step of the rollouts. Default: the last one.", group="Query", common=True, at_least=0
    )
    category: str = knob(
        "", "failures, rollouts: show only this category, such as format_0_answer_0.", group="Query", common=True
    )
    failure_kind: str = knob("", "failures, rollouts: show only this kind, such as wrong_answer.", group="Query")
    limit: int = knob(50, "Rows to show; 0: all.", group="Output", common=True, at_least=0)
    format: Format = knob("table", "How rows are printed.", group="Output", common=True)
    plot: str = knob(
        "",
        "Also plot the result to this .png or .svg file (curves, entropy, pass_at_k, best_at_k, categories, length_histogram, thinking_budget).",
        group="Output",
        common=True,
    )
    out: str = knob(
        "",
        "report: the HTML file to write. Default: report.html in the first run's directory.",
        group="Output",
        common=True,
    )
    timeout_seconds: float = knob(
        30.0, "Seconds after which a query is interrupted.", group="Query", above=0, at_most=LONGEST
    )
    runs_dir: str = knob("runs", "Directory that holds the runs.", group="Query")

    def __post_init__(self) -> None:
        check_values(self)
