"""Process control: stop on a signal or pass it on, die with the parent process, limit the time and memory of third-party code.

Also what a process does with its memory: what is never garbage, and what is kept when it is freed.

Enters: signals, or seconds and bytes. Leaves: `Interrupted`, raised where the work polls for it; a second signal stops
at once. A process that exceeds the time limit of `time_and_memory_limit` prints the two-line error and exits with
status 1. The limits apply only in the command line (`limits_apply`); in a notebook or a test they do nothing.
"""

import atexit
import gc
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn

from rlvr_cli.errors import Interrupted

if TYPE_CHECKING:
    import subprocess

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
LONGEST_WAIT = 3_600.0  # seconds; what waits longer looks again: systems count the milliseconds of a wait in 31 bits


# Ctrl-C, an end that is asked for, a closed terminal, and the warning that SLURM sends before its time limit.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
HEARD = b"stopping: what is done will be saved. Another Ctrl-C stops at once, without saving more.\n"
REPEAT_SECONDS = 1.0  # within which another signal is the same one: `timeout` and closing terminals send it twice


@contextmanager
def importing() -> Iterator[None]:
    """A block that imports libraries. What they make lives as long as the process: the garbage collector never looks at it again.

    It is for the beginning of a process, since all that is there at its end is left out: where it was entered before, what nothing
    refers to any more is collected first, such as the model of the command before.

    Libraries such as torch and transformers make 400,000 objects. To go through them again and again takes a sixth of their import, and
    then some tenths of a second whenever all objects are collected, as at the end.
    """
    if not gc.isenabled():
        yield
        return
    if gc.get_freeze_count():
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.unregister(_collect_for_triton)
        atexit.register(_collect_for_triton)


def _collect_for_triton() -> None:
    """Let what Triton made be collected at the end, since it complains on stderr of what is not."""
    if "triton" in sys.modules:
        gc.unfreeze()


def keep_freed_memory() -> None:
    """Have the C library keep what is freed for what is asked for next. What the environment says of it has precedence.

    By default glibc returns large blocks to the system, and gets them again with a page fault for each 4 KiB: a fifth of the time of a
    sampling call with a small model. It keeps up to 1 GiB at the end of the heap; the most that a process held was the same.
    """
    import ctypes  # here: `rlvr --help` does without

    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    with suppress(AttributeError):  # another C library
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_MMAP_THRESHOLD, 32 << 20)  # the most that it takes
        set_option(_M_TRIM_THRESHOLD, 1 << 30)


@contextmanager
def left_on_interrupt() -> Iterator[None]:
    """Context manager in which Ctrl-C ends the process at once with status 130, where nothing is open yet.

    It is for the import of compiled libraries, some of which abort, or fail in other ways, when a KeyboardInterrupt passes through them.
    """
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(130)


class StopRequest:
    """Context manager that turns `STOP_SIGNALS` into a flag, polled with `check`; `stoppable` blocks end at once.

    The first signal is acknowledged on stderr, because the work may need seconds to notice it.

    A second Ctrl-C, or another signal after `REPEAT_SECONDS`, raises KeyboardInterrupt wherever the work is. Only the main
    thread can handle signals; in another thread the flag is never set. A SIGHUP that is ignored stays so (nohup).

    Attributes:
        requested: whether a signal has arrived.
        at_once: whether another one has: no more is saved.
    """

    def __init__(self) -> None:
        self.requested = self.at_once = False
        self._received_at = 0.0
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        global _current
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._receive)
            _current = self
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        global _current
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if _current is self:
            _current = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        global _only_waiting
        if self.requested and (number == signal.SIGINT or time.monotonic() - self._received_at > REPEAT_SECONDS):
            self.at_once = True
            raise KeyboardInterrupt
        if not self.requested:
            self.requested, self._received_at = True, time.monotonic()
            with suppress(OSError):
                os.write(2, HEARD)  # not print: it may be the code that the signal has interrupted
        if _only_waiting:
            _only_waiting = False  # once: the exception must not be interrupted by another
            raise Interrupted

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived."""
        if self.requested:
            raise Interrupted


_current: StopRequest | None = None  # the open one, of the main thread
_only_waiting = False  # whether the main thread is in a `stoppable` block


@contextmanager
def stoppable() -> Iterator[None]:
    """A block that does nothing but wait: a signal to the open `StopRequest`, earlier or within, ends it with Interrupted."""
    global _only_waiting
    if _current is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _only_waiting = True
    try:
        _current.check()
        yield
    finally:
        _only_waiting = False


@contextmanager
def forwarding_signals(process: "subprocess.Popen[str]") -> Iterator["subprocess.Popen[str]"]:
    """On Ctrl-C wait for the command, which has received the signal too, to save; pass the other signals on first.

    Raises:
        Interrupted: after any of `STOP_SIGNALS`, once the command has ended.
    """

    passed_on = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal passed_on
        process.terminate()
        if not passed_on:  # else the command is being waited for
            passed_on = True
            raise KeyboardInterrupt

    others = [n for n in STOP_SIGNALS if n != signal.SIGINT and signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, pass_on) for number in others}
    try:
        yield process
    except KeyboardInterrupt:
        process.wait()
        raise Interrupted from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def die_with_parent(parent: int, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent dies (Linux); elsewhere it ends when its input closes."""
    _prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # the parent died before the request
        os._exit(0)


def fork_guarded(parent: int) -> None:
    """Go on in a child process. This process only guards it, and exits when the child ends, on SIGTERM, or if `parent` dies.

    Before it exits, it kills everything that the child has started, however deep, in whatever session (Linux: orphans
    become children of the guard). All file descriptors above 2 are closed in the guard.
    """
    waited = {signal.SIGTERM, signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    die_with_parent(parent, by=signal.SIGTERM)
    guard = os.getpid()
    child = os.fork()
    if not child:
        os.setsid()  # a signal to its own group does not reach the guard
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waited)
        return die_with_parent(guard)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    while signal.sigwait(waited) == signal.SIGCHLD:
        if child in _reaped():
            break
    else:
        with suppress(ProcessLookupError):  # it has no group yet, and is killed below
            os.killpg(child, signal.SIGKILL)  # it has not been reaped, so the id is its own
    while started := _descendants(guard):
        for pid in started:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
        _reaped()
    os._exit(0)


def _reaped() -> set[int]:
    """Reap the children that have ended, and return their ids."""
    ended: set[int] = set()
    with suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended.add(pid)
    return ended


def _descendants(root: int) -> list[int]:
    """The processes below one, ended ones that nobody has reaped included; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    names = os.listdir("/proc") if os.path.isdir("/proc") else []
    for name in names:
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                children.setdefault(int(stat.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def _prctl(option: int, value: int) -> None:
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


GRACE = 1.0  # seconds beyond the limit, in which the code may still end by itself

limits_apply = False  # set by cli.main
_temporary: set[Path] = set()  # folders to remove when the process gives up


@contextmanager
def removed_if_given_up(folder: Path) -> Iterator[None]:
    """Have a temporary folder removed if the block is ended by `leave`, which runs no other cleanup."""
    _temporary.add(folder)
    try:
        yield
    finally:
        _temporary.discard(folder)


def leave(status: int) -> NoReturn:
    """End the process without its threads, for which Python would wait. Temporary folders are removed."""
    for folder in list(_temporary):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(status)


@contextmanager
def time_and_memory_limit(
    *, seconds: float, bytes: int, problem: str, hint: str, computing: bool = False
) -> Iterator[None]:
    """Run a block under a time limit, and a memory limit in bytes on top of what the process uses already.

    Args:
        computing: count the seconds for which the process computes: on a busy machine it may wait for longer.
    """
    if not limits_apply:
        yield
        return

    def give_up() -> None:
        print(f"error: {problem}\n  {hint}", file=sys.stderr, flush=True)
        leave(1)  # the thread that runs the block cannot be stopped

    over, clock = threading.Event(), time.process_time if computing else time.monotonic
    until = clock() + seconds + GRACE

    def watch() -> None:
        while not over.wait(max(until - clock(), 0.01)):
            if clock() >= until:
                give_up()

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    ceiling = _bytes_of(5) + bytes
    with suppress(ValueError, OSError):
        resource.setrlimit(
            resource.RLIMIT_DATA, (ceiling if hard == resource.RLIM_INFINITY else min(ceiling, hard), hard)
        )
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _bytes_of(field: int) -> int:
    """Return a field of /proc/self/statm in bytes: 0 counts toward RLIMIT_AS, 5 toward RLIMIT_DATA; 0 where the system does not report them."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
        return int(file.read().split()[field]) * resource.getpagesize()
    return 0


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_memory(memory_bytes: int) -> None:
    """Limit the address space of this process and of all that it starts; to less, where less is allowed."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def memory_was_filled(error: BaseException) -> bool:
    """Whether memory was refused, as an exception or one that it comes from says, and the address space is above half of the limit of
    `limit_memory` without what their frames hold, which is let go: earlier work may have filled it then.
    """
    chain: list[BaseException] = []
    last: BaseException | None = error
    while last is not None and all(last is not one for one in chain):
        chain.append(last)
        last = last.__cause__ or last.__context__
    if not any(isinstance(one, MemoryError) for one in chain):
        return False
    for one in chain:
        one.__traceback__ = None
    gc.collect()  # a function that calls itself holds itself
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return limit != resource.RLIM_INFINITY and _bytes_of(0) > limit / 2


def memory_limit() -> int:
    """Return the bytes that this process may use: the machine's memory, or a container's limit if that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total


_IMPORT = """
import sys
sys.path[:] = {path!r}
try:
    import {module}
except Exception as error:
    first = (str(error).strip().splitlines() or [""])[0]
    sys.exit(f"{{type(error).__name__}}: {{first}}")
"""


def import_error(module: str, *, seconds: float = 120.0) -> str:
    """Import a module in a process of its own, where it can neither crash this one nor hang it.

    Returns:
        Why it cannot be imported, on one line; empty if it can.
    """
    import subprocess

    command = [sys.executable, "-c", _IMPORT.format(path=sys.path, module=module)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"its import takes more than {seconds:.0f} s"
    if done.returncode < 0:
        return f"its import ends with {signal.Signals(-done.returncode).name}"
    lines = done.stderr.strip().splitlines() or [f"its import ends with status {done.returncode}"]
    return lines[-1] if done.returncode else ""
