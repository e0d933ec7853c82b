"""Whether a run has diverged: the rule of --stop-when diverged.

Enters: metrics of a run, under the number of updates before them. Leaves: a sentence, from the update on at which the rule holds first.
That is a function of the metrics alone, so that a run that was interrupted ends after the same update.
"""

import math
import statistics
from bisect import insort
from collections.abc import Mapping

EVALUATIONS = 3  # in a row, with a held-out reward far below the best one before
ERRORS = 3.0  # how many standard errors "far below" is at least; and half of the best reward
IN_A_ROW = 5  # updates whose entropy or gradient norm is past its bound: a single spike is no divergence
ENTROPY_RISE = 2.0  # nats per token above the first update's: as if each token had 7 times as many choices
STEEP = 50.0  # times the median gradient norm of the updates before
FEWEST_NORMS = 5  # updates before there is such a median
RULE = (
    f"{EVALUATIONS} evaluations in a row have less than half of the best held-out reward before (and less by {ERRORS:g} standard errors); or "
    f"{IN_A_ROW} updates in a row have an entropy of {ENTROPY_RISE:g} nats per token above the first one's, or a gradient norm above "
    f"{STEEP:g} times the median before; or --max-skipped-updates in a row were not finite"
)
_READ = {
    "eval": ("reward/mean", "reward/samples"),
    "train": ("policy/entropy", "optimizer/grad_norm", "update/skipped", "update/tokens"),
}


class Diverged(Exception):
    """The run has diverged, and --stop-when asks that it ends; the message says why."""


class Divergence:
    """Reads metrics in the order of the updates, each once.

    Attributes:
        why: what went wrong and after how many updates; empty as long as nothing has.
    """

    def __init__(self, *, max_skipped: int) -> None:
        """
        Args:
            max_skipped: updates in a row that are not finite; see --max-skipped-updates.
        """
        self.why = ""
        self._max_skipped = max_skipped
        self._waiting: dict[tuple[int, str], dict[str, float]] = {}  # by updates and phase
        self._read = 0  # metrics of fewer updates than these have been read
        self._best = -math.inf
        self._first_entropy: float | None = None
        self._norms: list[float] = []  # in order of size
        self._rows: dict[str, int] = {}  # how often in a row each bound was passed

    @property
    def skipped_in_a_row(self) -> int:
        """How many of the last updates in a row were skipped because loss or gradient was not finite, as far as metrics were read."""
        return self._rows.get("skipped", 0)

    def add(self, phase: str, updates: int, values: Mapping[str, float]) -> None:
        """Add metrics that were logged after so many updates; what was read before is passed over."""
        kept = {name: values[name] for name in _READ[phase] if name in values}
        if updates >= self._read and kept:
            self._waiting.setdefault((updates, phase), {}).update(kept)

    def read(self, updates: int) -> str:
        """Read the metrics of the first `updates` updates, and of the evaluations before them. Returns `why`."""
        for at, phase in sorted(key for key in self._waiting if key[0] < updates):  # "eval" comes before "train"
            values = self._waiting.pop((at, phase))
            found = self._evaluation(values) if phase == "eval" else self._update(values)
            if found and not self.why:
                self.why = f"{found}, after {at if phase == 'eval' else at + 1} updates"
        self._read = max(self._read, updates)
        return self.why

    def _evaluation(self, values: Mapping[str, float]) -> str:
        reward, best = values["reward/mean"], self._best
        if (
            self._in_a_row("reward", is_far_below(reward, best, samples=values.get("reward/samples", 0.0)))
            >= EVALUATIONS
        ):
            return f"the held-out reward is {reward:.3g}, and was {best:.3g} at its best, in {EVALUATIONS} evaluations in a row"
        self._best = max(best, reward)
        return ""

    def _update(self, values: Mapping[str, float]) -> str:
        if not values.get("update/tokens", 1.0):
            return ""
        if self._in_a_row("skipped", bool(values.get("update/skipped"))) >= self._max_skipped:
            return f"{self._max_skipped} updates in a row had a loss or gradient that is not finite"
        if values.get("update/skipped"):
            return ""
        entropy, norm = values.get("policy/entropy", math.nan), values.get("optimizer/grad_norm", math.nan)
        if self._first_entropy is None and math.isfinite(entropy):
            self._first_entropy = entropy
        first = self._first_entropy
        if self._in_a_row("entropy", first is not None and entropy > first + ENTROPY_RISE) >= IN_A_ROW:
            return f"the entropy is {entropy:.3g} nats per token, and was {first:.3g} in the first update, {IN_A_ROW} times in a row"
        usual = statistics.median(self._norms) if len(self._norms) >= FEWEST_NORMS else math.inf
        if self._in_a_row("norm", norm > STEEP * usual) >= IN_A_ROW:
            return f"the gradient norm is {norm:.3g}, more than {STEEP:g} times its median of {usual:.3g}, {IN_A_ROW} times in a row"
        if 0 < norm < math.inf:  # 0: no group had a signal
            insort(self._norms, norm)
        return ""

    def _in_a_row(self, name: str, passed: bool) -> int:
        self._rows[name] = self._rows.get(name, 0) + 1 if passed else 0
        return self._rows[name]


def is_far_below(reward: float, best: float, *, samples: float) -> bool:
    """Whether a mean reward is less than half of the best one, and by more than chance explains if rewards are 0 or 1."""
    if not best > 0 or math.isnan(reward):
        return False
    noise = math.sqrt(2 * best * (1 - best) / samples) if best < 1 and samples else 0.0
    return best - reward > max(best / 2, ERRORS * noise)
