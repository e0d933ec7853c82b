"""`rlvr eval`: dataset -> prompt -> sample -> grade -> Parquet -> the category table.

Enters: an EvalConfig. Leaves: a run directory with every sample, and the summary on stdout.
"""

from rlvr_cli import display
from rlvr_cli.config import EvalConfig
from rlvr_cli.datasets import Dataset, load_dataset
from rlvr_cli.engines import choose_engine, model_facts, open_sampler, sampler_facts
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders import reference_response
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.journal import open_run, resumed_config
from rlvr_cli.prompts import load_prompt
from rlvr_cli.rollouts import choose_grader, log_generations
from rlvr_cli.signals import StopRequest
from rlvr_cli.summary import summarize


def run(config: EvalConfig) -> None:
    """Measure a model. Raises RlvrError for what the user can put right, Interrupted after a signal."""
    config = resumed_config(config, command="eval")
    template = load_prompt(config.prompt)
    dataset = load_dataset(
        config.dataset,
        split=config.split or None,
        limit=config.limit,
        question_field=config.question_field or None,
        answer_field=config.answer_field or None,
        skip_bad_lines=config.skip_bad_lines,
    )
    display.skipped_lines(dataset.num_skipped, dataset.skipped)
    for note in dataset.notes:
        display.say(note)
    grader = choose_grader(config.grader, dataset_grader=dataset.default_grader, prompt=config.prompt)
    pool = GraderPool(
        grader,
        format_rule=config.format_rule,  # type: ignore[arg-type]  (one of its choices)
        workers=config.grader_workers,
        timeout=config.grader_timeout,
    )
    if config.check_dataset:
        with pool:
            return check_dataset(dataset, grader, pool, output=config.format)

    engine = choose_engine(config.engine, base_url=config.base_url)
    facts = {
        "dataset": {"name": dataset.name, "rows": len(dataset.examples), "fingerprint": dataset.fingerprint},
        "model": model_facts(engine.name, config.model, base_url=config.base_url),
        "prompt": {"name": template.name, "text": template.text},
        "grader": grader,
        "engine": engine.name,
    }
    with pool, StopRequest() as stop, open_run(config, command="eval", facts=facts) as run:
        display.say(f"run      {run.path}")
        for notice in run.notices:
            display.say(notice)
        display.say(f"dataset  {dataset.name}: {len(dataset.examples)} questions; grader {grader}")
        display.say(f"model    {facts['model']['name']}")
        display.say(f"engine   {engine.name} ({engine.reason})")
        sampler = open_sampler(
            engine.name,
            config.model,
            dtype=config.dtype,
            device=config.device,
            max_batch_size=config.max_batch_size,
            cuda_graphs=config.cuda_graphs,
            max_model_len=config.max_model_len,
            gpu_memory_utilization=config.gpu_memory_utilization,
            seed=config.seed,
            base_url=config.base_url,
            endpoint=config.endpoint,
            api_key_env=config.api_key_env,
        )
        run.update(sampler=sampler_facts(sampler, reason=engine.reason))
        total = len(dataset.examples) * config.num_samples
        try:
            with display.progress("sampling", total - run.num_rollouts("eval", 0)) as bar:
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
    display.summary(summarize(run.path), output=config.format)


def check_dataset(dataset: Dataset, grader: str, pool: GraderPool, *, output: str) -> None:
    """Grade every ground truth as its own answer and list those that do not come out right.

    Raises:
        RlvrError: some do not, after they were listed.
    """
    responses = [reference_response(grader, e.ground_truth) for e in dataset.examples]
    readable = [(e, r) for e, r in zip(dataset.examples, responses, strict=True) if r is not None]
    grades = pool.grade([(r, e.ground_truth) for e, r in readable])
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
        display.table(("example_id", "ground_truth", "why"), unread, output=output)
        raise RlvrError(
            f"{grader} cannot read {len(unread)} of the {len(dataset.examples)} ground truths of {dataset.name}.",
            "Every answer to them would be graded wrong: correct them, leave them out, or choose another --grader.",
        )
    display.say(f"{grader} reads all {len(dataset.examples)} ground truths of {dataset.name}.")
