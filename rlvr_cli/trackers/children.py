"""The trackers of a run in progress, each in a process of its own: a slow, failing or crashing one neither delays nor ends the run.

Enters: names of trackers, and the run once it is open. Leaves: processes that follow it (`follow`), ended within `SECONDS` of its end:
when its status is written and before its last upload, so that what they write into it is uploaded too.
The run's files are what they read, so nothing is queued: a tracker that is late is late alone.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rlvr_cli.faults import environment_of
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.terminal import console
from rlvr_cli.trackers.open import check_installed, later

SECONDS = 60.0  # that all trackers together get after the end of a run


class Children:
    """The processes of one run's trackers."""

    def __init__(self, names: Sequence[str], *, project: str, seconds: float = SECONDS) -> None:
        """`seconds`: that they get at the end to send what is left."""
        self._names, self._project, self._seconds = names, project, seconds
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        self._run: Path | None = None

    def start(self, run: RunDir) -> None:
        """Start to follow a run, until it ends."""
        self._run = run.path
        run.at_end(self.end)
        for name in self._names:
            command = [sys.executable, "-m", "rlvr_cli.trackers.follow", name, str(run.path), self._project]
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
                env=environment_of("tracker"),
                start_new_session=True,
            )
            self._running[name] = child
            reader = threading.Thread(target=_pass_on, args=(child,), daemon=True)
            reader.start()
            self._readers.append(reader)

    def end(self) -> None:
        """Let the trackers send what is left, and end them. Calling it again has no effect."""
        deadline = time.monotonic() + self._seconds
        for child in self._running.values():
            assert child.stdin is not None
            with suppress(OSError):
                child.stdin.close()
        try:
            for name, child in self._running.items():
                try:
                    status = child.wait(timeout=max(deadline - time.monotonic(), 0.0))
                except subprocess.TimeoutExpired:
                    console.say(f"note: {name} has not got everything within {self._seconds:g} s; {self._later(name)}")
                    continue
                if status not in (0, 1):  # after 1 it has said why
                    console.say(f"note: the process of {name} ended with status {status}; {self._later(name)}")
        finally:
            for child in self._running.values():
                child.kill()
                child.wait()
            self._running.clear()
        for reader in self._readers:
            reader.join(timeout=1.0)

    def _later(self, name: str) -> str:
        assert self._run is not None
        return f"the rest: {later(self._run, name, self._project)}"


def _pass_on(child: subprocess.Popen[str]) -> None:
    """Print what a child says, one line at a time."""
    assert child.stdout is not None
    with suppress(ValueError, OSError), child.stdout:
        for line in child.stdout:
            console.say(line.rstrip("\n"))


@contextmanager
def tracked(names: Sequence[str], *, project: str) -> Iterator[Children]:
    """Make trackers ready; `start` begins to follow a run. When that or the block ends, so do they. Raises RlvrError if one is not installed."""
    wanted = list(dict.fromkeys(name for name in names if name))
    check_installed(wanted)
    children = Children(wanted, project=project)
    try:
        yield children
    finally:
        children.end()
