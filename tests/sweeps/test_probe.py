"""What a probe says of a whole run: by hand, and of runs that are really begun."""

import pytest

from rlvr_cli.errors import RlvrError
from rlvr_cli.sweeps.probe import Pace, has_stepped, measured_pace, pace_of


def test_a_run_that_samples_by_hand():
    found = {
        ("train", "reward/mean"): [0.1, 0.2], ("train", "step/seconds"): [8.0, 6.0], ("train", "update/seconds"): [1.0] * 4,
        ("eval", "sampling/seconds"): [3.0], ("eval", "grading/seconds"): [1.0],
    }  # fmt: skip
    metadata = {"planned": {"updates": 20}, "config": {"eval_every": 8}}
    pace = pace_of(found, metadata, seconds=30.0)
    # 2 updates a step: 10 steps. Evaluations before updates 0, 8 and 16, and the last one.
    assert pace == Pace(start=12.0, step=6.0, steps=10, evaluation=4.0, evaluations=4)
    assert pace.run == 12 + 60 + 16
    assert str(pace) == ("loading took 12.0 s, a step 6 s, an evaluation 4.0 s; the run has 10 steps and 4 evaluations")
    assert pace_of(found, {"planned": {"steps": 5}, "config": {"eval_every": 0}}, seconds=30.0).steps == 5
    assert pace_of(found, {"planned": {"steps": 5}, "config": {"eval_every": 0}}, seconds=30.0).evaluations == 2


def test_a_run_that_does_not_sample_by_hand():
    found = {("train", "update/seconds"): [5.0, 2.0, 2.0]}
    pace = pace_of(found, {"planned": {"updates": 100}, "config": {"eval_every": 10}}, seconds=12.0)
    assert pace == Pace(start=3.0, step=2.0, steps=100, evaluation=0.0, evaluations=0)
    assert not has_stepped({("train", "update/seconds"): [5.0, 2.0]})
    assert has_stepped(found)
    assert not has_stepped(found | {("train", "reward/mean"): [0.1]})


@pytest.mark.slow
def test_a_real_run_is_measured_and_nothing_stays(forked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    words = (
        "rlvr grpo --dataset arithmetic:64 --n-grpo-steps 1000 --rollout-batch-size 8 --group-size 4 --train-batch-size 4 "
        "--gradient-accumulation-steps 1 --eval-examples 4 --eval-every 500 --sampling-max-tokens 8 --device cpu --run r --runs-dir runs"
    ).split()
    pace = measured_pace(words)
    assert (pace.steps, pace.evaluations) == (1000, 5)
    assert 0 < pace.step < 60
    assert 0 < pace.evaluation < 60
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_command_that_fails_or_has_no_steps(tmp_path):
    with pytest.raises(RlvrError, match=r"The probe ended before its first step:\n.*\n?.*nowhere"):
        measured_pace(["rlvr", "grpo", "--model", str(tmp_path / "nowhere"), "--runs-dir", str(tmp_path)])
    with pytest.raises(RlvrError, match="rlvr eval has none"):
        measured_pace(["rlvr", "eval"])
