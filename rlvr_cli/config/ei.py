"""The options of `rlvr ei`."""

from dataclasses import dataclass

from rlvr_cli.config.options import Provenance, at_least, knob
from rlvr_cli.config.shared import (
    EvaluationOptions,
    EvaluationSamplingOptions,
    ModelOptions,
    OptimizationOptions,
    PromptOptions,
    QuestionOptions,
    TrainingEngineOptions,
    TrainingRunOptions,
    check_training,
)
from rlvr_cli.config.sources import is_partial
from rlvr_cli.errors import RlvrError


@dataclass(frozen=True)
class EiConfig(
    TrainingRunOptions,
    EvaluationOptions,
    EvaluationSamplingOptions,
    PromptOptions,
    OptimizationOptions,
    TrainingEngineOptions,
    ModelOptions,
    QuestionOptions,
    Provenance,
):
    """Expert iteration: sample, keep what is correct, fine-tune on it, again (handout, algorithm 2)."""

    dataset: str = knob("arithmetic", "Training questions: as for rlvr eval.", group="Data")
    n_ei_steps: int = knob(5, "Rounds of sampling and fine-tuning.", group="Algorithm", free_on_resume=True)
    ei_batch_size: int = knob(512, "Questions per round.", group="Algorithm")
    group_size: int = knob(8, "Samples per question.", group="Algorithm")
    sft_epochs: int = knob(1, "Passes over a round's correct responses.", group="Algorithm")
    train_batch_size: int = knob(256, "Responses per update.", group="Optimization")
    micro_batch_size: int = knob(
        8, "Responses per forward pass; the result does not depend on it.", group="Optimization", free_on_resume=True
    )

    eval_every: int = knob(1, "Rounds between evaluations; 0: only after training.", group="Evaluation")

    def __post_init__(self) -> None:
        if is_partial(self):
            return
        check_training(self)
        at_least(
            self, 1, "n_ei_steps", "ei_batch_size", "group_size", "sft_epochs", "train_batch_size", "micro_batch_size"
        )
        if self.lr_schedule != "constant":
            raise RlvrError(
                f"--lr-schedule {self.lr_schedule} needs to know the number of updates, which here is that of correct responses.",
                "Take constant.",
            )
