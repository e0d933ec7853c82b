"""Collect the metrics of short steps and commit them together, because a commit can take longer than an update."""

import time
from collections.abc import Mapping

from rlvr_cli.runs.run_dir import RunDir

METRICS_SECONDS = 2.0  # how long metrics may wait before they are committed together
METRICS_SHARE = 0.02  # of the time at most for commits: each writes the metrics of all steps, so that it takes longer as a run grows


class MetricsLog:
    """Training metrics that are committed together every few seconds, or less often where a commit takes long.

    Args:
        seconds: between two commits at least.
    """

    def __init__(self, run: RunDir, *, seconds: float = METRICS_SECONDS) -> None:
        self.run = run
        self._least = self._wait = seconds
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
        if time.monotonic() - self._flushed > self._wait:
            self.flush()

    def flush(self) -> None:
        """Commit what waits."""
        began = time.monotonic()
        self.run.commit_metric_rows("train", self._waiting, wall_seconds=self._wall_seconds)
        self._waiting = {}
        self._flushed = time.monotonic()
        self._wait = max(self._least, (self._flushed - began) / METRICS_SHARE)
