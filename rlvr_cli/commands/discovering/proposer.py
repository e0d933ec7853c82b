"""What proposes programs: a model, mutations, or the responses of an earlier search.

Enters: a DiscoverConfig. Leaves: an open sampler, what identifies it in run.json, what stands around its prompts, and which of them fit.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from rlvr_cli.config.discover import DiscoverConfig
from rlvr_cli.data.prompts import PLACEHOLDER, PromptTemplate
from rlvr_cli.discovery.fitting import estimated_tokens
from rlvr_cli.discovery.proposers import mutate, replay
from rlvr_cli.models.identity import model_facts, model_path
from rlvr_cli.samplers.open import Engine, choose_engine, open_sampler, settings_of
from rlvr_cli.training.parallel.placement import sampler_devices
from rlvr_cli.types import Request, Sampler

UNASKED = 1500  # tokens of a prompt up to which an endpoint is not asked for its context
CHAT_TOKENS = 128  # that an endpoint's chat template may add to a prompt


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


def prompt_fits(config: DiscoverConfig, proposer: Sampler, *, may_estimate: bool) -> Callable[[str], bool]:
    """Return what says whether the model's context holds a prompt and its response.

    Args:
        may_estimate: whether an endpoint's tokens, which nobody knows, may be estimated; else it is taken to hold every prompt.
    """
    if config.proposer != "model":
        return lambda prompt: True
    if config.base_url:
        return _fits_endpoint(proposer, config) if may_estimate else lambda prompt: True
    from rlvr_cli.models.pretrained import (  # here: endpoints do without transformers
        load_context_length,
        load_tokenizer,
    )
    from rlvr_cli.samplers.stop_strings import prompt_token_ids

    path = model_path(config.model)
    context = getattr(proposer, "context_length", None) or config.max_model_len or load_context_length(path)
    if context is None:
        return lambda prompt: True
    tokenizer, room = load_tokenizer(path), context - config.sampling_max_tokens

    def fits(prompt: str) -> bool:
        (ids,) = prompt_token_ids(tokenizer, [Request(prompt, (0,))], vocab_size=len(tokenizer))
        return len(ids) <= room

    return fits


def _fits_endpoint(proposer: Sampler, config: DiscoverConfig) -> Callable[[str], bool]:
    served = cache(getattr(proposer, "served_context", lambda: None))  # asked at most once

    def fits(prompt: str) -> bool:
        tokens = estimated_tokens(prompt) + (CHAT_TOKENS if config.endpoint == "chat" else 0)
        return tokens <= UNASKED or (context := served()) is None or tokens + config.sampling_max_tokens <= context

    return fits
