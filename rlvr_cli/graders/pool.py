"""Grading in processes that can be killed: no response, and no grader, can hang or crash a run.

Enters: (response, ground truth) pairs and, for a grader that takes them, their examples. Leaves: one `Grade` per pair,
in order. When a pair exceeds the time limit, its worker is killed with every process that it has started, and replaced.
The `error` of its grade is `timeout`; it is the name of the exception that the grader raised, or `crash` if the worker
died; `error_detail` says more. A worker that dies may suffer from what an earlier pair has left behind, so the pair is graded again, as the first
one of a new worker. The grades of all other pairs are unaffected: a reply counts only for the item that is being graded,
by the token of its batch and its index, and only if it is a verdict; anything else in the pipe is passed over.
"""

import contextlib
import json
import math
import os
import secrets
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
from rlvr_cli import user_code
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders import GRADERS, check_grader
from rlvr_cli.graders.custom import example_of_truth
from rlvr_cli.process import LONGEST_WAIT
from rlvr_cli.sandbox.run import sandbox_warning
from rlvr_cli.types import KEPT_CHARACTERS, FormatRule, Grade

ExampleOf = Callable[[int], Mapping[str, Any]]

_START_SECONDS = 120.0  # for a worker to import its grader
_BATCH = 32  # items per message
_BATCH_CHARACTERS = 200_000
_LINE_BYTES = 100_000  # of a reply; a longer line is none
_END_SECONDS = 10.0  # for the guard of a worker to end everything that the worker has started
GIVEN = "RLVR_GRADER_"  # a variable RLVR_GRADER_NAME of this process is the variable NAME of a worker
KEPT = frozenset(
    "PATH HOME USER LOGNAME SHELL TERM LANG LANGUAGE TZ TMPDIR TMP TEMP LD_LIBRARY_PATH LD_PRELOAD"
    " PYTHONHOME PYTHONHASHSEED PYTHONUTF8 PYTHONIOENCODING PYTHONWARNINGS PYTHONNOUSERSITE PYTHONUSERBASE"
    " PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX VIRTUAL_ENV CONDA_PREFIX"
    " XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_HUB_OFFLINE"
    " HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE TOKENIZERS_PARALLELISM NLTK_DATA JAVA_HOME ELAN_HOME"
    " SSL_CERT_FILE SSL_CERT_DIR CUDA_HOME CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER"
    " OMP_NUM_THREADS OMP_WAIT_POLICY MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMEXPR_NUM_THREADS".split()
)  # variables that a worker inherits, beside LC_*: where things are and how they run, no secrets
_REPORTED_ERRORS = 3  # different errors that a pool reports: the names of exceptions are the grader's own
_SAID_CHARACTERS = 300  # of an error's text, in a message
_RECYCLE = 20_000  # items that one worker grades before it is replaced, so that a memory leak stays small


class GraderPool:
    """Worker processes that grade with one grader.

    Args:
        spec: a grader's name or `path/to/file.py:function`, see `resolve_grader`.
        format_rule: see `resolve_grader`.
        workers: number of worker processes.
        timeout: seconds that one item may take.
        memory_gb: address-space limit of one worker, in GiB; a grader that needs more gets a MemoryError.
        report: gets a sentence on the first failed grade of each error (of the first few), as soon as it is known, from any thread;
            for `python`, also what the sandbox of this machine lacks.

    Raises:
        RlvrError: there is no such grader. A user's file that cannot be run raises it on the first `grade`.
    """

    batch_size = 128

    def __init__(
        self,
        spec: str,
        *,
        format_rule: FormatRule = "literal",
        workers: int = 2,
        timeout: float = 5.0,
        memory_gb: float = 4.0,
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        assert min(workers, timeout, memory_gb) > 0, (workers, timeout, memory_gb)
        check_grader(spec)
        if spec == "python" and (warning := sandbox_warning()):
            report(warning)
        self.spec = spec
        self.timeout = timeout
        self.restarts = 0  # workers killed or found dead so far
        self.failed = 0  # grades that failed so far
        self._report, self._reported = report, set[str]()
        self._setup = {
            "spec": spec,
            "format_rule": format_rule,
            "timeout": timeout,
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

    @property
    def facts(self) -> dict[str, Any]:
        """What identifies the grader, for run.json."""
        return {"grader": self.spec}

    @property
    def sha256(self) -> str | None:
        """Of a user's file, so that a changed file counts as another grader; None for a built-in grader."""
        return None if self.spec in GRADERS else user_code.sha256(self.spec)

    @property
    def price(self) -> str:
        """Empty: nothing is paid for."""
        return ""

    def recall(self, run: Path) -> None:
        """Do nothing: grading costs little."""

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

    def _unanswered(self, *, expired: bool) -> Grade:
        if expired:
            detail = f"no grade within {self.timeout:g} s (--grader-timeout)"
            return Grade(None, None, None, error="timeout", error_detail=detail)
        return Grade(None, None, None, error="crash", error_detail="the grading process died, also when started afresh")

    def _count_failure(self, grade: Grade) -> None:
        assert grade.error is not None
        self.failed += 1
        if grade.error not in self._reported and len(self._reported) < _REPORTED_ERRORS:
            self._reported.add(grade.error)
            self._report(
                f"the grader {self.spec} failed on a response: {described_error(grade.error, grade.error_detail)}"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise CancelledError

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _run(self, items: "_Items", verdicts: list[Grade | None]) -> None:
        waiting = deque(range(len(items.pairs)))
        doubtful: deque[int] = deque()  # to be graded again by a process that has graded nothing before
        failed_starts = 0
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            while waiting or doubtful or any(worker.pending for worker in self._workers):
                needed = -(-len(waiting) // _BATCH) + len(doubtful) + sum(bool(w.pending) for w in self._workers)
                while len(self._workers) < min(self._size, needed):
                    worker = self._starter.submit(_Worker, self._setup).result()
                    self._workers.append(worker)
                    selector.register(worker.output, selectors.EVENT_READ, worker)
                self._check_open()
                for worker in self._workers:
                    if worker.ready and not worker.pending and doubtful and not worker.graded:
                        worker.send([doubtful.popleft()], items)
                    elif worker.ready and not worker.pending and waiting:
                        worker.send(_next_batch(waiting, items.pairs), items)
                now = time.monotonic()
                deadline = min((worker.deadline(self.timeout) for worker in self._workers), default=now)
                for key, _ in selector.select(min(max(0.0, deadline - now) + 0.001, LONGEST_WAIT)):
                    key.data.receive(verdicts, failed=self._count_failure)
                self._check_open()  # `close` kills the workers: that is no crash of the items they were grading
                now = time.monotonic()
                for worker in list(self._workers):
                    expired = now > worker.deadline(self.timeout)
                    if not worker.ended and not expired and not worker.worn and not worker.recyclable:
                        continue
                    if not worker.recyclable:
                        self.restarts += 1
                    failed_starts = failed_starts + 1 if not worker.ready else 0
                    selector.unregister(worker.output)
                    self._workers.remove(worker)
                    worker.kill()
                    if worker.begun and worker.pending:
                        cause = worker.pending.popleft()
                        if worker.graded and not expired:
                            doubtful.append(cause)  # what an earlier item has left behind may be the cause
                        else:
                            verdicts[cause] = grade = self._unanswered(expired=expired)
                            self._count_failure(grade)
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
            return [index, response, truth]
        known = example_of_truth(truth) if self.example_of is None else dict(self.example_of(index))
        return [index, response, truth, known]


class _Worker:
    """One worker process and the items it has not answered yet."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rlvr_cli.graders.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            start_new_session=True,  # it gets no Ctrl-C
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
        self.worn = False  # earlier items have filled its memory
        self.graded = 0
        self._since = time.monotonic()  # when its current item, or its start, began
        self._buffer = b""
        self._token = secrets.token_hex(16)  # of the last message, repeated in the replies to it
        self._write({**setup, "token": self._token})

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
        self._token = secrets.token_hex(16)
        batch = [items.message(index, with_example=self.wants_example) for index in indices]
        self.begun = self._write([self._token, batch])
        self._since = time.monotonic()

    def _write(self, message: Any) -> bool:
        try:
            self.input.write(json.dumps(message).encode() + b"\n")
            self.input.flush()
        except (BrokenPipeError, ConnectionError):
            self.ended = True
        return not self.ended

    def receive(self, verdicts: list[Grade | None], *, failed: Callable[[Grade], None]) -> None:
        """Read the replies that have arrived, or those that a dead worker has left, into `verdicts`; `failed` gets failed grades."""
        try:
            data = os.read(self.output.fileno(), 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self.ended = True
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self._buffer = self._buffer[: _LINE_BYTES + 1]
        for line in lines:
            if 0 < len(line) <= _LINE_BYTES:
                self._take(line, verdicts, failed=failed)

    def _take(self, line: bytes, verdicts: list[Grade | None], *, failed: Callable[[Grade], None]) -> None:
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            return
        match reply:
            case {"token": self._token, "problem": str(problem), "hint": str(hint)} if not self.ready:
                raise RlvrError(problem, hint)
            case {"token": self._token, "wants_example": bool(wants_example)} if not self.ready:
                self.ready, self.wants_example = True, wants_example
            case [self._token, int(index), verdict] if self.pending and index == self.pending[0] and not self.worn:
                if verdict is None:
                    self.worn = True
                elif (grade := _grade(verdict)) is not None:
                    verdicts[self.pending.popleft()] = grade
                    self.graded += 1
                    if grade.error is not None:
                        failed(grade)
            case _:
                return
        self._since = time.monotonic()

    def interrupt(self) -> None:
        """Have the guard end the worker and all that it started; a thread that reads sees the end of its output."""
        if self.process.returncode is None:  # otherwise the PID may belong to another process by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.process.pid, signal.SIGTERM)
                os.kill(self.process.pid, signal.SIGCONT)  # a grader may have stopped it

    def kill(self) -> None:
        """End the worker and all that it started, and reap the guard."""
        self.interrupt()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.input, self.output):
            with contextlib.suppress(OSError):
                stream.close()


def described_error(error: str, detail: str | None) -> str:
    """A grade's error in words, on one line and of bounded length."""
    words = " ".join((detail or "").split())
    return f"{error}: {words[:_SAID_CHARACTERS]}" if words else error


def environment() -> dict[str, str]:
    """The environment of a worker: `KEPT` and LC_* of this process, and what `GIVEN` names; no key that is not named."""
    kept = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith("LC_")}
    given = {
        name.removeprefix(GIVEN): value
        for name, value in os.environ.items()
        if name.startswith(GIVEN) and name != GIVEN
    }
    path = (str(Path(rlvr_cli.__file__).parents[1]), given.get("PYTHONPATH") or os.environ.get("PYTHONPATH"))
    return {**kept, **given, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def _grade(verdict: Any) -> Grade | None:
    """The grade that a reply holds; None if it holds none."""
    match verdict:
        case [str(error), str(detail)]:
            return Grade(None, None, None, error=error[:KEPT_CHARACTERS], error_detail=detail)
        case [format_reward, answer_reward, reward, str() | None as answer, str() | None as kind, None, None]:
            rewards = [reward] if format_reward is answer_reward is None else [format_reward, answer_reward, reward]
            if all(type(r) in (int, float) and math.isfinite(r) for r in rewards):
                return Grade(format_reward, answer_reward, reward, answer, kind and kind[:KEPT_CHARACTERS])
    return None
