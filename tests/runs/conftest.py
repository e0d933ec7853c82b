"""Two runs: `run` is being written, `finished` has ended."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlvr_cli.runs.run_dir import RunDir
from stores import a_rollout, some_rollouts


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    with RunDir.create(tmp_path / "runs", "grpo", name="a-run", metadata={"argv": ["rlvr", "grpo"]}) as run:
        yield run


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run with three parts and two commits of metrics."""
    with RunDir.create(tmp_path / "runs", "grpo", name="done", metadata={}) as run:
        run.commit_rollouts("train", 0, some_rollouts(run))
        run.commit_metrics(0, "train", {"loss": 0.5})
        run.commit_rollouts("train", 0, [a_rollout(run.id, i) for i in range(3, 6)])
        run.commit_rollouts("eval", 1, some_rollouts(run, phase="eval", step=1))
        run.commit_metrics(1, "eval", {"reward/mean": 1.0})
    return run.path
