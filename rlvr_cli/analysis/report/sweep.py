"""The report of a sweep: Markdown and two pictures, in the directory of its runs.

Enters: what the experiment asks, its arms, and their runs. Leaves: report.md, curves.svg and minutes.svg.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.alarms import run_alarms
from rlvr_cli.analysis.arms import arms_of
from rlvr_cli.analysis.comparison import held_out_intervals
from rlvr_cli.analysis.database import Database
from rlvr_cli.analysis.figures import Wishes, draw, read_progress
from rlvr_cli.analysis.named_queries import named_queries
from rlvr_cli.analysis.plots import save_plot
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.files import atomic_write, os_errors_as_user_errors
from rlvr_cli.runs.readers import RunInfo
from rlvr_cli.terminal.tables import as_markdown
from rlvr_cli.text import printable
from rlvr_cli.types import Table

PAGE = "report.md"
PICTURES = {"curves.svg": Wishes(), "minutes.svg": Wishes(x="minutes", panels=("eval_reward",))}
MOST_SHOWN = 1500  # characters of a response


@dataclass(frozen=True)
class Findings:
    """What a sweep asked, and what came out."""

    title: str
    look_at: str
    arms: Mapping[str, Sequence[RunInfo]]  # name -> the runs of its seeds
    tables: Sequence[Table]
    sentences: Sequence[str]
    commands: Sequence[Sequence[str]]  # that made the runs


def write_sweep_report(folder: Path, findings: Findings, database: Database) -> Path:
    """Write the report of a sweep whose runs are in `folder`, and return its path. Raises RlvrError if it cannot be written."""
    drawn = [name for name, wishes in PICTURES.items() if _draw(folder / name, findings, database, wishes=wishes)]
    lines = [
        f"# {printable(findings.title)}",
        findings.look_at,
        *(f"![{name}]({name})" for name in drawn),
        *(as_markdown(table) for table in findings.tables),
        *findings.sentences,
        *_alarms(findings),
        *_examples(findings, database),
        "## Commands",
        _fenced("\n".join(shlex.join(command) for command in findings.commands)),
    ]
    atomic_write(folder / PAGE, ("\n\n".join(line.strip("\n") for line in lines if line) + "\n").encode())
    return folder / PAGE


def _draw(path: Path, findings: Findings, database: Database, *, wishes: Wishes) -> bool:
    """Draw the curves of the arms; False where there are none, as of an evaluation."""
    arms = arms_of(list(findings.arms.values()))
    query = named_queries()["curves"]
    result = database.select(query.sql, query.parameters, limit=0)
    try:
        picture = draw(
            result,
            query,
            arms,
            wishes=wishes,
            progress=read_progress(database) if wishes.x != "updates" else None,
            held_out=held_out_intervals(database, [arm.runs for arm in arms]),
        )
    except RlvrError:
        return False
    with os_errors_as_user_errors(path):
        save_plot(picture, path)
    return True


def _alarms(findings: Findings) -> Iterator[str]:
    """What looks wrong in a run, as a list."""
    found = [
        f"- {info.id}: {alarm.sentence} (`{alarm.command_for(info.path)}`)"
        for infos in findings.arms.values()
        for info in infos
        for alarm in run_alarms(info.path)
    ]
    if found:
        yield "## Alarms"
        yield "\n".join(found)


def _examples(findings: Findings, database: Database) -> Iterator[str]:
    """Of each arm's first run, at the first, middle and last evaluation, one response that was right and one that was wrong."""
    yield "## Responses"
    for arm, infos in findings.arms.items():
        rows = list(database.select(_EXAMPLES, {"run": infos[0].id}, limit=0).records())
        steps = sorted({row["step"] for row in rows})
        for step in dict.fromkeys([*steps[:1], *steps[len(steps) // 2 : len(steps) // 2 + 1], *steps[-1:]]):
            yield from (_example(arm, row) for row in rows if row["step"] == step)


def _example(arm: str, row: Mapping[str, Any]) -> str:
    kind = "right" if row["is_right"] else "wrong"
    return (
        f"{arm}, after {row['step']} updates, {kind} (question {printable(row['example_id'], keep='')}, truth "
        f"`{printable(str(row['ground_truth']), keep='').replace('`', chr(39))}`):\n\n{_fenced(_shortened(row['response']))}"
    )


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} … ({len(text) - MOST_SHOWN:,} more characters)"


def _fenced(text: str) -> str:
    """A text as a block of code: model text must not become Markdown."""
    shown, fence = printable(text), "```"
    while fence in shown:
        fence += "`"
    return f"{fence}text\n{shown}\n{fence}"


_EXAMPLES = """
    SELECT step, reward > 0.5 AND NOT isnan(reward) AS is_right, example_id, ground_truth, response
    FROM rollouts
    WHERE run_id = $run AND phase = 'eval' AND reward IS NOT NULL
    QUALIFY row_number() OVER (PARTITION BY step, is_right ORDER BY example_id, sample_index) = 1
    ORDER BY step, is_right DESC
"""
