"""The arguments of a loss, `LossInputs`, and its return value, `LossOutputs`.

Enters: a micro-batch, with the policy's log-probabilities and entropies. Leaves: `LossInputs`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LossInputs:
    """The tokens of a micro-batch, for a loss.

    Rows are responses, (batch, seq) is a value per token. Only tokens marked in `response_mask` count: values elsewhere are
    arbitrary, and the loss that is returned there is ignored. Only `log_probs`, `entropy`, `values` and
    `divergence` have a gradient.

    A micro-batch holds only some rows of the update. So a row's loss should not depend on other rows: it would depend on how
    the update was split. Rows that need one another must have the same `unit` in the batch (`train_update`).
    """

    log_probs: Tensor  # (batch, seq), nats, of the policy being trained
    entropy: Tensor  # (batch, seq), nats, of the policy's distribution at each token; its gradient costs nothing unless the loss uses it
    response_mask: Tensor  # (batch, seq) bool
    old_log_probs: Tensor  # (batch, seq), of the policy before the first update on these rollouts; in that update, equal to log_probs
    # (batch, 1), or (batch, seq) with one for each token; the raw rewards for a loss with `raw_rewards`.
    advantages: Tensor | None = None
    sampled_log_probs: Tensor | None = None  # (batch, seq), as the sampler computed them
    # (batch, seq) bool: an earlier policy sampled the token than that of `old_log_probs`; None: it is not told.
    stale: Tensor | None = None
    reference_log_probs: Tensor | None = None  # (batch, seq), of the frozen reference model; None without one
    values: Tensor | None = None  # (batch, seq), of the policy's critic; None without one
    old_values: Tensor | None = None  # (batch, seq), of the critic before the first update on these rollouts
    returns: Tensor | None = None  # (batch, seq), what the values should be
    teacher_log_probs: Tensor | None = None  # (batch, seq), of the frozen teacher; None without one
    # (batch, seq), nats, of the policy's distribution at each token from the teacher's, with a gradient; None unless asked for.
    divergence: Tensor | None = None
    group: Tensor | None = None  # (batch,) int64, equal for responses to the same question; None without groups


@dataclass(frozen=True, eq=False)
class PairInputs:
    """The pairs of a micro-batch, for a preference loss of the user's own; (pairs,) each.

    A pair's loss should not depend on other pairs: it would depend on how the update was split.
    """

    chosen: Tensor  # log-probability of the chosen response, the sum over its tokens, nats; of the policy being trained
    rejected: Tensor
    reference_chosen: Tensor  # of the policy that the run starts with
    reference_rejected: Tensor
    chosen_tokens: Tensor  # int64, the response's length
    rejected_tokens: Tensor


@dataclass(frozen=True, eq=False)
class LossOutputs:
    """A loss, and statistics to log.

    A loss per token is divided according to the update's length normalization (`loss_denominators`). A loss per row is averaged
    over the update's rows, whatever the length normalization.
    """

    loss: Tensor  # (batch, seq), or (batch,) with one number per row
    # (batch, seq) or (batch,) each; averaged in the metrics.
    statistics: Mapping[str, Tensor] = field(default_factory=dict)


def loss_inputs(
    batch: Mapping[str, Tensor],
    *,
    log_probs: Tensor,
    entropy: Tensor,
    values: Tensor | None = None,
    divergence: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
) -> LossInputs:
    """Collect the columns of a batch that losses read. Without `old_log_probs` in the batch, it is `log_probs`, detached."""
    old, group, advantages = batch.get("old_log_probs"), batch.get("group"), batch.get("advantages")
    rows, seq = log_probs.shape
    assert group is None or group.shape == (rows, 1), f"group: {tuple(group.shape)}"
    assert advantages is None or advantages.shape in ((rows, 1), (rows, seq)), f"advantages: {tuple(advantages.shape)}"
    return LossInputs(
        log_probs=log_probs,
        entropy=entropy,
        response_mask=batch["response_mask"].bool(),
        old_log_probs=log_probs.detach() if old is None else old,
        advantages=advantages,
        sampled_log_probs=batch.get("sampled_log_probs"),
        stale=batch.get("stale"),
        reference_log_probs=batch.get("reference_log_probs"),
        values=values,
        old_values=batch.get("old_values"),
        returns=batch.get("returns"),
        divergence=divergence,
        teacher_log_probs=batch.get("teacher_log_probs") if teacher_log_probs is None else teacher_log_probs,
        group=None if group is None else group[:, 0],
    )
