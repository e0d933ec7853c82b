"""A judge behind an endpoint that is at fault: what has no score has no reward, never 0; each text is paid for once; no key is told."""

import itertools
import threading
import tracemalloc
from concurrent.futures import CancelledError
from dataclasses import replace

import pytest

from endpoint import Reply, completion, error, serving
from factories import a_rollout
from judging import RUBRIC, asked, length_score, response_in, said, scoring, write_rubric
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.shared.prompt import JudgeOptions
from rlvr_cli.errors import RlvrError
from rlvr_cli.judges.judge import Judge
from rlvr_cli.judges.judge import Reply as Said
from rlvr_cli.judges.pool import JudgePool
from rlvr_cli.rollouts.grading import grade_fields
from rlvr_cli.rollouts.metrics import rollout_metrics
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Judgement

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

KEY = "sk-canary-4f1d9a77"


@pytest.fixture
def judge(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr("rlvr_cli.samplers.openai_client.FIRST_WAIT", 0.01)
    with serving(scoring(length_score)) as served:
        yield served


@pytest.fixture
def open_pool(judge, tmp_path):
    """Open pools; what they report is in the list."""
    pools, reported = [], []

    def opened(rubric=RUBRIC, **options):
        spec = f"judge:{write_rubric(tmp_path, rubric)}"
        given = {"judge_url": judge.url, "judge_model": "big", "judge_timeout": 20.0, **options}
        pools.append(JudgePool(spec, EvalConfig(grader=spec, **given), report=reported.append))
        return pools[-1]

    opened.reported = reported
    yield opened
    for pool in pools:
        pool.close()


def example_of(i: int) -> dict:
    return {"question": f"What is {i}?", "ground_truth": str(i), "prompt": "never seen"}


def test_a_response_is_asked_in_the_rubric_and_its_whole_reply_is_kept(judge, open_pool):
    pool = open_pool(judge_max_tokens=77, judge_seed=5)
    (grade,) = pool.grade([("four", "4")], example_of=lambda i: example_of(4))
    assert (grade.reward, grade.extracted_answer, grade.failure_kind) == (pytest.approx(4 / 9), "5", "low_reward")
    assert (grade.format_reward, grade.answer_reward, grade.category, grade.error) == (None, None, "reward_only", None)
    assert grade.judgement == Judgement(
        "I read it.\n\n**Score: 5/10**\n", "5", "big", grade.judgement.asked_sha256, 50, 5, cached=False
    )
    (body,) = judge.bodies
    assert asked(body) == pool.rubric.prompt.format(question="What is 4?", ground_truth="4", response="four")
    assert {k: body[k] for k in ("model", "temperature", "max_tokens")} == {
        "model": "big",
        "temperature": 0,
        "max_tokens": 77,
    }
    assert not {"logprobs", "stop", "min_tokens", "return_token_ids"} & body.keys()
    assert (judge.paths, judge.keys) == (["/v1/chat/completions"], [f"Bearer {KEY}"])
    (other,) = open_pool(judge_seed=6).grade([("four", "4")], example_of=lambda i: example_of(4))
    assert judge.bodies[1]["seed"] != body["seed"]
    assert other.judgement.asked_sha256 != grade.judgement.asked_sha256
    assert "never seen" not in str(judge.bodies)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_judge_that_thinks_apart_from_its_answer_has_a_score_and_its_thinking_is_kept(judge, open_pool, name):
    message = {"role": "assistant", "content": "8", name: "It is fine. 3?\n"}
    judge.answer = lambda body: said("", message=message)
    (grade,) = open_pool().grade([("four", "4")], example_of=example_of)
    assert (grade.reward, grade.judgement.score) == (pytest.approx(7 / 9), "8")
    assert grade.judgement.reply.split() == ["<think>", "It", "is", "fine.", "3?", "</think>", "8"]


def test_every_option_reaches_the_endpoint(judge, open_pool, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-other-1234567890")
    judge.answer = lambda body: completion("7")
    pool = open_pool(
        judge_model="other",
        judge_endpoint="completions",
        judge_api_key_env="JUDGE_KEY",
        judge_temperature=0.7,
        judge_max_tokens=9,
    )
    (grade,) = pool.grade([("four", "4")], example_of=example_of)
    (body,) = judge.bodies
    assert (judge.paths, judge.keys) == (["/v1/completions"], ["Bearer sk-other-1234567890"])
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("other", 0.7, 9)
    assert body["prompt"].startswith("How good is this response?")
    assert (grade.reward, grade.judgement.model) == (pytest.approx(6 / 9), "other")


def test_a_question_that_is_not_known_is_its_prompt_and_a_truth_that_is_not_there_is_none(judge, open_pool):
    open_pool().grade([("x", "")], example_of=lambda i: {"question": None, "ground_truth": "", "prompt": "Tell me."})
    assert "Question: Tell me.\nTruth: (none)" in asked(judge.bodies[0])


FAULTS = {  # what the judge does -> the failure
    "cut off": (said("Score: 8", "length"), "cut_off"),
    "filtered": (said("Score: 8", "content_filter"), "refused"),
    "no score": (said("I will not say."), "no_score"),
    "empty": (said(""), "no_score"),
    "out of scale": (said("11"), "out_of_scale"),
    "too long": (error(413, "the prompt is too long"), "refused"),
    "broken": (error(500, "overloaded", retry_after_ms="1"), "unavailable"),
    "garbage": (Reply("<html>", headers={"retry-after-ms": "1"}), "unavailable"),
    "dropped": (Reply(status=0), "unavailable"),
    "hangs": (Reply(wait=30.0), "timeout"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_judge_at_fault_gives_no_reward_and_says_why(judge, open_pool, fault):
    reply, kind = FAULTS[fault]
    judge.answer = lambda body: reply if response_in(body) == "odd" else scoring(length_score)(body)
    pool = open_pool(judge_retries=1, judge_timeout=1.0 if fault == "hangs" else 20.0)
    odd, well = pool.grade([("odd", "1"), ("even", "2")], example_of=example_of)
    assert (odd.reward, odd.error, odd.failure_kind, odd.category) == (None, kind, f"judge_{kind}", "grade_error")
    assert odd.error_detail
    assert well.reward == pytest.approx(4 / 9)
    assert (odd.judgement is not None) == (kind in ("cut_off", "no_score", "out_of_scale") or fault == "filtered")
    assert odd.judgement is None or odd.judgement.score is None
    assert pool.failed == 1
    assert [kind in line for line in open_pool.reported] == [True]
    tries = sum(response_in(body) == "odd" for body in judge.bodies)
    assert tries == (2 if kind == "unavailable" else 1)


def test_a_judge_that_is_busy_is_asked_again_when_it_says(judge, open_pool):
    replies = [error(429, "slow down", retry_after="0.4"), error(503, "starting", retry_after_ms="1")]
    judge.answer = lambda body: replies.pop(0) if replies else scoring(length_score)(body)
    (grade,) = open_pool().grade([("four", "4")], example_of=example_of)
    assert grade.reward == pytest.approx(4 / 9)
    assert judge.times[1] - judge.times[0] >= 0.4


def test_the_same_text_is_asked_once(judge, open_pool):
    gate = threading.Event()
    judge.answer = lambda body: (gate.wait(10), scoring(length_score)(body))[1]
    pool = open_pool()
    first = pool.submit([("four", "4"), ("four", "4")], example_of=lambda i: example_of(4))
    second = pool.submit([("four", "4"), ("four", "5")], example_of=lambda i: example_of(4 + i))
    gate.set()
    grades = [*first.result(), *second.result(), *pool.grade([("four", "4")], example_of=lambda i: example_of(4))]
    assert len(judge.bodies) == 2
    assert [g.judgement.cached for g in grades] == [False, True, True, False, True]
    assert [g.reward for g in grades] == pytest.approx([4 / 9] * 5)
    assert pool.price == "2 texts asked, 3 known; 100 tokens of prompts, 10 of replies"
    rows = [a_rollout(sample_index=i, reward=g.reward, judgement=g.judgement) for i, g in enumerate(grades)]
    found = rollout_metrics(rows)
    assert {k: v for k, v in found.items() if k.startswith("judge/")} == {
        "judge/asked": 2.0, "judge/cached": 3.0, "judge/prompt_tokens": 100.0, "judge/reply_tokens": 10.0,
    }  # fmt: skip


def test_a_failure_is_asked_again(judge, open_pool):
    replies = [error(413, "no")]
    judge.answer = lambda body: replies.pop(0) if replies else scoring(length_score)(body)
    pool = open_pool()
    rewards = [pool.grade([("four", "4")], example_of=example_of)[0].reward for _ in range(3)]
    assert rewards == [None, pytest.approx(4 / 9), pytest.approx(4 / 9)]
    assert len(judge.bodies) == 2


def test_what_a_run_has_stored_is_not_asked_again(judge, open_pool, tmp_path):
    judge.answer = lambda body: {
        "well": said("8"), "cut": said("8", "length"), "none": said("?"), "above": said("11"), "filtered": said("8", "content_filter"),
    }[response_in(body)]  # fmt: skip
    pairs = [(response, "4") for response in ("well", "cut", "none", "above", "filtered")]
    grades = open_pool().grade(pairs, example_of=lambda i: example_of(4))
    rows = [
        a_rollout(run_id="r", example_id=response, **grade_fields(grade, finish_reason="stop"))
        for (response, _), grade in zip(pairs, grades, strict=True)
    ]
    with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
        run.commit_rollouts("eval", 0, [replace(row, step=0) for row in rows])
    pool = open_pool()
    pool.recall(run.path)
    again = pool.grade(pairs, example_of=lambda i: example_of(4))
    assert [response_in(body) for body in judge.bodies[5:]] == ["filtered"]  # the endpoint may think otherwise
    assert [(g.reward, g.error, g.extracted_answer) for g in again] == [
        (g.reward, g.error, g.extracted_answer) for g in grades
    ]
    assert [g.judgement and g.judgement.cached for g in again] == [True, True, True, True, False]


def test_what_was_used_the_longest_time_ago_is_forgotten_first(judge, open_pool, monkeypatch):
    monkeypatch.setattr("rlvr_cli.judges.judge.REMEMBERED_BYTES", 1000)  # two replies of about 400 bytes
    pool = open_pool()
    for response in ("a", "b", "a", "c", "a", "b"):
        pool.grade([(response, "4")], example_of=lambda i: example_of(4))
    assert [response_in(body) for body in judge.bodies] == ["a", "b", "c", "b"]


@pytest.mark.parametrize("word", ["yes", "да"])
def test_short_replies_take_no_more_memory_than_is_allowed(judge, monkeypatch, word):
    monkeypatch.setattr("rlvr_cli.judges.judge.REMEMBERED_BYTES", 2**18)
    asked = Judge(JudgeOptions(judge_url=judge.url, judge_model="big"))
    tracemalloc.start()
    try:
        asked.remember(Said(f"{word} {i}", asked.sha256_of(f"{i}"), 300 + i, 900 + i, "stop") for i in range(1500))
        assert 2**17 < tracemalloc.get_traced_memory()[0] < 1.1 * 2**18
    finally:
        tracemalloc.stop()


def test_as_many_as_allowed_are_under_way(judge, open_pool):
    judge.answer = lambda body: Reply(said("5").body, wait=0.05)
    pool = open_pool(judge_concurrency=7)
    parts = [pool.submit([(f"{part} {i}", "") for i in range(10)], example_of=example_of) for part in range(4)]
    assert all(grade.reward is not None for part in parts for grade in part.result())
    assert judge.most_under_way == 7


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_judge_that_refuses_everything_ends_the_work_without_the_key(judge, open_pool, status):
    judge.answer = lambda body: error(status, f"the key {KEY} is wrong")
    with pytest.raises(RlvrError, match="refuses every request") as raised:
        open_pool().grade([("four", "4")] * 3, example_of=example_of)
    assert KEY not in str(raised.value)
    assert "[key]" in raised.value.problem


def test_a_judge_that_is_down_ends_the_work_instead_of_grading_nothing(judge, open_pool):
    judge.answer = lambda body: error(500, "down", retry_after_ms="1")
    pool = open_pool(judge_retries=0, judge_concurrency=4)
    with pytest.raises(RlvrError, match=r"failed on 8 texts in a row: 500 .*down"):
        pool.grade([(str(i), "") for i in range(30)], example_of=example_of)
    assert len(judge.bodies) < 16


@pytest.mark.parametrize("answered", [0, 5])
def test_no_failure_of_an_outage_comes_out_as_a_grade(judge, open_pool, answered):
    scored, late, failures = scoring(length_score), threading.Event(), itertools.count(1)

    def answer(body):
        part, i = divmod(int(response_in(body)), 10)
        if 3 * part + i < answered:
            return replace(scored(body), wait=0.1 * (part == 1 and i == 0))  # after the first failure of the outage
        number = next(failures)
        if number == 8:
            late.set()
        return replace(error(503, "down"), after=late if number == 1 else None)

    judge.answer = answer  # one of the failures is under way when the judge is given up
    pool = open_pool(judge_retries=0, judge_concurrency=4)
    parts = [pool.submit([(str(10 * part + i), "") for i in range(3)], example_of=example_of) for part in range(8)]
    ends = [part.exception(timeout=20) or part.result() for part in parts]
    rewards = [grade.reward for end in ends if isinstance(end, list) for grade in end]
    assert len(rewards) == answered // 3 * 3
    assert None not in rewards
    assert all("failed on 8 texts in a row" in end.problem for end in ends[answered // 3 :])
    assert pool.failed == 0


def test_failures_that_wait_do_not_count_again_after_an_answer(judge, open_pool):
    scored, failed, freed = scoring(length_score), threading.Event(), threading.Event()

    def answer(body):
        text = int(response_in(body))
        if text == 6:
            failed.set()  # the five before it have failed
        if text == 7:
            freed.set()  # it has the turn of text 0, which is answered
        waits = {0: failed, 6: freed}.get(text)
        return replace(scored(body) if text in (0, 12) else error(413, "too long"), after=waits)

    judge.answer = answer
    grades = open_pool(judge_concurrency=2).grade([(str(i), "") for i in range(13)], example_of=example_of)
    assert [grade.reward is None for grade in grades] == [False, *[True] * 11, False]


@pytest.mark.parametrize(
    ("status", "last", "given_up"), [(503, 8, True), (500, 9, True), (0, 8, True), (503, 7, False), (413, 9, False)]
)
def test_an_outage_on_the_last_texts_is_no_grade_unless_they_fail_again_alone(judge, open_pool, status, last, given_up):
    scored, fault = scoring(length_score), error(status, "down") if status else Reply(status=0)
    others = {"first": scored, "long": lambda body: error(413, "too long")}
    judge.answer = lambda body: others.get(response_in(body), lambda body: fault)(body)
    texts = [("first", ""), ("long", ""), *((str(i), "") for i in range(last))]
    pool = open_pool(judge_retries=0, judge_concurrency=64)
    assert pool.grade(texts[:1], example_of=example_of)[0].reward is not None
    if given_up:
        with pytest.raises(RlvrError, match=f"failed on the last {last} texts"):
            pool.grade(texts[1:], example_of=example_of)
        assert pool.failed == 0
        pool = open_pool(judge_retries=0, judge_concurrency=64)  # of the run that is resumed
    assert [grade.reward for grade in pool.grade(texts[1:], example_of=example_of)] == [None] * (last + 1)


@pytest.mark.parametrize("texts", [3, 4, 7])
def test_failures_on_all_that_is_asked_are_grades(judge, open_pool, texts):
    judge.answer = lambda body: error(503, "down")
    grades = open_pool(judge_retries=0, judge_concurrency=4).grade(
        [(str(i), "") for i in range(texts)], example_of=example_of
    )
    assert [grade.error for grade in grades] == ["unavailable"] * texts


def test_a_key_that_is_repeated_is_stored_nowhere(judge, open_pool):
    judge.answer = lambda body: said(f"Your key is {KEY}.\n{KEY}" if response_in(body) == "odd" else f"{KEY}\n8")
    odd, well = open_pool().grade([("odd", "1"), ("even", "2")], example_of=example_of)
    assert well.judgement.reply == "[key]\n8"
    assert KEY not in repr((odd, well, open_pool.reported))


def test_closing_ends_what_is_asked(judge, open_pool):
    judge.answer = lambda body: Reply(said("5").body, wait=60.0)
    pool = open_pool()
    pending = pool.submit([("a", "")], example_of=example_of)
    pool.close()
    with pytest.raises(CancelledError):
        pending.result(timeout=10)
    with pytest.raises(CancelledError):
        pool.submit([("a", "")], example_of=example_of)
    pool.close()


def test_a_missing_key_is_named_by_the_judges_option(tmp_path, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    spec = f"judge:{write_rubric(tmp_path)}"
    config = EvalConfig(grader=spec, judge_url="http://10.0.0.1/v1", judge_model="m", judge_api_key_env="JUDGE_KEY")
    with pytest.raises(RlvrError, match="JUDGE_KEY is not set") as raised:
        JudgePool(spec, config)
    assert "--judge-api-key-env NAME" in raised.value.hint
