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
    fields = a_conversation(("policy", "a"), num_turns=turns, ended_by=ended_by)
    finish = "length" if ended_by == "length" else "stop"
    assert failure_kind_of(grade, finish_reason=finish, episode=fields["episode"]._asdict(), failed=failed) == expected
    assert expected in (None, "mine", *FAILURE_KINDS)


def test_an_environment_that_failed_is_no_failure_of_the_grader():
    episode = a_conversation(("policy", "a"), ended_by="error")["episode"]._asdict()
    failed = Grade(None, None, None, error="timeout")
    assert failure_kind_of(failed, finish_reason="stop", episode=episode) == "environment_error"
    assert failure_kind_of(failed, finish_reason="stop", episode={**episode, "ended_by": "policy"}) is None
    assert failure_kind_of(failed, finish_reason="stop") is None
    assert failure_kind_of(Grade(1.0, 0.0, 0.0, failure_kind="wrong_answer"), finish_reason="stop") == "wrong_answer"
