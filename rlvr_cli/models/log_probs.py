"""Log-probabilities and entropies of tokens under a model, in nats, computed in chunks and in float32.

Enters: a batch of token ids (`tokenization`) and a causal language model of transformers. Leaves: (batch, seq) tensors.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from rlvr_cli.models.compute.device import add_product, as_operand, operand_dtype, product
from rlvr_cli.models.compute.logits import (
    FLOOR,
    Statistics,
    Toward,
    accumulation_dtype,
    chunk_size_for,
    chunks,
    logits_gradient,
    places,
    scaled_logits,
    statistics,
)
from rlvr_cli.models.compute.onednn import rows_multiple
from rlvr_cli.models.compute.prefixes import Wanted, wanted_positions
from rlvr_cli.models.divergence import TeacherStates
from rlvr_cli.models.policy import Policy, as_policy

_KEPT_LOGITS = 5 * 2**24  # kept for the backward pass, which recomputes the others: 320 MiB


def compute_entropy(logits: Tensor) -> Tensor:
    """Entropy of the next-token distributions, in nats.

    Computed in float32 at least, from the log-softmax: no overflow, no cancellation between large logits, and a logit
    of -inf (a token that cannot be sampled) adds exactly 0, in the gradient too.

    Args:
        logits: (..., vocab), unnormalized.

    Returns:
        (...), float32 (float64 for float64 logits).
    """
    log_probs = torch.log_softmax(logits, dim=-1, dtype=accumulation_dtype(logits.dtype))
    probs = log_probs.exp()
    return -(probs * log_probs.masked_fill(probs == 0, 0.0)).sum(dim=-1)


def get_response_log_probs(
    model: PreTrainedModel | Policy,
    input_ids: Tensor,
    labels: Tensor,
    return_token_entropy: bool = False,
    *,
    response_mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    wanted: Wanted | None = None,
    teacher: TeacherStates | None = None,
) -> dict[str, Tensor]:
    """Compute the log-probabilities of `labels` under the model, and optionally the entropies of their distributions.

    The full (batch, seq, vocab) logits are never in memory. The model's body computes each shared prefix once and no
    padding (`prefixes.py`; a model without ordinary causal attention computes every row in full). Its head computes
    only the positions in `response_mask`, `chunk_size` vocabulary entries at a time, and most of the chunks again in
    the backward pass. Log-probabilities and entropies are float32 (float64 for a float64 model), also under autocast,
    where the head multiplies bfloat16 operands into a float32 result.

    This requires logits that are one linear map of the body's last hidden states. For other models (Gemma's soft
    capping, Cohere's and Granite's scaling) the model's own forward pass computes the full logits, and a warning says
    so.

    Args:
        model: a model or policy, on the device of the ids. Its mode is not changed: with active dropout the result is
            random.
        input_ids: (batch, seq), padded on the right.
        labels: (batch, seq), the token that follows each position.
        return_token_entropy: whether to return `token_entropy`; it is differentiable too.
        response_mask: (batch, seq); positions outside it are not computed and come back as exactly 0. None: every
            position.
        temperature: divides the logits, as in sampling: log-probabilities are those of the distribution sampled from.
        chunk_size: vocabulary entries per chunk; at the peak, two or three (positions, chunk_size) float32 tensors are
            held. None chooses a size at which each is a few MB (on a GPU a few hundred), or the whole vocabulary if it
            is small.
        wanted: the result of `wanted_in` for this batch, on its device, if it is known already.
        teacher: another model at the same positions.

    Returns:
        `log_probs`, `token_entropy` when asked for, `values` if the policy has a critic, and with a teacher `divergence` from it
        and its `teacher_log_probs` of the labels; each (batch, seq).
    """
    assert temperature > 0, f"temperature {temperature}: a greedy policy has no log-probabilities"
    mask = torch.ones_like(labels, dtype=torch.bool) if response_mask is None else response_mask.bool()
    policy = as_policy(model)
    positions = wanted or wanted_positions(input_ids, mask, shared=policy.shares_prefixes).to(labels.device)
    return policy.in_one_forward(
        lambda: _scores(
            policy,
            input_ids,
            labels,
            mask,
            positions,
            with_entropy=return_token_entropy,
            temperature=temperature,
            chunk_size=chunk_size,
            teacher=teacher,
        )
    )


def _scores(
    policy: Policy,
    input_ids: Tensor,
    labels: Tensor,
    mask: Tensor,
    wanted: Wanted,
    *,
    with_entropy: bool,
    temperature: float,
    chunk_size: int | None,
    teacher: TeacherStates | None,
) -> dict[str, Tensor]:
    """`get_response_log_probs`, within the model's forward pass."""
    targets = labels.flatten()[wanted.positions]  # (positions,)
    head, hidden, logits = policy.head(), None, None
    if head is not None or (policy.critic is not None and policy.critic.body is None):
        hidden = policy.hidden_states(input_ids, wanted)
    if head is not None and hidden is not None:
        log_probs, entropy = _linear_log_probs(
            hidden,
            head.weight,
            head.bias,
            targets,
            rounded=head.rounded,
            temperature=temperature,
            with_entropy=with_entropy,
            chunk_size=chunk_size,
            fused=head.fused,
        )
    else:
        logits = policy.forward(input_ids=input_ids).logits.flatten(0, 1)
        logits = logits.index_select(0, wanted.positions)  # (positions, vocab)
        scaled = logits.to(accumulation_dtype(logits.dtype)) / temperature
        log_probs = torch.log_softmax(scaled, dim=-1).gather(-1, targets[:, None]).squeeze(-1)
        entropy = compute_entropy(scaled) if with_entropy else None

    def placed(values: Tensor) -> Tensor:
        """(positions,) -> (batch, seq), 0 elsewhere."""
        return values.new_zeros(mask.numel()).index_copy(0, wanted.positions, values).view(mask.shape)

    result = {"log_probs": placed(log_probs)}
    if entropy is not None:
        result["token_entropy"] = placed(entropy)
    if (values := policy.values(input_ids, wanted, hidden)) is not None:
        result["values"] = placed(values)
    if teacher is not None:
        states = hidden if logits is None else logits
        assert states is not None
        compared = teacher.compared(states, head, targets, temperature=temperature, chunk_size=chunk_size)
        result |= {name: placed(values) for name, values in compared.items()}
    return result


def wanted_in(model: PreTrainedModel | Policy, input_ids: Tensor, response_mask: Tensor) -> Wanted:
    """Find, on the CPU, what `get_response_log_probs` computes for a batch; one on the CPU makes it wait for no device.

    Only for a pass in the policy's `compute_dtype`: rows may be packed.
    """
    policy = as_policy(model)
    multiple = rows_multiple(policy.compute_dtype, policy.device)
    ways = {"shared": policy.shares_prefixes, "packed": policy.packs_rows, "multiple": multiple}
    return wanted_positions(input_ids, response_mask, **ways)


def _linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    temperature: float,
    rounded: Tensor | None = None,
    with_entropy: bool = True,
    chunk_size: int | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of `labels`, and entropies, under softmax((hidden @ weight.T + bias) / temperature).

    Args:
        rounded: the weight in the precision of products, if that is not its own.
        fused: without a bias, compute what follows from the logits by `fused_logits`, and add the gradient of a weight that has a
            `rounded` one to its `grad`, if that is there: no other tensor of its size is needed.
    """
    chunk_size, dtype = min(chunk_size or chunk_size_for(hidden), len(weight)), operand_dtype(hidden)
    fused = fused and bias is None
    return _LinearLogProbs.apply(  # type: ignore[return-value]
        hidden, weight, bias, labels, temperature, with_entropy, chunk_size, dtype, rounded, fused
    )


def _passes(dtype: torch.dtype, *, fused: bool) -> tuple[Callable[..., Statistics], Callable[..., Tensor]]:
    """Return `logits.statistics` and `logits.logits_gradient` or, if `fused`, the same in one kernel each, with a gradient in `dtype`."""
    if not fused:
        return statistics, logits_gradient
    from rlvr_cli.models.compute import fused_logits  # it needs Triton

    return fused_logits.statistics, partial(fused_logits.logits_gradient, dtype=dtype)


class _LinearLogProbs(torch.autograd.Function):
    """`_linear_log_probs` in chunks of the vocabulary.

    Let z = logits / temperature, p = softmax(z), l = log p, H = -sum p l. The forward pass merges the normalizers and
    entropies of the chunks. The backward pass recomputes z, chunk by chunk, where it was not kept, and uses d(log-prob
    of y) / dz = onehot(y) - p and dH / dz = -p (l + H). Each row of the weight's gradient is written once, by its own
    chunk; with chunks of positions, each chunk would add to the whole gradient.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, temperature, with_entropy, chunk_size, dtype, rounded, fused):
        wide = accumulation_dtype(dtype)
        inputs = as_operand(hidden, dtype)
        multiplied = weight if rounded is None else rounded
        picked = torch.zeros(len(labels), dtype=wide, device=hidden.device)  # the labels' z
        normalizer = torch.full_like(picked, torch.finfo(wide).min)
        entropy = torch.zeros_like(picked) if with_entropy else None
        full = len(weight) // chunk_size if any(ctx.needs_input_grad) else 0
        room = min(_KEPT_LOGITS // max(len(labels) * chunk_size, 1), full)
        # For the first chunks: z less its shift at each position, and the shifts. One tensor each: many small ones
        # would lie between tensors that are freed, and fragment the memory.
        kept, shifts = picked.new_empty(room, len(labels), chunk_size), picked.new_empty(room, len(labels))
        statistics, _ = _passes(dtype, fused=fused)
        with torch.autocast(hidden.device.type, enabled=False):
            for number, chunk in enumerate(chunks(len(weight), chunk_size)):
                z = scaled_logits(inputs, as_operand(multiplied[chunk], dtype), bias, chunk, temperature)
                inside, place = places(labels, chunk)
                picked = torch.where(inside, z.gather(-1, place).squeeze(-1), picked)
                if bias is not None:  # a bias may be -inf
                    z.clamp_(min=FLOOR)
                shift, here, entropy_here = statistics(z, with_entropy=with_entropy)
                if number < room:
                    kept[number], shifts[number] = z, shift
                merged = torch.logaddexp(normalizer, here)
                if entropy is not None and entropy_here is not None:
                    log_before, log_here = normalizer - merged, here - merged  # log shares of the probability
                    entropy = log_before.exp() * (entropy - log_before) + log_here.exp() * (entropy_here - log_here)
                normalizer = merged
        ctx.save_for_backward(hidden, weight, bias, labels, normalizer, entropy, kept, shifts)
        ctx.constants, ctx.rounded = (temperature, chunk_size, dtype, fused), rounded
        ctx.parameter = weight if fused and rounded is not None and ctx.needs_input_grad[1] else None
        ctx.set_materialize_grads(False)
        return picked - normalizer, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):  # type: ignore[override]
        hidden, weight, bias, labels, normalizer, entropy, kept, shifts = ctx.saved_tensors
        temperature, chunk_size, dtype, fused = ctx.constants
        _, logits_gradient = _passes(dtype, fused=fused)
        inputs = as_operand(hidden, dtype)
        toward = Toward(
            torch.zeros_like(normalizer) if grad_log_probs is None else grad_log_probs / temperature,
            None if grad_entropy is None else (entropy, grad_entropy / -temperature),
        )
        grad_hidden = torch.zeros_like(hidden, dtype=accumulation_dtype(dtype)) if ctx.needs_input_grad[0] else None
        known_grad = None if ctx.parameter is None else ctx.parameter.grad
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] and known_grad is None else None
        grad_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for number, chunk in enumerate(chunks(len(weight), chunk_size)):
                operand = as_operand((weight if ctx.rounded is None else ctx.rounded)[chunk], dtype)
                label = places(labels, chunk)
                if number < len(kept):
                    grad = logits_gradient(kept[number], normalizer - shifts[number], toward, label, in_place=False)
                else:
                    z = scaled_logits(inputs, operand, bias, chunk, temperature)
                    grad = logits_gradient(z, normalizer, toward, label, in_place=True)
                if grad_bias is not None:
                    grad_bias[chunk] = grad.sum(dim=0)
                grad = as_operand(grad, dtype)
                if grad_hidden is not None and (fused or grad.dtype == grad_hidden.dtype):
                    add_product(grad_hidden, grad, operand)
                elif grad_hidden is not None:
                    grad_hidden += product(grad, operand)
                if known_grad is not None:
                    add_product(known_grad[chunk], grad.T, inputs)
                elif grad_weight is not None:
                    grad_weight[chunk] = product(grad.T, inputs)
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 7
