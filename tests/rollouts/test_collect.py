"""Collecting rollouts: seeds depend only on a sample's key, and rows survive interruptions and errors."""

import dataclasses
import threading
import time

import pytest

from checks import calls_into
from endpoint import completion as answer
from endpoint import error, serving
from factories import a_completion, a_conversation
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.data.prompts import load_prompt, prompt_of
from rlvr_cli.errors import Interrupted, QuestionsRefused, RlvrError
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts import collect as collecting
from rlvr_cli.rollouts import grading
from rlvr_cli.rollouts.collect import collect_rollouts, log_generations, sample_groups
from rlvr_cli.rollouts.grading import choose_grader
from rlvr_cli.rollouts.regrade import plan_regrade, regrade
from rlvr_cli.rollouts.requests import request_seed
from rlvr_cli.runs import manifest
from rlvr_cli.runs.readers import read_rollouts, read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.parquet import to_rollouts
from rlvr_cli.samplers.openai import OpenAISampler
from rlvr_cli.types import Example, SamplingParams, Turn

EXAMPLES = [Example(id=f"q{i}", question=f"{i}+1?", ground_truth=str(i + 1)) for i in range(6)]
TEMPLATE = load_prompt("r1_zero")


class ScriptedSampler:
    """Answers each request from its prompt and seed alone, as an engine does; can fail after n answers."""

    engine = "scripted"
    policy_version = 7
    seeding = "per-request"
    notes = ()
    worked_seconds = None
    arrived = ()

    def __init__(self, *, fail_after=None, error=None):
        self.fail_after, self.error, self.asked = fail_after, error, 0

    def sample(self, requests, params):
        done = 0
        for r, request in enumerate(requests):
            for s, seed in enumerate(request.seeds):
                if done == self.fail_after:
                    raise self.error
                done += 1
                self.asked += 1
                number = int(request.prompt.rsplit("User: ", 1)[1].split("+")[0])
                answer = number + 1 if seed % 2 else number
                yield a_completion(
                    request_index=r,
                    sample_index=s,
                    text=f" adding </think> <answer> {answer} </answer>",
                    prompt_ids=(1, 2),
                    token_ids=(3, 4, seed % 100),
                    logprobs=(-0.5, -1.0, -1.5),
                    num_prompt_tokens=2,
                    num_tokens=3,
                )

    def load_weights(self, model, policy_version):
        raise AssertionError("not asked for")

    def close(self):
        pass


@pytest.fixture(scope="module")
def pool():
    with GraderPool("r1_zero", workers=1) as pool:
        yield pool


def collect(run, sampler, pool, *, examples=EXAMPLES, num_samples=2, stop=None, **more):
    collect_rollouts(
        run,
        phase="eval",
        step=0,
        examples=examples,
        template=TEMPLATE,
        sampler=sampler,
        params=SamplingParams(),
        num_samples=num_samples,
        grader=pool,
        seed=5,
        stop=stop or StopRequest(),
        **more,
    )


def rows_of(run, *, without=("sampled_at", "run_id")):
    rows = read_rollouts(run.path).to_pylist()
    kept = [{k: v for k, v in r.items() if k not in without} for r in rows]
    return sorted(kept, key=lambda r: (r["example_id"], r["sample_index"]))


def test_a_row_has_prompt_response_and_grade(tmp_path, pool):
    with RunDir.create(tmp_path, "eval", metadata={}) as run:
        collect(run, ScriptedSampler(), pool)
        rows = rows_of(run)
    assert [(r["example_id"], r["sample_index"]) for r in rows] == [(e.id, i) for e in EXAMPLES for i in range(2)]
    for r in rows:
        seed = request_seed(5, phase="eval", step=0, example_id=r["example_id"], sample_index=r["sample_index"])
        right = seed % 2
        assert r["seed"] == seed
        assert r["prompt"].endswith(f"User: {r['example_id'][1]}+1?\nAssistant: <think>")
        assert (r["format_reward"], r["answer_reward"], r["reward"]) == (1.0, float(right), float(right))
        assert r["category"] == f"format_1_answer_{right}"
        assert r["failure_kind"] == (None if right else "wrong_answer")
        assert r["response_ids"] == [3, 4, seed % 100]
        assert r["mean_logprob"] == pytest.approx(-1.0)
        assert (r["policy_version"], r["mean_entropy"], r["advantage"]) == (7, 0.25, None)


def test_a_row_has_the_tokens_that_an_environment_wrote(tmp_path, pool):
    turns = (Turn("policy", 0, 1), Turn("calculator", 1, 2), Turn("policy", 2, 3))

    class InTurns(ScriptedSampler):
        def sample(self, requests, params):
            for c in super().sample(requests, params):
                mask, logprobs = (True, False, True), (-0.5, 0.0, -1.5)
                yield dataclasses.replace(c, response_mask=mask, turns=turns, logprobs=logprobs)

    with RunDir.create(tmp_path, "eval", metadata={}) as run:
        collect(run, InTurns(), pool)
        assert run.cost("eval", 0)["tokens"] == 24, "those that the policy sampled"
    rollouts = to_rollouts(read_rollouts(run.path))
    assert {(r.response_mask, r.turns, r.mean_logprob) for r in rollouts} == {((True, False, True), turns, -1.0)}
    with open_runs([read_run(run.path)]) as database:
        kinds = "SELECT typeof(response_mask), typeof(turns) FROM rollouts LIMIT 1"
        assert database.select(kinds).rows == [
            ("BOOLEAN[]", 'STRUCT("role" VARCHAR, "start" INTEGER, "end" INTEGER)[]')
        ]
        spoke = 'SELECT turn.role, sum(turn."end" - turn.start) FROM (SELECT unnest(turns) AS turn FROM rollouts) GROUP BY 1 ORDER BY 1'
        assert database.select(spoke).rows == [("calculator", 12), ("policy", 24)]
        named = named_queries()["entropy_by_position"]
        positions = database.select(named.sql, named.parameters).rows
    assert [(row[2], row[3], row[4]) for row in positions] == [(0, 12, 0.5), (2, 12, 1.5)]


def test_an_answer_may_be_wrong_since_a_call_failed_as_a_later_grade_says_too(tmp_path, pool):
    class Calls(ScriptedSampler):
        def sample(self, requests, params):
            for c in super().sample(requests, params):
                told = a_conversation(("policy", c.text), ("calc", "?"), failed_turns=(0,), ended_by="length")
                same = {name: told[name] for name in ("response_mask", "turns", "episode", "turn_facts")}
                ids, logprobs = told["response_ids"], told["sampled_logprobs"]
                counted = {"num_tokens": len(ids), "token_ids": ids, "logprobs": logprobs}
                yield dataclasses.replace(c, text=told["response"], **counted, **same)

    with RunDir.create(tmp_path, "eval", metadata={}) as run:
        collect(run, Calls(), pool)
        by = {"grader": "r1_zero", "grader_sha256": None}
        regrade(run, plan_regrade(run, **by, phase="eval", again=True), **by, pool=pool, stop=StopRequest())
    with open_runs([read_run(run.path)]) as database:
        for table in ("rollouts", "grades"):
            found = database.select(f"SELECT DISTINCT failure_kind FROM {table} WHERE reward = 0")
            assert found.rows == [("tool_error",)], table


def test_a_grader_may_ask_for_the_example(tmp_path):
    grader = tmp_path / "asks.py"
    grader.write_text(
        "def grade(response, ground_truth, example):\n"
        "    whole = example['question'] in example['prompt'] and example['ground_truth'] == ground_truth\n"
        "    return {'reward': float(whole), 'extracted_answer': example['id'] + example['prompt']}\n"
    )

    class BegunByAnEnvironment(ScriptedSampler):
        def sample(self, requests, params):
            for c in super().sample(requests, params):
                given = f"Its own: {requests[c.request_index].example.question}" if c.sample_index else None
                yield dataclasses.replace(c, prompt=given)

    with (
        GraderPool(f"{grader}:grade", workers=1) as pool,
        RunDir.create(tmp_path, "eval", metadata={}) as run,
    ):
        collect(run, BegunByAnEnvironment(), pool)
    rows = rows_of(run)
    assert [r["extracted_answer"] for r in rows] == [r["example_id"] + r["prompt"] for r in rows]
    assert rows[1]["prompt"] == "Its own: 0+1?"
    assert {r["reward"] for r in rows} == {1.0}


PATIENT = """
import pathlib, time

def grade(response, ground_truth):
    while not (pathlib.Path(__file__).parent / "later").exists():
        time.sleep(0.01)
    return {"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0}
"""


@pytest.mark.parametrize(("rows", "ahead"), [(4, 2), (2, 1), (1, 3)])
def test_completions_are_graded_while_others_are_sampled(tmp_path, monkeypatch, rows, ahead):
    monkeypatch.setattr(grading, "GRADE_ROWS", rows)
    monkeypatch.setattr(grading, "GRADING_AHEAD", ahead)
    grader = tmp_path / "patient.py"
    grader.write_text(PATIENT)

    class Later(ScriptedSampler):
        def sample(self, requests, params):
            for number, completion in enumerate(super().sample(requests, params), 1):
                yield completion
                if number == ahead * rows:  # these are with the graders, which finish only after the sampler continues
                    (tmp_path / "later").touch()

    with (
        GraderPool(f"{grader}:grade", workers=1, timeout=20) as pool,
        RunDir.create(tmp_path, "eval", metadata={}) as run,
    ):
        collect(run, Later(), pool)
        found = rows_of(run)
    assert [(r["example_id"], r["sample_index"]) for r in found] == [(e.id, i) for e in EXAMPLES for i in range(2)]
    assert {r["reward"] for r in found} == {1.0}


@pytest.fixture(params=[(64, 4), (2, 1), (1, 3)], ids=lambda p: f"{p[0]}rows{p[1]}ahead")
def grading_sizes(request, monkeypatch):
    """Set GRADE_ROWS and GRADING_AHEAD."""
    monkeypatch.setattr(grading, "GRADE_ROWS", request.param[0])
    monkeypatch.setattr(grading, "GRADING_AHEAD", request.param[1])


@pytest.mark.usefixtures("grading_sizes")
@pytest.mark.parametrize("fail_after", [0, 1, 5, 11])
def test_interrupted_sampling_keeps_the_received_samples_and_resumes_to_the_same_rows(tmp_path, pool, fail_after):
    with RunDir.create(tmp_path, "eval", name="whole", metadata={}) as whole:
        collect(whole, ScriptedSampler(), pool)
    with RunDir.create(tmp_path, "eval", name="cut", metadata={}) as cut:
        with pytest.raises(RlvrError, match="gone"):
            collect(cut, ScriptedSampler(fail_after=fail_after, error=RlvrError("gone")), pool)
        assert len(cut.committed_keys("eval", 0)) == fail_after
    with RunDir.resume(tmp_path / "cut") as cut:
        again = ScriptedSampler()
        collect(cut, again, pool)
        assert again.asked == 12 - fail_after  # nothing is sampled twice
    assert rows_of(cut) == rows_of(whole)


def test_a_signal_commits_the_received_samples(tmp_path, pool):
    stop = StopRequest()

    class Bar:
        def advance(self, n, **signals):
            pass

    class Signalled(ScriptedSampler):
        def sample(self, requests, params):
            for i, completion in enumerate(super().sample(requests, params)):
                stop.requested = i == 3
                yield completion

    with RunDir.create(tmp_path, "eval", metadata={}) as run:
        with pytest.raises(Interrupted):
            collect(run, Signalled(), pool, stop=stop, progress=Bar())
        assert len(run.committed_keys("eval", 0)) == 4


@pytest.mark.parametrize("ended_by", ["signal", "grader"])
def test_answers_that_an_endpoint_was_paid_for_are_kept_however_the_collecting_ends(tmp_path, ended_by):
    """The first answer ends the collecting when all others have arrived and none has been looked at."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")

    def all_have_arrived():
        while any(thread.name == "rlvr-openai" for thread in threading.enumerate()):
            time.sleep(0.01)

    class Stop(StopRequest):
        def check(self):
            all_have_arrived()
            self.requested = ended_by == "signal"
            super().check()

    class Pool(GraderPool):
        def submit(self, pairs, **more):
            if ended_by == "grader" and sampler.asked == 0:
                sampler.asked = 1
                all_have_arrived()
                raise RlvrError("the first grading fails")
            return super().submit(pairs, **more)

    class Sampler(OpenAISampler):
        asked = 0

    with (
        serving(lambda body: answer(" x </think> <answer> 1 </answer>")) as endpoint,
        Pool("r1_zero", workers=1) as pool,
        RunDir.create(tmp_path, "eval", metadata={}) as run,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(grading, "GRADE_ROWS", 1)
        sampler = Sampler("m", base_url=endpoint.url)
        with pytest.raises((Interrupted, RlvrError)):
            collect(run, sampler, pool, stop=Stop())
        assert len(endpoint.bodies) == 12
        assert len(run.committed_keys("eval", 0)) == 12 - (ended_by == "grader")


HANGS_ON_THE_THIRD = """
import time

asked = 0

def grade(response, ground_truth):
    global asked
    asked += 1
    time.sleep(600 if asked == 3 else 0)
    return {"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0}
"""


def test_a_second_signal_does_not_wait_for_the_graders(tmp_path, monkeypatch):
    monkeypatch.setattr(grading, "GRADE_ROWS", 1)
    monkeypatch.setattr(
        grading, "GRADING_AHEAD", 1
    )  # so the first two verdicts have arrived when the third sample is added
    grader = tmp_path / "hangs.py"
    grader.write_text(HANGS_ON_THE_THIRD)
    sampler = ScriptedSampler(fail_after=3, error=KeyboardInterrupt())
    with (
        GraderPool(f"{grader}:grade", workers=1, timeout=600) as pool,
        RunDir.create(tmp_path, "eval", metadata={}) as run,
    ):
        with pytest.raises(KeyboardInterrupt):
            collect(run, sampler, pool)
        assert len(run.committed_keys("eval", 0)) == 2


BREAKS_ONCE = """
import os, pathlib

broken = pathlib.Path(__file__).parent / "broken"
if broken.exists():
    broken.unlink()
    raise ImportError("not today")

def grade(response, ground_truth):
    if ground_truth == "1":
        broken.touch()
        os._exit(1)
    return {"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0}
"""


def test_a_failed_grader_loses_only_its_own_rows(tmp_path, monkeypatch):
    """The worker dies on the first row; the worker for the second row cannot be started, the one for the third can."""
    monkeypatch.setattr(grading, "GRADE_ROWS", 1)
    monkeypatch.setattr(grading, "GRADING_AHEAD", 10)
    grader = tmp_path / "breaks.py"
    grader.write_text(BREAKS_ONCE)
    sampler = ScriptedSampler()
    with GraderPool(f"{grader}:grade", workers=1) as pool, RunDir.create(tmp_path, "eval", metadata={}) as run:
        with pytest.raises(RlvrError, match="not today"):
            collect(run, sampler, pool, num_samples=1)
        asked = {EXAMPLES[i].id for i in range(sampler.asked)}
        errors = {r["example_id"]: r["grade_error"] for r in rows_of(run)}
        assert errors.keys() == asked - {"q1"}
        assert errors.pop("q0") == "crash"
        assert not any(errors.values())
        collect(run, ScriptedSampler(), pool, num_samples=1)
        assert len(run.committed_keys("eval", 0)) == 6


def test_a_due_commit_happens_before_further_sampling(tmp_path, pool, monkeypatch):
    monkeypatch.setattr(collecting, "COMMIT_SECONDS", -1.0)
    monkeypatch.setattr(collecting, "_PATIENCE", 60.0)
    held = []

    class Looking(ScriptedSampler):
        def sample(self, requests, params):
            for completion in super().sample(requests, params):
                yield completion
                held.append(len(run.committed_keys("eval", 0)))

    with RunDir.create(tmp_path, "eval", metadata={}) as run:
        collect(run, Looking(), pool)
    assert held == list(range(1, 13))


def test_a_due_commit_does_not_wait_for_a_slow_grader(tmp_path, monkeypatch):
    monkeypatch.setattr(collecting, "COMMIT_SECONDS", -1.0)
    monkeypatch.setattr(collecting, "_PATIENCE", 0.0)
    monkeypatch.setattr(grading, "GRADING_AHEAD", 100)
    grader = tmp_path / "patient.py"
    grader.write_text(PATIENT)

    class Later(ScriptedSampler):
        def sample(self, requests, params):
            yield from super().sample(requests, params)
            assert not run.committed_keys("eval", 0)
            (tmp_path / "later").touch()

    with (
        GraderPool(f"{grader}:grade", workers=1, timeout=60) as pool,
        RunDir.create(tmp_path, "eval", metadata={}) as run,
    ):
        collect(run, Later(), pool)
        assert len(run.committed_keys("eval", 0)) == 12


def test_a_cut_response_is_truncated_not_malformed(tmp_path, pool):
    class Cut(ScriptedSampler):
        def sample(self, requests, params):
            for c in super().sample(requests, params):
                yield dataclasses.replace(c, text=" still thinking", finish_reason="length", stop_reason=None)

    with RunDir.create(tmp_path, "eval", metadata={}) as run:
        collect(run, Cut(), pool, num_samples=1)
    assert {r["failure_kind"] for r in rows_of(run)} == {"truncated"}


def test_log_generations_logs_the_averages_it_returns(tmp_path, pool):
    with RunDir.create(tmp_path, "eval", metadata={}) as run, calls_into(manifest) as calls:
        averages = log_generations(
            run,
            phase="eval",
            step=3,
            examples=EXAMPLES,
            template=TEMPLATE,
            sampler=ScriptedSampler(),
            params=SamplingParams(),
            num_samples=2,
            grader=pool,
            seed=5,
            stop=StopRequest(),
        )
    assert calls["part_path"] == 1
    assert calls["parse_manifest"] == 0  # the run knows its parts: the manifest grows with it
    rewards = [r["reward"] for r in rows_of(run)]
    assert averages["reward/mean"] == pytest.approx(sum(rewards) / 12)
    assert averages["entropy/mean"] == 0.25
    import pyarrow.parquet as pq

    metrics = pq.read_table(read_run(run.path).metrics).to_pylist()
    stored = {m["name"]: m["value"] for m in metrics if m["step"] == 3 and m["phase"] == "eval"}
    assert averages.items() <= stored.items()


@pytest.mark.parametrize(
    ("examples", "num_samples", "expected"),
    [(EXAMPLES, 2, [1, 4, 4]), (EXAMPLES[:2], 9, [1, 4, 1, 4, 4, 1])],
    ids=["two questions at a time", "samples of a question"],
)
def test_an_evaluation_samples_in_slices_and_stores_each_sample_once(
    tmp_path, pool, monkeypatch, examples, num_samples, expected
):
    monkeypatch.setattr(collecting, "ASKED_ROWS", 4)
    asked = []

    class Counting(ScriptedSampler):
        def sample(self, requests, params):
            asked.append(sum(len(request.seeds) for request in requests))
            return super().sample(requests, params)

    how = {
        "examples": examples, "template": TEMPLATE, "params": SamplingParams(), "num_samples": num_samples, "grader": pool,
        "seed": 5, "stop": StopRequest(),
    }  # fmt: skip
    with RunDir.create(tmp_path, "eval", name="whole", metadata={}) as whole:
        collect(whole, ScriptedSampler(), pool, examples=examples, num_samples=num_samples)
    with RunDir.create(tmp_path, "eval", name="parts", metadata={}) as run:
        with pytest.raises(RlvrError, match="gone"):
            log_generations(
                run, phase="eval", step=0, sampler=ScriptedSampler(fail_after=3, error=RlvrError("gone")), **how
            )
        averages = log_generations(run, phase="eval", step=0, sampler=Counting(), **how)
    assert asked == expected
    assert rows_of(run) == rows_of(whole)
    assert averages["reward/samples"] == len(examples) * num_samples


def test_a_question_that_an_endpoint_refuses_does_not_keep_the_others_from_being_asked(tmp_path, pool, monkeypatch):
    """Of six questions, two at a time, the second and the last are refused; of more that goes wrong the evaluation ends at once."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    monkeypatch.setattr(collecting, "ASKED_ROWS", 4)
    how = {
        "phase": "eval", "step": 0, "examples": EXAMPLES, "template": TEMPLATE, "params": SamplingParams(), "num_samples": 2,
        "grader": pool, "seed": 5, "stop": StopRequest(),
    }  # fmt: skip

    def reply(body):
        number = int(body["prompt"].rsplit("User: ", 1)[1].split("+")[0])
        return error(400, f"no {number}") if number in (1, 5) else answer(" x </think> <answer> 1 </answer>")

    with serving(reply) as endpoint, RunDir.create(tmp_path, "eval", metadata={}) as run:
        sampler = OpenAISampler("m", base_url=endpoint.url)
        for requests in (12, 4):  # a resumed run requests these again
            endpoint.bodies.clear()
            with pytest.raises(QuestionsRefused, match=r"Question q1: 400 .*no 1.* Question q5: 400 .*no 5"):
                log_generations(run, sampler=sampler, **how)
            assert len(endpoint.bodies) == requests
            assert {row["example_id"] for row in rows_of(run)} == {"q0", "q2", "q3", "q4"}
        endpoint.bodies.clear()
        endpoint.answer = lambda body: error(401, "who are you?")
        with pytest.raises(RlvrError, match="who are you"):
            log_generations(run, sampler=sampler, **how)
        assert len(endpoint.bodies) <= 2


@pytest.mark.usefixtures("grading_sizes")
def test_fresh_rollouts_equal_the_stored_ones(tmp_path, pool):
    def sampled(run, sampler):
        return sample_groups(
            run, step=0, examples=EXAMPLES, num_samples=2, credit=lambda rows: [dataclasses.replace(r, advantage=r.reward - 0.5) for r in rows],
            template=TEMPLATE, sampler=sampler, params=SamplingParams(), grader=pool, seed=5, stop=StopRequest(),
        )  # fmt: skip

    with RunDir.create(tmp_path, "grpo", metadata={}) as run:
        with pytest.raises(RlvrError, match="gone"):
            sampled(run, ScriptedSampler(fail_after=5, error=RlvrError("gone")))
        assert not run.committed_keys("train", 0)  # all or none
        fresh = sampled(run, ScriptedSampler())
        with calls_into(manifest) as calls:
            stored = sampled(run, ScriptedSampler(fail_after=0, error=AssertionError("sampled again")))
    assert calls["parse_manifest"] == 0
    assert [(r.example_id, r.sample_index) for r in fresh] == [(e.id, i) for e in EXAMPLES for i in range(2)]
    assert fresh == stored
    assert {r.advantage for r in stored} == {-0.5, 0.5}


def test_prompt_and_grader_choices():
    assert prompt_of(Example("a", "q{x}", "1", prompt="ready {question}"), TEMPLATE) == "ready {question}"
    assert choose_grader("", dataset_grader=None, prompt="r1_zero") == "r1_zero"
    assert choose_grader("", dataset_grader=None, prompt="question_only") == "question_only"
    assert choose_grader("", dataset_grader="countdown", prompt="r1_zero") == "countdown"
    assert choose_grader("gsm8k", dataset_grader="countdown", prompt="r1_zero") == "gsm8k"


@pytest.mark.vllm
@pytest.mark.filterwarnings("default")  # warnings from vLLM
def test_evaluate_vllm_stores_the_responses_of_a_real_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import torch
    import vllm

    monkeypatch.setattr(torch, "set_num_threads", torch.set_num_threads)  # vLLM replaces it; restored after the test

    from rlvr_cli.data.datasets import load_dataset
    from rlvr_cli.graders.r1_zero import r1_zero_reward_fn
    from rlvr_cli.handout import evaluate_vllm
    from rlvr_cli.models.identity import builtin_model_path

    examples = load_dataset("arithmetic", limit=20).examples
    memory = {"kv_cache_memory_bytes": 2**28}
    model = vllm.LLM(
        str(builtin_model_path()),
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        enable_chunked_prefill=False,
        **memory,
    )
    params = vllm.SamplingParams(
        n=2,
        temperature=1.0,
        max_tokens=64,
        min_tokens=4,
        stop=["</answer>"],
        include_stop_str_in_output=True,
        logprobs=0,
    )
    prompts = [TEMPLATE.fill(e.question) for e in examples]
    evaluate_vllm(
        model,
        r1_zero_reward_fn,
        prompts,
        params,
        ground_truths=[e.ground_truth for e in examples],
        runs_dir=str(tmp_path),
        run="r",
    )
    rows = read_rollouts(tmp_path / "r").to_pylist()
    assert len(rows) == 40
    for r in rows:
        assert r["prompt"] == prompts[int(r["example_id"])]
        assert len(r["response_ids"]) == len(r["sampled_logprobs"]) == r["num_response_tokens"]
        assert r["reward"] == r1_zero_reward_fn(r["response"], r["ground_truth"])["reward"]
    assert {r["stop_reason"] for r in rows} <= {"</answer>", "eos", None}
    with pytest.raises(RlvrError, match="Got 20 prompts and 1 ground truths"):
        evaluate_vllm(model, r1_zero_reward_fn, prompts, params, ground_truths=["1"])
