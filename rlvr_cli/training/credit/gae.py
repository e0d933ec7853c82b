"""Rewards and values of tokens -> advantages of tokens: generalized advantage estimation, for `rlvr ppo`.

Enters: (batch, seq) tensors of a whole rollout batch, and the mask of its response tokens. Leaves: advantages and returns of the
same shape. Values outside the mask are not read, whatever they are; what is returned there is 0.

An episode ends with its response's last token, whatever ended the response: at a stop the state after it is terminal, and at the
length limit the task's reward is final. So no value follows the last token, neither one of padding nor an estimate.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_VARIANCE = 1e-6  # of returns, below which the share of it that values explain means nothing


class Credit(NamedTuple):
    """What each token was worth."""

    advantages: Tensor  # (batch, seq)
    returns: Tensor  # (batch, seq), which the values should have been


def token_rewards(rewards: Tensor, mask: Tensor, *, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """The rewards of tokens: the response's at its last token, and at every token -kl_coef * kl.

    Args:
        rewards: (batch,), one per response.
        mask: (batch, seq) bool, the response tokens.
        kl: (batch, seq), see `kl_to_reference`; None for no KL penalty.

    Returns:
        (batch, seq), of the dtype of `rewards`.
    """
    last = mask & (mask.flip(1).cumsum(dim=1).flip(1) == 1)
    of_tokens = last * rewards[:, None]
    if kl is not None:
        of_tokens = of_tokens - kl_coef * kl.to(of_tokens.dtype).masked_fill(~mask, 0)
    return of_tokens


def kl_to_reference(log_probs: Tensor, reference_log_probs: Tensor, *, clamp: bool) -> Tensor:
    """log p - log p_ref of each sampled token, nats: an estimate of KL(p || p_ref) that as a reward has the gradient of this KL.

    Args:
        log_probs, reference_log_probs: (batch, seq).
        clamp: raise negative ones to 0, as AlpacaFarm does (Dubois et al., 2023). The estimate is then too large, and a token that
            the reference finds likelier costs nothing instead of earning something.
    """
    kl = log_probs - reference_log_probs
    return kl.clamp(min=0) if clamp else kl


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, gae_lambda: float) -> Credit:
    """Generalized advantage estimation (Schulman et al., 2016, equation 16).

    delta_t = r_t + gamma V_t+1 - V_t, A_t = delta_t + gamma lambda A_t+1, and R_t = A_t + V_t. With gamma and lambda 1, A_t is the
    rewards from t on minus V_t. Tokens outside the mask are no steps: what follows a token is the row's next token in the mask.

    Args:
        rewards: (batch, seq), of each token.
        values: (batch, seq), of the state in which the token was chosen.
        mask: (batch, seq) bool.
        gamma: the discount per token.
        gae_lambda: 1: no bias from wrong values; 0: least variance.

    Returns:
        Advantages and returns, of the dtype of `rewards`.
    """
    values = values.to(rewards.dtype)
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(len(rewards))
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], delta + gamma * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    return Credit(*(tensor.masked_fill(~mask, 0) for tensor in (advantages, advantages + values)))


def whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean) / std over the tokens in the mask, of a whole rollout batch; 0 outside it.

    The standard deviation is the sample's (ddof 1). Fewer than two tokens are returned as they are.

    Args:
        advantages: (batch, seq).
        mask: (batch, seq) bool. Padding in mean and standard deviation would change the advantages' signs.
    """
    found = advantages[mask]
    if len(found) >= 2:
        found = (found - found.mean()) / (found.std(correction=1) + 1e-8)
    return torch.zeros_like(advantages).masked_scatter(mask, found)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """1 - var(R - V) / var(R) over the tokens in the mask: 1 for perfect values, 0 for a constant, below 0 for worse ones.

    None where the returns hardly differ (variance below `SMALLEST_VARIANCE`): it would be a huge negative number.
    """
    found = returns[mask].double()
    if len(found) < 2 or (variance := float(found.var(correction=0))) < SMALLEST_VARIANCE:
        return None
    return 1 - float((found - values[mask].double()).var(correction=0)) / variance
