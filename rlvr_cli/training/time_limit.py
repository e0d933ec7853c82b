"""Whether another step fits before a time limit, judged by the steps so far."""

import math
import time

RESERVE = 1.2  # times what the evaluations are expected to take


class TimeLimit:
    """The clock of a training run's steps.

    Attributes:
        longest_step: seconds, evaluations left out.
        most_updates: of a step.
    """

    def __init__(self, seconds: float = math.inf, *, updates: int = 0, longest_step: float = 0.0) -> None:
        """
        Args:
            seconds: that the whole run may take.
            updates, longest_step: what an interrupted run had seen.
        """
        self.seconds = seconds
        self.longest_step = longest_step
        self.most_updates = 0
        self._updates_before = updates
        self._step_started: float | None = None

    def begin_step(self, updates: int) -> None:
        """A step begins, after so many updates; the one before it, if there was one, is over."""
        now = time.monotonic()
        if self._step_started is not None:
            self.longest_step = max(self.longest_step, now - self._step_started)
        self._step_started = now
        self.most_updates = max(self.most_updates, updates - self._updates_before)
        self._updates_before = updates

    def leave_out(self, seconds: float) -> None:
        """So many seconds of this step went into an evaluation."""
        if self._step_started is not None:
            self._step_started += seconds

    def has_room(self, used: float, *, evaluation_seconds: float) -> bool:
        """Whether a step as long as the longest, and the evaluations that have to follow, fit after `used` seconds."""
        return used + self.longest_step + RESERVE * evaluation_seconds < self.seconds

    @property
    def step_seconds(self) -> float:
        """How long the step has taken so far, evaluations left out."""
        assert self._step_started is not None
        return time.monotonic() - self._step_started
