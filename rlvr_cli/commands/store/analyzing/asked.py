"""What `rlvr analyze` is asked: which query, of which runs, with which parameters.

Enters: an AnalyzeConfig. Leaves: a `NamedQuery`, the values of its parameters, paths of runs; an error for what cannot be meant.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.queries.named_queries import NamedQuery, named_queries, parse_query
from rlvr_cli.config.parsing.command_line import typed_options
from rlvr_cli.config.parsing.options import flag, nearest, options
from rlvr_cli.config.parsing.sources import read_options, resolve
from rlvr_cli.config.store.analyze import AnalyzeConfig
from rlvr_cli.errors import RlvrError, UsageError
from rlvr_cli.runs.readers import (
    RunInfo,
    expanded_by_shell,
    is_pattern,
    is_run,
    latest_run,
    resolve_runs,
    run_names,
)
from rlvr_cli.runs.several import read_runs
from rlvr_cli.runs.storage.files import shown
from rlvr_cli.terminal import console, help

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
REPORT = "report"  # accepted in place of a query's name
REPORT_ANSWERS = (
    "One self-contained HTML page: summary, configuration, curves, alarms, rollouts to browse (--out FILE)."
)


def query_rows() -> list[tuple[str, str, str]]:
    """What may be asked: name, what it answers, and its parameters."""
    rows = [(q.name, q.description, _listed(q.parameters)) for q in named_queries().values()]
    return [*rows, (REPORT, REPORT_ANSWERS, "")]


def query_page() -> str:
    """What may be asked, for reading."""
    rows = [help.Row((name,), f"{answers} {f'[{of}]' if of else ''}".strip()) for name, answers, of in query_rows()]
    footer = [
        "--set NAME=VALUE sets a parameter; --show prints a query's SQL.",
        "--format json lists them for programs.",
    ]
    return help.page("rlvr analyze QUERY [RUN ...]", "", {"Queries": rows}, footer=footer)


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


def read_and_name(
    paths: Sequence[Path], *, read: Callable[[Sequence[Path]], list[RunInfo]] = read_runs
) -> list[RunInfo]:
    """Read the runs in these directories, each once, and print their names."""
    infos = read(paths)
    for info in infos:
        console.say(f"run {shown(info.path)} ({info.metadata['status']})")
        for notice in info.notices:
            console.say(notice)
    return infos


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
    if re.fullmatch(r"[\w.,/-]*", text):
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
    by_option = {
        "phase": config.phase,
        "step": config.step,
        "category": config.category,
        "failure_kind": config.failure_kind,
        **{name: getattr(config, name) for name in OBJECTIVE},
        "rule": config.rule,
        "limit": config.limit + 1 if config.limit else None,  # one row more, to detect that rows are left out
    }
    known = _known_parameters(query)
    for name in ("phase", "step", "category", "failure_kind", "rule", *OBJECTIVE):
        if config.sources.get(name, "default") != "default" and name not in known:
            raise UsageError(
                f"{query.name or 'This query'} has no {flag(name)}.",
                f"Its parameters: {_listed(query.parameters) or 'none'}."
                if query.name in named_queries()
                else f"Use its value in the SQL, as in WHERE {name} = ${name}, or leave the option out.",
            )
    flags = {k: v for k, v in by_option.items() if config.sources.get(k) != "default" or k not in query.parameters}
    given: dict[str, Any] = {}
    for text in config.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text} has no value.", "Write --set NAME=VALUE, for example --set k=8.")
        try:
            given[name] = json.loads(value)
        except ValueError:
            given[name] = value
        check_parameter(query, name, given[name], given=f"--set {text}")
    return {**query.parameters, **flags, "limit": by_option["limit"], **given}


def check_parameter(query: NamedQuery, name: str, value: Any, *, given: str) -> None:
    """Check a value that a parameter of a query is given; None, and what a query of the user's own makes of it, may be anything.

    Args:
        given: the name and the value as they were written.

    Raises:
        RlvrError: there is no such parameter, or of a named query the value is not the whole number that it must be, or not
            one that the option of this name takes.
    """
    known = _known_parameters(query)
    if name not in known:
        raise UsageError(
            f"{query.name or 'This query'} has no parameter {name!r}.",
            f"Its parameters: {_listed({k: query.parameters.get(k) for k in sorted(known)}) or 'none'}.",
        )
    if value is None or query.name not in named_queries():
        return
    if name in COUNTS and not _is_count(value, name):
        several = ", or several such as k=1,2,4,8" if name == "k" else ""
        raise UsageError(f"{given}: {name} must be a whole number, {COUNTS[name]} or more{several}.")
    if any(option.name == name for option in options(AnalyzeConfig)):
        flags = read_options({name: value}, AnalyzeConfig, command="analyze", where=query.name)
        resolve(AnalyzeConfig, flags=flags, command="analyze")


def _known_parameters(query: NamedQuery) -> set[str]:
    return {*query.parameters, *re.findall(r"\$([^\W\d]\w*)", query.sql)}


def _is_count(value: Any, name: str) -> bool:
    """Whether a parameter is a whole number that is large enough; k may also be several: 1,2,4 or [1,2,4]."""
    if name == "k" and isinstance(value, str | list):
        parts = value.split(",") if isinstance(value, str) else [str(part) for part in value]
        return bool(parts) and all(re.fullmatch(r"\s*[1-9][0-9]{0,8}\s*", part) for part in parts)
    return type(value) is int and value >= COUNTS[name]


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
        if name in typed_options(config):
            raise UsageError(f"--{name} is an option of the picture.", "Add --plot FILE.png or FILE.svg.")


def _listed(parameters: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in parameters.items() if name != "limit")
