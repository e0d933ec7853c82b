"""Evaluations of a training run: how long the next one is expected to take."""

import time

import pytest

from factories import a_completion
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.data.datasets import Dataset
from rlvr_cli.data.prompts import load_prompt
from rlvr_cli.errors import Interrupted
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.process import StopRequest
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.training.evaluation import Evaluator
from rlvr_cli.types import Example, SamplingParams

SECONDS = 0.05  # per answer
EXAMPLES = [Example(id=f"q{i}", question=f"{i}+1?", ground_truth=str(i + 1)) for i in range(6)]


class SlowSampler:
    """Takes `SECONDS` for each answer; is interrupted after some of them if asked to."""

    engine = "slow"
    policy_version = 0
    seeding = "per-request"
    notes = ()
    worked_seconds = None
    arrived = ()

    def __init__(self, interrupted_after=None):
        self.interrupted_after = interrupted_after

    def sample(self, requests, params):
        for number, _ in enumerate(requests):
            if number == self.interrupted_after:
                raise Interrupted
            time.sleep(SECONDS)
            yield a_completion(request_index=number)

    def load_weights(self, model, policy_version):
        raise AssertionError("not asked for")

    def close(self):
        pass


@pytest.fixture(scope="module")
def pool():
    with GraderPool("r1_zero", workers=1) as pool:
        yield pool


def session(run, pool, **options):
    """The evaluator of a process that writes the run."""
    return Evaluator(
        GrpoConfig(**{"eval_every": 0, "eval_examples": len(EXAMPLES)} | options),
        run,
        eval_dataset=Dataset("some", None, EXAMPLES, "0", "a test"),
        template=load_prompt("r1_zero"),
        params=SamplingParams(),
        grader=pool,
        stop=StopRequest(),
    )


@pytest.mark.parametrize("answered", [1, 5])
def test_a_resumed_run_knows_how_long_an_evaluation_takes_that_was_asked_in_parts(tmp_path, pool, answered):
    started = time.monotonic()
    with RunDir.create(tmp_path, "grpo", metadata={}) as run, pytest.raises(Interrupted):
        session(run, pool).evaluate(SlowSampler(answered), 0)
    with RunDir.resume(run.path) as run:
        resumed = session(run, pool)
        resumed.evaluate(SlowSampler(), 0)
    assert SECONDS <= resumed.seconds_per_question < (time.monotonic() - started) / len(EXAMPLES)
    assert resumed.expected_seconds(1, most_updates=1) >= len(EXAMPLES) * SECONDS


def test_a_resumed_run_knows_how_long_a_stored_evaluation_took(tmp_path, pool):
    with RunDir.create(tmp_path, "grpo", metadata={}) as run:
        first = session(run, pool)
        first.evaluate(SlowSampler(), 0)
    with RunDir.resume(run.path) as run:
        resumed = session(run, pool)
        resumed.evaluate(SlowSampler(interrupted_after=0), 0)  # nothing is left to ask
    assert SECONDS <= resumed.seconds_per_question <= first.seconds_per_question


def test_a_last_evaluation_of_more_questions_counts_for_each_of_them(tmp_path, pool, capsys):
    fewer = {"eval_examples": 1, "final_eval_examples": len(EXAMPLES)}
    with RunDir.create(tmp_path, "grpo", metadata={}) as run:
        first = session(run, pool, **fewer)
        first.evaluate(SlowSampler(), 3, last=True)
    with RunDir.resume(run.path) as run:
        resumed = session(run, pool, **fewer)
        resumed.evaluate(SlowSampler(), 3)
    assert capsys.readouterr().err.count(f", {len(EXAMPLES)} questions in ") == 2, (
        "the averages are of all that are stored"
    )
    assert SECONDS <= resumed.seconds_per_question <= first.seconds_per_question


def test_all_evaluations_that_are_due_in_the_next_step_count(tmp_path, pool):
    """Those before its first update and between its updates; the one after its last update belongs to the step that follows."""
    with RunDir.create(tmp_path, "ei", metadata={}) as run:
        often, never = (session(run, pool, eval_every=every) for every in (2, 0))
    often.seconds_per_question = never.seconds_per_question = 1.0
    assert [often.expected_seconds(7, most_updates=9, evaluates=due) for due in (False, True)] == [6.0, 12.0]
    due = {(7, 9): 4, (16, 16): 8, (0, 1): 1, (7, 1): 0, (7, 0): 0, (8, 0): 1}  # updates before the step, and in it
    expected = {(before, most): often.expected_seconds(before, most_updates=most) for before, most in due}
    assert expected == {step: 6.0 * (1 + n) for step, n in due.items()}
    assert never.expected_seconds(7, most_updates=9) == 6.0
