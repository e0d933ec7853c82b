"""One trainer's copy of the policy with its optimizer, and what all ranks do with theirs at the same time.

Enters: the options of a training command, a device, the ranks. Leaves: a `Replica`. The methods that say so are called on
every rank, in the same order (`trainers.Trainers`); rank 0 uses what they return.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import compress
from typing import Any, Literal

import torch
from torch import Tensor

from rlvr_cli.config.shared.training import TrainingConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.models.divergence import Teacher
from rlvr_cli.models.identity import model_path
from rlvr_cli.models.load import check_finite, load_frozen, load_policy, use_few_threads
from rlvr_cli.models.policy import Policy, distinct_tensors, trained_adapter
from rlvr_cli.samplers.episodes.open import open_environment, played
from rlvr_cli.samplers.open import engine_kind, settings_of
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.optimizers.optimizer_state import layout, load_state
from rlvr_cli.training.parallel.ranks import ALONE, Ranks
from rlvr_cli.training.updates.scores import compute_scores
from rlvr_cli.training.updates.update import train_update
from rlvr_cli.types import Completion, Request, Sampler, SamplingParams

Scored = Literal["policy", "reference", "teacher"]  # whose log-probabilities are computed


class Replica:
    """A copy of the policy, its optimizer and, with a KL penalty, the reference policy; in distillation the teacher.

    Attributes:
        check: called before each micro-batch; it ends the update by raising an error.
        policy, optimizer: to be sampled from, and to be saved.
        teacher: in distillation, whole on every rank; else None.
        is_whole: whether `policy` has its weights. If not, `gather` gives them to it.
        gathers: how many times it did so.
        kernels_note: why --fused-kernels auto does without, on CUDA; else empty.
    """

    is_whole, gathers = True, 0

    def __init__(self, config: TrainingConfig, *, device: str, ranks: Ranks = ALONE) -> None:
        self.config, self.ranks = config, ranks
        self.policy = load_policy(
            model_path(config.model),
            dtype=config.param_dtype,
            compute_dtype=config.compute_dtype,
            device=device,
            lora=trained_adapter(config),
        )
        if self.ranks.rank == 0:
            check_finite(self.policy, model_path(config.model))
        if self.policy.device.type == "mps":
            raise RlvrError("Training does not run on mps: it needs float64, which mps lacks.", "Use --device cpu.")
        use_few_threads(self.policy, processes=self.ranks.size)
        self.kernels_note = self.policy.use_kernels(config.fused_kernels)
        if config.critic:
            self.policy.add_critic(own_body=config.critic == "own")
        self._trained = self._own_part(self.policy)
        self._stepped = self.optimizer = make_optimizer(
            self._trained,
            learning_rate=config.learning_rate,
            critic_learning_rate=config.critic_learning_rate or None,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
            kind=config.optimizer,
            offload=config.offload_optimizer,
        )
        self._reference = self._own_reference() if config.keeps_reference else None
        self.teacher = self._load_teacher() if config.loaded_teacher else None
        self.check: Callable[[], None] = lambda: None
        self._sampler: Sampler | None = None
        self._ending = ExitStack()  # of the environment's processes, if it plays episodes
        self._served = (0, 0)  # the version of the weights that it has, and `gathers` then

    def _load_teacher(self) -> Policy:
        """Load the teacher, whole on every rank."""
        own = self.config
        teacher = load_frozen(
            model_path(own.loaded_teacher),
            dtype=own.param_dtype,
            compute_dtype=own.compute_dtype,
            device=str(self.policy.device),
        )
        teacher.use_kernels(own.fused_kernels)
        return teacher

    @property
    def _compared_with(self) -> Teacher | None:
        """The teacher, if updates need its probabilities of all tokens."""
        if self.teacher is None or self.config.divergence == "sampled":
            return None
        return Teacher(self.teacher, reverse=self.config.divergence == "reverse_kl")

    def _own_part(self, policy: Policy) -> Policy:
        """Return what this rank holds of a policy."""
        return policy

    def _own_reference(self) -> Policy:
        """Return what this rank holds of the reference policy: the initial one."""
        return self.policy.reference()

    def close(self) -> None:
        """End what it has started: an environment's processes."""
        self._ending.close()

    # On every rank at the same time

    def update(self, batch: Mapping[str, Tensor], **how: Any) -> dict[str, float]:
        """Do one update on a batch, see `train_update`; afterwards the weights of all ranks are the same, to the last bit.

        Raises:
            RlvrError: they are not.
        """
        metrics = self._update(batch, **how)
        difference = self.ranks.first_difference(self.policy.trainable_parameters()) if self.ranks.size > 1 else None
        if difference is not None:
            raise RlvrError(
                f"After an update the weights of trainer {difference[0]} differ from those of trainer 0, first in {difference[1]}.",
                "The checkpoints before this step are sound. Look for a faulty device, or devices of different kinds.",
            )
        return metrics

    def _update(self, batch: Mapping[str, Tensor], **how: Any) -> dict[str, float]:
        teacher = self._compared_with
        return train_update(
            self._trained, self._stepped, dict(batch), teacher=teacher, check=self.check, ranks=self.ranks, **how
        )

    def scores(self, batch: Mapping[str, Tensor], *, of: Scored, **how: Any) -> dict[str, Tensor]:
        """Compute the log-probabilities of the responses, and their values if the policy has a critic: see `compute_scores`."""
        model = {"policy": self._trained, "reference": self._reference, "teacher": self.teacher}[of]
        assert model is not None, f"the options keep no {of}"
        return compute_scores(model, dict(batch), check=self.check, ranks=self.ranks, **how)

    def gather(self, *, everywhere: bool) -> None:
        """Give `policy` its weights on rank 0, or on all ranks."""

    @torch.no_grad()
    def copy_rank_0(self) -> None:
        """Copy weights and optimizer state of rank 0."""
        self.ranks.broadcast_tensors(distinct_tensors(self.policy.weights()).values())
        parameters: list[Tensor] = [*self.policy.trainable_parameters().values()]
        stepped = self.ranks.broadcast([parameter in self.optimizer.state for parameter in parameters])
        state: Mapping[Tensor, Mapping[str, Tensor]] = self.optimizer.state
        if self.ranks.rank:
            state = {
                parameter: {key: slot.zeros() for key, slot in layout(self.optimizer, parameter).items()}
                for parameter in compress(parameters, stepped)
            }
        for parameter in compress(parameters, stepped):
            self.ranks.broadcast_tensors(state[parameter][key] for key in layout(self.optimizer, parameter))
        if self.ranks.rank:
            load_state(self.optimizer, state)

    def sample(
        self, requests: Sequence[Request], params: SamplingParams, *, version: int, sleep_mode: bool, canceled: str
    ) -> None:
        """Answer this rank's share of the requests with the embedded engine, in episodes if there is an environment. Rank 0 gets the completions.

        On rank 0 `DividedSampler` answers its own share.

        Args:
            version: of the weights.
            sleep_mode: give the engine's memory back afterwards.
            canceled: the note (`Ranks.post`) after which nobody waits for the answers.
        """
        if self._sampler is None:
            kind = engine_kind("transformers")
            assert kind.share is not None
            settings = replace(settings_of(self.config), device=str(self.policy.device), sleep_mode=sleep_mode)
            pool = self._ending.enter_context(open_environment(self.config, quiet=True))
            engine = kind.share(self.policy, settings)
            self._sampler = played(engine, self.config, self.policy.tokenizer, pool, trains=True)
            self._served = (self._sampler.policy_version, self.gathers)
        if self._served != (version, self.gathers):
            self._sampler.load_weights(self.policy, version)
            self._served = (version, self.gathers)
        found: list[Completion] = []
        completions = self._sampler.sample(share(requests, self.ranks), params)
        for completion in completions:
            found.append(completion)
            fault_point("sampled")
            if self.ranks.posted(canceled):
                break
        completions.close()
        self._sampler.sleep()
        self.ranks.gather(found, patient=True)


def share(requests: Sequence[Request], ranks: Ranks) -> list[Request]:
    """Return the requests that this rank answers."""
    return list(requests[ranks.rank :: ranks.size])
