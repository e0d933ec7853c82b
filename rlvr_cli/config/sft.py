"""The options of `rlvr sft`."""

from dataclasses import dataclass

from rlvr_cli.config.parsing.options import check_count_or_all, knob
from rlvr_cli.config.parsing.sources import is_partial
from rlvr_cli.config.shared.engine import TrainingEngine
from rlvr_cli.config.shared.optimization import LengthNormalization
from rlvr_cli.config.shared.training import TrainingConfig, check_training


@dataclass(frozen=True)
class SftConfig(TrainingConfig):
    """Fine-tune on reasoning traces: cross-entropy on the response tokens, with regular evaluations (handout, algorithm 1).

    Examples:
        rlvr sft --dataset arithmetic:8000 --num-examples 1024 --learning-rate 1e-3 --eval-every 20 --run my-sft
        rlvr sft --preset cs336 --model Qwen/Qwen2.5-Math-1.5B --dataset traces.jsonl --eval-dataset gsm8k
    """

    dataset: str = knob(
        "arithmetic:8000",
        "Traces: a file of {prompt, response[, ground_truth]}, a run (name or directory), arithmetic:SIZE[:SEED] or countdown:SIZE[:SEED].",
        group="Data",
        common=True,
        completes="source",
    )
    num_examples: str = knob(
        "all", "Number of unique examples to train on (128, 256, 512, 1024, ...), or all.", group="Data", common=True
    )
    correct_only: bool = knob(False, "Train only on traces that the grader rewards.", group="Data", common=True)
    sft_epochs: int = knob(
        1, "Passes over the examples.", group="Optimization", common=True, free_on_resume=True, at_least=1
    )
    n_sft_steps: int = knob(
        0, "Updates; 0: as many as --sft-epochs needs.", group="Optimization", common=True, free_on_resume=True, at_least=0,
    )  # fmt: skip
    train_batch_size: int = knob(256, "Examples per update.", group="Optimization", common=True, at_least=1)
    micro_batch_size: int = knob(
        8, "Examples per forward pass; does not change the result.", group="Optimization", common=True, free_on_resume=True, at_least=1,
    )  # fmt: skip
    length_normalization: LengthNormalization = knob(
        "token_mean",
        "Divisor of the summed loss: token_mean (response tokens in the update), masked_mean (each example's length, then the number of examples), "
        "masked_normalize (--normalize-constant, then the number of examples: the handout's form).",
        group="Optimization",
        common=True,
    )
    normalize_constant: float = knob(
        1.0, "Divisor of each example's summed loss under masked_normalize.", group="Optimization", above=0
    )
    engine: TrainingEngine = knob(
        "auto",
        "Inference engine of the evaluations. auto: transformers, which shares the trainer's weights.",
        group="Model",
        free_on_resume=True,
    )
    append_eos: bool = knob(
        True, "Append the end-of-sequence token to each response and train on it.", group="Optimization"
    )

    def __post_init__(self) -> None:
        if is_partial(self):
            return
        check_training(self)
        check_count_or_all(self, "num_examples", at_least=1)
