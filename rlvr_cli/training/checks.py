"""What is looked at after each update: it stops a run that computes wrong probabilities, and says once what a user should know."""

from collections.abc import Callable, Mapping

from torch import Tensor

from rlvr_cli.terminal import console
from rlvr_cli.training.trainer import Trainer
from rlvr_cli.training.updates.update import check_ratios

POSITIONS = "mismatch/position/"
MISMATCH_BOUND = 5e-2  # nats per token; print a note if sampler and trainer differ by more with the same weights


class UpdateChecks:
    """Looks at the updates of a run.

    Args:
        ratios: whether the ratios of new to old probability must be 1 in the first update on a batch.
        same_policy: whether the policy that is trained has sampled the batch, so that sampler and trainer must agree in it.
        advice: what the user can do if they do not.
        clip_note: says what is odd about the clip range, given an update whose ratios are not all 1; None: there is none.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        ratios: bool = True,
        same_policy: bool = True,
        advice: str = "",
        clip_note: Callable[[Mapping[str, float]], str | None] | None = None,
    ) -> None:
        self._trainer, self._ratios, self._same_policy, self._advice = trainer, ratios, same_policy, advice
        self._clip_note, self._mismatch_said = clip_note, False

    def look_at(self, update: Mapping[str, float], batch: Mapping[str, Tensor], *, number: int) -> None:
        """Check an update that had tokens.

        Args:
            update: its metrics.
            number: among the updates on its rollout batch, from 1.

        Raises:
            RlvrError: as `check_ratios`.
        """
        if number == 1:
            if self._ratios:
                check_ratios(update, dtype=self._trainer.compute_dtype)
            if self._same_policy:
                self._check_mismatch(update)
        elif self._clip_note is not None and update["policy/ratio_min"] < update["policy/ratio_max"]:
            if note := self._clip_note(update):
                console.say(f"note: {note}")
            if note or batch["advantages"].any():  # where no response has an advantage, nothing is cut
                self._clip_note = None

    def _check_mismatch(self, update: Mapping[str, float]) -> None:
        """Print a note, once, if trainer and sampler disagree on log-probabilities by more than `MISMATCH_BOUND`.

        Positions below --sampling-min-tokens are ignored: the sampler forbids the end of the response there, so its distribution
        differs.
        """
        gaps = {int(name.rpartition("/")[2]): gap for name, gap in update.items() if name.startswith(POSITIONS)}
        least = self._trainer.config.sampling_min_tokens
        gap = max((gap for start, gap in gaps.items() if start >= least), default=0.0)
        if gap > MISMATCH_BOUND and not self._mismatch_said:
            self._mismatch_said = True
            console.say(
                f"note: the sampler's log-probabilities differ from the trainer's by {gap:.2g} nats per token on average "
                f"(metrics mismatch/*){self._advice and f'; {self._advice}'}."
            )
