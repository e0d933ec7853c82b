"""The options of `rlvr ei`."""

from dataclasses import dataclass

from rlvr_cli.config.parsing.options import knob
from rlvr_cli.config.parsing.sources import is_partial
from rlvr_cli.config.shared.evaluation import EvaluationSamplingOptions
from rlvr_cli.config.shared.optimization import MicroBatchOptions
from rlvr_cli.config.shared.prompt import ShotOptions
from rlvr_cli.config.shared.training import TrainingConfig, check_training
from rlvr_cli.errors import RlvrError


@dataclass(frozen=True)
class EiConfig(EvaluationSamplingOptions, MicroBatchOptions, ShotOptions, TrainingConfig):
    """Expert iteration: sample, keep the correct responses, fine-tune on them, repeat (handout, algorithm 2).

    Examples:
        rlvr ei --model runs/q0-sft/model --dataset arithmetic:4000:1 --group-size 8 --n-ei-steps 3 --run my-ei
        rlvr ei --preset cs336 --model Qwen/Qwen2.5-Math-1.5B --dataset gsm8k --dry-run
    """

    dataset: str = knob(
        "arithmetic", "Training questions: as for rlvr eval.", group="Data", common=True, completes="dataset"
    )
    n_ei_steps: int = knob(
        5,
        "Rounds of sampling and fine-tuning. With --resume, more of them extend the run.",
        group="Algorithm",
        common=True,
        free_on_resume=True,
        at_least=1,
    )
    ei_batch_size: int = knob(512, "Questions per round.", group="Algorithm", common=True, at_least=1)
    group_size: int = knob(8, "Samples per question.", group="Algorithm", common=True, at_least=1)
    sft_epochs: int = knob(1, "Passes over a round's correct responses.", group="Algorithm", common=True, at_least=1)
    train_batch_size: int = knob(256, "Responses per update.", group="Optimization", common=True, at_least=1)

    eval_every: int = knob(
        1,
        "Rounds between evaluations; 0: only after training and, with --time-limit, before it.",
        group="Evaluation",
        common=True,
        at_least=0,
    )

    def __post_init__(self) -> None:
        if is_partial(self):
            return
        check_training(self)
        if self.lr_schedule != "constant":
            raise RlvrError(
                f"--lr-schedule {self.lr_schedule} needs the number of updates, but that depends on how many responses are correct.",
                "Use --lr-schedule constant.",
            )
