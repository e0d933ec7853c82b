"""Grading in processes that can be killed: no response, and no grader, can hang or crash a run.

Enters: (response, ground truth) pairs and, for a grader that takes them, their examples. Leaves: one `Grade` per pair,
in order. When a pair exceeds the time limit, its worker is killed with its whole process group and replaced. The
`error` of its grade is `timeout`; it is `crash` if the worker died, or the name of the exception that the grader
raised. The grades of all other pairs are unaffected.
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
_BATCH = 32  # items per message
_BATCH_CHARACTERS = 200_000
_RECYCLE = 20_000  # items that one worker grades before it is replaced, so that a memory leak stays small


class GraderPool:
    """Worker processes that grade with one grader.

    Args:
        spec: a grader's name or `path/to/file.py:function`, see `resolve_grader`.
        format_rule: see `resolve_grader`.
        workers: number of worker processes.
        timeout: seconds that one item may take.
        memory_gb: address-space limit of one worker, in GiB; a grader that needs more gets a MemoryError.

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
            example_of: index of a pair -> the fields of its example; called only for a grader that takes the example.
                Without it, such a grader gets an example of which only the ground truth is known.

        Raises:
            RlvrError: the user's grader could not be loaded, or workers do not start.
        """
        with self._lock:
            assert not self._closed, "the pool is closed"
            verdicts: list[Grade | None] = [None] * len(pairs)
            try:
                self._run(_Items(pairs, example_of), verdicts)
            except BaseException:
                self._kill_all()  # pending replies must not be taken for those of the next call
                raise
            assert all(verdict is not None for verdict in verdicts)
            return [verdict for verdict in verdicts if verdict is not None]

    def submit(self, pairs: Sequence[tuple[str, str]], *, example_of: ExampleOf | None = None) -> Future[list[Grade]]:
        """Run `grade` in the background, one call after another. The future holds its grades or its exception."""
        return self._background.submit(self.grade, pairs, example_of=example_of)

    def close(self) -> None:
        """Kill all workers and wait for them to end; pending calls raise `CancelledError`. May be called twice."""
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
                self._check_open()  # `close` kills the workers: that is no crash of the items they were grading
                now = time.monotonic()
                for worker in list(self._workers):
                    expired = now > worker.deadline(self.timeout)
                    if not worker.ended and not expired and not worker.recyclable:
                        continue
                    if not worker.recyclable:
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
                            "Run the grader's file alone to see why: the import may be slow or need too much memory.",
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
    """The pairs of one call of `grade`, and their examples."""

    pairs: Sequence[tuple[str, str]]
    example_of: ExampleOf | None

    def message(self, index: int, *, with_example: bool) -> list[Any]:
        """The JSON item that a worker gets for one pair."""
        response, truth = self.pairs[index]
        if not with_example:
            return [response, truth]
        known = example_of_truth(truth) if self.example_of is None else dict(self.example_of(index))
        return [response, truth, known]


class _Worker:
    """One worker process and the items it has not answered yet."""

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
        self.wants_example = False  # whether its grader takes the example; reported when it is ready
        self.ended = False
        self.begun = False  # the batch was sent: if the worker dies now, the first pending item is the cause
        self.graded = 0
        self._since = time.monotonic()  # when its current item, or its start, began
        self._buffer = b""
        self._write(setup)

    @property
    def recyclable(self) -> bool:
        """Whether it has graded `_RECYCLE` items and is idle."""
        return self.graded >= _RECYCLE and not self.pending

    def deadline(self, timeout: float) -> float:
        """The `time.monotonic()` by which it must reply; inf while idle, 0 if it ended while idle."""
        if not self.ready:
            return self._since + _START_SECONDS
        return self._since + timeout if self.pending else float("inf") if not self.ended else 0.0

    def send(self, indices: list[int], items: _Items) -> None:
        """Send a batch. Only an idle worker gets one, so that the two cannot deadlock on full pipes."""
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
        """Read the replies that have arrived into `verdicts`."""
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
        """Read the replies that a dead worker left in the pipe into `verdicts`."""
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
        """Kill the process group; a thread that reads from the process sees the end of its output."""
        if self.process.returncode is None:  # otherwise the PID may belong to another process by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process group and reap the process."""
        self.interrupt()
        self.process.wait()
        for stream in (self.input, self.output):
            with contextlib.suppress(OSError):
                stream.close()
