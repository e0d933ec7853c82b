"""`rlvr sweep`: run an experiment, an ordinary run for each arm and seed, and say what came out.

Enters: a SweepConfig. Leaves: the runs in a directory of their own, a report beside them, and on stdout the arms side by side.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.report.sweep import Findings, write_sweep_report
from rlvr_cli.analysis.statistics.sweep_table import (
    arm_table,
    comparisons_that_can_be,
    difference_table,
    divergences,
    evaluation_tables,
    reached,
    verdicts,
)
from rlvr_cli.analysis.summary import AT_END_SECONDS
from rlvr_cli.config.sweep import SweepConfig
from rlvr_cli.errors import RlvrError, UsageError
from rlvr_cli.runs.lock import Lock
from rlvr_cli.runs.manifest import RUN_NAME
from rlvr_cli.runs.readers import ENDED
from rlvr_cli.runs.remote.store import is_address, parsed_address
from rlvr_cli.runs.remote.work import Mirror
from rlvr_cli.runs.storage.files import check_can_write, os_errors_as_user_errors, typed
from rlvr_cli.sweeps.emitted import emitted, with_address
from rlvr_cli.sweeps.experiment import (
    Experiment,
    check_runs,
    command_of,
    experiment_text,
    load_experiment,
    next_stage,
    runs_of,
)
from rlvr_cli.sweeps.printed import list_experiments, print_plan, say_experiment, say_later_stages, say_pace
from rlvr_cli.sweeps.schedule import LOGS, Job, run_jobs, write_plan
from rlvr_cli.sweeps.slots import Slot, slots_here, slots_on
from rlvr_cli.sweeps.stage import Sweep, looked_up
from rlvr_cli.terminal import console, tables
from rlvr_cli.types import Table


def run(config: SweepConfig) -> None:
    """Run what is not finished yet. Raises RlvrError for user errors and if a run failed, Interrupted after a signal."""
    if config.list:
        return list_experiments(output=config.format)
    if config.show:
        return console.print_text(experiment_text(config.experiment))
    seeds = [int(seed) for seed in config.seeds.split(",") if seed]
    experiment = load_experiment(config.experiment, overrides=config.overrides, vary=config.vary, seeds=seeds)
    name = config.name or experiment.name
    if RUN_NAME.fullmatch(name) is None:
        raise UsageError(
            f"{name!r} cannot be the name of a sweep.",
            "Give --name: at most 128 of the characters A-Z a-z 0-9 . _ - that start with a letter or digit.",
        )
    experiment = replace(experiment, name=name)
    if config.stages:
        experiment = replace(experiment, stages=experiment.stages[: config.stages - 1])
    mirror = Mirror(config.runs_dir) if is_address(config.runs_dir) else None
    runs_dir = mirror.folder if mirror else Path(config.runs_dir)
    stages = stages_of(experiment, runs_dir, mirror, compares=not config.emit)
    if config.emit:
        sweep = list(stages)[-1]
        say_later_stages(sweep)
        jobs = with_address(sweep.jobs, runs_dir, str(parsed_address(config.runs_dir))) if mirror else sweep.jobs
        return console.print_text("\n".join(emitted(jobs, sweep.folder, kind=config.emit, at_once=config.jobs)))
    check_can_write(runs_dir)
    if config.dry_run or config.probe:
        sweeps = list(stages)
        slots = slots_of(sweeps[-1], config)
        print_plan(sweeps, output=config.format)
        return say_pace(sweeps[-1], slots) if config.probe else None
    found: list[Table] = []
    try:
        for number, sweep in enumerate(stages):
            say_experiment(sweep)
            failed = run_stage(sweep, config, mirror)
            title = f"{sweep.folder.name} " if number else ""
            found += [replace(table, title=f"{title}{table.title}") for table in results(sweep, failed)]
            if mirror:
                mirror.finish()
                mirror.send_files(path for path in sweep.folder.iterdir() if path.is_file() and path.name[0] != ".")
            if failed:
                raise RlvrError(
                    f"{len(failed)} of the {len(sweep.jobs)} runs failed: {', '.join(failed[:5])}{' ...' if len(failed) > 5 else ''}.",
                    f"What each said is in {sweep.folder / LOGS}. The same command tries them again, and leaves the others as they are.",
                )
    finally:
        if found:
            tables.print_tables(found, output=config.format)


def stages_of(
    experiment: Experiment, runs_dir: Path, mirror: Mirror | None, *, compares: bool = True
) -> Iterator[Sweep]:
    """Yield the experiment and its later stages, each once the runs of the one before are finished. Raises RlvrError.

    Args:
        mirror: where runs are that are in object storage; those that have ended there are fetched.
        compares: whether arms are compared when they have ended. Those of several stages always are.
    """
    while True:
        folder = runs_dir / experiment.name
        runs = runs_of(experiment)
        jobs = [
            Job(run.name, command_of(experiment, run, runs_dir=folder), config)
            for run, config in zip(runs, check_runs(experiment, runs), strict=True)
        ]
        if mirror:
            jobs = looked_up(jobs, experiment.name, mirror)
        sweep = Sweep(experiment, folder, runs, jobs)
        sweep.check(compares=compares or bool(experiment.stages))
        yield sweep
        if not experiment.stages or any(sweep.status_of(job) not in ENDED for job in jobs):
            return
        sweep.check_evaluated()
        experiment = next_stage(experiment, reached_by(sweep))


def reached_by(sweep: Sweep) -> dict[str, float]:
    """The accuracy of each arm whose seeds were all evaluated and have not diverged, the mean over them at their last evaluation."""
    arms = sweep.finished_arms()
    runs = [info for infos in arms.values() for info in infos]
    with open_runs(runs, timeout_seconds=AT_END_SECONDS) as database:
        return reached(database, {name: [info.id for info in infos] for name, infos in arms.items()})


def slots_of(sweep: Sweep, config: SweepConfig) -> list[Slot]:
    """Where its runs are made that are left; of a cluster, it is said. Raises RlvrError if one wants more than it would get."""
    configs = [job.config for job in sweep.jobs if sweep.status_of(job) not in ENDED]
    if not config.cluster:
        return slots_here(config.jobs, [device for device in config.devices.split(",") if device], configs)
    slots, who = slots_on(config.cluster, config.jobs, configs)
    console.say(f"devices  {who}")
    return slots


def run_stage(sweep: Sweep, config: SweepConfig, mirror: Mirror | None) -> list[str]:
    """Run what is not finished, and return the names of the runs that failed. Raises RlvrError, and Interrupted after a signal."""

    def ended(name: str) -> None:
        if mirror:
            mirror.send_now_or_later(f"{sweep.folder.name}/{name}")

    def now(job: Job) -> Job:
        try:
            return looked_up([job], sweep.folder.name, mirror)[0] if mirror else job
        except RlvrError as error:
            console.say(f"note: {job.name} is taken as it was: {error.problem}")
            return job

    slots = slots_of(sweep, config)
    with os_errors_as_user_errors(sweep.folder):
        sweep.folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(sweep.folder)
    try:
        runs = {job.name: list(job.command) for job in sweep.jobs}
        write_plan(sweep.folder, {"experiment": sweep.experiment.name, "runs": runs})
        return run_jobs(sweep.jobs, sweep.folder, slots, ended=ended, looked_up=now)
    finally:
        lock.release()


def results(sweep: Sweep, failed: Sequence[str]) -> list[Table]:
    """Say what differs from the baseline, write the report, and return the tables: the arms side by side, and their differences."""
    infos = sweep.finished_arms(without=failed)
    if not infos:
        return []
    experiment, folder, baseline = sweep.experiment, sweep.folder, sweep.experiment.baseline
    arms = {name: [info.id for info in of_arm] for name, of_arm in infos.items()}
    runs = [info for of_arm in infos.values() for info in of_arm]
    with open_runs(runs, timeout_seconds=AT_END_SECONDS) as database:
        found = [arm_table(database, arms)]
        compared, others = comparisons_that_can_be(database, arms, baseline=baseline)
        if compared:
            found.append(difference_table(compared, baseline=baseline))
        if experiment.command == "eval":
            found += evaluation_tables(runs, timeout_seconds=AT_END_SECONDS)
        told = [*verdicts(compared, baseline=baseline, command=experiment.command), *others, *divergences(infos)]
        findings = Findings(
            title=experiment.title or experiment.name,
            look_at=experiment.look_at,
            arms=infos,
            tables=found,
            sentences=told,
            commands=[job.command for job in sweep.jobs],
        )
        markdown, page = write_sweep_report(folder, findings, database)
    for line in told:
        console.say(line)
    console.say(f"report   {page}    ({markdown.name} and its pictures, for a text)")
    console.say(f"more     rlvr view {typed(folder)}    (in a browser)")
    return found
