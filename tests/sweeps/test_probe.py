"""What a probe says of a whole run: by hand, and of runs that are really begun."""

import pytest

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.sweeps.experiment import check_runs, command_of, load_experiment, runs_of
from rlvr_cli.sweeps.printed import say_pace
from rlvr_cli.sweeps.probe import Pace, has_stepped, measured_pace, pace_of
from rlvr_cli.sweeps.schedule import Job
from rlvr_cli.sweeps.slots import Slot
from rlvr_cli.sweeps.stage import Sweep


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
    varying = {"planned": {"steps": 5, "updates": 20}, "config": {"eval_every": 8}}  # up to 4 updates a step
    assert (pace_of(found, varying, seconds=30.0).steps, pace_of(found, varying, seconds=30.0).evaluations) == (5, 4)


def test_a_run_that_does_not_sample_by_hand():
    found = {("train", "update/seconds"): [5.0, 2.0, 2.0]}
    pace = pace_of(found, {"planned": {"updates": 100}, "config": {"eval_every": 10}}, seconds=12.0)
    assert pace == Pace(start=3.0, step=2.0, steps=100, evaluation=0.0, evaluations=0)
    assert not has_stepped({("train", "update/seconds"): [5.0, 2.0]})
    assert has_stepped(found)
    assert not has_stepped(found | {("train", "reward/mean"): [0.1]})


def test_a_last_evaluation_of_more_questions_takes_longer():
    found = {
        ("train", "update/seconds"): [2.0] * 3,
        ("eval", "sampling/seconds"): [3.0],
        ("eval", "grading/seconds"): [1.0],
    }
    config = {"eval_every": 0, "eval_examples": 10, "final_eval_examples": 100}
    metadata = {"planned": {"updates": 5}, "config": config, "facts": {"eval_dataset": {"rows": 40}}}
    pace = pace_of(found, metadata, seconds=10.0)
    assert (pace.evaluations, pace.last, pace.run) == (2, 4.0, 0 + 5 * 2 + 4 + 16)
    assert str(pace).endswith("2 evaluations, the last one 4 times as long")


@pytest.fixture
def instead(tmp_path, monkeypatch):
    """Has a shell run these lines in place of a command; its words are "$@", and $run is where its run is to be."""

    def call(lines):
        script = tmp_path / "python"
        folder = 'while [ "$1" != --runs-dir ]; do shift; done; run="$2/probe"'
        script.write_text(f'#!/bin/sh\nwords="$*"\n{folder}\n{lines}\n')
        script.chmod(0o755)
        monkeypatch.setattr("sys.executable", str(script))
        monkeypatch.setattr("rlvr_cli.sweeps.probe.POLL_SECONDS", 0.01)

    return call


def test_a_probe_sees_its_gpu_and_no_tracker_hears_of_it(instead):
    instead('echo "on $CUDA_VISIBLE_DEVICES: $words"\nexit 1')
    words = [
        "rlvr",
        "grpo",
        "--track",
        "wandb",
        "--seed",
        "3",
        "--run",
        "r",
        "--track",
        "trackio",
        "--runs-dir",
        "runs",
    ]
    with pytest.raises(RlvrError, match=r"on 5: -m rlvr_cli grpo --track +--seed 3 --run probe --runs-dir /"):
        measured_pace(words, visible="5")


def test_a_run_of_few_updates_is_measured_whole_and_ends_by_its_time_limit(instead, tmp_path, capsys):
    with RunDir.create(tmp_path, "sft", name="made", metadata={"config": {}}) as made:
        made.update(planned={"updates": 2})
        made.commit_metrics(1, "train", {"update/seconds": 300.0})
        made.commit_metrics(2, "train", {"update/seconds": 200.0})
    file = tmp_path / "mine.toml"
    file.write_text(
        'command = "sft"\n[grid]\nlr_schedule = ["constant", "cosine"]\n[[stages]]\nname = "long"\nbest = 1'
    )
    words = ["--dataset", "d.jsonl", "--eval-dataset", "e.jsonl", "--n-sft-steps", "2", "--time-limit", "1m"]
    experiment = load_experiment(str(file), overrides=words)
    runs = runs_of(experiment)
    configs = check_runs(experiment, runs)
    jobs = [Job(r.name, command_of(experiment, r, runs_dir=tmp_path), c) for r, c in zip(runs, configs, strict=True)]
    instead(f'cp -r {tmp_path}/made "$run"')
    say_pace(Sweep(experiment, tmp_path, runs, jobs), [Slot()])
    said = capsys.readouterr().err
    assert "a step 2e+02 s; the run has 2 steps and 0 evaluations" in said
    assert "about 0.033 for the 2 runs of this stage that are left: 1 minutes for this one, by its --time-limit" in said


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
