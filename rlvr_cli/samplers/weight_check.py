"""Proof that an engine serves a model's weights: its own greedy answers, scored by a plain forward pass of the model.

Enters: an engine's greedy answers to fixed prompts, and the model whose weights it was given. Leaves: a `Probe`, and an
error where engine and model disagree. No random generator is drawn from, and the model keeps its modes.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rlvr_cli.errors import RlvrError
from rlvr_cli.types import Completion, SamplingParams

if TYPE_CHECKING:  # transformers is not imported before vLLM, which says what is wrong where neither can be
    from rlvr_cli.models.policy import Policy

# Largest mean |engine - torch| of the greedy log-probabilities in nats, by the coarser precision of the two. It tells
# wrong weights (nats) from rounding (3e-6 measured in float32, 0.07 in bfloat16 on logits spread far wider than usual).
PROBE_BOUND = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 3e-1}
_FIXED = 2, 16  # rows and tokens of `fixed_logprobs`
PROBE_MOVED = 1e-3  # nats by which a model must have moved for an engine that did not move at all to be called stale


@dataclass(frozen=True, slots=True)
class Probe:
    """Greedy answers to the probe's prompts, with the log-probabilities (nats) that the engine and torch give them."""

    tokens: tuple[tuple[int, ...], ...]
    engine: tuple[float, ...]
    torch: tuple[float, ...]

    def gap(self) -> float:
        """Mean |engine - torch|."""
        return sum(abs(a - b) for a, b in zip(self.engine, self.torch, strict=True)) / len(self.engine)

    def movement(self, earlier: "Probe") -> float:
        """The largest change of torch's log-probabilities since."""
        return max(abs(a - b) for a, b in zip(self.torch, earlier.torch, strict=True))

    def repeats(self, earlier: "Probe") -> bool:
        """Whether the engine answers as before to the last bit, although the model has moved."""
        same = self.tokens == earlier.tokens and self.engine == earlier.engine
        return same and self.movement(earlier) > PROBE_MOVED


def probe_params(max_tokens: int) -> SamplingParams:
    """How an engine is to answer the probe's prompts; EOS must not end an answer either."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, min_tokens=0, stop=())


def probe_prompts(policy: "Policy", tokenizer: Any, *, count: int, length: int) -> list[list[int]]:
    """The same `count` prompts of `length` ids each time."""
    vocabulary = min(policy.vocabulary_size, len(tokenizer))
    draw = random.Random(0)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def take_probe(policy: "Policy", answers: Iterable[Completion], *, autocast_dtype: torch.dtype | None = None) -> Probe:
    """Score an engine's answers, in whatever order they came, by one forward pass of `policy`, without a cache.

    Args:
        answers: to prompts of one length, and all of one length themselves.
        autocast_dtype: run the model under `torch.autocast` in this precision.
    """
    answers = sorted(answers, key=lambda c: c.request_index)
    ids = torch.tensor([c.prompt_ids + c.token_ids for c in answers], device=policy.device)  # (prompts, tokens)
    start = len(answers[0].prompt_ids)
    return Probe(
        tokens=tuple(c.token_ids for c in answers),
        engine=tuple(x for c in answers for x in c.logprobs),
        torch=_logprobs(policy, ids, start=start, autocast_dtype=autocast_dtype),
    )


def _logprobs(
    policy: "Policy", ids: torch.Tensor, *, start: int, autocast_dtype: torch.dtype | None
) -> tuple[float, ...]:
    """Log-probabilities of ids[:, start:], row after row."""
    autocast = torch.autocast(policy.device.type, autocast_dtype, enabled=autocast_dtype is not None)
    # Not `no_grad`: where the caller has autocast on, that would read the copies of the weights that autocast keeps.
    with policy.evaluating(), torch.inference_mode(), autocast:
        logits = policy.forward(input_ids=ids, use_cache=False).logits[:, start - 1 : -1]  # (rows, tokens, vocabulary)
    return tuple(logits.float().log_softmax(-1).gather(-1, ids[:, start:, None]).flatten().tolist())


def fixed_logprobs(policy: "Policy") -> tuple[float, ...]:
    """What a plain forward pass of `policy`, without autocast, makes of fixed token ids, nats: of the same weights the same."""
    draw = random.Random(0)
    ids = tuple(tuple(draw.randrange(policy.vocabulary_size) for _ in range(_FIXED[1])) for _ in range(_FIXED[0]))
    return _logprobs(policy, torch.tensor(ids, device=policy.device), start=1, autocast_dtype=None)


def prove(
    probe: Probe, earlier: Probe | None, *, precisions: Iterable[str], version: int, served: int, way_out: str
) -> None:
    """Do nothing if the engine serves the model's weights.

    They must agree within `PROBE_BOUND`; and where the model moved by more than `PROBE_MOVED` since `earlier`, an engine
    that repeats its old log-probabilities to the last bit is stale however small the step was: that tells old weights
    from new ones in bfloat16 at small learning rates.

    Args:
        earlier: the probe of the last load, if there was one.
        precisions: those that engine and model compute in. One finer than float32 is held to its bound.
        version, served: of the model, and of the weights that the engine had before.
        way_out: the hint of the error.

    Raises:
        RlvrError: it does not.
    """
    bound, precision = max((PROBE_BOUND.get(p, PROBE_BOUND["float32"]), p) for p in precisions)
    if not probe.gap() <= bound:  # NaN fails too
        raise RlvrError(
            f"The engine does not serve the model's weights (version {version}): greedy log-probabilities differ by "
            f"{probe.gap():.2g} nats on average, and the bound for {precision} is {bound:g}.",
            way_out,
        )
    if earlier is not None and probe.repeats(earlier):
        raise RlvrError(
            f"The engine still serves version {served}: its log-probabilities are the old ones to the last bit, "
            f"although the model's have moved by up to {probe.movement(earlier):.2g} nats.",
            way_out,
        )
