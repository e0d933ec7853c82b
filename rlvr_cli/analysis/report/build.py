"""`rlvr analyze report`: run directories -> one HTML file.

Enters: paths of runs. Leaves: an HTML file with the runs' summaries, curves, configurations, environments
and rollouts; if there are too many rollouts, the page says which are left out.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.pictures.arms import arms_of
from rlvr_cli.analysis.pictures.figures import NothingShared, TooMany, draw
from rlvr_cli.analysis.pictures.picture import Picture
from rlvr_cli.analysis.queries.database import Database, LimitReached, MemoryNeeded, open_runs
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.analysis.report.page import Browser, Grid, LeftOut, Report, Search, Setting, Share, render_page
from rlvr_cli.analysis.report.rollouts import groups_of, of_steps, pack_rollouts, step_of
from rlvr_cli.analysis.statistics.alarms import alarms_by_run
from rlvr_cli.analysis.statistics.comparison import held_out_intervals
from rlvr_cli.analysis.statistics.estimators import Estimate
from rlvr_cli.analysis.statistics.pairwise import comparison_tables
from rlvr_cli.analysis.statistics.progress import read_progress
from rlvr_cli.analysis.summary import COMPARISON, SEARCH, WITHOUT_ACCURACY, RunSummary, summarize
from rlvr_cli.errors import RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.runs.readers import RunInfo
from rlvr_cli.runs.several import read_here
from rlvr_cli.runs.storage.files import atomic_write, read_regular
from rlvr_cli.runs.storage.sources import place_of, source_of

SECONDS = 300.0  # time limit of each query
METRICS = {  # metrics that are drawn besides the columns of `curves`: column -> phase, metric
    "mismatch_mean": ("train", "mismatch/logprob_mean_abs"),
    "mismatch_largest": ("train", "mismatch/logprob_max_abs"),
    "nll": ("train", "loss/nll"),
    "best_score": ("eval", "discover/best"),
    "turns": ("train", "episodes/turns"),
    "tool_calls": ("train", "episodes/tool_calls"),
    "tool_errors": ("train", "episodes/tool_errors"),
    "environment_share": ("train", "episodes/environment_share"),
}
CURVES_LACK = "The curves are"
SEARCH_TITLES = {
    "searches": "Attempts and scores",
    "lineage": "Where the best program comes from",
    "attempt_errors": "What was not valid",
    "best_score_at_k": "Best score of k attempts",
}
COLUMNS = (
    *(
        "eval_reward",
        "train_reward",
        "groups_with_signal",
        "length",
        "length_correct",
        "length_wrong",
        "truncated_share",
    ),
    *("entropy", "grad_norm", "clip_fraction", *METRICS),
)


def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of these runs.

    Args:
        out: the file to write or replace; None for report.html in the first run, or NAME-report.html here if that is in object storage.

    Returns:
        The path of the file.

    Raises:
        RlvrError: a run cannot be read, or the file cannot be written.
    """
    infos = read_here(runs)
    with open_runs(infos, timeout_seconds=SECONDS) as database:
        groups = groups_of(database, [info.id for info in infos])
        browser = pack_rollouts(database, infos, groups, timeout_seconds=SECONDS)
        report = report_of(database, infos, of_alarms=database, browser=browser, timeout_seconds=SECONDS)
    path = _usual_place(infos[0]) if out is None else out
    fault_point("report")
    atomic_write(path, render_page(report).encode())
    return path


def _usual_place(run: RunInfo) -> Path:
    """In the run, or in the working directory for a run in object storage: what is here of it is a cache."""
    if source_of(run.path) is None:
        return run.path / "report.html"
    return Path(f"{place_of(run.path).rpartition('/')[2]}-report.html")


# Tables and charts


def report_of(
    database: Database,
    infos: Sequence[RunInfo],
    *,
    of_alarms: Database,
    browser: Browser,
    timeout_seconds: float,
) -> Report:
    """What a page shows of these runs; where a summary, an interval or alarms take too much, the page lacks them and says so.

    Args:
        database: has what the curves and searches need of the runs.
        of_alarms: has all of them.
    """
    left_out: list[LeftOut] = []
    return Report(
        runs=tuple(info.id for info in infos),
        alarms=alarms_of(of_alarms, infos, left_out=left_out),
        summary=summary_tables(infos, timeout_seconds=timeout_seconds, left_out=left_out),
        charts=charts_of(database, [[info] for info in infos], left_out=left_out),
        browser=browser,
        configuration=configuration_of(infos),
        environment=environment_of(infos),
        searches=searches_of(database, infos),
        left_out=left_out,
    )


@contextmanager
def said_if_too_much(left_out: list[LeftOut] | None, section: str, lacking: str, command: str) -> Iterator[None]:
    """A block whose queries may reach their limits: then `left_out` says what is lacking, and which command has more time. So it does of
    a picture of too many lines, or of arms whose runs share nothing."""
    try:
        yield
    except (LimitReached, TooMany, NothingShared) as error:
        if left_out is None:
            raise
        has_more = not isinstance(error, MemoryNeeded)
        left_out.append(LeftOut(section, f"{lacking} left out. {error.problem}", command if has_more else ""))


def _asked(words: str, infos: Sequence[RunInfo], more: str) -> str:
    runs = " ".join(shlex.quote(place_of(info.path)) for info in infos)
    return f"rlvr analyze {words} {runs} {more} --timeout-seconds 3600"


def alarms_of(database: Database, infos: Sequence[RunInfo], *, left_out: list[LeftOut]) -> list[dict[str, str]]:
    """The alarms of these runs."""
    alarms = []
    found = alarms_by_run(database, infos)
    for info in infos:
        with said_if_too_much(left_out, "Alarms", f"The alarms of {info.id} are", ""):
            for alarm in found(info):
                sentence = f"{info.id}: {alarm.sentence}" if len(infos) > 1 else alarm.sentence
                alarms.append(
                    {
                        "name": alarm.name,
                        "severity": alarm.severity,
                        "sentence": sentence,
                        "query": alarm.command_for(info.path),
                    }
                )
    return alarms


def first_and_last(info: RunInfo) -> list[tuple[str, str, int]]:
    """The run, phase and step of a run's first and last evaluation; without evaluations, of its first and last training step."""
    steps = {step_of(info, part) for part in info.parts}
    for phase in ("eval", "train"):
        if found := sorted(step for step in steps if step[1] == phase):
            return list(dict.fromkeys((found[0], found[-1])))
    return []


def summary_tables(infos: Sequence[RunInfo], *, timeout_seconds: float, left_out: list[LeftOut]) -> list[Grid]:
    """Summaries of the first and the last evaluation of each run; without evaluations, of its first and last training rollouts.

    Of a comparison of two runs, its table.
    """
    summaries = []
    for info in infos:
        for place in first_and_last(info) if info.metadata["command"] not in WITHOUT_ACCURACY else []:
            _, phase, step = place
            command = _asked("summary", [info], f"--phase {phase} --step {step}")
            with said_if_too_much(left_out, "Summary", f"The summary of {phase} {step} of {info.id} is", command):
                chosen = of_steps(info, {place})
                summaries.append(summarize(chosen, phase=phase, step=step, timeout_seconds=timeout_seconds))
    compared = [
        grid
        for info in infos
        if info.metadata["command"] == COMPARISON
        for grid in _comparison(info, timeout_seconds=timeout_seconds)
    ]

    def named(summary: RunSummary) -> tuple[Any, ...]:
        return summary.run_id if len(infos) > 1 else None, f"{summary.phase} {summary.step}"

    which = ("run", "step")
    grids = [
        Grid(
            "Accuracy, lengths and entropy",
            (*which, "questions", "samples", "accuracy [95 % interval]", "mean reward", "tokens", "if correct", "if wrong",
             "truncated", "entropy", "log-prob.", "failed grades"),
            [
                (*named(s), s.questions, s.samples, _share(s.accuracy), s.mean_reward and s.mean_reward.value, s.mean_tokens,
                 s.mean_tokens_correct, s.mean_tokens_wrong, f"{s.truncated_share:.1%}", s.mean_entropy, s.mean_logprob,
                 s.grade_errors or None)
                for s in summaries
            ],
        ),
        Grid(
            "Categories",
            (*which, "category", "samples", "share [95 % interval]", "tokens"),
            [(*named(s), c.category, c.samples, _share(c.share), c.mean_tokens) for s in summaries for c in s.categories],
        ),
        Grid(
            "Why there was no reward",
            (*which, "failure kind", "samples", "share of all"),
            [(*named(s), kind, count, Share(count / s.samples)) for s in summaries for kind, count in s.failure_kinds],
        ),
        Grid(
            "Of k samples",
            (*which, "k", "questions", "pass@k [95 % interval]", "best@k [95 % interval]", "majority@k [95 % interval]"),
            [
                (*named(s), a.k, a.questions, _share(a.pass_at_k), *(found and _share(found) for found in (a.best_at_k, a.majority_at_k)))
                for s in summaries for a in s.at_k
            ],
        ),
    ]  # fmt: skip
    return [_without_empty_columns(grid) for grid in [*compared, *grids] if grid.rows]


def _comparison(info: RunInfo, *, timeout_seconds: float) -> list[Grid]:
    tables = comparison_tables(info, timeout_seconds=timeout_seconds)
    return [Grid(f"Comparison {info.id}", table.columns, table.rows) for table in tables]


def _without_empty_columns(grid: Grid) -> Grid:
    kept = [i for i in range(len(grid.columns)) if any(row[i] is not None for row in grid.rows)]
    return Grid(grid.title, tuple(grid.columns[i] for i in kept), [tuple(row[i] for i in kept) for row in grid.rows])


def _share(estimate: Estimate) -> Share:
    return Share(estimate.value, estimate.low, estimate.high)


def charts_of(
    database: Database, runs: Sequence[Sequence[RunInfo]], *, left_out: list[LeftOut] | None = None
) -> Picture:
    """The curves of all arms, with more panels than `rlvr analyze curves --plot` has; an arm has a run, or one for each seed.

    Of searches alone: their scores, by attempt.

    Args:
        left_out: says so if the intervals take too much, or if there are more runs than one can tell apart; None: that is an error.
    """
    picture = Picture(())
    if all(info.metadata["command"] == SEARCH for arm in runs for info in arm):
        query = named_queries()["attempts"]
        result = database.select(query.sql, query.parameters)
        scored = any(row["score"] is not None for row in result.records())
        with said_if_too_much(left_out, "Curves", CURVES_LACK, ""):
            picture = draw(result, query, arms_of(runs)) if scored else picture
        return picture
    query = named_queries()["curves"]
    columns = ", ".join(
        f"any_value(value) FILTER (phase = '{phase}' AND name = '{metric}') AS {name}"
        for name, (phase, metric) in METRICS.items()
    )
    metrics = f"SELECT run_id, step, {columns} FROM metrics GROUP BY run_id, step"
    result = database.select(
        f"WITH curves AS ({query.sql.rstrip().rstrip(';')}\n), others AS ({metrics})"
        " SELECT * FROM curves FULL JOIN others USING (run_id, step) ORDER BY run_id, step"
    )
    drawn = [c for c in COLUMNS if any(row[result.columns.index(c)] is not None for row in result.rows)]
    if not drawn:
        return picture
    arms, held_out = arms_of(runs), None
    command = _asked("curves", [info for arm in runs for info in arm], "--plot curves.svg")
    with said_if_too_much(left_out, "Curves", "The intervals of the held-out reward are", command):
        held_out = held_out_intervals(database, [arm.runs for arm in arms])
    progress = read_progress(database) if any(len(arm.runs) > 1 for arm in arms) else None
    plot = replace(query, plot={"x": "step", "y": ",".join(drawn)})
    with said_if_too_much(left_out, "Curves", CURVES_LACK, ""):
        picture = draw(result, plot, arms, progress=progress, held_out=held_out)
    return picture


def searches_of(database: Database, infos: Sequence[RunInfo]) -> list[Search]:
    """Of each run of `rlvr discover`: its best program, where it comes from, what failed, and its scores."""
    if not any(info.metadata["command"] == SEARCH for info in infos):
        return []  # without going through the rollouts
    queries = named_queries()
    programs = {
        row["run_id"]: row
        for row in database.select(
            f"WITH searches AS ({queries['searches'].sql.rstrip().rstrip(';')})"
            " SELECT searches.run_id, best_attempt, best_score, candidate.program AS program FROM searches"
            " LEFT JOIN rollouts ON (rollouts.run_id, candidate.number) = (searches.run_id, best_attempt)"
        ).records()
    }
    grids: dict[str, list[Grid]] = {}
    for name, title in SEARCH_TITLES.items():
        query = queries[name]
        result = database.select(query.sql, query.parameters)
        for info in infos:
            rows = [tuple(map(_cell, row[1:])) for row in result.rows if row[0] == info.id]
            if rows:
                grids.setdefault(info.id, []).append(_without_empty_columns(Grid(title, result.columns[1:], rows)))
    return [
        Search(info.id, row["best_attempt"], row["best_score"], _program(info, row), grids.get(info.id, []))
        for info in infos
        if (row := programs.get(info.id)) is not None
    ]


def _program(info: RunInfo, row: Mapping[str, Any]) -> str | None:
    """The best program of a search: an attempt's is in its row, the one to start from in best/."""
    if row["best_attempt"] is not None or row["best_score"] is None:
        return row["program"]
    try:
        return read_regular(info.path, "best/program.py").decode(errors="replace")
    except RlvrError:
        return None


def _cell(value: Any) -> Any:
    return ", ".join(map(str, value)) or None if isinstance(value, list) else value


def configuration_of(infos: Sequence[RunInfo]) -> list[Setting]:
    """The options of the runs, with the source of each value."""
    configs = [_mapping(info.metadata.get("config")) for info in infos]
    sources = [_mapping(info.metadata.get("sources")) for info in infos]
    return [
        Setting(
            name,
            tuple(_text(config[name]) if name in config else None for config in configs),
            tuple(str(source.get(name, "")) for source in sources),
        )
        for name in dict.fromkeys(name for config in configs for name in config)
    ]


def environment_of(infos: Sequence[RunInfo]) -> list[Setting]:
    """The runs' metadata: command, status, inputs, machine and versions."""
    kept = ("command", "status", "created_at", "updated_at", "wall_seconds", "seed", "updates", "facts", "sampler")
    flat = []
    for info in infos:
        environment = dict(_mapping(info.metadata.get("environment")))
        if isinstance(environment.get("argv"), list):
            environment["argv"] = " ".join(map(str, environment["argv"]))
        known = {key: info.metadata[key] for key in kept if key in info.metadata}
        flat.append(dict(_flat({**known, **environment})))
    names = dict.fromkeys(name for values in flat for name in values)
    settings = [Setting(name, tuple(values.get(name) for values in flat)) for name in names]
    return [s for s in settings if set(s.values) != {None}]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
