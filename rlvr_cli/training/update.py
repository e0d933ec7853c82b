"""One optimizer update from a batch of tokens, and what surrounds it: objective, data order, learning rate, optimizer.

Enters: a model, an optimizer, a batch (`tokens.Batch`) and what is to be minimized. Leaves: the model after one update, and
its metrics.

The update does not depend on how the batch is cut: its denominators come from the whole batch, before the first
backward pass, and no row's result depends on what it is padded to.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import chain, compress

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.log_probs import get_response_log_probs, wanted_prefixes
from rlvr_cli.models.policy import Policy, as_policy
from rlvr_cli.models.tokenization import Batch, collate, row_lengths
from rlvr_cli.training.losses.inputs import loss_inputs
from rlvr_cli.training.losses.normalization import LengthNormalization, loss_denominators
from rlvr_cli.training.objectives import Objective, negative_log_likelihood, observed, reduced_loss, token_metrics
from rlvr_cli.types import Rollout


def train_update(
    model: Policy | PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    learning_rate: float,
    micro_batch_size: int,
    objective: Objective = negative_log_likelihood,
    skip_silent: bool = True,
    max_grad_norm: float = 1.0,
    normalization: LengthNormalization = "token_mean",
    normalize_constant: float | None = None,
    temperature: float = 1.0,
    check: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """One optimizer update on `batch`.

    Rows with the same prompt are neighbors, so that it is computed once in a micro-batch (`Policy.shares_prefixes`); else rows of
    similar length are. The longest come first, so that a micro-batch too large for the device fails at once.
    An update whose loss or gradient is not finite is skipped: the weights and the optimizer's state stay as they were.
    The model's mode stays as it is. Dropout must be off in it, or the log-probabilities are not the policy's.

    Args:
        model: the policy; float32 weights, which compute in bfloat16 on a CUDA device (`Policy.autocast`).
        optimizer: over the model's parameters; any gradient left in them is dropped.
        batch: on any device: `tokens.Batch`, and what the objective reads (`losses.loss_inputs`), (batch, seq) or (batch, 1)
            each. Rows that are marked in `silent`, (batch, 1) bool, go through the model after the others. Rows with the same
            number in `unit`, (batch, 1) int64, such as a pair, go through it in one micro-batch, in the order of the batch;
            without it each row is a unit.
        learning_rate: of this update (`learning_rate_at`).
        micro_batch_size: rows that go through the model at once; more only for a unit of more rows, which is one by itself.
        objective: what is minimized. The gradient of the entropies that it is given is computed only where it uses them.
        skip_silent: the silent rows are known to add nothing to the gradient, and leave out the backward pass.
        max_grad_norm: the gradient is scaled down to this norm; inf never clips.
        normalization: what a loss per token is divided by, see `losses.loss_denominators`. A loss per row is averaged over the rows
            that go through the model: all but those without a response token, unless another row of their unit has one.
        normalize_constant: for `masked_normalize`.
        temperature: divides the logits.
        check: called before each micro-batch; what it raises gives the update up, with the weights as they were.

    Returns:
        `loss/objective`      what was minimized
        `loss/denominator`    what a response token's loss, or else a row's, was divided by, on average
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
    policy = as_policy(model)
    device = policy.device
    mask = batch["response_mask"].bool()
    num_tokens = int(mask.sum())
    if num_tokens == 0:
        raise RlvrError(
            f"No response token in this batch of {len(mask)} rows: there is nothing to train on.",
            "Look for empty responses in the training data.",
        )
    denominators = loss_denominators(mask, normalization=normalization, normalize_constant=normalize_constant)
    micro_batches = _micro_batches(batch, micro_batch_size, together=policy.shares_prefixes)
    num_rows = sum(len(rows) for rows, _, _ in micro_batches)
    per_row = False
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, -log p, entropy
    collected: dict[str, list[Tensor]] = {}
    computed = 0  # tokens that go through the model's body
    optimizer.zero_grad(set_to_none=True)
    for rows, width, learning in micro_batches:
        check()
        micro = _cut(batch, rows, width, device)
        wanted = micro["response_mask"]
        prefixes = wanted_prefixes(policy, micro["input_ids"], wanted)
        computed += wanted.numel() if prefixes is None else len(prefixes.tokens)
        learning = learning or not skip_silent
        with torch.set_grad_enabled(learning), policy.autocast():
            scores = get_response_log_probs(
                policy,
                micro["input_ids"],
                micro["labels"],
                return_token_entropy=True,
                response_mask=wanted,
                temperature=temperature,
                prefixes=prefixes,
            )
        log_probs, entropy = scores["log_probs"], scores["token_entropy"]
        outputs = objective(loss_inputs(micro, log_probs=log_probs, entropy=entropy))
        loss = reduced_loss(outputs.loss, wanted, denominators=denominators[rows], num_rows=num_rows)
        per_row = outputs.loss.dim() == 1
        if learning:
            loss.backward()
        with torch.no_grad():  # both sums are 0 outside the mask
            sums += torch.stack([loss.detach(), -log_probs.sum(), entropy.sum()])
        for name, values in observed(outputs.statistics, wanted.bool()).items():
            collected.setdefault(name, []).append(values)
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.trainable_parameters().values(), max_grad_norm)
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
        "loss/denominator": float(num_rows) if per_row else float((denominators * mask).sum() / num_tokens),
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


def score(
    model: Policy | PreTrainedModel,
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
    policy = as_policy(model)
    device = policy.device
    mask = batch["response_mask"].bool()
    scored: Tensor | None = None
    for rows, width, _ in _micro_batches(batch, micro_batch_size, together=policy.shares_prefixes):
        check()
        micro = _cut(batch, rows, width, device)
        with torch.inference_mode(), policy.autocast():
            log_probs = get_response_log_probs(
                policy,
                micro["input_ids"],
                micro["labels"],
                response_mask=micro["response_mask"],
                temperature=temperature,
            )["log_probs"].cpu()
        if scored is None:
            scored = torch.zeros(mask.shape, dtype=log_probs.dtype)
        scored[rows.cpu(), :width] = log_probs
    return torch.zeros(mask.shape) if scored is None else scored


def rollout_tensors(rollouts: Sequence[Rollout], *, pad_id: int) -> Batch:
    """Rollouts as a batch to train on: the token ids as they were sampled, never tokenized again.

    What the policy did not sample (`Rollout.response_mask`) is read and not trained on: it is outside the batch's mask.

    Returns:
        `tokens.Batch` with `advantages` (batch, 1) and `sampled_log_probs` (batch, seq), 0 outside the mask; float32.
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


def take(batch: Batch, rows: Sequence[int]) -> Batch:
    """Those rows of a batch, in that order."""
    return {name: tensor[list(rows)] for name, tensor in batch.items()}


def _cut(batch: Batch, rows: Tensor, width: int, device: torch.device) -> Batch:
    return {name: tensor[rows, :width].to(device) for name, tensor in batch.items()}


def _micro_batches(batch: Batch, size: int, *, together: bool) -> list[tuple[Tensor, int, bool]]:
    """Row indices and width of each micro-batch, and whether it adds to the gradient: those that do first.

    Units, of which none is cut, by the falling length of their longest row, those without a response token left out; with `together`,
    the units of a prompt (that of their first row) are neighbors. Of rows that are all `silent`, the first micro-batch counts as one
    that adds: its gradient of 0 is still one, and lets the optimizer's momentum go on.
    """
    mask = batch["response_mask"].bool()
    lengths, starts = row_lengths(mask).tolist(), mask.int().argmax(dim=1).tolist()
    ids = batch["input_ids"].cpu().numpy()
    silent = batch["silent"].flatten().tolist() if "silent" in batch else [False] * len(lengths)
    units: dict[int, list[int]] = {}
    for row, unit in enumerate(batch["unit"].flatten().tolist() if "unit" in batch else range(len(lengths))):
        units.setdefault(unit, []).append(row)
    longest = {unit: max(lengths[row] for row in rows) for unit, rows in units.items()}
    by_length = sorted((unit for unit in units if longest[unit]), key=lambda unit: -longest[unit])
    cuts: list[tuple[list[int], bool]] = []
    for learning in (True, False):
        prompts: dict[bytes, list[list[int]]] = {}
        for rows in (units[unit] for unit in by_length):
            if all(silent[row] for row in rows) != learning:
                prompt = ids[rows[0], : starts[rows[0]] + 1].tobytes() if together else b""
                prompts.setdefault(prompt, []).append(rows)
        cut: list[int] = []
        for rows in (rows for of_prompt in prompts.values() for rows in of_prompt):
            if cut and len(cut) + len(rows) > size:
                cuts.append((cut, learning))
                cut = []
            cut = cut + rows
        cuts += [(cut, learning)] if cut else []
    return [
        (torch.tensor(rows, device=mask.device), max(lengths[row] for row in rows), learning or number == 0)
        for number, (rows, learning) in enumerate(cuts)
    ]
