"""A stage of a sweep: what is refused before its runs are made, and before arms are chosen for the next one."""

from dataclasses import asdict

import pytest

from rlvr_cli.commands.sweep import stages_of
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.sweeps.experiment import load_experiment, runs_of

STAGES = 'command = "grpo"\n[grid]\ngroup_size = [8, 4]\n[[stages]]\nname = "long"\nbest = 1\n'


@pytest.fixture
def statuses(tmp_path):
    """Gives the status of each run of an experiment without evaluation questions."""
    (tmp_path / "two.toml").write_text(STAGES)

    def call(*words, vary=(), compares=True):
        overrides = ("--preset", "quickstart", "--dataset", "own.jsonl", *words)
        experiment = load_experiment(str(tmp_path / "two.toml"), overrides=overrides, vary=vary)
        *_, sweep = stages_of(experiment, tmp_path, None, compares=compares)
        assert len(sweep.jobs) == len(runs_of(experiment)), "the first stage"
        return [sweep.status_of(job) for job in sweep.jobs], sweep.jobs

    return call


@pytest.mark.parametrize("name", ["two", "two-long"])
def test_a_directory_that_is_a_run_takes_no_sweep(statuses, tmp_path, name):
    with RunDir.create(tmp_path, "sft", name=name, metadata={}):
        pass
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RlvrError, match=rf"/{name} is a run, .*not be among its files") as raised:
        statuses("--eval-dataset", "test.jsonl")
    assert "--name" in raised.value.hint
    assert sorted(tmp_path.rglob("*")) == before


def test_arms_that_could_not_be_compared_are_refused_before_any_run(statuses, tmp_path):
    with pytest.raises(RlvrError, match="Arms are compared by evaluations, and two/group_size-8-s0 has no questions"):
        statuses()
    assert statuses(vary=("group_size=8",))[0] == ["new"], "one arm is compared with none"
    (tmp_path / "two.toml").write_text(STAGES.partition("[[stages]]")[0])
    assert statuses(compares=False)[0] == ["new", "new"], "such as with --emit"
    (tmp_path / "two.toml").write_text(STAGES)
    with pytest.raises(RlvrError, match="Arms are compared by evaluations"):
        statuses(compares=False)  # to choose those of the later stage
    found, jobs = statuses("--eval-dataset", "test.jsonl")
    assert found == ["new", "new"]
    for job, after in zip(jobs, (["finished", "new"], None), strict=True):
        config = {k: v for k, v in asdict(job.config).items() if k != "sources"} | {"eval_dataset": ""}
        about = {"config": config, "sources": job.config.sources}
        with RunDir.create(tmp_path / "two", "grpo", name=job.name, metadata=about):
            pass
        if after:
            assert statuses()[0] == after, "what an earlier version began goes on"
    with pytest.raises(RlvrError, match="and two/group_size-8-s0 has no questions for them"):
        statuses()  # the best of them
