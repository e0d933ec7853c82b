"""`rlvr analyze`: a named query or SQL -> rows on stdout.

Enters: an AnalyzeConfig. Leaves: the result on stdout; on stderr the run that it is about and what was left out.
"""

import difflib
import re
from dataclasses import replace
from pathlib import Path

from rlvr_cli import display
from rlvr_cli.config import AnalyzeConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.queries import NamedQuery, named_queries, open_runs, parse_query
from rlvr_cli.store import RunInfo, latest_run, read_run, resolve_run
from rlvr_cli.summary import combined_tables, run_files, summarize


def run(config: AnalyzeConfig) -> None:
    """Answer one query. Raises RlvrError for what the user can put right."""
    if config.list:
        rows = [(q.name, q.description) for q in named_queries().values()]
        return display.table(("query", "answers"), rows, output=config.format)
    if is_run(config.query, config.runs_dir):  # rlvr analyze RUN...
        config = replace(config, query="summary", runs=(config.query, *config.runs))
    query = find_query(config.query)
    if config.show:
        return display.source(query.sql)

    paths = [resolve_run(r, config.runs_dir) for r in config.runs] or [latest_run(config.runs_dir)]
    infos = {p.resolve(): read_run(p) for p in paths}.values()
    for info in infos:
        display.say(f"run {info.path} ({info.metadata['status']})")
    if config.plot and query.name != "curves":
        raise RlvrError(
            f"There is no picture of {query.name or 'this query'}.", "Draw: rlvr analyze curves RUN --plot FILE.png"
        )
    if query.name == "summary":
        return summarize_runs(list(infos), config)
    options = {
        "phase": config.phase,
        "step": config.step,
        "category": config.category,
        "failure_kind": config.failure_kind,
        "limit": config.limit + 1 if config.limit else None,  # one more, to see that there are more
    }
    # A query's own default goes before that of the option, and a flag before both.
    chosen = {k: v for k, v in options.items() if config.sources.get(k) != "default" or k not in query.parameters}
    with open_runs([run_files(i) for i in infos], timeout_seconds=config.timeout_seconds) as database:
        parameters = {**query.parameters, **chosen, "limit": options["limit"]}
        result = database.select(query.sql, parameters, limit=0 if config.plot else config.limit)
    if config.plot:
        from rlvr_cli.figures import curves
        from rlvr_cli.plots import draw

        draw(curves(result), Path(config.plot), title=", ".join(info.id for info in infos))
        display.say(f"picture {config.plot}")
        result = replace(result, rows=result.rows[: config.limit or None], more=0 < config.limit < len(result.rows))
    if query.name == "failures" and config.format == "table":
        display.cases(result)
    else:
        display.tables([result], output=config.format)
    if result.more:
        display.say(f"the first {config.limit} rows; --limit 0 shows all of them")
    if not result.rows:
        display.say("no rows")


def is_run(text: str, runs_dir: str) -> bool:
    """Whether the argument names a run instead of a query; a named query goes first."""
    if text in named_queries() or "\0" in text or len(text) > 255:
        return False
    return any((folder / text / "run.json").is_file() for folder in (Path(), Path(runs_dir)))


def find_query(text: str) -> NamedQuery:
    """The named query, the ``.sql`` file, or the SQL that the argument is.

    Raises:
        RlvrError: it is a word that names no query, or a file that cannot be read.
    """
    queries = named_queries()
    if text in queries:
        return queries[text]
    if text.endswith(".sql") and len(text.splitlines()) == 1:
        try:
            return parse_query(Path(text).stem, Path(text).read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise RlvrError(f"Cannot read the query {text}: {e}", "A .sql file holds one SELECT, in UTF-8.") from e
    if re.fullmatch(r"[\w./-]*", text):
        near = difflib.get_close_matches(text, queries, n=1)
        raise RlvrError(
            f"There is no query named {text!r}." + (f" Did you mean {near[0]}?" if near else ""),
            f"Named queries: {', '.join(queries)}. Or give a SELECT in quotes, or a .sql file."
            " Runs come after it: rlvr analyze summary RUN.",
        )
    return NamedQuery("", "", {}, text)


def summarize_runs(infos: list[RunInfo], config: AnalyzeConfig) -> None:
    """Print the summary of each run, several below each other in the same tables."""
    summaries = [
        summarize(i, phase=config.phase, step=config.step, timeout_seconds=config.timeout_seconds) for i in infos
    ]
    if len(summaries) == 1:
        return display.summary(summaries[0], output=config.format)
    display.tables(combined_tables(summaries), output=config.format, missing="–")
