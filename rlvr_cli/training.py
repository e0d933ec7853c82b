"""One optimizer update from a batch of tokens, and what surrounds it: objective, data order, learning rate, optimizer.

Enters: a model, an optimizer, a batch (`tokens.Batch`) and what is to be minimised. Leaves: the model after one update, and
its metrics.

The update does not depend on how the batch is cut: its denominators come from the whole batch, before the first
backward pass, and no row's result depends on what it is padded to.
"""

import contextlib
import functools
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlvr_cli.errors import RlvrError
from rlvr_cli.losses import (
    LengthNormalization,
    LossType,
    compute_policy_gradient_loss,
    importance_weights,
    kl_penalty,
    loss_denominators,
    masked_loss,
    masked_mean,
    masked_normalize,
)
from rlvr_cli.models import autocast_dtype
from rlvr_cli.records import Rollout
from rlvr_cli.tokens import Batch, collate, computes_prefixes, get_response_log_probs, row_lengths, wanted_prefixes

Schedule = Literal["constant", "cosine"]
T = TypeVar("T")

# (log-probabilities (batch, seq), the batch) -> per-token loss (batch, seq) and named per-token statistics of that shape
Objective = Callable[[Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]


def sft_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and backward pass of one micro-batch (the handout, section 4.2).

    The summed negative log-likelihood of each row's response, divided by `normalize_constant`, averaged over the rows
    and divided by `gradient_accumulation_steps`. Micro-batches of equally many rows accumulate to the gradient of their
    union; `train_update` does the same for micro-batches of any size.

    Args:
        policy_log_probs: (batch, seq), nats, with a graph to go back through.
        response_mask: (batch, seq), 1 for response tokens.
        gradient_accumulation_steps: micro-batches per optimizer update.
        normalize_constant: the divisor of each row's sum.

    Returns:
        The loss, a detached scalar; `num_response_tokens` and `mean_nll` (nats per response token; nan without one).
    """
    per_example = masked_normalize(-policy_log_probs, response_mask, normalize_constant, dim=1)  # (batch,)
    loss = per_example.mean() / gradient_accumulation_steps
    loss.backward()
    with torch.no_grad():
        metadata = {
            "num_response_tokens": response_mask.bool().sum(),
            "mean_nll": -masked_mean(policy_log_probs, response_mask),
        }
    return loss.detach(), metadata


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and backward pass of one micro-batch (the handout, section 7.2).

    The per-token loss averaged over each response (`masked_mean`), then over the rows, divided by
    `gradient_accumulation_steps`. Micro-batches of equally many rows accumulate to the gradient of their union;
    `train_update` does the same for micro-batches of any size and for every length normalisation.

    Args:
        policy_log_probs: (batch, seq), nats, with a graph to go back through.
        response_mask: (batch, seq), 1 for response tokens; every row has one.
        gradient_accumulation_steps: micro-batches per optimizer update.
        loss_type, raw_rewards, advantages, old_log_probs, cliprange: see `losses.compute_policy_gradient_loss`.

    Returns:
        The loss, a detached scalar; the mean over the response tokens of each of the loss's statistics.
    """
    per_token, statistics = compute_policy_gradient_loss(
        policy_log_probs,
        loss_type,
        raw_rewards=raw_rewards,
        advantages=advantages,
        old_log_probs=old_log_probs,
        cliprange=cliprange,
    )
    loss = masked_mean(per_token, response_mask, dim=1).mean() / gradient_accumulation_steps
    loss.backward()
    metadata = {name: masked_mean(values.float(), response_mask) for name, values in statistics.items()}
    return loss.detach(), metadata


def negative_log_likelihood(log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective of supervised fine-tuning, -log p of each token."""
    return -log_probs, {}


def policy_gradient(
    log_probs: Tensor,
    batch: Batch,
    *,
    loss_type: LossType,
    cliprange: float | None = None,
    cliprange_high: float | None = None,
    kl_coef: float = 0.0,
    importance_cap: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective of GRPO and its relatives; bind the keywords with functools.partial.

    Args:
        log_probs: (batch, seq), of the policy being trained.
        batch: `advantages` (batch, 1), which for `no_baseline` are the raw rewards; `sampled_log_probs` (batch, seq), the
            sampler's; `old_log_probs` (batch, seq), the trainer's before the first update on these rollouts, where there was
            one: without them this is that update and they are `log_probs` itself, so that every ratio is exactly 1;
            `reference_log_probs` (batch, seq) with a `kl_coef`.
        loss_type, cliprange, cliprange_high: see `losses.compute_policy_gradient_loss`.
        kl_coef: times `losses.kl_penalty`, added to each token's loss; 0 needs no reference.
        importance_cap: multiplies each token's loss by `losses.importance_weights`; None does not.

    Returns:
        The per-token loss and statistics: `ratio` (new / old), `mismatch` (trainer's old minus sampler's log-probability),
        `position` in the response and its `length` (tokens), and, where they apply, `clipped`, `clipped_low`,
        `clipped_high`, `importance_weight`, `kl`.
    """
    old = batch.get("old_log_probs", log_probs.detach())
    loss, statistics = compute_policy_gradient_loss(
        log_probs,
        loss_type,
        raw_rewards=batch["advantages"],
        advantages=batch["advantages"],
        old_log_probs=old,
        cliprange=cliprange,
        cliprange_high=cliprange_high,
    )
    statistics.setdefault("ratio", (log_probs.detach() - old).exp())
    statistics["mismatch"] = old - batch["sampled_log_probs"]
    mask = batch["response_mask"]
    statistics["position"] = mask.cumsum(dim=1) - 1
    statistics["length"] = mask.sum(dim=1, keepdim=True).expand_as(mask)
    if importance_cap is not None:
        weights = importance_weights(old, batch["sampled_log_probs"], cap=importance_cap)
        loss = weights * loss
        statistics["importance_weight"] = weights
    if kl_coef:
        kl = kl_penalty(log_probs, batch["reference_log_probs"])
        loss = loss + kl_coef * kl
        statistics["kl"] = kl.detach()
    return loss, statistics


def train_update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    learning_rate: float,
    micro_batch_size: int,
    objective: Objective = negative_log_likelihood,
    max_grad_norm: float = 1.0,
    normalization: LengthNormalization = "token_mean",
    normalize_constant: float | None = None,
    temperature: float = 1.0,
    check: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """One optimizer update on `batch`.

    Rows with the same prompt are neighbours, so that it is computed once in a micro-batch (`tokens.computes_prefixes`); else rows of
    similar length are. The longest come first, so that a micro-batch too large for the device fails at once.
    An update whose loss or gradient is not finite is skipped: the weights and the optimizer's state stay as they were.
    The model's mode stays as it is. Dropout must be off in it, or the log-probabilities are not the policy's.

    Args:
        model: the policy; float32 weights, which compute in bfloat16 on a CUDA device (`autocast_context`).
        optimizer: over the model's parameters; any gradient left in them is dropped.
        batch: on any device: `tokens.Batch`, and what the objective reads, (batch, seq) or (batch, 1) each. Rows that are
            marked in `silent`, (batch, 1) bool, are known to add nothing to the gradient: they go through the model for
            their metrics only.
        learning_rate: of this update (`learning_rate_at`).
        micro_batch_size: rows that go through the model at once.
        objective: what is minimised.
        max_grad_norm: the gradient is scaled down to this norm; inf never clips.
        normalization: what the loss is divided by, see `losses.loss_denominators`.
        normalize_constant: for `masked_normalize`.
        temperature: divides the logits.
        check: called before each micro-batch; what it raises gives the update up, with the weights as they were.

    Returns:
        `loss/objective`      what was minimised
        `loss/denominator`    what a response token's loss was divided by, on average
        `loss/nll`            mean over the response tokens of -log p, nats
        `policy/entropy`      mean over the response tokens of the exact entropy, nats
        `optimizer/grad_norm` before clipping, of the update's whole gradient
        `optimizer/learning_rate`
        `update/skipped`      1.0 when the update was skipped, else 0.0
        `update/rows`, `update/tokens` (response tokens), `update/micro_batches`, `update/seconds`
        `update/computed`     tokens that went through the model's body: each prefix that rows of a micro-batch share, once
        `update/padding`      share of them that were padding (0 but for models with other than ordinary attention)
        `update/shared`       share of the rows' tokens, prompts included, that were computed with another row's
        and what `token_metrics` makes of the objective's statistics. All are those of the policy before the update.

    Raises:
        RlvrError: no row has a response token.
    """
    started = time.perf_counter()
    device = next(model.parameters()).device
    mask = batch["response_mask"].bool()
    num_tokens = int(mask.sum())
    if num_tokens == 0:
        raise RlvrError(
            f"No response token in this batch of {len(mask)} rows: there is nothing to train on.",
            "Look for empty responses in the training data.",
        )
    denominators = loss_denominators(mask, normalization=normalization, normalize_constant=normalize_constant)
    micro_batches = _micro_batches(batch, micro_batch_size, together=computes_prefixes(model))
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, -log p, entropy
    collected: dict[str, list[Tensor]] = {}
    computed = 0  # tokens that go through the model's body
    optimizer.zero_grad(set_to_none=True)
    for rows, width, learning in micro_batches:
        check()
        micro = _cut(batch, rows, width, device)
        wanted = micro["response_mask"]
        prefixes = wanted_prefixes(model, micro["input_ids"], wanted)
        computed += wanted.numel() if prefixes is None else len(prefixes.tokens)
        with torch.set_grad_enabled(learning), autocast_context(model):
            scores = get_response_log_probs(
                model,
                micro["input_ids"],
                micro["labels"],
                return_token_entropy=True,
                response_mask=wanted,
                temperature=temperature,
                prefixes=prefixes,
            )
        log_probs, entropy = scores["log_probs"], scores["token_entropy"].detach()
        per_token, statistics = objective(log_probs, micro)
        loss = masked_loss(per_token, wanted, denominators[rows].to(device))
        if learning:
            loss.backward()
        sums += torch.stack([loss.detach(), -log_probs.detach().sum(), entropy.sum()])  # both are 0 outside the mask
        for name, values in statistics.items():
            collected.setdefault(name, []).append(values[wanted.bool()])
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    objective_value, nll, entropy_sum, norm = [*sums.tolist(), float(grad_norm)]
    skipped = not (math.isfinite(objective_value) and math.isfinite(norm))
    if not skipped:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    real = int(row_lengths(mask).sum())
    return {
        "loss/objective": objective_value,
        "loss/denominator": float((denominators * mask).sum() / num_tokens),
        "loss/nll": nll / num_tokens,
        "policy/entropy": entropy_sum / num_tokens,
        **token_metrics({name: torch.cat(values) for name, values in collected.items()}),
        "optimizer/grad_norm": norm,
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


@contextlib.contextmanager
def explained_memory() -> Iterator[None]:
    """Turn the device's being full into the user's error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RlvrError(
            "The device has too little memory for this micro-batch.",
            "Take smaller ones, which changes no result: a higher --gradient-accumulation-steps, or a lower --micro-batch-size. "
            "Beside vLLM on one device: a lower --gpu-memory-utilization.",
        ) from error


def token_metrics(statistics: Mapping[str, Tensor]) -> dict[str, float]:
    """Metrics over an update's response tokens from the statistics of `policy_gradient`, (tokens,) each.

    Returns:
        `policy/ratio_mean`, `_min`, `_p01`, `_p99`, `_max`; `policy/clip_fraction`, `_low`, `_high`; `policy/kl`;
        `mismatch/logprob_mean_abs` and `_max_abs`, |trainer - sampler| in nats; `mismatch/ratio_mean`, `_p01`, `_p99`, `_max`,
        trainer over sampler; `mismatch/importance_weight_mean`; and the mean |trainer - sampler| of the tokens at positions 0,
        1 to 3, 4 to 15, ... as `mismatch/position/0`, `/1`, `/4`, `/16`, ..., and of those in responses of 1 to 3, 4 to 15, ...
        tokens as `mismatch/length/1`, `/4`, ...
    """
    metrics: dict[str, float] = {}
    for name, values in statistics.items():
        match name:
            case "ratio":
                metrics |= {f"policy/ratio_{k}": v for k, v in _spread(values).items()}
            case "mismatch":
                metrics["mismatch/logprob_mean_abs"] = float(values.abs().mean())
                metrics["mismatch/logprob_max_abs"] = float(values.abs().max())
                metrics |= {f"mismatch/ratio_{k}": v for k, v in _spread(values.exp()).items()}
                for where in statistics.keys() & {"position", "length"}:
                    means = _means_by_size(values.abs(), statistics[where])
                    metrics |= {f"mismatch/{where}/{start}": mean for start, mean in means.items()}
            case "importance_weight":
                metrics["mismatch/importance_weight_mean"] = float(values.mean())
            case "kl":
                metrics["policy/kl"] = float(values.mean())
            case "clipped" | "clipped_low" | "clipped_high":
                metrics[f"policy/{name.replace('clipped', 'clip_fraction')}"] = float(values.double().mean())
    return metrics


def score(
    model: PreTrainedModel,
    batch: Batch,
    *,
    micro_batch_size: int,
    temperature: float = 1.0,
    check: Callable[[], None] = lambda: None,
) -> Tensor:
    """Log-probabilities of the batch's responses, without a gradient.

    The rows are cut into micro-batches as `train_update` cuts them: for the same batch and weights these are, to the last
    bit on a CPU, the log-probabilities of its forward pass. `check` is called before each micro-batch.

    Returns:
        (batch, seq) on the CPU, nats; 0 outside the responses.
    """
    device = next(model.parameters()).device
    mask = batch["response_mask"].bool()
    scored: Tensor | None = None
    for rows, width, _ in _micro_batches(batch, micro_batch_size, together=computes_prefixes(model)):
        check()
        micro = _cut(batch, rows, width, device)
        with torch.inference_mode(), autocast_context(model):
            log_probs = get_response_log_probs(
                model,
                micro["input_ids"],
                micro["labels"],
                response_mask=micro["response_mask"],
                temperature=temperature,
            )["log_probs"].cpu()
        if scored is None:
            scored = torch.zeros(mask.shape, dtype=log_probs.dtype)
        scored[rows.cpu(), :width] = log_probs
    return torch.zeros(mask.shape) if scored is None else scored


def make_optimizer(
    model: PreTrainedModel,
    *,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
) -> torch.optim.AdamW:
    """AdamW over the parameters that want a gradient, in the parameters' own precision.

    Load the policy in float32: bfloat16 weights, of 8 bits, round most steps of a learning rate of 1e-6 to 1e-5 away.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = parameters[0].device.type in ("cuda", "cpu")
    return torch.optim.AdamW(parameters, lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=fused)


def autocast_context(model: PreTrainedModel) -> contextlib.AbstractContextManager[object]:
    """Compute in `autocast_dtype`, for training and for scoring alike."""
    dtype = autocast_dtype(model)
    return contextlib.nullcontext() if dtype is None else torch.autocast("cuda", dtype=dtype)


def learning_rate_at(
    step: int, *, peak: float, num_steps: int, warmup_steps: int = 0, schedule: Schedule = "constant"
) -> float:
    """The learning rate of update `step`, counted from 0.

    Linear over the first `warmup_steps` updates, which end at `peak`; then `peak` for good, or half a cosine
    down to 10 % of it at the last of the `num_steps` updates, and 10 % after that.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = min((step - warmup_steps) / max(num_steps - 1 - warmup_steps, 1), 1.0)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


@functools.lru_cache(maxsize=4)
def epoch_order(num_examples: int, *, seed: int, epoch: int) -> tuple[int, ...]:
    """A permutation of range(num_examples), a function of (num_examples, seed, epoch) alone.

    Sorted by a hash instead of drawn: no generator's state to save, and the same on every machine and version.
    """

    def key(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=16).digest()

    return tuple(sorted(range(num_examples), key=key))


def draw(num_examples: int, count: int, *, seed: int, start: int, exclude: Sequence[int] = ()) -> tuple[list[int], int]:
    """The next examples of an endless pass over a dataset, epoch after epoch, each in its own order.

    None is drawn twice in a call, also where an epoch ends within it.

    Args:
        num_examples: of the dataset.
        count: how many are wanted.
        start: how far the pass has come, from 0.
        exclude: indices to pass over.

    Returns:
        `count` indices, fewer when there are not as many left, and how far the pass has come.
    """
    seen, drawn = set(exclude) & set(range(num_examples)), []
    position = start
    while len(drawn) < count and len(seen) < num_examples:
        epoch, place = divmod(position, num_examples)
        index = epoch_order(num_examples, seed=seed, epoch=epoch)[place]
        position += 1
        if index not in seen:
            seen.add(index)
            drawn.append(index)
    return drawn, position


def batches(
    examples: Sequence[T], *, batch_size: int, seed: int, epoch: int, start: int = 0, drop_last: bool = False
) -> Iterator[list[T]]:
    """One epoch of `examples`, shuffled, in batches.

    Args:
        examples: the dataset.
        batch_size: examples per batch.
        seed, epoch: they and the number of examples fix the order.
        start: examples of this epoch that were used already. It counts examples, not batches: a run may go on with
            another batch size and still sees each example once per epoch.
        drop_last: what to do with a last batch that is not full: False yields it smaller, True leaves its examples out.
    """
    order = epoch_order(len(examples), seed=seed, epoch=epoch)[start:]
    for first in range(0, len(order), batch_size):
        batch = [examples[index] for index in order[first : first + batch_size]]
        if len(batch) == batch_size or not drop_last:
            yield batch


def rollout_tensors(rollouts: Sequence[Rollout], *, pad_id: int) -> Batch:
    """Rollouts as a batch to train on: the token ids as they were sampled, never tokenized again.

    Returns:
        `tokens.Batch` with `advantages` (batch, 1) and `sampled_log_probs` (batch, seq), 0 outside the responses; float32.
    """
    assert all(len(r.response_ids) == len(r.sampled_logprobs) for r in rollouts)
    batch = collate([r.prompt_ids for r in rollouts], [r.response_ids for r in rollouts], pad_id=pad_id)
    mask = batch["response_mask"]
    flat = torch.tensor([x for r in rollouts for x in r.sampled_logprobs], dtype=torch.float32)
    advantages = torch.tensor([[r.advantage or 0.0] for r in rollouts], dtype=torch.float32)
    return batch | {
        "advantages": advantages,
        "sampled_log_probs": torch.zeros(mask.shape).masked_scatter(mask, flat),
    }


def take(batch: Batch, rows: Sequence[int]) -> Batch:
    """Those rows of a batch, in that order."""
    return {name: tensor[list(rows)] for name, tensor in batch.items()}


def _cut(batch: Batch, rows: Tensor, width: int, device: torch.device) -> Batch:
    return {name: tensor[rows, :width].to(device) for name, tensor in batch.items()}


def _spread(values: Tensor) -> dict[str, float]:
    """Mean and quantiles. Not torch.quantile, which takes at most 2**24 values."""
    ordered = values.flatten().double().sort().values
    last = len(ordered) - 1
    places = {"min": 0.0, "p01": 0.01, "p99": 0.99, "max": 1.0}
    return {"mean": float(ordered.mean())} | {k: float(ordered[round(q * last)]) for k, q in places.items()}


def _means_by_size(values: Tensor, sizes: Tensor) -> dict[int, float]:
    """The mean of `values` in each bucket of `sizes`: 0, then powers of four, named by where they start."""
    means, start, end = {}, 0, 1
    while start <= int(sizes.max()):
        inside = (sizes >= start) & (sizes < end)
        if inside.any():
            means[start] = float(values[inside].mean())
        start, end = end, end * 4
    return means


def _micro_batches(batch: Batch, size: int, *, together: bool) -> list[tuple[Tensor, int, bool]]:
    """Row indices and width of each micro-batch, and whether it adds to the gradient: those that do first.

    Rows by falling length, those without a response token left out; with `together`, the rows of a prompt are neighbours. Of rows
    that are all `silent`, the first micro-batch counts as one that adds: its gradient of 0 is still one, and lets the optimizer's
    momentum go on.
    """
    mask = batch["response_mask"].bool()
    lengths, starts = row_lengths(mask).tolist(), mask.int().argmax(dim=1).tolist()
    ids = batch["input_ids"].cpu().numpy()
    silent = batch["silent"].flatten().tolist() if "silent" in batch else [False] * len(lengths)
    cuts: list[tuple[list[int], bool]] = []
    for learning in (True, False):
        prompts: dict[bytes, list[int]] = {}
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            if lengths[row] and silent[row] != learning:
                prompts.setdefault(ids[row, : starts[row] + 1].tobytes() if together else b"", []).append(row)
        rows = [row for of_prompt in prompts.values() for row in of_prompt]
        cuts += [(rows[first : first + size], learning) for first in range(0, len(rows), size)]
    return [
        (torch.tensor(rows, device=mask.device), max(lengths[row] for row in rows), learning or number == 0)
        for number, (rows, learning) in enumerate(cuts)
    ]
