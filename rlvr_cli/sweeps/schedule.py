"""Run a sweep's commands, some at a time, each as a worker, here or on a node; what is finished is not repeated, what was killed goes on.

Enters: commands, and the directory of their runs. Leaves: run directories, a log of each process, and what became of each run.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr_cli.config.parsing.command_line import words_of
from rlvr_cli.config.parsing.options import Provenance
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.parallel.places import NodeLost
from rlvr_cli.parallel.start import start_worker
from rlvr_cli.parallel.worker import Worker
from rlvr_cli.process import StopRequest
from rlvr_cli.runs.lock import holder_of, is_locked
from rlvr_cli.runs.manifest import RUN_FILE
from rlvr_cli.runs.readers import ENDED, read_metadata
from rlvr_cli.runs.storage.files import atomic_write, os_errors_as_user_errors
from rlvr_cli.runs.storage.sources import place_of, source_of
from rlvr_cli.sweeps.continued import changed_options, lengths_of
from rlvr_cli.sweeps.job import STOPPED
from rlvr_cli.sweeps.slots import Slot, keep
from rlvr_cli.terminal import console

LEFT_OUT = "left out"  # what has become of a run whose copy in object storage is of no use
SWEEP, LOGS = "sweep.json", "logs"  # in the directory of a sweep
POLL_SECONDS = 0.2
MOST_LOSSES = 3  # of one run with its node; more are its own fault
HELD_SECONDS = 120.0  # for the process of a run whose node has gone to end, and for its lock to be given back
SHOWN_LINES = 4  # of a failed command's stderr


@dataclass(frozen=True)
class Job:
    """One run to make."""

    name: str
    command: Sequence[str]  # its words
    config: Provenance
    there: Path | None = None  # what stands for the run in object storage, where it has not ended
    problem: str = ""  # with the run there, for which it is left out

    @property
    def lengths(self) -> Mapping[str, int]:
        """The options that say how long the run is, with their values."""
        return lengths_of(self.config)


def write_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Store what the sweep is, beside its runs. Runs of an earlier call, with other seeds, stay in it. Raises RlvrError."""
    path = folder / SWEEP
    stored: dict[str, Any] = {}
    with os_errors_as_user_errors(path), suppress(FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        stored = dict(json.loads(path.read_bytes())["runs"])
    with os_errors_as_user_errors(path):
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
    runs = {**stored, **plan["runs"]}
    atomic_write(path, json.dumps({**plan, "runs": runs}, indent=1, ensure_ascii=False).encode() + b"\n")


def status_of(run: Path, job: Job) -> str:
    """`finished`, `diverged`, `new` if there is no run yet, `running` if a process writes it, `short` if it is finished and is to be
    longer now, `begun`, or `left out`.

    Raises:
        RlvrError: the run is damaged, has other options than the job, or is longer than it is to be.
    """
    if job.problem and not _has_ended(run):
        return LEFT_OUT
    if (state := _state(run, job)) is None:
        return "new"
    metadata = read_metadata(state)
    is_longer = bool(job.lengths.keys() & _changed(state, job))
    if (status := metadata["status"]) in ENDED:
        return "short" if is_longer and status == "finished" else status
    return "running" if _is_written(state) else "begun"


def _state(run: Path, job: Job) -> Path | None:
    """The directory that says how far a run is: the one here, or of one that others have begun what stands for it."""
    is_here = (run / RUN_FILE).exists()
    if job.there and not (is_here and (is_locked(run) or _has_ended(run))):
        return job.there
    return run if is_here else None


def _has_ended(run: Path) -> bool:
    return (run / RUN_FILE).exists() and read_metadata(run)["status"] in ENDED


def _changed(state: Path, job: Job) -> dict[str, Any]:
    return changed_options(read_metadata(state), job.config, command=job.command[1], run=state)


def _is_written(run: Path) -> bool:
    """Whether a process writes a run, as far as another writer would be refused: one that a killed machine left behind does not."""
    return (source_of(run) is not None or is_locked(run)) and holder_of(run) is not None


@dataclass(frozen=True)
class _Running:
    """A run that is being made."""

    number: int
    job: Job
    slot: Slot
    worker: Worker
    since: float
    logged: int = 0  # bytes in its log when it began, of attempts before


class _Sweep:
    """Runs that are being made, and those that wait.

    Args:
        folder: of the runs.
        slots: where, each for one at a time.
        ended, looked_up: of `run_jobs`.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        folder: Path,
        slots: Sequence[Slot],
        ended: Callable[[str], None],
        looked_up: Callable[[Job], Job],
    ) -> None:
        self._ended, self._looked_up = ended, looked_up
        self.waiting, self.running = list(enumerate(jobs, start=1)), list[_Running]()
        self.failed: list[str] = []
        self._count, self._folder, self._free = len(jobs), folder, list(slots)
        self._lost: dict[str, list[float]] = {}  # runs whose node has gone, which may not have ended yet -> when

    def start(self) -> None:
        """Start what waits, where there is room. Raises RlvrError if there is no node left."""
        while self._free and (found := next((item for item in self.waiting if not self._is_held(item[1])), None)):
            self.waiting.remove(found)
            number, job = found[0], self._looked_up(found[1])
            label = f"[{number}/{self._count}] {job.name}"
            status = status_of(self._folder / job.name, job)
            if status in ENDED:
                console.say(f"{label}: {status} before")
                self._ended(job.name)
            elif status in ("running", LEFT_OUT):
                why = "another process writes it; it is left alone"
                console.say(f"{label}: {f'{LEFT_OUT}: {job.problem}' if status == LEFT_OUT else why}")
                self.failed.append(job.name)
            else:
                self._start(number, job, begun=status != "new", label=label)
        if self.waiting and not self.running and not self._free:
            raise RlvrError("No node of the cluster is left on which runs could go on.", "The same command goes on.")

    def _is_held(self, job: Job) -> bool:
        lost = self._lost.get(job.name)
        return bool(lost) and time.monotonic() < lost[-1] + HELD_SECONDS and is_locked(self._folder / job.name)

    def _start(self, number: int, job: Job, *, begun: bool, label: str) -> None:
        slot = self._free.pop(0)
        log = self._folder / LOGS / f"{job.name}.log"
        logged = log.stat().st_size if log.exists() else 0
        try:
            worker = _started(job, self._folder, resume=begun, slot=slot)
        except NodeLost as error:
            console.say(error.problem)
            self.waiting.insert(0, (number, job))
            return
        console.say(f"{label}: {'goes on' if begun else 'begins'}")
        self.running.append(_Running(number, job, slot, worker, time.monotonic(), logged))

    def look(self) -> None:
        """See what has ended, and make room."""
        for one in list(self.running):
            if (code := one.worker.status) is None:
                continue
            self.running.remove(one)
            self._free.append(one.slot)  # if it has gone, its next start says so
            took = f"after {time.monotonic() - one.since:.0f} s"
            try:
                one.worker.check()
            except NodeLost as error:
                console.say(f"{one.job.name}: {error.problem}")
                losses = self._lost.setdefault(one.job.name, [])
                losses.append(time.monotonic())
                if len(losses) <= MOST_LOSSES:
                    self.waiting.insert(0, (one.number, one.job))
                    continue
            except RlvrError:
                console.say(f"{one.job.name}: {_ending(code)} {took}")
            finally:
                one.worker.kill()
            if code:
                self.failed.append(one.job.name)
                for line in _last_lines(self._folder / LOGS / f"{one.job.name}.log", after=one.logged):
                    console.say(f"  {line}")
            else:
                self._ended(one.job.name)

    def make(self, stop: StopRequest) -> None:
        """Make all that wait. Raises RlvrError if there is no node left, Interrupted after a signal."""
        while self.waiting or self.running:
            stop.check()
            self.start()
            if self.waiting or self.running:  # those that wait may all be held
                time.sleep(POLL_SECONDS)
            self.look()

    def end(self) -> None:
        """Ask each process to end, and wait until it has saved what is done."""
        for one in self.running:
            with suppress(RlvrError):  # it has ended already
                one.worker.send(STOPPED)  # before the signal: it hears one or sees the other
            one.worker.interrupt()
        while any(one.worker.status is None for one in self.running):
            time.sleep(POLL_SECONDS / 4)


def run_jobs(
    jobs: Sequence[Job],
    folder: Path,
    slots: Sequence[Slot],
    *,
    ended: Callable[[str], None] = lambda name: None,
    looked_up: Callable[[Job], Job] = lambda job: job,
) -> list[str]:
    """Run what is not finished, in order, and return the names of the runs that failed.

    A run whose node has left the cluster goes on at another one's slot.

    Args:
        ended: called with the name of each run that has ended well.
        looked_up: returns a job whose turn it is, with what others have made of its run meanwhile.

    Raises:
        RlvrError: the cluster does not give the slots, or all its nodes have gone.
        Interrupted: after a signal, once the processes have saved what is done.
    """
    sweep = _Sweep(jobs, folder, slots, ended, looked_up)
    if any(status_of(folder / job.name, job) not in ENDED for job in jobs):
        keep(slots)
    with StopRequest() as stop:
        try:
            sweep.make(stop)
        except (Interrupted, KeyboardInterrupt):
            sweep.end()
            raise Interrupted("what is done is kept; the same command goes on") from None
    return sweep.failed


def _started(job: Job, folder: Path, *, resume: bool, slot: Slot) -> Worker:
    """Start the command of a run, or, of a run that has begun, the one that goes on with it."""
    words = list(job.command[2:])
    if resume:
        state = _state(folder / job.name, job)
        assert state is not None
        here = ["--resume", job.name, "--runs-dir", str(folder)]
        words = here if state != job.there else ["--resume", place_of(state)]  # there it takes the run's lease
        words += words_of(type(job.config), _changed(state, job))
    log = (folder / LOGS / f"{job.name}.log").absolute()
    with os_errors_as_user_errors(log):
        log.open("ab").close()
    return start_worker(
        job.name,
        "rlvr_cli.sweeps.job:run",
        place=slot.place,
        arguments={
            "words": [job.command[1], *words],
            "log": str(log),
            "folder": os.getcwd(),
            "visible": slot.visible,
        },
        title=f"The run {job.name}",
        hint="The same command goes on.",
    )


def _ending(code: int) -> str:
    if code == 0:
        return "finished"
    return f"killed by signal {-code}" if code < 0 else f"failed with status {code}"


def _last_lines(log: Path, *, after: int) -> list[str]:
    with suppress(OSError):
        text = log.read_bytes()[after:][-4000:].decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-SHOWN_LINES:]
    return []
