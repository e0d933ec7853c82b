"""What `rlvr analyze` prints: as many rows as are asked for, of which runs, and why there are none.

Enters: the result of a query. Leaves: rows on stdout, sentences on stderr.
"""

import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlvr_cli.analysis.queries.columns import kind_of
from rlvr_cli.analysis.queries.database import Database
from rlvr_cli.analysis.queries.named_queries import NamedQuery
from rlvr_cli.analysis.summary import with_accuracy
from rlvr_cli.config.store.analyze import AnalyzeConfig
from rlvr_cli.runs.manifest import ROLLOUTS, part_name
from rlvr_cli.runs.readers import RunInfo, prompt_template
from rlvr_cli.runs.storage.sources import place_of
from rlvr_cli.terminal import cases, console, tables
from rlvr_cli.types import Table


def answered(infos: Sequence[RunInfo], query: str = "") -> list[RunInfo]:
    """Return the runs with right and wrong answers, as `query` needs them, and say which are passed over. Raises RlvrError if none has."""
    kept = with_accuracy(infos, query)
    if len(kept) < len(infos):
        passed = ", ".join(info.id for info in infos if info not in kept)
        console.say(f"passed over, since searches and comparisons have no accuracy: {passed}")
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
    """The rows with the runs in the order typed, if the query sorts them by run first; any other order has a meaning of its own.

    `failures` sorts by run but for the row beyond its limit, which `select` has left out.
    """
    if not re.match(r"\s*(turn = \$limit, )?run_id\b", query.sql.rpartition("ORDER BY")[2]):
        return result
    place = result.columns.index("run_id")
    typed = {info.id: i for i, info in enumerate(infos)}
    return replace(result, rows=sorted(result.rows, key=lambda row: typed[row[place]]))


def runs_without_rows(result: Table, infos: Sequence[RunInfo]) -> str:
    """Say of which runs a SELECT has no rows; "" where that cannot be known, as its `run_id` names none, or rows were left out."""
    if result.more or "run_id" not in result.columns:
        return ""
    place = result.columns.index("run_id")
    found = {row[place] for row in result.rows if isinstance(row[place], str)}
    missing = [info.id for info in infos if info.id not in found]
    return f"no rows of {', '.join(missing)}" if 0 < len(missing) < len(infos) else ""


def shown_rows(result: Table, limit: int, *, runs: int) -> tuple[Table, str]:
    """The rows to show, and what they are in words: if there are more than `limit` (0: all), each run gets its share of it.

    A result that was not fetched whole has the first rows, whichever run they are of.
    """
    if not 0 < limit < len(result.rows) and not result.more:
        return result, ""
    first, which = result.rows[:limit], f"the first {limit} rows"
    if runs < 2 or "run_id" not in result.columns or kind_of(result, "run_id") != "text":
        return replace(result, rows=first, more=True), which
    place = result.columns.index("run_id")
    if result.more:
        seen = len({row[place] for row in first} - {None})
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
    return f"no rows; there are rollouts of {'; '.join(map(_stored_steps, infos)) or 'none'}"


def _stored_steps(info: RunInfo) -> str:
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
