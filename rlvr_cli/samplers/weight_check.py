"""Check that an engine serves a model's weights: its greedy answers are scored by a plain forward pass of the model.

Enters: an engine's greedy answers to fixed prompts, and the model whose weights it was given. Leaves: a `Probe`, and an
error if engine and model disagree. No global random generator is used, and the model keeps its modes.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlvr_cli.errors import RlvrError
from rlvr_cli.types import Completion, SamplingParams

if TYPE_CHECKING:  # vLLM must be imported before transformers: its error is the clearer one if both fail
    from rlvr_cli.models.policy import Policy

# Largest mean |engine - torch| of the greedy log-probabilities in nats, by the coarser precision of the two. It
# separates wrong weights (whole nats) from rounding (3e-6 measured in float32, 0.07 in bfloat16 on logits spread far
# wider than usual).
PROBE_BOUND = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 3e-1}
_FIXED = 2, 16  # rows and tokens of `fixed_logprobs`
PROBE_MOVED = 1e-3  # nats: an engine that did not move at all is stale if the model moved by more


@dataclass(frozen=True, slots=True)
class Probe:
    """Greedy answers to the probe's prompts, with the log-probabilities (nats) that the engine and torch give them."""

    tokens: tuple[tuple[int, ...], ...]
    engine_logprobs: tuple[float, ...]
    torch_logprobs: tuple[float, ...]

    def gap(self) -> float:
        """Mean |engine - torch|."""
        pairs = zip(self.engine_logprobs, self.torch_logprobs, strict=True)
        return sum(abs(a - b) for a, b in pairs) / len(self.engine_logprobs)

    def movement(self, earlier: "Probe") -> float:
        """The largest change of torch's log-probabilities since `earlier`."""
        return max(abs(a - b) for a, b in zip(self.torch_logprobs, earlier.torch_logprobs, strict=True))

    def repeats(self, earlier: "Probe") -> bool:
        """Whether the engine's answers are bit-identical to the earlier ones although the model has moved."""
        same = self.tokens == earlier.tokens and self.engine_logprobs == earlier.engine_logprobs
        return same and self.movement(earlier) > PROBE_MOVED


def probe_params(max_tokens: int) -> SamplingParams:
    """Return the sampling parameters of the probe; the engine must also not end an answer at EOS."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, min_tokens=0, stop=())


def probe_prompts(vocabulary: int, *, count: int, length: int) -> list[list[int]]:
    """Return `count` prompts of `length` ids below `vocabulary`, the same ones at every call."""
    draw = random.Random(0)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def take_probe(policy: "Policy", answers: Iterable[Completion], *, autocast: bool = False) -> Probe:
    """Score an engine's answers, in any order, by one forward pass of `policy` without a cache.

    Args:
        answers: all of the same length, to prompts of the same length.
        autocast: compute in the `compute_dtype` of the policy, instead of the precision of its weights.
    """
    answers = sorted(answers, key=lambda c: c.request_index)
    ids = torch.tensor([c.prompt_ids + c.token_ids for c in answers], device=policy.device)  # (prompts, tokens)
    start = len(answers[0].prompt_ids)
    return Probe(
        tokens=tuple(c.token_ids for c in answers),
        engine_logprobs=tuple(x for c in answers for x in c.logprobs),
        torch_logprobs=_logprobs(policy, ids, start=start, autocast=autocast),
    )


def _logprobs(policy: "Policy", ids: torch.Tensor, *, start: int, autocast: bool) -> tuple[float, ...]:
    """Return the log-probabilities of ids[:, start:], row after row."""
    # Not `no_grad`: if the caller has autocast on, that would read the stale copies of weights in autocast's cache.
    with policy.on_its_device(), policy.evaluating(), torch.inference_mode(), policy.autocast(enabled=autocast):
        logits = policy.forward(input_ids=ids, use_cache=False).logits[:, start - 1 : -1]  # (rows, tokens, vocabulary)
        return tuple(logits.float().log_softmax(-1).gather(-1, ids[:, start:, None]).flatten().tolist())


def fixed_logprobs(policy: "Policy") -> tuple[float, ...]:
    """Score fixed token ids by a plain forward pass without autocast, in nats; equal weights give equal values."""
    draw = random.Random(0)
    ids = tuple(tuple(draw.randrange(policy.vocabulary_size) for _ in range(_FIXED[1])) for _ in range(_FIXED[0]))
    return _logprobs(policy, torch.tensor(ids, device=policy.device), start=1, autocast=False)


def verify_weights(
    probe: Probe, earlier: Probe | None, *, precisions: Iterable[str], version: int, served_version: int, hint: str
) -> None:
    """Raise an error unless the engine serves the model's weights.

    Their log-probabilities must agree within `PROBE_BOUND`. If the model moved by more than `PROBE_MOVED` since
    `earlier`, the engine must also have moved: bit-identical log-probabilities reveal old weights even in bfloat16 at
    small learning rates, where the bound is too coarse.

    Args:
        earlier: the probe of the last load, if there was one.
        precisions: those in which engine and model compute. Precisions finer than float32 use the bound of float32.
        version, served_version: the version of the model's weights, and that of the weights that the engine had before.
        hint: the hint of the error.

    Raises:
        RlvrError: the engine does not serve the model's weights.
    """
    bound, precision = max((PROBE_BOUND.get(p, PROBE_BOUND["float32"]), p) for p in precisions)
    if not probe.gap() <= bound:  # NaN fails too
        raise RlvrError(
            f"The engine does not serve the model's weights (version {version}): greedy log-probabilities differ by "
            f"{probe.gap():.2g} nats on average, and the bound for {precision} is {bound:g}.",
            hint,
        )
    if earlier is not None and probe.repeats(earlier):
        raise RlvrError(
            f"The engine still serves version {served_version}: its log-probabilities are bit-identical to the old "
            f"ones, although the model's have moved by up to {probe.movement(earlier):.2g} nats.",
            hint,
        )
