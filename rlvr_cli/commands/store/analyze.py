"""`rlvr analyze`: a named query or SQL -> rows on stdout.

Enters: an AnalyzeConfig. Leaves: the result on stdout; on stderr the runs that were read, and whether rows were left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.pictures.arms import split_arms
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.queries.named_queries import NamedQuery, named_queries
from rlvr_cli.analysis.statistics.at_k import at_k_table
from rlvr_cli.analysis.statistics.mismatch import mismatch_sentences
from rlvr_cli.analysis.statistics.objective import objective_sentences
from rlvr_cli.analysis.statistics.pairwise import comparison_tables
from rlvr_cli.analysis.summary import COMPARISON, OF_ANSWERS, SEARCH, combined_tables, search_tables, summarize
from rlvr_cli.commands.store.analyzing.asked import (
    OBJECTIVE,
    REPORT,
    check_order,
    check_plot,
    chosen_parameters,
    find_query,
    named_runs,
    names_runs,
    query_page,
    query_rows,
    read_and_name,
)
from rlvr_cli.commands.store.analyzing.compared import compare_arms, compare_judge
from rlvr_cli.commands.store.analyzing.picture import check_arms, drawn_query, plot
from rlvr_cli.commands.store.analyzing.said import answered, as_typed, print_rows, runs_without_rows, why_nothing
from rlvr_cli.config.parsing.command_line import typed_options
from rlvr_cli.config.parsing.options import flag
from rlvr_cli.config.store.analyze import AnalyzeConfig
from rlvr_cli.errors import RlvrError, UsageError
from rlvr_cli.runs.manifest import ROLLOUTS
from rlvr_cli.runs.readers import RunInfo, latest_run
from rlvr_cli.terminal import console, tables

SENTENCES = {  # what all rows show, also those beyond --limit
    "mismatch": lambda result, infos, parameters: mismatch_sentences(result, infos),
    "objective": lambda result, infos, parameters: (
        objective_sentences(result) if any(parameters[name] is not None for name in OBJECTIVE) else ()
    ),
}


def run(config: AnalyzeConfig) -> None:
    """Answer one query. Raises RlvrError for user errors."""
    if config.list and config.format == "table":
        return console.print_page(query_page())
    if config.list:
        return tables.print_table(("query", "answers", "parameters"), query_rows(), output=config.format)
    if config.query not in (REPORT, *named_queries()) and names_runs(config):  # rlvr analyze RUN...
        check_order(config)
        config = replace(config, query="summary", runs=(config.query, *config.runs))
    if config.query == REPORT:
        return report(config)
    if config.out:
        raise UsageError(
            "--out is the file of the report.", "rlvr analyze report RUN --out FILE.html; a picture: --plot FILE.png"
        )
    query = find_query(config.query, config.runs_dir)
    if config.show:
        return console.print_text(query.sql)
    check_plot(query, config)
    if config.labels and query.name != "judge_agreement":
        raise UsageError("--labels is an option of judge_agreement.", "rlvr analyze judge_agreement RUN --labels FILE")
    parameters = chosen_parameters(query, config)
    if query.name == "compare":
        return compare_arms(config, parameters)
    if query.name == "judge_agreement":
        return compare_judge(config, parameters)
    answer(query, config, parameters)


def answer(query: NamedQuery, config: AnalyzeConfig, parameters: Mapping[str, Any]) -> None:
    """Answer a query of runs with a table, and with a picture if one is asked for."""
    arms, others = split_arms(config.runs, config.runs_dir)
    console.report_passed_over(others)
    arms = arms or [[latest_run(config.runs_dir)]]
    infos = read_and_name([path for arm in arms for path in arm])
    if query.name == "summary":
        return summarize_runs(infos, config, parameters)
    if query.name in OF_ANSWERS:
        infos = answered(infos, query.name)
        kept = {info.path.resolve() for info in infos}
        arms = [left for arm in arms if (left := [path for path in arm if path.resolve() in kept]) or not arm]
    with open_runs(infos, timeout_seconds=config.timeout_seconds, spills=query.name == "at_k") as database:
        if query.name == "at_k":
            result, left_out = at_k_table(database, parameters)
        else:
            left_out: list[str] = []
            divides = len(infos) > 1 and query.name and "limit" not in query.parameters
            is_whole = config.plot or divides or query.name in SENTENCES
            result = database.select(query.sql, parameters, limit=0 if is_whole else config.limit)
        if query.name:
            result = as_typed(result, infos, query)
        for sentence in left_out:
            console.say(sentence)
        nothing = "" if result.rows or left_out else why_nothing(database, query, parameters, infos)
        if config.plot:
            by_path = {info.path.resolve(): info for info in infos}
            drawn = [[by_path[path.resolve()] for path in arm] for arm in arms]
            check_arms(drawn)
            if query.name and nothing:
                raise RlvrError(f"{query.name} cannot be drawn: it has no rows.", f"{nothing[0].upper()}{nothing[1:]}")
            plot(result, drawn_query(query, parameters), config, database, drawn)
    sentences = list(SENTENCES[query.name](result, infos, parameters)) if query.name in SENTENCES else []
    print_rows(result, config, infos)
    for sentence in sentences:
        console.say(sentence)
    if query.name not in named_queries():
        nothing = nothing or runs_without_rows(result, infos)
    if nothing:
        console.say(nothing)


def report(config: AnalyzeConfig) -> None:
    """Write the HTML report of the runs."""
    from rlvr_cli.analysis.report.build import write_report

    ignored = [name for name in typed_options(config) if name not in ("query", "runs", "runs_dir", "out")]
    if ignored:
        raise UsageError(
            f"{flag(ignored[0])} has no effect on the report, which has all curves and rollouts.",
            "Leave it out, or name a query: rlvr analyze --list",
        )
    page = write_report(named_runs(config), Path(config.out) if config.out else None)
    console.say(f"page {page} ({page.stat().st_size / 1e6:.1f} MB); open it in a browser")


def summarize_runs(infos: Sequence[RunInfo], config: AnalyzeConfig, parameters: Mapping[str, Any]) -> None:
    """Print the summary of each run; several runs share the same tables."""
    phase, step = parameters["phase"], parameters["step"]
    tables_of = {SEARCH: search_tables, COMPARISON: comparison_tables}  # of runs without an accuracy
    others = [(info, tables_of[command]) for info in infos if (command := info.metadata["command"]) in tables_of]
    found = [(info.id, own(info, timeout_seconds=config.timeout_seconds)) for info, own in others]
    if found and step is not None:
        console.say("a search is summarized whole, all rounds together, and a comparison too")
    infos = [info for info in infos if info.metadata["command"] not in tables_of]
    if found and not infos:
        return tables.print_tables(combined_tables(found), output=config.format)
    held = [info for info in infos if _has_rollouts(info, phase=phase, step=step)]
    if held and len(held) < len(infos):
        without = [info.id for info in infos if info not in held]
        console.say(
            f"passed over, since without {phase} rollouts{'' if step is None else f' of step {step}'}: {', '.join(without)}"
        )
    summaries = [
        summarize(info, phase=phase, step=step, timeout_seconds=config.timeout_seconds) for info in held or infos
    ]
    if len(summaries) == 1 and not found:
        return tables.print_tables(summaries[0].tables(), output=config.format)
    tables.print_tables(combined_tables([*((s.run_id, s.tables()) for s in summaries), *found]), output=config.format)


def _has_rollouts(info: RunInfo, *, phase: str, step: int | None) -> bool:
    return any((e.folder, e.phase) == (ROLLOUTS, phase) and step in (None, e.step) for e in info.entries)
