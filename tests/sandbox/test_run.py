"""The sandbox: what it gives back, what it refuses, and that nothing is left behind. Programs that attack it: `hostile_programs`."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rlvr_cli
from hostile_programs import LATE, PROGRAMS, a_target, descendants, hostile
from living import gone_within
from marks import slow
from rlvr_cli.config.parsing.options import LONGEST
from rlvr_cli.discovery.verify_program import run_candidate, verify_execution
from rlvr_cli.errors import RlvrError
from rlvr_cli.sandbox import run as run_module
from rlvr_cli.sandbox.layers import LAYERS, available_layers
from rlvr_cli.sandbox.run import Limits, check_sandbox, run_program, sandbox_warning

ROOT = str(Path(rlvr_cli.__file__).parents[1])
# Where a layer is missing, programs are not contained, as `sandbox_warning` says; what is left is tested without this mark.
complete = pytest.mark.skipif(available_layers() != LAYERS, reason="the machine lacks a layer of the sandbox")
ENOUGH = Limits(seconds=30.0)
MEMORY = 256 << 20  # of a hostile program


def answer(program: str, *, entry=("points",), limits: Limits = ENOUGH):
    return run_program(textwrap.dedent(program), entry=entry, limits=limits)


# What it gives back


def test_the_first_entry_that_exists_is_called_or_taken():
    assert answer("def f(): return [1]\npoints = [2]", entry=("f", "points")).value == [1]
    assert answer("points = [2]", entry=("f", "points")).value == [2]
    assert answer("f = 3\npoints = [2]", entry=("f", "points")).value == 3
    found = answer("other = 1", entry=("f", "points"))
    assert (found.status, found.value) == ("no_answer", None)
    assert found.message == "the program defines none of: f, points"


def test_values_are_those_of_json():
    big = 3**5_000 % 10**4_000
    found = answer(f"points = [{big}, -1, 1.5, True, None, 'é\\ud800', (1, [2]), {{'a': 1}}]").value
    assert found == [big, -1, 1.5, True, None, "é\ud800", [1, [2]], {"a": 1}]
    assert [type(v) for v in found[:4]] == [int, int, float, bool]


def test_numpy_arrays_and_scalars_are_converted_exactly():
    found = answer(
        """
        import numpy as np
        points = [np.array([[2**62 + 1, -1]]), np.int8(-3), np.array([2**70], object), np.float64(0.1), np.array([1.5]), np.bool_(True)]
        """
    )
    assert found.value == [[[2**62 + 1, -1]], -3, [2**70], 0.1, [1.5], True], found
    assert type(found.value[0][0][0]) is int


def test_a_failure_names_the_type_the_text_and_the_programs_line():
    found = answer("\n\ndef f():\n    return 1 / 0\n\npoints = f()")
    assert (found.status, found.message) == ("exception", "ZeroDivisionError: division by zero (line 4)")
    assert (
        answer("import json\njson.loads('')").message
        == "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (line 2)"
    )
    assert answer("x = (1").message == "SyntaxError: '(' was never closed (line 1)"
    assert answer("points = [object()]").message == (
        "the answer cannot be written as JSON: it holds an object of type object"
    )
    assert answer("points = [float('nan')]").message == (
        "the answer cannot be read: it holds NaN, which is not a number of JSON"
    )


def test_messages_and_output_can_be_stored_and_are_bounded():
    found = answer(
        "print('x' * 10_000 + 'end\\ud800' if 0 else 'x' * 10_000 + 'end')\nraise ValueError('\\ud800' * 5_000)"
    )
    found.message.encode()
    assert len(found.message) <= 2_000
    assert found.message.startswith("ValueError: \\ud800")
    assert len(found.output) == 4_096
    assert found.output.endswith("xend\n")


def test_standard_output_and_error_are_kept_and_input_is_empty():
    found = answer("import sys\nprint(repr(sys.stdin.read()))\nprint('err', file=sys.stderr)\npoints = 1")
    assert found.status == "ok"
    assert sorted(found.output.split()) == ["''", "err"]


def test_the_program_is_a_module_named_program():
    found = answer(
        """
        import sys
        from dataclasses import dataclass
        @dataclass
        class A:
            x: int
        points = [__name__, A(1).x, sys.argv, sys.modules["program"].A is A]
        """
    )
    assert found.value == ["program", 1, ["program.py"], True]


def test_a_program_without_an_entry_is_a_script():
    for program in ("assert __name__ == '__main__'", "import sys; sys.exit()"):
        found = answer(program, entry=None)
        assert (found.status, found.value, found.entry) == ("ok", None, None), found
    found = answer("raise SystemExit(1)", entry=None)
    assert (found.status, found.message) == ("exception", "SystemExit: 1 (line 1)")
    found = answer("import sys\nsys.exit(0)")
    assert (found.status, found.message) == ("no_answer", "the program exited before it gave an answer")


def test_the_same_program_gives_the_same_answer():
    """Sets of strings are in the order of their hashes, which are random unless they are told not to be."""
    program = "points = list({str(i) for i in range(100)})"
    assert answer(program).value == answer(program).value


def test_the_environment_is_empty_and_this_ones_keys_are_not_in_it(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-1234567890")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:/canary")
    monkeypatch.setenv("PYTHONSTARTUP", "/canary")
    found = answer("import os, sys\npoints = [dict(os.environ), sys.path]")
    assert "canary" not in str(found)
    assert set(found.value[0]) <= {
        *("PATH", "LANG", "PYTHONHASHSEED", "PYTHONUTF8", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
        *("LD_LIBRARY_PATH", "LC_CTYPE"),
    }


def test_threads_and_numpy_work_inside():
    found = answer(
        """
        import numpy as np
        from concurrent.futures import ThreadPoolExecutor
        def run_code():
            with ThreadPoolExecutor(2) as pool:
                halves = list(pool.map(lambda s: np.random.default_rng(s).integers(0, 9, (4, 3)) @ np.eye(3, dtype=int), range(2)))
            return np.linalg.norm(np.eye(2)) ** 2, np.concatenate(halves)
        """,
        entry=("run_code",),
    )
    assert found.status == "ok", found
    assert found.value[0] == pytest.approx(2.0)
    assert len(found.value[1]) == 8


def test_a_program_may_take_as_long_as_a_year():
    assert run_program("points = 1", entry=("points",), limits=Limits(seconds=LONGEST)).value == 1


def test_limits_are_those_given():
    assert answer("import time; time.sleep(30)", limits=Limits(seconds=0.2)).message == "no answer within 0.2 s"
    program = "import resource\npoints = [resource.getrlimit(resource.RLIMIT_AS)[1], resource.getrlimit(resource.RLIMIT_CPU)[0]]"
    if "rlimits" in available_layers():
        assert answer(program, limits=Limits(seconds=5.5, memory_bytes=1 << 30)).value == [1 << 30, 7]
    small = Limits(seconds=20.0, output_bytes=1_000)
    assert answer("points = 'x' * 998", limits=small).status == "ok"
    found = answer("points = 'x' * 999", limits=small)
    assert found.message == "the answer has 1001 bytes as JSON; the limit is 1000"
    assert found.status == "output_too_large"


@complete
@pytest.mark.parametrize(
    "first",
    ["", pytest.param("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n", marks=pytest.mark.slow)],
)
def test_cpu_time_is_limited_beside_wall_time(first, monkeypatch):
    monkeypatch.setattr(run_module, "_cpu_seconds", lambda limits: 1)
    found = answer(f"{first}while True: pass", limits=Limits(seconds=600))
    assert (found.status, found.message) == ("cpu", "the program used more than 1 s of CPU time")


def test_a_program_that_is_too_large_is_not_run():
    assert answer("x = 1\n" * 200_000).message == "the program is larger than 1 MiB"


def test_so_little_memory_that_nothing_can_run_is_too_little():
    for size in (1, 1 << 20):
        assert answer("points = list(range(10_000))", limits=Limits(seconds=30.0, memory_bytes=size)).status == "memory"


def test_an_interpreter_that_does_not_start_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "_CHILD", tmp_path / "gone.py")
    with pytest.raises(RlvrError, match=r"The sandbox does not start: .*No such file"):
        answer("points = 1")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    with pytest.raises(RlvrError, match="The sandbox does not start: No such file or directory"):
        answer("points = 1")


# Layers


def child_without(folder: Path, call: str) -> Path:
    """A copy of the child in which this call, which applies a layer, fails."""
    source = Path(run_module.__file__).parent
    text = (source / "layers.py").read_text()
    assert text.count(f" and {call}") == 1
    (folder / "layers.py").write_text(text.replace(f" and {call}", " and False"))
    (folder / "child.py").write_text((source / "child.py").read_text())
    return folder / "child.py"


@complete
def test_the_active_layers_are_recorded():
    assert answer("points = 1").layers == LAYERS
    assert sandbox_warning() == ""
    check_sandbox()


def test_a_missing_layer_is_said_and_refused_on_demand(monkeypatch):
    lacking = tuple(layer for layer in LAYERS if layer not in ("landlock", "seccomp"))
    monkeypatch.setattr(run_module, "available_layers", lambda: lacking)
    assert sandbox_warning().startswith("this machine lacks landlock, seccomp: programs ")
    assert "\n" not in sandbox_warning()
    with pytest.raises(RlvrError, match="it lacks landlock, seccomp"):
        check_sandbox()
    with pytest.raises(RlvrError, match="it lacks landlock, seccomp"):
        run_program("points = 1", entry=("points",), require_sandbox=True)
    assert run_program("points = 1", entry=("points",)).value == 1


@complete
def test_a_layer_that_cannot_be_applied_stops_the_program_before_its_first_line(tmp_path, monkeypatch):
    """The machine has it, the child does not get it: as where a container forbids it to children alone."""
    child = child_without(tmp_path, "_restrict_files(readable)")
    monkeypatch.setattr(run_module, "_CHILD", child)
    assert answer("points = 1").layers == ("rlimits", "parent_death", "no_new_privs", "seccomp")
    with pytest.raises(RlvrError, match="The sandbox does not start: it lacks landlock"):
        run_program("points = 1", entry=("points",), require_sandbox=True)


# Hostile programs


@pytest.fixture
def target(tmp_path):
    with a_target(tmp_path) as target:
        yield target


def attack(name: str, target: dict) -> None:
    program = hostile(name, **target)
    expected = PROGRAMS[name][1]
    limits = Limits(seconds=0.3 if expected == LATE else 1.0 if expected & LATE else 60.0, memory_bytes=MEMORY)
    execution = run_candidate(program, limits=limits)
    verdict = verify_execution(execution, dim=11)
    assert "ESCAPED" not in str(execution), execution
    assert "CANARY" not in str(execution), execution
    assert verdict.category in expected, (verdict, execution)
    assert verdict.validity == 0.0
    assert execution.layers == LAYERS
    assert len(execution.message) <= 2_000
    assert execution.seconds < limits.seconds + 1
    (execution.message + execution.output + verdict.error).encode()


QUICK = """
    loop; ignores all signals; endless thread; closes its pipes and sleeps; stops itself; memory;
    output flood; answer flood; threads; nested; fork bomb; clone3; exec; outlives its parent; more memory; io_uring;
    call of another architecture; write to a file; write beside the libraries; mode by a new call; system V memory;
    file in memory; read a secret; read another's environment; read another's memory by a call; connect; name of a socket;
    kill by thread; signal of a pipe; signal in a queue; hard exit; segmentation fault; replaces json; answers itself;
    answers with bytes; a text that raises; surrogates; ints that compare as they like; an array that lies
"""


@complete
@pytest.mark.parametrize("name", " ".join(QUICK.split()).split("; "))
def test_hostile_programs_get_nowhere(name, target, monkeypatch):
    monkeypatch.setenv("CANARY_KEY", "sk-CANARY-1234567890")
    before = descendants(os.getpid())
    attack(name, target)
    assert descendants(os.getpid()) <= before


@complete
@pytest.mark.slow
def test_hostile_programs_get_nowhere_when_several_run_at_once(target, monkeypatch):
    """All of them, twice each, four at once: nothing escapes, nothing is left, each is back in time."""
    monkeypatch.setenv("CANARY_KEY", "sk-CANARY-1234567890")
    before = descendants(os.getpid())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: attack(name, target), [*PROGRAMS] * 2))
    assert descendants(os.getpid()) <= before


def test_an_answer_waits_for_no_thread_and_no_end_of_the_program():
    for program in (
        "import atexit, time\natexit.register(time.sleep, 3600)\npoints = 1",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()\npoints = 1",
    ):
        assert answer(program, limits=Limits(seconds=600)).value == 1


@complete
def test_a_process_that_holds_the_pipes_is_not_waited_for(tmp_path, monkeypatch):
    """Without seccomp a program can start others; its group is killed, and its pipes are not read to their end."""
    monkeypatch.setattr(run_module, "_CHILD", child_without(tmp_path, "_filter_system_calls()"))
    program = "import os, time\nif not os.fork(): time.sleep(3600)\npoints = 1"
    before = descendants(os.getpid())
    found = answer(program, limits=Limits(seconds=600))
    assert found.value == 1, found
    assert "seccomp" not in found.layers
    deadline = time.monotonic() + 30
    while not descendants(os.getpid()) <= before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_programs_run_at_once_from_several_threads():
    threads = threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: answer(f"points = {i}").value, range(12)))
    assert found == list(range(12))
    assert threading.active_count() < threads + 8


# The process that runs it ends

WAITS = """
import signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it runs in the background without it
from rlvr_cli.sandbox.run import Limits, run_program
program = "import signal, time\\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\\nprint(1, flush=True)\\ntime.sleep(600)"
run = lambda: run_program(program, entry=("points",), limits=Limits(seconds=600.0))
threads = [threading.Thread(target=run, daemon=True) for _ in range(3)]
for thread in threads: thread.start()
print("started", flush=True)
run()
"""


@complete
@pytest.mark.parametrize("number", [signal.SIGKILL, slow(signal.SIGTERM), signal.SIGINT])
def test_no_program_outlives_the_process_that_runs_it(number):
    parent = subprocess.Popen(
        [sys.executable, "-c", WAITS],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": ROOT},
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    deadline = time.monotonic() + 60
    while len(started := descendants(parent.pid)) < 4 or not all(map(is_bound, started)):
        assert time.monotonic() < deadline, started
        time.sleep(0.01)
    parent.send_signal(number)
    parent.wait()
    parent.stdout.close()
    assert all(gone_within(pid, 10) for pid in started)


def is_bound(pid: int) -> bool:
    """Whether a process has a seccomp filter."""
    try:
        return "Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# Who runs it

TRIES = """
import os
from rlvr_cli.sandbox.run import Limits, run_program
attempts = ["open('/etc/passwd')", "open('/tmp/rlvr-escaped', 'w')", "os.fork()", "os.kill(os.getppid(), 0)", "os.chmod('/tmp', 0o1777)"]
for attempt in attempts:
    found = run_program(f"import os\\n{attempt}", entry=("points",), require_sandbox=True)
    assert found.message.startswith("PermissionError"), (attempt, found)
print(run_program("import decimal\\npoints = [1]", entry=("points",)).value, os.getuid())
"""


PYTHON = "/usr/bin/python3"  # which any user can read
USERS = {
    "itself": [sys.executable],
    "nobody": ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", PYTHON],
    "root of a container": ["unshare", "--user", "--map-root-user", PYTHON],
}


@complete
# Itself: as in all tests above.
@pytest.mark.parametrize("command", [slow(how) if name == "itself" else how for name, how in USERS.items()], ids=USERS)
def test_the_sandbox_holds_for_any_user(command):
    version = [*command, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    try:
        usable = subprocess.run(version, capture_output=True, timeout=60).returncode == 0
    except OSError:
        usable = False
    if not usable:
        pytest.skip(f"{command[0]} is not there, or not permitted")
    done = subprocess.run(
        [*command, "-c", TRIES],
        env={"PYTHONPATH": ROOT, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[1] ")
