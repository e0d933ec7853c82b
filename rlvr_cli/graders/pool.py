"""Grading in processes that can be killed: no response, and no grader, can hang or crash a run.

Enters: pairs of response and ground truth, and the examples that they answer for a grader that asks. Leaves: one
`Grade` per pair, in order. A pair that takes longer than the time limit costs its worker, which is killed with its
whole process group and replaced; its row says `timeout`, or `crash` if the worker died, or the name of the exception
that the grader raised, and all other verdicts are what they would have been without it.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import rlvr_cli
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders import check_grader
from rlvr_cli.graders.custom import example_of_truth
from rlvr_cli.types import FormatRule, Grade

ExampleOf = Callable[[int], Mapping[str, Any]]

_START_SECONDS = 120.0  # for a worker to import its grader
_BATCH = 32  # items sent at a time
_BATCH_CHARACTERS = 200_000
_RECYCLE = 20_000  # items that one worker grades before it is replaced: a leak in a grader stays small


class GraderPool:
    """Worker processes that grade with one grader.

    Args:
        spec: a grader's name or `path/to/file.py:function`, see `resolve_grader`.
        format_rule: see `resolve_grader`.
        workers: processes.
        timeout: seconds that one item may take.
        memory_gb: address space of one worker, in GiB; a grader that wants more gets a MemoryError.

    Raises:
        RlvrError: there is no such grader. A user's file that cannot be run raises it on the first `grade`.
    """

    def __init__(
        self,
        spec: str,
        *,
        format_rule: FormatRule = "literal",
        workers: int = 2,
        timeout: float = 5.0,
        memory_gb: float = 4.0,
    ) -> None:
        assert min(workers, timeout, memory_gb) > 0, (workers, timeout, memory_gb)
        check_grader(spec)
        self.spec = spec
        self.timeout = timeout
        self.restarts = 0  # workers killed or found dead so far
        self._setup = {
            "spec": spec,
            "format_rule": format_rule,
            "memory_bytes": int(memory_gb * 2**30),
            "parent": os.getpid(),
            "path": [entry for entry in sys.path if entry],
        }
        self._size = workers
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._closed = False
        self._background = ThreadPoolExecutor(1, thread_name_prefix="grader")
        # The kernel's parent-death signal is sent when the thread that started a process ends, so one thread that lives
        # as long as the pool starts them all.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="grader-start")

    def __enter__(self) -> "GraderPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def grade(self, pairs: Sequence[tuple[str, str]], *, example_of: ExampleOf | None = None) -> list[Grade]:
        """The verdicts on (response, ground truth) pairs, in order.

        Args:
            example_of: index of a pair -> the fields of the example that it answers; called for a grader that asks for
                them alone. Without it such a grader gets the ground truth, and None for what else an example has.

        Raises:
            RlvrError: the user's grader could not be loaded, or workers do not start.
        """
        with self._lock:
            assert not self._closed, "the pool is closed"
            verdicts: list[Grade | None] = [None] * len(pairs)
            try:
                self._run(_Items(pairs, example_of), verdicts)
            except BaseException:
                self._kill_all()  # what is under way must not be taken for the answer to the next call
                raise
            assert all(verdict is not None for verdict in verdicts)
            return [verdict for verdict in verdicts if verdict is not None]

    def start(self, pairs: Sequence[tuple[str, str]], *, example_of: ExampleOf | None = None) -> Future[list[Grade]]:
        """`grade` in the background, calls in their order. What it returns or raises is the future's to give."""
        return self._background.submit(self.grade, pairs, example_of=example_of)

    def close(self) -> None:
        """End every worker and wait for it; what is under way ends with `CancelledError`. May be called twice."""
        self._background.shutdown(wait=False, cancel_futures=True)
        self._closed = True
        for worker in list(self._workers):
            worker.interrupt()
        with self._lock:
            self._kill_all()
            self._starter.shutdown()
        self._background.shutdown()

    def _check_open(self) -> None:
        if self._closed:
            raise CancelledError

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _run(self, items: "_Items", verdicts: list[Grade | None]) -> None:
        waiting = deque(range(len(items.pairs)))
        failed_starts = 0
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            while waiting or any(worker.pending for worker in self._workers):
                needed = min(self._size, -(-len(waiting) // _BATCH) + sum(bool(w.pending) for w in self._workers))
                while len(self._workers) < needed:
                    worker = self._starter.submit(_Worker, self._setup).result()
                    self._workers.append(worker)
                    selector.register(worker.output, selectors.EVENT_READ, worker)
                self._check_open()
                for worker in self._workers:
                    if worker.ready and not worker.pending and waiting:
                        worker.send(_next_batch(waiting, items.pairs), items)
                now = time.monotonic()
                deadline = min((worker.deadline(self.timeout) for worker in self._workers), default=now)
                for key, _ in selector.select(max(0.0, deadline - now) + 0.001):
                    key.data.receive(verdicts)
                self._check_open()  # if not, its workers were killed, which says nothing about what they were grading
                now = time.monotonic()
                for worker in list(self._workers):
                    expired = now > worker.deadline(self.timeout)
                    if not worker.ended and not expired and not worker.spent:
                        continue
                    if not worker.spent:
                        self.restarts += 1
                    failed_starts = failed_starts + 1 if not worker.ready else 0
                    if worker.ended and worker.ready and worker.pending:
                        worker.read_rest(verdicts)
                    selector.unregister(worker.output)
                    self._workers.remove(worker)
                    worker.kill()
                    if worker.begun and worker.pending:
                        verdicts[worker.pending.popleft()] = Grade(
                            None, None, None, error="timeout" if expired else "crash"
                        )
                    waiting.extendleft(reversed(worker.pending))
                    if failed_starts >= 3:
                        raise RlvrError(
                            f"The grading process for {self.spec} does not start.",
                            "Give it more memory or a shorter import; run the grader's file alone to see what it does.",
                        )


def _next_batch(waiting: deque[int], pairs: Sequence[tuple[str, str]]) -> list[int]:
    batch: list[int] = []
    characters = 0
    share = max(1, min(_BATCH, len(waiting)))
    while waiting and len(batch) < share and characters < _BATCH_CHARACTERS:
        index = waiting.popleft()
        characters += len(pairs[index][0]) + len(pairs[index][1])
        batch.append(index)
    return batch


class _Items(NamedTuple):
    """What is to be graded."""

    pairs: Sequence[tuple[str, str]]
    example_of: ExampleOf | None

    def message(self, index: int, *, with_example: bool) -> list[Any]:
        """What a worker is sent of one of them."""
        response, truth = self.pairs[index]
        if not with_example:
            return [response, truth]
        known = example_of_truth(truth) if self.example_of is None else dict(self.example_of(index))
        return [response, truth, known]


class _Worker:
    """One process and what it has been asked."""

    def __init__(self, setup: dict[str, Any]) -> None:
        root = str(Path(rlvr_cli.__file__).parents[1])
        inherited = os.environ.get("PYTHONPATH")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rlvr_cli.graders.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, inherited)))},
            start_new_session=True,  # its own group, which is killed as a whole and gets no Ctrl-C
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self.pending: deque[int] = deque()  # items sent and not yet answered; the first is being graded
        self.ready = False
        self.wants_example = False  # its grader does, as far as it has said
        self.ended = False
        self.begun = False  # the first pending item has reached it: if it dies now, that item is why
        self.graded = 0
        self._since = time.monotonic()  # when it began what it is doing
        self._buffer = b""
        self._write(setup)

    @property
    def spent(self) -> bool:
        """Whether it has graded enough and is idle."""
        return self.graded >= _RECYCLE and not self.pending

    def deadline(self, timeout: float) -> float:
        """The moment at which it will have taken too long."""
        if not self.ready:
            return self._since + _START_SECONDS
        return self._since + timeout if self.pending else float("inf") if not self.ended else 0.0

    def send(self, indices: list[int], items: _Items) -> None:
        """Ask for a batch; only an idle worker is asked, so that neither side can wait for the other to read."""
        self.pending.extend(indices)
        self.begun = self._write([items.message(index, with_example=self.wants_example) for index in indices])
        self._since = time.monotonic()

    def _write(self, message: Any) -> bool:
        try:
            self.input.write(json.dumps(message).encode() + b"\n")
            self.input.flush()
        except (BrokenPipeError, ConnectionError):
            self.ended = True
        return not self.ended

    def receive(self, verdicts: list[Grade | None]) -> None:
        """Take the replies that have come."""
        try:
            data = os.read(self.output.fileno(), 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self.ended = True
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line), verdicts)

    def read_rest(self, verdicts: list[Grade | None]) -> None:
        """Take what a dead worker had still written."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.output.fileno(), 1 << 20):
                *lines, self._buffer = (self._buffer + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line), verdicts)

    def _take(self, reply: Any, verdicts: list[Grade | None]) -> None:
        self._since = time.monotonic()
        if isinstance(reply, dict):
            if "problem" in reply:
                raise RlvrError(reply["problem"], reply["hint"])
            self.ready, self.wants_example = True, reply["wants_example"]
            return
        self.graded += 1
        index = self.pending.popleft()
        verdicts[index] = Grade(None, None, None, error=reply) if isinstance(reply, str) else Grade(*reply)

    def interrupt(self) -> None:
        """Kill the process group, which whoever reads from the process will notice."""
        if self.process.returncode is None:  # else the number may be another's by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process group and reap the process."""
        self.interrupt()
        self.process.wait()
        for stream in (self.input, self.output):
            with contextlib.suppress(OSError):
                stream.close()
