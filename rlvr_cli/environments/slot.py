"""A place of the pool: a process in which environments live, and the thread that asks it.

Enters: questions, see `worker`. Leaves: a future for each. Those that have come while the process was busy are sent in one message, and
answers that come close together are read at once, since for each message this thread takes a turn with the one that samples.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple

from rlvr_cli.environments.tools import CALLED
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.pool import environment as variables
from rlvr_cli.parallel.lines import Lines
from rlvr_cli.parallel.worker import LocalWorker, encoded

START_SECONDS = 120.0  # for a process to import the environment
HINT = "Run the environment's file alone to see why."
_CLOSE_SECONDS = 0.2  # between signals to a process that is to end
_MOST_QUESTIONS = 64  # in a message
_MESSAGE_SECONDS = 0.01  # for its answers, at the pace of those before: the process answers also what is canceled
_LONGEST = 1e8  # seconds that an answer may say it took, more than any time limit: sums and means of them stay finite
_PACE_OF = 8  # about so many answers to questions of a kind give its pace
_LOST = (RlvrError, OSError, EOFError, ValueError)  # a process has ended, or sent what is no answer


class _Asked(NamedTuple):
    """A question, the seconds that its answer may take, and the future for what `read(said)` makes of it. See `Slot.ask`."""

    question: list[Any]
    timeout: float
    read: Callable[[dict[str, Any]], Any]
    future: Future[Any]
    calls: int

    @property
    def kind(self) -> str:
        return self.question[0]

    @property
    def seed(self) -> int:
        """Of the episode, if the question is of one."""
        return self.question[1]


class Slot:
    """A place for one process, which is started when it is needed, and again after it was killed.

    Args:
        arguments: of `worker.serve`.
        title: of the environment.
        timeout: seconds that its constructor may take.

    Attributes:
        facts: what the environment says of itself, once it has been asked anything.
    """

    def __init__(self, arguments: Mapping[str, Any], *, title: str, timeout: float) -> None:
        self._arguments, self._title, self._timeout = arguments, title, timeout
        self._worker: LocalWorker | None = None
        self._lines: Lines | None = None  # of this process
        self._answers = 0  # of this process
        self._pace: dict[str, float] = {}  # a kind of question -> seconds for an answer
        self._since = 0.0  # when the last answer was given, or the first question taken
        self.facts: dict[str, Any] = {}
        self._asked = SimpleQueue[_Asked | None]()
        self._ended = deque[int]()  # seeds of episodes, of which the process has not heard
        self._known = set[int]()  # seeds of the episodes whose environments this process has
        self._thread: Thread | None = None
        self._lock, self._closed = Lock(), False

    def ask(
        self, question: list[Any], *, timeout: float, read: Callable[[dict[str, Any]], Any], calls: int = 0
    ) -> Future[Any]:
        """Ask the process, after what it has been asked before. The future has RlvrError if the environment cannot be loaded.

        Args:
            question: see `worker`.
            timeout: seconds that the answer may take.
            read: gets what was said, in the thread; the future has what it returns.
            calls: how many calls of tools the process may tell, before it answers, that it has answered: each gives it as much time again.
        """
        future: Future[Any] = Future()
        with self._lock:
            assert not self._closed, "the pool is closed"
            if self._thread is None:
                thread = Thread(target=self._serve, name="environment", daemon=True)
                thread.start()
                self._thread = thread
            self._asked.put(_Asked(question, timeout, read, future, calls))
        return future

    def end(self, seed: int) -> None:
        """Let the process give up the environment of an episode, before it answers what is asked from now on."""
        self._ended.append(seed)

    def interrupt(self) -> None:
        """End the process and the thread, which sees that it has ended; what has not been sent is canceled."""
        with self._lock:
            self._closed = True
        self._asked.put(None)
        if (worker := self._worker) is not None:
            worker.interrupt()

    def close(self) -> None:
        """Wait until the thread has ended, after `interrupt`, and kill the process."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)
            self.interrupt()  # again, since a process that has just been started does not hear it
        self._kill()

    def _serve(self) -> None:
        """In the thread: answer what is asked."""
        while not self._closed:
            waiting = self._next()
            try:
                self._answer(waiting)
            except Exception as error:  # whoever asked gets it: else they would wait for ever
                self._kill()  # it may have more to say
                for one in waiting:
                    if one.future.set_running_or_notify_cancel():
                        one.future.set_exception(error)
        while not self._asked.empty():
            if (one := self._asked.get()) is not None:
                one.future.cancel()

    def _next(self) -> deque[_Asked]:
        """Wait for a question, and return it with those that have come meanwhile."""
        taken = [self._asked.get()]
        while (last := taken[-1]) and len(taken) < self._most(last.kind) and not self._asked.empty():
            taken.append(self._asked.get())
        return deque(one for one in taken if one is not None)

    def _most(self, kind: str) -> int:
        """How many questions a message may have that ends with one of this kind."""
        pace = self._pace.get(kind, _MESSAGE_SECONDS)
        return min(_MOST_QUESTIONS, int(_MESSAGE_SECONDS / max(pace, 1e-9)))

    def _answer(self, waiting: deque[_Asked]) -> None:
        """Ask the process. One that died may have suffered from another episode: a new one is asked before it counts as a crash.

        Raises:
            RlvrError: the environment cannot be loaded; then `waiting` has what is not answered, as after any other exception.
        """
        self._since = time.monotonic()
        while not self._closed:
            ended = [
                self._ended.popleft() for _ in range(len(self._ended))
            ]  # first: of these, nothing is asked any more
            for one in [one for one in waiting if one.future.cancelled()]:
                waiting.remove(one)
            if not waiting:
                self._ended.extend(ended)
                return
            lines = self._started()
            self._known.difference_update(ended)
            told = [["ended", ended]] if ended else []
            message = encoded([*told, *(one.question for one in waiting)])
            try:
                lines.send(message, within=waiting[0].timeout)
                while waiting and not self._closed:
                    said = lines.receive(within=self._limit(waiting[0]), several=len(waiting) > 1)
                    for _ in range(waiting[0].calls):
                        if said != CALLED:
                            break
                        said = lines.receive(within=waiting[0].timeout)
                    self._settle(waiting[0], said)
                    self._answers += 1
                    waiting.popleft()
            except TimeoutError:
                self._kill()
                one = waiting.popleft()
                turns = f", as long as {len(one.question[-1])} turns may take" if self._limit(one) > one.timeout else ""
                self._give_up(one, "timeout", f"no answer within {self._limit(one):g} s{turns} (--turn-timeout)")
            except _LOST:
                self._kill()
                if not self._answers:
                    detail = "the process of the environment died or sent no message, also when started afresh"
                    self._give_up(waiting.popleft(), "crash", detail)
        for one in waiting:
            self._give_up(one, "crash", "the pool was closed")

    def _limit(self, one: _Asked) -> float:
        """The seconds that an answer may take: an episode that the process does not know is played again, with those of each turn."""
        if one.kind != "answer" or one.seed in self._known or not self.facts["begins"]:
            return one.timeout
        return one.timeout * len(one.question[-1])

    def _settle(self, one: _Asked, said: dict[str, Any]) -> None:
        """Answer a question, unless it is canceled; with the error of a report of it that fails. Raises ValueError if it is no answer."""
        found, failed = None, None
        try:
            seconds = float(said["seconds"])
            if not 0 <= seconds <= _LONGEST:
                raise ValueError(f"{seconds} seconds")
            if not one.future.cancelled():
                found = one.read({**said, "seconds": seconds})
            over = "error" in said or said.get("reply", {}).get("done")
        except OSError as error:
            failed, over = error, False
        except (AttributeError, KeyError, OverflowError, TypeError) as error:
            raise ValueError("what was said is no answer") from error
        if one.kind in ("begin", "answer"):
            (self._known.discard if over else self._known.add)(one.seed)
        before = self._pace.get(one.kind, seconds)
        self._pace[one.kind] = before + (seconds - before) / _PACE_OF
        self._since = time.monotonic()
        if one.future.set_running_or_notify_cancel():
            one.future.set_exception(failed) if failed else one.future.set_result(found)

    def _give_up(self, one: _Asked, error: str, detail: str) -> None:
        """Answer a question with an error, which took the time since the answer before."""
        self._settle(one, {"error": error, "detail": detail, "seconds": time.monotonic() - self._since})

    def _started(self) -> Lines:
        """What the process answers. Raises RlvrError if the environment cannot be loaded."""
        if self._worker is None or self._lines is None:
            self._worker = LocalWorker(
                "environment",
                "rlvr_cli.environments.worker:serve",
                arguments={**self._arguments, "parent": os.getpid()},
                title="The process of an environment",
                hint=HINT,
                variables=variables(),
                guarded=True,
            )
            self._answers, self._lines = 0, Lines(self._worker.connection)
            self._known.clear()
            self.facts = self._begun(self._lines)
        if "problem" in self.facts:
            self._kill()
            raise RlvrError(self.facts["problem"], self.facts["hint"])
        return self._lines

    def _begun(self, lines: Lines) -> dict[str, Any]:
        """What a new process says: first that it has run the user's files, then the facts of an instance."""
        made = f"was not made within {self._timeout:g} s (--turn-timeout)"
        said: dict[str, Any] = {}
        for seconds, late, hint in (
            (START_SECONDS, f"could not be loaded within {START_SECONDS:g} s", HINT),
            (self._timeout, made, "Its constructor is in the way: correct it, or raise --turn-timeout."),
        ):
            try:
                said = lines.receive(within=seconds)
            except TimeoutError:
                return {"problem": f"The environment {self._title} {late}.", "hint": hint}
            except _LOST:
                return {
                    "problem": f"The process of the environment {self._title} ended, or sent no message.",
                    "hint": HINT,
                }
            if "problem" in said:
                break
        return said

    def _kill(self) -> None:
        if self._lines is not None:
            self._lines.close()
        if self._worker is not None:
            self._worker.kill()
        self._worker = self._lines = None
