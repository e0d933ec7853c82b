"""Environments in processes that can be killed: one that hangs or crashes costs its own episode, and nothing else.

Enters: an example, a seed, and the policy's turns so far. Leaves: a future `Answer`. An episode belongs to one process; where that
is killed, its other episodes are played again, which gives the same as they are functions of example, seed and turns (`slot`).
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from functools import partial
from threading import Lock
from typing import Any

from rlvr_cli.environments.interface import Reply
from rlvr_cli.environments.open import EnvironmentSpec, check_environment
from rlvr_cli.environments.slot import HINT, START_SECONDS, Slot
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.pool import described_error
from rlvr_cli.types import Example

_REPORTED = 3  # different errors that are reported
REPEATED = 2  # episodes of a run that are played again


@dataclass(frozen=True)
class Answer:
    """What an environment said, or why it did not."""

    prompt: str | list[dict[str, Any]] | None = None  # of `begin`: a text, or messages
    reply: Reply | None = None  # of `answer`; None: it failed
    replies: tuple[Reply, ...] = ()  # of `play_again`
    forged: int = 0  # answers of the environment in the policy's turn
    error: str | None = None  # "timeout", "crash" or the exception's name
    detail: str = ""
    seconds: float = 0.0


class EnvironmentPool:
    """Processes in which the environments of episodes live.

    Args:
        spec: what plays.
        workers: number of processes.
        timeout: seconds that the answer to a turn may take; of several calls in a turn, each.
        memory_gb: address space of one process, in GiB.
        report: gets a sentence on each of the first few different errors, from any thread.

    Attributes:
        unrepeated: episodes that are still to be played again, to see whether they are the same.

    Raises:
        RlvrError: there is no such environment. A file that cannot be run raises it when the first process starts.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        *,
        workers: int = 8,
        timeout: float = 10.0,
        memory_gb: float = 4.0,
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        check_environment(spec)
        self.spec, self.timeout = spec, timeout
        self._report, self._reported, self._lock = report, set[str](), Lock()
        path = [entry for entry in sys.path if entry]
        arguments = {**asdict(spec), "path": path, "memory_bytes": int(memory_gb * 2**30)}
        self._slots = [Slot(arguments, title=spec.title, timeout=timeout) for _ in range(workers)]
        self._facts: dict[str, Any] = {}
        self._closing = self._judged = False
        self.unrepeated = REPEATED

    def start(self) -> None:
        """Start the first process. Raises RlvrError if the environment cannot be loaded."""
        assert self._of_environment

    @property
    def stop(self) -> tuple[str, ...]:
        """The strings that end a turn of the policy and call the environment."""
        return tuple(self._of_environment["stop"])

    @property
    def marker(self) -> str:
        """How the texts of the environment begin; empty if it does not say."""
        return self._of_environment["marker"]

    @property
    def gives_rewards(self) -> bool:
        """Whether the reward is the sum of the turns' rewards."""
        return self._of_environment["gives_rewards"]

    @property
    def begins(self) -> bool:
        """Whether an episode's prompt may be the environment's."""
        return self._of_environment["begins"]

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What a chat model is told of the tools. Raises RlvrError if a tool lacks types or descriptions."""
        said = self._slots[0].ask(["schemas"], timeout=START_SECONDS, read=lambda said: said).result()
        if "schemas" not in said:
            raise RlvrError(
                said.get("problem") or f"The tools cannot be described: {said['detail']}", said.get("hint", HINT)
            )
        return said["schemas"]

    @property
    def _of_environment(self) -> dict[str, Any]:
        """What the environment says of itself. Raises RlvrError if it cannot be loaded."""
        if not self._facts:
            first = self._slots[0]  # as it was started, also if it has ended since
            self._facts = first.ask(["facts"], timeout=START_SECONDS, read=lambda said: first.facts).result()
        return self._facts

    def begin(self, example: Example, seed: int) -> Future[Answer]:
        """Begin an episode."""
        return self._ask("begin", example, seed, ())

    def answer(self, example: Example, seed: int, turns: Sequence[str]) -> Future[Answer]:
        """Answer the last of the policy's turns."""
        return self._ask("answer", example, seed, turns)

    def end(self, seed: int) -> None:
        """Give up the environment of an episode that has ended; one that said so itself is given up already."""
        self._slot(seed).end(seed)

    def play_again(self, example: Example, seed: int, turns: Sequence[str]) -> Future[Answer]:
        """Answer all of the policy's turns in a fresh instance, which lives in another process if there are several."""
        slot = self._slots[(seed + 1) % len(self._slots)]
        question = ["play_again", seed, _fields(example), list(turns)]
        calls = sum(map(self._num_calls, turns))
        return slot.ask(question, timeout=self.timeout * (1 + len(turns)), read=_played_again, calls=calls)

    def say(self, sentence: str) -> None:
        """Report a sentence."""
        self._report(sentence)

    def close(self) -> None:
        """Kill all processes. What is pending is canceled, or has an error if it was sent, and no longer reported. May be called twice."""
        self._closing = True
        for slot in self._slots:
            slot.interrupt()
        for slot in self._slots:
            slot.close()

    def _ask(self, kind: str, example: Example, seed: int, turns: Sequence[str]) -> Future[Answer]:
        slot = self._slot(seed)
        question = [kind, seed, _fields(example), list(turns)]
        calls = self._num_calls(turns[-1]) if turns else 0
        return slot.ask(question, timeout=self.timeout, read=partial(self._answer, slot), calls=calls)

    def _num_calls(self, turn: str) -> int:
        """How many calls of tools a chat model's turn has; see `tools.ChatTools`."""
        return len(json.loads(turn)) if self.spec.calls and not self.spec.of_verifiers else 0

    def _slot(self, seed: int) -> Slot:
        """The place of an episode."""
        return self._slots[seed % len(self._slots)]

    def _answer(self, slot: Slot, said: dict[str, Any]) -> Answer:
        seconds = said["seconds"]
        if "error" in said:
            self.say_failed(said["error"], said["detail"])
            return Answer(error=said["error"], detail=said["detail"], seconds=seconds)
        if "prompt" in said:
            return Answer(prompt=said["prompt"], seconds=seconds)
        reply, forged = _reply(said["reply"]), said["forged"]
        if reply.reward is not None and not slot.facts["gives_rewards"]:
            self._say_judged()
        return Answer(reply=reply, forged=forged, seconds=seconds)

    def _say_judged(self) -> None:
        """Say once that rewards of turns are not the episode's."""
        with self._lock:
            if self._closing or self._judged:
                return
            self._judged = True
        self._report(
            f"the environment {self.spec.title} returns rewards and does not have gives_rewards = True: the grader judges its episodes, and "
            "these rewards are only stored, in episode.turn_rewards"
        )

    def say_failed(self, error: str, detail: str) -> None:
        """Report an error of an episode; of each kind the first, of the first few kinds."""
        with self._lock:
            if self._closing or error in self._reported or len(self._reported) >= _REPORTED:
                return
            self._reported.add(error)
        self._report(f"the environment {self.spec.title} failed in an episode: {described_error(error, detail)}")


def _fields(example: Example) -> dict[str, Any]:
    """An example as it is sent; `asdict` would copy it all."""
    return {field.name: getattr(example, field.name) for field in fields(example)}


def _played_again(said: dict[str, Any]) -> Answer:
    if "replies" not in said:
        return Answer(error=said["error"], detail=said["detail"])
    return Answer(prompt=said["prompt"], replies=tuple(map(_reply, said["replies"])))


def _reply(said: Mapping[str, Any]) -> Reply:
    return Reply(**{**said, "calls": tuple(map(_reply, said["calls"]))})
