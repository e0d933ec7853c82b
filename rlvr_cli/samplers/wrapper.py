"""A sampler around a sampler: what its responses are made of are parts that the other one samples.

Enters: a sampler. Leaves: one with the same weights, whose `sample` a subclass defines; seeds and entropies of the parts.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from rlvr_cli.types import Completion, Sampler


class SamplerWrapper:
    """All of a `types.Sampler` but `sample`, which asks the inner sampler."""

    arrived = ()
    worked_seconds = None

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.engine = sampler.engine

    @property
    def seeding(self) -> str:
        return self._sampler.seeding

    @property
    def policy_version(self) -> int:
        return self._sampler.policy_version

    @property
    def notes(self) -> Sequence[str]:
        return self._sampler.notes

    def load_weights(self, policy: Any, policy_version: int) -> None:
        self._sampler.load_weights(policy, policy_version)

    def sleep(self) -> None:
        self._sampler.sleep()

    def close(self) -> None:
        self._sampler.close()


def seed_of_part(seed: int, part: str) -> int:
    """The seed of a later part of a sample, which must not repeat the draws of an earlier one."""
    return int.from_bytes(hashlib.blake2b(f"{part} {seed}".encode(), digest_size=8).digest(), "big") >> 1


def mean_entropy(parts: Iterable[Completion]) -> float | None:
    """The mean entropy over the tokens of all parts; None if that of a part is not known, or there are no tokens."""
    sampled = [(part.mean_entropy, part.num_tokens) for part in parts if part.num_tokens]
    known = [(entropy, tokens) for entropy, tokens in sampled if entropy is not None]
    if not known or len(known) < len(sampled):
        return None
    return sum(entropy * tokens for entropy, tokens in known) / sum(tokens for _, tokens in known)
