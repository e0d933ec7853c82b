"""What every training command does around its algorithm: update, evaluate, save, respect the time limit, resume.

Enters: the options that the training commands share, an open run, a grader. Leaves: a `Trainer`, which holds the policy and its
optimizer, and writes the run's metrics, checkpoints and final model. It uses `weight_sync` (the sampler and its weights),
`evaluation`, `saving`, `time_limit` and `divergence`.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlvr_cli.config.shared.training import TrainingConfig
from rlvr_cli.data.datasets import Dataset
from rlvr_cli.data.prompts import PromptTemplate
from rlvr_cli.environments.pool import EnvironmentPool
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.models.compute.device import out_of_memory_as_user_error
from rlvr_cli.models.policy import Policy
from rlvr_cli.process import StopRequest
from rlvr_cli.runs.metrics_log import MetricsLog
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.files import shown, typed
from rlvr_cli.samplers.episodes.open import played
from rlvr_cli.terminal import console
from rlvr_cli.training.checkpoints import check_space_for_training, load_checkpoint
from rlvr_cli.training.divergence import Diverged, Divergence
from rlvr_cli.training.evaluation import Evaluator
from rlvr_cli.training.optimizers.optimizer import learning_rate_at
from rlvr_cli.training.parallel.divisions import Divisions
from rlvr_cli.training.parallel.placement import Placement
from rlvr_cli.training.parallel.replica import Scored
from rlvr_cli.training.parallel.trainers import Trainers
from rlvr_cli.training.parallel.weight_sync import Snapshot, WeightSync
from rlvr_cli.training.planning.memory import MemoryPlan
from rlvr_cli.training.planning.time_limit import TimeLimit
from rlvr_cli.training.saving import Saver
from rlvr_cli.training.updates.update import UpdateOptions
from rlvr_cli.types import Graders, Sampler


class Trainer:
    """Holds and updates the policy. Use as a context manager: on `Interrupted` it saves a checkpoint.

    Attributes:
        weights: the sampling engine, and which version of the weights it has.
        evaluator: runs the evaluations; None without evaluation questions.
        updates: optimizer updates tried so far, including skipped ones; the version of the policy.
        cursor: the data cursor: counters that the command needs to resume, kept in checkpoints.
        tensors: tensors that the command needs to resume, kept in checkpoints.
    """

    def __init__(
        self,
        config: TrainingConfig,
        run: RunDir,
        *,
        engine: str,
        placement: Placement,
        memory: MemoryPlan,
        num_updates: int,
        eval_dataset: Dataset | None,
        template: PromptTemplate,
        grader: Graders,
        environment: EnvironmentPool | None,
        stop: StopRequest,
    ) -> None:
        """Load the model into trainer and engine, and the run's last checkpoint if it has one.

        Args:
            config: the options of a training command.
            engine: the sampling engine; `transformers` samples from the trainer's own weights.
            placement, memory: where trainer and engine compute, and how they divide a device.
            num_updates: total number of updates, for the learning-rate schedule.
            eval_dataset: the evaluation questions; None for no evaluations.
            environment: what plays episodes with the policy; None: a response is one turn.
        """
        self._environment = environment
        self.config, self.run, self.stop = config, run, stop
        self.num_updates = num_updates
        self.updates = 0
        self.cursor: dict[str, int] = {}
        self.tensors: dict[str, Tensor] = {}
        self.metrics = MetricsLog(run)
        self.divergence = Divergence(max_skipped=config.max_skipped_updates)
        self.evaluator: Evaluator | None = None
        if eval_dataset is not None:
            self.evaluator = Evaluator(
                config,
                run,
                eval_dataset=eval_dataset,
                template=template,
                params=config.eval_sampling_params,
                grader=grader,
                stop=stop,
            )
        self._tokens = memory.micro_batch_tokens
        self.weights = WeightSync(config, engine=engine, placement=placement, memory=memory)
        self._ending = ExitStack()
        self._ending.callback(self.weights.close)
        with ExitStack() as failed, run.activity.doing("starting the trainers, loading the model"):
            failed.push(self._ending)
            self.trainers = Trainers(config, devices=placement.trainers, stop=stop, address=placement.address)
            self._ending.callback(self.trainers.close)
            self.run.activity.late = self.trainers.silent
            notices = self._load()
            failed.pop_all()
        console.say(f"run            {run.path}")
        for notice in [*run.notices, *notices]:
            console.say(notice)
        if self.updates:
            console.say(f"resumes after  {self.updates} updates")

    def _load(self) -> list[str]:
        """Restore the last checkpoint. Returns notices for the user."""
        config, replica = self.config, self.trainers.replica
        replica.check = self._check
        playing = partial(played, config=config, tokenizer=self.tokenizer, pool=self._environment, trains=True)
        self.weights.attach(self.policy, replica.optimizer, trainers=self.trainers, played=playing)
        if self.evaluator is not None:
            _ = self.sampler  # an engine that cannot sample from this model says so now
        checkpoint, notices = load_checkpoint(self.run.path, policy=self.policy, optimizer=replica.optimizer)
        if checkpoint is None and not notices and self._was_trained():
            folder = shown(self.run.path / "checkpoints")
            notices.append(f"{folder} holds no checkpoint: training starts over from the stored rollouts.")
        if replica.kernels_note:
            notices.append(replica.kernels_note)
        measured: dict[str, Any] = {}
        if checkpoint is not None:
            state = checkpoint.state
            self.updates, self.cursor, self.tensors = checkpoint.step, state["position"], checkpoint.tensors
            if "lagging" in self.cursor:
                self.weights.snapshot = Snapshot.from_tensors(self.tensors, version=self.cursor["lagging"])
            measured = state
            if self.evaluator is not None:
                self.evaluator.seconds_per_question = state["evaluation_seconds"]
            for phase, step, values in self.run.metrics_before(self.updates):
                self.divergence.add(phase, step, values)
            self.trainers.do("copy_rank_0")
        check_space_for_training(
            self.run.path,
            self.policy,
            replica.optimizer,
            updates=max(self.num_updates - self.updates, 0),
            every=config.checkpoint_every,
            merged=config.lora_merge,
            lagging=bool(config.async_steps),
        )
        self.clock = TimeLimit(
            config.time_limit_seconds,
            updates=self.updates,
            longest_step=measured.get("longest_step", 0.0),
            most_updates=measured.get("most_updates", 0),
        )
        self.saver = Saver(
            config,
            self.run,
            updates=self.updates,
            cursor=self.cursor,
            seconds=measured.get("checkpoint_seconds", 0.0),
        )
        self.divisions = Divisions(self.run, updates=self.updates)
        return notices

    def _was_trained(self) -> bool:
        """Whether there are metrics of an update."""
        return any("update/tokens" in values for _, _, values in self.run.metrics_before(sys.maxsize))

    def _check(self) -> None:
        """Before each micro-batch: the work moves, unless a signal has arrived."""
        self.run.activity.progress()
        self.stop.check()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.trainers.dismiss()
            elif isinstance(error, Interrupted):
                self.save()
            else:
                with suppress(RlvrError):  # such as a full disk: the user must see `error` instead
                    self.metrics.flush()
        finally:
            self._ending.close()

    @property
    def step_of_batch(self) -> int:
        """The updates before the rollout batch that is trained on next: it may have had some of its updates already."""
        of_batch = self.cursor.get("updates_of_batch", self.cursor.get("updates_of_step", 0))
        return self.updates - of_batch

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Of the model being trained."""
        return self.trainers.replica.policy.tokenizer

    @property
    def compute_dtype(self) -> torch.dtype:
        """The precision in which the model computes."""
        return self.trainers.replica.policy.compute_dtype

    @property
    def _split(self) -> dict[str, int | None]:
        """What a micro-batch holds."""
        return {"micro_batch_size": self.config.micro_batch_rows, "micro_batch_tokens": self._tokens}

    @property
    def policy(self) -> Policy:
        """The model being trained, with its weights until the next update."""
        return self.trainers.policy

    @property
    def sampler(self) -> Sampler:
        """The engine that samples for training and evaluations, episodes if there is an environment."""
        return self.weights.sampler

    def update(
        self,
        batch: Mapping[str, Tensor],
        *,
        cursor: dict[str, int],
        tensors: dict[str, Tensor] | None = None,
        learning_rate: float | None = None,
        **how: Unpack[UpdateOptions],
    ) -> dict[str, float]:
        """Do one optimizer update, log its metrics under the number of updates before it, and checkpoint if one is due.

        Args:
            cursor, tensors: the data cursor and the tensors to resume from after this update.
            learning_rate: None: that of the schedule after as many updates.

        Raises:
            RlvrError: too many updates in a row were skipped because loss or gradient was not finite.
            Diverged: the run has diverged, and is to end; the update was done.
            Interrupted: a signal arrived; the update was not done.
        """
        if not batch or not batch["response_mask"].any():
            return self.skip(cursor, tensors)
        self.divisions.record(updates=self.updates, trainers=self.trainers.size, fsdp=self.config.fsdp)
        self.weights.sleep()
        fault_point("update")
        of = f" of {self.num_updates}" if self.num_updates else ""
        doing = self.run.activity.doing(f"update {self.updates + 1}{of}", unit="micro-batch")
        with out_of_memory_as_user_error(), doing:
            metrics = self.trainers.do(
                "update",
                dict(batch),
                learning_rate=self.learning_rate_at(self.updates) if learning_rate is None else learning_rate,
                max_grad_norm=self.config.max_grad_norm,
                gradient_checkpointing=self.config.gradient_checkpointing,
                **self._split,
                **how,
            )
        fault_point("updated")
        self._log(metrics)
        self.divergence.read(self.updates)
        skipped = self.divergence.skipped_in_a_row
        if skipped >= self.config.max_skipped_updates and self.config.stop_when == "never":
            self.metrics.flush()
            raise RlvrError(
                f"{skipped} updates in a row had a loss or gradient that is not finite (up to update {self.updates}).",
                f"They were skipped, so the checkpoints in {self.run.path / 'checkpoints'} hold finite weights. Start a new run "
                "with a lower --learning-rate, and look at the metrics optimizer/grad_norm and policy/ratio_max.",
            )
        self._advance_cursor(cursor, tensors)
        self.check_divergence()
        return metrics

    def learning_rate_at(self, step: int, *, trained: int | None = None) -> float:
        """The learning rate of an update, see `optimizer.learning_rate_at`."""
        return learning_rate_at(
            step,
            peak=self.config.learning_rate,
            num_steps=self.num_updates,
            warmup_steps=self.config.warmup_steps,
            schedule=self.config.lr_schedule,
            trained=trained,
        )

    def log_probs(
        self,
        batch: Mapping[str, Tensor],
        *,
        of: Scored = "policy",
        temperature: float,
    ) -> Tensor:
        """Compute the log-probabilities of the responses, (batch, seq): see `scores`."""
        return self.scores(batch, of=of, temperature=temperature)["log_probs"]

    def scores(
        self,
        batch: Mapping[str, Tensor],
        *,
        of: Scored = "policy",
        temperature: float,
    ) -> dict[str, Tensor]:
        """Compute the log-probabilities of the responses, and their values if the policy has a critic: see `compute_scores`.

        Args:
            of: `reference` is the initial policy, with --kl-coef; `teacher` that of distillation.
        """
        if self.config.fsdp:  # an engine that samples with these weights loses them
            self.weights.sleep()
        doing = self.run.activity.doing(f"log-probabilities of the {of}", unit="micro-batch")
        with out_of_memory_as_user_error(), doing:
            return self.trainers.do(
                "scores",
                dict(batch),
                of=of,
                temperature=temperature,
                **self._split,
            )

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """A block that computes what the objective needs of a batch. The engine gives its memory back first; the seconds are a metric."""
        started = time.perf_counter()
        self.weights.sleep()
        yield
        self.metrics.add(self.updates, {"scoring/seconds": time.perf_counter() - started})

    def skip(self, cursor: dict[str, int], tensors: dict[str, Tensor] | None = None) -> dict[str, float]:
        """Count an update that has no token to train on as skipped."""
        metrics = {"update/skipped": 1.0, "update/tokens": 0.0}
        self._log(metrics)
        self._advance_cursor(cursor, tensors)
        self.check_divergence()
        return metrics

    def _log(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an update under the number of updates before it, and count it."""
        self.metrics.add(self.updates, metrics)
        self.divergence.add("train", self.updates, metrics)
        self.updates += 1

    def check_divergence(self) -> None:
        """Raise Diverged if --stop-when asks for it and the updates so far have diverged."""
        why = self.divergence.read(self.updates)
        if why and self.config.stop_when == "diverged":
            raise Diverged(why)

    def _advance_cursor(self, cursor: dict[str, int], tensors: dict[str, Tensor] | None) -> None:
        """Advance the data cursor; checkpoint when one is due."""
        self.cursor, self.tensors = cursor, tensors or {}
        snapshot = self.weights.snapshot
        if snapshot is not None:
            self.cursor = cursor | {"lagging": snapshot.version}
            self.tensors = self.tensors | snapshot.tensors
        if self.saver.is_due(self.updates):
            self.save()

    @contextmanager
    def progress(self, unit: str, total: int, *, done: int, longer: str = "") -> Iterator[console.Progress]:
        """Show the progress of the whole run; of a run that is finished, say so.

        Args:
            total, done: how many steps or updates the run has, and how many of them before now.
            longer: an option that extends the run, with a value.

        Raises:
            Diverged: a run that is resumed has diverged before, and is to end.
        """
        self.check_divergence()
        if self.updates and done >= total:
            how = f"; longer with: rlvr {self.run.metadata['command']} --resume {typed(self.run.place)} {longer}"
            extends = (
                longer and self.config.lr_schedule == "constant"
            )  # else more would have changed those that are done
            console.say(f"finished       all {total} {unit} are done{how if extends else ''}")
        with console.progress(unit, total, done=done, running_mean=False) as bar:
            yield bar

    def evaluate_if_due(self) -> None:
        """Evaluate before the first update and every `eval_every` updates."""
        if self.evaluator is not None and self.evaluator.is_due(self.updates):
            self.evaluate()

    def evaluate(self, *, last: bool = False) -> None:
        """Evaluate the current policy; without evaluation questions this does nothing."""
        if self.evaluator is None:
            return
        if last and self.weights.process is not None:
            self.weights.process.cancel_pending()  # requests sent ahead for a step that the time limit rules out
        self.sync_weights(self.updates)  # before timing: it may have to wait for rollouts that are sampled ahead
        seconds, averages = self.evaluator.evaluate(self.sampler, self.updates, last=last)
        self.clock.leave_out(seconds)
        self.divergence.add("eval", self.updates, averages)

    def sync_weights(self, version: int, *, rollouts: bool = False) -> float:
        """Give the sampler its weights, see `WeightSync.sync` and, for the next training rollouts, `sync_rollouts`. Returns seconds."""
        with self.run.activity.doing("giving the sampler the weights"):
            return (self.weights.sync_rollouts if rollouts else self.weights.sync)(version)

    def has_time(self, *, evaluates: bool | None = None) -> bool:
        """Whether another step, what is saved in the end and the last evaluation fit into the time limit. Call it before each step.

        Args:
            evaluates: whether the step has an evaluation; None: if its updates reach one.
        """
        self.clock.begin_step(self.updates)
        evaluations = 0.0
        if self.evaluator is not None:
            evaluations = self.evaluator.expected_seconds(
                self.updates, most_updates=self.clock.most_updates, evaluates=evaluates
            )
        saving = 2 * self.saver.seconds  # of the last checkpoint, and as much for the model, which has not been timed
        if self.clock.has_room(self.run.wall_seconds, seconds_besides=evaluations + saving):
            return True
        console.say(
            f"time limit {self.config.time_limit}: stopping after {self.updates} updates, to leave time for the last evaluation"
        )
        self.save()
        return False

    def save(self) -> None:
        """Save a checkpoint. Metrics are committed first: updates that a checkpoint contains are never repeated."""
        self.metrics.flush()
        if self.saver.has(self.updates, self.cursor):
            return
        seconds = self.saver.save(
            self.trainers,
            updates=self.updates,
            cursor=self.cursor,
            tensors=self.tensors,
            state={
                "longest_step": self.clock.longest_step,
                "most_updates": self.clock.most_updates,
                "checkpoint_seconds": self.saver.seconds,
                "evaluation_seconds": self.evaluator.seconds_per_question if self.evaluator else 0.0,
            },
        )
        self.metrics.add(self.updates, {"checkpoint/seconds": seconds})
        self.metrics.flush()  # this update is not repeated when the run resumes

    def finish(self) -> None:
        """Save the final model in the run's `model/`, then do the last evaluation: if that fails, the model is saved."""
        if self.config.checkpoint_every:
            self.save()
        self.saver.save_model(self.trainers)
        self.evaluate(last=True)
        self.metrics.flush()
        self.run.update(updates=self.updates)
