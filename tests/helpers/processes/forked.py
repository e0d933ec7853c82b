"""How a fork becomes a program, and `fork_modules`: what a process starts as `python -m MODULE`, without seconds of imports.

After `fork_modules()` a copy of the process, as it is then, waits and forks on request. What `subprocess.Popen` starts is what it
would start otherwise: a child of the caller with its own session, environment, folder and descriptors, and the module as `__main__`.
"""

import atexit
import ctypes
import fcntl
import importlib
import inspect
import json
import marshal
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# Those that import torch, or verifiers. Others start sooner than a process of this size is copied, and some mind how much memory it has.
VLLM_SERVER = "vllm.entrypoints.openai.api_server"
SPAWNED = "multiprocessing.spawn"  # vLLM's engine, and its worker
MODULES = (
    "rlvr_cli",
    "rlvr_cli.models.tiny",
    "rlvr_cli.parallel.child",
    "rlvr_cli.data.packages.verifiers",
    "together",
    VLLM_SERVER,
    SPAWNED,
)
ROOT = str(Path(__file__).parents[3])
_PR_SET_CHILD_SUBREAPER = 36
ABOVE = 200  # where a child's descriptors wait until those that it must not have are closed


def run_and_end(main: Callable[[], object]) -> NoReturn:
    """Run a program and end the process as the interpreter does, but for seconds of tearing down torch."""
    try:
        main()
        status: object = 0
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # this and the next have no public names
    atexit._run_exitfuncs()
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except OSError:
        status = 120
    os._exit(status if isinstance(status, int) else 1)


def fork_modules() -> None:
    """From now on, fork what this process starts of `MODULES` from a copy of what it is now."""
    ours, theirs = pair()
    if os.fork() == 0:
        ours.close()
        serve(theirs)
    theirs.close()
    subprocess.Popen = popen(ours)


def fork_spawned() -> None:
    """After `fork_modules`: fork also what `multiprocessing` starts as fresh interpreters; vLLM's import takes 12 seconds of a core."""
    # It has one place that starts a process, with no public name. It waits for the process itself, so that what `Popen` returns is
    # only kept: else it would be warned of as not waited for.
    spawn, started = multiprocessing.util.spawnv_passfds, []  # type: ignore[attr-defined]

    def forking(path: Any, args: list[str], passfds: list[int]) -> int:
        if args[-1] != "--multiprocessing-fork":
            return spawn(path, args, passfds)
        started.append(subprocess.Popen([sys.executable, "-m", SPAWNED, *args[-2:]], pass_fds=passfds))
        return started[-1].pid

    multiprocessing.util.spawnv_passfds = forking  # type: ignore[attr-defined]


def pair() -> tuple[socket.socket, socket.socket]:
    """Connect one that starts modules and one that forks."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def popen(orders: socket.socket) -> type[subprocess.Popen]:
    """Return a Popen that has `MODULES` forked by a descendant of this process that does `serve`.

    A module that is to import from elsewhere, by its PYTHONPATH, gets a fresh interpreter.
    """
    # Popen has one place that starts a process, `_execute_child`, and it has no public name; nor has what closes its pipes.
    signature, lock = inspect.signature(subprocess.Popen._execute_child), threading.Lock()  # type: ignore[attr-defined]
    prctl = ctypes.CDLL(None).prctl

    class Popen(subprocess.Popen):
        def _execute_child(self, args: Any, *more: Any) -> None:
            words = args[args.index("-m") + 1 :] if isinstance(args, list) and "-m" in args else []
            how = signature.bind(self, args, *more).arguments
            environment = dict(os.environ if how["env"] is None else how["env"])
            path = {*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))}
            if not words or args[0] != sys.executable or words[0] not in MODULES or path - {ROOT, *sys.path}:
                return super()._execute_child(args, *more)  # type: ignore[misc]
            streams = (how["p2cread"], how["c2pwrite"], how["errwrite"])
            descriptors = {number: number if given == -1 else given for number, given in enumerate(streams)}
            descriptors |= {number: number for number in how["pass_fds"]}
            order = {
                "words": words,
                "descriptors": [*descriptors],
                "cwd": str(how["cwd"] or Path.cwd()),
                "environment": environment,
                "session": how["start_new_session"],
                "first": _written(how["preexec_fn"]) if how["preexec_fn"] else None,
            }
            with lock:
                prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the child, whose parent ends, becomes this process's own
                socket.send_fds(orders, [json.dumps(order).encode()], [*descriptors.values()])
                self.pid = int(orders.recv(64))
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            self._child_created = True
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(how[pipe] for pipe in pipes))  # type: ignore[attr-defined]

    return Popen


def _written(function: Callable[[], object]) -> list[Any]:
    """A function of a module, as its code and what it closes over."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [function.__module__, marshal.dumps(function.__code__).hex(), cells]


def _read(module: str, code: str, cells: list[Any]) -> Callable[[], object]:
    names = vars(importlib.import_module(module))
    return types.FunctionType(marshal.loads(bytes.fromhex(code)), names, closure=tuple(map(types.CellType, cells)))


def serve(orders: socket.socket) -> NoReturn:
    """Fork a child for each order, until the process that gives them has ended."""
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        text, descriptors, _, _ = socket.recv_fds(orders, 1 << 20, 64)
        if not text:
            os._exit(0)
        if (between := os.fork()) == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            _become(json.loads(text), descriptors, orders)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(order: dict[str, Any], descriptors: list[int], orders: socket.socket) -> NoReturn:
    if order["session"]:
        os.setsid()  # before the caller knows the process: it may kill its group at once
    orders.send(str(os.getpid()).encode())
    given = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, ABOVE) for descriptor in descriptors]
    orders.detach()
    os.closerange(3, ABOVE)
    for number, descriptor in zip(order["descriptors"], given, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if order["first"]:
        _read(*order["first"])()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # TMPDIR may name another one
    sys.stdin = os.fdopen(0, closefd=False)  # the one of the process that forks may have read ahead
    module, *arguments = order["words"]
    name = arguments[0].partition(":")[0] if module == "rlvr_cli.parallel.child" else module
    Path("/proc/self/comm").write_text(".".join(name.split(".")[-2:]))  # `forks.processes_in` shows it
    if module in (VLLM_SERVER, SPAWNED):
        fork_modules()
        fork_spawned()
    if module == SPAWNED:
        statements, *arguments = arguments
        sys.argv = ["-c", *arguments]
        run_and_end(lambda: exec(statements))  # what `multiprocessing` gives `python -c`: its own `spawn_main(...)`
    sys.argv, sys.orig_argv = [module, *arguments], [sys.executable, "-m", module, *arguments]
    sys.modules.pop(module, None)  # it runs as __main__, and may be imported beside it
    if name in ("rlvr_cli", "rlvr_cli.sweeps.job"):
        fork_modules()
    run_and_end(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))
