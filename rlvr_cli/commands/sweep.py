"""`rlvr sweep`: run an experiment, an ordinary run for each arm and seed, and say what came out.

Enters: a SweepConfig. Leaves: the runs in a directory of their own, and on stdout the arms side by side.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rlvr_cli.analysis.database import open_runs
from rlvr_cli.analysis.report.sweep import Findings, write_sweep_report
from rlvr_cli.analysis.sweep_table import arm_table, comparisons, difference_table, note_on_many, sentence
from rlvr_cli.config.sweep import SweepConfig
from rlvr_cli.errors import RlvrError, UsageError
from rlvr_cli.runs.files import os_errors_as_user_errors
from rlvr_cli.runs.lock import Lock
from rlvr_cli.runs.readers import RUN_NAME, read_run
from rlvr_cli.sweeps.experiment import (
    Experiment,
    SweepRun,
    check_runs,
    command_of,
    experiment_names,
    experiment_path,
    load_experiment,
    runs_of,
)
from rlvr_cli.sweeps.schedule import LOGS, Job, check_plan, run_jobs, status_of, write_plan
from rlvr_cli.terminal import console, tables


def run(config: SweepConfig) -> None:
    """Run what is not finished yet. Raises RlvrError for user errors and if a run failed, Interrupted after a signal."""
    if config.list:
        return list_experiments(config)
    if config.show:
        return console.print_text(experiment_path(config.experiment).read_text(encoding="utf-8"))
    seeds = [int(seed) for seed in config.seeds.split(",") if seed]
    experiment = load_experiment(config.experiment, overrides=config.overrides, vary=config.vary, seeds=seeds)
    name = config.name or experiment.name
    if RUN_NAME.fullmatch(name) is None:
        raise UsageError(
            f"{name!r} cannot be the name of a sweep.",
            "Use at most 128 of the characters A-Z a-z 0-9 . _ - and start with a letter or digit.",
        )
    folder = Path(config.runs_dir) / name
    runs = runs_of(experiment)
    check_runs(experiment, runs)
    jobs = [Job(run.name, command_of(experiment, run, runs_dir=folder)) for run in runs]
    plan = {"experiment": experiment.name, "runs": {job.name: list(job.command) for job in jobs}}
    check_plan(folder, plan)
    if config.emit:
        return console.print_text("\n".join(emitted(jobs, name, folder, kind=config.emit)))
    say_experiment(experiment, folder, jobs)
    if config.dry_run:
        return tables.print_table(
            ("run", "status", "command"),
            [(job.name, status_of(folder / job.name), shlex.join(job.command)) for job in jobs],
            output=config.format,
        )
    devices = [device for device in config.devices.split(",") if device]
    with os_errors_as_user_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder)
    try:
        write_plan(folder, plan)
        failed = run_jobs(jobs, folder, at_once=config.jobs, devices=devices)
    finally:
        lock.release()
    say_results(experiment, [run for run in runs if run.name not in failed], folder, config=config, jobs=jobs)
    if failed:
        raise RlvrError(
            f"{len(failed)} of the {len(jobs)} runs failed: {', '.join(failed[:5])}{' ...' if len(failed) > 5 else ''}.",
            f"What each said is in {folder / LOGS}. The same command tries them again, and leaves the others as they are.",
        )


def list_experiments(config: SweepConfig) -> None:
    """Print the built-in experiments."""
    rows = []
    for name in experiment_names():
        experiment = load_experiment(name)
        varied = ", ".join(experiment.varied) or "none"
        rows.append((name, experiment.command, experiment.title, varied, len(experiment.arms), len(experiment.seeds)))
    tables.print_table(("experiment", "command", "question", "varies", "arms", "seeds"), rows, output=config.format)


def say_experiment(experiment: Experiment, folder: Path, jobs: Sequence[Job]) -> None:
    """Print what the sweep asks, and how many runs it takes."""
    problem = f" (the handout's problem {experiment.problem})" if experiment.problem else ""
    console.say(f"question {experiment.title or experiment.name}{problem}")
    if experiment.look_at:
        console.say(f"look at  {experiment.look_at}")
    console.say(
        f"runs     {len(jobs)}: {len(experiment.arms)} arms ({', '.join(experiment.names)}) with "
        f"{len(experiment.seeds)} seeds, in {folder}"
    )


def say_results(
    experiment: Experiment, runs: Sequence[SweepRun], folder: Path, *, config: SweepConfig, jobs: Sequence[Job]
) -> None:
    """Print the arms side by side, what differs from the baseline, and write the report."""
    infos = {run.name: read_run(folder / run.name) for run in runs}
    if not infos:
        return
    arms = {name: [run.name for run in runs if run.arm == name] for name in experiment.names}
    arms = {name: ids for name, ids in arms.items() if ids}
    with open_runs(list(infos.values())) as database:
        found = [arm_table(database, arms)]
        compared = comparisons(database, arms, baseline=experiment.baseline) if experiment.baseline in arms else {}
        if compared:
            found.append(difference_table(compared, baseline=experiment.baseline))
        sentences = [sentence(arm, comparison, baseline=experiment.baseline) for arm, comparison in compared.items()]
        sentences += [note] if (note := note_on_many(compared)) else []
        findings = Findings(
            title=experiment.title or experiment.name,
            look_at=experiment.look_at,
            arms={name: [infos[run] for run in ids] for name, ids in arms.items()},
            tables=found,
            sentences=sentences,
            commands=[job.command for job in jobs],
        )
        page = write_sweep_report(folder, findings, database)
    tables.print_tables(found, output=config.format)
    for line in sentences:
        console.say(line)
    console.say(f"report   {page}")
    console.say(f"more     rlvr view {folder}    (in a browser)")


def emitted(jobs: Sequence[Job], name: str, folder: Path, *, kind: str) -> list[str]:
    """The commands as lines for a shell, or as an array job for SLURM: each goes on with its run if it was begun before."""
    lines = [
        f"if test -e {shlex.quote(str(folder / job.name / 'run.json'))}; "
        f"then {shlex.join([*job.command[:2], '--resume', job.name, '--runs-dir', str(folder)])}; "
        f"else {shlex.join(job.command)}; fi"
        for job in jobs
    ]
    if kind == "commands":
        return [shlex.join(job.command) for job in jobs]
    return [
        "#!/bin/bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --array=0-{len(jobs) - 1}",
        "#SBATCH --gres=gpu:1",
        "#SBATCH --requeue",
        "#SBATCH --signal=USR1@120   # rlvr saves what is done, and the job's next start goes on",
        'case "$SLURM_ARRAY_TASK_ID" in',
        *(f"  {number}) {line} ;;" for number, line in enumerate(lines)),
        "esac",
    ]
