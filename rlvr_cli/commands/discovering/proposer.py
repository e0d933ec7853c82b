"""What proposes programs: a model, mutations, or the responses of an earlier search.

Enters: a DiscoverConfig. Leaves: an open sampler, what identifies it in run.json, and what stands around its prompts.
"""

import hashlib
from pathlib import Path
from typing import Any

from rlvr_cli.config.discover import DiscoverConfig
from rlvr_cli.data.prompts import PLACEHOLDER, PromptTemplate
from rlvr_cli.discovery.proposers import mutate, replay
from rlvr_cli.models.identity import model_facts, model_path
from rlvr_cli.samplers.open import Engine, choose_engine, open_sampler, settings_of
from rlvr_cli.training.parallel.placement import sampler_devices
from rlvr_cli.types import Sampler


def load_template(config: DiscoverConfig) -> PromptTemplate:
    """What stands around each prompt: with --chat the model's chat template, else nothing."""
    template = PromptTemplate("discover", PLACEHOLDER)
    if not config.chat:
        return template
    from rlvr_cli.models.tokens.chat import ChatTemplate, chat_prompt  # here: endpoints do without transformers

    return chat_prompt(template, ChatTemplate(model_path(config.model)))


def chosen_engine(config: DiscoverConfig) -> Engine:
    if config.proposer != "model":
        return Engine(config.proposer, "asked for with --proposer")
    return choose_engine(
        config.engine, base_url=config.base_url, api_key_env=config.api_key_env, sampler_urls=config.sampler_urls
    )


def proposer_facts(config: DiscoverConfig) -> dict[str, Any]:
    """What identifies the proposer in run.json."""
    match config.proposer:
        case "mutate":
            return {"name": "mutate"}
        case "replay":
            digest = hashlib.sha256(Path(config.replay_from).read_bytes()).hexdigest()
            return {"name": "replay", "path": config.replay_from, "sha256": digest}
    return model_facts(config.model, base_url=config.base_url)


def open_proposer(config: DiscoverConfig, engine: Engine, responses: list[str]) -> Sampler:
    match config.proposer:
        case "mutate":
            return mutate()
        case "replay":
            return replay(responses)
    devices = sampler_devices(config.device, engine=engine.name, samplers=config.samplers, cluster=config.cluster)
    return open_sampler(engine.name, settings_of(config), devices=devices)
