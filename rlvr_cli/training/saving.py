"""When a checkpoint is due, and what a run saves: checkpoints, and its model in the end.

Enters: options, an open run, its trainers. Leaves: `checkpoints/`, `model/` and, with --lora-merge, `model-merged/`.
"""

import shutil
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlvr_cli.config.shared.training import TrainingConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.check import MODELS
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.sums import sums_of
from rlvr_cli.training.checkpoints import save_checkpoint
from rlvr_cli.training.parallel.trainers import Trainers


class Saver:
    """Saves checkpoints of a run, none twice.

    Attributes:
        seconds: that the last checkpoint took.
    """

    def __init__(
        self, config: TrainingConfig, run: RunDir, *, updates: int, cursor: dict[str, int], seconds: float
    ) -> None:
        """
        Args:
            updates, cursor: of the checkpoint that was loaded.
            seconds: that the one before it took.
        """
        self._config, self._run = config, run
        self._saved = (updates, cursor)
        self._saved_at, self.seconds = time.monotonic(), seconds

    def is_due(self, updates: int) -> bool:
        """Whether enough updates and seconds have passed since the last checkpoint.

        The seconds are those asked for, else such that checkpoints take at most a twentieth of the time.
        """
        every, minutes = self._config.checkpoint_every, self._config.checkpoint_minutes
        apart = 60 * minutes if minutes is not None else 20 * self.seconds if self.seconds > 1 else 0.0
        return bool(every) and updates - self._saved[0] >= every and time.monotonic() - self._saved_at >= apart

    def has(self, updates: int, cursor: dict[str, int]) -> bool:
        """Whether the last checkpoint is of this state."""
        return (updates, cursor) == self._saved

    def save(
        self,
        trainers: Trainers,
        *,
        updates: int,
        cursor: dict[str, int],
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
    ) -> float:
        """Save a checkpoint. Returns seconds."""
        started = time.perf_counter()
        self._run.assert_in_place()  # a checkpoint there would remove those of another run
        with self._run.activity.doing("saving a checkpoint"), trainers.state_gathered() as optimizer:
            try:
                save_checkpoint(
                    self._run.path,
                    step=updates,
                    policy=trainers.policy,
                    optimizer=optimizer,
                    state={"position": cursor, "run_created_at": self._run.metadata["created_at"], **state},
                    tensors=tensors,
                )
            except RlvrError:
                self._run.assert_in_place()  # else the error advises to make its directory
                raise
        self._saved, self._saved_at = (updates, cursor), time.monotonic()
        self.seconds = time.perf_counter() - started
        return self.seconds

    def save_model(self, trainers: Trainers) -> None:
        """Save the final model."""
        for folder, key in MODELS.items():
            if folder == "model-merged" and not self._config.lora_merge:
                continue
            with self._run.activity.doing("saving the model"):
                self._run.update(**{key: {}})  # the sums of a model that is being replaced would be wrong
                trainers.policy.save(self._run.path / folder, merged=folder == "model-merged")
                self._run.update(**{key: sums_of(self._run.path / folder)})
        for leftover in self._run.path.glob(".model*.*"):  # from a process that was killed while saving it
            shutil.rmtree(leftover, ignore_errors=True)
