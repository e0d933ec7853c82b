"""How responses are sampled."""

from dataclasses import dataclass

from rlvr_cli.config.parsing.options import Provenance, flag, knob
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import SamplingParams

LEAST_TEMPERATURE = 1e-6  # above 0: logits that are divided by much less are no float32 any more


@dataclass(frozen=True)
class SamplingOptions(Provenance):
    sampling_temperature: float = knob(1.0, "Temperature; 0 is greedy.", group="Sampling", common=True, at_least=0)
    sampling_top_p: float = knob(
        1.0, "Nucleus sampling: sample from the smallest set of tokens with this total probability.", group="Sampling"
    )
    sampling_max_tokens: int = knob(
        1024, "Maximum response length in tokens.", group="Sampling", common=True, at_least=1
    )
    sampling_min_tokens: int = knob(
        4, "Minimum number of tokens before a response may end, also by a stop string.", group="Sampling", at_least=0
    )
    stop: tuple[str, ...] = knob(
        ("</answer>",),
        "Stop string: ends a response and is kept in it, but not within its first --sampling-min-tokens tokens; repeatable; '' for none.",
        group="Sampling",
    )

    @property
    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.sampling_temperature,
            top_p=self.sampling_top_p,
            max_tokens=self.sampling_max_tokens,
            min_tokens=self.sampling_min_tokens,
            stop=tuple(s for s in self.stop if s),
        )

    @property
    def eval_sampling_params(self) -> SamplingParams:
        """The sampling parameters for evaluations during training."""
        return self.sampling_params


def check_temperature(config: SamplingOptions, name: str) -> None:
    if 0 < (getattr(config, name) or 0) < LEAST_TEMPERATURE:
        raise RlvrError(
            f"{flag(name)} is {getattr(config, name)}.",
            f"It must be at least {LEAST_TEMPERATURE:g}, or 0, which takes the most probable token.",
        )


def check_sampling(config: SamplingOptions) -> None:
    check_temperature(config, "sampling_temperature")
    if not 0 < config.sampling_top_p <= 1:
        raise RlvrError(f"--sampling-top-p is {config.sampling_top_p}.", "It must be above 0 and at most 1.")
    if config.sampling_min_tokens > config.sampling_max_tokens:
        raise RlvrError(
            f"--sampling-min-tokens {config.sampling_min_tokens} exceeds --sampling-max-tokens {config.sampling_max_tokens}.",
            "Lower --sampling-min-tokens, or raise --sampling-max-tokens.",
        )
