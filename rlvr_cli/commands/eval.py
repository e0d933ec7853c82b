"""`rlvr eval`: dataset -> prompt -> sample -> grade -> Parquet -> the category table.

Enters: an EvalConfig. Leaves: a run directory with every sample, and the summary on stdout.
"""

from dataclasses import asdict

from rlvr_cli.analysis.summary import summarize
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.data.datasets import Dataset
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders import reference_response
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.models.identity import model_facts
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.collect import log_generations
from rlvr_cli.rollouts.grading import grader_pool
from rlvr_cli.rollouts.inputs import chat_line, input_facts, load_questions, load_template
from rlvr_cli.runs.provenance import open_run, resumed_config
from rlvr_cli.samplers.open import choose_engine, open_sampler, sampler_facts, settings_of
from rlvr_cli.terminal import console, tables
from rlvr_cli.training.placement import place_samplers


def run(config: EvalConfig) -> None:
    """Evaluate a model. Raises RlvrError for user errors, Interrupted after a signal."""
    config = resumed_config(config, command="eval")
    template = load_template(config, model=config.model)
    dataset = load_questions(config, purpose="eval", limit=config.limit)
    pool = grader_pool(config, dataset.default_grader)
    grader = pool.spec
    if config.check_dataset:
        with pool:
            return check_dataset(dataset, grader, pool, output=config.format)

    engine = choose_engine(
        config.engine, base_url=config.base_url, api_key_env=config.api_key_env, sampler_urls=config.sampler_urls
    )
    devices = sampler_devices(config, engine.name)
    facts = input_facts(
        {"dataset": dataset.facts},
        model=model_facts(config.model, base_url=config.base_url),
        template=template,
        grader=grader,
        engine=engine.name,
    )
    with pool, StopRequest() as stop, open_run(config, command="eval", facts=facts) as run:
        console.say(f"run      {run.path}")
        for notice in run.notices:
            console.say(notice)
        console.say(f"dataset  {dataset.name}: {len(dataset.examples)} questions; grader {grader}")
        if config.chat:
            console.say(f"prompt   {chat_line(facts['prompt'])}")
        console.say(f"model    {facts['model']['name']}")
        console.say(f"engine   {engine.name} ({engine.reason})")
        if len(devices) > 1:
            console.say(f"devices  {', '.join(dict.fromkeys(devices))} for {len(devices)} processes")
        if config.base_url:
            console.say(f"endpoint {config.base_url}; it gets the key in {config.api_key_env}")
        sampler = open_sampler(engine.name, settings_of(config), devices=devices)
        run.update(sampler=sampler_facts(sampler, reason=engine.reason))
        total = len(dataset.examples) * config.num_samples
        try:
            with console.progress("sampling", total - run.num_rollouts("eval", 0)) as bar:
                log_generations(
                    run,
                    phase="eval",
                    step=0,
                    examples=dataset.examples,
                    template=template,
                    sampler=sampler,
                    params=config.sampling_params,
                    num_samples=config.num_samples,
                    grader=pool,
                    seed=config.seed,
                    stop=stop,
                    progress=bar,
                )
        finally:
            sampler.close()
    tables.print_tables(summarize(run.path).tables(), output=config.format, missing="–")


def sampler_devices(config: EvalConfig, engine: str) -> list[str]:
    """Return the device of each process of --samplers; without them, --device. Raises RlvrError if there are too few."""
    if config.samplers == 1:
        return [config.device]
    from rlvr_cli.models.device import cuda_devices, resolve_device

    resolve_device(config.device)
    return place_samplers(config.device, engine=engine, samplers=config.samplers, cuda_devices=[*cuda_devices()])


def check_dataset(dataset: Dataset, grader: str, pool: GraderPool, *, output: str) -> None:
    """Grade every ground truth as the answer to its own question, and list those that are not graded as correct.

    Raises:
        RlvrError: some are not, after listing them.
    """
    responses = [reference_response(grader, e.ground_truth) for e in dataset.examples]
    readable = [(e, r) for e, r in zip(dataset.examples, responses, strict=True) if r is not None]
    pairs = [(r, e.ground_truth) for e, r in readable]
    grades = pool.grade(pairs, example_of=lambda i: asdict(readable[i][0]))
    unread = [
        (e.id, e.ground_truth, "no answer can be built from it")
        for e, r in zip(dataset.examples, responses, strict=True)
        if r is None
    ]
    unread += [
        (e.id, e.ground_truth, g.error or g.failure_kind or "not rewarded")
        for (e, _), g in zip(readable, grades, strict=True)
        if g.reward is None or g.reward <= 0.5
    ]
    if unread:
        tables.print_table(("example_id", "ground_truth", "why"), unread, output=output)
        raise RlvrError(
            f"{grader} cannot read {len(unread)} of the {len(dataset.examples)} ground truths of {dataset.name}.",
            "Every answer to these questions would be graded wrong: correct or remove them, or choose another --grader.",
        )
    console.say(f"{grader} reads all {len(dataset.examples)} ground truths of {dataset.name}.")
