"""Hostile graders and poison answers: other verdicts stay what they are, nothing is left running, memory is bounded.

Each function below does one hostile thing. What returns nothing must get the verdict of a good grader, all the same; how
the others may end is listed below.
"""

import os
import random
import re
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

from factories import a_rollout
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.runs.run_dir import RunDir

ROOT = Path(__file__).parents[2]
MEMORY_GB = 1.0
HOSTILE = """
    import ctypes, os, re, signal, subprocess, sys, threading, time

    KEPT = []
    FORGED = b'[1.0, 1.0, 1.0, null, null, null]'

    def grade(response, truth):
        kind, _, number = response.partition(" ")
        if kind:
            result = globals()[kind]()
            if result is not None:
                return result
        return {"reward": float(int(number) % 7 == int(truth) % 7), "extracted_answer": number}

    def descriptors():
        return [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]

    def scribble(data):
        for descriptor in descriptors():
            try:
                os.set_blocking(descriptor, False)
                os.write(descriptor, data)
                os.set_blocking(descriptor, True)
            except OSError:
                pass

    def sleep_forever():
        while True:
            time.sleep(3_600)

    def daemon(work=sleep_forever):
        if not os.fork():
            os.setsid()
            if not os.fork():
                for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
                work()
            os._exit(0)

    def deep(depth=200_000):
        value = []
        for _ in range(depth):
            value = [value]
        return value

    # hangs
    def hang_python():
        while True:
            pass
    def hang_regex():
        re.match(r"(a+)+$", "a" * 64 + "b")
    def hang_power():
        return 3 ** 10**9
    def hang_sleep(): time.sleep(10**6)
    def hang_without_signals():
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
        time.sleep(10**6)
    def hang_stopped(): os.kill(os.getpid(), signal.SIGSTOP)
    def hang_lock():
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    def hang_read(): os.read(os.pipe()[0], 1)
    def hang_float():
        class Slow:
            def __float__(self):
                hang_python()
        return {"reward": Slow()}
    def hang_with_children():
        for _ in range(20):
            if not os.fork():
                sleep_forever()
        sleep_forever()
    def replies_to_nowhere():
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in descriptors():
            os.dup2(null, descriptor)

    # ends
    def exit_now(): os._exit(0)
    def abort(): os.abort()
    def segfault(): ctypes.string_at(0)
    def kill_itself(): os.kill(os.getpid(), signal.SIGKILL)
    def kill_its_group(): os.killpg(0, signal.SIGKILL)
    def end_the_guard(): os.kill(os.getppid(), signal.SIGTERM); time.sleep(10)
    def kill_the_guard(): os.kill(os.getppid(), signal.SIGKILL); time.sleep(10)
    def become_another(): os.execv("/bin/sleep", ["sleep", "3600"])
    def leave_to_a_child():
        if os.fork():
            os._exit(0)
    def close_everything(): os.closerange(0, 4_096)
    def exit_later(): threading.Timer(0.02, os._exit, [5]).start()
    def alarm_later(): signal.setitimer(signal.ITIMER_REAL, 0.02)
    def raise_later():
        signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
        signal.setitimer(signal.ITIMER_REAL, 0.02)

    # exceptions and odd results
    def sys_exit(): sys.exit(3)
    def interrupt(): raise KeyboardInterrupt
    def own_base_exception(): raise type("Own", (BaseException,), {})
    def long_exception(): raise type("E" * 10**6, (Exception,), {})
    def recursion(): return recursion()
    def gives_nan(): return {"reward": float("nan")}
    def gives_infinity(): return {"reward": float("inf")}
    def gives_huge_number(): return {"reward": 10**400}
    def gives_text(): return {"reward": "right"}
    def gives_nothing(): return {}
    def gives_list(): return [1.0]
    def gives_deep(): return {"reward": deep()}
    def gives_deep_beside(): KEPT.append({"reward": 1.0, "more": deep()})
    def gives_huge_text(): return {"reward": 1.0, "extracted_answer": "x" * 10**8, "failure_kind": "y" * 10**8}
    def gives_huge_kind(): return {"reward": 0.0, "failure_kind": "\\ud800" * 10**7}
    def gives_raising():
        class Raising(dict):
            def get(self, *_):
                raise ValueError
        return Raising()

    # memory
    def memory_at_once(): bytearray(50 * 2**30)
    def memory_in_pieces():
        pieces = []
        while True:
            pieces.append(bytearray(2**26))
    def leak(): KEPT.append(bytearray(2**28))

    # descriptors and forged replies
    def prints():
        print("x" * 10**6)
        sys.stderr.write("y" * 10**6)
        sys.stdin.read()
    def scribbles_lines(): scribble(b"garbage\\n" * 100)
    def scribbles_without_end(): scribble(b"garbage")
    def scribbles_much():
        for _ in range(300):
            scribble(b"\\xff" * 60_000)
    def scribbles_json(): scribble(b'\\n{"wants_example": true}\\n[]\\n"crash"\\nnull\\n5\\n{"problem": "x", "hint": "y"}\\n')
    def scribbles_deep(): scribble(b"\\n" + b"[" * 60_000 + b"\\n")
    def forges_verdicts(): scribble(b"\\n" + (FORGED + b"\\n") * 40)
    def forges_replies():
        for index in range(300):
            scribble(b'\\n["%032d", %d, %s]\\n' % (0, index, FORGED))
    def leaks_descriptors():
        for _ in range(900):
            os.dup(0)

    # processes
    def fork_and_return(): os.fork()
    def fork_twice_and_return(): os.fork(); os.fork()
    def fork_and_raise():
        if not os.fork():
            raise ValueError
    def fork_and_exit():
        if not os.fork():
            sys.exit(1)
    def fork_in_c_and_return(): ctypes.CDLL(None).fork()
    def fork_and_stay():
        if not os.fork():
            sleep_forever()
    def fork_many():
        for _ in range(20):
            fork_and_stay()
    def start_a_session(): subprocess.Popen(["sleep", "3600"], start_new_session=True)
    def start_a_daemon(): daemon()
    def start_a_scribbler():
        def work():
            while True:
                scribble(b'\\n["x", 1, null]\\ngarbage')
                time.sleep(0.01)
        daemon(work)
    def start_a_family():
        def work():
            while True:
                if not os.fork():
                    os.setsid()
                    time.sleep(0.3)
                    os._exit(0)
                time.sleep(0.05)
                try:
                    os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    pass
        daemon(work)
    def stop_the_guard(): os.kill(os.getppid(), signal.SIGSTOP)
    def start_a_thread(): threading.Thread(target=sleep_forever).start()
    def ignore_everything():
        for number in range(1, 32):
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_IGN)
    def lose_its_place():
        os.environ.clear()
        os.chdir("/")
"""
HOW_IT_ENDS = {
    "timeout": "hang_python hang_regex hang_power hang_sleep hang_without_signals hang_stopped hang_lock hang_read"
    " hang_float hang_with_children memory_in_pieces",
    "crash": "exit_now abort segfault kill_itself kill_its_group end_the_guard kill_the_guard become_another"
    " leave_to_a_child close_everything replies_to_nowhere",
    "BadGrade": "gives_nan gives_infinity gives_text gives_nothing gives_list gives_deep",
    "MemoryError": "hang_power memory_at_once memory_in_pieces gives_huge_text gives_huge_kind",
    "RecursionError": "recursion",
    "OverflowError": "gives_huge_number",
    "ValueError": "gives_raising",
    "SystemExit": "sys_exit",
    "KeyboardInterrupt": "interrupt",
    "Own": "own_base_exception",
    "E" * 1_000: "long_exception",
    None: "gives_huge_text gives_huge_kind",
}
KINDS = re.findall(r"^    def (\w+)\(\)", HOSTILE.partition("# hangs")[2], re.M)
QUICK = (
    "hang_regex exit_now exit_later close_everything leak gives_deep gives_huge_kind scribbles_json forges_replies"
    " fork_and_return fork_in_c_and_return start_a_scribbler start_a_daemon start_a_session stop_the_guard"
).split()


def good(number: int) -> tuple[str, str]:
    return f" {number}", str(number + number % 2)


def right(number: int) -> float:
    return float(number % 7 == (number + number % 2) % 7)


def marked(mark: str) -> list[int]:
    """The processes whose environment has the mark, without zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def memory_of(pids: list[int]) -> int:
    """Resident bytes, of each page as much as is its own."""
    total = 0
    for pid in pids:
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return total


def attack(folder: Path, kinds: list[str], *, items: int, timeout: float, monkeypatch, watch: bool = False) -> dict:
    """Grade `items` good answers with these hostile ones among them; returns what was measured."""
    mark = f"mark-{uuid4().hex}"
    monkeypatch.setenv("RLVR_GRADER_MARK", mark)
    (folder / "hostile.py").write_text(textwrap.dedent(HOSTILE))
    pairs = [good(number) for number in range(items)]
    places = sorted(random.Random(0).sample(range(items), len(kinds)))
    for place, kind in zip(places, kinds, strict=True):
        pairs[place] = (kind + pairs[place][0], pairs[place][1])
    most, over = [0, 0], threading.Event()

    def observe() -> None:
        while not over.wait(0.25):
            pids = marked(mark)
            most[:] = max(most[0], len(pids)), max(most[1], memory_of(pids))

    watcher = threading.Thread(target=observe, daemon=True)
    if watch:
        watcher.start()
    start = time.monotonic()
    with GraderPool(f"{folder / 'hostile.py'}:grade", workers=2, timeout=timeout, memory_gb=MEMORY_GB) as pool:
        verdicts = pool.grade(pairs)
        seconds = time.monotonic() - start
    over.set()
    left = marked(mark)
    hostile = dict(zip(places, kinds, strict=True))
    changed = [n for n, v in enumerate(verdicts) if n not in hostile and (v.reward, v.error) != (right(n), None)]
    odd = []
    for place, kind in hostile.items():
        ends = {error for error, kinds in HOW_IT_ENDS.items() if kind in kinds.split()}
        own = verdicts[place].error in ends if ends else verdicts[place].reward == right(place)
        odd += [] if own else [(kind, verdicts[place])]
    assert changed == []
    assert odd == []
    assert left == []
    return {
        "processes": most[0],
        "memory MB": round(most[1] / 1e6),
        "seconds": round(seconds),
        "restarts": pool.restarts,
    }


@pytest.mark.slow
def test_hostile_answers_cost_only_themselves(tmp_path, monkeypatch):
    assert set(QUICK) <= set(KINDS)
    attack(tmp_path, list(QUICK), items=40, timeout=3.0, monkeypatch=monkeypatch)


@pytest.mark.full
def test_poison_among_ten_thousand(tmp_path, monkeypatch, figures):
    kinds = [KINDS[i % len(KINDS)] for i in range(max(200, len(KINDS)))]
    random.Random(1).shuffle(kinds)
    measured = attack(tmp_path, kinds, items=10_000, timeout=2.0, monkeypatch=monkeypatch, watch=True)
    assert len(KINDS) >= 50
    assert measured["memory MB"] < 2 * 1.5e3 * MEMORY_GB
    figures.update({
        "poison answers among 10,000": len(kinds), "kinds of hostile graders": len(KINDS), "other verdicts changed": 0,
        "processes left": 0, "most processes at once": measured["processes"], "peak memory MB": measured["memory MB"],
        "workers replaced": measured["restarts"], "seconds": measured["seconds"],
    })  # fmt: skip


def test_no_key_reaches_a_grader_or_a_row(tmp_path):
    canary = f"sk-canary-{uuid4().hex}"
    (tmp_path / "tells.py").write_text(
        "import os, subprocess\n"
        "def grade(response, truth):\n"
        "    child = subprocess.run(['env'], capture_output=True, text=True).stdout\n"
        "    own = open('/proc/self/environ').read()\n"
        "    guard = open(f'/proc/{os.getppid()}/environ').read()\n"
        "    tell = ' '.join(sorted({n for t in (child, own.replace(chr(0), chr(10))) for n in t.split(chr(10))}))\n"
        "    keys = [n for n in (*os.environ, *tell.split(), guard) if any(w in n for w in ('canary', 'KEY=', 'HF_TOKEN', 'PASSWORD'))]\n"
        "    return {'reward': float(os.environ['JUDGE'] == 'kept' and 'HOME' in os.environ),\n"
        "            'extracted_answer': repr(keys) + repr(dict(os.environ))[-900:], 'failure_kind': repr(keys)}\n"
    )
    with RunDir.create(tmp_path, "eval", name="r", metadata={"seed": 0, "config": {}, "facts": {}}) as run:
        run.commit_rollouts("eval", 0, [a_rollout(example_id=str(i)) for i in range(3)])
    secrets = dict.fromkeys(("OPENAI_API_KEY", "HF_TOKEN", "MY_KEY", "AWS_SECRET_ACCESS_KEY", "PASSWORD"), canary)
    done = subprocess.run(
        [sys.executable, "-m", "rlvr_cli", "grade", "r", "--runs-dir", ".", "--grader", "tells.py:grade"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, **secrets, "RLVR_GRADER_JUDGE": "kept", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert canary not in done.stdout + done.stderr
    import pyarrow.parquet as pq

    (part,) = (tmp_path / "r" / "grades").glob("*.parquet")
    rows = pq.read_table(part).to_pylist()
    assert [row["reward"] for row in rows] == [1.0] * 3  # what was named for graders is there, as is the home
    assert [row["extracted_answer"][:2] for row in rows] == ["[]"] * 3
    assert canary not in str(rows)
