"""The report of a sweep, in the directory of its runs: as Markdown with pictures for a paper, and as one HTML page.

Enters: what the experiment asks, its arms, and their runs. Leaves: report.md, report.html and the files of `PICTURES`.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rlvr_cli.analysis.pictures.arms import arms_of
from rlvr_cli.analysis.pictures.figures import Wishes, draw
from rlvr_cli.analysis.pictures.picture import Picture
from rlvr_cli.analysis.pictures.plots import save_plot
from rlvr_cli.analysis.queries.database import Database
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.analysis.report.build import CURVES_LACK, charts_of, said_if_too_much
from rlvr_cli.analysis.report.charts import layout_chart, layout_legend
from rlvr_cli.analysis.report.page import Grid, LeftOut, assets, render
from rlvr_cli.analysis.statistics.alarms import alarms_by_run
from rlvr_cli.analysis.statistics.comparison import held_out_intervals
from rlvr_cli.analysis.statistics.progress import read_progress
from rlvr_cli.analysis.statistics.sweep_table import OF_K
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import RunInfo
from rlvr_cli.runs.storage.files import atomic_write, os_errors_as_user_errors
from rlvr_cli.terminal import console
from rlvr_cli.terminal.tables import as_markdown
from rlvr_cli.text import printable
from rlvr_cli.types import Table

PAGE, HTML = "report.md", "report.html"
PICTURES = {
    "held_out.svg": Wishes(x="steps", panels=("eval_reward",)),
    "minutes.svg": Wishes(x="minutes", panels=("eval_reward",)),
    "curves.svg": Wishes(
        panels=("train_reward", "groups_with_signal", "length", "entropy", "grad_norm", "clip_fraction")
    ),
}
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


@dataclass(frozen=True)
class Response:
    """A response to show."""

    arm: str
    step: int
    is_right: bool
    question: str
    truth: str
    text: str

    @property
    def heading(self) -> str:
        kind = "right" if self.is_right else "wrong"
        truth = printable(self.truth, keep="").replace("`", "'")
        return f"{self.arm}, after {self.step} updates, {kind} (question {printable(self.question, keep='')}, truth `{truth}`)"


def write_sweep_report(folder: Path, findings: Findings, database: Database) -> tuple[Path, Path]:
    """Write the report of a sweep whose runs are in `folder`.

    Returns:
        the paths of its Markdown and of its HTML.

    Raises:
        RlvrError: it cannot be written.
    """
    left_out: list[LeftOut] = []
    pictures = {
        name: picture
        for name, wishes in PICTURES.items()
        if (picture := _picture(findings, database, wishes, left_out=left_out))
    }
    if (of_k := _at_k_picture(findings, left_out=left_out)) is not None:
        pictures["at_k.svg"] = of_k
    for name, picture in pictures.items():
        with os_errors_as_user_errors(folder / name):
            save_plot(picture, folder / name)
    responses, alarms = list(_responses(findings, database)), list(_alarms(findings, database))
    commands = "\n".join(shlex.join(command) for command in findings.commands)
    ((steps,),) = database.rows("SELECT count(DISTINCT step) FROM metrics")
    curves = charts_of(database, list(findings.arms.values()), left_out=left_out) if steps > 1 else Picture(())
    if of_k is not None and not curves.panels:
        curves = of_k
    lacking = list(dict.fromkeys(missing.sentence for missing in left_out))
    for sentence in lacking:
        console.say(f"note: {sentence}")
    markdown = _markdown(findings, [*map("![{0}]({0})".format, pictures), *lacking], responses, alarms, commands)
    atomic_write(folder / PAGE, markdown.encode())
    panels = [(panel, curves) for panel in curves.panels]
    if (by_time := pictures.get("minutes.svg")) is not None:
        panels[1:1] = [(panel, by_time) for panel in by_time.panels]  # beside the same against updates
    if of_k is not None and curves is not of_k:
        panels += [(panel, of_k) for panel in of_k.panels]
    page = render(
        "sweep.html.j2",
        replace(assets(), script=""),
        title=findings.title,
        findings=findings,
        legend_blocks=layout_legend(curves),
        drawings=[layout_chart(panel, picture) for panel, picture in panels],
        notes=[*curves.notes, *lacking],
        grids=[Grid(table.title, table.columns, table.rows) for table in findings.tables],
        alarms=alarms,
        responses=responses,
        commands=commands,
    )
    atomic_write(folder / HTML, page.encode())
    return folder / PAGE, folder / HTML


def _picture(findings: Findings, database: Database, wishes: Wishes, *, left_out: list[LeftOut]) -> Picture | None:
    """The curves of the arms; None where there are none, as of an evaluation, or too many. Panels that no arm has are left out."""
    arms = arms_of(list(findings.arms.values()))
    query = named_queries()["curves"]
    result = database.select(query.sql, query.parameters, limit=0)
    known = dict(zip(result.columns, zip(*result.rows, strict=True), strict=False))
    panels = tuple(name for name in wishes.panels if any(value is not None for value in known.get(name, ())))
    if not panels or len(set(known["step"])) == 1:  # one evaluation, which the tables have
        return None
    with suppress(RlvrError), said_if_too_much(left_out, "Curves", CURVES_LACK, ""):
        return draw(
            result,
            query,
            arms,
            wishes=replace(wishes, panels=panels),
            progress=read_progress(database),
            held_out=held_out_intervals(database, [arm.runs for arm in arms]),
        )
    return None


def _at_k_picture(findings: Findings, *, left_out: list[LeftOut]) -> Picture | None:
    """The table of pass@k, best@k and majority@k as a picture, where there is one that is not of too many lines."""
    table = next((table for table in findings.tables if table.title == OF_K), None)
    with said_if_too_much(left_out, "Curves", "The picture of k samples is", ""):
        return table and draw(table, named_queries()["at_k"], arms_of(list(findings.arms.values())))
    return None


def _alarms(findings: Findings, database: Database) -> Iterator[tuple[str, str]]:
    """What looks wrong in a run, and the command that shows it."""
    runs = [info for infos in findings.arms.values() for info in infos]
    found = alarms_by_run(database, runs)
    for info in runs:
        for alarm in found(info):
            yield f"{info.id}: {alarm.sentence}", alarm.command_for(info.path)


def _responses(findings: Findings, database: Database) -> Iterator[Response]:
    """Of each arm's first run, at the first, middle and last evaluation, one response that was right and one that was wrong."""
    for arm, infos in findings.arms.items():
        rows = list(database.select(_EXAMPLES, {"run": infos[0].id}, limit=0).records())
        steps = sorted({row["step"] for row in rows})
        for step in dict.fromkeys([*steps[:1], *steps[len(steps) // 2 : len(steps) // 2 + 1], *steps[-1:]]):
            for row in rows:
                if row["step"] == step:
                    question, truth, text = row["example_id"], str(row["ground_truth"]), _shortened(row["response"])
                    yield Response(arm, step, row["is_right"], question, truth, text)


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} … ({len(text) - MOST_SHOWN:,} more characters)"


def _markdown(
    findings: Findings,
    pictures: Sequence[str],
    responses: Sequence[Response],
    alarms: Sequence[tuple[str, str]],
    commands: str,
) -> str:
    lines = [
        f"# {printable(findings.title)}",
        findings.look_at,
        *pictures,
        *(as_markdown(table) for table in findings.tables),
        *findings.sentences,
        *(["## Alarms", "\n".join(f"- {sentence} (`{command}`)" for sentence, command in alarms)] if alarms else []),
        "## Responses",
        *(f"{response.heading}:\n\n{_fenced(response.text)}" for response in responses),
        "## Commands",
        _fenced(commands),
    ]
    return "\n\n".join(line.strip("\n") for line in lines if line) + "\n"


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
