"""What an evaluation is about to do: on what, with which engine and settings, and what identifies it in run.json.

Enters: the options, and what they name. Leaves: facts, and lines for the user.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.parsing.options import flag
from rlvr_cli.data.datasets import Dataset
from rlvr_cli.data.prompts import PromptTemplate, prompt_of
from rlvr_cli.models.identity import model_line
from rlvr_cli.rollouts.grading import grader_pool
from rlvr_cli.rollouts.inputs import chat_line, input_facts, rewards_line, shots_line
from rlvr_cli.samplers.episodes.open import environment_facts, episodes_line
from rlvr_cli.samplers.open import Engine
from rlvr_cli.terminal import console
from rlvr_cli.types import Graders


@dataclass(frozen=True)
class Shared:
    """What all runs of the command share."""

    config: EvalConfig
    datasets: Mapping[str, Dataset]
    template: PromptTemplate
    engine: Engine
    devices: Sequence[str]
    model: dict[str, Any]  # its facts
    ending: str  # what ends the thinking; empty: nothing does


def facts_of(shared: Shared, dataset: Dataset, pool: Graders) -> dict[str, Any]:
    """What identifies the inputs of the run on a dataset, for run.json."""
    facts = input_facts(
        {"dataset": dataset.facts},
        model=shared.model,
        template=shared.template,
        grader=pool.facts,
        engine=shared.engine.name,
    )
    return facts | environment_facts(shared.config)


def say_inputs(
    config: EvalConfig, dataset: Dataset, facts: dict[str, Any], engine: Engine, devices: Sequence[str]
) -> None:
    """Print what is evaluated, and on what."""
    console.say(f"dataset  {dataset.name}: {len(dataset.examples)} questions; {rewards_line(facts)}")
    if playing := episodes_line(config):
        console.say(f"episodes {playing}")
    if dataset.shots:
        console.say(f"shots    {shots_line(dataset.shots)}")
    if config.chat:
        console.say(f"prompt   {chat_line(facts['prompt'])}")
    console.say(f"model    {model_line(facts['model'])}")
    console.say(f"engine   {engine.name} ({engine.reason})")
    for name in ("max_model_len", "gpu_memory_utilization"):
        if (engine.name != "vllm" or config.sampler_urls) and config.sources.get(name) == "flag":
            console.say(f"note: {flag(name)} has no effect: it is of vLLM on this machine")
    if len(devices) > 1:
        console.say(f"devices  {', '.join(dict.fromkeys(devices))} for {len(devices)} processes")
    if config.base_url:
        console.say(f"endpoint {config.base_url}; it gets the key in {config.api_key_env}")


def say_ending(config: EvalConfig, ending: str) -> None:
    if ending:
        console.say(f"thinking is ended after {config.thinking_budget} tokens with {ending!r}")


def say_plan(shared: Shared) -> None:
    """Print what would be evaluated, and the first prompt. Nothing is sampled or written.

    Raises:
        RlvrError: there is no such device.
    """
    config = shared.config
    if not (config.base_url or config.sampler_urls):
        from rlvr_cli.models.compute.device import resolve_device  # here: endpoints do without torch

        resolve_device(config.device)
    for dataset in shared.datasets.values():
        with grader_pool(config, dataset.default_grader) as pool:
            facts = facts_of(shared, dataset, pool)
        say_inputs(config, dataset, facts, shared.engine, shared.devices)
        params = config.sampling_params
        runs = max(len(config.thinking_budgets), 1)
        samples = (
            f"{len(dataset.examples) * config.num_samples * runs:,} responses of up to {params.max_tokens:,} tokens"
        )
        console.say(f"samples  {samples}, temperature {params.temperature:g}, top-p {params.top_p:g}")
    say_ending(config, shared.ending)
    console.print_text(prompt_of(next(iter(shared.datasets.values())).examples[0], shared.template))
