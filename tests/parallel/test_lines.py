"""Lines of JSON from a process: what has come is read at once, and what breaks off, floods or ends is seen in time."""

import json
import os
import threading
import time
from multiprocessing.connection import Pipe

import pytest

from rlvr_cli.config.parsing.options import LONGEST
from rlvr_cli.parallel import lines
from rlvr_cli.parallel.lines import Lines, write_line
from rlvr_cli.parallel.worker import read, write


@pytest.fixture
def ends():
    ours, theirs = Pipe()
    with ours, theirs:
        yield ours, theirs


def loaded(received):
    return [json.loads(line) for line in received]


def test_lines_that_have_come_are_read_at_once_after_the_messages_before_them(ends):
    ours, theirs = ends
    write(theirs, {"a": "message"})
    write_line(theirs, {"number": 1, "text": "two\nlines \u2028"})
    write_line(theirs, [2])
    assert read(ours) == {"a": "message"}
    received = Lines(ours)
    assert loaded(received.receive(within=0, several=False)) == [{"number": 1, "text": "two\nlines \u2028"}, [2]]
    os.write(theirs.fileno(), b"[3]\n[4")
    assert loaded(received.receive(within=0, several=True)) == [[3]]
    os.write(theirs.fileno(), b"]\n")
    assert loaded(received.receive(within=0, several=True)) == [[4]]


def test_others_that_come_soon_are_waited_for(ends, monkeypatch):
    ours, theirs = ends
    monkeypatch.setattr(lines, "_TOGETHER_SECONDS", 0.5)
    received = Lines(ours)
    write_line(theirs, 1)
    later = threading.Timer(0.02, write_line, (theirs, 2))
    later.start()
    assert loaded(received.receive(within=5, several=True)) == [1, 2]
    later.join()
    monkeypatch.setattr(lines, "_TOGETHER_SECONDS", 60)
    write_line(theirs, 3)
    began = time.monotonic()
    assert loaded(received.receive(within=5, several=False)) == [3]
    assert time.monotonic() - began < 30


def test_a_line_longer_than_is_read_at_a_time_is_whole(ends):
    ours, theirs = ends
    writer = threading.Thread(target=write_line, args=(theirs, "x" * 1_000_000))
    writer.start()
    assert loaded(Lines(ours).receive(within=30, several=False)) == ["x" * 1_000_000]
    writer.join()


@pytest.mark.parametrize("begun", [b"", b'{"text'])
def test_what_does_not_come_in_time_is_said_also_within_a_line(ends, begun):
    ours, theirs = ends
    received = Lines(ours)
    os.write(theirs.fileno(), begun)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        received.receive(within=0.1, several=False)
    assert 0.09 < time.monotonic() - began < 30
    os.write(theirs.fileno(), b'": 1}\n' if begun else b"1\n")
    assert loaded(received.receive(within=0, several=False)) == [{"text": 1} if begun else 1]


def test_a_long_wait_looks_again(ends, monkeypatch):
    ours, theirs = ends
    received = Lines(ours)
    monkeypatch.setattr(lines, "LONGEST_WAIT", 0.01)
    later = threading.Timer(0.1, write_line, (theirs, 1))
    later.start()
    try:
        assert loaded(received.receive(within=LONGEST, several=False)) == [1]
    finally:
        later.join()
    with pytest.raises(TimeoutError):
        received.receive(within=0.1, several=False)


def test_the_time_of_a_line_is_not_that_of_what_drips(ends):
    ours, theirs = ends
    stop = threading.Event()

    def drip():
        for _ in range(100):
            if not stop.wait(0.02):
                os.write(theirs.fileno(), b"1")
        os.write(theirs.fileno(), b"\n")

    dripping = threading.Thread(target=drip)
    dripping.start()
    with pytest.raises(TimeoutError):
        Lines(ours).receive(within=0.2, several=False)
    stop.set()
    dripping.join()


def test_the_end_and_a_flood_are_said(ends, monkeypatch):
    ours, theirs = ends
    received = Lines(ours)
    monkeypatch.setattr(lines, "MOST_BYTES", 100)
    os.write(theirs.fileno(), b"x" * 101)
    with pytest.raises(ValueError, match="a line of more than 100 bytes"):
        received.receive(within=5, several=False)
    theirs.close()
    with pytest.raises(EOFError):
        received.receive(within=5, several=False)
