"""The options of `rlvr ppo`."""

from dataclasses import dataclass
from typing import Literal

from rlvr_cli.config.parsing.options import divides, flag, knob
from rlvr_cli.config.parsing.sources import is_partial
from rlvr_cli.config.shared.evaluation import EvaluationSamplingOptions
from rlvr_cli.config.shared.optimization import MicroBatchOptions
from rlvr_cli.config.shared.prompt import ShotOptions
from rlvr_cli.config.shared.training import TrainingConfig, check_training
from rlvr_cli.errors import RlvrError

CriticBody = Literal["own", "shared"]
KlIn = Literal["reward", "loss"]


@dataclass(frozen=True)
class PpoConfig(EvaluationSamplingOptions, MicroBatchOptions, ShotOptions, TrainingConfig):
    """Policy gradient with a critic: each token's advantage is relative to the value that the critic gave its state (PPO).

    Examples:
        rlvr ppo --preset quickstart --model runs/q0-sft/model --run my-ppo
        rlvr ppo --preset ppo --model Qwen/Qwen2.5-Math-1.5B --dataset gsm8k --dry-run
    """

    dataset: str = knob(
        "arithmetic", "Training questions: as for rlvr eval.", group="Data", common=True, completes="dataset"
    )
    n_ppo_steps: int = knob(
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
    group_size: int = knob(
        1, "Responses per question; the critic makes up for a group.", group="Algorithm", common=True, at_least=1
    )
    epochs_per_rollout_batch: int = knob(
        1, "Passes over each rollout batch.", group="Algorithm", common=True, at_least=1
    )
    train_batch_size: int = knob(64, "Responses per update.", group="Algorithm", common=True, at_least=1)
    learning_rate: float = knob(1e-6, "Peak learning rate of the policy.", group="Optimization", common=True, above=0)
    cliprange: float = knob(
        0.2, "Clip the probability ratio to 1 +- this value.", group="Algorithm", common=True, above=0
    )
    critic: CriticBody = knob(
        "own",
        "What computes values: a model of the critic's own, with the policy's first weights; or shared: a linear head on the policy's.",
        group="Critic",
        common=True,
    )
    critic_learning_rate: float = knob(
        9e-6,
        "Peak learning rate of the critic, or of its head if it shares the policy's model; with the policy's schedule.",
        group="Critic",
        common=True,
        above=0,
    )
    critic_warmup_steps: int = knob(
        0, "Rollout batches at the start in which only the critic learns.", group="Critic", at_least=0
    )
    vf_coef: float = knob(1.0, "Weight of the value loss.", group="Critic", above=0)
    vf_cliprange: float = knob(
        0.0,
        "Clip the change of a value since the rollouts to +- this value, in units of the reward; 0: no clipping.",
        group="Critic",
        at_least=0,
    )
    gae_lambda: float = knob(
        1.0,
        "Lambda of generalized advantage estimation: 1 has no bias from wrong values, less has less variance.",
        group="Algorithm",
        common=True,
        at_least=0,
    )
    gamma: float = knob(1.0, "Discount of the reward per token.", group="Algorithm", at_least=0)
    whiten_advantages: bool = knob(
        True,
        "Make the advantages' mean 0 and standard deviation 1 over the tokens of each rollout batch.",
        group="Algorithm",
    )
    kl_coef: float = knob(
        0.0,
        "Weight of the KL penalty to the initial model; 0 loads no reference model.",
        group="Algorithm",
        at_least=0,
    )
    kl_in: KlIn = knob(
        "reward",
        "Where the KL penalty is: in each token's reward, log p - log p_ref, which descends KL(p || p_ref) of responses; or in the loss, as k3 of "
        "rlvr grpo.",
        group="Algorithm",
    )
    kl_clamp: bool = knob(
        False,
        "With the KL penalty in the reward: raise negative log p - log p_ref to 0, as AlpacaFarm does.",
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
    def updates_per_rollout_batch(self) -> int:
        return self.epochs_per_rollout_batch * self.rollout_batch_size // self.train_batch_size

    def __post_init__(self) -> None:
        if is_partial(self):
            return
        check_training(self)
        divides(self, "group_size", "rollout_batch_size")
        divides(self, "train_batch_size", "rollout_batch_size")
        for name in ("gae_lambda", "gamma"):
            if getattr(self, name) > 1:
                raise RlvrError(f"{flag(name)} is {getattr(self, name):g}.", "It must be at most 1.")
        if self.sampling_temperature == 0:
            raise RlvrError(
                "--sampling-temperature 0 always takes the likeliest token, so there are no probabilities to change.",
                "Use 1.",
            )
        if self.kl_clamp and (not self.kl_coef or self.kl_in == "loss"):
            raise RlvrError(
                "--kl-clamp is of a KL penalty in the reward, and there is none.",
                "Add --kl-coef 0.01 --kl-in reward, or leave --kl-clamp out.",
            )
        if self.sources.get("kl_in") == "flag" and not self.kl_coef:
            raise RlvrError("--kl-in has no effect without --kl-coef.", "Add --kl-coef 0.01, or leave it out.")
        if self.critic == "shared" and self.critic_warmup_steps:
            raise RlvrError(
                "With --critic shared, what the critic learns changes the policy's model too, so that it cannot learn alone.",
                "Leave --critic-warmup-steps out, or use --critic own.",
            )
        if self.fsdp:
            raise RlvrError(
                "--fsdp divides the weights of one model, and rlvr ppo trains two, or one with two heads.",
                "Leave it out: --trainers N without it gives each trainer a copy; --lora-rank 32"
                f"{' or --critic shared' if self.critic == 'own' else ''} needs less memory.",
            )
