"""All options that training commands share, put together from the groups."""

from dataclasses import dataclass

from rlvr_cli.config.parsing.options import check_effects, check_values, flag
from rlvr_cli.config.shared.engine import TrainingEngineOptions, check_engine, check_servers, check_weights_dir
from rlvr_cli.config.shared.episodes import EpisodeOptions, check_episodes
from rlvr_cli.config.shared.evaluation import EvaluationOptions, EvaluationSamplingOptions, check_evaluation_sampling
from rlvr_cli.config.shared.model import ModelOptions
from rlvr_cli.config.shared.optimization import OptimizationOptions, check_lora, check_optimizer
from rlvr_cli.config.shared.prompt import PromptOptions, ShotOptions, check_prompt, check_shots
from rlvr_cli.config.shared.questions import QuestionOptions
from rlvr_cli.config.shared.run import TrainingRunOptions, check_time_limit
from rlvr_cli.config.shared.sampling import check_sampling
from rlvr_cli.errors import RlvrError


@dataclass(frozen=True)
class TrainingConfig(
    TrainingEngineOptions,
    TrainingRunOptions,
    EvaluationOptions,
    EpisodeOptions,
    PromptOptions,
    OptimizationOptions,
    ModelOptions,
    QuestionOptions,
):
    """The options shared by all training commands. The constants are options in some of the commands."""

    # Not annotated, so these are not dataclass fields; a command that has the option redefines it as one.
    async_steps = 0
    kl_coef = 0.0
    loaded_teacher = ""
    divergence = "reverse_kl"
    batches_vary = False
    rollout_batch_size = 256
    rows_of_unit = 1
    critic = ""
    critic_learning_rate = 0.0
    packed_length = 0

    @property
    def trains_on_samples(self) -> bool:
        """Whether the policy samples what it is trained on; else only answers to evaluation questions, if there are any."""
        return True

    @property
    def samples_apart(self) -> bool:
        """Whether the engine is in processes of its own."""
        return bool(self.async_steps) or self.samplers > 1

    @property
    def units_asked(self) -> int | None:
        """Units of a micro-batch, responses or pairs, that the command's own option asks for."""
        return None

    @property
    def micro_batch_rows(self) -> int | None:
        """Most rows of a micro-batch, unless --micro-batch-tokens is given; None: its tokens are counted."""
        return None if self.units_asked is None else self.units_asked * self.rows_of_unit

    @property
    def keeps_reference(self) -> bool:
        """Whether the first policy stays in memory, as the reference."""
        return bool(self.kl_coef)


def check_training(config: TrainingConfig) -> None:
    check_values(config)
    check_prompt(config)
    check_sampling(config)
    check_episodes(config)
    if isinstance(config, ShotOptions):
        check_shots(config, plays=bool(config.environment or config.tool))
    check_engine(config)
    check_lora(config)
    check_fsdp(config)
    check_servers(config)
    check_weights_dir(config)
    check_effects(config, {"request_timeout": (bool(config.sampler_urls), "--sampler-urls")})
    if config.samplers > 1 and config.async_steps:
        raise RlvrError(
            f"--samplers {config.samplers} and --async-steps {config.async_steps} cannot be combined: what was sampled ahead by a "
            "process that dies could not be sampled again, because the others have newer weights by then.",
            "Leave one of them out.",
        )
    check_optimizer(config)
    check_time_limit(config)
    if isinstance(config, EvaluationSamplingOptions):
        check_evaluation_sampling(config)


def check_fsdp(config: TrainingConfig) -> None:
    if not config.fsdp:
        return
    if config.trainers == 1:
        raise RlvrError("--fsdp divides the weights over several trainers.", "Add --trainers N, or use --no-fsdp.")
    refused = {
        "lora_rank": "an adapter is small, and its base is not divided",
        "async_steps": "the older weights that it samples with are not divided",
    }
    for name, why in refused.items():
        if getattr(config, name):
            raise RlvrError(f"{flag(name)} and --fsdp exclude each other: {why}.", "Leave one of them out.")
    if config.optimizer == "adamw_8bit":
        raise RlvrError(
            "--optimizer adamw_8bit and --fsdp exclude each other: 256 moments with one scale would depend on the division.",
            "Leave one of them out, or use --optimizer adamw_kahan with --param-dtype bfloat16.",
        )
