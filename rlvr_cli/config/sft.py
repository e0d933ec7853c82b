"""The options of `rlvr sft`."""

from dataclasses import dataclass

from rlvr_cli.config.parsing.options import check_count_or_all, check_effects, flag, knob
from rlvr_cli.config.parsing.sources import is_partial
from rlvr_cli.config.shared.engine import TrainingEngine
from rlvr_cli.config.shared.optimization import LengthNormalization, MicroBatchOptions
from rlvr_cli.config.shared.training import TrainingConfig, check_training
from rlvr_cli.errors import RlvrError


@dataclass(frozen=True)
class SftConfig(MicroBatchOptions, TrainingConfig):
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
    correct_only: bool = knob(
        False,
        "Train only on traces that the grader rewards; of a run, without --grader: on those that have a reward above 0.5 there.",
        group="Data",
        common=True,
    )
    sft_epochs: int = knob(
        1, "Passes over the examples.", group="Optimization", common=True, free_on_resume=True, at_least=1
    )
    n_sft_steps: int = knob(
        0, "Updates; 0: as many as --sft-epochs needs.", group="Optimization", common=True, free_on_resume=True, at_least=0,
    )  # fmt: skip
    train_batch_size: int = knob(
        256, "Examples per update; with --packing, sequences.", group="Optimization", common=True, at_least=1
    )
    length_normalization: LengthNormalization = knob(
        "token_mean",
        "Divisor of the summed loss: token_mean (response tokens in the update), masked_mean (each example's length, then the number of examples), "
        "masked_normalize (--normalize-constant, then the number of examples: the handout's form).",
        group="Optimization",
        common=True,
    )
    packing: bool = knob(
        False,
        "Pack examples into sequences of --packing-length tokens, each whole where it fits best; --train-batch-size and --micro-batch-size "
        "count sequences. Attention stays within an example, and the loss is that of the same examples unpacked: --length-normalization "
        "divides it by their response tokens, or by their number, not by that of sequences.",
        group="Optimization",
        common=True,
    )
    packing_length: int = knob(512, "Tokens of a packed sequence.", group="Optimization", at_least=2)
    packing_attend_across: bool = knob(
        False,
        "With --packing: join all examples without gaps and cut that into sequences, whose tokens attend to all before them, those of "
        "other examples too. The loss is divided by the response tokens of the update.",
        group="Optimization",
    )
    loss_on_prompts: bool = knob(
        False,
        "Train on the tokens of prompts too, as the course's packing does: they then count as response tokens in every divisor.",
        group="Optimization",
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
        True,
        "Append the end-of-sequence token to each response and train on it; with --chat, what ends a turn in the chat template, "
        "where it ends the model's responses, too.",
        group="Optimization",
    )

    def __post_init__(self) -> None:
        if is_partial(self):
            return
        check_training(self)
        check_count_or_all(self, "num_examples", at_least=1)
        check_packing(self)
        sums = self.length_normalization == "masked_normalize"
        check_effects(self, {"normalize_constant": (sums, "--length-normalization masked_normalize")})
        if self.n_sft_steps and self.sources.get("sft_epochs") == "flag":
            of_run = " of the run" if self.sources.get("n_sft_steps") == "resumed run" else ""
            raise RlvrError(
                f"--sft-epochs has no effect with --n-sft-steps {self.n_sft_steps}{of_run}.",
                "Add --n-sft-steps 0, or leave --sft-epochs out: --n-sft-steps is the length.",
            )

    @property
    def trains_on_samples(self) -> bool:
        return False

    @property
    def packed_length(self) -> int:
        """Tokens of a packed sequence; 0 without --packing."""
        return self.packing_length if self.packing else 0


def check_packing(config: SftConfig) -> None:
    given = {"packing_length": config.packing_length != 512, "packing_attend_across": config.packing_attend_across}
    name = next((name for name, is_given in given.items() if is_given), None)
    if name is not None and not config.packing:
        raise RlvrError(f"{flag(name)} needs --packing.", "Add --packing, or leave it out.")
    if config.packing_attend_across and config.length_normalization != "token_mean":
        raise RlvrError(
            f"--length-normalization {config.length_normalization} counts examples, which --packing-attend-across cuts into pieces.",
            "Use --length-normalization token_mean, or leave --packing-attend-across out.",
        )
