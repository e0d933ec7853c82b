"""What becomes of a sweep's runs that exist: left alone, made longer, or refused."""

import json
import os

import pytest

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.lock import Lock
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.sweeps.schedule import check_plan, status_of, write_plan


def made(tmp_path, status, **config):
    with RunDir.create(tmp_path, "grpo", name="r", metadata={"config": config}) as run:
        run.finish(status)
    return tmp_path / "r"


def test_a_finished_run_that_is_to_be_longer_is_short(tmp_path):
    run = made(tmp_path, "finished", n_grpo_steps=40)
    assert status_of(run) == status_of(run, {"n_grpo_steps": 40}) == "finished"
    assert status_of(run, {"n_grpo_steps": 41}) == "short"
    with pytest.raises(RlvrError, match="was made with --n-grpo-steps 40, and is now to have 39"):
        status_of(run, {"n_grpo_steps": 39})
    assert status_of(tmp_path / "other", {"n_grpo_steps": 41}) == "new"


@pytest.mark.parametrize(("status", "shown"), [("diverged", "diverged"), ("failed", "begun"), ("interrupted", "begun")])
def test_a_run_that_diverged_is_over_and_a_failed_one_is_not(tmp_path, status, shown):
    assert status_of(made(tmp_path, status, n_grpo_steps=40), {"n_grpo_steps": 80}) == shown


def test_a_run_that_another_machine_left_goes_on_and_one_that_it_writes_is_left_alone(tmp_path):
    """A node that was killed leaves its name in the file; the lock itself has ended with it."""
    run = made(tmp_path, "interrupted", n_grpo_steps=40)
    elsewhere = json.dumps({"pid": os.getpid(), "host": "another-machine", "since": "2026-01-01T00:00:00Z"})
    lock = Lock(run)
    (run / ".lock").write_text(elsewhere)
    assert status_of(run) == "running"
    lock.release()
    (run / ".lock").write_text(elsewhere)
    assert status_of(run) == "begun"
    (run / ".lock.exclusive").write_text(elsewhere)  # where the file system has no locks: only its removal ends it
    assert status_of(run) == "running"


def test_other_options_are_refused_but_not_more_runs_nor_another_length(tmp_path):
    def plan(*words, name="a-s0"):
        return {"experiment": "mine", "runs": {name: ["rlvr", "grpo", *words]}}

    check_plan(tmp_path, plan())
    write_plan(tmp_path, plan("--group-size", "4", "--n-grpo-steps", "40"))
    check_plan(tmp_path, plan("--n-grpo-steps", "80", "--group-size", "4"), lengths=["n_grpo_steps"])
    check_plan(tmp_path, plan("--group-size", "8", name="b-s0"))
    with pytest.raises(RlvrError, match="of a-s0, --n-grpo-steps was 40, and is now 80"):
        check_plan(tmp_path, plan("--group-size", "4", "--n-grpo-steps", "80"))
    with pytest.raises(RlvrError, match="of a-s0, --group-size was 4, and is now not given"):
        check_plan(tmp_path, plan("--n-grpo-steps", "40"), lengths=["n_grpo_steps"])
