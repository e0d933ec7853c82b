"""The pages of `rlvr view`: the list of runs, and the report of some of them.

Enters: run directories. Leaves: HTML, from the templates of the report, and the state that it shows: pages of the same state are
the same.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.live.rollouts import SECONDS
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.queries.run_list import Known, cut_differences, list_runs, state_of
from rlvr_cli.analysis.report import build
from rlvr_cli.analysis.report.page import Browser, Grid, Share, assets, render, report_values
from rlvr_cli.analysis.report.rollouts import of_steps, step_of
from rlvr_cli.analysis.statistics.comparison import compare
from rlvr_cli.analysis.statistics.sweep_table import notes_of
from rlvr_cli.analysis.summary import check_accuracy
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.lock import holder_of
from rlvr_cli.runs.readers import RunInfo
from rlvr_cli.runs.several import read_named

MOST_SHOWN = 120  # characters of what differs, in the list of runs
FOLDER = Path(__file__).parent
ORDERS = {  # of the list of runs: its name in the address -> in words
    **{"newest": "newest first", "name": "by name", "status": "by status"},
    **{"best": "highest accuracy first", "longest": "longest first"},
}
ASSETS = assets(FOLDER / "live.css", FOLDER / "live.js", is_live=True)


@dataclass(frozen=True)
class Verdict:
    """Which of two runs is better, in words and numbers; `problem` says why it cannot be told."""

    sentences: Sequence[str] = ()
    arms: Grid | None = None
    problem: str = ""


def committed_state(paths: Mapping[str, Path]) -> str:
    """A hash of what is committed in these runs and of whether somebody writes them, without reading the files."""
    return _hash([(name, state_of(path)) for name, path in paths.items()])


def activities(paths: Mapping[str, Path]) -> dict[str, str]:
    """Name -> what its writer says that it is doing; "" where nobody writes."""
    return {name: str((holder_of(path) or {}).get("activity", "")) for name, path in paths.items()}


def page_state(committed: str, doing: Mapping[str, str], below: str) -> str:
    """A hash of all that a page shows."""
    return _hash(committed, doing, below, ASSETS.policy)


def _hash(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def run_rows(paths: Mapping[str, Path], known: Known | None = None) -> list[dict[str, Any]]:
    """The list of runs for the template, each with its name in this view. Of `known` runs, those that have changed are read."""
    rows = []
    listed = list_runs(list(paths.values()), known=known)
    shown = cut_differences([row["differs"] or "" for row in listed], most=MOST_SHOWN)
    for name, row, differs in zip(paths, listed, shown, strict=True):
        share = None if row["accuracy"] is None else Share(row["accuracy"], row["low"], row["high"])
        created = row["created_at"].replace(tzinfo=UTC).isoformat() if row["created_at"] else ""
        rows.append(row | {"name": name, "share": share, "created": created, "shown": differs})
    return rows


def runs_page(
    rows: Sequence[Mapping[str, Any]],
    doing: Mapping[str, str],
    *,
    title: str,
    given: str,
    order: str,
    below: str,
    state: str,
    committed: str,
) -> str:
    """The page that lists the runs, in one of `ORDERS`, or as they are `given`, which is said in words.

    Args:
        below: the command that shows the runs of folders, if there are no others.
    """
    values = {"title": title, "state": state, "committed": committed, "doing": doing, "below": below}
    values |= {"rows": in_order(rows, order), "orders": {"": given, **ORDERS}, "order": order}
    return render("runs.html.j2", ASSETS, folders=[FOLDER], **values)


def in_order(rows: Sequence[Mapping[str, Any]], order: str) -> list[Mapping[str, Any]]:
    """The rows in one of `ORDERS`; those without a value last, and equal ones as they were."""
    name, down = {
        "newest": ("created", True),
        "name": ("name", False),
        "status": ("status", False),
        "best": ("accuracy", True),
        "longest": ("wall_seconds", True),
    }.get(order, ("", False))
    with_value = [row for row in rows if row.get(name) not in (None, "")]
    without = [row for row in rows if row.get(name) in (None, "")]
    return sorted(with_value, key=lambda row: row[name], reverse=down) + without


def report_page(
    values: Mapping[str, Any], doing: Mapping[str, str], *, state: str, committed: str, without: Sequence[str] = ()
) -> str:
    """The report of some runs. `without` names those that were chosen too, but do not fit in it."""
    states = {"state": state, "committed": committed}
    return render("view.html.j2", ASSETS, folders=[FOLDER], doing=doing, without=without, **states, **values)


def read_report(paths: Mapping[str, Path]) -> dict[str, Any]:
    """What the page of some runs shows of what they have committed. Raises RlvrError if one cannot be read."""
    infos = read_named(paths)
    with (
        open_runs([_evaluations_of(info) for info in infos], timeout_seconds=SECONDS) as database,
        open_runs(infos, timeout_seconds=SECONDS) as of_alarms,
    ):
        browser = Browser({}, [], [], note="")
        report = build.report_of(database, infos, of_alarms=of_alarms, browser=browser, timeout_seconds=SECONDS)
    verdict = verdict_of(*infos) if len(infos) == 2 else None
    source = {"runs": list(paths)}
    return report_values(report) | {"rows": run_rows(paths), "verdict": verdict, "source": source}


def problem_page(error: RlvrError) -> str:
    """The page that says why another one cannot be shown."""
    return render("problem.html.j2", ASSETS, folders=[FOLDER], title="rlvr view", error=error)


def verdict_of(a: RunInfo, b: RunInfo) -> Verdict:
    """What `rlvr analyze compare` says of two runs' last evaluations."""
    lasts = [of_steps(info, build.first_and_last(info)[-1:]) for info in (a, b)]
    try:
        check_accuracy([a, b])
        with open_runs(lasts, timeout_seconds=SECONDS) as database:
            found = compare(database, [a.id], [b.id])
    except RlvrError as error:
        return Verdict(problem=error.problem)
    rows = [
        (
            arm.name,
            ", ".join(arm.runs),
            f"eval {', '.join(map(str, arm.steps))}",
            arm.samples,
            Share(arm.accuracy, arm.low, arm.high),
        )
        for arm in (found.a, found.b)
    ]
    arms = Grid("The questions that both answered", ("arm", "run", "step", "samples", "accuracy [95 % interval]"), rows)
    return Verdict((found.verdict, *notes_of({"B": found}, baseline="A")), arms)


def _evaluations_of(info: RunInfo) -> RunInfo:
    """What the curves need: metrics, and for their intervals the held-out rollouts."""
    places = {place for part in info.parts if (place := step_of(info, part))[1] == "eval"}
    return replace(of_steps(info, places), grades=[])
