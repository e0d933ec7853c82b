"""The evaluations of a training run: the same questions each time, answered by the current policy.

Enters: questions, an open sampler and grader pool. Leaves: rollouts of phase `eval` and their averages in the run.
"""

import time

from rlvr_cli.config.shared.training import TrainingConfig
from rlvr_cli.data.datasets import Dataset
from rlvr_cli.data.prompts import PromptTemplate
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.collect import log_generations, stored_stats
from rlvr_cli.rollouts.grading import check_grade_errors, grader_hint, stored_errors
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.samplers.episodes.turns import environment_spec
from rlvr_cli.terminal import console
from rlvr_cli.types import Graders, Sampler, SamplingParams


class Evaluator:
    """Evaluates the policy and measures how long that takes.

    Attributes:
        seconds_per_question: that of the slowest evaluation so far, also of an earlier session.
    """

    def __init__(
        self,
        config: TrainingConfig,
        run: RunDir,
        *,
        eval_dataset: Dataset,
        template: PromptTemplate,
        params: SamplingParams,
        grader: Graders,
        stop: StopRequest,
    ) -> None:
        self.config, self.run = config, run
        self.eval_dataset = eval_dataset
        self._template, self._params, self._grader, self._stop = template, params, grader, stop
        self.seconds_per_question = 0.0

    def is_due(self, updates: int) -> bool:
        """Before the first update, and every `eval_every` updates."""
        every = self.config.eval_every
        return updates == 0 or bool(every and updates % every == 0)

    def evaluate(self, sampler: Sampler, updates: int, *, last: bool = False) -> tuple[float, dict[str, float]]:
        """Sample and grade the questions that the run does not yet hold for this evaluation. Returns seconds, and the averages.

        Raises:
            RlvrError: before the first update, more responses than --max-grade-errors could not be graded.
        """
        started = time.monotonic()
        examples = self.eval_dataset.examples[: self.num_questions(last=last)]
        new = len(examples) - len(self.run.committed_keys("eval", updates))
        averages = log_generations(
            self.run,
            phase="eval",
            step=updates,
            examples=examples,
            num_samples=1,
            template=self._template,
            sampler=sampler,
            params=self._params,
            grader=self._grader,
            seed=self.config.seed,
            stop=self._stop,
        )
        seconds = time.monotonic() - started
        console.say(
            f"evaluation     after {updates} updates: reward {averages['reward/mean']:.3f}, "
            f"length {averages['length/mean']:.0f}, {averages['reward/samples']:.0f} questions in {seconds:.1f} s"
        )
        if not updates:
            check_grade_errors(
                stored_errors(self.run.path, phase="eval", step=updates),
                at_most=self.config.max_grade_errors,
                of="the first evaluation",
                hint=grader_hint(self.run.path, phase="eval"),
                environment=environment_spec(self.config).title,
            )
        each = seconds / new if new == len(examples) else self._stored_seconds_per_question(updates)
        self.seconds_per_question = max(self.seconds_per_question, each)
        return seconds, averages

    def _stored_seconds_per_question(self, updates: int) -> float:
        """Those of an evaluation that earlier sessions asked, in part or whole; 0 in runs that did not store them.

        The questions that were left would not tell: of few, the fixed cost dominates the average.
        """
        stats = stored_stats(self.run, phase="eval", step=updates)
        return (stats.waiting_seconds + stats.grading_seconds) / len(self.run.committed_keys("eval", updates))

    def num_questions(self, *, last: bool) -> int:
        """How many questions an evaluation asks."""
        final = self.config.final_eval_examples if last else None
        return min(final or self.config.eval_examples, self.eval_dataset.rows)

    def expected_seconds(self, updates: int, *, most_updates: int, evaluates: bool | None = None) -> float:
        """Expected seconds of the last evaluation, plus those of the ones that are due in the next step.

        Args:
            evaluates: whether one is due; None: as many as the next `most_updates` updates reach.
        """
        every, ahead = self.config.eval_every, updates + max(most_updates, 1) - 1
        due = int(evaluates or 0)
        if evaluates is None and every:
            due = ahead // every - (updates - 1) // every
        questions = self.num_questions(last=True) + due * self.num_questions(last=False)
        return questions * self.seconds_per_question
