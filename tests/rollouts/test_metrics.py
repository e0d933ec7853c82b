"""Averages over generations."""

import math

from factories import a_conversation
from rlvr_cli.rollouts.metrics import generation_metrics


def test_averages_match_a_calculation_by_hand():
    def row(reward, tokens, finish="stop", entropy=None):
        return {
            "reward": reward, "format_reward": reward, "answer_reward": reward, "num_response_tokens": tokens, "episode": None,
            "finish_reason": finish, "mean_entropy": entropy, "judgement": None,
        }  # fmt: skip

    averages = generation_metrics(
        [row(1.0, 10, entropy=0.5), row(0.0, 20), row(None, 60, "length"), row(1.0, 30, entropy=1.5)]
    )
    assert averages == {
        "reward/mean": 0.5, "reward/format": 0.5, "reward/answer": 0.5, "length/mean": 30.0, "length/correct": 20.0, "length/wrong": 40.0,
        "length/truncated_share": 0.25, "entropy/mean": 1.0, "reward/samples": 4.0, "reward/grade_errors": 1.0,
    }  # fmt: skip
    assert "length/wrong" not in generation_metrics([row(1.0, 10)])


def test_episodes_have_averages_of_their_own():
    """Of three rows two are episodes: 2 turns and 1 call in 10 tokens, 4 of them the tool's; 1 turn in 6 tokens."""
    said = {"forged": 2, "tool_errors": 1, "environment_seconds": 0.5}
    one = a_conversation(("policy", "abcd"), ("calc", "1234"), ("policy", "ef"), **said)
    two = a_conversation(("policy", "abcdef"))
    rows = [
        {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0, "finish_reason": "stop", "mean_entropy": None, "judgement": None, **row}
        for row in (
            {**one, "episode": one["episode"]._asdict()}, {**two, "episode": two["episode"]._asdict()},
            {"num_response_tokens": 3, "episode": None},
        )
    ]  # fmt: skip
    found = {
        name: value for name, value in generation_metrics(rows).items() if name.startswith(("episodes/", "length/m"))
    }
    assert found == {
        "length/mean": 5.0, "episodes/turns": 1.5, "episodes/tool_calls": 0.5, "episodes/tool_errors": 0.5,
        "episodes/forged": 1.0, "episodes/environment_share": 0.2, "episodes/environment_seconds": 0.5,
    }  # fmt: skip


def test_averages_of_an_iterator_equal_those_of_a_list():
    rows = [
        {
            "reward": r, "format_reward": 1.0, "answer_reward": r, "num_response_tokens": n, "episode": None, "finish_reason": "stop",
            "mean_entropy": e, "judgement": None,
        }
        for r, n, e in [(math.nan, 3, 0.1), (0.1, 4, 0.2), (0.7, 5, 0.7)]
    ]  # fmt: skip
    found = generation_metrics(iter(rows))
    assert (found["length/correct"], found["length/wrong"]) == (5.0, 4.0)  # NaN is neither
    assert found["entropy/mean"] == (0.1 + 0.2 + 0.7) / 3
    assert math.isnan(found["reward/mean"])
    assert generation_metrics([]) == {"reward/samples": 0.0, "reward/grade_errors": 0.0}
