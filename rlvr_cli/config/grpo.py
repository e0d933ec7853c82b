"""The options of `rlvr grpo`; the defaults are the handout's."""

from dataclasses import dataclass
from typing import Literal

from rlvr_cli.config.options import FileFunction, divides, knob
from rlvr_cli.config.shared import (
    EvaluationSamplingOptions,
    LengthNormalization,
    TrainingConfig,
    TrainingEngineOptions,
    check_training,
)
from rlvr_cli.config.sources import is_partial
from rlvr_cli.errors import RlvrError

LossType = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip"]
ImportanceCorrection = Literal["auto", "none", "truncated"]
Overlong = Literal["none", "mask", "soft_punish"]


@dataclass(frozen=True)
class GrpoConfig(TrainingEngineOptions, EvaluationSamplingOptions, TrainingConfig):
    """Policy gradient on groups of graded responses: GRPO, its ablations and variants (handout, algorithm 3).

    Examples:
        rlvr grpo --preset quickstart --model runs/q0-sft/model --n-grpo-steps 40 --run my-grpo
        rlvr grpo --preset cs336 --model Qwen/Qwen2.5-Math-1.5B --dataset gsm8k --loss-type grpo_clip --dry-run
    """

    dataset: str = knob(
        "arithmetic", "Training questions: as for rlvr eval.", group="Data", common=True, completes="dataset"
    )
    n_grpo_steps: int = knob(
        200, "Number of rollout batches.", group="Algorithm", common=True, free_on_resume=True, at_least=1
    )
    rollout_batch_size: int = knob(
        256,
        "Responses per rollout batch: number of questions times --group-size.",
        group="Algorithm",
        common=True,
        at_least=1,
    )
    group_size: int = knob(8, "Responses per question.", group="Algorithm", common=True, at_least=1)
    epochs_per_rollout_batch: int = knob(
        1,
        "Passes over each rollout batch; 1 for on-policy training.",
        group="Algorithm",
        common=True,
        at_least=1,
    )
    train_batch_size: int = knob(
        256,
        "Responses per update; --rollout-batch-size for on-policy training.",
        group="Algorithm",
        common=True,
        at_least=1,
    )
    gradient_accumulation_steps: int = knob(
        128,
        "Micro-batches per update: --train-batch-size / micro-batch size. Does not change the result.",
        group="Optimization",
        common=True,
        free_on_resume=True,
        at_least=1,
    )
    loss_type: LossType | FileFunction = knob(
        "reinforce_with_baseline",
        "Policy-gradient loss, or a function of your own; --dry-run shows the formula.",
        group="Algorithm",
        common=True,
    )
    use_std_normalization: bool = knob(
        True, "Divide advantages by the standard deviation of their group.", group="Algorithm", common=True
    )
    advantage_eps: float = knob(
        1e-6, "Added to the standard deviation that divides the advantages.", group="Algorithm", at_least=0
    )
    cliprange: float = knob(
        0.2, "grpo_clip: clip the probability ratio to 1 +- this value.", group="Algorithm", common=True, above=0
    )
    cliprange_high: float | None = knob(
        None,
        "grpo_clip: separate upper clip range (DAPO's clip-higher). Default: --cliprange.",
        group="Algorithm",
        above=0,
    )
    length_normalization: LengthNormalization = knob(
        "masked_mean",
        "Divisor of the summed loss: masked_mean (each response's length, then the number of responses), masked_normalize "
        "(--normalize-constant, then the number of responses), token_mean (response tokens in the update).",
        group="Algorithm",
        common=True,
    )
    normalize_constant: float | None = knob(
        None, "Divisor for masked_normalize. Default: --sampling-max-tokens.", group="Algorithm", above=0
    )
    kl_coef: float = knob(
        0.0,
        "Weight of the KL penalty (k3) to the initial model; 0 loads no reference model.",
        group="Algorithm",
        at_least=0,
    )
    async_steps: int = knob(
        0, "1: a second process samples the next batch during training, with weights one batch old; 0: sample and train in turn.", group="Algorithm"
    )  # fmt: skip
    importance_correction: ImportanceCorrection = knob(
        "auto",
        "Weight tokens by trainer / sampler probability: none, or truncated at --importance-cap. auto: truncated with --async-steps 1, else none.",
        group="Algorithm",
    )
    importance_cap: float = knob(2.0, "Upper bound of the importance weights.", group="Algorithm", above=0)
    dynamic_sampling: bool = knob(
        False,
        "Sample further questions until every group in the batch has differing rewards (DAPO); counts the extra rollouts.",
        group="Algorithm",
    )
    max_sampling_rounds: int = knob(10, "Maximum rounds of dynamic sampling per batch.", group="Algorithm", at_least=1)
    overlong: Overlong = knob(
        "none",
        "Handling of responses cut at the length limit: none (as graded), mask (no loss), soft_punish (DAPO: a penalty that grows over the last "
        "--overlong-buffer tokens).",
        group="Algorithm",
    )
    overlong_buffer: int | None = knob(
        None,
        "soft_punish: tokens before the limit. Default: a fifth of --sampling-max-tokens.",
        group="Algorithm",
        at_least=1,
    )
    eval_every: int = knob(
        10,
        "Updates between evaluations; 0: only before and after training.",
        group="Evaluation",
        common=True,
        at_least=0,
    )

    @property
    def n_prompts_per_rollout_batch(self) -> int:
        return self.rollout_batch_size // self.group_size

    @property
    def micro_train_batch_size(self) -> int:
        return self.train_batch_size // self.gradient_accumulation_steps

    @property
    def updates_per_rollout_batch(self) -> int:
        return self.epochs_per_rollout_batch * self.rollout_batch_size // self.train_batch_size

    @property
    def on_policy(self) -> bool:
        return self.updates_per_rollout_batch == 1

    @property
    def importance_truncation(self) -> float | None:
        """The upper bound of the importance weights; None without importance correction."""
        wanted = self.importance_correction == "truncated" or (
            self.importance_correction == "auto" and self.async_steps
        )
        return self.importance_cap if wanted else None

    @property
    def masked_normalize_constant(self) -> float | None:
        """The divisor of masked_normalize; None for the other normalizations."""
        if self.length_normalization != "masked_normalize":
            return None
        return self.normalize_constant or float(self.sampling_max_tokens)

    def __post_init__(self) -> None:
        if is_partial(self):
            return
        check_training(self)
        if self.async_steps not in (0, 1):
            raise RlvrError(
                f"--async-steps is {self.async_steps}.",
                "Use 0 to sample and train in turn, or 1 to sample the next batch during training, with weights one batch old.",
            )
        divides(self, "group_size", "rollout_batch_size")
        divides(self, "train_batch_size", "rollout_batch_size")
        divides(self, "gradient_accumulation_steps", "train_batch_size")
        if self.train_batch_size < self.group_size:
            raise RlvrError(
                f"--train-batch-size {self.train_batch_size} is smaller than --group-size {self.group_size}.",
                f"Use at least {self.group_size}.",
            )
        if self.sampling_temperature == 0:
            raise RlvrError(
                "--sampling-temperature 0 makes all responses of a group identical, so every advantage is 0.",
                "Use 1.",
            )
        if (self.overlong_buffer or 1) > self.sampling_max_tokens:
            raise RlvrError(
                f"--overlong-buffer {self.overlong_buffer} exceeds --sampling-max-tokens {self.sampling_max_tokens}.",
                "Lower it, or leave it out for a fifth of --sampling-max-tokens.",
            )


def overlong_buffer(given: int | None, *, max_tokens: int) -> int:
    """Return the number of tokens before the length limit over which soft_punish grows: `given`, else a fifth of `max_tokens`."""
    return given or max(max_tokens // 5, 1)
