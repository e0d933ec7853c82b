"""Episodes: an environment that answers the policy, and how long an episode may be."""

from dataclasses import dataclass, fields
from typing import Any

from rlvr_cli.config.parsing.options import LONGEST, flag, knob
from rlvr_cli.config.shared.model import ModelOptions
from rlvr_cli.config.shared.prompt import PromptOptions
from rlvr_cli.config.shared.questions import VERIFIERS
from rlvr_cli.config.shared.sampling import SamplingOptions
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import PROGRAM_SECONDS

REFUSED = {  # options that cannot go with episodes, and why
    "thinking_budget": "both put text into a response",
    "partial_rollout_tokens": "an episode is played in one step",
}


@dataclass(frozen=True)
class EpisodeOptions(SamplingOptions, PromptOptions, ModelOptions):
    environment: str = knob(
        "",
        "What answers the policy, turn after turn: calculator, python (in the sandbox), a class of your own, FILE.py:CLASS, "
        "or verifiers:ID[,KEY=VALUE...].",
        group="Episodes",
        common=True,
        completes="environment",
    )
    tool: tuple[str, ...] = knob(
        (),
        "A tool of your own, FILE.py:FUNCTION, called as <FUNCTION>...</FUNCTION>, or with --chat as the model does; repeatable.",
        group="Episodes",
        path=True,
    )
    max_turns: int = knob(8, "Turns of the policy in an episode.", group="Episodes", at_least=1)
    max_episode_tokens: int = knob(
        0,
        "Tokens of a response with what the environment says; 0: twice --sampling-max-tokens, which bounds the policy's.",
        group="Episodes",
        at_least=0,
    )
    turn_timeout: float = knob(
        10.0,
        "Time limit of the environment's answer in seconds, of each call in a turn with several; its process is then killed.",
        group="Episodes",
        above=0,
        at_most=LONGEST,
    )
    environment_workers: int = knob(
        4,
        "Number of processes of the environment, of each process that samples.",
        group="Episodes",
        free_on_resume=True,
        at_least=1,
    )

    @property
    def plays_episodes(self) -> bool:
        """Whether an environment answers the policy."""
        return bool(self.environment or self.tool)

    @property
    def episodes(self) -> dict[str, Any]:
        """These options by name, for a sampler in another process; empty if nothing answers the policy."""
        own = {f.name for f in fields(EpisodeOptions)} - {f.name for f in fields(SamplingOptions)}
        return {name: getattr(self, name) for name in sorted(own)} if self.plays_episodes else {}

    def longest_response(self, max_tokens: int) -> int:
        """Tokens of the longest response, of which the policy samples `max_tokens` at most."""
        return (self.max_episode_tokens or 2 * max_tokens) if self.plays_episodes else max_tokens

    def must_fit(self, max_tokens: int) -> int:
        """Tokens of a response that the context must hold beside a prompt: an episode that then fills it ends by its length."""
        return min(max_tokens, self.longest_response(max_tokens))


def check_episodes(config: EpisodeOptions) -> None:
    """Raise RlvrError for options that have no effect, or cannot go with episodes."""
    asked = (str(getattr(config, name, "")) for name in ("dataset", "eval_dataset"))
    if any(VERIFIERS in name for name in asked) and not config.environment.startswith(VERIFIERS):
        raise RlvrError(
            "The questions of verifiers are graded by their environment alone.",
            "Add --environment verifiers:ID, with the same keys but size, and --chat.",
        )
    if not config.plays_episodes:
        names = ("max_turns", "max_episode_tokens", "turn_timeout", "environment_workers")
        given = next((name for name in names if config.sources.get(name) == "flag"), None)
        if given is not None:
            raise RlvrError(
                f"{flag(given)} has no effect without --environment or --tool.", "Add one of them, or leave it out."
            )
        return
    is_new = config.sources.get("turn_timeout", "resumed run") != "resumed run"
    if is_new and config.environment == "python" and config.turn_timeout <= PROGRAM_SECONDS:
        raise RlvrError(
            f"--turn-timeout {config.turn_timeout:g} is too short for the environment python: its programs may take {PROGRAM_SECONDS:g} s.",
            "Give more than that, or leave it out: the default is 10.",
        )
    for name, why in REFUSED.items():
        if getattr(config, name, None):
            raise RlvrError(f"{flag(name)} and episodes exclude each other: {why}.", "Leave one of them out.")
    if getattr(config, "base_url", "") and getattr(config, "endpoint", "") == "chat":
        raise RlvrError(
            "--endpoint chat takes messages, and an episode goes on from token ids.",
            "Use --endpoint completions; with --chat the turns of a chat model become tokens on this machine.",
        )
