"""From options to an environment and a sampler that plays in it.

Enters: --environment and what goes with it. Leaves: what run.json stores of it, its processes, and an `EpisodeSampler`.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from rlvr_cli.config.shared.episodes import EpisodeOptions
from rlvr_cli.environments.open import check_environment
from rlvr_cli.environments.pool import EnvironmentPool
from rlvr_cli.errors import RlvrError
from rlvr_cli.samplers.episodes.sampler import EpisodeSampler
from rlvr_cli.samplers.episodes.turns import ChatTurns, chat_turns, environment_spec
from rlvr_cli.terminal import console
from rlvr_cli.types import Sampler


def environment_facts(config: EpisodeOptions) -> dict[str, Any]:
    """What run.json stores of --environment and --tool. Raises RlvrError unless they exist; files are read, but not run."""
    spec = environment_spec(config)
    check_environment(spec)
    return spec.facts


@contextmanager
def open_environment(config: EpisodeOptions, *, grader: str, quiet: bool = False) -> Iterator[EnvironmentPool | None]:
    """Open the processes of --environment and --tool until the block ends; None where there are none.

    Args:
        grader: --grader.
        quiet: another process says how the turns of a chat model follow each other.

    Raises:
        RlvrError: the environment cannot be loaded, the chat template cannot go on after a turn, or the environment gives the rewards
            and there is a grader, too.
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
        if pool.gives_rewards and grader:
            raise RlvrError(
                f"The environment {spec.title} gives the rewards, and so does --grader {grader}.", "Leave --grader out."
            )
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
    turns = ChatTurns(chat_turns(config), pool.stop, calls=pool.spec.calls) if config.chat else None
    return EpisodeSampler(
        sampler,
        tokenizer,
        pool,
        turns=turns,
        max_turns=config.max_turns,
        longest=config.longest_response,
        trains=trains,
    )
