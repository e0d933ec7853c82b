"""What is printed of experiments before their runs are made: which there are, the question, the plan, and how long it takes.

Enters: a `Sweep`. Leaves: text, on stdout where it is a result.
"""

import math
import shlex
from collections.abc import Sequence

from rlvr_cli.config.parsing.options import Format
from rlvr_cli.config.shared.run import TrainingRunOptions
from rlvr_cli.runs.readers import ENDED
from rlvr_cli.sweeps.experiment import experiment_names, load_experiment
from rlvr_cli.sweeps.probe import check_steps, measured_pace
from rlvr_cli.sweeps.slots import Slot
from rlvr_cli.sweeps.stage import Sweep
from rlvr_cli.terminal import console, tables


def list_experiments(*, output: Format) -> None:
    """Print the built-in experiments."""
    rows = []
    for name in experiment_names():
        experiment = load_experiment(name)
        varied = ", ".join(experiment.varied) or "none"
        rows.append((name, experiment.command, experiment.title, varied, len(experiment.arms), len(experiment.seeds)))
    tables.print_table(("experiment", "command", "question", "varies", "arms", "seeds"), rows, output=output)


def say_experiment(sweep: Sweep) -> None:
    """Print what the sweep asks, and how many runs it takes."""
    experiment = sweep.experiment
    problem = f" (the handout's problem {experiment.problem})" if experiment.problem else ""
    console.say(f"question {experiment.title or experiment.name}{problem}")
    if experiment.look_at:
        console.say(f"look at  {experiment.look_at}")
    console.say(
        f"runs     {len(sweep.jobs)}: {len(experiment.arms)} arms ({', '.join(experiment.names)}) with "
        f"{len(experiment.seeds)} seeds, in {sweep.folder}"
    )


def print_plan(sweeps: Sequence[Sweep], *, output: Format) -> None:
    """Print the runs of the stages that are known so far, and what is known of the next one."""
    rows = []
    for sweep in sweeps:
        say_experiment(sweep)
        rows += [(job.name, sweep.status_of(job), shlex.join(job.command)) for job in sweep.jobs]
    say_later_stages(sweeps[-1])
    tables.print_table(("run", "status", "command"), rows, output=output, whole=True)


def say_later_stages(sweep: Sweep) -> None:
    """Print what follows once the runs of a stage are finished."""
    for stage in sweep.experiment.stages:
        longer = f", {stage.longer} times as long" if stage.longer > 1 else ""
        console.say(
            f"then     {stage.name}: the best {stage.best} arms and the baseline{longer}; chosen once these runs are finished"
        )


def say_pace(sweep: Sweep, slots: Sequence[Slot]) -> None:
    """Measure a step of the first run that is left, at the first slot, and say how long all that are left take in all of them.

    Raises:
        RlvrError: the run fails, or has no steps.
        Interrupted: after a signal.
    """
    left = [job for job in sweep.jobs if sweep.status_of(job) not in ENDED]
    if not left:
        return console.say("hours    0: all runs are finished")
    check_steps(left[0].command)
    console.say(f"probe    begins {left[0].name} in a temporary directory, and ends it after its first step")
    pace = measured_pace(left[0].command, visible=slots[0].visible)
    config, rounds = left[0].config, -(-len(left) // len(slots))
    limit = config.time_limit_seconds if isinstance(config, TrainingRunOptions) else math.inf
    seconds, ends = min(pace.run, limit), ", by its --time-limit" if limit < pace.run else ""
    of_stage = " of this stage" if sweep.experiment.stages else ""
    together = f", {len(slots)} at a time" if len(slots) > 1 else ""
    console.say(f"probe    {pace}")
    console.say(
        f"hours    about {rounds * seconds / 3600:.2g} for the {len(left)} runs{of_stage} that are left{together}: {seconds / 60:.2g} minutes "
        f"for this one{ends}; other arms may take another time"
    )
