"""What commands take to start: CPU seconds of help, a named query and the Tab key, and the wall time of `rlvr eval` until its
first sample. Compared with bounds, not with a peer.

    python benchmarks/startup.py [--repeats 10]

Enters: nothing; the run to be queried is made up (50,000 rollouts). Leaves: a row per command with its bound and the
least CPU seconds (user and system) of all repeats; exit status 1 if a bound is missed. CPU seconds count this process
only, but a busy machine raises them: measure on an idle one. Help is printed to a terminal, where it is drawn in
panels. The first sample is one of one token, by the built-in model, and its time is that of its row.
"""

import argparse
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from analyze import make_run

from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.runs.readers import read_rollouts

COMMANDS = {  # command -> bound, CPU seconds
    "rlvr --help": 0.2,
    "rlvr grpo --help": 0.3,
    "rlvr grpo --help-all": 0.5,
    "rlvr analyze categories RUN": 0.5,
    "rlvr grpo --loss-type <TAB>": 0.5,
}

EVAL = "eval --dataset arithmetic:1 --sampling-max-tokens 1 --sampling-min-tokens 1 --run first".split()
FIRST_SAMPLE = 4.0  # bound, wall seconds


def first_sample(folder: Path) -> float:
    """Return the wall seconds from the start of `rlvr eval` to its first sample."""
    command = [sys.executable, "-m", "rlvr_cli", *EVAL, "--model", str(builtin_model_path()), "--runs-dir", str(folder)]
    began = datetime.now(UTC).replace(tzinfo=None)
    subprocess.run(command, check=True, capture_output=True)
    sampled = (row["sampled_at"] for row in read_rollouts(folder / "first", columns=["sampled_at"]).to_pylist())
    return (min(sampled) - began).total_seconds()


def cpu_seconds(arguments: Sequence[str], environment: dict[str, str]) -> float:
    """Return the user and system seconds of one process that writes to a terminal; its output is read and discarded."""
    leader, follower = pty.openpty()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "rlvr_cli", *arguments],
        environment,
        file_actions=[(os.POSIX_SPAWN_DUP2, follower, 1)],
    )
    os.close(follower)
    reader = threading.Thread(target=_drain, args=(leader,))
    reader.start()
    _, status, usage = os.wait4(pid, 0)
    reader.join()
    os.close(leader)
    assert os.waitstatus_to_exitcode(status) == 0, arguments
    return usage.ru_utime + usage.ru_stime


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 65536):
            pass
    except OSError:  # Linux: the other end is closed
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), 50_000)
        for command, bound in COMMANDS.items():
            words = command.replace("RUN", str(run)).split()[1:]
            environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm-256color"}
            if words[-1] == "<TAB>":
                line = ["rlvr", *words[:-1], ""]
                environment |= {"_RLVR_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(line)}
                environment |= {"COMP_CWORD": str(len(line) - 1)}
            least = min(cpu_seconds(words, environment) for _ in range(repeats))
            missed += least > bound
            print(f"{command:30} {least:.3f} s of {bound:g} s{'  missed' if least > bound else ''}", flush=True)
    seconds = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            seconds.append(first_sample(Path(folder)))
    missed += min(seconds) > FIRST_SAMPLE
    print(
        f"{'rlvr eval, first sample':30} {min(seconds):.3f} s of {FIRST_SAMPLE:g} s (wall), {statistics.median(seconds):.3f} in the middle"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
