"""Environments in processes: one that hangs, crashes or raises costs its own episode, and the others are played on."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import closing

import pytest

from living import gone_within
from marks import slow
from rlvr_cli.config.parsing.options import LONGEST
from rlvr_cli.environments.open import EnvironmentSpec
from rlvr_cli.environments.pool import EnvironmentPool
from rlvr_cli.environments.worker import MOST_CHARACTERS
from rlvr_cli.errors import RlvrError
from rlvr_cli.parallel.lines import Lines
from rlvr_cli.types import Example

COUNTS = """
import contextlib, os, signal, stat, subprocess, sys, threading, time
from rlvr_cli.environments import Reply

SAID = {
    "garble!": "{{\\n",
    "no answer!": '[%d, {"seconds": 0}]\\n',
    "no reply!": '[%d, {"reply": 7, "forged": 0, "seconds": 0}]\\n',
    "twice!": '[%d, {"error": "twice", "detail": "", "seconds": 0}]\\n',
    "odd reply!": '[%d, {"prompt": null, "reply": 7, "forged": 0, "seconds": 0}]\\n',
    "no time!": '[%d, {"error": "slow", "detail": "", "seconds": NaN}]\\n',
    "no such time!": '[%d, {"error": "slow", "detail": "", "seconds": 1' + "0" * 400 + "}]\\n",
    "before its time!": '[%d, {"error": "slow", "detail": "", "seconds": -1}]\\n',
    "break off!": "[%d, {",
}
answers = 2  # of this process, with what it says before the first question
kept = []

class Counts:
    stop = ("!",)
    marker = "["

    def begin(self, example, seed):
        self.turns, self.name = 0, f"{example.question} {seed}"
        called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
        return [called] if example.question == "called" else None

    def answer(self, turn):
        global answers
        answers += 1
        self.turns += 1
        if turn == "fork!":
            if os.fork() == 0:
                sys.exit(0)
            time.sleep(0.3)
        if turn == "hang!":
            time.sleep(60)
        if turn == "exit!":
            os._exit(3)
        if turn == "bomb!":
            threading.Timer(0.3, os._exit, (3,)).start()
        if turn == "stop!":
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        if turn == "wait!":
            time.sleep(0.5)
        if turn in SAID:
            for number in range(3, 1024):
                with contextlib.suppress(OSError):
                    if stat.S_ISSOCK(os.fstat(number).st_mode):
                        os.write(number, SAID[turn].replace("%d", str(answers - 1)).encode())
        if turn == "break off!":
            time.sleep(60)
        if turn == "raise!":
            raise KeyError("gone")
        if turn == "memory!":
            return Reply("x" * (1 << 40))
        if turn == "flood!":
            return Reply("x" * 1_000_000)
        if turn == "surrogate!":
            return Reply("half \\ud83d")
        if turn == "inner!":
            return Reply(calls=(Reply("a", done=True),))
        if turn == "nothing!":
            return None
        if turn == "number!":
            return Reply(5)
        if turn == "unreadable!":
            raise type("Odd", (Exception,), {"__str__": lambda error: 1 / 0})
        if turn in ("policy!", "nobody!"):
            return Reply(calls=(Reply(role="policy" if turn == "policy!" else ""),))
        if turn == "half a name!":
            return Reply(role="half \\ud83d", measured={"half \\ud83d": 1})
        if turn in ("nan!", "huge!"):
            return Reply(reward=1e39 if turn == "huge!" else float("nan"))
        if turn == "numbers!":
            import numpy
            done = numpy.bool_(True)
            return Reply("", done=done, reward=numpy.float32(0.5), measured={"a": numpy.int64(3)})
        if turn == "escape!":
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            return Reply(str(child.pid))
        if turn == "print!":
            print("to stdout")
            print("to stderr", file=sys.stderr)
        if turn == "environment!":
            return Reply(str("RLVR_SECRET" in os.environ))
        if turn in ("keep!", "keep too much!"):
            try:
                kept.extend(bytes(1 << 30) for _ in range(1 + (turn != "keep!")))
            except MemoryError as error:
                raise ValueError("no room") from error
        return Reply(f"[{self.name}: {self.turns} {turn}]", reward=0.5, done=turn == "end!")
"""


METHODS = "    def begin(self, example, seed): pass\n    def answer(self, turn): pass\n"


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(COUNTS)
    monkeypatch.setenv("RLVR_SECRET", "key")
    said = []
    spec = EnvironmentSpec(f"{tmp_path}/mine.py:Counts")
    with closing(EnvironmentPool(spec, workers=1, timeout=1.0, memory_gb=2, report=said.append)) as pool:
        pool.said = said
        yield pool


def ask(pool, *turns, seed=7):
    return pool.answer(Example("q", "Q", "1"), seed, turns).result(timeout=60)


def test_an_episode_keeps_its_state_and_is_played_again_where_it_is_lost(pool):
    assert (pool.stop, pool.gives_rewards, pool.begins) == (("!",), False, True)
    assert pool.begin(Example("q", "Q", "1"), 7).result().prompt is None
    assert ask(pool, "a!").reply.text == "[Q 7: 1 a!]"
    assert ask(pool, "a!", seed=8).reply.text == "[Q 8: 1 a!]"
    assert ask(pool, "a!", "[b!").reply.text == "[Q 7: 2 [b!]"
    assert ask(pool, "a!", "[b!").forged == 1  # played again: the process had answered this turn already
    assert ask(pool, "hang!", seed=9).error == "timeout"
    after = ask(pool, "a!", "[b!", "end!")
    assert (after.reply.text, after.reply.done, after.reply.reward) == ("[Q 7: 3 end!]", True, 0.5)


def test_an_episode_that_is_played_again_has_the_time_of_all_its_turns(pool):
    turns = ["wait!"] * 3  # half a second each, of which the process knows nothing
    assert ask(pool, *turns).reply.text == "[Q 7: 3 wait!]"
    assert ask(pool, *turns, "hang!").detail == "no answer within 1 s (--turn-timeout)"


def test_memory_that_earlier_episodes_have_filled_costs_a_process_and_no_episode(pool):
    assert ask(pool, "a!").error is None
    for seed in range(2):
        assert ask(pool, "keep!", seed=seed).reply.text == f"[Q {seed}: 1 keep!]"
    assert ask(pool, "a!", "b!").reply.text == "[Q 7: 2 b!]"
    assert ask(pool, "keep too much!", seed=8).error == "ValueError"  # by itself


HELD = """
import weakref
from rlvr_cli.environments import Reply

given_up = []

class Held:
    stop, alive = ("!",), weakref.WeakSet()

    def begin(self, example, seed):
        self.alive.add(self)
        self.seed = seed
        return "" if seed == 8 else None  # an empty prompt is none

    def answer(self, turn):
        if turn == "raise!":
            raise ValueError("lost")
        return Reply(f"{len(self.alive)} {given_up}", done=turn == "end!")

    def give_up(self):
        given_up.append(self.seed)
"""


def test_what_has_ended_is_given_up(tmp_path):
    (tmp_path / "mine.py").write_text(HELD)
    with closing(EnvironmentPool(EnvironmentSpec(f"{tmp_path}/mine.py:Held"), workers=1)) as pool:
        for seed in range(4):
            assert pool.begin(Example("q", "Q", "1"), seed).result().error is None
        assert ask(pool, "a!", seed=0).reply.text == "4 []"
        pool.end(1)
        pool.end(2)
        pool.end(99)  # it knows none
        assert ask(pool, "a!", "end!", seed=0).reply.text == "2 [1, 2]"
        pool.end(0)  # it has said so itself
        assert ask(pool, "raise!", seed=3).error == "ValueError"
        pool.play_again(Example("q", "Q", "1"), 5, ["a!"]).result()
        pool.play_again(Example("q", "Q", "1"), 6, ["end!"]).result()
        assert pool.begin(Example("q", "Q", "1"), 8).result().error == "ValueError"
        assert ask(pool, "a!", seed=4).reply.text == "1 [1, 2, 3, 5, 8]"
        assert ask(pool, "a!", "a!", "a!", seed=4).reply.text.endswith("8, 4]")  # it is made again


@pytest.mark.parametrize(
    ("turn", "error", "detail"),
    [
        ("exit!", "crash", "also when started afresh"),
        ("garble!", "crash", "sent no message"),
        ("no answer!", "crash", "sent no message"),
        ("no reply!", "crash", "sent no message"),
        ("odd reply!", "crash", "sent no message"),
        ("no time!", "crash", "sent no message"),
        slow("no such time!", "crash", "sent no message"),
        slow("before its time!", "crash", "sent no message"),
        ("raise!", "KeyError", "mine.py:54: 'gone'"),
    ],
)
def test_what_fails_costs_its_own_episode_and_is_said_once(pool, turn, error, detail):
    found = [ask(pool, turn, seed=seed) for seed in (1, 2)]
    assert [answer.error for answer in found] == [error, error]
    assert detail in found[0].detail
    assert ask(pool, "a!", seed=3).reply.text == "[Q 3: 1 a!]"
    said = next(one for one in pool.said if "failed" in one)
    assert len(pool.said) == 2  # and that its rewards are not counted
    assert said.startswith(f"the environment {pool.spec.title} failed in an episode: {error}")


def test_what_is_no_reply_costs_its_own_episode(pool):
    """By a process that goes on, so that they share one."""
    number = "Reply(text=5, done=False, reward=None, role='environment', error=None, calls=())"
    for turn, error, detail in (
        ("memory!", "MemoryError", "mine.py:56"),
        ("inner!", "ValueError", "belong to the Reply itself"),
        ("nothing!", "TypeError", "answer() returned None, not a Reply"),
        ("number!", "TypeError", f"answer() returned {number}, not a Reply of text"),
        ("nan!", "ValueError", "a reward of nan"),
        ("huge!", "ValueError", "a reward of 1e+39, not a finite number in float32"),
        ("policy!", "ValueError", "mine.py: a Reply has the role 'policy'"),
        ("nobody!", "ValueError", "mine.py: a Reply has the role ''"),
        ("unreadable!", "Odd", "mine.py:68: its text cannot be read"),
    ):
        found = ask(pool, turn, seed=1)
        assert found.error == error
        assert detail in found.detail
        assert ask(pool, "a!", seed=3).reply is not None
    called = pool.begin(Example("q", "called", "1"), 1).result()
    assert "the prompt holds tool calls, which are not shown" in called.detail


@pytest.mark.parametrize(
    ("turns", "errors"),
    [
        (
            ["a!", "exit!", "b!", "hang!", "c!", "raise!", "d!", "break off!", "e!"],
            {"exit!": "crash", "hang!": "timeout", "raise!": "KeyError", "break off!": "timeout"},
        ),
        (["bomb!", "wait!", "a!"], {}),
    ],
    ids=["each its own", "of another episode"],
)
def test_what_is_asked_at_once_is_answered_one_by_one(pool, turns, errors):
    """A process that died of what an earlier episode left in it is started again, and nobody else's episode fails."""
    assert ask(pool, "first!", seed=99).error is None  # the process runs
    asked = [pool.answer(Example("q", "Q", "1"), seed, [turn]) for seed, turn in enumerate(turns)]
    for seed, (turn, answer) in enumerate(zip(turns, asked, strict=True)):
        found = answer.result()
        assert found.error == errors.get(turn)
        assert found.reply is None or found.reply.text == f"[Q {seed}: 1 {turn}]"
        assert found.seconds > {"wait!": 0.4, "hang!": 0.9, "break off!": 0.9}.get(turn, 0)


@pytest.mark.parametrize("turn", ["twice!", "fork!"])
def test_what_is_said_twice_is_not_the_answer_of_another_episode(pool, turn):
    assert ask(pool, "first!", seed=99).error is None
    assert ask(pool, turn, seed=1).error == ("twice" if turn == "twice!" else None)
    for seed in (2, 3):
        assert ask(pool, "a!", seed=seed).reply.text == f"[Q {seed}: 1 a!]"


def test_a_message_that_is_not_read_has_the_time_of_a_turn(pool):
    assert ask(pool, "stop!", seed=1).error is None
    time.sleep(0.3)
    assert pool.answer(Example("q", "Q", "1"), 2, ["x" * 10_000_000]).result(timeout=30).error == "timeout"
    assert ask(pool, "a!", seed=3).reply.text == "[Q 3: 1 a!]"


def test_as_many_are_asked_together_as_take_a_moment(tmp_path, monkeypatch):
    """What is canceled may have been sent: it delays what is asked next by no more than that."""
    (tmp_path / "mine.py").write_text(
        "import time\nfrom rlvr_cli.environments import Reply\nclass Mine:\n"
        "    def begin(self, example, seed): pass\n"
        "    def answer(self, turn):\n"
        "        time.sleep(float(turn))\n"
        "        return Reply(turn)\n"
    )
    sent = []
    whole = Lines.send
    monkeypatch.setattr(
        Lines,
        "send",
        lambda lines, message, **how: (sent.append(len(json.loads(message))), whole(lines, message, **how)),
    )
    with closing(EnvironmentPool(EnvironmentSpec(f"{tmp_path}/mine.py:Mine"), workers=1, timeout=60)) as pool:
        assert pool.begin(Example("q", "Q", "1"), 0).result().error is None
        asked = [pool.answer(Example("q", "Q", "1"), 0, ["0.5"])]  # what is asked meanwhile waits
        asked += [pool.begin(Example("q", "Q", "1"), seed) for seed in range(200)]
        assert {one.result().error for one in asked} == {None}
        assert max(sent) == 64
        sent.clear()
        asked = [pool.answer(Example("q", "Q", "1"), seed, ["0.05"]) for seed in range(6)]
        assert {one.result().error for one in asked} == {None}
        assert max(sent) == 1


def test_a_turn_may_take_as_long_as_a_year(tmp_path):
    (tmp_path / "mine.py").write_text(COUNTS)
    spec = EnvironmentSpec(f"{tmp_path}/mine.py:Counts")
    with closing(EnvironmentPool(spec, workers=1, timeout=LONGEST)) as pool:
        assert ask(pool, "a!").reply.text == "[Q 7: 1 a!]"
        assert pool.play_again(Example("q", "Q", "1"), 7, ["a!", "b!"]).result().error is None


def test_what_is_canceled_is_not_asked(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import pathlib, time\nfrom rlvr_cli.environments import Reply\nclass Mine:\n"
        "    def begin(self, example, seed): pass\n"
        "    def answer(self, turn):\n"
        f"        pathlib.Path({str(tmp_path)!r}, turn).touch()\n"
        "        while turn == 'first' and not pathlib.Path(f'{__file__}.go').exists(): time.sleep(0.01)\n"
        "        return Reply(turn)\n"
    )
    with closing(EnvironmentPool(EnvironmentSpec(f"{tmp_path}/mine.py:Mine"), workers=1, timeout=60)) as pool:
        first = pool.answer(Example("q", "Q", "1"), 0, ["first"])
        while not (tmp_path / "first").exists():
            time.sleep(0.01)
        second, third = (
            pool.answer(Example("q", "Q", "1"), seed, [turn]) for seed, turn in ((1, "second"), (2, "third"))
        )
        assert second.cancel()
        (tmp_path / "mine.py.go").touch()
        assert [first.result().reply.text, third.result().reply.text] == ["first", "third"]
        assert not (tmp_path / "second").exists()


def test_rewards_that_nobody_counts_are_said_once(pool):
    for seed in (1, 2):
        assert ask(pool, "a!", seed=seed).reply.reward == 0.5
    (said,) = pool.said
    assert said.endswith("the grader judges its episodes, and these rewards are only stored, in episode.turn_rewards")


@pytest.mark.parametrize("turn", ["raise!", "exit!", slow("hang!")])
def test_a_report_that_fails_reaches_whoever_asked_and_costs_no_process(tmp_path, turn):
    (tmp_path / "mine.py").write_text(COUNTS)

    def report(sentence):
        raise BrokenPipeError

    spec = EnvironmentSpec(f"{tmp_path}/mine.py:Counts")
    with closing(EnvironmentPool(spec, workers=1, timeout=1.0, report=report)) as pool:
        pool.begin(Example("q", "Q", "1"), 2).result(timeout=60)
        before = pool._slots[0]._worker
        with pytest.raises(BrokenPipeError):
            ask(pool, turn, seed=1)
        assert (pool._slots[0]._worker is before) == (turn == "raise!")


def test_numbers_may_be_those_of_numpy(pool):
    reply = ask(pool, "numbers!").reply
    assert (reply.done, reply.reward, reply.measured) == (True, 0.5, {"a": 3.0})


def test_each_call_of_a_chat_models_turn_has_the_time_of_a_turn(tmp_path):
    (tmp_path / "mine.py").write_text("import time\ndef wait(seconds: float):\n    time.sleep(seconds)\n")
    calls = [{"name": "wait", "arguments": {"seconds": seconds}} for seconds in (0.8, 0.8, 60)]
    spec = EnvironmentSpec("", (f"{tmp_path}/mine.py:wait",), chat=True)
    with closing(EnvironmentPool(spec, workers=1, timeout=1.5)) as pool:
        assert [call.error for call in ask(pool, json.dumps(calls[:2])).reply.calls] == [None, None]
        began = time.monotonic()
        assert ask(pool, json.dumps(calls[1:])).detail == "no answer within 1.5 s (--turn-timeout)"
        assert time.monotonic() - began >= 2.3  # the second call has its own


@pytest.mark.slow  # a limit cannot be raised again, so that it needs a process of its own
def test_less_memory_may_be_allowed_than_an_environment_may_have(tmp_path):
    code = (
        "import resource; from rlvr_cli.environments.open import EnvironmentSpec; from rlvr_cli.types import Example\n"
        "from rlvr_cli.environments.pool import EnvironmentPool\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "pool = EnvironmentPool(EnvironmentSpec('calculator'), workers=1)\n"
        "print(pool.answer(Example('q', 'Q', '1'), 7, ['<calc>1+1</calc>']).result().reply.text); pool.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "<out>2</out>"


def test_a_flood_is_cut_and_the_policy_is_told(pool):
    text = ask(pool, "flood!").reply.text
    assert len(text) < MOST_CHARACTERS + 100
    assert f"[cut: {1_000_000 - MOST_CHARACTERS:,} characters]" in text


def test_what_is_no_unicode_is_escaped(pool):
    assert ask(pool, "surrogate!").reply.text == "half \\ud83d"
    named = ask(pool, "half a name!", seed=8).reply
    assert (named.role, named.measured) == ("half \\ud83d", {"half \\ud83d": 1.0})


def test_what_it_prints_is_seen_nowhere_and_it_sees_no_key(pool, capfd):
    assert ask(pool, "print!").reply.text == "[Q 7: 1 print!]"
    assert ask(pool, "environment!", seed=5).reply.text == "False"
    assert capfd.readouterr() == ("", "")


def test_what_it_has_started_ends_with_it(pool):
    pid = int(ask(pool, "escape!").reply.text)
    os.kill(pid, 0)
    pool.close()
    pool.close()
    assert gone_within(pid, 30)


def test_what_is_asked_when_it_is_closed_is_no_failure(pool):
    """A run that ends with an error of its own, such as a bad prompt, is not told that the environment crashed."""
    assert ask(pool, "a!").reply is not None
    asked = pool.answer(Example("q", "Q", "1"), 8, ["hang!"])
    time.sleep(0.2)
    waits = pool.answer(Example("q", "Q", "1"), 9, ["a!"])
    pool.close()
    assert asked.result(timeout=30).error == "crash"
    assert waits.cancelled()
    assert [said for said in pool.said if "failed" in said] == []


def test_what_is_closed_at_once_does_not_wait_for_an_environment_that_is_loaded(tmp_path):
    (tmp_path / "mine.py").write_text(f"import time\ntime.sleep(60)\nclass Mine:\n{METHODS}")
    for delay in (0, 0.001, 0.2):
        pool = EnvironmentPool(EnvironmentSpec(f"{tmp_path}/mine.py:Mine"), workers=1)
        asked = pool.answer(Example("q", "Q", "1"), 7, ["a!"])
        time.sleep(delay)
        began = time.monotonic()
        pool.close()
        assert time.monotonic() - began < 30
        # Canceled if the thread had not taken it, else an error: of what it is loaded from, or that of a closed pool.
        assert asked.cancelled() or asked.exception(timeout=30) is not None or asked.result().error == "crash"


def test_a_file_that_cannot_be_run_is_an_error(tmp_path):
    (tmp_path / "broken.py").write_text("class Mine:\n    def __init__(self): raise ValueError('not today')\n")
    pool = EnvironmentPool(EnvironmentSpec(f"{tmp_path}/broken.py:Mine"), workers=1)
    with closing(pool), pytest.raises(RlvrError) as error:
        _ = pool.stop
    assert "broken.py:2: not today" in error.value.problem


def test_a_constructor_that_hangs_is_said_after_the_time_of_a_turn(tmp_path):
    (tmp_path / "mine.py").write_text(f"import time\nclass Mine:\n    def __init__(self): time.sleep(60)\n{METHODS}")
    began = time.monotonic()
    pool = EnvironmentPool(EnvironmentSpec(f"{tmp_path}/mine.py:Mine"), workers=1, timeout=0.5)
    with closing(pool), pytest.raises(RlvrError) as error:
        _ = pool.stop
    assert time.monotonic() - began < 30
    assert error.value.problem.endswith("mine.py:Mine was not made within 0.5 s (--turn-timeout).")


def test_a_beginning_that_hangs_costs_its_own_episode_and_is_said_once(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import time\nclass Mine:\n    def begin(self, example, seed):\n        if seed % 2: time.sleep(60)\n"
        "    def answer(self, turn): pass\n"
    )
    said = []
    spec = EnvironmentSpec(f"{tmp_path}/mine.py:Mine")
    with closing(EnvironmentPool(spec, workers=1, timeout=0.5, report=said.append)) as pool:
        begun = [pool.begin(Example("q", "Q", "1"), seed) for seed in range(4)]
        assert [one.result().error for one in begun] == [None, "timeout", None, "timeout"]
    assert said == [
        f"the environment {spec.title} failed in an episode: timeout: no answer within 0.5 s (--turn-timeout)"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("class Mine:\n    stop = '</guess>'\n" + METHODS, r"stop of .*mine.py:Mine is '</guess>', which is no tuple"),
        ("class Mine:\n    stop = ('',)\n" + METHODS, "no tuple of strings"),
        ("class Mine:\n    def begin(self, example, seed): pass\n", "makes Mine, which has no method answer"),
        ("def Mine(): pass\n", "makes NoneType, which has no method begin"),
        ("class Other:\n    pass\n", "mine.py defines no class Mine\\."),
        ("class Mine:\n    def __init__(self, size): pass\n", "mine.py: Mine cannot be called with no arguments"),
    ],
)
def test_what_is_no_environment_is_said_at_the_start(tmp_path, text, problem):
    (tmp_path / "mine.py").write_text(text)

    def opened():
        with closing(EnvironmentPool(EnvironmentSpec(f"{tmp_path}/mine.py:Mine"), workers=1)) as pool:
            return pool.stop

    with pytest.raises(RlvrError, match=problem) as error:
        opened()
    assert "function" not in f"{error.value}"
    assert not re.search(r"\bA environment", f"{error.value.hint}")
