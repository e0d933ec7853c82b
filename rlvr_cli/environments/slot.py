"""A place of the pool: a process in which environments live, and the thread that asks it.

Enters: questions, see `worker`. Leaves: a future for each. Those that have come while the process was busy are sent in one message, and
answers that come close together are read at once, since for each message this thread takes a turn with the one that samples.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple

from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.pool import environment as variables
from rlvr_cli.parallel.lines import Lines
from rlvr_cli.parallel.worker import LocalWorker

START_SECONDS = 120.0  # for a process to import the environment
HINT = "Run the environment's file alone to see why."
_TOGETHER = 64  # questions in a message
_TOGETHER_SECONDS = 0.01  # for their answers, at the pace of those before: the process answers also what is canceled
_LOST = (RlvrError, OSError, EOFError, ValueError, TypeError, RecursionError)  # it has ended, or sent what is no answer


class _Asked(NamedTuple):
    """A question, the seconds that its answer may take, and the future for what `read(said, seconds)` makes of it."""

    question: list[Any]
    timeout: float
    read: Callable[[dict[str, Any], float], Any]
    future: Future[Any]

    def answer(self, said: dict[str, Any], seconds: float) -> None:
        """Set the future, unless it is canceled."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.read(said, seconds))
        except Exception as error:  # of `read`: whoever asked gets it, and the thread goes on
            self.future.set_exception(error)


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
        self._pace = 0.0  # seconds for an answer to the last message
        self._since = 0.0  # when the last answer was given, or the first question taken
        self.facts: dict[str, Any] = {}
        self._asked = SimpleQueue[_Asked | None]()
        self._thread: Thread | None = None
        self._lock, self._closed = Lock(), False

    def ask(self, question: list[Any], *, timeout: float, read: Callable[[dict[str, Any], float], Any]) -> Future[Any]:
        """Ask the process, after what it has been asked before. The future has RlvrError if the environment cannot be loaded.

        Args:
            question: see `worker`.
            timeout: seconds that the answer may take.
            read: gets what was said, and after how many seconds, in the thread; the future has what it returns.
        """
        future: Future[Any] = Future()
        with self._lock:
            assert not self._closed, "the pool is closed"
            if self._thread is None:
                thread = Thread(target=self._serve, name="environment", daemon=True)
                thread.start()
                self._thread = thread
            self._asked.put(_Asked(question, timeout, read, future))
        return future

    def interrupt(self) -> None:
        """End the process and the thread, which sees that it has ended; what has not been sent is canceled."""
        with self._lock:
            self._closed = True
        self._asked.put(None)
        if self._worker is not None:
            self._worker.interrupt()

    def close(self) -> None:
        """Wait until the thread has ended, after `interrupt`, and kill the process."""
        if self._thread is not None:
            self._thread.join()
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
        most = min(_TOGETHER, int(_TOGETHER_SECONDS / max(self._pace, 1e-9)))
        while len(taken) < most and not self._asked.empty():
            taken.append(self._asked.get())
        return deque(one for one in taken if one is not None)

    def _answer(self, waiting: deque[_Asked]) -> None:
        """Ask the process. One that died may have suffered from another episode: a new one is asked before it counts as a crash.

        Raises:
            RlvrError: the environment cannot be loaded; then `waiting` has what is not answered, as after any other exception.
        """
        self._since = time.monotonic()
        while not self._closed:
            for one in [one for one in waiting if one.future.cancelled()]:
                waiting.remove(one)
            if not waiting:
                return
            worker, lines = self._started()
            try:
                sent, count = time.monotonic(), len(waiting)
                worker.send([one.question for one in waiting])
                while waiting and not self._closed:
                    for line in lines.receive(within=waiting[0].timeout, several=len(waiting) > 1):
                        number, said = json.loads(line)
                        if number != count - len(waiting):
                            raise ValueError(f"an answer to question {number}")
                        self._answers += 1
                        self._settle(waiting.popleft(), said)
                self._pace = (time.monotonic() - sent) / count
            except TimeoutError:
                self._kill()
                one = waiting.popleft()
                detail = f"no answer within {one.timeout:g} s (--turn-timeout)"
                self._settle(one, {"error": "timeout", "detail": detail})
            except _LOST:
                self._kill()
                if not self._answers:
                    detail = "the process of the environment died or sent no message, also when started afresh"
                    self._settle(waiting.popleft(), {"error": "crash", "detail": detail})
        for one in waiting:
            self._settle(one, {"error": "crash", "detail": "the pool was closed"})

    def _settle(self, one: _Asked, said: dict[str, Any]) -> None:
        """Answer a question: it took the time since the answer before."""
        before, self._since = self._since, time.monotonic()
        one.answer(said, self._since - before)

    def _started(self) -> tuple[LocalWorker, Lines]:
        """The process, and what it answers. Raises RlvrError if the environment cannot be loaded."""
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
            self._answers = 0
            self.facts = self._begun(self._worker)
            self._lines = Lines(self._worker.connection)
        if "problem" in self.facts:
            self._kill()
            raise RlvrError(self.facts["problem"], self.facts["hint"])
        return self._worker, self._lines

    def _begun(self, worker: LocalWorker) -> dict[str, Any]:
        """What a new process says: first that it has run the user's files, then the facts of an instance."""
        try:
            loaded = worker.receive(within=START_SECONDS)
        except TimeoutError:
            problem = f"The environment {self._title} could not be loaded within {START_SECONDS:g} s."
            return {"problem": problem, "hint": HINT}
        if "problem" in loaded:
            return loaded
        try:
            return worker.receive(within=self._timeout)
        except TimeoutError:
            problem = f"The environment {self._title} was not made within {self._timeout:g} s (--turn-timeout)."
            return {"problem": problem, "hint": "Its constructor is in the way: correct it, or raise --turn-timeout."}

    def _kill(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = self._lines = None
