"""An OpenAI-compatible endpoint as the engine, and what it excludes."""

from dataclasses import dataclass
from typing import Literal

from rlvr_cli.config.parsing.options import LONGEST, check_effects, knob
from rlvr_cli.config.shared.addresses import KEY_ENV, check_address, check_key_name
from rlvr_cli.config.shared.engine import EngineOptions, check_samples_here
from rlvr_cli.config.shared.model import ModelOptions
from rlvr_cli.errors import RlvrError


@dataclass(frozen=True)
class EndpointOptions(EngineOptions, ModelOptions):
    base_url: str = knob(
        "", "Address of an OpenAI-compatible endpoint, such as http://localhost:8000/v1.", group="Model", common=True
    )
    endpoint: Literal["completions", "chat"] = knob(
        "completions", "Endpoint's API: completions (raw prompt) or chat.", group="Model"
    )
    api_key_env: str = knob(
        KEY_ENV, "Environment variable with the endpoint's API key.", group="Model", free_on_resume=True
    )
    request_timeout: float = knob(
        600.0,
        "Seconds that one sample of an endpoint or of --sampler-urls may take, waiting and retries included.",
        group="Model",
        free_on_resume=True,
        above=0,
        at_most=LONGEST,
    )
    endpoint_concurrency: int = knob(
        32, "Requests to an endpoint under way at a time.", group="Model", free_on_resume=True, at_least=1
    )


def check_endpoint(config: EndpointOptions, *, chat: bool) -> None:
    if config.base_url:
        check_address(config.base_url)
    check_key_name(config.api_key_env)
    if config.sources.get("api_key_env") == "resumed run" and config.api_key_env != KEY_ENV:
        # A run directory may come from someone else, together with the address that would get the variable's value.
        raise RlvrError(
            f"The run was started with the key in {config.api_key_env}, and a run does not choose what is sent.",
            f"To send it to {config.base_url} again: --resume RUN --api-key-env {config.api_key_env}",
        )
    if config.max_model_len and config.engine == "transformers":
        raise RlvrError(
            "--max-model-len applies only to vLLM; --engine transformers sizes its cache to the requests.",
            "Leave it out.",
        )
    if config.engine == "openai" and not config.base_url:
        raise RlvrError("--engine openai needs an endpoint.", "Name it: --base-url http://localhost:8000/v1")
    if config.base_url and config.engine not in ("auto", "openai"):
        raise RlvrError(f"--base-url and --engine {config.engine} cannot be combined.", "Leave one of them out.")
    if config.base_url and (config.samplers > 1 or config.sampler_urls):
        other = "--sampler-urls" if config.sampler_urls else "--samplers"
        raise RlvrError(f"--base-url and {other} cannot be combined.", "Leave one of them out.")
    if config.base_url and chat:
        raise RlvrError(
            "--chat uses a chat template on this machine; an endpoint has its own.",
            "Use --endpoint chat instead: it sends the prompt as the user's message.",
        )
    if (config.base_url or config.engine == "openai") and not config.model:
        raise RlvrError("An endpoint needs the name of its model.", "Name it: --model NAME")
    _check_effects(config)


def _check_effects(config: EndpointOptions) -> None:
    """Raise NoEffect for an option of the command line that is of another place of the model than the one it has."""
    needs = dict.fromkeys(("endpoint", "api_key_env", "endpoint_concurrency"), (bool(config.base_url), "--base-url"))
    servers = bool(config.base_url or config.sampler_urls)
    check_effects(config, needs | {"request_timeout": (servers, "--base-url or --sampler-urls")})
    if config.base_url:
        check_samples_here(config, where="--base-url")
