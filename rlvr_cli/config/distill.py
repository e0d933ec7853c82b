"""The options of `rlvr distill`."""

from dataclasses import dataclass
from typing import Literal

from rlvr_cli.config.parsing.options import divides, knob
from rlvr_cli.config.parsing.sources import is_partial
from rlvr_cli.config.shared.addresses import check_address
from rlvr_cli.config.shared.evaluation import EvaluationSamplingOptions
from rlvr_cli.config.shared.optimization import MicroBatchOptions
from rlvr_cli.config.shared.prompt import ShotOptions
from rlvr_cli.config.shared.training import TrainingConfig, check_training
from rlvr_cli.errors import RlvrError

DivergenceType = Literal["reverse_kl", "sampled", "forward_kl"]


@dataclass(frozen=True)
class DistillConfig(EvaluationSamplingOptions, MicroBatchOptions, ShotOptions, TrainingConfig):
    """On-policy distillation: the student samples, and learns a teacher's probabilities at each of its tokens.

    Examples:
        rlvr distill --model runs/q0-sft/model --teacher runs/q0-grpo/model --preset quickstart --run my-distill
        rlvr distill --preset distill --model Qwen/Qwen2.5-0.5B --teacher Qwen/Qwen2.5-1.5B --dataset gsm8k --dry-run
    """

    dataset: str = knob(
        "arithmetic", "Training questions: as for rlvr eval.", group="Data", common=True, completes="dataset"
    )
    teacher: str = knob(
        "",
        "Local directory or hub id of the teacher, a model with the same tokenizer.",
        group="Model",
        common=True,
        completes="model",
        free_on_resume=True,
    )
    teacher_url: str = knob(
        "",
        "Address of a vLLM server of the teacher, such as http://a:8000, with --divergence sampled; --teacher then names its tokenizer.",
        group="Model",
        free_on_resume=True,
    )
    divergence: DivergenceType = knob(
        "reverse_kl",
        "What is minimized at each sampled token: reverse_kl, KL(student || teacher) over the whole vocabulary; sampled, its estimate "
        "from the sampled token alone; forward_kl, KL(teacher || student).",
        group="Algorithm",
        common=True,
    )
    task_reward: float = knob(
        0.0, "Weight of GRPO's advantage of the grader's reward; 0: the teacher alone.", group="Algorithm", at_least=0
    )
    n_distill_steps: int = knob(
        200,
        "Number of rollout batches, each for one update. With --resume, more of them extend the run.",
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
    group_size: int = knob(4, "Responses per question.", group="Algorithm", common=True, at_least=1)
    eval_every: int = knob(
        10,
        "Updates between evaluations; 0: only before and after training.",
        group="Evaluation",
        common=True,
        at_least=0,
    )

    def __post_init__(self) -> None:
        if is_partial(self):
            return
        check_training(self)
        divides(self, "group_size", "rollout_batch_size")
        if self.sampling_temperature == 0:
            raise RlvrError(
                "--sampling-temperature 0 is no distribution that could be compared with the teacher's.", "Use 1."
            )
        if self.teacher_url:
            check_address(self.teacher_url, option="--teacher-url")
            if self.teacher_url.rstrip("/").endswith("/v1"):
                raise RlvrError(f"--teacher-url is {self.teacher_url}.", "Leave /v1 out.")
            if self.divergence != "sampled":
                raise RlvrError(
                    f"--divergence {self.divergence} needs the teacher's probabilities of all tokens, and a server gives those of one.",
                    "Use --divergence sampled, or leave --teacher-url out.",
                )
            if self.sampling_temperature != 1:
                raise RlvrError(
                    "A server gives the teacher's probabilities at temperature 1, and the student samples at "
                    f"{self.sampling_temperature:g}.",
                    "Use --sampling-temperature 1, or leave --teacher-url out.",
                )
        if self.task_reward and self.group_size == 1:
            raise RlvrError(
                "With --group-size 1 every advantage is 0, so --task-reward has no effect.", "Use --group-size 8."
            )

    @property
    def loaded_teacher(self) -> str:
        """The teacher that every trainer loads; empty if it is on a server."""
        return "" if self.teacher_url else self.teacher
