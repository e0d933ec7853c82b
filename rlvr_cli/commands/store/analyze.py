"""`rlvr analyze`: a named query or SQL -> rows on stdout.

Enters: an AnalyzeConfig. Leaves: the result on stdout; on stderr the runs that were read, and whether rows were left out.
"""

import json
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.pictures.arms import arm_names, split_arms
from rlvr_cli.analysis.queries.database import Database, open_runs
from rlvr_cli.analysis.queries.named_queries import NamedQuery, named_queries, parse_query
from rlvr_cli.analysis.statistics.at_k import at_k_table
from rlvr_cli.analysis.statistics.mismatch import mismatch_sentences
from rlvr_cli.analysis.statistics.objective import objective_sentences
from rlvr_cli.analysis.summary import SEARCH, combined_tables, search_tables, summarize, without_searches
from rlvr_cli.config.parsing.options import flag, nearest
from rlvr_cli.config.store.analyze import AnalyzeConfig
from rlvr_cli.errors import RlvrError, UsageError
from rlvr_cli.runs.manifest import ROLLOUTS, part_name
from rlvr_cli.runs.readers import (
    RunInfo,
    expanded_by_shell,
    is_pattern,
    is_run,
    latest_run,
    prompt_template,
    read_run,
    resolve_runs,
    run_names,
)
from rlvr_cli.runs.storage.files import shown
from rlvr_cli.runs.storage.sources import place_of
from rlvr_cli.terminal import cases, console, help, tables
from rlvr_cli.types import Table

COUNTS = {
    "k": 1,
    "bins": 1,
    "examples": 0,
    "least": 0,
    "step": 0,
    "step_a": 0,
    "step_b": 0,
    "attempt": 0,
}  # parameters that are whole numbers, and their least values
OBJECTIVE = (
    "loss_type",
    "length_normalization",
    "normalize_constant",
    "std_normalization",
)  # options of the query of this name
OF_ANSWERS = (
    *("at_k", "best_at_k", "categories", "curves", "hardest", "learned_and_forgotten", "migration", "pass_at_k"),
    "thinking_budget",
)  # queries of right and wrong answers, which searches do not have
REPORT = "report"  # accepted in place of a query's name
REPORT_ANSWERS = (
    "One self-contained HTML page: summary, configuration, curves, alarms, rollouts to browse (--out FILE)."
)


def run(config: AnalyzeConfig) -> None:
    """Answer one query. Raises RlvrError for user errors."""
    if config.list and config.format == "table":
        return console.print_page(query_page())
    if config.list:
        rows = [(q.name, q.description, _listed(q.parameters)) for q in named_queries().values()]
        rows.append((REPORT, REPORT_ANSWERS, ""))
        return tables.print_table(("query", "answers", "parameters"), rows, output=config.format)
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
    infos = _read([path for arm in arms for path in arm])
    if query.name == "summary":
        return summarize_runs(infos, config, parameters)
    if query.name in OF_ANSWERS:
        infos = answered(infos)
        kept = {info.path.resolve() for info in infos}
        arms = [left for arm in arms if (left := [path for path in arm if path.resolve() in kept]) or not arm]
    with open_runs(infos, timeout_seconds=config.timeout_seconds) as database:
        if query.name == "at_k":
            result, left_out = at_k_table(database, parameters)
        else:
            left_out: list[str] = []
            divides = len(infos) > 1 and query.name and "limit" not in query.parameters
            result = database.select(query.sql, parameters, limit=0 if config.plot or divides else config.limit)
        if query.name:
            result = as_typed(result, infos, query)
        for sentence in left_out:
            console.say(sentence)
        nothing = "" if result.rows or left_out else why_nothing(database, query, parameters, infos)
        if config.plot:
            by_path = {info.path.resolve(): info for info in infos}
            drawn = [[by_path[path.resolve()] for path in arm] for arm in arms]
            _check_arms(drawn)
            if query.name and nothing:
                raise RlvrError(f"{query.name} cannot be drawn: it has no rows.", f"{nothing[0].upper()}{nothing[1:]}")
            plot(result, drawn_query(query, parameters), config, database, drawn)
    sentences: list[str] = []
    if query.name == "objective":
        sentences += objective_sentences(result)
    elif query.name == "mismatch":
        sentences += mismatch_sentences(result, infos)
    print_rows(result, config, infos)
    for sentence in sentences:
        console.say(sentence)
    if nothing:
        console.say(nothing)


def answered(infos: Sequence[RunInfo]) -> list[RunInfo]:
    """Return the runs that answer questions, and say which are passed over."""
    kept = without_searches(infos)
    if len(kept) < len(infos):
        passed = ", ".join(info.id for info in infos if info not in kept)
        console.say(f"passed over, since a search has scores and no accuracy: {passed}")
    return kept


def print_rows(result: Table, config: AnalyzeConfig, infos: Sequence[RunInfo]) -> None:
    """Print as many rows as --limit allows: rollouts for reading, anything else as a table."""
    result, which = shown_rows(result, config.limit, runs=len(infos))
    if config.format == "table" and set(result.columns) >= cases.CASE_COLUMNS:
        cases.print_cases(result, templates={info.id: prompt_template(info.metadata) for info in infos})
    else:
        tables.print_tables([result], output=config.format)
    if result.more:
        console.say(f"only {which} are shown; --limit 0 shows all of them")


def as_typed(result: Table, infos: Sequence[RunInfo], query: NamedQuery) -> Table:
    """The rows with the runs in the order typed, if the query sorts them by run first; any other order has a meaning of its own."""
    if not re.match(r"\s*run_id\b", query.sql.rpartition("ORDER BY")[2]):
        return result
    place = result.columns.index("run_id")
    typed = {info.id: i for i, info in enumerate(infos)}
    return replace(result, rows=sorted(result.rows, key=lambda row: typed[row[place]]))


def shown_rows(result: Table, limit: int, *, runs: int) -> tuple[Table, str]:
    """The rows to show, and what they are in words: if there are more than `limit` (0: all), each run gets its share of it.

    A result that was not fetched whole has the first rows, whichever run they are of.
    """
    if not 0 < limit < len(result.rows) and not result.more:
        return result, ""
    first, which = result.rows[:limit], f"the first {limit} rows"
    if runs < 2 or "run_id" not in result.columns:
        return replace(result, rows=first, more=True), which
    place = result.columns.index("run_id")
    if result.more:
        seen = len({row[place] for row in first})
        return replace(result, rows=first), f"{which}, which are of {seen} of the {runs} runs,"
    left = Counter(row[place] for row in result.rows)
    kept: Counter[Any] = Counter()
    while sum(kept.values()) < limit:
        for run in [run for run in left if kept[run] < left[run]][: limit - sum(kept.values())]:
            kept[run] += 1
    rows = []
    for row in result.rows:
        if kept[row[place]] > 0:
            kept[row[place]] -= 1
            rows.append(row)
    return replace(result, rows=rows, more=True), f"{limit} of {len(result.rows):,} rows, the first ones of each run,"


def why_nothing(database: Database, query: NamedQuery, parameters: Mapping[str, Any], infos: Sequence[RunInfo]) -> str:
    """Say why a query has no rows."""
    if query.name == "metrics":
        names = [name for (name,) in database.select("SELECT DISTINCT name FROM metrics ORDER BY name").rows]
        return (
            f"no metric is named like {parameters['names']!r}, where % stands for any text; there are "
            f"{textwrap.shorten(', '.join(names), 4000, placeholder=' …') or 'none'}"
        )
    if query.name == "graders" and not database.select("SELECT 1 FROM grades", limit=1).rows:
        paths = shlex.join(place_of(info.path) for info in infos)
        return f"no second grader has judged these rollouts: rlvr grade {paths} --grader NAME"
    if query.name in ("turns", "tools"):
        in_phase = "phase = coalesce($phase::VARCHAR, phase) AND episode IS NOT NULL"
        episodes = database.select(f"SELECT count(*) FROM rollouts WHERE {in_phase}", parameters).rows[0][0]
        where = f" of phase {parameters['phase']}" if parameters["phase"] else ""
        if episodes:
            return f"no tool was called in {episodes:,} episodes{where}"
        return f"no episodes: the rollouts{where} were made without --environment and --tool"
    narrowed = any(parameters.get(name) not in (None, "") for name in ("step", "category", "failure_kind"))
    if query.name == "failures" and not narrowed:
        rows = database.select("SELECT 1 FROM rollouts WHERE phase = $phase", parameters, limit=1).rows
        if rows:
            return "no failures: every response was rewarded; rlvr analyze rollouts shows some of them"
    return f"no rows; there are rollouts of {'; '.join(map(stored_steps, infos)) or 'none'}"


def query_page() -> str:
    """The named queries with their parameters, for reading."""
    rows = [
        help.Row((q.name,), f"{q.description} {f'[{_listed(q.parameters)}]' if _listed(q.parameters) else ''}".strip())
        for q in named_queries().values()
    ]
    footer = [
        "--set NAME=VALUE sets a parameter; --show prints a query's SQL.",
        "--format json lists them for programs.",
    ]
    return help.page(
        "rlvr analyze QUERY [RUN ...]", "", {"Queries": [*rows, help.Row((REPORT,), REPORT_ANSWERS)]}, footer=footer
    )


def names_runs(config: AnalyzeConfig) -> bool:
    """Whether the first argument names runs instead of a query."""
    text = config.query
    if is_run(text, config.runs_dir) or is_pattern(text):
        return True
    return bool(config.runs) and text in expanded_by_shell([text, *config.runs])


def check_order(config: AnalyzeConfig) -> None:
    """Raise RlvrError if a query stands after runs; a run of that name is meant as a run."""
    for word in config.runs:
        is_query = word in (REPORT, *named_queries()) or re.match(r"\s*(SELECT|WITH)\s", word, re.IGNORECASE)
        if is_query and not is_run(word, config.runs_dir):
            runs = [config.query, *(name for name in config.runs if name != word)]
            raise RlvrError(
                f"There is no run {word!r}; it is a query, which stands before the runs.",
                f"Did you mean: rlvr analyze {shlex.join([word, *runs])}",
            )


def named_runs(config: AnalyzeConfig) -> Sequence[Path]:
    """Return the runs of the command line, or the latest one."""
    named = resolve_runs(config.runs, config.runs_dir)
    console.report_passed_over(named.others)
    return named.runs or [latest_run(config.runs_dir)]


def stored_steps(info: RunInfo) -> str:
    """The phases and steps that a run has rollouts of, as text."""
    steps: dict[str, set[int]] = {}
    for part in info.parts:
        if name := part_name(f"{ROLLOUTS}/{part.name}"):
            steps.setdefault(name.phase, set()).add(name.step)
    held = [
        f"{phase} step{'s' if len(of) > 1 else ''} {', '.join(map(str, _ends(of)))}"
        for phase, of in sorted(steps.items())
    ]
    return f"{info.id}: {' and '.join(held) or 'none'}"


def _ends(steps: set[int]) -> list[Any]:
    ordered = sorted(steps)
    return ordered if len(ordered) < 6 else [*ordered[:3], "…", ordered[-1]]


def report(config: AnalyzeConfig) -> None:
    """Write the HTML report of the runs."""
    from rlvr_cli.analysis.report.build import write_report
    from rlvr_cli.analysis.statistics.alarms import run_alarms

    ignored = [name for name in _given(config) if name not in ("query", "runs", "runs_dir", "out")]
    if ignored:
        raise UsageError(
            f"{flag(ignored[0])} has no effect on the report, which has all curves and rollouts.",
            "Leave it out, or name a query: rlvr analyze --list",
        )
    paths = named_runs(config)
    alarms = [
        {
            "name": alarm.name,
            "severity": alarm.severity,
            "sentence": f"{path.name}: {alarm.sentence}" if len(paths) > 1 else alarm.sentence,
            "query": alarm.command_for(path),
        }
        for path in paths
        for alarm in run_alarms(path)
    ]
    page = write_report(paths, Path(config.out) if config.out else None, alarms=alarms)
    console.say(f"page {page} ({page.stat().st_size / 1e6:.1f} MB); open it in a browser")


def _given(config: AnalyzeConfig) -> list[str]:
    """The options that were given on the command line."""
    return [name for name, source in config.sources.items() if source == "flag"]


def check_plot(query: NamedQuery, config: AnalyzeConfig) -> None:
    """Raise RlvrError if there can be no picture, or if an option of the picture has no effect without one."""
    if config.plot:
        from rlvr_cli.analysis.pictures.plots import check_ending

        if query.plot is None:
            drawn = ", ".join(q.name for q in named_queries().values() if q.plot is not None)
            raise RlvrError(
                f"There is no picture of {query.name}: it is for reading.",
                f"--plot draws {drawn}, and a SELECT of an x such as step and columns of numbers.",
            )
        return check_ending(Path(config.plot))
    for name in ("x", "panels", "smooth", "log", "title"):
        if name in _given(config):
            raise UsageError(f"--{name} is an option of the picture.", "Add --plot FILE.png or FILE.svg.")


def drawn_query(query: NamedQuery, parameters: Mapping[str, Any]) -> NamedQuery:
    """The query with what its picture has; that of `objective` has no bars of another one if none was chosen."""
    if query.name != "objective" or any(parameters[name] is not None for name in OBJECTIVE):
        return query
    return replace(query, plot={**(query.plot or {}), "y": "push_share"})


def plot(
    result: Table, query: NamedQuery, config: AnalyzeConfig, database: Database, arms: Sequence[Sequence[RunInfo]]
) -> None:
    """Draw the result into the file of --plot."""
    from rlvr_cli.analysis.pictures.arms import arms_of
    from rlvr_cli.analysis.pictures.figures import Wishes, draw
    from rlvr_cli.analysis.pictures.plots import save_plot
    from rlvr_cli.analysis.statistics.comparison import held_out_intervals
    from rlvr_cli.analysis.statistics.progress import read_progress

    named = arms_of(arms)
    wishes = Wishes(
        x=config.x,
        panels=tuple(name for text in config.panels for name in text.split(",") if name),
        smooth=config.smooth,
        log=config.log,
        title=config.title,
    )
    picture = draw(
        result,
        query,
        named,
        wishes=wishes,
        progress=read_progress(database),
        held_out=held_out_intervals(database, [arm.runs for arm in named]) if "eval_reward" in result.columns else None,
    )
    empty = [p for p in picture.panels if p.bars and not any(y for line in p.lines for y in line.y)]
    if empty and len(empty) < len(picture.panels) and not config.panels:
        console.say(f"all 0, and not drawn: {'; '.join(panel.title for panel in empty)}")
        picture = replace(picture, panels=tuple(panel for panel in picture.panels if panel not in empty))
    save_plot(picture, Path(config.plot))
    console.say(f"picture {config.plot}")


def _check_arms(arms: Sequence[Sequence[RunInfo]]) -> None:
    """Raise RlvrError if an arm has no run, or a run is in two arms or twice in one."""
    seen: set[str] = set()
    for arm in arms:
        if not arm:
            raise RlvrError(
                "An arm has no run.", "Arms are separated by spaces, their runs by commas: A1,A2,A3 B1,B2,B3"
            )
        for info in arm:
            if info.id in seen:
                raise RlvrError(f"{info.id} is in two arms, or twice in one.", "Name each run once.")
            seen.add(info.id)


def find_query(text: str, runs_dir: str) -> NamedQuery:
    """Return the query that the argument names, or holds as SQL, or reads from a ``.sql`` file.

    Raises:
        RlvrError: no query has this name, or the file cannot be read.
    """
    queries = named_queries()
    if text in queries:
        return queries[text]
    if text.endswith(".sql") and len(text.splitlines()) == 1:
        try:
            return parse_query(text, Path(text).read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise RlvrError(f"Cannot read the query {text}: {e}", "A .sql file holds one SELECT, in UTF-8.") from e
    if re.fullmatch(r"[\w./-]*", text):
        near = ["rlvr runs"] if text == "runs" else nearest(text, queries)
        near += [f"the run {name}" for name in nearest(text, run_names(runs_dir))]
        # The word is one of a few choices, unless it can only be meant as a run.
        kind = RlvrError if "/" in text or (near and not any(name in queries for name in near)) else UsageError
        raise kind(
            f"There is no query named {text!r}, nor a run of this name in {shown(runs_dir)}."
            + (f" Did you mean {', or '.join(near)}?" if near else ""),
            f"Named queries: {', '.join(queries)}. Or give a SELECT in quotes, or a .sql file."
            " Runs come after the query: rlvr analyze summary RUN; --runs-dir is the directory that holds them.",
        )
    return NamedQuery("", "", {}, text)


def chosen_parameters(query: NamedQuery, config: AnalyzeConfig) -> dict[str, Any]:
    """The values of a query's parameters: --set > an option of that name > the query's default > the option's default.

    Raises:
        RlvrError: --set or an option names a parameter that the query does not have, or --set is not NAME=VALUE.
    """
    options = {
        "phase": config.phase,
        "step": config.step,
        "category": config.category,
        "failure_kind": config.failure_kind,
        **{name: getattr(config, name) for name in OBJECTIVE},
        "rule": config.rule,
        "limit": config.limit + 1 if config.limit else None,  # one row more, to detect that rows are left out
    }
    if query.name:
        for name in ("phase", "step", "category", "failure_kind", "rule", *OBJECTIVE):
            if config.sources.get(name, "default") != "default" and name not in query.parameters:
                raise UsageError(
                    f"{query.name} has no --{name.replace('_', '-')}.",
                    f"Its parameters: {_listed(query.parameters) or 'none'}.",
                )
    flags = {k: v for k, v in options.items() if config.sources.get(k) != "default" or k not in query.parameters}
    known = query.parameters.keys() | set(re.findall(r"\$([a-z]\w*)", query.sql))
    given: dict[str, Any] = {}
    for text in config.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text} has no value.", "Write --set NAME=VALUE, for example --set k=8.")
        if name not in known:
            raise UsageError(
                f"{query.name or 'This query'} has no parameter {name!r}.",
                f"Its parameters: {_listed({k: query.parameters.get(k) for k in sorted(known)}) or 'none'}.",
            )
        try:
            given[name] = json.loads(value)
        except ValueError:
            given[name] = value
        if name in COUNTS and given[name] is not None and not _is_count(given[name], name):
            several = ", or several such as k=1,2,4,8" if name == "k" else ""
            raise UsageError(f"--set {text}: {name} must be a whole number, {COUNTS[name]} or more{several}.")
    return {**query.parameters, **flags, "limit": options["limit"], **given}


def _is_count(value: Any, name: str) -> bool:
    """Whether a parameter is a whole number that is large enough; k may also be several: 1,2,4 or [1,2,4]."""
    if name == "k" and isinstance(value, str | list):
        parts = value.split(",") if isinstance(value, str) else [str(part) for part in value]
        return bool(parts) and all(re.fullmatch(r"\s*[1-9][0-9]{0,8}\s*", part) for part in parts)
    return type(value) is int and value >= COUNTS[name]


def summarize_runs(infos: Sequence[RunInfo], config: AnalyzeConfig, parameters: Mapping[str, Any]) -> None:
    """Print the summary of each run; several runs share the same tables."""
    phase, step = parameters["phase"], parameters["step"]
    searches = [info for info in infos if info.metadata["command"] == SEARCH]
    infos = [info for info in infos if info not in searches]
    found = [(info.id, search_tables(info, timeout_seconds=config.timeout_seconds)) for info in searches]
    if searches and step is not None:
        console.say("a search is summarized whole, all rounds together")
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


def compare_arms(config: AnalyzeConfig, parameters: Mapping[str, Any]) -> None:
    """Print how two runs, or two sets of runs, compare on the same questions; of more, each with the first."""
    from rlvr_cli.analysis.statistics.comparison import compare
    from rlvr_cli.analysis.statistics.sweep_table import compared_table, comparisons, difference_table, sentences

    if len(config.runs) < 2:
        raise UsageError(
            f"compare needs two runs or more; {len(config.runs)} were given.",
            "rlvr analyze compare RUN_A RUN_B, or with several seeds each: rlvr analyze compare A1,A2,A3 B1,B2,B3",
        )
    arms, others = split_arms(config.runs, config.runs_dir, patterns_are_arms=True)
    console.report_passed_over(others)
    infos = [_read(arm) for arm in arms]
    runs = [info for arm in infos for info in arm]
    if not all(infos) or len({info.path.resolve() for info in runs}) < sum(map(len, arms)):
        raise RlvrError(
            "compare needs at least one run in each arm, and each run only once.",
            "To compare steps of one run: rlvr analyze migration RUN",
        )
    if len(without_searches(runs)) < len(runs):
        searches = ", ".join(info.id for info in runs if info.metadata["command"] == SEARCH)
        raise RlvrError(
            f"compare is of right and wrong answers, and a search has scores: {searches}.",
            f"rlvr analyze searches {searches}",
        )
    ids = [[info.id for info in arm] for arm in infos]
    where = {"phase": parameters["phase"], "step": parameters["step"]}
    with open_runs(runs, timeout_seconds=config.timeout_seconds) as database:
        if len(arms) == 2:
            *numbers, words = compare(database, *ids, **where).tables()
        else:
            of_arms = dict(zip(arm_names(ids), ids, strict=True))
            first = next(iter(of_arms))
            found = comparisons(database, of_arms, baseline=first, **where)
            numbers = [compared_table(found, baseline=first), difference_table(found, baseline=first)]
            notes = dict.fromkeys(note for comparison in found.values() for note in comparison.notes)
            told = [*sentences(found, baseline=first), *notes]
            words = Table(("in_words",), [(text,) for text in told], title="verdict")
    if config.format != "table":
        return tables.print_tables([*numbers, words], output=config.format)
    tables.print_tables(numbers)
    console.print_text("\n" + "\n".join(textwrap.fill(text, 100) for (text,) in words.rows))


def compare_judge(config: AnalyzeConfig, parameters: Mapping[str, Any]) -> None:
    """Print how far a judge agrees with a rule or with labels, and on which responses they differ."""
    from rlvr_cli.analysis.statistics.judge_agreement import agreement_tables

    with open_runs(_read(named_runs(config)), timeout_seconds=config.timeout_seconds) as database:
        found = agreement_tables(database, parameters, labels=config.labels, limit=config.limit)
    tables.print_tables(found, output=config.format)
    if found[-1].more:
        console.say(f"only the first {config.limit} responses are shown; --limit 0 shows all of them")


def _read(paths: Sequence[Path]) -> list[RunInfo]:
    """Read the runs in these directories, each once, and print their names."""
    infos = list({path.resolve(): read_run(path) for path in paths}.values())
    for info in infos:
        console.say(f"run {shown(info.path)} ({info.metadata['status']})")
        for notice in info.notices:
            console.say(notice)
    return infos


def _listed(parameters: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in parameters.items() if name != "limit")
