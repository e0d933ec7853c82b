"""The lock, and what is not replaced. File writes and their faults are tested in test_run_dir.py."""

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.lock import Lock
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.files import atomic_write


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


@pytest.mark.parametrize(
    ("place", "reason", "hint"),
    [("nowhere/x.png", "No such file or directory", "mkdir -p"), ("file/x.png", "Not a directory", "is a file")],
)
def test_a_directory_to_write_in_that_is_none(tmp_path: Path, place: str, reason: str, hint: str):
    (tmp_path / "file").write_text("")
    with pytest.raises(RlvrError, match=f"Cannot write {tmp_path / place}: {reason}") as caught:
        atomic_write(tmp_path / place, b"x")
    assert hint in caught.value.hint


def test_a_file_in_place_of_the_directory_of_runs(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(RlvrError, match=f"Cannot write {root}: ") as caught:
            RunDir.create(root, "eval", name="r", metadata={})
        assert "is a file, not a directory" in caught.value.hint


def test_a_device_a_pipe_or_a_link_to_one_is_not_replaced(tmp_path: Path):
    """As root, `--out /dev/stdout` would replace the link for every process."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "full").symlink_to("/dev/full")
    (tmp_path / "stdout").symlink_to(f"/proc/{os.getpid()}/exe")
    (tmp_path / "folder").mkdir()
    before = {path.name: path.lstat() for path in tmp_path.iterdir()}
    for name in before:
        with pytest.raises(RlvrError, match=f"{name} is not a regular file"):
            atomic_write(tmp_path / name, b"x")
    for path in (Path("/"), Path(".")):
        with pytest.raises(RlvrError, match="is not a regular file"):
            atomic_write(path, b"x")
    assert {path.name: path.lstat().st_ino for path in tmp_path.iterdir()} == {n: s.st_ino for n, s in before.items()}
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    atomic_write(tmp_path / "link", b"x")
    assert not (tmp_path / "missing").exists(), "a link is replaced, not followed"
