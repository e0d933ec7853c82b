"""What a command that samples reads first."""

import json
from typing import Any

import pytest

from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.rollouts.inputs import load_questions
from rlvr_cli.training.session import load_eval_dataset


def test_questions_for_a_judge_need_no_answers(tmp_path):
    """As in AlpacaEval, whose rows have an instruction and a reference output, and SimpleSafetyTests."""
    path = str(tmp_path / "alpaca_eval.json")
    (tmp_path / "alpaca_eval.json").write_text(
        json.dumps([{"instruction": "Say hi.", "output": "Hi!", "dataset": "d"}])
    )
    judge: dict[str, Any] = {"grader": "judge:helpful.md", "judge_url": "http://127.0.0.1:9/v1", "judge_model": "big"}
    for answer_field, truth in (("", ""), ("output", "Hi!")):
        config = EvalConfig(dataset=path, answer_field=answer_field, **judge)
        assert [(e.question, e.ground_truth) for e in load_questions(config, purpose="eval").examples] == [
            ("Say hi.", truth)
        ]
    evaluated = load_eval_dataset(GrpoConfig(eval_dataset=path, **judge))
    assert evaluated is not None
    assert evaluated.rows == 1
    for config in (EvalConfig(dataset=path), EvalConfig(dataset=path, grader="gsm8k")):
        with pytest.raises(RlvrError, match="no answer"):
            load_questions(config, purpose="eval")
