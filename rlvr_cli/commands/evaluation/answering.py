"""Who answers in an evaluation: the sampler of a run, within a thinking budget or in an environment.

Enters: the options, the prompt template and the engine. Leaves: a sampler, or an error before anything is sampled.
"""

from collections.abc import Sequence
from pathlib import Path

from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.data.prompts import PromptTemplate
from rlvr_cli.environments.pool import EnvironmentPool
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import model_path
from rlvr_cli.rollouts.prompt_lengths import check_prompts
from rlvr_cli.samplers.episodes.open import played
from rlvr_cli.samplers.thinking_budget import SENTENCE, BudgetedSampler, token_ids, tokens_left
from rlvr_cli.types import Example, Sampler


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


def check_room(
    config: EvalConfig,
    sampler: Sampler,
    examples: Sequence[Example],
    template: PromptTemplate,
    *,
    environment: EnvironmentPool | None,
) -> None:
    """Raise RlvrError if a prompt leaves no room for the policy's tokens, which would end the run when its turn comes.

    Not known before: the context of an endpoint, and prompts with which an environment begins. An episode that fills the
    context ends by its length: what the environment says need not fit.
    """
    context = getattr(sampler, "context_length", None)
    if context is None or (environment is not None and environment.begins):
        return
    from rlvr_cli.models.pretrained import load_tokenizer  # here: endpoints do without transformers

    check_prompts(
        examples,
        template,
        lambda: load_tokenizer(model_path(config.model)),
        max_tokens=config.must_fit(config.sampling_params.max_tokens),
        context=context,
        note=getattr(sampler, "context_note", ""),
        options=["--sampling-max-tokens"],
    )


def answering(config: EvalConfig, sampler: Sampler, *, ending: str, environment: EnvironmentPool | None) -> Sampler:
    """The sampler of a run: within its thinking budget if it has one, in an environment if there is one."""
    if not config.thinking_budget and environment is None:
        return sampler
    from rlvr_cli.models.pretrained import load_tokenizer  # here: endpoints do without transformers

    tokenizer = load_tokenizer(model_path(config.model))
    if config.thinking_budget:
        (budget,) = config.thinking_budgets
        sampler = BudgetedSampler(sampler, tokenizer, budget=budget, stop_thinking=ending)
    return played(sampler, config, tokenizer, environment, trains=False)
