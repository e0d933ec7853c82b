"""How far a policy's next-token distributions are from a teacher's: KL divergences over the vocabulary, in chunks.

Enters: a frozen teacher (`Teacher`) and a micro-batch; then the policy's hidden states at the same positions. Leaves: the
divergence at each position, in nats, with its gradient. Only a few chunks of logits of both models are in memory at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedTokenizerBase

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.compute.device import as_operand, operand_dtype, product
from rlvr_cli.models.compute.logits import FLOOR, accumulation_dtype, chunk_size_for, chunks, places, scaled_logits
from rlvr_cli.models.compute.prefixes import Wanted
from rlvr_cli.models.policy import Head, Policy
from rlvr_cli.models.pretrained import load_end_tokens, load_tokenizer
from rlvr_cli.text import printable


@dataclass(frozen=True, eq=False)
class Teacher:
    """A frozen model that a policy is compared with, p of the policy, q of the teacher.

    Attributes:
        reverse: the divergence is KL(p || q), else KL(q || p).
    """

    policy: Policy
    reverse: bool

    def states(self, input_ids: Tensor, wanted: Wanted) -> "TeacherStates":
        """Run the teacher on a micro-batch, without a gradient; within its `rounded_weights` and `fused_kernels`.

        Args:
            input_ids: (batch, seq), padded on the right.
            wanted: the result of `log_probs.wanted_in` for the teacher, on the device of the ids.
        """
        head = self.policy.head()
        with torch.no_grad(), self.policy.autocast():
            if head is None:
                states = self.policy.forward(input_ids=input_ids).logits.flatten(0, 1)
                states = states.index_select(0, wanted.positions)
            else:
                states = self.policy.hidden_states(input_ids, wanted)
            return TeacherStates(_source(states, head), self.reverse)


def check_teacher(teacher: str, *, student: str) -> None:
    """Check, without loading weights, that two models have the same tokens, which end a response by the same ones.

    Raises:
        RlvrError: an id is another token, or only one of them ends a response with it; or as `load_tokenizer`.
    """
    own, others = load_tokenizer(student), load_tokenizer(teacher)
    if own.get_vocab() != others.get_vocab():
        number, ours, theirs = _first_difference(own.get_vocab(), others.get_vocab())
        raise RlvrError(
            f"Student and teacher have different vocabularies: token {number} is {ours} to the student, {theirs} to the teacher.",
            "Choose a teacher with the student's tokenizer, or fine-tune on the teacher's text: rlvr eval, filter, sft.",
        )
    ends, of_teacher = load_end_tokens(student, own), load_end_tokens(teacher, others)
    if ends != of_teacher:
        raise RlvrError(
            f"Responses of the student end with token {_listed(ends, own)}, those of the teacher with {_listed(of_teacher, own)}: the "
            "student would learn never to end them.",
            "Choose a teacher of the same kind, base or chat, or make eos_token_id the same in generation_config.json.",
        )


def _first_difference(own: Mapping[str, int], others: Mapping[str, int]) -> tuple[int, str, str]:
    """The lowest id that means different tokens, and both, quoted; `nothing` where there is none."""
    found = [{number: repr(printable(token)) for token, number in vocabulary.items()} for vocabulary in (own, others)]
    for number in sorted(found[0].keys() | found[1].keys()):
        ours, theirs = (tokens.get(number, "nothing") for tokens in found)
        if ours != theirs:
            return number, ours, theirs
    return -1, "several", "others"


def _listed(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return " or ".join(f"{i} ({printable(str(tokenizer.convert_ids_to_tokens(i)))})" for i in ids)


class _Source(NamedTuple):
    """What logits are computed from: hidden states and an output layer; without a layer, the logits themselves."""

    states: Tensor  # (positions, hidden), or (positions, vocabulary) without a weight
    weight: Tensor | None  # (vocabulary, hidden)
    bias: Tensor | None  # (vocabulary,)
    rounded: Tensor | None  # the weight in the precision of products
    dtype: torch.dtype  # of products

    @property
    def size(self) -> int:
        """The size of the vocabulary."""
        return self.states.shape[1] if self.weight is None else len(self.weight)

    def operand(self, chunk: slice) -> Tensor:
        """The weight of a chunk of the vocabulary, to be multiplied."""
        weight = self.weight if self.rounded is None else self.rounded
        assert weight is not None
        return as_operand(weight[chunk], self.dtype)

    def logits(self, chunk: slice, *, temperature: float) -> Tensor:
        """(positions, chunk) logits over the temperature, float32 or float64; -inf is replaced by a number."""
        if self.weight is None:
            logits = self.states[:, chunk].to(accumulation_dtype(self.dtype)) / temperature
        else:
            states = as_operand(self.states, self.dtype)
            logits = scaled_logits(states, self.operand(chunk), self.bias, chunk, temperature)
        return logits.clamp_(min=FLOOR)


def _source(states: Tensor, head: Head | None) -> _Source:
    if head is None:
        return _Source(states, None, None, None, states.dtype)
    return _Source(states, head.weight, head.bias, head.rounded, operand_dtype(states))


@dataclass(frozen=True, eq=False)
class TeacherStates:
    """What a teacher computes for the positions of a micro-batch."""

    source: _Source
    reverse: bool

    def compared(
        self, states: Tensor, head: Head | None, labels: Tensor, *, temperature: float, chunk_size: int | None = None
    ) -> dict[str, Tensor]:
        """Compare a policy with the teacher.

        Ids beyond the smaller of the two vocabularies, which pad a model's embedding, are left out, as if they had no probability.

        Args:
            states: (positions, hidden), or, without a head, (positions, vocabulary) logits.
            head: the policy's output layer.
            labels: (positions,), the sampled tokens.
            temperature: divides the logits of both.
            chunk_size: vocabulary entries computed at once.

        Returns:
            `divergence`, (positions,), nats, with its gradient; and `teacher_log_probs`, (positions,), of the labels, nats.
        """
        own = _source(states, head)
        size = min(own.size, self.source.size)
        chunk_size = min(chunk_size or chunk_size_for(states), size)
        divergence, teacher_log_probs = _Divergence.apply(  # type: ignore[misc]  (it returns a pair)
            own.states, own.weight, own.bias, own, self.source, labels, self.reverse, temperature, size, chunk_size
        )
        return {"divergence": divergence, "teacher_log_probs": teacher_log_probs}


class _Divergence(torch.autograd.Function):
    """`TeacherStates.compared` in chunks of the vocabulary.

    Of two distributions f and s, split into chunks with the shares F and S of their probabilities, KL(f || s) is the sum over the
    chunks of F (log F - log S + the divergence within the chunk). The forward pass adds chunk after chunk by this, so that nothing large
    cancels. The backward pass computes the logits again. With z the policy's logits over the temperature, dKL(p || q) / dz is
    p (log p - log q - KL), and dKL(q || p) / dz is p - q.
    """

    @staticmethod
    def forward(ctx: Any, states, weight, bias, own, teacher, labels, reverse, temperature, size, chunk_size):  # type: ignore[override]
        wide = accumulation_dtype(own.dtype)
        lowest = torch.finfo(wide).min
        divergence = torch.zeros(len(labels), dtype=wide, device=states.device)
        picked = torch.zeros_like(divergence)  # the teacher's logits of the labels
        normalizers = [torch.full_like(divergence, lowest) for _ in range(2)]  # of the policy, of the teacher
        with torch.autocast(states.device.type, enabled=False):
            for chunk in chunks(size, chunk_size):
                both = [source.logits(chunk, temperature=temperature).to(wide) for source in (own, teacher)]
                inside, place = places(labels, chunk)
                picked = torch.where(inside, both[1].gather(-1, place).squeeze(-1), picked)
                here = [logits.logsumexp(dim=-1) for logits in both]
                merged = [torch.logaddexp(*pair) for pair in zip(normalizers, here, strict=True)]
                log_before = [n - m for n, m in zip(normalizers, merged, strict=True)]  # log shares of the probability
                log_here = [n - m for n, m in zip(here, merged, strict=True)]
                log_within = [logits.sub_(n[:, None]) for logits, n in zip(both, here, strict=True)]
                if not reverse:
                    log_before, log_here, log_within = log_before[::-1], log_here[::-1], log_within[::-1]
                first, second = log_within
                within = (first.exp() * (first - second)).sum(dim=-1)
                divergence = log_before[0].exp() * (divergence + log_before[0] - log_before[1])
                divergence = divergence + log_here[0].exp() * (within + log_here[0] - log_here[1])
                normalizers = merged
        ctx.save_for_backward(states, weight, bias, teacher.states, *normalizers, divergence)
        held = {"states": None, "weight": None, "bias": None}
        ctx.sources = own._replace(**held), teacher._replace(states=None)
        ctx.constants = (reverse, temperature, size, chunk_size)
        teacher_log_probs = picked - normalizers[1]
        ctx.mark_non_differentiable(teacher_log_probs)
        return divergence, teacher_log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_divergence, _):  # type: ignore[override]
        states, weight, bias, teacher_states, *normalizers, divergence = ctx.saved_tensors
        reverse, temperature, size, chunk_size = ctx.constants
        own, teacher = ctx.sources
        own = own._replace(states=states, weight=weight, bias=bias)
        teacher = teacher._replace(states=teacher_states)
        needs_states, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_states = torch.zeros_like(states, dtype=divergence.dtype) if needs_states else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if needs_bias else None
        with torch.autocast(states.device.type, enabled=False):
            for chunk in chunks(size, chunk_size):
                p, q = (
                    source.logits(chunk, temperature=temperature).to(divergence.dtype).sub_(normalizer[:, None])
                    for source, normalizer in zip((own, teacher), normalizers, strict=True)
                )  # their logarithms
                grad = p.exp() * (p - q - divergence[:, None]) if reverse else p.exp() - q.exp()
                grad *= (grad_divergence / temperature)[:, None]
                if grad_bias is not None:
                    grad_bias[chunk] = grad.sum(dim=0)
                if weight is None:
                    if grad_states is not None:
                        grad_states[:, chunk] = grad
                    continue
                grad = as_operand(grad, own.dtype)
                if grad_states is not None:
                    grad_states += product(grad, own.operand(chunk))
                if grad_weight is not None:
                    grad_weight[chunk] = product(grad.T, as_operand(states, own.dtype))
        grad_states = None if grad_states is None else grad_states.to(states.dtype)
        return grad_states, grad_weight, grad_bias, *[None] * 7
