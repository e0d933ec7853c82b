"""What a training command prints when its run has ended."""

from rlvr_cli.analysis.statistics.alarms import run_alarms
from rlvr_cli.analysis.summary import AT_END_SECONDS, summarize
from rlvr_cli.terminal import console, tables
from rlvr_cli.training.trainer import Trainer


def report_end(trainer: Trainer, *, output: str) -> None:
    """Print where the model is, the alarms of the run, and the summary of its last evaluation."""
    run = trainer.run
    console.say(f"model          {run.path / 'model'}")
    for alarm in run_alarms(run.path, timeout_seconds=AT_END_SECONDS):
        console.say(f"{alarm.severity}: {alarm.sentence}\n    {alarm.command_for(run.path)}")
    if trainer.evaluator is not None:
        found = summarize(run.path, step=trainer.updates, timeout_seconds=AT_END_SECONDS)
        tables.print_tables(found.tables(), output=output)
