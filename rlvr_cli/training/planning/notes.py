"""Notes beside the plan of a training command: what looks like a mistake, one sentence each.

Enters: the options, and how many updates a run makes. Leaves: sentences.
"""

from collections.abc import Mapping

from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.config.shared.optimization import HIGHEST_ROUNDED_BETA2
from rlvr_cli.config.shared.training import TrainingConfig
from rlvr_cli.training.losses.policy_gradient import Loss, clip_range

NO_EVALUATION = "nothing is evaluated, so there will be no curve of held-out reward; --eval-dataset names questions, --eval-every says how often"
ROUNDED_BETA2 = (
    f"--adam-beta2 above {HIGHEST_ROUNDED_BETA2} is rounded away by moments in bfloat16, so that the steps of this run are too large; a new "
    "run refuses it"
)
FEW_UPDATES = 10  # with fewer, `rlvr sft` and `rlvr dpo` note that the model will hardly change


def grpo_notes(config: GrpoConfig, *, loss: Loss) -> list[str]:
    """Notes on options that look like a mistake, one sentence each."""
    notes = []
    if config.on_policy and loss.uses_ratio:
        summed = " with --length-normalization masked_normalize --normalize-constant 1" if loss.per_row else ""
        notes.append(
            f"on-policy, every ratio is 1: {config.loss_type} has the same gradient as reinforce_with_baseline{summed}"
        )
    if not config.on_policy and loss.uses_ratio is False:
        notes.append(f"{config.loss_type} does not correct for off-policy updates; grpo_clip does")
    if loss.per_row and config.sources.get("length_normalization", "default") != "default":
        notes.append(
            f"{config.loss_type} gives one loss per response, and these are averaged: --length-normalization has no effect"
        )
    if config.loss_type == "kimi" and config.std_over != "none":
        notes.append(
            "kimi is defined for rewards that are only centered; --std-normalization none does not divide them"
        )
    if config.length_reward and config.group_size == 1:
        notes.append("--length-reward compares the responses to a question: with --group-size 1 it has no effect")
    elif config.length_reward and config.std_over == "group" and not loss.raw_rewards:
        notes.append(
            "in a group of equal rewards the standard deviation is that of the length rewards alone, and makes full-sized advantages of "
            "small differences in length; --std-normalization none does not"
        )
    if config.async_steps and config.importance_correction == "none":
        notes.append(
            "rollouts come from a policy that is one batch old, and --importance-correction none does not correct for that"
        )
    if config.partial_rollout_tokens and config.importance_correction == "none":
        notes.append(
            "tokens come from policies up to "
            f"{(config.sampling_max_tokens // config.partial_rollout_tokens - 1) * config.updates_per_rollout_batch} updates old, and "
            "--importance-correction none does not correct for that"
        )
    if loss.raw_rewards and config.dynamic_sampling:
        notes.append(
            f"dynamic sampling keeps only groups with unequal rewards; {config.loss_type} could also learn from all-correct groups"
        )
    return notes


def shared_notes(config: TrainingConfig, *, samples: bool) -> list[str]:
    """Notes on options of all commands that train.

    Args:
        samples: whether the command trains on what it samples.
    """
    notes = []
    if samples and config.sampling_top_p < 1:
        notes.append(
            "with --sampling-top-p below 1, responses are sampled from another distribution than the one that is trained"
        )
    rounds = config.param_dtype == "bfloat16" and config.optimizer == "adamw"
    if rounds and not config.offload_optimizer and not config.lora_rank:
        notes.append(
            "bfloat16 weights have 8 significant bits: most steps at a learning rate of 1e-6 to 1e-5 are rounded away, "
            "but not with --optimizer adamw_kahan, adamw_8bit, or --offload-optimizer"
        )
    return notes


def warmup_notes(config: TrainingConfig, *, most_updates: int) -> list[str]:
    """A note on a run whose learning rate never gets to what was asked for."""
    if config.warmup_steps <= most_updates:
        return []
    return [
        f"the warm-up (--warmup-steps {config.warmup_steps}) is longer than the run of at most {most_updates} updates: the learning rate stays "
        f"below {config.learning_rate:g}"
    ]


def length_notes(num_updates: int, *, more: str) -> list[str]:
    """A note on a run that is short.

    Args:
        more: what gives more updates.
    """
    if num_updates >= FEW_UPDATES:
        return []
    return [f"{num_updates} updates change a model little; {more} gives more updates"]


def sft_notes(config: SftConfig, *, num_updates: int) -> list[str]:
    """Notes on options of `rlvr sft`, one sentence each."""
    more = "more --n-sft-steps" if config.n_sft_steps else "a smaller --train-batch-size or more --sft-epochs"
    notes = length_notes(num_updates, more=more)
    if config.length_normalization == "masked_normalize" and config.normalize_constant == 1:
        notes.append(
            "the loss is a sum over tokens (masked_normalize with --normalize-constant 1): a gradient norm in the thousands is usual, "
            f"and is clipped to {config.max_grad_norm:g}; what is logged as loss/nll is per token"
        )
    return notes


def clip_note(config: GrpoConfig, update: Mapping[str, float], *, loss: Loss) -> str | None:
    """A note, one sentence, if in an update whose ratios are not all 1 the clip range has no effect or cuts almost all that moves.

    No effect: no ratio is even a tenth of the way to the range's ends. Almost all: on both sides a hundredth of the ratios is more than
    ten times as far away as they are, and something was cut: not where all advantages are 0.
    """
    if loss.clip_range is None:
        return None
    low, high = clip_range(config.cliprange, config.cliprange_high, default=loss.clip_range)
    least, p01, p99, most = (update[f"policy/ratio_{name}"] for name in ("min", "p01", "p99", "max"))
    what = f"of {config.loss_type}, 1-{low:g} to 1+{high:g} in units of the ratio"
    if 1 - least < low / 10 and most - 1 < high / 10:
        return f"the clip range {what}, has no effect: ratios are {least:.6g} to {most:.6g}"
    share = update["policy/clip_fraction"]
    if share and 1 - p01 > low * 10 and p99 - 1 > high * 10:
        return f"the clip range {what}, cuts almost all that moves, {share:.0%} of the tokens: ratios are {least:.6g} to {most:.6g}"
    return None
