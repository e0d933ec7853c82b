"""What a run saves."""

from contextlib import closing

import pytest

from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.process import StopRequest
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.training.parallel.trainers import Trainers
from rlvr_cli.training.saving import Saver


def test_a_checkpoint_of_a_run_that_was_moved_says_so(tmp_path):
    """And does not advise to make the directory that is gone."""
    config = GrpoConfig(device="cpu")
    with (
        RunDir.create(tmp_path, "grpo", name="a", metadata={}) as run,
        closing(Trainers(config, devices=["cpu"], stop=StopRequest())) as trainers,
    ):
        saver = Saver(config, run, updates=0, cursor={}, seconds=0.0)
        run.path.rename(tmp_path / "b")
        with pytest.raises(RlvrError, match="a was moved or deleted while it was being written"):
            saver.save(trainers, updates=1, cursor={}, tensors={}, state={})
        with (
            RunDir.create(tmp_path, "grpo", name="a", metadata={}) as other,
            pytest.raises(RlvrError, match="a was moved or deleted"),
        ):
            saver.save(trainers, updates=1, cursor={}, tensors={}, state={})
        assert not (other.path / "checkpoints").exists()
        other.path.rename(tmp_path / "c")
        (tmp_path / "b").rename(run.path)
        (run.path / "checkpoints").write_text("")  # another error stays as it is
        with pytest.raises(RlvrError, match="checkpoints"):
            saver.save(trainers, updates=1, cursor={}, tensors={}, state={})
