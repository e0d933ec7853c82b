"""The pool: hangs, crashes and bombs cost one row each, no process outlives the pool, and any script can start one."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

import rlvr_cli
from living import alive, gone_within
from marks import slow
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders import resolve_grader
from rlvr_cli.graders.pool import GraderPool

ROOT = str(Path(rlvr_cli.__file__).parents[1])
HOSTILE = """
    import os, signal, subprocess, sys, time

    KEPT = []

    def grade(response, truth):
        if response == "hang":
            while True:
                pass
        if response == "sleep uninterruptibly":
            signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
            time.sleep(3_600)
        if response == "exit":
            os._exit(3)
        if response == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if response == "leave":
            sys.exit(0)
        if response == "interrupt":
            raise KeyboardInterrupt
        if response == "raise":
            raise ZeroDivisionError("on purpose")
        if response == "memory":
            KEPT.append(bytearray(2**31))
        if response == "recursion":
            return grade_again(response)
        if response == "print":
            print("x" * 100_000)
            sys.stderr.write("y" * 100_000)
            sys.stdin.read()
        if response == "nothing":
            return None
        if response.startswith("fork "):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            with open(response[5:], "w") as file:
                file.write(str(child.pid))
            time.sleep(3_600)
        return {"format_reward": 1.0, "answer_reward": float(response == truth), "reward": float(response == truth)}

    def grade_again(response):
        return grade_again(response)
"""


@pytest.fixture
def hostile(tmp_path) -> str:
    path = tmp_path / "hostile.py"
    path.write_text(textwrap.dedent(HOSTILE))
    return f"{path}:grade"


def test_the_pool_returns_the_verdicts_of_the_grader():
    pairs = [(f"r </think> <answer> {n} </answer>", str(n + n % 2)) for n in range(150)]
    expected = [resolve_grader("r1_zero")(*pair) for pair in pairs]
    with GraderPool("r1_zero") as pool:
        assert pool.grade(pairs) == expected
        assert pool.grade(pairs[::-1]) == expected[::-1]
        assert pool.grade([]) == []
        assert pool.restarts == 0


RAISING = {
    "leave": "SystemExit", "interrupt": "KeyboardInterrupt", "raise": "ZeroDivisionError", "memory": "MemoryError",
    "recursion": "RecursionError", "nothing": "BadGrade", "print": None,
}  # fmt: skip


def test_an_item_that_raises_costs_its_row_and_no_worker(hostile):
    good = [(str(n), str(n - n % 2)) for n in range(20)]
    with GraderPool(hostile, workers=1, memory_gb=1.0) as pool:
        verdicts = pool.grade([*good, *((response, "5") for response in RAISING), *good])
        assert pool.restarts == 0
    bad = verdicts[20:-20]
    assert [v.error for v in bad] == [*RAISING.values()]
    assert [v.category for v in bad] == ["grade_error"] * 6 + ["format_1_answer_0"]
    assert [v.reward for v in bad] == [None] * 6 + [0.0]
    assert [v.reward for v in verdicts[:20] + verdicts[-20:]] == [float(a == b) for a, b in good] * 2


@pytest.mark.parametrize(
    ("response", "error"),
    [("hang", "timeout"), slow("sleep uninterruptibly", "timeout"), ("exit", "crash"), slow("segfault", "crash")],
)
def test_one_bad_item_costs_one_row(hostile, response, error):
    good = [(str(n), str(n - n % 2)) for n in range(80)]
    pairs = [*good[:37], (response, "5"), *good[37:]]
    with GraderPool(hostile, workers=1, timeout=0.5, memory_gb=1.0) as pool:
        verdicts = pool.grade(pairs)
        assert pool.restarts == {"timeout": 1, "crash": 2}[error]  # a crash is made sure of
    bad = verdicts.pop(37)
    assert bad.error == error
    assert (bad.category, bad.reward) == ("grade_error", None)
    assert [verdict.reward for verdict in verdicts] == [float(a == b) for a, b in good]


@pytest.mark.slow
def test_many_bad_items_in_a_row(hostile):
    pairs = [(kind, "5") for kind in ("hang", "exit", "5", "raise", "hang", "exit", "exit", "5")]
    with GraderPool(hostile, workers=1, timeout=0.3) as pool:
        errors = [verdict.error for verdict in pool.grade(pairs)]
        assert errors == ["timeout", "crash", None, "ZeroDivisionError", "timeout", "crash", "crash", None]
        assert [verdict.reward for verdict in pool.grade([("5", "5"), ("6", "5")])] == [1.0, 0.0]


def test_only_a_grader_that_takes_the_example_gets_it(tmp_path, hostile):
    (tmp_path / "asks.py").write_text(
        "def grade(response, truth, example):\n"
        "    return {'reward': float(example['question'] == response), 'extracted_answer': f\"{example['id']} {truth}\"}\n"
    )
    questions, asked = ["a?", "b?", "数学\ud800?"], []

    def example_of(index):
        asked.append(index)
        return {"id": str(index), "question": questions[index]}

    pairs = [("a?", "1"), ("a?", "2"), ("数学\ud800?", "3")]
    with GraderPool(f"{tmp_path / 'asks.py'}:grade", workers=1) as pool:
        verdicts = pool.grade(pairs, example_of=example_of)
        assert [v.reward for v in verdicts] == [1.0, 0.0, 1.0]
        assert [v.extracted_answer for v in verdicts] == ["0 1", "1 2", "2 3"]
        assert sorted(asked) == [0, 1, 2]
        assert [v.reward for v in pool.submit(pairs[:1], example_of=example_of).result()] == [1.0]
        assert [(v.reward, v.error) for v in pool.grade(pairs)] == [(0.0, None)] * 3  # no question is known
    asked.clear()
    with GraderPool(hostile, workers=1) as pool:
        pool.grade([("5", "5")], example_of=example_of)
    assert asked == []


def test_a_killed_item_takes_its_children_with_it(hostile, tmp_path):
    note = tmp_path / "pid"
    with GraderPool(hostile, workers=1, timeout=1.5) as pool:
        assert pool.grade([(f"fork {note}", "5")])[0].error == "timeout"
    assert gone_within(int(note.read_text()), 5.0)


def test_close_leaves_no_process():
    pool = GraderPool("gsm8k", workers=2)
    pool.grade([("it is 5", "5")] * 100)
    pids = [worker.process.pid for worker in pool._workers]
    assert pids
    assert all(map(alive, pids))
    pool.close()
    pool.close()
    assert not any(map(alive, pids))


def test_a_worker_that_was_killed_from_outside_is_replaced():
    with GraderPool("gsm8k", workers=1) as pool:
        assert pool.grade([("5", "5")])[0].reward == 1.0
        os.kill(pool._workers[0].process.pid, signal.SIGKILL)
        pool._workers[0].process.wait()
        assert [verdict.reward for verdict in pool.grade([("5", "5"), ("6", "5")])] == [1.0, 0.0]


def test_workers_ignore_ctrl_c():
    with GraderPool("gsm8k", workers=1) as pool:
        assert pool.grade([("5", "5")])[0].reward == 1.0
        os.kill(pool._workers[0].process.pid, signal.SIGINT)
        assert [verdict.reward for verdict in pool.grade([("5", "5"), ("6", "5")])] == [1.0, 0.0]
        assert pool.restarts == 0


def test_workers_are_recycled(monkeypatch):
    monkeypatch.setattr("rlvr_cli.graders.pool._RECYCLE", 40)
    seen = []
    with GraderPool("gsm8k", workers=1) as pool:
        for _ in range(4):
            assert [verdict.reward for verdict in pool.grade([("5", "5")] * 30)] == [1.0] * 30
            seen += [worker.process.pid for worker in pool._workers]
        assert pool.restarts == 0
    assert len(seen) == len(set(seen)) == 2  # the second and the fourth call reached the limit of a worker


@pytest.mark.parametrize("response", [slow("5"), "hang"], ids=["idle", "busy"])
def test_workers_die_with_their_parent(hostile, response, tmp_path):
    """A busy worker does not read its standard input, so closing that is not enough."""
    note = tmp_path / "pids"
    script = f"""
        import os, pathlib, signal, threading, time
        from rlvr_cli.graders.pool import GraderPool
        pool = GraderPool({hostile!r}, workers=2, timeout=600.0)
        pool.grade([("5", "5")] * 100)
        threading.Thread(target=pool.grade, args=[[({response!r}, "5")] * 100], daemon=True).start()
        time.sleep(0.5)
        pathlib.Path({str(note)!r}).write_text(" ".join(str(w.process.pid) for w in pool._workers))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env={**os.environ, "PYTHONPATH": ROOT}, check=False
    )
    assert run.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in note.read_text().split()]
    assert len(pids) == 2
    assert all(gone_within(pid, 5.0) for pid in pids)


@pytest.mark.parametrize("how", ["stdin", slow("file")])
def test_any_kind_of_parent(how, tmp_path):
    """No `__main__` guard is needed: workers are separate programs and do not import the parent's script."""
    script = (
        "from rlvr_cli.graders.pool import GraderPool\n"
        "pool = GraderPool('r1_zero')\n"
        "print([v.reward for v in pool.grade([('</think> <answer> 5 </answer>', '5')] * 3)])\n"
    )
    (tmp_path / "script.py").write_text(script)
    arguments = {"stdin": ["-"], "file": [str(tmp_path / "script.py")]}[how]
    run = subprocess.run(
        [sys.executable, *arguments],
        input=script if how == "stdin" else None,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT},
        check=False,
    )
    assert run.stdout == "[1.0, 1.0, 1.0]\n", run.stderr


def test_an_interrupted_call_leaves_no_stale_answers(hostile, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with GraderPool(hostile, workers=1, timeout=60.0) as pool:
        assert pool.grade([("5", "5")])[0].reward == 1.0
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.4, signal.pthread_kill, [main, signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            pool.grade([("1", "1"), ("hang", "5"), ("2", "2")])
        assert [verdict.reward for verdict in pool.grade([("6", "5"), ("5", "5")])] == [0.0, 1.0]


def test_each_background_call_returns_its_own_verdicts(hostile):
    with GraderPool(hostile, workers=2) as pool:
        calls = [[(str(n), "5"), ("5", str(n))] for n in range(8)]
        futures = [pool.submit(pairs) for pairs in calls]
        assert [v.reward for v in pool.grade([("5", "5")])] == [1.0]
        assert [[v.reward for v in f.result()] for f in futures] == [[float(n == 5)] * 2 for n in range(8)]


def test_the_future_raises_the_error_of_a_background_call(tmp_path):
    grader = tmp_path / "broken.py"
    grader.write_text("import no_such_module\n\ndef grade(response, ground_truth):\n    return 1\n")
    with GraderPool(f"{grader}:grade", workers=1) as pool, pytest.raises(RlvrError, match="no_such_module"):
        pool.submit([("1", "1")]).result()


def test_close_cancels_pending_calls(hostile):
    pool = GraderPool(hostile, workers=1, timeout=600.0)
    assert pool.grade([("5", "5")])[0].reward == 1.0
    hanging, waiting = pool.submit([("hang", "5")]), pool.submit([("5", "5")])
    while not any(worker.pending for worker in pool._workers):
        time.sleep(0.01)
    pool.close()
    for future in (hanging, waiting):
        with pytest.raises(CancelledError):
            future.result()
    pool.close()


def test_close_does_not_wait_for_a_worker_to_start(tmp_path):
    grader = tmp_path / "slow.py"
    grader.write_text("import time\n\ntime.sleep(600)\n\ndef grade(response, ground_truth):\n    return 1\n")
    pool = GraderPool(f"{grader}:grade", workers=1)
    pool._starter.submit(time.sleep, 0.5)  # the worker is still to be started when the pool is closed
    future = pool.submit([("1", "1")])
    while not pool._lock.locked():
        time.sleep(0.01)
    threading.Thread(target=pool.close).start()
    with pytest.raises(CancelledError):
        future.result(timeout=60)
    assert not pool._workers


def test_threads_may_share_a_pool():
    results: dict[int, list[float | None]] = {}

    def work(number: int) -> None:
        results[number] = [verdict.reward for verdict in pool.grade([(str(number), str(n)) for n in range(40)])]

    with GraderPool("gsm8k") as pool:
        threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {number: [float(n == number) for n in range(40)] for number in range(4)}


def test_a_pool_outlives_the_thread_that_started_its_workers():
    """The kernel sends a parent-death signal when the *thread* that started a process ends."""
    with GraderPool("gsm8k", workers=1) as pool:
        thread = threading.Thread(target=pool.grade, args=[[("5", "5")]])
        thread.start()
        thread.join()
        assert [verdict.reward for verdict in pool.grade([("5", "5"), ("6", "5")])] == [1.0, 0.0]
        assert pool.restarts == 0


def test_text_of_any_kind_crosses_the_pipe():
    odd = ["\ud800", "\x00", "\n", '"', "\u2028", "💯", "a" * 300_000]
    with GraderPool("r1_zero", workers=1) as pool:
        verdicts = pool.grade([(f"</think> <answer> {text}5 </answer>", text + "5") for text in odd])
    assert all(verdict.error is None for verdict in verdicts)
    assert [verdict.reward for verdict in verdicts] == [1.0] * len(odd)


FAILING = """
    import sys
    from helper import divide

    class Silent(Exception):
        def __str__(self):
            raise ValueError

    def grade(response, truth):
        if response == "silent":
            raise Silent
        if response == "long":
            raise ValueError("x" * 5_000)
        if response == "bad text":
            raise ValueError("\\ud800\\x00\\n")
        return divide(1, float(response))
"""


def test_the_error_of_a_grade_says_what_and_where(tmp_path):
    (tmp_path / "helper.py").write_text("def divide(a, b):\n    return a / b\n")
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(FAILING))
    said = []
    with GraderPool(f"{path}:grade", workers=1, report=said.append) as pool:
        texts = ["0", "silent", "long", "bad text", "1", "nan", "x"]
        zero, silent, long, bad, right, nan, other = pool.grade([(text, "5") for text in texts])
        assert pool.failed == 6
    assert right.reward == 1.0
    assert (zero.error, zero.error_detail) == ("ZeroDivisionError", f"{path}:16: float division by zero")
    assert (silent.error, silent.error_detail) == ("Silent", f"{path}:11: its text cannot be read")
    assert (long.error, len(long.error_detail)) == ("ValueError", 1_000)
    assert bad.error_detail == f"{path}:15: \ud800\x00"
    assert nan.error_detail == f"{path}:9: the reward that it returned is nan, not a finite number"
    assert other.error_detail == f"{path}:16: could not convert string to float: 'x'"
    assert len(said[2]) < 600
    assert "\n" not in "".join(said)
    spec = f"{path}:grade"
    assert [text.partition(f"the grader {spec} failed on a response: ")[2][:20] for text in said] == [
        "ZeroDivisionError: /", f"Silent: {path}"[:20], f"ValueError: {path}"[:20]
    ]  # the first of each error, of the first three  # fmt: skip


def test_a_hang_and_a_crash_are_reported_when_they_happen(hostile):
    said = []
    with GraderPool(hostile, workers=1, timeout=0.3, report=said.append) as pool:
        first, second, *_ = pool.grade([("hang", "5"), ("exit", "5"), ("hang", "5")])
        with pytest.raises(RlvrError), GraderPool("nonsense", report=said.append):
            pass
    assert (first.error, first.error_detail) == ("timeout", "no grade within 0.3 s (--grader-timeout)")
    assert (second.error, second.error_detail) == ("crash", "the grading process died, also when started afresh")
    assert [text.split(": ")[1] for text in said] == ["timeout", "crash"]


def test_options_reach_the_workers():
    pair = ("r </think>\n<answer> 5 </answer>", "5")
    with (
        GraderPool("r1_zero", workers=1) as literal,
        GraderPool("r1_zero", format_rule="lenient", workers=1) as lenient,
    ):
        assert literal.grade([pair])[0].failure_kind == "malformed_tags"
        assert lenient.grade([pair])[0].reward == 1.0
    puzzle = json.dumps({"numbers": [1, 2], "target": 3})
    with GraderPool("countdown", workers=1) as pool:
        verdicts = pool.grade(
            [("</think> <answer> 1 + 2 </answer>", puzzle), ("</think> <answer> 1 </answer>", "not a puzzle")]
        )
    assert [verdict.error for verdict in verdicts] == [None, "ValueError"]


def test_a_grader_that_cannot_be_used_is_a_user_s_error(tmp_path):
    with pytest.raises(RlvrError, match="no grader nonsense"):
        GraderPool("nonsense")
    with pytest.raises(RlvrError, match="no grader file"):
        GraderPool(f"{tmp_path / 'absent.py'}:grade")
    path = tmp_path / "mine.py"
    path.write_text("import nothing_of_this_name\n\ndef grade(response, truth):\n    return {'reward': 1}\n")
    with GraderPool(f"{path}:grade") as pool, pytest.raises(RlvrError, match="ModuleNotFoundError"):
        pool.grade([("5", "5")])
    path.write_text("import os\nos._exit(1)\n\ndef grade(response, truth):\n    return {'reward': 1}\n")
    with GraderPool(f"{path}:grade") as pool, pytest.raises(RlvrError, match="does not start"):
        pool.grade([("5", "5")])


def test_the_parent_does_not_run_a_user_s_file(tmp_path):
    path = tmp_path / "mine.py"
    note = f"with open({str(tmp_path / 'ran')!r}, 'w') as file:\n    file.write(str(os.getpid()))\n"
    path.write_text(f"import os\n\n{note}\n\ndef grade(response, truth):\n    return {{'reward': 1}}\n")
    with GraderPool(f"{path}:grade", workers=1) as pool:
        assert not (tmp_path / "ran").exists()
        assert pool.grade([("5", "5")])[0].reward == 1.0
    assert (tmp_path / "ran").read_text() != str(os.getpid())
