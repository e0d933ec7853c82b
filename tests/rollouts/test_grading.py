"""Why a response has no reward, where the grader does not know it."""

import pytest

from factories import a_conversation
from rlvr_cli.graders.r1_zero import FAILURE_KINDS
from rlvr_cli.rollouts.grading import failure_kind_of
from rlvr_cli.types import Grade


@pytest.mark.parametrize(
    ("kind", "ended_by", "turns", "failed", "expected"),
    [
        ("wrong_answer", "policy", 1, (), "no_tool_call"),
        ("wrong_answer", "length", 1, (), "no_tool_call"),
        ("low_reward", "policy", 1, (), "no_tool_call"),
        ("wrong_answer", "turns", 1, (), "wrong_answer"),  # it called, and that was its last turn
        ("wrong_answer", "turns", 1, (0,), "tool_error"),
        ("wrong_answer", "error", 1, (), "wrong_answer"),  # by another grader: it called, and got no answer
        ("wrong_answer", "policy", 2, (), "wrong_answer"),
        ("wrong_answer", "policy", 2, (0,), "tool_error"),
        ("wrong_answer", "policy", 3, (0,), "wrong_answer"),  # the call after it went well
        ("low_reward", "environment", 2, (1,), "tool_error"),
        ("low_reward", "environment", 2, (0,), "low_reward"),
        # A format that is wrong would have been wrong with a tool, too; so says the words of a grader of the user's own.
        ("no_answer_tags", "policy", 1, (), "no_answer_tags"),
        ("correct_but_unformatted", "policy", 1, (), "correct_but_unformatted"),
        ("mine", "policy", 1, (), "mine"),
        ("no_answer_tags", "turns", 3, (2,), "out_of_turns"),
        ("no_answer_tags", "length", 1, (), "truncated"),
        (
            "low_reward",
            "turns",
            3,
            (),
            "out_of_turns",
        ),  # an environment's reward has no answer that could have been wrong
        ("low_reward", "length", 1, (), "truncated"),
        (None, "policy", 1, (), None),
    ],
)
def test_why_an_episode_has_no_reward(kind, ended_by, turns, failed, expected):
    grade = Grade(0.0, 0.0, 1.0 if kind is None else 0.0, failure_kind=kind)
    fields = a_conversation(("policy", "a"), failed_turns=failed, num_turns=turns, ended_by=ended_by)
    assert kind_of(grade, fields) == expected
    assert expected in (None, "mine", *FAILURE_KINDS)


def kind_of(grade, fields):
    episode, facts = fields["episode"]._asdict(), fields["turn_facts"]._asdict()
    finish = "length" if episode["ended_by"] == "length" else "stop"
    return failure_kind_of(grade, finish_reason=finish, episode=episode, turn_facts=facts)


@pytest.mark.parametrize(
    ("roles", "failed", "calls", "expected"),
    [
        ("policy", (), 0, "no_tool_call"),
        ("policy", (), 1, "wrong_answer"),  # it called with its last token, and no answer had room
        ("policy", (0,), 1, "tool_error"),
        ("policy calc", (), 1, "wrong_answer"),  # the answer filled the episode
        ("policy calc", (0,), 1, "tool_error"),
        ("policy calc policy", (0,), 1, "tool_error"),
        ("policy calc policy calc", (0,), 2, "wrong_answer"),
        ("policy environment", (), 0, "wrong_answer"),  # what an environment says is no tool's
    ],
)
def test_whether_an_episode_that_ended_by_length_had_called(roles, failed, calls, expected):
    said = [(role, "a") for role in roles.split()]
    fields = a_conversation(*said, failed_turns=failed, tool_calls=calls, ended_by="length")
    assert kind_of(Grade(1.0, 0.0, 0.0, failure_kind="wrong_answer"), fields) == expected


def test_an_environment_that_failed_is_no_failure_of_the_grader():
    episode = a_conversation(("policy", "a"), ended_by="error")["episode"]._asdict()
    failed = Grade(None, None, None, error="timeout")
    assert failure_kind_of(failed, finish_reason="stop", episode=episode) == "environment_error"
    assert failure_kind_of(failed, finish_reason="stop", episode={**episode, "ended_by": "policy"}) is None
    assert failure_kind_of(failed, finish_reason="stop") is None
    assert failure_kind_of(Grade(1.0, 0.0, 0.0, failure_kind="wrong_answer"), finish_reason="stop") == "wrong_answer"
