"""The lock. File writes and their faults are tested in test_run_dir.py."""

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.lock import Lock


def test_release_unlocks_even_if_a_copy_of_the_descriptor_is_open(tmp_path: Path):
    lock = Lock(tmp_path)
    copy = os.dup(lock._descriptor)  # as in a child that is being forked
    lock.release()
    Lock(tmp_path).release()
    os.close(copy)


def test_without_file_locks_an_exclusive_file_is_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
    # The lock file of a killed process is not taken over silently.
    exclusive.write_text(json.dumps({"pid": 2**22 + 1, "host": os.uname().nodename, "since": "then"}))
    with pytest.raises(RlvrError, match="process 4194305"):
        Lock(tmp_path)
    exclusive.unlink()
    Lock(tmp_path).release()
