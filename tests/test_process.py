"""The first signal requests a stop, the second stops at once, and the old handlers are restored."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from marks import slow
from rlvr_cli import process
from rlvr_cli.errors import Interrupted
from rlvr_cli.process import STOP_SIGNALS, StopRequest, importing, stoppable


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_raised_at_the_next_check_and_the_second_at_once(number, monkeypatch, capfd):
    monkeypatch.setattr(process, "REPEAT_SECONDS", 0.0)
    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        pytest.skip("the tests run under nohup")
    with StopRequest() as stop:
        stop.check()
        os.kill(os.getpid(), number)
        assert stop.requested
        assert capfd.readouterr().err.startswith("stopping: what is done will be saved. Another Ctrl-C stops at once")
        with pytest.raises(Interrupted):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        assert capfd.readouterr().err == ""
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_no_stop_is_requested():
    seen = []

    def work():
        with StopRequest() as stop:
            stop.check()
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_that_is_sent_twice_at_once_counts_once(number):
    """As `timeout` and closing terminals send it; only a second Ctrl-C is a person's."""
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        else:
            os.kill(os.getpid(), number)
        assert stop.requested


def test_nohup_stays_in_force():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_ends_a_wait_and_only_a_wait():
    never: queue.SimpleQueue[None] = queue.SimpleQueue()
    with StopRequest() as stop:
        with stoppable():
            pass
        timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM])
        timer.start()
        with pytest.raises(Interrupted), stoppable():
            never.get()
        timer.join()
        assert stop.requested
        with pytest.raises(Interrupted), stoppable():
            raise AssertionError("the wait began after the signal")
    with stoppable():
        pass


# Ctrl-C before anything is open

BREAKS = """
import pathlib, time
pathlib.Path("begun").touch()
try:
    time.sleep(60)
except BaseException:
    raise ImportError("broken by the interrupt") from None
"""


def test_an_import_that_an_interrupt_would_break_is_left_at_once(tmp_path):
    (tmp_path / "torch.py").write_text(BREAKS)
    code = "import signal; signal.signal(2, signal.default_int_handler); from rlvr_cli.cli import main; main()"
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    with subprocess.Popen(
        [sys.executable, "-c", code, "grpo"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as begun:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "begun").exists():
                assert time.monotonic() < deadline
                assert begun.poll() is None
                time.sleep(0.02)
            begun.send_signal(signal.SIGINT)
            assert begun.communicate(timeout=20)[1] == "interrupted\n"
            assert begun.returncode == 130
        finally:
            begun.kill()


def test_what_a_query_that_is_given_up_had_on_disk_is_removed(tmp_path):
    folder = tmp_path / "spill"
    folder.mkdir()
    code = (
        "import pathlib, time; from rlvr_cli import process as p; p.limits_apply = True\n"
        f"with p.removed_if_given_up(pathlib.Path({str(folder)!r})):\n"
        "    with p.time_and_memory_limit(seconds=-p.GRACE, bytes=2**30, problem='Too long.', hint='Less.'): time.sleep(60)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "error: Too long.\n  Less.\n")
    assert not folder.exists()


def test_what_is_interrupted_beside_a_thread_that_goes_on_is_left_without_its_temporary_folders(tmp_path):
    folder = tmp_path / "spill"
    folder.mkdir()
    os.mkfifo(tmp_path / "c.toml")
    code = """
import os, pathlib, signal, sys, threading, time
from rlvr_cli.cli import main
from rlvr_cli.process import removed_if_given_up

def interrupt():
    with open("c.toml", "w"):  # main reads it now
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=interrupt).start()
sys.argv = ["rlvr", "eval", "--config", "c.toml"]
with removed_if_given_up(pathlib.Path("spill")):
    main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=30)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")
    assert not folder.exists()


@pytest.mark.parametrize(("work", "status"), [("time.sleep(0.5)", 0), ("\n      while True: pass", 1)])
def test_a_limit_on_what_is_computed_counts_no_waiting(work, status):
    code = (
        "import time\nfrom rlvr_cli import process as p\np.limits_apply = True\n"
        "with p.time_and_memory_limit(seconds=0.1 - p.GRACE, bytes=2**30, problem='', hint='', computing=True):"
    )
    assert subprocess.run([sys.executable, "-c", f"{code} {work}"], capture_output=True).returncode == status


def test_after_the_imports_an_interrupt_is_an_exception_again():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with process.left_on_interrupt():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("library", ["triton", "other"])
def test_what_libraries_make_is_never_collected_but_at_the_end_where_one_complains(library):
    code = (
        "import atexit, gc, sys\nfrom rlvr_cli.process import importing\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"  # the last that is called
        "with importing():\n    with importing(): assert not gc.isenabled()\n    assert not gc.isenabled()\n"
        f"assert gc.isenabled() and gc.get_freeze_count() > 1000\nsys.modules[{library!r}] = sys"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{library != 'triton'}\n", "")


def test_what_a_command_leaves_is_collected_before_the_next_one_in_the_process_imports():
    class Cycle:
        pass

    def leave():
        left = Cycle()
        left.itself = left
        return weakref.ref(left)

    with importing():
        pass
    left = leave()
    with importing():
        assert left() is None


@pytest.mark.parametrize(
    "code",
    [
        "import sys; from rlvr_cli.cli import main; sys.argv = ['rlvr', 'runs', '--runs-dir', '.']; main()",
        "from rlvr_cli.samplers.open import ENGINES; ENGINES['openai'].open(None)",
    ],
    ids=["command", "engine"],
)
def test_what_a_command_and_an_engine_import_is_never_collected(code, tmp_path):
    """It is seen at the end: the code may raise."""
    code = f"import atexit, gc; atexit.register(lambda: print('kept', gc.get_freeze_count() > 1000)); {code}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ended.stdout.endswith("kept True\n"), ended


@pytest.mark.parametrize(
    ("called", "variables", "kept"),
    [("keep()", {}, True), ("keep()", {"MALLOC_TRIM_THRESHOLD_": "131072"}, False), slow("", {}, False)],
    ids=["ours", "of the environment", "default"],
)
def test_what_is_freed_is_kept_unless_the_environment_says_otherwise(called, variables, kept):
    """By the share of the pages written that come from the system."""
    code = (
        "from pages import from_the_system\nfrom rlvr_cli.process import keep_freed_memory as keep\n"
        f"{called}\nprint(from_the_system())"
    )
    without = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    path = os.pathsep.join([str(Path(__file__).parent / "helpers/processes"), os.environ.get("PYTHONPATH", "")])
    environment = without | variables | {"PYTHONPATH": path}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (0 <= float(ended.stdout) < 0.2) if kept else float(ended.stdout) > 0.5


def test_exceptions_are_told_apart_by_what_they_are():
    """One that compares arrays, say, raises where it is asked whether it equals another."""

    class Incomparable(Exception):
        def __eq__(self, other):
            raise ValueError("ambiguous")

    first, second = Incomparable(), Incomparable()
    second.__cause__ = first
    assert not process.memory_was_filled(second)


def test_a_guard_that_is_ended_at_once_says_nothing_and_kills_what_it_guards():
    code = (
        "import os, sys, time\nfrom rlvr_cli import process\n"
        "os.setsid = lambda: (print(os.getpid(), flush=True), time.sleep(60))\n"
        "process.fork_guarded(os.getppid())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as guard:
        assert guard.stdout is not None
        guarded = int(guard.stdout.readline())
        guard.terminate()
        assert guard.communicate(timeout=30) == ("", "")
    assert guard.returncode == 0
    assert not os.path.exists(f"/proc/{guarded}")
