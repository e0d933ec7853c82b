"""Environments that are no function of example, seed and turns are found, and named with what differs."""

from contextlib import closing

import pytest

from rlvr_cli.environments.interface import Reply
from rlvr_cli.environments.open import EnvironmentSpec
from rlvr_cli.environments.pool import Answer, EnvironmentPool
from rlvr_cli.environments.repeat import Repeats, Said, difference
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import Example

MINE = """
import itertools, os
from rlvr_cli.environments import Reply

count = itertools.count()

class Honest:
    stop = ("!",)
    def begin(self, example, seed):
        self.said = f"{example.question} {seed}"
    def answer(self, turn):
        return Reply(f"{self.said} {turn}")

class Counts(Honest):
    def answer(self, turn):
        return Reply("x" * 200 + (str(next(count)) if turn == "b!" else ""))

class Process(Honest):
    def answer(self, turn):
        return Reply(str(os.getpid()))

class Prompts(Honest):
    def begin(self, example, seed):
        return f"game {next(count)}"
    def answer(self, turn):
        return Reply("well")
"""
EXAMPLE = Example("q-3", "Q", "1")


def said_by(pool, turns=("a!", "b!"), seed=7):
    prompt = pool.begin(EXAMPLE, seed).result().prompt
    replies = [pool.answer(EXAMPLE, seed, turns[: i + 1]).result().reply for i in range(len(turns))]
    return Said(EXAMPLE, seed, prompt, turns, replies)


@pytest.fixture
def opened(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    pools = []

    def opened(name, workers=1):
        spec = name if name == "python" else f"{tmp_path}/mine.py:{name}"
        said = []
        pools.append(EnvironmentPool(EnvironmentSpec(spec), workers=workers, report=said.append))
        return pools[-1], said

    yield opened
    for pool in pools:
        pool.close()


def test_a_function_is_played_twice_a_run_and_nothing_is_said(opened):
    pool, notes = opened("Honest")
    for _ in range(3):
        repeats = Repeats(pool, strict=True)
        repeats.add(said_by(pool))
        repeats.check()
    assert (notes, pool.unrepeated) == ([], 0)
    repeats = Repeats(pool, strict=True)
    pool.unrepeated = 1
    repeats.add(Said(EXAMPLE, 7, None, ("a!",), ()))  # the environment said nothing
    assert pool.unrepeated == 1
    repeats.add(said_by(pool))
    repeats.cancel()
    assert pool.unrepeated == 1


@pytest.mark.parametrize(
    ("name", "clause"),
    [
        (
            "Counts",
            'the text of its reply to turn 2 was "…'
            + "x" * 30
            + '0", and when it was asked again "…'
            + "x" * 30
            + '1"',
        ),
        ("Prompts", 'the prompt was "game 0", and when it was asked again "game 1"'),
    ],
)
def test_what_is_no_function_is_named_with_both_texts(opened, name, clause):
    pool, notes = opened(name)
    repeats = Repeats(pool, strict=True)
    repeats.add(said_by(pool))
    with pytest.raises(RlvrError) as error:
        repeats.check()
    assert error.value.problem.endswith(
        f"mine.py:{name} is not a function of the example, the seed and the turns: in an episode of q-3 (seed 7) {clause}."
    )
    assert "random.Random(seed)" in (error.value.hint or "")
    repeats = Repeats(pool, strict=False)
    repeats.add(said_by(pool))
    repeats.check()
    (note,) = notes
    assert "so a run that goes on may differ: in an episode of q-3 (seed 7)" in note


def test_of_several_processes_another_one_plays_again(opened):
    """What is the same in one process and not in another, such as the order of a set, is no function either."""
    pool, _ = opened("Process", workers=2)
    repeats = Repeats(pool, strict=True)
    repeats.add(said_by(pool))
    with pytest.raises(RlvrError, match="the text of its reply to turn 1"):
        repeats.check()


def test_a_program_that_prints_the_time_is_the_policys_doing(opened):
    pool, notes = opened("python")
    repeats = Repeats(pool, strict=True)
    repeats.add(said_by(pool, ("<python>import time; print(time.time_ns())</python>",)))
    repeats.check()
    assert notes == ["a program of the policy does not always print the same, so a run that goes on may differ"]


def test_what_says_nothing_about_the_environment_is_no_difference():
    said = Said(EXAMPLE, 7, None, ("a",), [Reply("x", reward=1.0)])
    assert difference(said, Answer(error="timeout")) is None
    assert difference(said, Answer(error="crash")) is None
    assert difference(said, Answer(replies=(Reply("x", reward=1.0),))) is None
    assert difference(said, Answer(error="KeyError", detail="m.py:3: 'x'")) == (
        1, "it raised KeyError when it was asked again: m.py:3: 'x'"
    )  # fmt: skip
    assert difference(said, Answer(replies=(Reply("x", reward=0.0),))) == (
        1, 'the reward of its reply to turn 1 was "1", and when it was asked again "0"'
    )  # fmt: skip
    with closing(EnvironmentPool(EnvironmentSpec("calculator"), workers=1)) as pool:
        assert difference(said, pool.play_again(EXAMPLE, 7, ["<calc>1</calc>"]).result()) is not None


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        (0.1 + 0.2, 1 / 3, ("0.3", "0.333333")),
        (0.1 + 0.2, 0.3, ("0.30000000000000004", "0.29999999999999999")),
        (1 / 3, 1 / 3 + 2e-9, ("0.33333333", "0.33333334")),
        (None, 2 / 3, ("None", "0.666667")),
    ],
)
def test_rewards_have_as_few_digits_as_tell_them_apart(first, second, shown):
    said = Said(EXAMPLE, 7, None, ("a",), [Reply("x", reward=first)])
    _, clause = difference(said, Answer(replies=(Reply("x", reward=second),))) or (0, "")
    assert clause == 'the reward of its reply to turn 1 was "{}", and when it was asked again "{}"'.format(*shown)


def test_several_answers_in_a_turn_are_compared_one_by_one():
    calls = (Reply("2", role="calc"), Reply("3", role="calc"))
    said = Said(Example("q", "1?", "1"), 3, [{"role": "user", "content": "1?"}], ["[]"], [Reply(calls=calls)])
    same = Answer(prompt=[{"role": "user", "content": "1?"}], replies=(Reply(calls=calls),))
    assert difference(said, same) is None
    turn, clause = difference(said, Answer(prompt=same.prompt, replies=(Reply(calls=calls[::-1]),))) or (0, "")
    assert (turn, "the calls of its reply to turn 1 was" in clause) == (1, True)
    assert (difference(said, Answer(prompt=None, replies=same.replies)) or (1,))[0] == 0
