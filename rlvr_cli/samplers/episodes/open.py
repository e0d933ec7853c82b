"""From options to an environment and a sampler that plays in it.

Enters: --environment and what goes with it. Leaves: what run.json stores of it, its processes, and an `EpisodeSampler`.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, cast

from rlvr_cli.config.shared.episodes import EpisodeOptions
from rlvr_cli.environments.open import check_environment
from rlvr_cli.environments.pool import EnvironmentPool
from rlvr_cli.samplers.episodes.sampler import EpisodeSampler
from rlvr_cli.samplers.episodes.turns import ChatTurns, chat_turns, environment_spec, gives_rewards
from rlvr_cli.terminal import console
from rlvr_cli.types import ENVIRONMENT, JoinableSampler, Sampler


def environment_facts(config: EpisodeOptions) -> dict[str, Any]:
    """What run.json stores of --environment and --tool: where the environment gives the rewards, it is named in the grader's place.

    Raises:
        RlvrError: there are no such ones, or as `gives_rewards`.
    """
    check_environment(environment_spec(config))
    return environment_spec(config).facts | ({"grader": ENVIRONMENT} if gives_rewards(config) else {})


def episodes_line(config: EpisodeOptions) -> str:
    """What plays episodes with the policy, and how long they may be; empty if nothing does."""
    if not config.plays_episodes:
        return ""
    tools = ", ".join(config.tool)
    what = ", ".join(filter(None, (config.environment, tools and f"tools {tools}")))
    longest = f"{config.longest_response(config.sampling_max_tokens):,} tokens with what the environment says"
    return f"{what}; up to {config.max_turns} turns, {longest}"


@contextmanager
def open_environment(config: EpisodeOptions, *, quiet: bool = False) -> Iterator[EnvironmentPool | None]:
    """Open the processes of --environment and --tool until the block ends; None where there are none.

    Args:
        quiet: another process says how the turns of a chat model follow each other.

    Raises:
        RlvrError: the environment cannot be loaded, or the chat template cannot go on after a turn.
    """
    if not config.plays_episodes:
        yield None
        return
    spec = environment_spec(config)
    pool = EnvironmentPool(
        spec,
        workers=config.environment_workers,
        timeout=config.turn_timeout,
        report=lambda sentence: console.say(f"note: {sentence}"),
    )
    with closing(pool):
        pool.start()
        if config.chat:
            way = chat_turns(config).way
            if not quiet:
                console.say(f"note: in the chat template, {way}")
        yield pool


def played(
    sampler: Sampler, config: EpisodeOptions, tokenizer: Any, pool: EnvironmentPool | None, *, trains: bool
) -> Sampler:
    """Return a sampler that plays episodes, see `EpisodeSampler`; without an environment, or if it does so in its own process, itself."""
    if pool is None or getattr(sampler, "plays_episodes", False):
        return sampler
    turns = (
        ChatTurns(chat_turns(config), pool.stop, calls=pool.spec.calls, every=pool.spec.of_verifiers)
        if config.chat
        else None
    )
    return EpisodeSampler(
        cast(JoinableSampler, sampler),  # as each is that plays no episodes itself
        tokenizer,
        pool,
        turns=turns,
        max_turns=config.max_turns,
        longest=config.longest_response,
        trains=trains,
    )
