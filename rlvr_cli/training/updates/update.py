"""One optimizer update on a batch of tokens.

Enters: a model, an optimizer, a batch (`tokenization.Batch`) and an objective. Leaves: the model after one update, and its
metrics.

The update does not depend on how the batch is split into micro-batches: its denominators come from the whole batch, before
the first backward pass, and no row's result depends on its padding.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, NotRequired, TypedDict

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlvr_cli.errors import RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.models.compute.device import to_device, to_host
from rlvr_cli.models.divergence import Teacher
from rlvr_cli.models.log_probs import get_response_log_probs, wanted_in
from rlvr_cli.models.policy import Policy, as_policy
from rlvr_cli.models.tokens.tokenization import Batch, row_lengths
from rlvr_cli.training.losses.inputs import loss_inputs
from rlvr_cli.training.losses.normalization import LengthNormalization, loss_denominators
from rlvr_cli.training.losses.objectives import (
    Objective,
    negative_log_likelihood,
    reduced_loss,
    statistics_at,
    token_metrics,
)
from rlvr_cli.training.optimizers.gradients import Gradients, gradients_of
from rlvr_cli.training.optimizers.optimizer import RATE
from rlvr_cli.training.parallel.ranks import ALONE, Ranks
from rlvr_cli.training.updates.micro_batches import MicroBatch, dealt, micro_batches, moved, ready

# How far, in nats, log-probabilities of the same tokens and weights may differ when they are computed twice. On a CPU they do
# not; on other devices kernels round differently, and the bound is for the worst of a million tokens, whose logits may be
# above 32, where bfloat16's numbers are 0.25 apart. Rows that were mixed up differ by more.
SAME_LOG_PROBS = {torch.float64: 1e-6, torch.float32: 0.01, torch.float16: 1.0, torch.bfloat16: 2.0}


class UpdateOptions(TypedDict):
    """The fields of `UpdateSettings` that the algorithm chooses."""

    objective: NotRequired[Objective]
    skip_zero_advantage: NotRequired[bool]
    normalization: NotRequired[LengthNormalization]
    normalize_constant: NotRequired[float | None]
    share: NotRequired[float]
    temperature: NotRequired[float]


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """How `train_update` updates: what the algorithm chooses (`UpdateOptions`), and what all algorithms have."""

    learning_rate: float  # of this update (`learning_rate_at`); that of the critic is in proportion (`make_optimizer`)
    micro_batch_size: int | None = None  # most rows per micro-batch; a larger unit is a micro-batch by itself
    micro_batch_tokens: int | None = None  # most tokens that one computes, in place of `micro_batch_size`
    objective: Objective = negative_log_likelihood  # to minimize; the entropies have a gradient only if it uses them
    skip_zero_advantage: bool = True  # no backward pass for rows in `zero_advantage`: their gradient is known to be 0
    # What a loss per token is divided by (`loss_denominators`). A loss per row is averaged over the rows that go through the model:
    # all but the units without a response token.
    normalization: LengthNormalization = "token_mean"
    normalize_constant: float | None = None  # for `masked_normalize`
    share: float = 1.0  # of the rows of a whole update: the loss is multiplied by it
    temperature: float = 1.0  # divides the logits
    max_grad_norm: float = 1.0  # the gradient is scaled down to this norm, that of a critic apart; inf never clips
    gradient_checkpointing: bool = False  # compute activations again in the backward pass, instead of keeping them


@dataclass(frozen=True, eq=False)
class Update:
    """What all micro-batches of an update are computed with."""

    policy: Policy
    teacher: Teacher | None
    batch: Batch  # on the host
    mask: Tensor  # (batch, seq) bool, the response tokens
    settings: UpdateSettings
    micro_batches: list[MicroBatch]
    denominators: Tensor  # (batch, 1), of a loss per token
    num_rows: float  # the divisor of a loss per row

    @property
    def networks(self) -> list[Policy]:
        """All that goes through the micro-batches."""
        return [*self.policy.networks, *([self.teacher.policy] if self.teacher is not None else [])]


class UpdateSums(NamedTuple):
    """What an update adds up to, on the host."""

    objective: float
    nll: float
    entropy: float
    per_row: bool
    grad_norms: list[float]
    statistics: dict[str, Tensor]  # of this rank's micro-batches

    @property
    def are_finite(self) -> bool:
        return all(map(math.isfinite, (self.objective, *self.grad_norms)))


def train_update(
    model: Policy | PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    teacher: Teacher | None = None,
    check: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
    **how: Any,
) -> dict[str, float]:
    """Do one optimizer update on `batch`.

    Micro-batches are made of rows with the same prompt, whose prompt is computed once (if `Policy.shares_prefixes`), else of
    rows of similar length. An update whose loss or gradient is not finite is skipped: weights and optimizer state are unchanged.
    The model is neither switched to train nor to eval mode. Its dropout must be off, or the log-probabilities are not the policy's.

    Args:
        model: the policy; its matrix products are in its `compute_dtype`.
        optimizer: over the model's parameters; gradients left in them are discarded.
        batch: on any device: a `tokenization.Batch` and the columns that the objective reads (`loss_inputs`), (batch, seq) or
            (batch, 1) each. Rows marked in `zero_advantage`, (batch, 1) bool, go through the model after the others. Rows with the same
            number in `unit`, (batch, 1) int64, such as a pair, stay in one micro-batch, in the order of the batch; without
            `unit` each row is a unit.
        teacher: a frozen model that goes through each micro-batch before the policy; the objective gets the `divergence` from it.
        check: called before each micro-batch; if it raises, the update is abandoned and the weights are unchanged.
        ranks: the processes that do this update together, each with the same weights, optimizer state and batch. They divide the
            micro-batches; all do the same step.
        how: the fields of `UpdateSettings`.

    Returns:
        `update_metrics` of the policy before the update; nothing on other ranks than 0.

    Raises:
        RlvrError: no row has a response token.
    """
    started = time.perf_counter()
    policy = as_policy(model)
    with policy.on_its_device():
        update = _update_of(policy, batch, UpdateSettings(**how), teacher=teacher, ranks=ranks.size)
        gradients = gradients_of(policy, ranks, several=len(update.micro_batches) > 1)
        optimizer.zero_grad(set_to_none=True)
        totals = _backward(update, gradients, ranks=ranks, check=check)
        sums = _summed(totals, gradients, ranks=ranks, max_norm=update.settings.max_grad_norm)
        if sums.are_finite:
            for group in optimizer.param_groups:
                group["lr"] = update.settings.learning_rate * group.get(RATE, 1.0)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        parts = ranks.gather((totals.computed, sums.statistics))
    if ranks.rank:
        return {}
    return update_metrics(update, sums, parts) | {"update/seconds": time.perf_counter() - started}


def update_metrics(
    update: Update, sums: UpdateSums, parts: Sequence[tuple[int, Mapping[str, Tensor]]]
) -> dict[str, float]:
    """Return the metrics of an update, all of the policy before it, `update/seconds` apart.

    Args:
        parts: of each rank, how many tokens it computed, and its statistics.

    Returns:
        `loss/objective`      the value of the objective
        `loss/denominator`    the mean divisor of a response token's loss; for a loss per row, the divisor of a row's loss
        `loss/nll`            mean over the response tokens of -log p, nats
        `policy/entropy`      mean over the response tokens of the exact entropy, nats
        `optimizer/grad_norm` norm of the update's whole gradient, before clipping; without that of a critic's parameters
        `critic/grad_norm`    norm of the latter, if there is a critic
        `optimizer/learning_rate`
        `update/skipped`      1.0 when the update was skipped, else 0.0
        `update/rows`, `update/tokens` (response tokens), `update/micro_batches`
        `update/computed`     tokens that went through the model's body, a prefix shared within a micro-batch counted once
        `update/padding`      share of these that were padding (0 but for unusual attention, or half precision on a CPU)
        `update/shared`       share of the rows' tokens, prompts included, that were not computed again for another row
        and the `token_metrics` of the objective's statistics.
    """
    mask = update.mask
    num_tokens, real = int(mask.sum()), int(row_lengths(mask).sum())
    computed = sum(tokens for tokens, _ in parts)
    per_token = float((update.denominators * mask).sum() / num_tokens)
    return {
        "loss/objective": sums.objective,
        "loss/denominator": update.num_rows if sums.per_row else per_token,
        "loss/nll": sums.nll / num_tokens,
        "policy/entropy": sums.entropy / num_tokens,
        **token_metrics(_joined([statistics for _, statistics in parts])),
        **dict(zip(("optimizer/grad_norm", "critic/grad_norm"), sums.grad_norms, strict=False)),  # no critic, no norm
        "optimizer/learning_rate": update.settings.learning_rate,
        "update/skipped": float(not sums.are_finite),
        "update/rows": float(len(mask)),
        "update/tokens": float(num_tokens),
        "update/micro_batches": float(len(update.micro_batches)),
        "update/computed": float(computed),
        "update/padding": max(1 - real / computed, 0.0),
        "update/shared": max(1 - computed / real, 0.0),
    }


def check_ratios(metrics: Mapping[str, float], *, dtype: torch.dtype) -> None:
    """Check the first update on a batch: its policy is still that of the old log-probabilities, so every ratio must be 1.

    An update that was skipped, because its loss or gradient was not finite, changed nothing and is not checked.

    Args:
        metrics: of `train_update`, with `policy/ratio_min` and `policy/ratio_max`.
        dtype: in which the policy computes.

    Raises:
        RlvrError: a ratio is nan, or further from 1 than rounding explains.
    """
    low, high = metrics["policy/ratio_min"], metrics["policy/ratio_max"]
    bound = SAME_LOG_PROBS[dtype]
    if metrics["update/skipped"] or math.exp(-bound) <= low <= high <= math.exp(bound):
        return
    raise RlvrError(
        f"In the first update on a batch the ratios of new to old probability are {low:.4g} to {high:.4g}, but must be 1: the "
        "model gives other log-probabilities for the same tokens and weights when it is run again.",
        "Something in the model is random or keeps a state, such as dropout or a hook: remove it. The checkpoints before this "
        "step are sound.",
    )


class _Forward(NamedTuple):
    """What the forward pass of a micro-batch gives."""

    loss: Tensor  # scalar, its share of the update's loss
    per_row: bool  # whether the objective gives a loss per row
    log_probs: Tensor  # (rows, width), 0 outside the mask, and so are the entropies
    entropy: Tensor
    statistics: Mapping[str, Tensor]  # of the objective, (tokens,) or (rows,) each
    computed: int  # tokens that went through the model's body


class _Totals:
    """What the micro-batches of this rank add up to."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, -log p, entropy
        self.statistics: dict[str, list[Tensor]] = {}
        self.computed = 0
        self.per_row = False

    def add(self, forward: _Forward) -> None:
        self.computed += forward.computed
        self.per_row = forward.per_row
        with torch.no_grad():
            self.sums += torch.stack([forward.loss.detach(), -forward.log_probs.sum(), forward.entropy.sum()])
        for name, values in forward.statistics.items():
            self.statistics.setdefault(name, []).append(values)


def _update_of(
    policy: Policy, batch: Batch, settings: UpdateSettings, *, teacher: Teacher | None, ranks: int
) -> Update:
    """Cut the batch, and find the denominators of the whole batch. Raises RlvrError if no row has a response token."""
    batch = {name: tensor.cpu() for name, tensor in batch.items()}
    mask = batch["response_mask"].bool()
    if not mask.any():
        raise RlvrError(
            f"No response token in this batch of {len(mask)} rows: there is nothing to train on.",
            "Look for empty responses in the training data.",
        )
    denominators = loss_denominators(
        mask, normalization=settings.normalization, normalize_constant=settings.normalize_constant
    )
    cuts = micro_batches(
        batch,
        settings.micro_batch_size,
        tokens=settings.micro_batch_tokens,
        together=policy.shares_prefixes,
        ranks=ranks,
    )
    return Update(
        policy=policy,
        teacher=teacher,
        batch=batch,
        mask=mask,
        settings=settings,
        micro_batches=cuts,
        denominators=denominators / settings.share,
        num_rows=sum(len(cut.rows) for cut in cuts) / settings.share,
    )


def _backward(update: Update, gradients: Gradients, *, ranks: Ranks, check: Callable[[], None]) -> _Totals:
    """Take this rank's micro-batches forward and, those that learn, backward."""
    totals = _Totals(update.policy.device)
    with ready(update.networks):
        for cut, counts in dealt(update.micro_batches, update.policy, ranks=ranks, check=check, backward=True):
            # From here to the next micro-batch the host does not wait for the device.
            learning = cut.learning or not update.settings.skip_zero_advantage
            forward = _forward(update, cut, learning=learning)
            if learning:
                fault_point("backward")
                gradients.backward(forward.loss if counts else forward.loss * 0)
            if counts:
                totals.add(forward)
    return totals


def _forward(update: Update, cut: MicroBatch, *, learning: bool) -> _Forward:
    """Take a micro-batch through teacher, policy and objective, with a graph if it is `learning`."""
    policy, teacher, settings = update.policy, update.teacher, update.settings
    micro = cut.of(update.batch)
    wanted = wanted_in(policy, micro["input_ids"], micro["response_mask"])
    of_teacher = teacher and wanted_in(teacher.policy, micro["input_ids"], micro["response_mask"])
    micro, wanted = moved(micro, policy.device), wanted.to(policy.device)
    taught = None
    if teacher is not None and of_teacher is not None:
        taught = teacher.states(micro["input_ids"], of_teacher.to(policy.device))
    divisors = to_device(update.denominators[cut.rows], policy.device)
    recomputing = policy.networks if settings.gradient_checkpointing and learning else []
    with torch.set_grad_enabled(learning), policy.autocast(), ExitStack() as recomputed:
        for network in recomputing:
            recomputed.enter_context(network.gradient_checkpointing())
        scores = get_response_log_probs(
            policy,
            micro["input_ids"],
            micro["labels"],
            return_token_entropy=True,
            response_mask=micro["response_mask"],
            temperature=settings.temperature,
            wanted=wanted,
            teacher=taught,
        )
    log_probs, entropy = scores["log_probs"], scores["token_entropy"]
    more = {name: scores.get(name) for name in ("values", "divergence", "teacher_log_probs")}
    outputs = settings.objective(loss_inputs(micro, log_probs=log_probs, entropy=entropy, **more))
    return _Forward(
        loss=reduced_loss(outputs.loss, micro["response_mask"], denominators=divisors, num_rows=update.num_rows),
        per_row=outputs.loss.dim() == 1,
        log_probs=log_probs,
        entropy=entropy,
        statistics=statistics_at(outputs.statistics, wanted.positions),
        computed=micro["labels"].numel() if wanted.prefixes is None else len(wanted.prefixes.tokens),
    )


def _summed(totals: _Totals, gradients: Gradients, *, ranks: Ranks, max_norm: float) -> UpdateSums:
    """Add up the sums and the gradients of all ranks, and clip the latter."""
    ranks.sum([totals.sums])
    norms = gradients.finish(max_norm=max_norm)
    numbers, *values = to_host(
        [torch.cat([totals.sums, norms.to(totals.sums)]), *map(torch.cat, totals.statistics.values())]
    )
    objective, nll, entropy, *grad_norms = numbers.tolist()
    statistics = dict(zip(totals.statistics, values, strict=True))
    return UpdateSums(objective, nll, entropy, totals.per_row, grad_norms, statistics)


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the statistics of all ranks."""
    names = {name: None for statistics in parts for name in statistics}
    return {name: torch.cat([part[name] for part in parts if name in part]) for name in names}
