"""Evaluations during training: of which questions, when, and how they are sampled."""

from dataclasses import dataclass, replace

from rlvr_cli.config.parsing.options import knob
from rlvr_cli.config.shared.sampling import SamplingOptions, check_temperature
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import SamplingParams


@dataclass(frozen=True)
class EvaluationOptions:
    eval_dataset: str = knob(
        "",
        "Evaluation questions. Empty: the evaluation split of a named dataset, else none.",
        group="Evaluation",
        common=True,
        completes="dataset",
    )
    eval_examples: int = knob(
        1024, "Questions per evaluation, the same each time.", group="Evaluation", common=True, at_least=1
    )
    eval_every: int = knob(
        0,
        "Updates between evaluations; 0: only before and after training.",
        group="Evaluation",
        common=True,
        at_least=0,
    )
    final_eval_examples: int | None = knob(
        None,
        "Questions in the last evaluation. Default: --eval-examples.",
        group="Evaluation",
        at_least=1,
    )


@dataclass(frozen=True)
class EvaluationSamplingOptions(SamplingOptions):
    eval_temperature: float | None = knob(
        None,
        "Temperature for evaluations. Default: --sampling-temperature.",
        group="Evaluation",
        at_least=0,
    )
    eval_top_p: float | None = knob(None, "Top-p for evaluations. Default: --sampling-top-p.", group="Evaluation")
    eval_max_tokens: int | None = knob(
        None,
        "Maximum response length in evaluations. Default: --sampling-max-tokens.",
        group="Evaluation",
        at_least=1,
    )
    eval_min_tokens: int | None = knob(
        None,
        "Minimum response length in evaluations. Default: --sampling-min-tokens.",
        group="Evaluation",
        at_least=0,
    )

    @property
    def eval_sampling_params(self) -> SamplingParams:
        given = {
            "temperature": self.eval_temperature,
            "top_p": self.eval_top_p,
            "max_tokens": self.eval_max_tokens,
            "min_tokens": self.eval_min_tokens,
        }
        return replace(self.sampling_params, **{k: v for k, v in given.items() if v is not None})


def check_evaluation_sampling(config: EvaluationSamplingOptions) -> None:
    check_temperature(config, "eval_temperature")
    held_out = config.eval_sampling_params
    if held_out.min_tokens > held_out.max_tokens:
        raise RlvrError(
            f"Evaluation responses need at least {held_out.min_tokens} tokens but may have at most {held_out.max_tokens}.",
            "Make --eval-min-tokens at most --eval-max-tokens.",
        )
    if not 0 < held_out.top_p <= 1:
        raise RlvrError(f"--eval-top-p is {config.eval_top_p}.", "It must be above 0 and at most 1.")
