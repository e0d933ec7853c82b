"""`rlvr eval`: dataset -> prompt -> sample -> grade -> Parquet -> the category table.

Enters: an EvalConfig. Leaves: a run directory with every sample, and the summary on stdout.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.analysis.summary import summarize
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.parsing.options import flag, options
from rlvr_cli.data.datasets import Dataset
from rlvr_cli.data.prompts import PromptTemplate, prompt_of
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders import reference_response
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.models.identity import model_facts, model_line, model_path
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.collect import log_generations
from rlvr_cli.rollouts.grading import check_grade_errors, grader_pool, stored_errors
from rlvr_cli.rollouts.inputs import chat_line, input_facts, load_questions, load_template
from rlvr_cli.runs.provenance import name_of, open_run, resumed_config
from rlvr_cli.runs.readers import is_run, read_run, run_names
from rlvr_cli.runs.run_dir import made_name, short_name
from rlvr_cli.samplers.open import Engine, choose_engine, open_sampler, sampler_facts, settings_of
from rlvr_cli.samplers.thinking_budget import SENTENCE, BudgetedSampler, token_ids, tokens_left
from rlvr_cli.terminal import console, tables
from rlvr_cli.trackers.children import tracked
from rlvr_cli.training.parallel.placement import sampler_devices
from rlvr_cli.types import Sampler, Table


@dataclass(frozen=True)
class Inputs:
    """What all runs of the command share."""

    config: EvalConfig
    datasets: Mapping[str, Dataset]
    template: PromptTemplate
    engine: Engine
    devices: Sequence[str]
    model: dict[str, Any]  # its facts
    ending: str  # what ends the thinking; empty: nothing does


def run(config: EvalConfig) -> None:
    """Evaluate a model. Raises RlvrError for user errors, Interrupted after a signal."""
    config = resumed_config(config, command="eval", one_run=not own_options(config), writes=not config.check_dataset)
    template = load_template(config, model=config.model)
    datasets = {
        name: load_questions(replace(config, dataset=name), purpose="eval", limit=config.limit)
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
    devices = sampler_devices(config.device, engine=engine.name, samplers=config.samplers)
    model = model_facts(config.model, base_url=config.base_url, fetch=not config.dry_run)
    inputs = Inputs(config, datasets, template, engine, devices, model, ending)
    if config.dry_run:
        check_budgets(config, ending)
        return say_plan(inputs)
    configs = config_of_each_run(config, about=[name_of(model), *(d.name for d in datasets.values())])
    check_budgets(config, ending)  # before a run is made
    evaluated: dict[Path, Dataset] = {}
    with StopRequest() as stop, ExitStack() as opened:

        @cache
        def sampler() -> Sampler:
            return opened.enter_context(closing(open_sampler(engine.name, settings_of(config), devices=devices)))

        for one in configs:
            path = evaluate(inputs, one, sampler, is_first=not evaluated, stop=stop)
            evaluated[path] = datasets[one.dataset]
    print_result(config, evaluated)
    for path in evaluated:
        check_graded(path)


def evaluate(
    inputs: Inputs, config: EvalConfig, sampler: Callable[[], Sampler], *, is_first: bool, stop: StopRequest
) -> Path:
    """Do one of the runs, or what is left of it. Returns its path.

    Args:
        config: of this run.
        sampler: opens the sampler, once for all runs.
    """
    dataset, engine = inputs.datasets[config.dataset], inputs.engine
    pool = grader_pool(config, dataset.default_grader)
    facts = facts_of(inputs, dataset, pool)
    with (
        pool,
        tracked(config.track, project=config.track_project) as trackers,
        open_run(config, command="eval", facts=facts) as run,
    ):
        trackers.start(run.path)
        console.say(f"run      {run.path}")
        for notice in run.notices:
            console.say(notice)
        if is_first or len(inputs.datasets) > 1:
            say_inputs(inputs.config, dataset, facts, engine, inputs.devices)
        if is_first:
            say_ending(inputs.config, inputs.ending)
        total = len(dataset.examples) * config.num_samples
        run.update(sampler=sampler_facts(sampler(), reason=engine.reason), planned={"samples": total})
        with console.progress("sampling", total, done=run.num_rollouts("eval", 0)) as bar:
            log_generations(
                run,
                phase="eval",
                step=0,
                examples=dataset.examples,
                template=inputs.template,
                sampler=within_budget(config, sampler(), inputs.ending),
                params=config.sampling_params,
                num_samples=config.num_samples,
                grader=pool,
                seed=config.seed,
                stop=stop,
                progress=bar,
            )
    return run.path


def facts_of(inputs: Inputs, dataset: Dataset, pool: GraderPool) -> dict[str, Any]:
    """What identifies the inputs of the run on a dataset, for run.json."""
    return input_facts(
        {"dataset": dataset.facts},
        model=inputs.model,
        template=inputs.template,
        grader=pool.spec,
        engine=inputs.engine.name,
    )


def print_result(config: EvalConfig, evaluated: Mapping[Path, Dataset]) -> None:
    """Print the summary of the run; of several, a table with a row for each dataset or thinking budget."""
    if len(evaluated) == 1:
        tables.print_tables(summarize(next(iter(evaluated))).tables(), output=config.format)
    elif len(config.thinking_budgets) < 2:
        tables.print_tables([dataset_table(evaluated)], output=config.format)
        console.say(f"of each  rlvr analyze summary {shlex.join(map(str, evaluated))}")
    else:
        with open_runs([read_run(path) for path in evaluated]) as database:
            query = named_queries()["thinking_budget"]
            tables.print_tables([database.select(query.sql, query.parameters)], output=config.format)
        console.say(f"picture  rlvr analyze thinking_budget {shlex.join(map(str, evaluated))} --plot budget.png")


def dataset_table(evaluated: Mapping[Path, Dataset]) -> Table:
    """A row for each dataset: its run, and the accuracy with its 95 % interval."""
    columns = ("dataset", "run_id", "questions", "samples", "accuracy", "low", "high", "mean_tokens", "truncated_share")
    rows = []
    for path, dataset in evaluated.items():
        found = summarize(path)
        counts, accuracy = (found.questions, found.samples), found.accuracy
        share = (accuracy.value, accuracy.low, accuracy.high)
        rows.append((dataset.name, found.run_id, *counts, *share, found.mean_tokens, found.truncated_share))
    return Table(columns, rows, title="datasets")


def check_graded(path: Path) -> None:
    """Raise RlvrError if not one response of a run could be graded."""
    errors = stored_errors(path, phase="eval", step=0)
    if all(error is not None for error, _ in errors):
        check_grade_errors(
            errors,
            at_most=0,
            of="the run",
            hint=f"rlvr analyze failures {path} shows them. Correct the grader; rlvr grade {path} --grader grades them again.",
        )


def say_inputs(
    config: EvalConfig, dataset: Dataset, facts: dict[str, Any], engine: Engine, devices: Sequence[str]
) -> None:
    """Print what is evaluated, and on what."""
    console.say(f"dataset  {dataset.name}: {len(dataset.examples)} questions; grader {facts['grader']}")
    if config.chat:
        console.say(f"prompt   {chat_line(facts['prompt'])}")
    console.say(f"model    {model_line(facts['model'])}")
    console.say(f"engine   {engine.name} ({engine.reason})")
    if len(devices) > 1:
        console.say(f"devices  {', '.join(dict.fromkeys(devices))} for {len(devices)} processes")
    if config.base_url:
        console.say(f"endpoint {config.base_url}; it gets the key in {config.api_key_env}")


def say_ending(config: EvalConfig, ending: str) -> None:
    if ending:
        console.say(f"thinking is ended after {config.thinking_budget} tokens with {ending!r}")


def say_plan(inputs: Inputs) -> None:
    """Print what would be evaluated, and the first prompt. Nothing is sampled or written.

    Raises:
        RlvrError: there is no such device.
    """
    config = inputs.config
    if not (config.base_url or config.sampler_urls):
        from rlvr_cli.models.compute.device import resolve_device  # here: endpoints do without torch

        resolve_device(config.device)
    for dataset in inputs.datasets.values():
        with grader_pool(config, dataset.default_grader) as pool:
            facts = facts_of(inputs, dataset, pool)
        say_inputs(config, dataset, facts, inputs.engine, inputs.devices)
        params = config.sampling_params
        runs = max(len(config.thinking_budgets), 1)
        samples = (
            f"{len(dataset.examples) * config.num_samples * runs:,} responses of up to {params.max_tokens:,} tokens"
        )
        console.say(f"samples  {samples}, temperature {params.temperature:g}, top-p {params.top_p:g}")
    say_ending(config, inputs.ending)
    console.print_text(prompt_of(next(iter(inputs.datasets.values())).examples[0], inputs.template))


def own_options(config: EvalConfig) -> dict[str, dict[str, str]]:
    """End of a run's name -> the options that are this run's own: its dataset and its thinking budget. Empty if there is one run."""
    budgets = [{"thinking_budget": str(budget)} for budget in config.thinking_budgets]
    of_datasets: dict[str, dict[str, str]] = {}
    for name in config.datasets if len(config.datasets) > 1 else ():
        short = short_name(name) or "dataset"
        numbered = (short if number == 1 else f"{short}-{number}" for number in count(1))
        of_datasets[next(end for end in numbered if end not in of_datasets)] = {"dataset": name}
    if len(budgets) < 2:
        return of_datasets
    return {
        "-".join(filter(None, (end, budget["thinking_budget"]))): {**dataset, **budget}
        for end, dataset in (of_datasets or {"": {}}).items()
        for budget in budgets
    }


def config_of_each_run(config: EvalConfig, *, about: Sequence[str]) -> list[EvalConfig]:
    """The config of each run: of each thinking budget or dataset, if there are several. Those that an earlier command began are resumed."""
    ends = own_options(config)
    if not ends:
        return [config]
    name = config.run or _free_name(config, about[:1] if len(config.datasets) > 1 else about, ends)
    configs = []
    for end, own in ends.items():
        one = replace(config, **own, run=f"{name}-{end}")
        path = Path(config.runs_dir) / one.run
        if is_run(str(path), config.runs_dir):
            sources = {**one.sources, "resume": "earlier command"}
            one = resumed_config(replace(one, resume=str(path), sources=sources), command="eval")
            differing = [
                f"{flag(f.name)} {getattr(one, f.name)!r}, not {getattr(config, f.name)!r}"
                for f in options(EvalConfig)
                if f.name not in ("run", "resume", *own) and not f.metadata["free_on_resume"]
                if getattr(one, f.name) != getattr(config, f.name)
            ]
            if differing:
                raise RlvrError(
                    f"{path.name} was started with other options: {', '.join(differing)}.",
                    "Give the same command again, or another --run.",
                )
        configs.append(one)
    return configs


def _free_name(config: EvalConfig, about: Sequence[str], ends: Iterable[str]) -> str:
    """Return a name that no run begins with, so that none of an earlier command is taken for one of this."""
    made = made_name("eval", about)
    taken = run_names(config.runs_dir)
    names = (made if number == 1 else f"{made}-{number}" for number in count(1))
    return next(name for name in names if not any(f"{name}-{end}" in taken for end in ends))


def stop_thinking(config: EvalConfig, template: PromptTemplate) -> str:
    """What ends the thinking. Raises RlvrError if the prompt does not ask for any."""
    if not config.chat and "<think>" not in template.text:
        raise RlvrError(
            f"--thinking-budget ends the thinking with </think>, and the prompt {template.name} has no <think>.",
            "Use --prompt r1_zero, or --chat with a model that thinks.",
        )
    if config.stop_thinking:
        return config.stop_thinking
    if "<answer>" in template.text:
        return f" {SENTENCE} </think> <answer>"
    return f"{SENTENCE}\n</think>\n\n"


def check_budgets(config: EvalConfig, ending: str) -> None:
    """Raise RlvrError if a thinking budget leaves no tokens for the answer; of a model that is not downloaded nothing is known."""
    if config.thinking_budget and Path(model_path(config.model)).is_dir():
        from rlvr_cli.models.pretrained import load_tokenizer  # here: endpoints do without transformers

        ending_ids = token_ids(load_tokenizer(model_path(config.model)), ending)
        tokens_left(config.sampling_params, budget=max(config.thinking_budgets), ending=ending_ids)


def within_budget(config: EvalConfig, sampler: Sampler, ending: str) -> Sampler:
    """The sampler of a run, within its thinking budget if it has one."""
    if not config.thinking_budget:
        return sampler
    from rlvr_cli.models.pretrained import load_tokenizer  # here: endpoints do without transformers

    (budget,) = config.thinking_budgets
    tokenizer = load_tokenizer(model_path(config.model))
    return BudgetedSampler(sampler, tokenizer, budget=budget, stop_thinking=ending)


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
