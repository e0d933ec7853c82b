"""Whether stored rollouts obey the sampling options.

Enters: a rollout, the options that it was to be sampled with, and the logits of its policy. Leaves: how far its stored
log-probabilities are from those that options and logits give, and sentences about rows that break a rule.
"""

import torch
from torch import Tensor

from rlvr_cli.types import Rollout, SamplingParams

_BORDER = 1e-5  # of probability: at the edge of the nucleus, rounding decides whether a token belongs to it


def broken_rule(row: Rollout, params: SamplingParams, *, thinking_budget: int = 0) -> str | None:
    """The option that a rollout does not obey, as the end of a sentence; None if it obeys all.

    Args:
        thinking_budget: with one, what thinking leaves of it is not for the answer; 0: there is none.
    """
    tokens = row.num_response_tokens if row.episode is None else row.num_policy_tokens
    if tokens > params.max_tokens:
        return f"has {tokens} tokens, but at most {params.max_tokens} were allowed"
    if row.episode is not None:  # its other rules are those of its turns and its environment
        return None
    if not thinking_budget and row.finish_reason == "length" and row.num_response_tokens < params.max_tokens:
        return f"was cut after {row.num_response_tokens} tokens, but {params.max_tokens} were allowed"
    if row.finish_reason == "stop" and row.num_response_tokens < params.min_tokens:
        return f"ended after {row.num_response_tokens} tokens, but had to have {params.min_tokens}"
    if row.finish_reason == "stop" and row.stop_reason not in (*params.stop, "eos"):
        return f"ended at {row.stop_reason!r}, which is no stop string"
    return None


def sampled_log_probs(row: Rollout, params: SamplingParams, *, logits: Tensor) -> Tensor:
    """(sampled tokens,): their log-probabilities at the temperature (greedy: at 1), of all logits, nats. Arguments as of `log_prob_gaps`."""
    log_p = torch.log_softmax(logits / (params.temperature or 1.0), dim=-1)
    ids = torch.tensor(row.response_ids, device=logits.device)[:, None]
    sampled = row.response_mask or [True] * len(row.response_ids)
    return log_p.gather(1, ids)[:, 0][torch.tensor(sampled, dtype=torch.bool, device=logits.device)]


def log_prob_gaps(row: Rollout, params: SamplingParams, *, logits: Tensor, ends: tuple[int, ...]) -> Tensor:
    """|stored - computed| of the log-probability of each sampled token, nats.

    The computed one is that of the distribution that the options describe: at the temperature (greedy: at 1), without the end
    of the sequence before `min_tokens` sampled tokens, cut to the nucleus. A token that could not have been sampled is infinitely far;
    greedily, it is also as far as its logit is from the largest.

    Args:
        logits: (tokens, vocab) float64, of the policy that sampled the row; overwritten.
        ends: the ids that end a response.
    """
    z = logits.div_(params.temperature or 1.0)
    kept = row.response_mask or [True] * len(row.response_ids)
    sampled = torch.tensor(kept, dtype=torch.bool, device=z.device)
    protected = _protected(row, sampled, min_tokens=params.min_tokens)
    z[:, list(ends)] = z[:, list(ends)].masked_fill(protected[:, None], -torch.inf)
    log_p = torch.log_softmax(z, dim=-1)
    ids = torch.tensor(row.response_ids, device=z.device)[:, None]
    stored = torch.tensor(row.sampled_logprobs, dtype=z.dtype, device=z.device)
    computed = log_p.gather(1, ids)[:, 0]
    gaps = (computed - stored).abs()
    if params.temperature == 0:
        gaps = torch.maximum(gaps, log_p.amax(dim=-1) - computed)
    elif params.top_p < 1:
        p, places = log_p.exp().sort(dim=-1, descending=True)
        before = p.cumsum(dim=-1) - p  # the probability of all that are more probable
        place = (places == ids).int().argmax(dim=-1, keepdim=True)
        gaps = torch.full_like(computed, torch.inf)
        for top_p in (params.top_p - _BORDER, params.top_p + _BORDER):
            inside = before < top_p
            mass = (p * inside).sum(dim=-1)
            gap = (computed - mass.log() - stored).abs().masked_fill(~inside.gather(1, place)[:, 0], torch.inf)
            gaps = torch.minimum(gaps, gap)
    return gaps[sampled]


def _protected(row: Rollout, sampled: Tensor, *, min_tokens: int) -> Tensor:
    """Which tokens could not have been an end, (tokens,): the first `min_tokens` sampled ones, of an episode those of each turn."""
    if row.episode is None or row.turns is None:
        return sampled.cumsum(dim=0) <= min_tokens
    protected = torch.zeros_like(sampled)
    for turn in row.turns:
        protected[turn.start : min(turn.start + min_tokens, turn.end)] = turn.role == "policy"
    return protected
