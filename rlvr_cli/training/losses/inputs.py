"""What a loss is given, everything per token, and what it returns.

Enters: a micro-batch, and what the policy says of it. Leaves: `LossInputs`; and the type of what comes back, `LossOutputs`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What is known of each token of a micro-batch.

    Rows are responses, (batch, seq) is a value per token. Only what `response_mask` marks counts: elsewhere there may be
    anything, and what a loss returns there is ignored. Nothing but `log_probs`, `entropy` and `values` has a gradient.

    The rows of a micro-batch are some of the update's: a row's loss should not depend on the other rows, or it depends on how the
    update was cut. Rows that need one another must have the same `unit` in the batch (`train_update`), which keeps them together.
    """

    log_probs: Tensor  # (batch, seq), nats, of the policy being trained
    entropy: Tensor  # (batch, seq), nats, of the distributions that the tokens were drawn from; its gradient costs nothing until it is used
    response_mask: Tensor  # (batch, seq) bool
    old_log_probs: Tensor  # (batch, seq), of the policy before the first update on these rollouts; equal to log_probs in that update
    advantages: Tensor | None = None  # (batch, 1), or (batch, seq) with one for each token; raw rewards for no_baseline
    sampled_log_probs: Tensor | None = None  # (batch, seq), as the sampler computed them
    reference_log_probs: Tensor | None = None  # (batch, seq), of the frozen reference model; None without one
    values: Tensor | None = None  # (batch, seq), of the policy's value head; None without one
    group: Tensor | None = (
        None  # (batch,) int64, the same for the responses to one question; None where there are no groups
    )


@dataclass(frozen=True, eq=False)
class LossOutputs:
    """What is minimized, and what is logged of it.

    A loss per token is divided as the update's length normalization says (`loss_denominators`). A loss per row has been reduced over
    its tokens already: it is averaged over the update's rows, whatever the length normalization.
    """

    loss: Tensor  # (batch, seq), or (batch,) with one number per row
    statistics: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # (batch, seq) or (batch,) each; averaged in the metrics


def loss_inputs(batch: Mapping[str, Tensor], *, log_probs: Tensor, entropy: Tensor) -> LossInputs:
    """The columns of a batch that losses read. Without `old_log_probs` this is the first update: they are `log_probs` itself."""
    old, group = batch.get("old_log_probs"), batch.get("group")
    return LossInputs(
        log_probs=log_probs,
        entropy=entropy,
        response_mask=batch["response_mask"].bool(),
        old_log_probs=log_probs.detach() if old is None else old,
        advantages=batch.get("advantages"),
        sampled_log_probs=batch.get("sampled_log_probs"),
        reference_log_probs=batch.get("reference_log_probs"),
        group=None if group is None else group[:, 0],
    )
