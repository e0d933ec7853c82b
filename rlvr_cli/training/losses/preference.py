"""Preference losses: the chosen response of a pair against the rejected one (`PREFERENCE_LOSSES`)."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from rlvr_cli.training.losses.inputs import LossInputs, LossOutputs, PairInputs


@dataclass(frozen=True)
class PreferenceLoss:
    """A value of `rlvr dpo --loss-type`: -log sigma(beta (h_w - h_l) - gamma), h_w and h_l of the chosen and the rejected response.

    Attributes:
        with_reference: h is relative to the reference's log-probability.
        per_token: h is divided by the response's length in tokens.
    """

    with_reference: bool
    per_token: bool

    def formula(self, *, beta: str, gamma: str, nll: str = "") -> str:
        """The loss of a pair, as a formula of the scores h of the chosen (w) and the rejected (l) response; gamma and nll may be empty."""
        likelihood = f" - {nll} (1/|o_w|) log p(o_w)" if nll else ""
        return f"-log sigma({beta} (h_w - h_l){f' - {gamma}' if gamma else ''}){likelihood}"

    @property
    def score(self) -> str:
        """h of a response, as a formula."""
        return ("(1/|o|) " if self.per_token else "") + ("log p/p_ref" if self.with_reference else "log p")


# A gamma other than 0 is simpo's alone (`DpoConfig.target_margin`).
PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {
    "dpo": PreferenceLoss(with_reference=True, per_token=False),
    "dpo_norm": PreferenceLoss(with_reference=True, per_token=True),
    "simpo": PreferenceLoss(with_reference=False, per_token=True),
}


def preference(
    inputs: LossInputs, *, loss: PreferenceLoss, beta: float, gamma: float = 0.0, nll_coef: float = 0.0
) -> LossOutputs:
    """The objective of `rlvr dpo`; bind the keywords with functools.partial.

    Args:
        inputs: chosen and rejected responses in turn: the two rows of a pair are a `unit` of the batch (`train_update`). With
            `reference_log_probs`, if the loss has a reference. Values outside the mask are not read.
        loss: one of `PREFERENCE_LOSSES`.
        beta: factor of the difference of the two scores.
        gamma: how much larger than 0 that product should be.
        nll_coef: factor of the chosen response's negative log-likelihood per token, which is added (iterative RPO, Pang et al., 2024,
            arXiv:2404.19733): without it both responses of a pair may become unlikely.

    Returns:
        The loss of each row's pair, (batch,), so that the mean over the rows is that over the pairs; and statistics of the same
        shape: `chosen_log_ratio` and `rejected_log_ratio`, the scores h in nats; `margin`, beta times their difference; `accuracy`,
        1.0 where it is above 0; and `chosen_nll`, the negative log-likelihood per token in nats.
    """

    def of_rows(values: Tensor, *, per_token: bool) -> Tensor:
        sums = values.masked_fill(~inputs.response_mask, 0).sum(dim=1)
        return sums / inputs.response_mask.sum(dim=1).clamp(min=1) if per_token else sums

    log_ratios = inputs.log_probs
    if loss.with_reference:
        assert inputs.reference_log_probs is not None
        log_ratios = log_ratios - inputs.reference_log_probs
    chosen, rejected = of_rows(log_ratios, per_token=loss.per_token).view(-1, 2).unbind(dim=1)
    margin = beta * (chosen - rejected)
    nll = -of_rows(inputs.log_probs, per_token=True)[::2]
    return outputs_of_pairs(
        -F.logsigmoid(margin - gamma) + nll_coef * nll,
        chosen=chosen,
        rejected=rejected,
        margin=margin,
        chosen_nll=nll,
    )


def outputs_of_pairs(loss: Tensor, *, chosen: Tensor, rejected: Tensor, margin: Tensor, **more: Tensor) -> LossOutputs:
    """The loss of each row's pair and the statistics of `preference`, of one number for each pair, (pairs,).

    Args:
        chosen, rejected: the scores of the two responses.
        more: other statistics.
    """
    statistics = {
        "chosen_log_ratio": chosen,
        "rejected_log_ratio": rejected,
        "margin": margin,
        "accuracy": (margin > 0).to(margin),
        **more,
    }
    return LossOutputs(
        loss.repeat_interleave(2),
        {name: values.detach().repeat_interleave(2) for name, values in statistics.items()},
    )


def pair_inputs(inputs: LossInputs) -> PairInputs:
    """The pairs of rows that are chosen and rejected responses in turn, with `reference_log_probs`."""
    assert inputs.reference_log_probs is not None
    sums = [
        log_probs.masked_fill(~inputs.response_mask, 0).sum(dim=1).view(-1, 2).unbind(dim=1)
        for log_probs in (inputs.log_probs, inputs.reference_log_probs)
    ]
    tokens = inputs.response_mask.sum(dim=1).view(-1, 2).unbind(dim=1)
    return PairInputs(*sums[0], *sums[1], *tokens)
