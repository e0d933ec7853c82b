"""Metrics of quick steps, committed together: a commit can cost more than an update."""

import time
from collections.abc import Mapping

from rlvr_cli.runs.run_dir import RunDir

METRICS_SECONDS = 2.0  # how long metrics may wait to be committed together: a commit can cost more than an update


class MetricsLog:
    """Metrics of quick steps, committed together every few seconds."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._waiting: dict[int, dict[str, float]] = {}
        self._wall_seconds: dict[int, float] = {}  # when what waits came
        self._flushed = time.monotonic()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of the training phase at that step: of the policy after so many updates."""
        self._waiting.setdefault(step, {}).update(values)
        self._wall_seconds[step] = self.run.wall_seconds
        if time.monotonic() - self._flushed > METRICS_SECONDS:
            self.flush()

    def flush(self) -> None:
        self.run.commit_metric_rows("train", self._waiting, wall_seconds=self._wall_seconds)
        self._waiting, self._wall_seconds = {}, {}
        self._flushed = time.monotonic()
