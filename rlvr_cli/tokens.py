"""Token ids, and the log-probabilities and entropies that a model gives them.

Enters: text (SFT) or token ids as they were sampled (RL), and a causal language model of transformers.
Leaves: right-padded tensors with a mask on the response tokens; per-token log-probabilities and entropies in nats.

A batch is the dictionary of the handout: `input_ids`, `labels` and `response_mask`, each (batch, seq), where
`labels[b, t]` is the token that follows `input_ids[b, :t + 1]`. Rows are padded on the right, and a causal model cannot
see what is to the right of a token: no attention mask is needed, and no result depends on the padding's width or id.
"""

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlvr_cli.errors import RlvrError

Batch = dict[str, Tensor]


def tokenize_prompt_and_output(
    prompt_strs: list[str], output_strs: list[str], tokenizer: PreTrainedTokenizerBase
) -> Batch:
    """Tokenize prompts and outputs separately, concatenate them, mark the response tokens (the handout, section 4.2).

    Args:
        prompt_strs: one prompt per row.
        output_strs: one output per row; nothing is added to it, in particular no EOS.
        tokenizer: also says what to pad with, see `pad_id_of`.

    Returns:
        `input_ids` and `labels`, int64, and `response_mask`, bool, each (batch, max(prompt_and_output_lens) - 1).

    Raises:
        RlvrError: see `encode` and `pad_id_of`.
    """
    prompt_ids, output_ids = encode(prompt_strs, output_strs, tokenizer)
    return collate(prompt_ids, output_ids, pad_id=pad_id_of(tokenizer))


def encode(
    prompt_strs: list[str], output_strs: list[str], tokenizer: PreTrainedTokenizerBase, *, append_eos: bool = False
) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of prompts and of outputs, each tokenized on its own.

    A prompt gets the special tokens that its tokenizer puts there (some begin with BOS; Qwen's add none), an output
    gets none. For text data only: a sampled response is trained on as the ids that were sampled, because its text need
    not tokenize back to them.

    Args:
        prompt_strs: the prompts.
        output_strs: as many outputs.
        tokenizer: the model's.
        append_eos: whether each output that does not end with the EOS token gets one.

    Returns:
        The prompts' ids and the outputs' ids.

    Raises:
        RlvrError: a prompt has no token, so that nothing predicts its output's first one; or there is no EOS to append.
    """
    assert len(prompt_strs) == len(output_strs), (len(prompt_strs), len(output_strs))
    if not prompt_strs:
        return [], []
    prompt_ids = tokenizer(prompt_strs).input_ids
    empty = [row for row, ids in enumerate(prompt_ids) if not ids]
    if empty:
        raise RlvrError(
            f"Prompt {empty[0]} of {len(prompt_ids)} has no token: nothing predicts its response's first token.",
            "Give every example a prompt that is not empty.",
        )
    output_ids = tokenizer(output_strs, add_special_tokens=False).input_ids
    if append_eos:
        eos = tokenizer.eos_token_id
        if eos is None:
            raise RlvrError("The tokenizer has no EOS token to append.", "Train without appending EOS.")
        output_ids = [ids if ids[-1:] == [eos] else [*ids, eos] for ids in output_ids]
    return prompt_ids, output_ids


def pad_id_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's pad token, or EOS when it has none; RlvrError when it has neither."""
    pad_id: Any = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad_id is None:
        raise RlvrError("The tokenizer has neither a pad nor an EOS token.", "Set tokenizer.pad_token to any token.")
    return pad_id


def collate(prompt_ids: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]], *, pad_id: int) -> Batch:
    """Concatenate prompts and responses that are ids already, padded on the right to the longest row.

    Args:
        prompt_ids: one non-empty prompt per row.
        response_ids: one response per row; an empty one gives a row without a response token.
        pad_id: any id of the vocabulary; no result depends on it.

    Returns:
        `input_ids` and `labels`, int64, and `response_mask`, bool, each (batch, max(len(prompt) + len(response)) - 1).
        `response_mask` marks the response tokens in `labels`: the prompt's last token predicts the first of them.
    """
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompt_ids, response_ids, strict=True)]
    ids = torch.full((len(lengths), max(lengths)), pad_id, dtype=torch.int64)
    mask = torch.zeros((len(lengths), max(lengths) - 1), dtype=torch.bool)
    for row, (prompt, response) in enumerate(zip(prompt_ids, response_ids, strict=True)):
        assert len(prompt) > 0, f"row {row}: nothing predicts the first response token of an empty prompt"
        ids[row, : lengths[row]] = torch.tensor([*prompt, *response])
        mask[row, len(prompt) - 1 : lengths[row] - 1] = True
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask}


def compute_entropy(logits: Tensor) -> Tensor:
    """Entropy of the next-token distributions, in nats.

    Computed in float32 at least, from the log-softmax: no overflow, no cancellation between large logits, and a logit
    of -inf (a token that cannot be sampled) adds exactly 0, in the gradient too.

    Args:
        logits: (..., vocab), unnormalised.

    Returns:
        (...), float32 (float64 for float64 logits).
    """
    log_probs = torch.log_softmax(logits, dim=-1, dtype=_accumulation_dtype(logits.dtype))
    probs = log_probs.exp()
    return -(probs * log_probs.masked_fill(probs == 0, 0.0)).sum(dim=-1)


def get_response_log_probs(
    model: PreTrainedModel,
    input_ids: Tensor,
    labels: Tensor,
    return_token_entropy: bool = False,
    *,
    response_mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int = 1024,
) -> dict[str, Tensor]:
    """Log-probabilities of `labels` under the model, and optionally the entropies they were drawn from.

    The (batch, seq, vocab) logits never exist. The model's body gives hidden states; its head runs over the wanted
    positions only, `chunk_size` at a time, and again in the backward pass. Log-probabilities and entropies are float32
    (float64 for a float64 model), also under autocast, where the head's product of bfloat16 operands stays in float32.

    That needs a model whose logits are one linear map of its body's last hidden states. Where they are not (Gemma's
    soft capping, Cohere's and Granite's scaling) the model's own forward pass makes the full logits, and a warning says
    so.

    Args:
        model: on the device of the ids. Its mode is left as it is: with dropout active the result is random.
        input_ids: (batch, seq), padded on the right.
        labels: (batch, seq), the token that follows each position.
        return_token_entropy: whether to return `token_entropy`; it is differentiable too.
        response_mask: (batch, seq); positions outside it are not computed and come back as exactly 0. None: every
            position.
        temperature: divides the logits, as in sampling: log-probabilities are those of the distribution sampled from.
        chunk_size: positions whose logits are held at once; at the peak some three (chunk_size, vocab) float32 tensors.

    Returns:
        `log_probs`, and `token_entropy` when asked for, each (batch, seq).
    """
    assert temperature > 0, f"temperature {temperature}: a greedy policy has no log-probabilities"
    mask = torch.ones_like(labels, dtype=torch.bool) if response_mask is None else response_mask.bool()
    targets = labels[mask]  # (positions,)
    if _has_linear_head(model):
        hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[mask]  # (positions, hidden)
        head = model.get_output_embeddings()
        assert isinstance(head, nn.Linear)  # what `_has_linear_head` has found
        log_probs, entropy = _linear_log_probs(
            hidden, head.weight, head.bias, targets, temperature=temperature, chunk_size=chunk_size
        )
    else:
        logits = model(input_ids).logits[mask]  # (positions, vocab)
        logits = logits.to(_accumulation_dtype(logits.dtype)) / temperature
        log_probs = torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None]).squeeze(-1)
        entropy = compute_entropy(logits) if return_token_entropy else torch.empty(0)
    result = {"log_probs": _unmask(log_probs, mask)}
    if return_token_entropy:
        result["token_entropy"] = _unmask(entropy, mask)
    return result


def _unmask(values: Tensor, mask: Tensor) -> Tensor:
    """(positions,) -> the shape of the mask, 0 outside it."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


_linear_heads: weakref.WeakKeyDictionary[nn.Module, tuple[nn.Module | None, bool]] = weakref.WeakKeyDictionary()


def _has_linear_head(model: nn.Module) -> bool:
    """Whether the model's logits are `head(body(input_ids).last_hidden_state)`; found out once per model and head."""
    policy = model if isinstance(model, PreTrainedModel) else None
    head = policy.get_output_embeddings() if policy is not None else None
    known = _linear_heads.get(model)
    if known is None or known[0] is not head:
        known = (head, policy is not None and type(head) is nn.Linear and _probe_linear_head(policy, head))
        _linear_heads[model] = known
        if not known[1]:
            warnings.warn(
                f"The logits of {type(model).__name__} are not one linear map of its hidden states, so the logits of a "
                "whole micro-batch are held in memory at once: it may have to be smaller than for other models.",
                stacklevel=3,
            )
    return known[1]


@torch.no_grad()
def _probe_linear_head(model: PreTrainedModel, head: nn.Linear) -> bool:
    """Ask the model itself, instead of a list of architectures.

    One token goes through it. The head must be given exactly the body's last hidden states, and what the head returns
    must come back as the logits untouched; a planted output, spread over ±100, would show any cap, scale or offset.
    """
    seen: dict[str, Tensor | None] = {}

    def see_body(_module: nn.Module, _inputs: object, output: object) -> None:
        seen["body"] = getattr(output, "last_hidden_state", None)

    def plant(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        seen["input"] = inputs[0]
        spread = torch.linspace(-100, 100, output.shape[-1], device=output.device)
        seen["output"] = spread.to(output.dtype).expand_as(output).clone()
        return seen["output"].clone()  # the model may change its own in place

    body = model.base_model
    if body is model:
        return False
    hooks = [body.register_forward_hook(see_body), head.register_forward_hook(plant)]
    token = torch.zeros((1, 1), dtype=torch.int64, device=head.weight.device)
    devices = [token.device] if token.is_cuda else []
    try:
        with torch.random.fork_rng(devices):  # active dropout must not draw from the run's random numbers here
            logits = model(token, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    hidden, given, planted = seen.get("body"), seen.get("input"), seen.get("output")
    if hidden is None or given is None or planted is None:
        return False
    return torch.equal(hidden, given) and torch.equal(planted.to(logits.dtype), logits)


def _linear_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, temperature: float, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `labels`, and entropies, under softmax((hidden @ weight.T + bias) / temperature)."""
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    if not hidden.is_cuda:
        dtype = _accumulation_dtype(dtype)  # a CPU has no product of halves that is kept in float32
    return _LinearLogProbs.apply(hidden, weight, bias, labels, temperature, chunk_size, dtype)  # type: ignore[return-value]


class _LinearLogProbs(torch.autograd.Function):
    """`_linear_log_probs` in chunks of positions.

    With z = logits / temperature, p = softmax(z), l = log p, H = -sum p l, the backward pass makes z again, chunk by
    chunk: d(log-prob of y) / dz = onehot(y) - p, and dH / dz = -p (l + H).
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, temperature, chunk_size, dtype):
        with torch.autocast(hidden.device.type, enabled=False):
            operand = weight.to(dtype)
            log_probs = torch.empty(len(labels), dtype=_accumulation_dtype(dtype), device=hidden.device)
            entropy, normalizer = torch.empty_like(log_probs), torch.empty_like(log_probs)
            for start in range(0, len(labels), chunk_size):
                chunk = slice(start, start + chunk_size)
                z = _scaled_logits(hidden[chunk].to(dtype), operand, bias, temperature)  # (chunk, vocab)
                normalizer[chunk] = z.logsumexp(dim=-1)
                z -= normalizer[chunk, None]
                log_probs[chunk] = z.gather(-1, labels[chunk, None]).squeeze(-1)
                entropy[chunk] = -z.exp().mul_(z).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, bias, labels, normalizer, entropy)
        ctx.constants = temperature, chunk_size, dtype
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):  # type: ignore[override]
        hidden, weight, bias, labels, normalizer, entropy = ctx.saved_tensors
        temperature, chunk_size, dtype = ctx.constants
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(entropy)
        wide = _accumulation_dtype(dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if ctx.needs_input_grad[2] else None
        with torch.autocast(hidden.device.type, enabled=False):
            operand = weight.to(dtype)
            for start in range(0, len(labels), chunk_size):
                chunk = slice(start, start + chunk_size)
                inputs = hidden[chunk].to(dtype)
                z = _scaled_logits(inputs, operand, bias, temperature).sub_(normalizer[chunk, None])
                grad = z.exp()  # becomes the gradient by the logits, (chunk, vocab)
                if grad_entropy is None:
                    del z
                    grad *= -grad_log_probs[chunk, None]
                else:
                    z.add_(entropy[chunk, None]).mul_(grad_entropy[chunk, None]).add_(grad_log_probs[chunk, None])
                    grad.mul_(z).neg_()
                    del z
                grad.scatter_add_(-1, labels[chunk, None], grad_log_probs[chunk, None])
                grad /= temperature
                if grad_bias is not None:
                    grad_bias += grad.sum(dim=0)
                grad = grad.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[chunk] = _product(grad, operand)
                if grad_weight is not None and grad.dtype == grad_weight.dtype:
                    grad_weight.addmm_(grad.T, inputs)  # in place: its sum apart would be another (vocab, hidden)
                elif grad_weight is not None:
                    grad_weight += _product(grad.T, inputs)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _scaled_logits(inputs: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """(chunk, hidden) and (vocab, hidden) -> (chunk, vocab), float32 or float64."""
    logits = _product(inputs, weight.T)
    if bias is not None:
        logits += bias
    return logits.div_(temperature)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, not rounded to half precision: near 20, bfloat16 logits are 0.125 apart."""
    if a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)  # type: ignore[call-overload]
    return a @ b
