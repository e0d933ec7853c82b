"""What is printed is written, or the exit status says so: full, closed, slow and departed standard streams."""

import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
import termios
import threading
import time
from array import array
from pathlib import Path

import pytest

from marks import slow

ROOT = Path(__file__).parents[2]
RLVR = f"{shlex.quote(sys.executable)} -c 'from rlvr_cli.cli import main; main()'"
FULL = "Cannot write the result to standard output: No space left on device."
CLOSED = "Cannot write the result to standard output: Bad file descriptor."


def shell(command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command in which RLVR is the `rlvr` script."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", re.sub(r"\bRLVR\b", lambda _: RLVR, command)],
        cwd=cwd, env={**inherited, "PYTHONPATH": str(ROOT), **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        ("RLVR --version > /dev/full", 1, FULL),
        ("RLVR analyze --list >&-", 1, CLOSED),
        ("RLVR --version <&- >&- 2>&-", 1, ""),
        slow("RLVR --version 2>&-", 0, ""),
        ("RLVR --nothing 2>/dev/full", 2, ""),
        ("RLVR --help | true", 0, ""),
        ("_RLVR_COMPLETE=complete_bash COMP_WORDS='rlvr ev' COMP_CWORD=1 RLVR > /dev/full", 1, FULL),
    ],
)
def test_what_cannot_be_written_is_an_error(tmp_path: Path, command: str, status: int, says: str):
    done = shell(command, tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
    assert says in done.stderr


@pytest.mark.parametrize("unbuffered", ["", slow("1")])
def test_a_result_that_a_disk_has_no_room_for_is_an_error(tmp_path: Path, unbuffered: str):
    """A limit on the file's size cuts a write short, as the last block of a disk does: the rest must be missed."""
    done = shell("ulimit -f 2; RLVR analyze --list --format json > out.json", tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1, done.stderr
    assert "Cannot write the result to standard output: File too large." in done.stderr
    assert (tmp_path / "out.json").stat().st_size == 2048


def test_a_pipe_that_does_not_wait_gets_everything(tmp_path: Path):
    """A non-blocking pipe, as some terminals and parents give, takes a part of a write at a time."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writing, False)
    read: list[bytes] = []

    def drain() -> None:
        waiting = array("i", [0])
        until = time.monotonic() + 60
        while waiting[0] < 4096 and time.monotonic() < until:  # until it is full
            time.sleep(0.02)
            fcntl.ioctl(reading, termios.FIONREAD, waiting)
        time.sleep(0.1)
        while piece := os.read(reading, 65_536):
            read.append(piece)

    reader = threading.Thread(target=drain)
    reader.start()
    arguments = [sys.executable, "-c", "from rlvr_cli.cli import main; main()", "analyze", "--list", "--format", "json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(arguments, stdout=writing, stderr=subprocess.PIPE, env=environment, cwd=tmp_path)
    os.close(writing)
    reader.join()
    os.close(reading)
    assert done.returncode == 0, done.stderr
    whole = subprocess.run(arguments, capture_output=True, env=environment, cwd=tmp_path).stdout
    assert b"".join(read) == whole
    assert len(whole) > 4096


def test_work_does_not_end_with_its_log(tmp_path: Path):
    """A full disk under the messages, or a terminal that was closed, costs the messages only."""
    done = shell("RLVR filter arithmetic:8 --out x.jsonl --format csv 2>/dev/full", tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("stage,kept,dropped,why\n")
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 8


def test_a_closed_stdout_gives_its_number_to_no_file(tmp_path: Path):
    done = shell("RLVR filter arithmetic:8 --out x.jsonl >&-", tmp_path)
    assert done.returncode == 1
    assert CLOSED in done.stderr
    for file in tmp_path.iterdir():
        for line in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            json.loads(line)
