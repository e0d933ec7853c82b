"""Whether another step fits into the time limit, judged by the steps so far."""

import math
import time

RESERVE = 1.2  # safety factor on the expected time of what comes besides the updates


class TimeLimit:
    """Measures a training run's steps, and decides whether another one fits.

    Attributes:
        longest_step: duration of the longest step so far, in seconds, evaluations excluded.
        most_updates: the most updates that a step has had so far.
    """

    def __init__(
        self, seconds: float = math.inf, *, updates: int = 0, longest_step: float = 0.0, most_updates: int = 0
    ) -> None:
        """
        Args:
            seconds: time limit of the whole run.
            updates, longest_step, most_updates: their values when the run was interrupted, if it was.
        """
        self.seconds = seconds
        self.longest_step = longest_step
        self.most_updates = most_updates
        self._updates_before = updates
        self._step_started: float | None = None

    def begin_step(self, updates: int) -> None:
        """Start timing a step, after `updates` updates; this ends the step before it."""
        now = time.monotonic()
        if self._step_started is not None:
            self.longest_step = max(self.longest_step, now - self._step_started)
        self._step_started = now
        self.most_updates = max(self.most_updates, updates - self._updates_before)
        self._updates_before = updates

    def leave_out(self, seconds: float) -> None:
        """Exclude seconds that an evaluation took from the duration of this step."""
        if self._step_started is not None:
            self._step_started += seconds

    def has_room(self, used: float, *, seconds_besides: float) -> bool:
        """Whether, after `used` seconds, a step as long as the longest so far would fit.

        Args:
            seconds_besides: of the evaluations still to come, and of saving the run in the end.
        """
        return used + self.longest_step + RESERVE * seconds_besides < self.seconds

    @property
    def step_seconds(self) -> float:
        """How long the current step has taken so far, evaluations excluded."""
        assert self._step_started is not None
        return time.monotonic() - self._step_started
