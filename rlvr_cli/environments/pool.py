"""Environments in processes that can be killed: one that hangs or crashes costs its own episode, and nothing else.

Enters: an example, a seed, and the policy's turns so far. Leaves: a future `Answer`. An episode belongs to one process; where that
is killed, its other episodes are played again, which gives the same as they are functions of example, seed and turns.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any

from rlvr_cli.environments.interface import Reply
from rlvr_cli.environments.open import EnvironmentSpec, check_environment
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.pool import described_error
from rlvr_cli.graders.pool import environment as variables
from rlvr_cli.parallel.worker import LocalWorker
from rlvr_cli.types import Example

_START_SECONDS = 120.0  # for a process to import the environment
_HINT = "Run the environment's file alone to see why."
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
        timeout: seconds that a turn may take.
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
        self._arguments = {
            **asdict(spec),
            "path": [entry for entry in sys.path if entry],
            "memory_bytes": int(memory_gb * 2**30),
        }
        self._slots = [_Slot(self._arguments, title=spec.title, timeout=timeout) for _ in range(workers)]
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="environment") for _ in range(workers)]
        self._facts: dict[str, Any] | None = None
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
        said = self._threads[0].submit(self._slots[0].ask, ["schemas"], timeout=_START_SECONDS).result()
        if "schemas" not in said:
            raise RlvrError(
                said.get("problem") or f"The tools cannot be described: {said['detail']}", said.get("hint", _HINT)
            )
        return said["schemas"]

    @property
    def _of_environment(self) -> dict[str, Any]:
        """What the environment says of itself. Raises RlvrError if it cannot be loaded."""
        if self._facts is None:
            self._facts = self._threads[0].submit(self._slots[0].facts).result()
        return self._facts

    def begin(self, example: Example, seed: int) -> Future[Answer]:
        """Begin an episode."""
        return self._ask("begin", example, seed, ())

    def answer(self, example: Example, seed: int, turns: Sequence[str]) -> Future[Answer]:
        """Answer the last of the policy's turns."""
        return self._ask("answer", example, seed, turns)

    def play_again(self, example: Example, seed: int, turns: Sequence[str]) -> Future[Answer]:
        """Answer all of the policy's turns in a fresh instance, which lives in another process if there are several."""
        place = (seed + 1) % len(self._slots)
        question = ["play_again", seed, asdict(example), list(turns)]
        return self._threads[place].submit(self._played_again, place, question)

    def say(self, sentence: str) -> None:
        """Report a sentence."""
        self._report(sentence)

    def close(self) -> None:
        """Kill all processes; what is pending is canceled, and no longer reported. May be called twice."""
        self._closing = True
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        for slot in self._slots:
            slot.interrupt()
        for thread in self._threads:
            thread.shutdown()
        for slot in self._slots:
            slot.kill()

    def _ask(self, kind: str, example: Example, seed: int, turns: Sequence[str]) -> Future[Answer]:
        place = seed % len(self._slots)
        return self._threads[place].submit(self._asked, place, [kind, seed, asdict(example), list(turns)])

    def _asked(self, place: int, question: list[Any]) -> Answer:
        started = time.monotonic()
        said = self._slots[place].ask(question, timeout=self.timeout)
        seconds = time.monotonic() - started
        if (error := said.get("error")) is not None and "text" not in said:
            self._say(error, said["detail"])
            return Answer(error=error, detail=said["detail"], seconds=seconds)
        if "prompt" in said:
            return Answer(prompt=said["prompt"], seconds=seconds)
        forged, reply = said.pop("forged"), _reply(said)
        if reply.reward is not None and not self._slots[place].facts()["gives_rewards"]:
            self._say_judged()
        return Answer(reply=reply, forged=forged, seconds=seconds)

    def _played_again(self, place: int, question: list[Any]) -> Answer:
        said = self._slots[place].ask(question, timeout=self.timeout * (1 + len(question[-1])))
        if "replies" not in said:
            return Answer(error=said["error"], detail=said["detail"])
        return Answer(prompt=said["prompt"], replies=tuple(map(_reply, said["replies"])))

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

    def _say(self, error: str, detail: str) -> None:
        with self._lock:
            if self._closing or error in self._reported or len(self._reported) >= _REPORTED:
                return
            self._reported.add(error)
        self._report(f"the environment {self.spec.title} failed in an episode: {described_error(error, detail)}")


def _reply(said: Mapping[str, Any]) -> Reply:
    return Reply(**{**said, "calls": tuple(map(_reply, said["calls"]))})


class _Slot:
    """A place for one process, which is started when it is needed, and again after it was killed.

    Args:
        arguments: of `worker.serve`.
        title: of the environment.
        timeout: seconds that its constructor may take.
    """

    def __init__(self, arguments: Mapping[str, Any], *, title: str, timeout: float) -> None:
        self._arguments, self._title, self._timeout = arguments, title, timeout
        self._worker: LocalWorker | None = None
        self._asked = 0  # by this process
        self._facts: dict[str, Any] = {}
        self._closed = False

    def facts(self) -> dict[str, Any]:
        """What the environment says of itself. Raises RlvrError if it cannot be loaded."""
        if self._worker is None:
            self._worker = LocalWorker(
                "environment",
                "rlvr_cli.environments.worker:serve",
                arguments={**self._arguments, "parent": os.getpid()},
                title="The process of an environment",
                hint=_HINT,
                variables=variables(),
                guarded=True,
            )
            self._asked = 0
            self._facts = self._begun(self._worker)
        if "problem" in self._facts:
            self.kill()
            raise RlvrError(self._facts["problem"], self._facts["hint"])
        return self._facts

    def _begun(self, worker: LocalWorker) -> dict[str, Any]:
        """What a new process says: first that it has run the user's files, then the facts of an instance."""
        try:
            loaded = worker.receive(within=_START_SECONDS)
        except TimeoutError:
            problem = f"The environment {self._title} could not be loaded within {_START_SECONDS:g} s."
            return {"problem": problem, "hint": _HINT}
        if "problem" in loaded:
            return loaded
        try:
            return worker.receive(within=self._timeout)
        except TimeoutError:
            problem = f"The environment {self._title} was not made within {self._timeout:g} s (--turn-timeout)."
            return {"problem": problem, "hint": "Its constructor is in the way: correct it, or raise --turn-timeout."}

    def ask(self, question: list[Any], *, timeout: float) -> dict[str, Any]:
        """Ask the process. One that died may have suffered from another episode: a new one is asked before it counts as a crash."""
        while not self._closed:
            self.facts()
            assert self._worker is not None
            first, self._asked = self._asked == 0, self._asked + 1
            try:
                self._worker.send(question)
                return self._worker.receive(within=timeout)
            except TimeoutError:
                self.kill()
                return {"error": "timeout", "detail": f"no answer within {timeout:g} s (--turn-timeout)"}
            except RlvrError:
                self.kill()
                if first:
                    return {"error": "crash", "detail": "the process of the environment died, also when started afresh"}
        return {"error": "crash", "detail": "the pool was closed"}

    def interrupt(self) -> None:
        """End the process; a thread that waits for it sees that it has ended."""
        self._closed = True
        if self._worker is not None:
            self._worker.interrupt()

    def kill(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None
