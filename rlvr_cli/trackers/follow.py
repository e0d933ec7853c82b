"""The process that sends one run to one tracker while it is written: `python -m rlvr_cli.trackers.follow NAME RUN PROJECT`.

Enters: the run's committed files, looked at every few seconds, until the standard input closes or the parent is gone. Leaves: lines
for the user on stdout, and in the tracker all complete rows. It then has `LAST_SECONDS` for the rest. What the tracker's package prints
goes to the run's `trackers/NAME.log`.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.manifest import METRICS, RUN_FILE
from rlvr_cli.runs.readers import read_run
from rlvr_cli.trackers.open import PATIENCE, later, open_tracker
from rlvr_cli.trackers.rows import complete_rows
from rlvr_cli.trackers.sent import FOLDER

EVERY = 2.0  # seconds between two looks, at least
SHARE = 0.05  # of a core that looking may take: of a long run it takes long
LAST_SECONDS = 60  # after the run has ended, or its process has died


def follow(name: str, run: Path, project: str, *, ended: Callable[[float], bool], say: Callable[[str], None]) -> None:
    """Send a run to a tracker until it has ended.

    Args:
        ended: waits up to so many seconds for the end; whether it has come.

    Raises:
        RlvrError: the run or the tracker cannot be used. The tracker's own errors are of any kind.
    """
    with open_tracker(name, read_run(run), project=project, live=True, patience=PATIENCE) as tracker:
        say(tracker.note)
        seen, over, took = None, False, 0.0
        while not over:
            over = ended(max(EVERY, took / SHARE))
            if over:
                signal.alarm(LAST_SECONDS)
            now, began = _state(run), time.process_time()
            if now != seen or over:
                with suppress(*() if over else (RlvrError,)):  # the writer may be in the middle of something
                    info = read_run(run)
                    tracker.send(complete_rows(info))
                    seen = now
                took = time.process_time() - began
        tracker.finish(read_run(run).metadata["status"])


def _state(run: Path) -> tuple[tuple[int, int] | None, ...]:
    """Return what changes when metrics are committed or the run ends."""
    found: list[tuple[int, int] | None] = []
    for file in (METRICS, RUN_FILE):
        try:
            state = os.stat(run / file)
            found.append((state.st_ino, state.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)


def main() -> None:
    """Follow a run as the child of the process that writes it."""
    name, run, project = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are for the parent, which ends this process
    said = os.dup(1)  # not inherited
    (run / FOLDER).mkdir(exist_ok=True)
    log = os.open(run / FOLDER / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    reader = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a package that asks for something gets no answer

    def say(text: str) -> None:
        with suppress(OSError):  # the parent is gone
            os.write(said, f"{name}: {' '.join(text.split())}\n".encode(errors="replace"))

    def ended(seconds: float) -> bool:
        readable, _, _ = select.select([reader], [], [], seconds)
        return bool(readable) or os.getppid() != parent

    try:
        follow(name, run, project, ended=ended, say=say)
    except Exception as error:
        text = error.problem if isinstance(error, RlvrError) else f"{type(error).__name__}: {error}"
        say(f"{text[:500]} (the run goes on without it; later: {later(run, name, project)})")
        os._exit(1)  # the package's own threads and exit handlers may hang
    os._exit(0)


if __name__ == "__main__":
    main()
