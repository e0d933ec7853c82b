"""The picture of `rlvr analyze --plot`.

Enters: the result of a query, and runs by arm. Leaves: a file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.queries.database import Database
from rlvr_cli.analysis.queries.named_queries import NamedQuery
from rlvr_cli.commands.store.analyzing.asked import OBJECTIVE
from rlvr_cli.config.store.analyze import AnalyzeConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import RunInfo
from rlvr_cli.terminal import console, tables
from rlvr_cli.types import Table


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

    result = replace(result, columns=tuple(tables.unique(result.columns)))
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


def check_arms(arms: Sequence[Sequence[RunInfo]]) -> None:
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
