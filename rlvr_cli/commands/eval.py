"""`rlvr eval`: dataset -> prompt -> sample -> grade -> Parquet -> the category table.

Enters: an EvalConfig. Leaves: a run directory with every sample, and the summary on stdout.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache
from pathlib import Path

from rlvr_cli.commands.evaluation.answering import answering, check_budgets, check_room, stop_thinking
from rlvr_cli.commands.evaluation.dataset_check import check_dataset
from rlvr_cli.commands.evaluation.plan import Shared, facts_of, say_ending, say_inputs, say_plan
from rlvr_cli.commands.evaluation.result import check_graded, print_result
from rlvr_cli.commands.evaluation.several_runs import command_of, config_of_each_run, own_options, with_name
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.data.datasets import Dataset
from rlvr_cli.environments.pool import EnvironmentPool
from rlvr_cli.errors import QuestionsRefused
from rlvr_cli.models.identity import model_facts
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.collect import log_generations
from rlvr_cli.rollouts.grading import grader_pool
from rlvr_cli.rollouts.inputs import check_stops, load_questions, load_template
from rlvr_cli.runs.provenance import name_of, open_run, resumed_config
from rlvr_cli.samplers.episodes.open import open_environment
from rlvr_cli.samplers.open import check_model, choose_engine, open_sampler, sampler_recorded, settings_of
from rlvr_cli.terminal import console
from rlvr_cli.trackers.children import tracked
from rlvr_cli.training.parallel.placement import sampler_devices
from rlvr_cli.types import Sampler


def run(config: EvalConfig) -> None:
    """Evaluate a model. Raises RlvrError for user errors, Interrupted after a signal."""
    config = resumed_config(config, command="eval", one_run=not own_options(config), writes=not config.check_dataset)
    template = load_template(config, model=config.model)
    datasets = {
        name: load_questions(replace(config, dataset=name), purpose="eval", limit=config.limit, template=template)
        for name in config.datasets
    }
    if config.check_dataset:
        for dataset in datasets.values():
            with grader_pool(config, dataset.default_grader) as pool:
                check_dataset(dataset, pool.spec, pool, output=config.format)
        return

    ending = stop_thinking(config, template) if config.thinking_budget else ""
    engine = choose_engine(
        config.engine, base_url=config.base_url, api_key_env=config.api_key_env, sampler_urls=config.sampler_urls
    )
    devices = sampler_devices(config.device, engine=engine.name, samplers=config.samplers, cluster=config.cluster)
    model = model_facts(config.model, base_url=config.base_url, fetch=not config.dry_run)
    check_model(engine.name, config.model)
    check_stops(config, config.model)
    shared = Shared(config, datasets, template, engine, devices, model, ending)
    if config.dry_run:
        check_budgets(config, ending)
        return say_plan(shared)
    config = with_name(config, about=[name_of(model), *(d.name for d in datasets.values())])
    configs = config_of_each_run(config)
    all_runs = command_of(config) if len(configs) > 1 else ""
    check_budgets(config, ending)  # before a run is made
    evaluated: dict[Path, Dataset] = {}
    refused: list[QuestionsRefused] = []
    with StopRequest() as stop, open_environment(config) as environment, ExitStack() as opened:

        @cache
        def sampler() -> Sampler:
            return opened.enter_context(closing(open_sampler(engine.name, settings_of(config), devices=devices)))

        for one in configs:
            is_first = one is configs[0]
            try:
                path = evaluate(
                    shared, one, sampler, environment=environment, is_first=is_first, stop=stop, all_runs=all_runs
                )
            except QuestionsRefused as error:  # and not those of the next runs
                refused.append(error)
            else:
                evaluated[path] = datasets[one.dataset]
    if evaluated:
        print_result(config, evaluated)
    if refused:
        raise QuestionsRefused.joined(refused)
    for path in evaluated:
        check_graded(path, config)


def evaluate(
    shared: Shared,
    config: EvalConfig,
    sampler: Callable[[], Sampler],
    *,
    environment: EnvironmentPool | None,
    is_first: bool,
    stop: StopRequest,
    all_runs: str,
) -> Path:
    """Do one of the runs, or what is left of it. Returns its path.

    Args:
        config: of this run.
        sampler: opens the sampler, once for all runs.
        environment: what plays episodes with the model.
        all_runs: of several runs, the command that goes on with all of them.
    """
    dataset, engine = shared.datasets[config.dataset], shared.engine
    pool = grader_pool(config, dataset.default_grader)
    facts = facts_of(shared, dataset, pool)
    with (
        pool,
        tracked(config.track, project=config.track_project) as trackers,
        open_run(config, command="eval", facts=facts, all_runs=all_runs) as run,
    ):
        trackers.start(run)
        console.say(f"run      {run.path}")
        for notice in run.notices:
            console.say(notice)
        if is_first or len(shared.datasets) > 1:
            say_inputs(shared.config, dataset, facts, engine, shared.devices)
        if is_first:
            say_ending(shared.config, shared.ending)
        total = len(dataset.examples) * config.num_samples
        run.update(planned={"samples": total})
        with sampler_recorded(sampler(), run, reason=engine.reason):
            if is_first:
                for each in shared.datasets.values():
                    check_room(shared.config, sampler(), each.examples, shared.template, environment=environment)
            with console.progress("sampling", total, done=run.num_rollouts("eval", 0)) as bar:
                log_generations(
                    run,
                    phase="eval",
                    step=0,
                    examples=dataset.examples,
                    template=shared.template,
                    sampler=answering(config, sampler(), ending=shared.ending, environment=environment),
                    params=config.sampling_params,
                    num_samples=config.num_samples,
                    grader=pool,
                    seed=config.seed,
                    stop=stop,
                    progress=bar,
                )
    return run.path
