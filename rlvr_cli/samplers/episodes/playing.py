"""An episode under way, and what it leaves: a completion with all its turns.

Enters: turns of the policy, replies of the environment. Leaves: a `Completion`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from rlvr_cli.environments.interface import Reply
from rlvr_cli.samplers.episodes.turns import Piece
from rlvr_cli.samplers.wrapper import mean_entropy
from rlvr_cli.types import ENVIRONMENT, Completion, Episode, Example, Grade, Measured, Turn, TurnFacts


@dataclass
class Playing:
    """An episode under way."""

    request_index: int
    sample_index: int
    seed: int
    example: Example
    begun: str | list[dict[str, Any]] | None = None  # of the environment
    prompt: str | None = None
    prompt_ids: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    mask: tuple[bool, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # of the turns
    spoken: list[Completion] = field(default_factory=list)  # the policy's turns
    asked: list[str] = field(default_factory=list)  # the environment, of each of them
    rewards: list[float | None] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    forged: int = 0
    failed_turns: tuple[int, ...] = ()
    forged_turns: tuple[int, ...] = ()
    seconds: float = 0.0
    grade: Grade | None = None
    over: bool = False
    replies: list[Reply] = field(default_factory=list)  # as the environment gave them

    @property
    def num_policy_tokens(self) -> int:
        return sum(self.mask)

    @property
    def reward(self) -> float:
        """The sum of the turns' rewards."""
        return sum(reward or 0.0 for reward in self.rewards)

    def add_turn(self, completion: Completion) -> None:
        """Add a turn of the policy."""
        self.prompt_ids = self.prompt_ids or completion.prompt_ids
        self._add("policy", completion.token_ids, completion.text, logprobs=completion.logprobs)
        self.spoken.append(completion)
        self.rewards.append(None)

    def add_forged(self, answers: int) -> None:
        """Count answers of the environment that the policy's last turn holds."""
        self.forged += answers
        self.forged_turns += (len(self.spoken) - 1,) * (answers > 0)

    def add_reply(self, reply: Reply, pieces: Iterable[Piece]) -> None:
        """Add what the environment said to the last turn: of its text as much as there is room for."""
        self.replies.append(reply)
        self.rewards[-1] = reply.reward
        self.measured |= reply.measured or {}
        for said in reply.calls or (reply,):
            self.calls += said.role != ENVIRONMENT
            self.failed_turns += (len(self.spoken) - 1,) * (said.error is not None)
        for role, ids, text in pieces:
            if ids:
                self._add(role, tuple(ids), text)

    def _add(self, role: str, ids: tuple[int, ...], text: str, *, logprobs: tuple[float, ...] | None = None) -> None:
        start = len(self.ids)
        self.ids += ids
        self.logprobs += (0.0,) * len(ids) if logprobs is None else logprobs
        self.mask += (logprobs is not None,) * len(ids)
        self.turns.append(Turn(role, start, len(self.ids)))
        self.texts.append(text)

    def completion(self, last: Completion, *, ended_by: str, gives_rewards: bool) -> Completion:
        """The episode as a completion, whose last turn of the policy was `last`."""
        cut = ended_by == "length"
        grade = self.grade
        if grade is None and gives_rewards:
            grade = Grade(None, None, self.reward, failure_kind=None if self.reward > 0.5 else "low_reward")
        ends = tuple(accumulate(map(len, self.texts)))
        last_own = max(place for place, turn in enumerate(self.turns) if turn.role == "policy")
        episode = Episode(
            num_turns=len(self.spoken),
            num_policy_tokens=self.num_policy_tokens,
            ended_by=ended_by,
            tool_calls=self.calls,
            tool_errors=len(self.failed_turns),
            forged=self.forged,
            environment_seconds=self.seconds,
            turn_rewards=tuple(self.rewards) if any(r is not None for r in self.rewards) else None,
            graded_from=ends[last_own] - len(self.texts[last_own]),
            graded_to=ends[last_own],
        )
        whole = len(self.turns) == 1
        scored = all(len(turn.logprobs) == len(turn.token_ids) for turn in self.spoken)  # an endpoint may not do it
        return replace(
            last,
            request_index=self.request_index,
            sample_index=self.sample_index,
            text="".join(self.texts),
            prompt_ids=self.prompt_ids,
            num_prompt_tokens=len(self.prompt_ids),
            token_ids=self.ids,
            logprobs=self.logprobs if scored else (),
            num_tokens=len(self.ids),
            finish_reason="length" if cut else "stop",
            stop_reason=None if cut else last.stop_reason,
            mean_entropy=mean_entropy(self.spoken),
            response_mask=None if whole else self.mask,
            turns=None if whole else tuple(self.turns),
            prompt=self.prompt,
            episode=episode,
            turn_facts=TurnFacts(ends, self.failed_turns, self.forged_turns),
            measured=tuple(Measured(name, float(value)) for name, value in self.measured.items()) or None,
            grade=grade,
        )
