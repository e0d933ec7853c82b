"""What every training command does around its algorithm: update, evaluate, save, stop in time, go on where it was.

Enters: the options that the training commands share, an open run, a grader. Leaves: a `Trainer`, which holds the policy, its
optimizer and its sampler, and writes the run's metrics, evaluations, checkpoints and final model.
"""

import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from torch import Tensor

from rlvr_cli.config.shared import TrainingConfig
from rlvr_cli.data.datasets import Dataset
from rlvr_cli.data.prompts import PromptTemplate
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.models.device import autocast_dtype, device_apart, explained_memory, use_few_threads
from rlvr_cli.models.identity import model_path
from rlvr_cli.models.policy import load_policy, save_policy
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.collect import log_generations
from rlvr_cli.runs.metrics_log import MetricsLog
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.samplers.open import open_sampler
from rlvr_cli.samplers.process import SamplingProcess, weights_of
from rlvr_cli.terminal import console
from rlvr_cli.training.checkpoints import load_checkpoint, save_checkpoint
from rlvr_cli.training.optimizer import learning_rate_at, make_optimizer
from rlvr_cli.training.update import train_update
from rlvr_cli.training.weight_sync import Snapshot
from rlvr_cli.types import Sampler, SamplingParams

MISMATCH_BOUND = 5e-2  # nats a token, between sampler and trainer with the same weights, over which it is said
RESERVE = 1.2  # times what the last evaluation is expected to take, when a time limit comes near


class Trainer:
    """The policy under training. Use as a context manager: an interruption saves a checkpoint before it goes on its way.

    Attributes:
        model, tokenizer, sampler: the policy, and the engine that samples from it.
        updates: optimizer updates tried so far, skipped ones too; the version of the policy.
        position: counters of the command's own, kept in checkpoints; what it needs to find its place again.
        tensors: the same for tensors.
    """

    def __init__(
        self,
        options: TrainingConfig,
        run: RunDir,
        *,
        engine: str,
        num_updates: int,
        questions: Dataset | None,
        template: PromptTemplate,
        eval_params: SamplingParams,
        grader: GraderPool,
        stop: StopRequest,
    ) -> None:
        """Load the model into trainer and engine; go on from the run's last checkpoint when it has one.

        Args:
            options: the config of the training command.
            engine: `transformers` samples from the trainer's own weights.
            num_updates: how many there will be, for the learning-rate schedule.
            questions: those of the evaluations; None for none.
            eval_params: how the evaluations sample.
        """
        self.options, self.run, self.stop = options, run, stop
        self.num_updates = num_updates
        self.questions, self.template, self.eval_params, self.grader = questions, template, eval_params, grader
        self.updates = 0
        self.position: dict[str, int] = {}
        self.tensors: dict[str, Tensor] = {}
        self.notices: list[str] = []
        self.metrics = MetricsLog(run)
        self._mismatch_said = False
        self._skipped_in_a_row = 0
        self._longest_step = 0.0
        self._most_updates = 0  # of a step
        self._evaluation_seconds = 0.0  # the longest so far, per question
        self._step_started: float | None = None
        self.lagging: Snapshot | None = None  # the policy that the next rollouts come from, where that is not this one
        self.process: SamplingProcess | None = None
        shared = engine == "transformers"
        if options.async_steps:
            self.sampler: Sampler = self._start_process(engine)
            shared = False
        elif not shared:  # an engine of its own takes its share of the device's memory before the trainer fills it
            self.sampler = open_sampler(
                engine,
                options.model,
                dtype=options.dtype,
                max_model_len=options.max_model_len,
                gpu_memory_utilization=options.gpu_memory_utilization,
                seed=options.seed,
                sleep_mode=options.device in ("auto", "cuda", "cuda:0"),  # vLLM takes the first device
            )
            self.sampler.sleep()
        try:
            self._load(shared=shared)
        except BaseException:
            if not shared:
                self.sampler.close()
            raise

    def _load(self, *, shared: bool) -> None:
        """Model, optimizer, the engine that shares the model, and what the last checkpoint says."""
        options = self.options
        self.model, self.tokenizer = load_policy(
            model_path(options.model), dtype=options.param_dtype, device=options.device
        )
        if self.model.device.type == "mps":
            raise RlvrError("Training does not run on mps: it sums in float64, which mps lacks.", "Use --device cpu.")
        use_few_threads(self.model)
        self.optimizer = make_optimizer(
            self.model,
            learning_rate=options.learning_rate,
            betas=(options.adam_beta1, options.adam_beta2),
            weight_decay=options.weight_decay,
        )
        if shared:
            self.sampler = TransformersSampler(
                self.model,
                self.tokenizer,
                max_batch_size=options.max_batch_size,
                cuda_graphs=options.cuda_graphs,
                autocast_dtype=autocast_dtype(self.model),
            )
        self._synchronized = -1
        self._saved: tuple[int, dict[str, int]] = (0, {})
        checkpoint, self.notices = load_checkpoint(self.run.path, model=self.model, optimizer=self.optimizer)
        if checkpoint is not None:
            state = checkpoint.state
            self.updates, self.position, self.tensors = checkpoint.step, state["position"], checkpoint.tensors
            if "lagging" in self.position:
                self.lagging = Snapshot.of_tensors(self.tensors, version=self.position["lagging"])
            self._saved = (self.updates, self.position)
            self._skipped_in_a_row = state["skipped_in_a_row"]
            self._longest_step, self._evaluation_seconds = state["longest_step"], state["evaluation_seconds"]
        self._updates_before = self.updates

    def __enter__(self) -> "Trainer":
        console.say(f"run            {self.run.path}")
        for notice in [*self.run.notices, *self.notices]:
            console.say(notice)
        if self.updates:
            console.say(f"goes on after  {self.updates} updates")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Interrupted):
                self.save()
            else:
                with suppress(RlvrError):  # of a full disk, say; `error` is what the user must see
                    self.metrics.flush()
        finally:
            self.sampler.close()

    def update(
        self,
        batch: Mapping[str, Tensor],
        *,
        position: dict[str, int],
        tensors: dict[str, Tensor] | None = None,
        **how: Any,
    ) -> dict[str, float]:
        """One optimizer update, logged as that of the policy before it, and a checkpoint if one is due.

        Args:
            position, tensors: what the command is to find after this update.
            how: the arguments of `training.train_update` that belong to the algorithm.

        Raises:
            RlvrError: too many updates in a row were skipped because they were not finite.
            Interrupted: a signal came; the update was not made.
        """
        if not batch or not batch["response_mask"].any():
            return self.skip(position, tensors)
        self.sampler.sleep()
        fault_point("update")
        with explained_memory():
            metrics = train_update(
                self.model,
                self.optimizer,
                dict(batch),
                learning_rate=learning_rate_at(
                    self.updates,
                    peak=self.options.learning_rate,
                    num_steps=self.num_updates,
                    warmup_steps=self.options.warmup_steps,
                    schedule=self.options.lr_schedule,
                ),
                max_grad_norm=self.options.max_grad_norm,
                check=self.stop.check,
                **how,
            )
        fault_point("updated")
        self.metrics.add(self.updates, metrics)
        self.updates += 1
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if metrics["update/skipped"] else 0
        if self._skipped_in_a_row >= self.options.max_skipped_updates:
            self.metrics.flush()
            raise RlvrError(
                f"{self._skipped_in_a_row} updates in a row had a loss or gradient that is not finite (up to update "
                f"{self.updates}).",
                f"The checkpoints in {self.run.path / 'checkpoints'} hold finite weights, as these updates left them. Start anew "
                "with a lower --learning-rate, and look at the metrics optimizer/grad_norm and policy/ratio_max.",
            )
        self.move_on(position, tensors)
        return metrics

    def skip(self, position: dict[str, int], tensors: dict[str, Tensor] | None = None) -> dict[str, float]:
        """Count an update for which there is nothing to train on."""
        metrics = {"update/skipped": 1.0, "update/tokens": 0.0}
        self.metrics.add(self.updates, metrics)
        self.updates += 1
        self.move_on(position, tensors)
        return metrics

    def _start_process(self, engine: str) -> SamplingProcess:
        options = self.options
        apart = device_apart(options.device)
        names = (
            "model",
            "dtype",
            "param_dtype",
            "max_batch_size",
            "cuda_graphs",
            "max_model_len",
            "gpu_memory_utilization",
        )
        opening = {name: getattr(options, name) for name in (*names, "seed")}
        device = options.device if apart is None else "cuda"
        self.process = SamplingProcess(engine, {**opening, "device": device}, visible_devices=apart)
        return self.process

    def check_mismatch(self, mean_gap: float) -> None:
        """Say it, once, when trainer and sampler give the sampled tokens different log-probabilities of the same weights.

        Args:
            mean_gap: mean over the tokens of |trainer - sampler|, nats.
        """
        if mean_gap > MISMATCH_BOUND and not self._mismatch_said:
            self._mismatch_said = True
            console.say(
                f"note: the sampler's log-probabilities differ from the trainer's by {mean_gap:.2g} nats a token on average "
                f"(metrics mismatch/*); --importance-correction truncated corrects for it."
            )

    def move_on(self, position: dict[str, int], tensors: dict[str, Tensor] | None = None) -> None:
        """This is the command's place from now on. Saves a checkpoint when one is due."""
        self.position, self.tensors = position, tensors or {}
        if self.lagging is not None:
            self.position = position | {"lagging": self.lagging.version}
            self.tensors = self.tensors | self.lagging.tensors
        every = self.options.checkpoint_every
        if every and self.updates - self._saved[0] >= every:
            self.save()

    def synchronize(self) -> float:
        """Let the sampler have the policy's weights, which it proves; the seconds that took."""
        started = time.perf_counter()
        if self._synchronized != self.updates:
            self.sampler.load_weights(self.model, self.updates)
            self._synchronized = self.updates
        return time.perf_counter() - started

    def synchronize_rollouts(self) -> float:
        """`synchronize` for the next training rollouts: with --async-steps these come from the policy that `lag_behind` kept."""
        if self.process is None:
            return self.synchronize()
        started = time.perf_counter()
        if self.lagging is None:
            self.lag_behind()
        assert self.lagging is not None
        if self._synchronized != self.lagging.version:
            with self.lagging.in_place_of(self.model):
                self.sampler.load_weights(self.model, self.lagging.version)
            self._synchronized = self.lagging.version
        return time.perf_counter() - started

    def lag_behind(self) -> None:
        """Keep the policy as it is now: what comes next is sampled from it while it learns, and again after an interruption."""
        self.lagging = Snapshot(self.updates, {n: t.detach().cpu().clone() for n, t in weights_of(self.model).items()})

    def evaluate_if_due(self) -> None:
        """Evaluate before the first update and every `eval_every` updates."""
        every = self.options.eval_every
        if self.updates == 0 or (every and self.updates % every == 0):
            self.evaluate()

    def evaluate(self, *, last: bool = False) -> None:
        """Answer the evaluation's questions; what the run holds of this evaluation is not sampled again."""
        if self.questions is None:
            return
        if last and self.process is not None:
            self.process.drop()  # what was asked ahead for a step that the time limit leaves out
        self.synchronize()  # which may have to wait for what is sampled ahead: no cost of these questions
        started = time.monotonic()
        examples = self.questions.examples[: self._questions_asked(last=last)]
        new = len(examples) - len(self.run.committed_keys("eval", self.updates))
        averages = log_generations(
            self.run,
            phase="eval",
            step=self.updates,
            examples=examples,
            template=self.template,
            sampler=self.sampler,
            params=self.eval_params,
            num_samples=1,
            grader=self.grader,
            seed=self.options.seed,
            stop=self.stop,
        )
        seconds = time.monotonic() - started
        console.say(
            f"evaluation     after {self.updates} updates: reward {averages['reward/mean']:.3f}, "
            f"length {averages['length/mean']:.0f}, {len(examples)} questions in {seconds:.1f} s"
        )
        if new == len(examples):  # of a few that were left over, what they share would weigh too much
            self._evaluation_seconds = max(self._evaluation_seconds, seconds / new)
        if self._step_started is not None:
            self._step_started += seconds  # is no part of the step

    def _questions_asked(self, *, last: bool) -> int:
        assert self.questions is not None
        final = self.options.final_eval_examples if last else None
        return min(final or self.options.eval_examples, self.questions.rows)

    def has_time(self) -> bool:
        """Whether another step of the algorithm, then the last evaluation, fit into the time limit. Ask before each step."""
        now = time.monotonic()
        if self._step_started is not None:
            self._longest_step = max(self._longest_step, now - self._step_started)
        self._step_started = now
        self._most_updates = max(self._most_updates, self.updates - self._updates_before)
        self._updates_before = self.updates
        asked = self._questions_asked(last=True) if self.questions is not None else 0
        every, ahead = self.options.eval_every, self.updates + max(self._most_updates, 1) - 1
        if self.questions is not None and every and ahead // every > (self.updates - 1) // every:
            asked += self._questions_asked(last=False)  # the step will begin, or be interrupted, by an evaluation
        needed = self._longest_step + RESERVE * asked * self._evaluation_seconds
        if self.run.wall_seconds + needed < self.options.time_limit_seconds:
            return True
        console.say(
            f"time limit {self.options.time_limit}: stopping after {self.updates} updates, for the last evaluation"
        )
        self.save()
        return False

    @property
    def step_seconds(self) -> float:
        """How long the step has taken that began with `has_time`, evaluations left out."""
        assert self._step_started is not None
        return time.monotonic() - self._step_started

    def save(self) -> None:
        """Save a checkpoint of the policy as it is. Metrics go first: what a checkpoint has done is not done again."""
        started = time.perf_counter()
        self.metrics.flush()
        if (self.updates, self.position) == self._saved:
            return
        save_checkpoint(
            self.run.path,
            step=self.updates,
            model=self.model,
            tokenizer=self.tokenizer,
            optimizer=self.optimizer,
            state={
                "position": self.position,
                "skipped_in_a_row": self._skipped_in_a_row,
                "longest_step": self._longest_step,
                "evaluation_seconds": self._evaluation_seconds,
            },
            tensors=self.tensors,
        )
        self._saved = (self.updates, self.position)
        self.metrics.add(self.updates, {"checkpoint/seconds": time.perf_counter() - started})

    def finish(self) -> None:
        """The final model in the run's `model/`, and the last evaluation: should it fail, what was trained is there."""
        if self.options.checkpoint_every:
            self.save()
        save_policy(self.model, self.tokenizer, self.run.path / "model")
        for leftover in self.run.path.glob(".model.*"):  # of a kill while it was written before
            shutil.rmtree(leftover, ignore_errors=True)
        self.evaluate(last=True)
        self.metrics.flush()
        self.run.update(updates=self.updates)
