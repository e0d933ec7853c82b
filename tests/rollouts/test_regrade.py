"""Grading stored responses in batches: a stop does not wait for a grader that hangs, and loses nothing that is done."""

import threading
from concurrent.futures import Future

import pytest

from endpoint import serving
from factories import a_rollout
from judging import answers_until, said, write_rubric
from rlvr_cli.config.shared.prompt import JudgeOptions
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.judges.pool import JudgePool
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.regrade import graded_batches, plan_regrade, regrade
from rlvr_cli.runs.run_dir import RunDir


@pytest.mark.parametrize("ended_by", [Interrupted, RlvrError])
def test_an_end_yields_the_batches_that_are_done_and_gives_up_those_under_way(ended_by):
    stop, made = StopRequest(), []

    def submit(batch):
        made.append(Future())
        if len(made) == 2:
            made[1].set_result([f"grade of {row}" for row in batch])
        if len(made) == 3:
            made[2].set_exception(ValueError("a grader's own"))
            ends = (
                (setattr, (stop, "requested", True))
                if ended_by is Interrupted
                else (made[0].set_exception, (RlvrError("no"),))
            )
            threading.Timer(0.05, *ends).start()  # while the first batch hangs
        return made[-1]

    yielded = []
    with pytest.raises(ended_by):
        yielded.extend(
            (list(batch), grades) for batch, grades in graded_batches(range(5), submit, batch_size=2, stop=stop)
        )
    assert yielded == [([2, 3], ["grade of 2", "grade of 3"])]
    assert made[0].cancelled() == (ended_by is Interrupted)


def test_a_stop_keeps_every_answer_of_a_judge(tmp_path, monkeypatch):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    stop = StopRequest()
    rows = [a_rollout(run_id="r", phase="eval", step=0, example_id=str(i), response=str(i)) for i in range(12)]
    with RunDir.create(tmp_path / "runs", "eval", name="r", metadata={}) as run:
        run.commit_rollouts("eval", 0, rows)
    with answers_until(stop, 9, said("8")) as answer, serving(answer) as judge:
        spec = f"judge:{write_rubric(tmp_path)}"
        by = {"grader": spec, "grader_sha256": None}
        options = JudgeOptions(judge_url=judge.url, judge_model="big", judge_concurrency=2)
        with JudgePool(spec, options) as pool, RunDir.annotate(run.path) as opened:
            works = plan_regrade(opened, **by, phase="eval", again=False)
            with pytest.raises(Interrupted):
                regrade(opened, works, **by, pool=pool, stop=stop)
    with RunDir.annotate(run.path) as opened:
        assert len(opened.grade_attempts(spec, "eval", 0)) == 8
