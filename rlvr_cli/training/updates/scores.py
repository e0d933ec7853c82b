"""Log-probabilities of a batch's responses, and their values, without a gradient.

Enters: a model and a batch (`tokenization.Batch`). Leaves: (batch, seq) tensors on the CPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlvr_cli.models.compute.device import to_host
from rlvr_cli.models.log_probs import get_response_log_probs, wanted_in
from rlvr_cli.models.policy import Policy, as_policy
from rlvr_cli.models.tokens.tokenization import Batch
from rlvr_cli.training.parallel.ranks import ALONE, Ranks
from rlvr_cli.training.updates.micro_batches import MicroBatch, dealt, micro_batches, moved, ready

_SCORED = ("input_ids", "labels", "response_mask")  # the columns that log-probabilities depend on


def compute_log_probs(model: Policy | PreTrainedModel, batch: Batch, **how: Any) -> Tensor:
    """Compute the log-probabilities of the batch's responses, without a gradient: `compute_scores`."""
    return compute_scores(model, batch, **how)["log_probs"]


def compute_scores(
    model: Policy | PreTrainedModel,
    batch: Batch,
    *,
    micro_batch_size: int | None = None,
    micro_batch_tokens: int | None = None,
    temperature: float = 1.0,
    check: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
) -> dict[str, Tensor]:
    """Compute the log-probabilities of the batch's responses and, if the policy has a critic, their values; without a gradient.

    Micro-batches are those of `train_update`: for the same batch and weights the results are, on a CPU to the last bit, those of
    its forward pass. `check` is called before each micro-batch. The `ranks` divide them.

    Returns:
        `log_probs`, nats, and `values`; (batch, seq) on the CPU, 0 outside the responses.
    """
    policy = as_policy(model)
    batch = {name: batch[name].cpu() for name in batch if name in (*_SCORED, "unit", "zero_advantage")}
    cuts = micro_batches(
        batch, micro_batch_size, tokens=micro_batch_tokens, together=policy.shares_prefixes, ranks=ranks.size
    )
    scored = {name: batch[name] for name in _SCORED}
    places: list[MicroBatch] = []
    found: dict[str, list[Tensor]] = {"log_probs": []} | ({} if policy.critic is None else {"values": []})
    # not inference_mode: FSDP's buffers are used again when it trains
    with policy.on_its_device(), ready(policy.networks), torch.no_grad(), policy.autocast():
        for cut, counts in dealt(cuts, policy, ranks=ranks, check=check, backward=False):
            micro = cut.of(scored)
            wanted = wanted_in(policy, micro["input_ids"], micro["response_mask"])
            micro, wanted = moved(micro, policy.device), wanted.to(policy.device)
            scores = get_response_log_probs(
                policy,
                micro["input_ids"],
                micro["labels"],
                response_mask=micro["response_mask"],
                temperature=temperature,
                wanted=wanted,
            )
            if counts:
                places.append(cut)
                for name, tensors in found.items():
                    tensors.append(scores[name])
    dtype = torch.float64 if policy.dtype == torch.float64 else torch.float32
    result = {name: torch.zeros(batch["labels"].shape, dtype=dtype) for name in found}
    on_host = iter(to_host([tensor for tensors in found.values() for tensor in tensors]))
    for of_all in result.values():
        for rows, width, _ in places:
            of_all[rows, :width] = next(on_host)
    ranks.sum([*result.values()])
    return result
