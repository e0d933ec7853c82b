"""What `rlvr eval` prints at its end: the summary of its run, or a table of its runs.

Enters: the runs, each with its dataset. Leaves: text on stdout; an error if no response of a run could be graded.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path

from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.analysis.summary import AT_END_SECONDS, summarize
from rlvr_cli.commands.evaluation.several_runs import config_of_each_run
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.data.datasets import Dataset
from rlvr_cli.rollouts.grading import check_some_graded
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.storage.files import typed
from rlvr_cli.samplers.episodes.turns import environment_spec
from rlvr_cli.terminal import console, tables
from rlvr_cli.types import Table


def print_result(config: EvalConfig, evaluated: Mapping[Path, Dataset]) -> None:
    """Print the summary of the run; of several, a table with a row for each dataset or thinking budget."""
    if len(config_of_each_run(config)) == 1:
        found = summarize(next(iter(evaluated)), timeout_seconds=AT_END_SECONDS)
        tables.print_tables(found.tables(), output=config.format)
    elif len(config.thinking_budgets) < 2:
        tables.print_tables([dataset_table(evaluated)], output=config.format)
        console.say(f"of each  rlvr analyze summary {shlex.join(map(str, evaluated))}")
    else:
        with open_runs([read_run(path) for path in evaluated], timeout_seconds=AT_END_SECONDS) as database:
            query = named_queries()["thinking_budget"]
            tables.print_tables([database.select(query.sql, query.parameters)], output=config.format)
        console.say(f"picture  rlvr analyze thinking_budget {shlex.join(map(str, evaluated))} --plot budget.png")


def dataset_table(evaluated: Mapping[Path, Dataset]) -> Table:
    """A row for each dataset: its run, the grades that failed, which count as wrong, and the accuracy with its 95 % interval."""
    columns = (
        *("dataset", "run_id", "questions", "samples", "grade_errors"),
        *("accuracy", "low", "high", "mean_tokens", "truncated_share"),
    )
    rows = []
    for path, dataset in evaluated.items():
        found = summarize(path, timeout_seconds=AT_END_SECONDS)
        counts, accuracy = (found.questions, found.samples, found.grade_errors), found.accuracy
        share = (accuracy.value, accuracy.low, accuracy.high)
        rows.append((dataset.name, found.run_id, *counts, *share, found.mean_tokens, found.truncated_share))
    return Table(columns, rows, title="datasets")


def check_graded(path: Path, config: EvalConfig) -> None:
    """Raise RlvrError if not one response of a run could be graded."""
    check_some_graded(
        path,
        of="the run",
        hint=f"rlvr analyze failures {typed(path)} shows them. Correct the grader; rlvr grade {typed(path)} --grader grades them again. If it "
        "was the environment, correct that, and evaluate again under another --run.",
        environment=environment_spec(config).title,
    )
