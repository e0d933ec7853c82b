"""Collect the metrics of short steps and commit them together, because a commit can take longer than an update."""

import time
from collections.abc import Mapping

from rlvr_cli.runs.run_dir import RunDir

METRICS_SECONDS = 2.0  # how long metrics may wait before they are committed together


class MetricsLog:
    """Training metrics that are committed together every few seconds."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._waiting: dict[int, dict[str, float]] = {}
        self._wall_seconds: dict[
            int, float
        ] = {}  # step -> wall_seconds when its metrics were added, before those of a later step
        self._latest = 0
        self._flushed = time.monotonic()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add training metrics for a step (updates completed), and commit if the last commit is old enough."""
        self._waiting.setdefault(step, {}).update(values)
        if step >= self._latest:
            self._latest = step
            self._wall_seconds[step] = self.run.wall_seconds
        else:  # what is known of a batch only after its last update
            self._wall_seconds.setdefault(step, self.run.wall_seconds)
        if time.monotonic() - self._flushed > METRICS_SECONDS:
            self.flush()

    def flush(self) -> None:
        self.run.commit_metric_rows("train", self._waiting, wall_seconds=self._wall_seconds)
        self._waiting = {}
        self._flushed = time.monotonic()
