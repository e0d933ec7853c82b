"""The options of `rlvr grpo`; the defaults are the handout's."""

from dataclasses import dataclass
from typing import Literal, get_args

from rlvr_cli.config.parsing.options import FileFunction, check_effects, divides, flag, knob
from rlvr_cli.config.parsing.sources import is_partial
from rlvr_cli.config.shared.evaluation import EvaluationSamplingOptions
from rlvr_cli.config.shared.optimization import LengthNormalization
from rlvr_cli.config.shared.prompt import ShotOptions
from rlvr_cli.config.shared.training import TrainingConfig, check_training
from rlvr_cli.errors import RlvrError

LossType = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip", "gspo", "cispo", "kimi"]
StdNormalization = Literal["group", "batch", "none"]
KlType = Literal["k3", "k2", "unbiased"]
ImportanceCorrection = Literal["auto", "none", "truncated", "masked"]
QuestionOrder = Literal["shuffled", "file", "prioritized"]
CreditUnit = Literal["episode", "turn"]
PRECEDENCE = {"flag": 3, "config": 2, "preset": 1}  # of the sources of options, by their first words
Overlong = Literal["none", "mask", "soft_punish"]
LatinLanguage = Literal["de", "en", "es", "fr", "it", "nl", "pt"]
Language = Literal[LatinLanguage, "ar", "el", "he", "hi", "ja", "ko", "ru", "th", "zh"]
LanguageDetector = Literal["script", "py3langid"]


@dataclass(frozen=True)
class GrpoConfig(EvaluationSamplingOptions, ShotOptions, TrainingConfig):
    """Policy gradient on groups of graded responses: GRPO, its ablations and variants (handout, algorithm 3).

    Examples:
        rlvr grpo --preset quickstart --model runs/q0-sft/model --n-grpo-steps 40 --run my-grpo
        rlvr grpo --preset cs336 --model Qwen/Qwen2.5-Math-1.5B --dataset gsm8k --loss-type grpo_clip --dry-run
    """

    dataset: str = knob(
        "arithmetic", "Training questions: as for rlvr eval.", group="Data", common=True, completes="dataset"
    )
    question_order: QuestionOrder = knob(
        "shuffled",
        "Order in which questions are asked: shuffled anew in each epoch; file: as they stand, such as from easy to hard; prioritized: drawn by "
        "1 - success rate so far.",
        group="Algorithm",
        instead={
            "easy_first": "Sort the questions by their pass rate in a run: rlvr filter RUN --emit questions --order easy_first --out easy.jsonl; "
            "then rlvr grpo --dataset easy.jsonl --question-order file"
        },
    )
    n_grpo_steps: int = knob(
        200,
        "Number of rollout batches. With --resume, more of them extend the run.",
        group="Algorithm",
        common=True,
        free_on_resume=True,
        at_least=1,
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
    gradient_accumulation_steps: int | None = knob(
        None,
        "Micro-batches per update: --train-batch-size / micro-batch size. Does not change the result. Default: as --micro-batch-tokens "
        "says.",
        group="Optimization",
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
    std_normalization: StdNormalization | None = knob(
        None,
        "Which standard deviation divides the centered rewards: that of the group, of the rollout batch, or none. Default: as "
        "--use-std-normalization says, group or none.",
        group="Algorithm",
    )
    advantage_eps: float = knob(
        1e-6, "Added to the standard deviation that divides the advantages.", group="Algorithm", at_least=0
    )
    credit: CreditUnit = knob(
        "episode",
        "Advantages in an episode: one for all tokens of the policy (episode), or one for each turn, of the rewards from that turn on (turn).",
        group="Algorithm",
    )
    cliprange: float | None = knob(
        None,
        "grpo_clip, gspo: clip the probability ratio to 1 +- this value. Default: 0.2; gspo: 0.0003 below 1 and 0.0004 above.",
        group="Algorithm",
        goes_with="loss_type",
        common=True,
        above=0,
    )
    cliprange_high: float | None = knob(
        None,
        "grpo_clip, gspo: separate upper clip range (DAPO's clip-higher). Default: --cliprange.",
        group="Algorithm",
        goes_with="loss_type",
        above=0,
    )
    cispo_cap: float = knob(5.0, "cispo: the largest weight of a token, itself a ratio.", group="Algorithm", at_least=1)
    kimi_tau: float = knob(
        0.1, "kimi: weight of the KL divergence to the policy that the batch began with.", group="Algorithm", above=0
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
        "Weight of the KL penalty to the initial model; 0 loads no reference model.",
        group="Algorithm",
        at_least=0,
    )
    kl_type: KlType = knob(
        "k3",
        "KL penalty: k3 descends KL(p_ref || p); k2 and unbiased (k3 times the ratio) descend KL(p || p_ref).",
        group="Algorithm",
    )
    async_steps: int = knob(
        0, "1: a second process samples the next batch during training, with weights one batch old; 0: sample and train in turn.", group="Algorithm"
    )  # fmt: skip
    partial_rollout_tokens: int = knob(
        0,
        "Most tokens that a response gets in one step: a longer one goes on in the next batch, with that batch's policy (Kimi k1.5); 0: no "
        "such limit.",
        group="Algorithm",
        at_least=0,
    )
    importance_correction: ImportanceCorrection = knob(
        "auto",
        "Weight tokens by trainer / sampler probability: truncated to --importance-floor and --importance-cap; masked: 0 outside "
        "them. auto: truncated with --async-steps 1 or --partial-rollout-tokens, else none.",
        group="Algorithm",
    )
    importance_floor: float = knob(
        0.0, "Lower bound of the trainer / sampler probability, a ratio.", group="Algorithm", at_least=0
    )
    importance_cap: float = knob(
        2.0, "Upper bound of the trainer / sampler probability, a ratio.", group="Algorithm", above=0
    )
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
    format_weight: float = knob(
        0.0, "Weight of the format reward, which is added to the reward (R1-Zero: 1).", group="Algorithm", at_least=0
    )
    length_reward: float = knob(
        0.0,
        "Weight of a reward for responses that are shorter than others to the question (Kimi k1.5).",
        group="Algorithm",
        at_least=0,
    )
    length_reward_after: int = knob(0, "Rollout batches before --length-reward counts.", group="Algorithm", at_least=0)
    language_reward: float = knob(
        0.0, "Weight of the share of the thinking's words that are in --language (R1).", group="Algorithm", at_least=0
    )
    language: Language = knob("en", "The language that --language-reward wants.", group="Algorithm")
    language_detector: LanguageDetector = knob(
        "script",
        "script: a word's letters decide, which cannot tell Latin languages apart; py3langid: also the language that it finds in each Latin "
        "sentence.",
        group="Algorithm",
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
    def units_asked(self) -> int | None:
        steps = self.gradient_accumulation_steps
        return None if steps is None else self.train_batch_size // steps

    @property
    def updates_per_rollout_batch(self) -> int:
        return self.epochs_per_rollout_batch * self.rollout_batch_size // self.train_batch_size

    @property
    def on_policy(self) -> bool:
        return self.updates_per_rollout_batch == 1

    @property
    def batches_vary(self) -> bool:
        """Whether a batch may have fewer rows than --rollout-batch-size, or none."""
        return bool(self.partial_rollout_tokens or self.dynamic_sampling)

    @property
    def importance_truncation(self) -> float | None:
        """The upper bound of the importance weights; None without importance correction."""
        wanted = self.importance_correction in ("truncated", "masked") or (
            self.importance_correction == "auto" and self.lags
        )
        return self.importance_cap if wanted else None

    @property
    def lags(self) -> bool:
        """Whether older policies than the one that is trained have sampled some of the tokens."""
        return bool(self.async_steps or self.partial_rollout_tokens)

    @property
    def shapes_rewards(self) -> bool:
        """Whether advantages are made of more than the grader's reward."""
        return bool(self.format_weight or self.length_reward or self.language_reward or self.overlong == "soft_punish")

    @property
    def std_over(self) -> StdNormalization:
        """Over what the standard deviation is taken that divides advantages."""
        return self.std_normalization or ("group" if self.use_std_normalization else "none")

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
        if self.importance_floor > self.importance_cap:
            raise RlvrError(
                f"--importance-floor {self.importance_floor:g} exceeds --importance-cap {self.importance_cap:g}.",
                "Both bound the same ratio: give a floor below 1 and a cap above 1.",
            )
        if self.language_detector == "py3langid" and self.language not in get_args(LatinLanguage):
            raise RlvrError(
                f"--language-detector py3langid tells Latin languages apart, and --language {self.language} has a script of its own.",
                "Use --language-detector script.",
            )
        divides(self, "group_size", "rollout_batch_size")
        divides(self, "train_batch_size", "rollout_batch_size")
        if self.gradient_accumulation_steps is not None:
            divides(self, "gradient_accumulation_steps", "train_batch_size")
        if self.train_batch_size < self.group_size:
            raise RlvrError(
                f"--train-batch-size {self.train_batch_size} is smaller than --group-size {self.group_size}.",
                f"Use at least {self.group_size}.",
            )
        if self.dynamic_sampling and self.group_size == 1 and not self.resume:  # a run may have begun so
            raise RlvrError(
                "--dynamic-sampling drops every group with --group-size 1: a group of one has no differing rewards.",
                "Use --group-size 8, or --no-dynamic-sampling.",
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
        if self.partial_rollout_tokens:
            self._check_partial_rollouts()
        if self.credit == "turn":
            self._check_turns()
        self._check_effects()

    def _check_partial_rollouts(self) -> None:
        """Raise RlvrError for options that do not go with --partial-rollout-tokens."""
        divides(self, "partial_rollout_tokens", "sampling_max_tokens")
        if self.partial_rollout_tokens < self.sampling_min_tokens:
            raise RlvrError(
                f"--partial-rollout-tokens {self.partial_rollout_tokens} is below --sampling-min-tokens {self.sampling_min_tokens}.",
                "Raise the first, or lower the second.",
            )
        refused = {
            "async_steps": "the next batch is sampled before it is known which responses go on in it",
            "dynamic_sampling": "a batch has the groups that are finished, and cannot be filled up in its step",
        }
        for name, why in refused.items():
            if getattr(self, name):
                raise RlvrError(
                    f"{flag(name)} and --partial-rollout-tokens exclude each other: {why}.", "Leave one of them out."
                )

    def _check_turns(self) -> None:
        """Raise RlvrError for options that do not go with --credit turn."""
        if not self.plays_episodes:
            raise RlvrError(
                "--credit turn has no effect without --environment or --tool: a response is then one turn.",
                "Add one of them, or use --credit episode.",
            )
        if self.std_over == "batch":
            raise RlvrError(
                "--credit turn and --std-normalization batch exclude each other: turns are compared with those of the same number in their "
                "group, and early and late ones have different deviations.",
                "Use --std-normalization group or none.",
            )

    def _check_effects(self) -> None:
        """Raise RlvrError for an option of the command line that the others leave without effect."""
        sources = [self.sources.get(name, "") for name in ("use_std_normalization", "std_normalization")]
        whether, over = (PRECEDENCE.get(source.split(" ")[0], 0) for source in sources)
        # --std-normalization as a flag may replace what a preset says of the other, but not the reverse: it would be ignored.
        ignored = whether > 0 and whether >= over and self.std_normalization is not None
        if ignored and self.use_std_normalization != (self.std_normalization != "none"):
            raise RlvrError(
                f"--{'' if self.use_std_normalization else 'no-'}use-std-normalization ({sources[0]}) and --std-normalization "
                f"{self.std_normalization} ({sources[1]}) exclude each other.",
                "Leave one of them out; --std-normalization alone says both whether and over what.",
            )
        clips, corrects = self.loss_type in ("grpo_clip", "gspo"), self.importance_truncation is not None
        sums = self.length_normalization == "masked_normalize"
        compares, compared = self.loss_type != "no_baseline", "a --loss-type with a baseline"
        needs = {
            "use_std_normalization": (compares, compared),
            "std_normalization": (compares, compared),
            "advantage_eps": (
                compares and self.std_over != "none",
                "--std-normalization group or batch" if compares else compared,
            ),
            "kl_type": (self.kl_coef > 0, "--kl-coef"),
            "cliprange": (clips, "--loss-type grpo_clip or gspo"),
            "cliprange_high": (clips, "--loss-type grpo_clip or gspo"),
            "cispo_cap": (self.loss_type == "cispo", "--loss-type cispo"),
            "kimi_tau": (self.loss_type == "kimi", "--loss-type kimi"),
            "normalize_constant": (sums, "--length-normalization masked_normalize"),
            "importance_cap": (corrects, "--importance-correction truncated"),
            "importance_floor": (corrects, "--importance-correction truncated"),
            "max_sampling_rounds": (self.dynamic_sampling, "--dynamic-sampling"),
            "overlong_buffer": (self.overlong == "soft_punish", "--overlong soft_punish"),
            "length_reward_after": (self.length_reward > 0, "--length-reward"),
            "language": (self.language_reward > 0, "--language-reward"),
            "language_detector": (self.language_reward > 0, "--language-reward"),
        }
        check_effects(self, needs)


def overlong_buffer(given: int | None, *, max_tokens: int) -> int:
    """Return the number of tokens before the length limit over which soft_punish grows: `given`, else a fifth of `max_tokens`."""
    return given or max(max_tokens // 5, 1)
