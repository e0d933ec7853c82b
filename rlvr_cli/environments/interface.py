"""What an environment is: `Environment`, with a `Reply` to every turn of the policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlvr_cli.types import ENVIRONMENT, Example


@dataclass(frozen=True)
class Reply:
    """What an environment says to a turn of the policy."""

    text: str = ""  # put into the response, where the policy reads it and is not trained on it
    done: bool = False  # the episode ends here
    reward: float | None = None  # of this turn; see `Environment.gives_rewards`
    role: str = ENVIRONMENT  # who answers: a tool has its own name, and is counted as called
    error: str | None = None  # why a call failed; `text` tells the policy
    # By name; stored with the row, of each name the last value of the episode. Messages that show a reply are short without.
    measured: Mapping[str, float] | None = field(default=None, repr=False)
    # In place of text, role and error: what several calls in a turn are answered, in their order. Each has these alone.
    calls: "tuple[Reply, ...]" = ()


class Environment(Protocol):
    """One episode. It must be a function of the example, the seed and the turns: an episode that was lost is played again.

    Attributes:
        stop: strings that end a turn of the policy and call the environment. Without any, each end of a response does.
        gives_rewards: whether the reward of an episode is the sum of its turns' rewards, and no grader judges it.
        marker: with what its texts begin; where the policy writes that itself, it is counted as a forged answer.
    """

    stop: tuple[str, ...] = ()
    gives_rewards: bool = False
    marker: str = ""

    def begin(self, example: Example, seed: int) -> str | Sequence[dict[str, Any]] | None:
        """Begin the episode, and return its prompt. None: the dataset's, in the prompt template.

        With --chat a text is the user's message; and messages, each {role, content}, may be a whole conversation.
        """
        ...

    def answer(self, turn: str) -> Reply:
        """Answer a turn of the policy, which holds the stop string that ended it. With --chat the answer is a message."""
        ...
