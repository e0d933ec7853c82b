"""Priorities of questions, from committed rollouts alone."""

import pytest

from factories import a_rollout
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.training.question_order import QuestionOrder
from rlvr_cli.types import Example

QUESTIONS = [Example(name, "", "") for name in ("never", "always", "half", "failed", "quarter")]
REWARDS = {"always": [1.0, 1.0], "half": [1.0, 0.4], "failed": [None, 0.0], "quarter": [0.0, 1.0, 0.0, 0.0]}


def rows(step, rewards):
    return [
        a_rollout(run_id="r", phase="train", step=step, example_id=name, sample_index=i, reward=reward)
        for name, of in rewards.items()
        for i, reward in enumerate(of)
    ]


@pytest.mark.parametrize("before", [1, 2])
def test_priorities_are_of_the_batches_before(tmp_path, before):
    config = GrpoConfig(question_order="prioritized")
    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        run.commit_rollouts("train", 0, rows(0, REWARDS))
        later = rows(1, {"never": [1.0], "quarter": [1.0] * 4})
        run.commit_rollouts("train", 1, later)
        order = QuestionOrder(config.question_order, QUESTIONS, run, seed=config.seed, before=before)
        if before == 1:
            assert order.priorities == [1.0, 0.05, 0.5, 1.0, 0.75]
            order.count(later)
        assert order.priorities == [0.05, 0.05, 0.5, 1.0, 1 - 5 / 8]
        drawn, asked = order.draw(3, number=4, start=10, exclude=[0])
        assert (len(drawn), asked, set(drawn) & {0}) == (3, 13, set())


def test_the_other_orders_take_no_rollout_into_account(tmp_path):
    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        run.commit_rollouts("train", 0, rows(0, REWARDS))
        order = QuestionOrder("file", QUESTIONS, run, seed=0, before=1)
        assert order.draw(3, number=1, start=4, exclude=[]) == ([4, 0, 1], 7)
        drawn = [
            QuestionOrder("shuffled", QUESTIONS, run, seed=s, before=1).draw(5, number=9, start=0, exclude=[])
            for s in (0, 1)
        ]
    assert [sorted(indices) for indices, _ in drawn] == [[*range(5)]] * 2
    assert drawn[0] != drawn[1]
