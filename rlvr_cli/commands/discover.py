"""`rlvr discover`: a task and a proposer -> programs, run in the sandbox and verified -> rows, and the best program.

Enters: a DiscoverConfig. Leaves: a run with every attempt, its best program, and the homework's files. With --verify: JSON on stdout.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlvr_cli.commands.discovering.proposer import (
    chosen_engine,
    load_template,
    open_proposer,
    prompt_fits,
    proposer_facts,
)
from rlvr_cli.commands.discovering.start import as_begun, check_length, competing, is_of_earlier_version, score_of_start
from rlvr_cli.commands.discovering.words import print_result, say_inputs, say_plan
from rlvr_cli.config.discover import DiscoverConfig
from rlvr_cli.discovery.attempts import run_and_verify
from rlvr_cli.discovery.fitting import Fitting
from rlvr_cli.discovery.homework import write_homework
from rlvr_cli.discovery.proposers import mutated, read_responses
from rlvr_cli.discovery.search import Search, Settings, read_attempts, search
from rlvr_cli.discovery.tasks import Task, load_task, read_text
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.inputs import check_stops, input_facts
from rlvr_cli.runs.provenance import open_run, resumed_config
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.samplers.open import check_model, sampler_recorded
from rlvr_cli.sandbox.run import Limits, check_sandbox, sandbox_warning
from rlvr_cli.terminal import console, streams
from rlvr_cli.trackers.children import tracked


def run(config: DiscoverConfig) -> None:
    """Search, or verify one program. Raises RlvrError for user errors, Interrupted after a signal."""
    config = resumed_config(config, command="discover", writes=not config.verify)
    if config.require_sandbox:
        check_sandbox()
    elif warning := sandbox_warning():
        console.say(warning)
    with streams.of_results():  # a verifier of the user's may print
        task = load_task(
            config.task,
            dim=config.dim,
            start=config.start,
            searches=config.proposer == "mutate",
            seconds=config.program_timeout,
        )
    limits = Limits(seconds=config.program_timeout, memory_bytes=int(config.program_memory_gb * 2**30))
    if config.verify:
        return verify(config, task, limits)
    if config.resume:
        check_length(config)
    responses = read_responses(Path(config.replay_from)) if config.replay_from else []
    settings = settings_from(config, limits=limits, responses=len(responses))
    if config.proposer == "mutate":
        mutated(task.program, seed=0)  # raises if there is nothing to change
    if config.dry_run:
        return say_plan(config, task, settings)
    discover(config, task, settings, responses)


def discover(config: DiscoverConfig, task: Task, settings: Settings, responses: list[str]) -> None:
    """Open the run, search, and print what was found."""
    template, engine = load_template(config), chosen_engine(config)
    facts = input_facts(
        {"dataset": task.facts},
        model=proposer_facts(config),
        template=template,
        grader={"grader": task.grader},
        engine=engine.name,
    )
    if config.proposer == "model":
        check_model(engine.name, config.model)
        check_stops(config, config.model)
    with (
        streams.of_results(),
        StopRequest() as stop,
        tracked(config.track, project=config.track_project) as trackers,
        open_run(config, command="discover", facts=facts) as opened,
    ):
        trackers.start(opened)
        console.say(f"run      {opened.path}")
        for notice in opened.notices:
            console.say(notice)
        say_inputs(config, task, settings, engine)
        start_score = score_of_start(opened, task, settings)
        start = competing(opened, task)
        proposer = open_proposer(config, engine, responses)
        try:
            planned = {
                "samples": max(settings.planned_attempts, len(read_attempts(opened)))
            }  # a longer run may be resumed
            opened.update(planned=planned)
            fits = prompt_fits(config, proposer, may_estimate=not is_of_earlier_version(opened))
            with homework(opened), sampler_recorded(proposer, opened, reason=engine.reason):
                known = search(
                    Search(
                        run=opened,
                        task=task,
                        proposer=proposer,
                        params=config.sampling_params,
                        template=template,
                        fitting=Fitting(fits, console.say),
                        settings=as_begun(settings, opened),
                        start_score=start_score,
                        start=start,
                        stop=stop,
                        report=console.say,
                    )
                )
        finally:
            proposer.close()
    print_result(config, opened.path, known, start=start, start_score=start_score)


@contextmanager
def homework(run: RunDir) -> Iterator[None]:
    """Write the homework's files after the search, also of one that stops early; what stopped it is what is then said."""
    try:
        yield
    except (Interrupted, RlvrError):
        with suppress(RlvrError):
            run.assert_in_place()
            write_homework(run.path, run.metadata)
        raise
    write_homework(run.path, run.metadata)


def verify(config: DiscoverConfig, task: Task, limits: Limits) -> None:
    """Run one program and print what the verifier says of it, as JSON. Exits with status 1 if it is not valid."""
    program = read_text(Path(config.verify), "the program to verify")
    with streams.of_results():
        judgment = run_and_verify(program, task, limits=limits, require_sandbox=config.require_sandbox).judgment
    console.print_text(json.dumps(judgment.said))
    if judgment.error is not None:
        sys.exit(1)


def settings_from(config: DiscoverConfig, *, limits: Limits, responses: int) -> Settings:
    """Return the settings of the search.

    Args:
        responses: how many there are to replay; 0: none are replayed.
    """
    bounds = [bound for bound in (config.max_attempts, responses) if bound]
    return Settings(
        strategy=config.strategy,
        rounds=config.rounds,
        num_samples=config.num_samples,
        parents=config.parents,
        islands=config.islands,
        seed=config.seed,
        limits=limits,
        require_sandbox=config.require_sandbox,
        concurrency=config.concurrency,
        max_attempts=min(bounds, default=None),
        max_tokens=(config.max_tokens or None) if config.proposer == "model" else None,
        target=config.target,
    )
