"""The losses of on-policy distillation: the student's divergence from its teacher at each token that it sampled (`DIVERGENCES`)."""

from dataclasses import dataclass

from torch import Tensor

from rlvr_cli.config.distill import DivergenceType
from rlvr_cli.training.losses.inputs import LossInputs, LossOutputs


@dataclass(frozen=True)
class Divergence:
    """A value of --divergence, with p of the student and q of the teacher.

    Attributes:
        formula: the loss of token t of response i as text; a leading minus applies to the whole formula.
        where: what its symbols mean.
        gradient: its gradient with respect to the student's logits.
        full: it compares the probabilities of all tokens, not only those of the sampled one.
    """

    formula: str
    where: str
    gradient: str
    full: bool = True


DIVERGENCES: dict[DivergenceType, Divergence] = {
    "reverse_kl": Divergence(
        "KL(p_i,t || q_i,t)", "KL(p || q) = sum_v p(v) log p(v)/q(v), q the teacher", "p (log p/q - KL(p || q))"
    ),
    "sampled": Divergence(
        "-rho_i,t A_i,t",
        "rho = p/p_old, A = log q/p_old of the sampled token, q the teacher",
        "in expectation that of reverse_kl",
        full=False,
    ),
    "forward_kl": Divergence("KL(q_i,t || p_i,t)", "KL(q || p) = sum_v q(v) log q(v)/p(v), q the teacher", "p - q"),
}


def distillation(inputs: LossInputs, *, divergence: DivergenceType, task_reward: float = 0.0) -> LossOutputs:
    """The loss of `rlvr distill`; bind the keywords with functools.partial.

    Only a token's own divergence is descended, not those of the tokens that follow it (a discount of 0): so the tokens' prefixes
    count as given.

    Args:
        inputs: with `divergence`, or for `sampled` with `teacher_log_probs`; with `advantages`, if `task_reward` is not 0.
        divergence: one of `DIVERGENCES`. `sampled` weights the policy gradient of each token by its advantage log q - log p_old
            (Thinking Machines, 2025).
        task_reward: how much of the group's advantage is added, as by REINFORCE.

    Returns:
        The loss, (batch, seq), and the statistics `divergence`, for `sampled` its estimate log p_old - log q, and
        `teacher_log_prob`, of the sampled tokens; (batch, seq) each, nats.
    """
    assert inputs.teacher_log_probs is not None
    ratio = (inputs.log_probs - inputs.old_log_probs.detach()).exp()
    if DIVERGENCES[divergence].full:
        assert inputs.divergence is not None
        loss = found = inputs.divergence
    else:
        found = inputs.old_log_probs.detach() - inputs.teacher_log_probs
        loss = ratio * found
    if task_reward:
        loss = loss - task_reward * ratio * _advantages(inputs)
    return LossOutputs(loss, {"divergence": found.detach(), "teacher_log_prob": inputs.teacher_log_probs})


def _advantages(inputs: LossInputs) -> Tensor:
    assert inputs.advantages is not None
    return inputs.advantages
