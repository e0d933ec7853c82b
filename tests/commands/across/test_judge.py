"""A judge as the grader of `rlvr eval`, `grade` and `grpo`, as a user types it: rows, price, resume, alarms, and no key anywhere."""

import hashlib
import json
from collections import Counter

import pytest

from checks import findings
from endpoint import error, serving
from factories import a_rollout
from judging import RUBRIC, asked, length_score, response_in, said, scoring, write_rubric
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.runs.readers import read_rollouts, read_run
from rlvr_cli.runs.run_dir import RunDir

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

KEY = "sk-canary-4f1d9a77"
FEW = ("--dataset", "arithmetic:8", "--sampling-max-tokens", 8)


@pytest.fixture
def judge():
    with serving(scoring(length_score)) as served:
        yield served


@pytest.fixture
def rlvr(forks, judge, tmp_path):
    """Run the command line with the judge and its rubric; the rubric's file may be changed between two calls."""
    rubric = write_rubric(tmp_path)

    def call(*arguments, status=0, judged=True, **how):
        words = ("--grader", f"judge:{rubric.name}", "--judge-url", judge.url, "--judge-model", "big") if judged else ()
        environment = {"OPENAI_API_KEY": KEY}
        return forks.run(*arguments, *words, cwd=tmp_path, status=status, environment=environment, **how)

    return call


def is_odd(response: str) -> bool:
    """Whether the judge shall be at fault on a response: on about a third of them."""
    return sum(response.encode()) % 3 == 0


def expected(response: str) -> float:
    return (length_score(response) - 1) / 9


def test_an_evaluation_is_graded_by_the_judge(rlvr, judge, tmp_path):
    judge.answer = lambda body: said("I cannot tell.") if is_odd(response_in(body)) else scoring(length_score)(body)
    done = rlvr("eval", *FEW, "--num-samples", 2, "--run", "r", "--judge-max-tokens", 99)
    run = tmp_path / "runs/r"
    questions = {e.id: e.question for e in load_dataset("arithmetic:8").examples}
    rows = read_rollouts(run).to_pylist()
    assert len(rows) == 16
    failed = [r for r in rows if is_odd(r["response"])]
    assert 0 < len(failed) < 16
    for r in rows:
        said_of = r["judgement"]
        if r in failed:
            assert (r["reward"], r["grade_error"], r["failure_kind"]) == (None, "no_score", "judge_no_score")
            assert (said_of["reply"], said_of["score"]) == ("I cannot tell.", None)
        else:
            assert r["reward"] == pytest.approx(expected(r["response"]))
            assert said_of["score"] == str(length_score(r["response"])) == r["extracted_answer"]
            assert said_of["reply"].startswith("I read it.")
        assert r["grader"] == "judge:rubric.md"
    prompts = Counter(asked(body) for body in judge.bodies)
    assert set(prompts.values()) == {1}  # each text once
    first = rows[0]
    assert RUBRIC.partition("\n\n")[2].strip("\n").format(
        question=questions[first["example_id"]], ground_truth=first["ground_truth"], response=first["response"]
    ) in prompts  # fmt: skip
    assert {body["max_tokens"] for body in judge.bodies} == {99}
    metadata = read_run(run).metadata
    assert metadata["facts"]["rubric"] == {
        "name": "rubric.md", "text": RUBRIC, "sha256": hashlib.sha256((tmp_path / "rubric.md").read_bytes()).hexdigest(),
    }  # fmt: skip
    assert (metadata["config"]["judge_model"], metadata["config"]["judge_api_key_env"]) == ("big", "OPENAI_API_KEY")
    with open_runs([read_run(run)]) as database:
        metrics = dict(database.select("SELECT name, value FROM metrics WHERE name LIKE 'judge/%'").rows)
    paid = len(judge.bodies)
    assert metrics == {
        "judge/asked": paid, "judge/cached": 16 - paid, "judge/prompt_tokens": 50 * paid, "judge/reply_tokens": 5 * paid,
    }  # fmt: skip
    assert findings(run) == []
    texts = [done.said, *(p.read_bytes().decode("latin-1") for p in tmp_path.rglob("*") if p.is_file())]
    assert not any(KEY in text for text in texts)


def test_a_changed_rubric_is_named_on_resume(rlvr, judge, tmp_path):
    rlvr("eval", *FEW, "--run", "r", fault="graded:1:kill", status=-9)
    rubric = tmp_path / "rubric.md"
    rubric.write_text(RUBRIC.replace("good", "bad"))
    assert "its rubric sha256 was" in rlvr("eval", "--resume", "r", judged=False, status=1).err
    rubric.write_text(RUBRIC)
    rlvr("eval", "--resume", "r", judged=False)
    rows = read_rollouts(tmp_path / "runs/r").to_pylist()
    assert [r["reward"] for r in rows] == pytest.approx([expected(r["response"]) for r in rows])


def test_stored_responses_are_graded_by_a_judge_and_their_replies_are_known_to_the_next_grading(rlvr, judge, tmp_path):
    rlvr("eval", *FEW, "--run", "r", "--grader-workers", 1, judged=False)
    done = rlvr("grade", "r", "--format", "json")
    run, questions = tmp_path / "runs/r", {e.question for e in load_dataset("arithmetic:8").examples}
    assert f"{len(judge.bodies)} texts asked, {8 - len(judge.bodies)} known" in done.err
    assert all(any(f"Question: {q}\n" in asked(body) for q in questions) for body in judge.bodies)  # not the prompt
    with open_runs([read_run(run)]) as database:
        found = database.select(
            "SELECT r.response, g.reward, g.judgement.score, g.grader FROM grades g JOIN rollouts r USING (example_id)"
        ).rows
    assert len(found) == 8
    for response, reward, score, grader in found:
        assert (reward, score, grader) == (
            pytest.approx(expected(response)),
            str(length_score(response)),
            "judge:rubric.md",
        )
    asked_once = len(judge.bodies)
    assert "0 rollouts to grade, 8 graded already" in rlvr("grade", "r", "--judge-concurrency", 3).err
    assert len(judge.bodies) == asked_once
    (tmp_path / "rubric.md").write_text(RUBRIC + "\nBe strict.\n")
    assert "8 rollouts to grade" in rlvr("grade", "r").err  # another rubric is another grader
    assert len(judge.bodies) == 2 * asked_once
    assert "8 rollouts to grade" in rlvr("grade", "r", "--judge-temperature", 0.5).err
    assert findings(run) == []


def test_a_judge_that_gave_no_grade_is_asked_again_for_that_alone(rlvr, judge, tmp_path):
    with RunDir.create(tmp_path / "runs", "eval", name="r", metadata={}) as run:
        rows = [a_rollout(run_id="r", example_id=f"q{i}", response=f"at {i}") for i in range(3)]
        run.commit_rollouts("eval", 0, rows)
    scored = scoring(length_score)
    judge.answer = lambda body: said("", "content_filter") if response_in(body) != "at 1" else scored(body)
    rlvr("grade", "r")
    judge.answer = scored
    done = rlvr("grade", "r")
    assert "2 rollouts to grade, 2 of them failed before, 1 graded already" in done.err
    assert "2 texts asked, 0 known" in done.err
    assert Counter(map(response_in, judge.bodies)) == {"at 0": 2, "at 1": 1, "at 2": 2}
    with open_runs([read_run(tmp_path / "runs/r")]) as database:
        assert database.select("SELECT count(reward), sum(attempt)::INT FROM grades").rows == [(3, 2)]


@pytest.mark.slow
def test_a_judge_is_asked_the_same_of_a_stored_response_with_shots(rlvr, judge, tmp_path):
    (tmp_path / "p").write_text("Q: {question}\nA:")
    rlvr("eval", *FEW, "--limit", 2, "--prompt", "p", "--shots", 2, "--run", "r")
    paid = len(judge.bodies)
    rlvr("grade", "r")
    assert len(judge.bodies) == paid


def test_an_interrupted_again_goes_on_to_ask_the_judge_anew(rlvr, judge, tmp_path):
    with RunDir.create(tmp_path / "runs", "eval", name="r", metadata={}) as run:
        for step in (0, 1):
            run.commit_rollouts("eval", step, [a_rollout(run_id="r", step=step, response=f"at {step}")])
    rlvr("grade", "r")
    rlvr("grade", "r", "--again", fault="manifest.done:1:term", status=130)
    assert Counter(map(response_in, judge.bodies)) == {"at 0": 2, "at 1": 1}
    assert "1 rollouts to grade, 1 graded already" in rlvr("grade", "r").err
    assert Counter(map(response_in, judge.bodies)) == {"at 0": 2, "at 1": 2}


TRAINING = (
    *("--dataset", "arithmetic:40", "--rollout-batch-size", 8, "--group-size", 4, "--train-batch-size", 8, "--gradient-accumulation-steps", 1),
    *("--sampling-max-tokens", 8, "--eval-every", 0, "--eval-examples", 1, "--n-grpo-steps", 2, "--learning-rate", "1e-3"),
)  # fmt: skip


def test_a_groups_rewards_are_the_judges(rlvr, judge, tmp_path):
    judge.answer = lambda body: said("none") if is_odd(response_in(body)) else scoring(length_score)(body)
    rlvr("grpo", *TRAINING, "--run", "r", "--max-grade-errors", 1)
    rows = read_rollouts(tmp_path / "runs/r", phase="train").to_pylist()
    assert len(rows) == 16
    for r in rows:
        assert r["reward"] == (None if is_odd(r["response"]) else pytest.approx(expected(r["response"])))
    assert 0 < sum(r["reward"] is None for r in rows) < 16
    groups = {}
    for r in rows:
        groups.setdefault((r["step"], r["example_id"]), []).append(r)
    for group in groups.values():
        rewards = [r["reward"] or 0.0 for r in group]
        mean = sum(rewards) / 4
        spread = (sum((x - mean) ** 2 for x in rewards) / 3) ** 0.5
        for r, reward in zip(group, rewards, strict=True):
            assert r["advantage"] == pytest.approx((reward - mean) / (spread + 1e-6) if spread else 0.0, abs=1e-6)
    with open_runs([read_run(tmp_path / "runs/r")]) as database:
        counted = database.select(
            "SELECT step, sum(value) FROM metrics WHERE name IN ('judge/asked', 'judge/cached') AND phase = 'train' GROUP BY step"
        ).rows
    assert dict(counted) == {0: 8.0, 1: 8.0}
    assert findings(tmp_path / "runs/r") == []


@pytest.mark.slow
def test_a_judge_that_refuses_every_request_ends_training_before_it_learns_from_it(rlvr, judge, tmp_path):
    judge.answer = lambda body: error(401, f"bad key {KEY}")
    done = rlvr("grpo", *TRAINING, "--run", "r", status=1)
    assert "refuses every request: 401" in done.err
    assert KEY not in done.said
    assert read_rollouts(tmp_path / "runs/r").num_rows == 0
    judge.answer = scoring(length_score)
    rlvr("grpo", "--resume", "r", judged=False)
    assert read_rollouts(tmp_path / "runs/r", phase="train").num_rows == 16


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--grader", "judge:rubric.md"], "A judge needs --judge-url"),
        (["--grader", "judge:rubric.md", "--judge-url", "http://127.0.0.1:1/v1"], "A judge needs --judge-model"),
        (["--grader", "judge:", "--judge-url", "http://127.0.0.1:1/v1", "--judge-model", "m"], "names no rubric"),
        (["--judge-model", "m"], "--judge-model needs a judge"),
        (["--grader", "judge:none.md", "--judge-url", "http://127.0.0.1:1/v1", "--judge-model", "m"], "Cannot read none.md"),
        (["--grader", "judge:rubric.md", "--judge-url", f"http://x:{KEY}@h/v1", "--judge-model", "m"], "holds a user name or password"),
        (
            ["--grader", "judge:rubric.md", "--judge-url", "http://h/v1", "--judge-model", "m", "--judge-api-key-env", KEY],
            "--judge-api-key-env is not the name",
        ),
    ],
)  # fmt: skip
def test_a_judge_that_is_not_whole_is_refused_before_anything_is_sampled(rlvr, tmp_path, words, problem):
    done = rlvr("eval", *FEW, *words, judged=False, status=1 if "none.md" in problem else 2)
    assert problem in done.err
    assert KEY not in done.said
    assert not (tmp_path / "runs").exists()


def test_a_run_does_not_choose_which_key_the_judge_gets(rlvr, tmp_path, forks):
    environment = {"OPENAI_API_KEY": KEY, "OTHER_KEY": "sk-other-1234567890"}
    words = [*FEW, "--run", "r", "--judge-api-key-env", "OTHER_KEY"]
    rlvr("eval", *words)
    done = forks.run("eval", "--resume", "r", cwd=tmp_path, environment=environment, status=1)
    assert "a run does not choose what is sent" in done.err
    assert "sk-other" not in json.dumps(read_run(tmp_path / "runs/r").metadata)
