"""Whether an environment is a function of the example, the seed and the turns: an episode is played again, and must be the same.

Enters: what an environment said in an episode. Leaves: nothing if another instance says the same to the same turns, else what differs.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from rlvr_cli.environments.interface import Reply
from rlvr_cli.environments.pool import Answer, EnvironmentPool
from rlvr_cli.errors import RlvrError
from rlvr_cli.process import stoppable
from rlvr_cli.text import printable
from rlvr_cli.types import Example

_HINT = (
    "An episode that was lost is played again, so a run that goes on would be another run. Draw from random.Random(seed), and ask nothing "
    "that changes: no clock, no other random numbers, no order of a set, no service."
)
_BEFORE, _MOST = 30, 120  # characters shown of a text: before the first difference, and in all


@dataclass(frozen=True)
class Said:
    """What an environment said in an episode: its prompt, if it gave one, and its replies to the first of the policy's turns."""

    example: Example
    seed: int
    prompt: str | list[dict[str, Any]] | None
    turns: Sequence[str]
    replies: Sequence[Reply]


class Repeats:
    """Plays the first episodes of a run again, while the run goes on.

    Args:
        strict: whether one that differs is an error; else it is said.
    """

    def __init__(self, pool: EnvironmentPool, *, strict: bool) -> None:
        self._pool, self._strict = pool, strict
        self._pending: list[tuple[Said, Future[Answer]]] = []

    def add(self, said: Said) -> None:
        """Play an episode again, if it is one of the first in which the environment said anything."""
        if self._pool.unrepeated and (said.replies or said.prompt is not None):
            self._pool.unrepeated -= 1
            turns = said.turns[: len(said.replies)]
            self._pending.append((said, self._pool.play_again(said.example, said.seed, turns)))

    def check(self) -> None:
        """Wait until all have been played, and compare.

        What a program prints is the policy's doing: of the tool `python` a difference is only said.

        Raises:
            RlvrError: one is not the same, and `strict`.
        """
        while self._pending:
            said, future = self._pending.pop()
            with stoppable():
                found = difference(said, future.result())
            if found is None:
                continue
            turn, clause = found
            roles = {reply.role for reply in (said.replies[turn - 1].calls or [said.replies[turn - 1]])} if turn else ()
            if self._pool.spec.name == "python" and "python" in roles:
                self._pool.say(
                    "a program of the policy does not always print the same, so a run that goes on may differ"
                )
                continue
            problem = f"{self._pool.spec.title} is not a function of the example, the seed and the turns"
            where = f"in an episode of {printable(said.example.id)} (seed {said.seed}) {clause}"
            if self._strict:
                raise RlvrError(f"{problem}: {where}.", _HINT)
            self._pool.say(f"{problem}, so a run that goes on may differ: {where}")

    def cancel(self) -> None:
        """Forget what is not compared yet; other episodes are played again in its place."""
        for _, future in self._pending:
            future.cancel()
        self._pool.unrepeated += len(self._pending)
        self._pending.clear()


def difference(said: Said, again: Answer) -> tuple[int, str] | None:
    """Where an episode is not the same, and how.

    Returns:
        The number of the turn, from 1, or 0 for the prompt, and a clause for it; None if it is the same, or was not played to its end
        for a reason that says nothing: the process died, or was too slow.
    """
    if again.error in ("timeout", "crash"):
        return None
    if again.error is not None:
        return len(said.replies), f"it raised {again.error} when it was asked again: {again.detail}"
    if said.prompt != again.prompt:
        return 0, _differ("the prompt", (str(said.prompt or ""), str(again.prompt or "")))
    for number, (first, second) in enumerate(zip(said.replies, again.replies, strict=True), 1):
        for name, value in asdict(first).items():
            if value != (other := asdict(second)[name]):
                return number, _differ(f"the {name} of its reply to turn {number}", _texts(value, other))
    return None


def _texts(first: Any, second: Any) -> tuple[str, ...]:
    """Two values as text; numbers with as few digits as tell them apart, 6 at least."""
    pairs = [tuple(f"{v:.{n}g}" if isinstance(v, float) else str(v) for v in (first, second)) for n in range(6, 18)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])


def _differ(what: str, pair: tuple[str, ...]) -> str:
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*pair, strict=False)))
    start = max(0, alike - _BEFORE)
    shown = [
        f'"{"…" * (start > 0)}{printable(text[start : start + _MOST])}{"…" * (len(text) > start + _MOST)}"'
        for text in pair
    ]
    return f"{what} was {shown[0]}, and when it was asked again {shown[1]}"
