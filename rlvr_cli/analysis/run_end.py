"""What a training command prints when its run has ended."""

from pathlib import Path

from rlvr_cli.analysis.queries.database import Database, ask_spilling
from rlvr_cli.analysis.report.rollouts import of_steps
from rlvr_cli.analysis.statistics.alarms import run_alarms
from rlvr_cli.analysis.summary import AT_END_SECONDS, RunSummary, summary_of
from rlvr_cli.runs.readers import read_run
from rlvr_cli.terminal import console, tables
from rlvr_cli.training.trainer import Trainer


def report_end(trainer: Trainer, *, output: str) -> None:
    """Print where the model is, the alarms of the run, and the summary of its last evaluation."""
    path = trainer.run.path
    console.say(f"model          {path / 'model'}")
    print_findings(path, step=None if trainer.evaluator is None else trainer.updates, output=output)


def print_findings(path: Path, *, step: int | None, output: str) -> None:
    """Print the alarms of a run, and the summary of its evaluation at a step, if one is given. Raises RlvrError."""
    info = read_run(path)
    if not info.grades:  # else an alarm compares them with all rollouts
        info = of_steps(info, set() if step is None else {(info.id, "eval", step)})
    are_told = False

    def ask(database: Database) -> RunSummary | None:
        nonlocal are_told
        if not are_told:  # else the summary alone needs more memory
            for alarm in run_alarms(database, info):
                console.say(f"{alarm.severity}: {alarm.sentence}\n    {alarm.command_for(path)}")
            are_told = True
        return None if step is None else summary_of(database, info, step=step)

    found = ask_spilling([info], ask, timeout_seconds=AT_END_SECONDS)
    if found is not None:
        tables.print_tables(found.tables(), output=output)
