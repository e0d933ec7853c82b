"""The lock by itself; writing and its faults are tested where they matter, in test_run_dir.py."""

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.lock import Lock


def test_releasing_lets_go_even_if_a_copy_of_the_descriptor_is_left(tmp_path: Path):
    lock = Lock(tmp_path)
    copy = os.dup(lock._descriptor)  # as in a child that is just being forked
    lock.release()
    Lock(tmp_path).release()
    os.close(copy)


def test_without_file_locks_a_file_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lock = Lock(tmp_path)
    exclusive = tmp_path / ".lock.exclusive"
    with pytest.raises(RlvrError, match=f"written by process {os.getpid()}") as caught:
        Lock(tmp_path)
    assert str(exclusive) in caught.value.hint
    lock.release()
    assert not exclusive.exists()
    Lock(tmp_path).release()
    # What a killed process leaves is not taken over in silence.
    exclusive.write_text(json.dumps({"pid": 2**22 + 1, "host": os.uname().nodename, "since": "then"}))
    with pytest.raises(RlvrError, match="process 4194305"):
        Lock(tmp_path)
    exclusive.unlink()
    Lock(tmp_path).release()
