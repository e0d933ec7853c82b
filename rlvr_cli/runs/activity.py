"""What the process that writes a run is doing, since when, and when it last moved: for those who look from outside.

Enters: the phases of the work, and each sign that it moves. Leaves: both in the run's lock file (`lock.Lock.note`), and notes on
stderr while nothing moves. A note ends nothing: nobody but the user knows how long a step may take.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.lock import Lock
from rlvr_cli.runs.storage.files import utc_now
from rlvr_cli.terminal import console

_LOOKED_EVERY = 5.0  # seconds between two looks for progress, at most


@dataclass
class _Phase:
    what: str
    total: int
    unit: str
    since: str
    done: int = 0

    def __str__(self) -> str:
        if not self.unit:
            return self.what
        return (
            f"{self.what}, {f'{self.done} of {self.total} {self.unit}' if self.total else f'{self.unit} {self.done}'}"
        )


class Activity:
    """The phases of a run's work, one within the other. To be used from the thread that does the work.

    Attributes:
        late: names those who give no sign of life while the work waits for them. It may take seconds, and is called in a thread
            of its own.
    """

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._phase: _Phase | None = None
        self._moved = time.monotonic()
        self.late: Callable[[], Sequence[str]] = tuple

    @contextmanager
    def doing(self, what: str, *, total: int = 0, unit: str = "") -> Iterator[None]:
        """Name what the block does.

        Args:
            total, unit: of what `progress` counts: 64 responses. Where it is not known how many there are, 0 and the singular.
        """
        outer = self._phase
        self._enter(_Phase(what, total, unit, since=utc_now()))
        try:
            yield
        finally:
            self._enter(outer)

    def progress(self, count: int = 1) -> None:
        """Say that the work moves, and has done `count` more."""
        self._moved = time.monotonic()
        if self._phase is not None:
            self._phase.done += count
        self._note()

    @contextmanager
    def watched(self, *, minutes: float) -> Iterator[None]:
        """Say on stderr when nothing has moved for so many minutes, again after twice as long, and when it goes on; 0: never."""
        if not minutes:
            yield
            return
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(60 * minutes, ended), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def _enter(self, phase: _Phase | None) -> None:
        self._phase, self._moved = phase, time.monotonic()
        self._note()

    def _note(self) -> None:
        phase = self._phase
        self._lock.note(
            {} if phase is None else {"activity": str(phase), "activity_since": phase.since, "last_progress": utc_now()}
        )

    def _watch(self, patience: float, ended: threading.Event) -> None:
        due, still, moved = patience, 0.0, self._moved
        while not ended.wait(min(patience / 4, _LOOKED_EVERY)):
            if self._moved != moved:
                if due > patience:
                    console.say(f"it goes on after {console.duration(still)}: {self._phase}")
                due, moved = patience, self._moved
            still, phase = time.monotonic() - moved, self._phase
            if phase is not None and still >= due:
                late = []
                with suppress(RlvrError):  # somebody has ended, which the work notices by itself
                    late = self.late()
                console.say(
                    f"note: no progress for {console.duration(still)}: {phase}, since {phase.since[:19]}Z"
                    + (f"; no sign of life from {', '.join(late)}" if late else "")
                )
                due = 2 * still
