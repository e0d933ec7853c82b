"""One optimizer update on a batch of tokens, and log-probabilities of a batch.

Enters: a model, an optimizer, a batch (`tokenization.Batch`) and an objective. Leaves: the model after one update, and its
metrics.

The update does not depend on how the batch is split into micro-batches: its denominators come from the whole batch, before
the first backward pass, and no row's result depends on its padding.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, compress
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlvr_cli.errors import RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.models.compute.device import to_device, to_host
from rlvr_cli.models.divergence import Teacher
from rlvr_cli.models.log_probs import get_response_log_probs, wanted_in
from rlvr_cli.models.policy import Policy, as_policy
from rlvr_cli.models.sharded import ShardedPolicy
from rlvr_cli.models.tokens.tokenization import Batch, collate, row_lengths
from rlvr_cli.training.gradients import gradients_of
from rlvr_cli.training.losses.inputs import loss_inputs
from rlvr_cli.training.losses.normalization import LengthNormalization, loss_denominators
from rlvr_cli.training.losses.objectives import (
    Objective,
    negative_log_likelihood,
    reduced_loss,
    statistics_at,
    token_metrics,
)
from rlvr_cli.training.optimizers.optimizer import RATE
from rlvr_cli.training.parallel.ranks import ALONE, Ranks
from rlvr_cli.types import Rollout

# How far, in nats, log-probabilities of the same tokens and weights may differ when they are computed twice. On a CPU they do
# not; on other devices kernels round differently, and the bound is for the worst of a million tokens, whose logits may be
# above 32, where bfloat16's numbers are 0.25 apart. Rows that were mixed up differ by more.
SAME_LOG_PROBS = {torch.float64: 1e-6, torch.float32: 0.01, torch.float16: 1.0, torch.bfloat16: 2.0}
_SCORED = ("input_ids", "labels", "response_mask")  # the columns that log-probabilities depend on


class UpdateOptions(TypedDict):
    """The arguments of `train_update` that the algorithm chooses."""

    micro_batch_size: int
    objective: NotRequired[Objective]
    skip_zero_advantage: NotRequired[bool]
    normalization: NotRequired[LengthNormalization]
    normalize_constant: NotRequired[float | None]
    share: NotRequired[float]
    temperature: NotRequired[float]


def train_update(
    model: Policy | PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    learning_rate: float,
    micro_batch_size: int,
    objective: Objective = negative_log_likelihood,
    skip_zero_advantage: bool = True,
    max_grad_norm: float = 1.0,
    normalization: LengthNormalization = "token_mean",
    normalize_constant: float | None = None,
    share: float = 1.0,
    temperature: float = 1.0,
    micro_batch_tokens: int | None = None,
    gradient_checkpointing: bool = False,
    teacher: Teacher | None = None,
    check: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """Do one optimizer update on `batch`.

    Micro-batches are made of rows with the same prompt, whose prompt is computed once (if `Policy.shares_prefixes`), else of
    rows of similar length. The longest rows come first, so that a micro-batch too large for the device fails at once.
    An update whose loss or gradient is not finite is skipped: weights and optimizer state are unchanged.
    The model is neither switched to train nor to eval mode. Its dropout must be off, or the log-probabilities are not the policy's.

    Args:
        model: the policy; its matrix products are in its `compute_dtype`.
        optimizer: over the model's parameters; gradients left in them are discarded.
        batch: on any device: a `tokenization.Batch` and the columns that the objective reads (`loss_inputs`), (batch, seq) or
            (batch, 1) each. Rows marked in `zero_advantage`, (batch, 1) bool, go through the model after the others. Rows with the same
            number in `unit`, (batch, 1) int64, such as a pair, stay in one micro-batch, in the order of the batch; without
            `unit` each row is a unit.
        learning_rate: of this update (`learning_rate_at`); that of the critic is in proportion (`make_optimizer`).
        micro_batch_size: most rows per micro-batch; a larger unit is a micro-batch by itself.
        objective: the loss to minimize. The gradient through the entropies is computed only if the objective uses them.
        skip_zero_advantage: skip the backward pass for the marked rows, because their gradient is known to be 0.
        max_grad_norm: the gradient is scaled down to this norm, that of a critic apart; inf never clips.
        normalization: what a loss per token is divided by, see `loss_denominators`. A loss per row is averaged over the rows
            that go through the model: all but the units without a response token.
        normalize_constant: for `masked_normalize`.
        share: of the rows of a whole update: the loss is multiplied by it.
        temperature: divides the logits.
        micro_batch_tokens: most tokens that a micro-batch computes, in place of `micro_batch_size`; a larger unit is one by itself.
        gradient_checkpointing: compute activations again in the backward pass, instead of keeping them.
        teacher: a frozen model that goes through each micro-batch before the policy; the objective gets the `divergence` from it.
        check: called before each micro-batch; if it raises, the update is abandoned and the weights are unchanged.
        ranks: the processes that do this update together, each with the same weights, optimizer state and batch. They divide the
            micro-batches; all do the same step.

    Returns:
        Nothing on other ranks than 0. There:
        `loss/objective`      the value of the objective
        `loss/denominator`    the mean divisor of a response token's loss; for a loss per row, the divisor of a row's loss
        `loss/nll`            mean over the response tokens of -log p, nats
        `policy/entropy`      mean over the response tokens of the exact entropy, nats
        `optimizer/grad_norm` norm of the update's whole gradient, before clipping; without that of a critic's parameters
        `critic/grad_norm`    norm of the latter, if there is a critic
        `optimizer/learning_rate`
        `update/skipped`      1.0 when the update was skipped, else 0.0
        `update/rows`, `update/tokens` (response tokens), `update/micro_batches`, `update/seconds`
        `update/computed`     tokens that went through the model's body, a prefix shared within a micro-batch counted once
        `update/padding`      share of these that were padding (0 but for unusual attention, or half precision on a CPU)
        `update/shared`       share of the rows' tokens, prompts included, that were not computed again for another row
        and the `token_metrics` of the objective's statistics. All are of the policy before the update.

    Raises:
        RlvrError: no row has a response token.
    """
    started = time.perf_counter()
    policy = as_policy(model)
    device = policy.device
    batch = {name: tensor.cpu() for name, tensor in batch.items()}
    mask = batch["response_mask"].bool()
    num_tokens = int(mask.sum())
    if num_tokens == 0:
        raise RlvrError(
            f"No response token in this batch of {len(mask)} rows: there is nothing to train on.",
            "Look for empty responses in the training data.",
        )
    denominators = loss_denominators(mask, normalization=normalization, normalize_constant=normalize_constant) / share
    with policy.on_its_device(), ExitStack() as rounded:
        micro_batches = _micro_batches(
            batch, micro_batch_size, tokens=micro_batch_tokens, together=policy.shares_prefixes
        )
        num_rows = sum(len(rows) for rows, _, _ in micro_batches) / share
        per_row = False
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, -log p, entropy
        statistics: dict[str, list[Tensor]] = {}
        computed = 0  # tokens that go through the model's body
        gradients = gradients_of(policy, ranks, several=len(micro_batches) > 1)
        optimizer.zero_grad(set_to_none=True)
        for network in [*policy.networks, *([teacher.policy] if teacher is not None else [])]:
            rounded.enter_context(network.rounded_weights())
            rounded.enter_context(network.fused_kernels())
        dealt, check = _division(policy, ranks, check)
        costs = [len(rows) * width * (3 if learning else 1) for rows, width, learning in micro_batches]
        for number, is_own in dealt(costs, [learning for _, _, learning in micro_batches]):
            rows, width, learning = micro_batches[number]
            check()
            # From here to the next micro-batch the host does not wait for the device.
            micro = _cut(batch, rows, width)
            wanted = wanted_in(policy, micro["input_ids"], micro["response_mask"])
            of_teacher = teacher and wanted_in(teacher.policy, micro["input_ids"], micro["response_mask"])
            micro, wanted = _moved(micro, device), wanted.to(device)
            taught = None
            if teacher is not None and of_teacher is not None:
                taught = teacher.states(micro["input_ids"], of_teacher.to(device))
            divisors = to_device(denominators[rows], device)
            learning = learning or not skip_zero_advantage
            recomputing = policy.networks if gradient_checkpointing and learning else []
            with torch.set_grad_enabled(learning), policy.autocast(), ExitStack() as recomputed:
                for network in recomputing:
                    recomputed.enter_context(network.gradient_checkpointing())
                scores = get_response_log_probs(
                    policy,
                    micro["input_ids"],
                    micro["labels"],
                    return_token_entropy=True,
                    response_mask=micro["response_mask"],
                    temperature=temperature,
                    wanted=wanted,
                    teacher=taught,
                )
            log_probs, entropy = scores["log_probs"], scores["token_entropy"]
            more = {name: scores.get(name) for name in ("values", "divergence", "teacher_log_probs")}
            outputs = objective(loss_inputs(micro, log_probs=log_probs, entropy=entropy, **more))
            loss = reduced_loss(outputs.loss, micro["response_mask"], denominators=divisors, num_rows=num_rows)
            per_row = outputs.loss.dim() == 1
            if learning:
                fault_point("backward")
                gradients.backward(loss if is_own else loss * 0)
            if not is_own:
                continue
            computed += micro["labels"].numel() if wanted.prefixes is None else len(wanted.prefixes.tokens)
            with torch.no_grad():  # both sums are 0 outside the mask
                sums += torch.stack([loss.detach(), -log_probs.sum(), entropy.sum()])
            for name, values in statistics_at(outputs.statistics, wanted.positions).items():
                statistics.setdefault(name, []).append(values)
        rounded.close()
        ranks.sum([sums])
        grad_norms = gradients.finish(max_norm=max_grad_norm)
        found, *values = to_host([torch.cat([sums, grad_norms.to(sums)]), *map(torch.cat, statistics.values())])
        objective_value, nll, entropy_sum, *norms = found.tolist()
        skipped = not all(map(math.isfinite, (objective_value, *norms)))
        if not skipped:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group.get(RATE, 1.0)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        parts = ranks.gather((computed, dict(zip(statistics, values, strict=True))))
    if ranks.rank:
        return {}
    computed, of_tokens = _joined(parts)
    real = int(row_lengths(mask).sum())
    return {
        "loss/objective": objective_value,
        "loss/denominator": num_rows if per_row else float((denominators * mask).sum() / num_tokens),
        "loss/nll": nll / num_tokens,
        "policy/entropy": entropy_sum / num_tokens,
        **token_metrics(of_tokens),
        **dict(zip(("optimizer/grad_norm", "critic/grad_norm"), norms, strict=False)),  # no critic, no norm
        "optimizer/learning_rate": learning_rate,
        "update/skipped": float(skipped),
        "update/rows": float(len(mask)),
        "update/tokens": float(num_tokens),
        "update/micro_batches": float(len(micro_batches)),
        "update/computed": float(computed),
        "update/padding": max(1 - real / computed, 0.0),
        "update/shared": max(1 - computed / real, 0.0),
        "update/seconds": time.perf_counter() - started,
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


def compute_log_probs(model: Policy | PreTrainedModel, batch: Batch, **how: Any) -> Tensor:
    """Compute the log-probabilities of the batch's responses, without a gradient: `compute_scores`."""
    return compute_scores(model, batch, **how)["log_probs"]


def compute_scores(
    model: Policy | PreTrainedModel,
    batch: Batch,
    *,
    micro_batch_size: int,
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
    device = policy.device
    batch = {name: batch[name].cpu() for name in batch if name in (*_SCORED, "unit", "zero_advantage")}
    cuts = _micro_batches(batch, micro_batch_size, tokens=micro_batch_tokens, together=policy.shares_prefixes)
    dealt, check = _division(policy, ranks, check)
    places: list[tuple[Tensor, int]] = []  # rows and width of each micro-batch
    found: dict[str, list[Tensor]] = {"log_probs": []} | ({} if policy.critic is None else {"values": []})
    with ExitStack() as computing:
        computing.enter_context(policy.on_its_device())
        for network in policy.networks:
            computing.enter_context(network.rounded_weights())
            computing.enter_context(network.fused_kernels())
        computing.enter_context(torch.no_grad())  # not inference_mode: FSDP's buffers are used again when it trains
        computing.enter_context(policy.autocast())
        for number, is_own in dealt([len(rows) * width for rows, width, _ in cuts], [False] * len(cuts)):
            rows, width, _ = cuts[number]
            check()
            micro = _cut({name: batch[name] for name in _SCORED}, rows, width)
            wanted = wanted_in(policy, micro["input_ids"], micro["response_mask"])
            micro, wanted = _moved(micro, device), wanted.to(device)
            scores = get_response_log_probs(
                policy,
                micro["input_ids"],
                micro["labels"],
                response_mask=micro["response_mask"],
                temperature=temperature,
                wanted=wanted,
            )
            if is_own:
                places.append((rows, width))
                for name, tensors in found.items():
                    tensors.append(scores[name])
    dtype = torch.float64 if policy.dtype == torch.float64 else torch.float32
    result = {name: torch.zeros(batch["labels"].shape, dtype=dtype) for name in found}
    scored = iter(to_host([tensor for tensors in found.values() for tensor in tensors]))
    for of_all in result.values():
        for rows, width in places:
            of_all[rows, :width] = next(scored)
    ranks.sum([*result.values()])
    return result


def rollout_tensors(rollouts: Sequence[Rollout], *, pad_id: int) -> Batch:
    """Make a training batch of rollouts, from the sampled token ids: text is not tokenized again.

    Tokens that the policy did not sample (`Rollout.response_mask`) are context only: they are outside the batch's mask.

    Returns:
        A `tokenization.Batch` with `advantages` (batch, 1) and `sampled_log_probs` (batch, seq), 0 outside the mask; float32.
    """
    assert all(len(r.response_ids) == len(r.sampled_logprobs) for r in rollouts)
    batch = collate(
        [r.prompt_ids for r in rollouts],
        [r.response_ids for r in rollouts],
        pad_id=pad_id,
        response_masks=[r.response_mask for r in rollouts],
    )
    mask = batch["response_mask"]
    sampled = chain.from_iterable(
        r.sampled_logprobs if r.response_mask is None else compress(r.sampled_logprobs, r.response_mask)
        for r in rollouts
    )
    flat = torch.tensor([*sampled], dtype=torch.float32)
    advantages = torch.tensor([[r.advantage or 0.0] for r in rollouts], dtype=torch.float32)
    return batch | {
        "advantages": advantages,
        "sampled_log_probs": torch.zeros(mask.shape).masked_scatter(mask, flat),
    }


def stale_tokens(rollouts: Sequence[Rollout], *, like: Tensor) -> Tensor:
    """Return which response tokens an earlier policy sampled than the one that is trained, `Rollout.step`: (batch, seq) bool.

    Args:
        like: the response mask of these rollouts, with every token of the responses in it.
    """
    stale = [
        [version != r.step for version in r.token_versions or [r.policy_version] * len(r.response_ids)]
        for r in rollouts
    ]
    flat = torch.tensor([*chain.from_iterable(stale)], dtype=torch.bool)
    return torch.zeros_like(like, dtype=torch.bool).masked_scatter(like, flat)


def zero_advantage_rows(batch: Batch) -> Tensor:
    """Return which rows have advantage 0 at all their response tokens, (batch, 1) bool, for `zero_advantage`."""
    zero = (batch["advantages"] == 0).expand_as(batch["response_mask"])  # one for each response, or for each token
    return (zero | ~batch["response_mask"].bool()).all(dim=1, keepdim=True)


def select_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Select rows of a batch, in the given order."""
    return {name: tensor[list(rows)] for name, tensor in batch.items()}


def _joined(parts: Sequence[tuple[int, dict[str, Tensor]]]) -> tuple[int, dict[str, Tensor]]:
    """Add up the computed tokens of all ranks, and join their statistics, (tokens,) or (rows,) each."""
    names = {name: None for _, statistics in parts for name in statistics}
    return (
        sum(computed for computed, _ in parts),
        {name: torch.cat([statistics[name] for _, statistics in parts if name in statistics]) for name in names},
    )


def _division(
    policy: Policy, ranks: Ranks, check: Callable[[], None]
) -> tuple[Callable[[Sequence[float], Sequence[bool]], list[tuple[int, bool]]], Callable[[], None]]:
    """Return how the ranks divide micro-batches, and the check before each one.

    The former takes the cost of each and whether it needs a backward pass, and gives the numbers of this rank's, and whether
    each counts. Ranks with shards of one policy make equally many passes of each kind, and abandon an update together.
    """
    if isinstance(policy, ShardedPolicy):
        return ranks.deal_in_step, lambda: ranks.agree(check)
    return lambda costs, _: [(number, True) for number in ranks.deal(costs)], check


def _cut(batch: Batch, rows: Tensor, width: int) -> Batch:
    return {name: tensor[rows, :width] for name, tensor in batch.items()}


def _moved(batch: Batch, device: torch.device) -> Batch:
    return {name: to_device(tensor, device) for name, tensor in batch.items()}


def _micro_batches(batch: Batch, size: int, *, tokens: int | None, together: bool) -> list[tuple[Tensor, int, bool]]:
    """Row indices and width of each micro-batch, and whether it needs a backward pass; those that do come first.

    A micro-batch has at most `size` rows or, if `tokens` is given, computes at most so many tokens: a prompt once with `together`,
    else all rows padded to the longest. Units are never split.
    They are sorted by their longest row, the longest first; units without a response token are left out.
    With `together`, units with the same prompt (that of their first row) are neighbors. If every row is `zero_advantage`, the first
    micro-batch still runs backward: its gradient of 0 lets AdamW's moments decay as usual.
    """
    mask = batch["response_mask"].bool()
    for name in ("zero_advantage", "unit"):
        assert name not in batch or batch[name].shape == (len(mask), 1), f"{name}: {tuple(batch[name].shape)}"
    lengths, starts = row_lengths(mask).tolist(), mask.int().argmax(dim=1).tolist()
    ids = batch["input_ids"].cpu().numpy()
    zero_advantage = batch["zero_advantage"].flatten().tolist() if "zero_advantage" in batch else [False] * len(lengths)
    prompt_of = [ids[row, : start + 1].tobytes() for row, start in enumerate(starts)]

    def too_large(cut: list[int]) -> bool:
        if tokens is None:
            return len(cut) > size
        if not together:
            return len(cut) * max(lengths[row] for row in cut) > tokens
        responses = sum(max(lengths[row] - starts[row] - 1, 0) for row in cut)
        return responses + sum(len(prompt) for prompt in {prompt_of[row] for row in cut}) // ids.itemsize > tokens

    units: dict[int, list[int]] = {}
    for row, unit in enumerate(batch["unit"].flatten().tolist() if "unit" in batch else range(len(lengths))):
        units.setdefault(unit, []).append(row)
    longest = {unit: max(lengths[row] for row in rows) for unit, rows in units.items()}
    by_length = sorted((unit for unit in units if longest[unit]), key=lambda unit: -longest[unit])
    cuts: list[tuple[list[int], bool]] = []
    for learning in (True, False):
        prompts: dict[bytes, list[list[int]]] = {}
        for rows in (units[unit] for unit in by_length):
            if all(zero_advantage[row] for row in rows) != learning:
                prompts.setdefault(prompt_of[rows[0]] if together else b"", []).append(rows)
        cut: list[int] = []
        for rows in (rows for of_prompt in prompts.values() for rows in of_prompt):
            if cut and too_large(cut + rows):
                cuts.append((cut, learning))
                cut = []
            cut = cut + rows
        cuts += [(cut, learning)] if cut else []
    return [
        (torch.tensor(rows, device=mask.device), max(lengths[row] for row in rows), learning or number == 0)
        for number, (rows, learning) in enumerate(cuts)
    ]
