"""Run a sweep's commands, some at a time, each as a process of its own; what is finished is not repeated, what was killed goes on.

Enters: commands, and the directory of their runs. Leaves: run directories, a log of each process, and what became of each run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlvr_cli.config.parsing.options import flag
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.process import StopRequest, die_with_parent
from rlvr_cli.runs.lock import holder_of
from rlvr_cli.runs.manifest import RUN_FILE
from rlvr_cli.runs.readers import ENDED, read_metadata
from rlvr_cli.runs.storage.files import atomic_write, os_errors_as_user_errors, shown
from rlvr_cli.terminal import console

SWEEP, LOGS = "sweep.json", "logs"  # in the directory of a sweep
POLL_SECONDS = 0.2
SHOWN_LINES = 4  # of a failed command's stderr


@dataclass(frozen=True)
class Job:
    """One run to make."""

    name: str
    command: Sequence[str]  # its words
    lengths: Mapping[str, int] = field(default_factory=dict)  # the options that say how long it is


def check_plan(folder: Path, plan: Mapping[str, Any], *, lengths: Collection[str] = ()) -> None:
    """Raise RlvrError if the directory holds another sweep: a run of it has other options now. It may get more runs, and longer ones.

    Args:
        lengths: options that say how long a run is.
    """
    path = folder / SWEEP
    if not path.exists():
        return
    with os_errors_as_user_errors(path, "read"):
        data = path.read_bytes()
    try:
        stored = json.loads(data)["runs"]
        options = {
            name: [_options(words, lengths) for words in (stored[name], plan["runs"].get(name, stored[name]))]
            for name in stored
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RlvrError(f"{shown(path)} is damaged.", "Choose another directory with --name.") from error
    for run, (before, now) in options.items():
        if before == now:
            continue
        option = next(name for name in {**before, **now} if before.get(name) != now.get(name))
        raise RlvrError(
            f"{shown(folder)} has runs with other options: of {run}, {option} was {before.get(option, 'not given')}, and is now "
            f"{now.get(option, 'not given')}.",
            "Give the same options to go on with it, or choose another directory with --name.",
        )


def write_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Store what the sweep is, beside its runs. Runs of an earlier call, with other seeds, stay in it."""
    path = folder / SWEEP
    stored: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {"runs": {}}
    runs = {**stored["runs"], **plan["runs"]}
    with os_errors_as_user_errors(path):
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps({**plan, "runs": runs}, indent=1, ensure_ascii=False).encode() + b"\n")


def status_of(run: Path, lengths: Mapping[str, int] | None = None) -> str:
    """`finished`, `diverged`, `new` if there is no run yet, `running` if a process writes it, `short` if it is finished and is to be
    longer now, or `begun`.

    Args:
        lengths: options that say how long the run is to be.

    Raises:
        RlvrError: the run is damaged, or longer than it is to be.
    """
    if not (run / RUN_FILE).exists():
        return "new"
    metadata = read_metadata(run)
    longer = _longer(run, metadata, lengths or {})
    if (status := metadata["status"]) in ENDED:
        return "short" if longer and status == "finished" else status
    return "running" if holder_of(run) else "begun"


def _longer(run: Path, metadata: Mapping[str, Any], lengths: Mapping[str, int]) -> dict[str, int]:
    """The options of a run's length that have grown. Raises RlvrError if one is smaller than it was."""
    stored = metadata.get("config") or {}
    changed = {name: value for name, value in lengths.items() if stored.get(name, value) != value}
    for name, value in changed.items():
        if value < stored[name]:
            raise RlvrError(
                f"{shown(run)} was made with {flag(name)} {stored[name]}, and is now to have {value}.",
                "Give at least as many to go on with it, or choose another directory with --name.",
            )
    return changed


def run_jobs(jobs: Sequence[Job], folder: Path, *, at_once: int, devices: Sequence[str] = ()) -> list[str]:
    """Run what is not finished, in order, and return the names of the runs that failed.

    Args:
        at_once: how many processes there are at most.
        devices: values of CUDA_VISIBLE_DEVICES, one for each process; none: all see every GPU.

    Raises:
        Interrupted: after a signal, once the processes have saved what is done.
    """
    waiting, failed = list(enumerate(jobs, start=1)), []
    free = list(devices) or [""] * at_once
    running: dict[str, tuple[subprocess.Popen[bytes], str, float]] = {}
    with StopRequest() as stop:
        try:
            while waiting or running:
                stop.check()
                while waiting and free:
                    number, job = waiting.pop(0)
                    label = f"[{number}/{len(jobs)}] {job.name}"
                    status = status_of(folder / job.name, job.lengths)
                    if status in ENDED:
                        console.say(f"{label}: {status} before")
                    elif status == "running":
                        console.say(f"{label}: another process writes it; it is left alone")
                        failed.append(job.name)
                    else:
                        console.say(f"{label}: {'begins' if status == 'new' else 'goes on'}")
                        device = free.pop(0)
                        running[job.name] = (
                            _start(job, folder, resume=status != "new", device=device),
                            device,
                            time.monotonic(),
                        )
                for name, (process, device, since) in list(running.items()):
                    if (code := process.poll()) is not None:
                        del running[name]
                        free.append(device)
                        console.say(f"{name}: {_ending(code)} after {time.monotonic() - since:.0f} s")
                        if code:
                            failed.append(name)
                            for line in _last_lines(folder / LOGS / f"{name}.log"):
                                console.say(f"  {line}")
                if running:
                    time.sleep(POLL_SECONDS)
        except (Interrupted, KeyboardInterrupt):
            for process, *_ in running.values():
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
            for process, *_ in running.values():
                process.wait()
            raise Interrupted("what is done is kept; the same command goes on") from None
    return failed


def _start(job: Job, folder: Path, *, resume: bool, device: str) -> "subprocess.Popen[bytes]":
    """Start the command of a run, or, of a run that has begun, the one that goes on with it."""
    words = list(job.command[2:])
    if resume:
        longer = _longer(folder / job.name, read_metadata(folder / job.name), job.lengths)
        words = ["--resume", job.name, "--runs-dir", str(folder)]
        words += [word for name, value in longer.items() for word in (flag(name), str(value))]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device} if device else dict(os.environ)
    parent = os.getpid()
    path = folder / LOGS / f"{job.name}.log"
    with os_errors_as_user_errors(path), path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "rlvr_cli", job.command[1], *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # a Ctrl-C reaches the sweep alone, which asks each process once to end
            preexec_fn=lambda: die_with_parent(parent, by=signal.SIGTERM),
        )


def _ending(code: int) -> str:
    if code == 0:
        return "finished"
    return f"killed by signal {-code}" if code < 0 else f"failed with status {code}"


def _last_lines(log: Path) -> list[str]:
    with suppress(OSError):
        text = log.read_bytes()[-4000:].decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-SHOWN_LINES:]
    return []


def _options(words: Sequence[str], left_out: Collection[str]) -> dict[str, str]:
    """The words of a command -> its options with their values, without some; a flag without a value is given."""
    found: dict[str, str] = {}
    name = "the command"
    for word in words:
        if word.startswith("--"):
            name = word
            found.setdefault(name, "given")
        else:
            found[name] = f"{found[name]} {word}" if found.get(name, "given") != "given" else word
    return {name: value for name, value in found.items() if name not in map(flag, left_out)}
