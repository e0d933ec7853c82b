"""The `rlvr` script without seconds of imports: a process that has imported the package forks one child a call.

`with Forks(folder, fork_server(HEAVY)) as forks: forks.run("analyze", cwd=folder)`. A child is what the script is: it has its own
arguments, directory, environment and standard streams, runs `rlvr_cli.cli.main` and ends as a Python process ends, but for
what imported libraries would do then. The process that forks is itself a fork of the one that asks for it, which has imported
most: here pytest, between the collection and the first test, so that nothing of a test is in it; what is pytest's, it puts off.
It answers orders, one JSON object a line.
"""

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import importlib.util
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TextIO

from forked import ABOVE, ROOT, VLLM_SERVER, fork_modules, pair, popen, run_and_end, serve

LIMIT = 120.0  # seconds after which a call counts as hung
HUGE_PAGE, MADV_COLLAPSE = 1 << 21, 25  # as Linux has them
SIGNALED = "RLVR_TEST_SIGNALED"  # names a file that gets the moment at which a fault point signals the process
LATE = (  # what libraries import in every call: typer for options, pyarrow for tables, rlvr for queries
    "typer._adapters",
    *(["pandas"] if importlib.util.find_spec("pandas") else []),
    "duckdb",
    "pyarrow.compute",
    "pyarrow.pandas_compat",
    "pyarrow.parquet",
)
HEAVY = (
    *LATE,
    "rlvr_cli.commands.eval",
    "rlvr_cli.commands.store.analyze",
    "rlvr_cli.commands.store.filter",
    "rlvr_cli.commands.store.grade",
    "rlvr_cli.commands.grpo",
    "rlvr_cli.commands.ei",
    "rlvr_cli.commands.sft",
    "rlvr_cli.commands.dpo",
    "rlvr_cli.commands.ppo",
    "rlvr_cli.commands.distill",
    "rlvr_cli.commands.discover",
    "rlvr_cli.models.load",
    "rlvr_cli.samplers.embedded.engine",
    "rlvr_cli.samplers.embedded.open",
    "rlvr_cli.training.parallel.ranks",
    "peft",
    "hypothesis",
    "pytest",
    *(
        name
        for name in ("aiohttp", "matplotlib.backends.backend_svg", "renderers.configs")
        if importlib.util.find_spec(name.partition(".")[0])
    ),
)

OF_PACKAGES = {  # for the tests that need these packages
    "vllm": (VLLM_SERVER,),
    "verifiers": ("rlvr_cli.environments.verifiers", "rlvr_mine"),
}


@dataclass(frozen=True)
class Done:
    """How a call ended."""

    status: int  # negative for a signal
    out: str
    err: str
    seconds: float
    hung: bool = False

    @property
    def said(self) -> str:
        return self.out + self.err


@dataclass(frozen=True)
class Call:
    """A call under way."""

    pid: int
    out: Path
    err: Path
    started: float


@dataclass(frozen=True)
class Server:
    """The process that forks: a child of this one."""

    pid: int
    orders: TextIO
    answers: TextIO
    starts: socket.socket  # of `forked.serve`


def fork_server(modules: Sequence[str]) -> Server:
    """Fork the process that forks.

    Args:
        modules: what it imports before its first call, where this process has not yet.
    """
    ours, theirs = pair()
    (orders, to_orders), (from_answers, answers) = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        try:
            given = [fcntl.fcntl(each, fcntl.F_DUPFD, ABOVE) for each in (orders, answers, 2, theirs.detach())]
            for number, descriptor in enumerate(given):
                os.dup2(descriptor, number)
            os.closerange(len(given), os.sysconf("SC_OPEN_MAX"))
            _serve(socket.socket(fileno=3), modules)
        finally:  # whatever happens, it must not go on as pytest
            traceback.print_exc()
            os._exit(1)
    theirs.close()
    os.close(orders)
    os.close(answers)
    return Server(pid, os.fdopen(to_orders, "w"), os.fdopen(from_answers), ours)


class Forks:
    """Calls of `rlvr`, each in a child of one process.

    Args:
        folder: for the children's output.

    Attributes:
        popen: in place of `subprocess.Popen`, it also forks the `forked.MODULES` that this process starts.
    """

    def __init__(self, folder: Path, server: Server) -> None:
        self._folder, self._numbers, self._server = folder, count(), server
        self._ended: dict[int, int] = {}
        self.popen = popen(server.starts)

    def __enter__(self) -> "Forks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.starts.close()
        self._server.orders.close()
        os.waitpid(self._server.pid, 0)
        self._server.answers.close()

    def start(
        self,
        *arguments: object,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        out: str = "",
        closed: Sequence[int] = (),
        fault: str = "",
        before: str = "",
    ) -> Call:
        """Start `rlvr ARGUMENTS`.

        Args:
            environment: variables beside those of the tests.
            out: the file that stdout goes to; empty: a new one.
            closed: descriptors that the child starts without.
            fault: what happens to it where (`rlvr_cli.faults`), such as "update:2:term".
            before: Python statements that are run first, in this process and not in those that it starts.
        """
        number = next(self._numbers)
        files = [Path(out) if out else self._folder / f"{number}.out", self._folder / f"{number}.err"]
        pid = self._order(
            arguments=[*map(str, arguments)],
            cwd=str(cwd),
            environment={**({"RLVR_FAULT": fault} if fault else {}), **(environment or {})},
            files=[*map(str, files)],
            closed=list(closed),
            before=before,
        )
        assert pid is not None
        self._ended.pop(pid, None)
        return Call(pid, *files, time.monotonic())

    def status(self, call: Call) -> int | None:
        """The exit status of a call; None while it runs."""
        if call.pid not in self._ended and (status := self._order(poll=call.pid)) is not None:
            self._ended[call.pid] = status
        return self._ended.get(call.pid)

    def wait(self, call: Call, *, limit: float = LIMIT) -> Done:
        """Wait for a call, and kill it when it hangs."""
        deadline, hung = time.monotonic() + limit, False
        while (status := self.status(call)) is None:
            if not hung and time.monotonic() > deadline:
                hung = True
                self.send(call, signal.SIGKILL)
            time.sleep(0.01)
        texts = [file.read_text(errors="replace") if file.is_file() else "" for file in (call.out, call.err)]
        return Done(status, *texts, time.monotonic() - call.started, hung)

    def send(self, call: Call, number: signal.Signals) -> None:
        """Send a signal to a call, unless it has ended."""
        if self.status(call) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(call.pid, number)

    def run(self, *arguments: object, cwd: Path, status: int | None = None, limit: float = LIMIT, **how: Any) -> Done:
        """Start a call, with the arguments of `start`, and wait for it.

        Args:
            status: what it must end with, in time and without a traceback; None: anything may happen.
        """
        done = self.wait(self.start(*arguments, cwd=cwd, **how), limit=limit)
        if status is not None:
            assert not done.hung, f"hung: {done.said}"
            assert "Traceback" not in done.said, done.said
            assert done.status == status, done.said
        return done

    def _order(self, **order: object) -> int | None:
        print(json.dumps(order), file=self._server.orders, flush=True)
        return json.loads(self._server.answers.readline())


def processes_in(folder: Path) -> dict[int, str]:
    """The processes whose working directory is this folder or in it: what a call with that `cwd` has started."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if Path(os.readlink(process / "cwd")).is_relative_to(folder.resolve()):
                name, line = (process / "comm").read_text(), (process / "cmdline").read_text()
                found[int(process.name)] = f"{name.strip()}: {line}".replace("\0", " ")
    return found


def _serve(starts: socket.socket, modules: Sequence[str]) -> NoReturn:
    _leave_pytest()
    path = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
    os.environ.update(
        {
            "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "HF_DEACTIVATE_ASYNC_LOAD": "1",  # torch cannot compute in a thread that a forked process starts
        }
    )  # fmt: skip
    main = importlib.import_module("rlvr_cli.cli").main
    environment = dict(os.environ)
    if any(module.startswith("vllm.") for module in modules):
        importlib.import_module("rlvr_cli.samplers.vllm_process").import_vllm()  # it minds variables as it is imported
        os.environ.clear()
        os.environ.update(environment)  # the children set them themselves
        broadcast = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
        assert broadcast.sched_yield, "vLLM waits otherwise now"
        # A server's engine and its worker wait for each other all the time, and would keep both cores busy with it.
        broadcast.sched_yield = partial(time.sleep, 5e-4)  # type: ignore[attr-defined]
    for module in modules:
        importlib.import_module(module)
    importlib.import_module("rlvr_cli.runs.provenance").environment()  # reads once which packages are installed
    importlib.import_module("rlvr_cli.analysis.queries.named_queries").named_queries()
    # The first connection takes twice as long as others. This one leaves no thread behind.
    importlib.import_module("duckdb").connect(config={"threads": 1}).close()
    load, identity = map(importlib.import_module, ("rlvr_cli.models.load", "rlvr_cli.models.identity"))
    importlib.import_module("torch").set_num_threads(1)
    load.load_policy(identity.model_path(""), dtype="float32", device="cpu")  # imports what it imports late
    gc.freeze()  # what is imported stays shared with the children
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # it has no public name
        finalizer.atexit = False  # at the end of each child torch would take back its operators, in 40 ms
    _collapse()
    if os.fork() == 0:
        serve(starts)
    starts.close()
    running: set[int] = set()
    for line in sys.stdin:
        order = json.loads(line)
        if "poll" in order:
            pid, status = os.waitpid(order["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            running.discard(pid)
        else:
            answer = os.fork()
            if answer == 0:
                _become(order, main)
            running.add(answer)
        os.write(1, json.dumps(answer).encode() + b"\n")
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)  # nothing is left to do; an interpreter would take torch apart first


def _leave_pytest() -> None:
    """Be a process as the interpreter starts it, where pytest has made it another: its streams, hooks and handlers."""
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.excepthook, sys.unraisablehook, threading.excepthook = (
        sys.__excepthook__,
        sys.__unraisablehook__,
        threading.__excepthook__,
    )
    faulthandler.disable()
    warnings.resetwarnings()
    for category in (ResourceWarning, ImportWarning, PendingDeprecationWarning, DeprecationWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
    sys.meta_path = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest.")]
    sys.path = [ROOT, *(entry for entry in sys.path if entry not in ("", ROOT))]
    for logger in (logging.getLogger(), *logging.Logger.manager.loggerDict.values()):
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)  # it has the file of what pytest captured when the library was imported
                vars(handler).pop("flush", None)  # transformers keeps the stream's own
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _collapse() -> None:
    """Put this process's own memory into huge pages, where Linux can: a fork copies the table of pages, in 7 ms, not in 21."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *_, inode, name = [*line.split(maxsplit=5), ""][:6]
        if access.startswith("rw") and inode == "0" and not name.startswith("[stack"):
            first, after = (int(address, 16) for address in addresses.split("-"))
            start, end = -(-first // HUGE_PAGE) * HUGE_PAGE, after // HUGE_PAGE * HUGE_PAGE
            if start < end:
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def _become(order: dict, main: Callable[[], None]) -> NoReturn:
    os.setsid()
    os.chdir(order["cwd"])
    os.environ.update(order["environment"])
    for descriptor, path, how in zip(
        (0, 1, 2), (os.devnull, *order["files"]), (os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT] * 2), strict=True
    ):
        opened = os.open(path, how, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    fork_modules()
    for descriptor in order["closed"]:
        os.close(descriptor)
        name = ("stdin", "stdout", "stderr")[descriptor]
        setattr(sys, name, None)
        setattr(sys, f"__{name}__", None)
    if path := os.environ.get(SIGNALED):
        _note_signals(path)
    exec(order["before"], {})  # a test's own statements, such as a shorter time limit
    sys.argv = ["rlvr", *order["arguments"]]
    run_and_end(main)


def _note_signals(path: str) -> None:
    """Write down when this process first signals itself, as a fault point does."""
    kill, own = os.kill, os.getpid()

    def noting(pid: int, number: int) -> None:
        if pid == own and not os.path.exists(path):
            Path(path).write_text(str(time.monotonic()))
        kill(pid, number)

    os.kill = noting
