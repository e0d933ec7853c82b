"""The options of `rlvr dpo`."""

from dataclasses import dataclass
from typing import Literal

from rlvr_cli.config.parsing.options import FileFunction, flag, knob
from rlvr_cli.config.parsing.sources import is_partial
from rlvr_cli.config.shared.engine import TrainingEngine
from rlvr_cli.config.shared.evaluation import EvaluationSamplingOptions
from rlvr_cli.config.shared.optimization import MicroBatchOptions
from rlvr_cli.config.shared.training import TrainingConfig, check_training
from rlvr_cli.errors import RlvrError

PreferenceLossType = Literal["dpo", "dpo_norm", "simpo"]
BETAS: dict[str, float] = {
    "dpo": 0.1,
    "dpo_norm": 5.0,
    "simpo": 2.0,
}  # docs/algorithms.md has the sources


@dataclass(frozen=True)
class DpoConfig(EvaluationSamplingOptions, MicroBatchOptions, TrainingConfig):
    """Preference optimization on pairs of responses: raise the probability of the chosen one relative to the rejected one.

    Examples:
        rlvr dpo --preset quickstart --model runs/q0-sft/model --n-dpo-steps 40 --run my-dpo
        rlvr dpo --model runs/q0-sft/model --dataset pairs.jsonl --eval-dataset arithmetic --learning-rate 1e-4 --run my-dpo
        rlvr dpo --model Qwen/Qwen2.5-Math-1.5B --dataset zero-shot --loss-type dpo_norm --eval-dataset gsm8k --dry-run
    """

    dataset: str = knob(
        "",
        "Pairs: a file of {prompt or question, chosen, rejected}, such as rlvr filter --emit pairs writes, or a run (name or directory). "
        "With --n-dpo-steps: training questions, as for rlvr eval.",
        group="Data",
        common=True,
        completes="source",
    )
    n_dpo_steps: int = knob(
        0,
        "On-policy: this many rounds, each of which samples questions, and trains on pairs of a right and a wrong response. "
        "0: --dataset holds the pairs.",
        group="Algorithm",
        common=True,
        free_on_resume=True,
        at_least=0,
    )
    rollout_batch_size: int = knob(
        256,
        "With --n-dpo-steps: responses per round, number of questions times --group-size.",
        group="Algorithm",
        common=True,
        at_least=1,
    )
    group_size: int = knob(8, "With --n-dpo-steps: responses per question.", group="Algorithm", common=True, at_least=2)
    pairs_per_question: int = knob(
        4, "Pairs of a right and a wrong response per question of a run or a round, at most.", group="Data", at_least=1
    )
    loss_type: PreferenceLossType | FileFunction = knob(
        "dpo",
        "Loss of a pair, or a function of your own; dpo_norm and simpo divide log-probabilities by the response's length, "
        "simpo has no reference.",
        group="Algorithm",
        common=True,
    )
    beta: float | None = knob(
        None,
        "Factor of the difference of a pair's two log-ratios. Default: 0.1 for dpo, 5 for dpo_norm, 2 for simpo.",
        group="Algorithm",
        goes_with="loss_type",
        common=True,
        above=0,
    )
    gamma: float | None = knob(
        None,
        "Margin that simpo asks for, in units of the loss's argument, after the factor beta. Default: half of beta.",
        group="Algorithm",
        goes_with="loss_type",
        at_least=0,
    )
    nll_coef: float = knob(
        0.0,
        "Adds this times the chosen response's negative log-likelihood per token, which keeps it from becoming unlikely with the "
        "rejected one (1 in iterative RPO).",
        group="Algorithm",
        common=True,
        at_least=0,
    )
    dpo_epochs: int = knob(
        1, "Passes over the pairs, of a round with --n-dpo-steps.", group="Optimization", common=True, at_least=1
    )
    train_batch_size: int = knob(64, "Pairs per update.", group="Optimization", common=True, at_least=1)
    learning_rate: float = knob(1e-6, "Peak learning rate.", group="Optimization", common=True, above=0)
    engine: TrainingEngine = knob(
        "auto",
        "Inference engine. auto: vllm if it is installed and there is a CUDA device, else transformers, which shares the trainer's weights; "
        "without --n-dpo-steps, transformers.",
        group="Model",
        free_on_resume=True,
    )
    append_eos: bool = knob(
        True,
        "Append the end-of-sequence token to responses that are given as text (with --chat, what ends a turn in the chat template, where it "
        "ends the model's responses, too); sampled token ids stay as they are.",
        group="Optimization",
    )

    def __post_init__(self) -> None:
        if is_partial(self):
            return
        check_training(self)
        self._check_rounds()
        if self.split and not self.n_dpo_steps:
            raise RlvrError(f"--split {self.split}: pairs are one file or a run, without splits.", "Leave --split out.")
        if self.beta is not None and self.loss_type not in BETAS:
            raise RlvrError(
                f"--beta {self.beta:g} is of the built-in losses, and --loss-type is {self.loss_type}.",
                "Leave --beta out: write the factor into the function.",
            )
        if self.nll_coef and self.loss_type not in BETAS:
            raise RlvrError(
                f"--nll-coef {self.nll_coef:g} is of the built-in losses, and --loss-type is {self.loss_type}.",
                "Leave --nll-coef out: add the likelihood in the function.",
            )
        if self.gamma is not None and self.loss_type != "simpo":
            raise RlvrError(
                f"--gamma {self.gamma:g} is of simpo, and --loss-type is {self.loss_type}.",
                "Leave --gamma out, or use --loss-type simpo.",
            )

    rows_of_unit = 2  # a pair is never split

    @property
    def scale(self) -> float:
        """beta: the given one, else the loss's own."""
        return BETAS.get(self.loss_type, 1.0) if self.beta is None else self.beta

    @property
    def target_margin(self) -> float:
        """gamma; 0 for the losses that have none."""
        if self.loss_type != "simpo":
            return 0.0
        return self.scale / 2 if self.gamma is None else self.gamma

    @property
    def n_prompts_per_rollout_batch(self) -> int:
        """Questions of a round."""
        return self.rollout_batch_size // self.group_size

    @property
    def trains_on_samples(self) -> bool:
        return bool(self.n_dpo_steps)

    @property
    def keeps_reference(self) -> bool:
        """Whether the first policy stays in memory: for pairs that are given, its log-probabilities are computed at the start."""
        return bool(self.n_dpo_steps) and self.loss_type != "simpo"

    def _check_rounds(self) -> None:
        if not self.n_dpo_steps:
            given = {
                "rollout_batch_size": self.sources.get("rollout_batch_size") == "flag",
                "group_size": self.sources.get("group_size") == "flag",
            }
            name = next((name for name, is_given in given.items() if is_given), None)
            if name is not None:
                raise RlvrError(
                    f"{flag(name)} is for sampling, and pairs that are given need none.",
                    "Leave it out, or sample questions with --n-dpo-steps.",
                )
            return
        if self.rollout_batch_size % self.group_size:
            raise RlvrError(
                f"--rollout-batch-size {self.rollout_batch_size} is not a multiple of --group-size {self.group_size}.",
                f"Use {max(self.n_prompts_per_rollout_batch, 1) * self.group_size}.",
            )
        if self.sampling_temperature == 0:
            raise RlvrError("--sampling-temperature 0 makes all responses to a question identical.", "Use 1.")
        if self.lr_schedule != "constant":
            raise RlvrError(
                f"--lr-schedule {self.lr_schedule} needs the number of updates, but that depends on the pairs.",
                "Use --lr-schedule constant.",
            )
