"""What becomes of a sweep's runs that exist: left alone, made longer, or refused."""

import json
import os
import time

import pytest

from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.errors import RlvrError
from rlvr_cli.process import StopRequest
from rlvr_cli.runs.lock import Lock
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.sweeps.schedule import POLL_SECONDS, Job, _Sweep, run_jobs, status_of, write_plan
from rlvr_cli.sweeps.slots import Slot


def made(tmp_path, status, **config):
    metadata = {"config": {"n_grpo_steps": 40, **config}}
    with RunDir.create(tmp_path, "grpo", name="r", metadata=metadata) as run:
        run.finish(status)
    return tmp_path / "r"


def job(**flags):
    flags = {"run": "r", "n_grpo_steps": 40, **flags}
    return Job("r", ["rlvr", "grpo"], resolve(GrpoConfig, flags=flags, command="grpo"))


def test_a_finished_run_that_is_to_be_longer_is_short(tmp_path):
    run = made(tmp_path, "finished")
    assert status_of(run, job()) == "finished"
    assert status_of(run, job(n_grpo_steps=41)) == "short"
    with pytest.raises(RlvrError, match="was made with --n-grpo-steps 40, and is now to have 39"):
        status_of(run, job(n_grpo_steps=39))
    assert status_of(tmp_path / "other", job(n_grpo_steps=41)) == "new"


@pytest.mark.parametrize(("status", "shown"), [("diverged", "diverged"), ("failed", "begun"), ("interrupted", "begun")])
def test_a_run_that_diverged_is_over_and_a_failed_one_is_not(tmp_path, status, shown):
    assert status_of(made(tmp_path, status), job(n_grpo_steps=80)) == shown


def test_a_run_that_another_machine_left_goes_on_and_one_that_it_writes_is_left_alone(tmp_path):
    """A node that was killed leaves its name in the file; the lock itself has ended with it."""
    run = made(tmp_path, "interrupted")
    elsewhere = json.dumps({"pid": os.getpid(), "host": "another-machine", "since": "2026-01-01T00:00:00Z"})
    lock = Lock(run)
    (run / ".lock").write_text(elsewhere)
    assert status_of(run, job()) == "running"
    lock.release()
    (run / ".lock").write_text(elsewhere)
    assert status_of(run, job()) == "begun"
    (run / ".lock.exclusive").write_text(elsewhere)  # where the file system has no locks: only its removal ends it
    assert status_of(run, job()) == "running"


def test_a_run_whose_node_has_gone_is_looked_at_now_and_then_until_its_process_has_ended(tmp_path, monkeypatch):
    lock, slept = Lock(made(tmp_path, "finished")), []
    sweep = _Sweep([job()], tmp_path, [Slot()], ended=lambda name: None, looked_up=lambda job: job)
    sweep._lost["r"] = [time.monotonic()]
    monkeypatch.setattr("rlvr_cli.sweeps.schedule.HELD_SECONDS", 0.2)
    monkeypatch.setattr("time.sleep", lambda seconds: slept.append(seconds) or lock.release())
    sweep.make(StopRequest())
    assert slept == [POLL_SECONDS]


@pytest.mark.usefixtures("forked")
def test_of_a_run_that_fails_its_last_words_are_told_and_not_those_of_an_attempt_before(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs/r.log"
    log.write_text("error: of the attempt before\n")
    failing = Job("r", ["rlvr", "grpo", "--no-such-option"], job().config)
    assert run_jobs([failing], tmp_path, [Slot()]) == ["r"]
    said = capsys.readouterr().err
    assert "r: failed with status 2 after" in said
    assert "--no-such-option" in said
    assert "of the attempt before" not in said
    assert log.read_text().startswith("error: of the attempt before\n")


def test_what_the_sweep_is_grows_by_the_runs_of_each_call(tmp_path):
    def plan(name):
        return {"experiment": "mine", "runs": {name: ["rlvr", "grpo"]}}

    for name in ("a-s0", "a-s1"):
        write_plan(tmp_path, plan(name))
        assert name in json.loads((tmp_path / "sweep.json").read_text())["runs"]
    assert len(json.loads((tmp_path / "sweep.json").read_text())["runs"]) == 2
    (tmp_path / "sweep.json").write_text("{")
    write_plan(tmp_path, plan("b-s0"))
    assert list(json.loads((tmp_path / "sweep.json").read_text())["runs"]) == ["b-s0"]
