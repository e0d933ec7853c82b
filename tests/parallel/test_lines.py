"""Lines of JSON to and from a process: what has come is read at once, and what breaks off, floods or ends is seen in time."""

import os
import select
import socket
import subprocess
import threading
import time
from multiprocessing.connection import Pipe

import pytest

from rlvr_cli.config.parsing.options import LONGEST
from rlvr_cli.parallel import lines
from rlvr_cli.parallel.lines import Lines, TheirLines
from rlvr_cli.parallel.worker import encoded


@pytest.fixture
def ends():
    ours, theirs = Pipe()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def lines_of(ends):
    ours, theirs = ends
    received = Lines(ours)
    yield received, TheirLines(theirs), theirs.fileno()
    received.close()


def test_lines_that_have_come_are_read_at_once_and_numbered(lines_of):
    received, writer, file = lines_of
    said = [{"text": "two\nlines \u2028"}, {}, {"a": 1}]
    for message in said[:2]:
        writer.write(message)
    os.write(file, b'[2, {"a"')
    assert [received.receive(within=0) for _ in range(2)] == said[:2]
    os.write(file, b": 1}]\n")
    assert received.receive(within=0, several=True) == said[2]


def test_messages_larger_than_a_buffer_arrive_whole_at_both_ends(lines_of):
    received, theirs, _ = lines_of
    messages = [{"text": "x" * 1_000_000}, {"text": "two\nlines \u2028"}]

    def echo():
        for _, message in zip(messages, theirs.read(), strict=False):
            theirs.write(message)

    thread = threading.Thread(target=echo)
    thread.start()
    for message in messages:
        received.send(encoded(message), within=60)
        assert received.receive(within=60) == message
    thread.join()


@pytest.mark.parametrize("longest", [LONGEST, 0.1])
def test_what_is_not_read_is_said_in_time(lines_of, monkeypatch, longest):
    """Systems count the milliseconds of a wait in 31 bits: a year is not one of theirs."""
    received, _, file = lines_of
    monkeypatch.setattr(lines, "LONGEST_WAIT", 0.1)
    theirs = socket.socket(fileno=os.dup(file))
    ends = threading.Timer(20, theirs.shutdown, (socket.SHUT_RDWR,))
    ends.start()
    with theirs, pytest.raises(TimeoutError):
        received.send(b"x" * 10_000_000, within=longest)
    ends.cancel()


def test_others_that_come_soon_are_waited_for(lines_of, monkeypatch):
    received, writer, _ = lines_of
    monkeypatch.setattr(lines, "_TOGETHER_SECONDS", 0.5)
    writer.write({"a": 1})
    later = threading.Timer(0.02, writer.write, ({"a": 2},))
    later.start()
    assert received.receive(within=5, several=True) == {"a": 1}
    assert not select.select([received._socket], [], [], 0)[0], "the second was read with the first"
    assert received.receive(within=0) == {"a": 2}
    later.join()
    monkeypatch.setattr(lines, "_TOGETHER_SECONDS", 60)
    writer.write({"a": 3})
    began = time.monotonic()
    assert received.receive(within=5) == {"a": 3}
    assert time.monotonic() - began < 30


def test_a_line_longer_than_is_read_at_a_time_is_whole_and_waited_for_once(lines_of, monkeypatch):
    received, writer, _ = lines_of
    monkeypatch.setattr(lines, "_TOGETHER_SECONDS", 0.5)
    thread = threading.Thread(target=writer.write, args=({"a": "x" * 1_000_000},))
    thread.start()
    began = time.monotonic()
    assert received.receive(within=60, several=True) == {"a": "x" * 1_000_000}
    assert time.monotonic() - began < 6  # there are more than 16 reads
    thread.join()


@pytest.mark.parametrize("begun", [b"", b'[0, {"text'])
def test_what_does_not_come_in_time_is_said_also_within_a_line(lines_of, begun):
    received, _, file = lines_of
    os.write(file, begun)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        received.receive(within=0.1)
    assert 0.09 < time.monotonic() - began < 30
    os.write(file, b'": 1}]\n' if begun else b'[0, {"text": 1}]\n')
    assert received.receive(within=0) == {"text": 1}


def test_a_long_wait_looks_again(lines_of, monkeypatch):
    received, writer, _ = lines_of
    monkeypatch.setattr(lines, "LONGEST_WAIT", 0.01)
    later = threading.Timer(0.1, writer.write, ({"a": 1},))
    later.start()
    try:
        assert received.receive(within=LONGEST) == {"a": 1}
    finally:
        later.join()
    with pytest.raises(TimeoutError):
        received.receive(within=0.1)


@pytest.mark.parametrize("writes", ["while :; do printf 1; sleep 0.02; done", "exec cat /dev/zero"])
def test_the_time_of_a_line_is_not_that_of_what_drips_or_floods(lines_of, writes):
    received, _, file = lines_of
    with subprocess.Popen(["timeout", "10", "sh", "-c", writes], stdout=file) as process:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            received.receive(within=0.05)
        assert time.monotonic() - began < 8
        process.terminate()


@pytest.mark.parametrize("line", [b"{{", b"7", b"[0]", b"[0, 7]", b"[1, {}]", b"", b"[" * 100_000])
def test_what_is_not_the_next_message_is_refused(lines_of, line):
    received, _, file = lines_of
    os.write(file, line + b"\n")
    with pytest.raises(ValueError, match=r"Expecting|not enough|no message|message 0 is"):
        received.receive(within=30)


def test_the_end_and_a_line_without_end_are_said(ends, monkeypatch):
    ours, theirs = ends
    received = Lines(ours)
    monkeypatch.setattr(lines, "MOST_BYTES", 100)
    os.write(theirs.fileno(), b"x" * 101)
    with pytest.raises(ValueError, match="a line of more than 100 bytes"):
        received.receive(within=5)
    theirs.close()
    with pytest.raises(EOFError):
        received.receive(within=5)
    received.close()
