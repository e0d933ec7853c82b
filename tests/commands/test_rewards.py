"""A reward function of one's own: what its errors say, what stops a run, and how to try it before."""

import json

import pytest

from marks import slow
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.runs.readers import read_rollouts, read_run

REWARDS = """
def number(response, truth):
    return 0.25


def broken(response, truth):
    raise ValueError("oops I divided by zero")


def sevens(response, truth):
    return {"reward": 1 / (truth[0] != "7")}


def hangs(response, truth):
    while True:
        pass


def right(response, truth):
    return float(f"<answer> {truth} </answer>" in response)


def boxed(response, truth):
    return f"\\\\boxed{{{truth}}}" in response
"""
SMALL = ("--rollout-batch-size", 32, "--group-size", 4, "--train-batch-size", 32, "--gradient-accumulation-steps", 2,
         "--n-grpo-steps", 1, "--sampling-max-tokens", 8, "--eval-examples", 8, "--grader-workers", 1)  # fmt: skip


@pytest.fixture
def rlvr(tmp_path, forks):
    """Run the command line; `Done`, once it has ended with this status and without a traceback."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    return lambda *arguments, status=0: forks.run(*arguments, cwd=tmp_path, status=status)


def test_a_number_is_a_reward_and_no_category_is_invented(rlvr, tmp_path):
    done = rlvr(
        "eval",
        "--limit",
        8,
        "--grader",
        "rewards.py:number",
        "--sampling-max-tokens",
        8,
        "--run",
        "r",
        "--format",
        "json",
    )
    rows = read_rollouts(tmp_path / "runs/r").to_pylist()
    assert {(r["format_reward"], r["answer_reward"], r["reward"], r["category"], r["failure_kind"]) for r in rows} == {
        (None, None, 0.25, "reward_only", "low_reward")
    }
    assert [c["category"] for c in json.loads(done.out)["categories"]] == ["reward_only"]
    shown = rlvr("analyze", "failures", "r", "--limit", 1).out
    assert "the reward is 0.25, and the grader said no more" in shown
    metrics = json.loads(rlvr("analyze", "metrics", "r", "--format", "json").out)
    assert {m["name"]: m["value"] for m in metrics} == {
        "reward/mean": 0.25,
        "reward/samples": 8,
        "reward/grade_errors": 0,
    }


def test_the_error_of_a_reward_is_said_at_once_stored_and_shown(rlvr, tmp_path):
    done = rlvr(
        "eval", "--limit", 6, "--grader", "rewards.py:broken", "--sampling-max-tokens", 8, "--run", "r", status=1
    )
    detail = "rewards.py:7: oops I divided by zero"
    assert f"note: the grader rewards.py:broken failed on a response: ValueError: {detail}\n" in done.err
    assert f"6 of the 6 responses of the run could not be graded; 6 of them: ValueError: {detail}\n" in done.err
    assert read_run(tmp_path / "runs/r").metadata["status"] == "finished"
    rows = read_rollouts(tmp_path / "runs/r").to_pylist()
    assert {(r["grade_error"], r["grade_error_detail"]) for r in rows} == {("ValueError", detail)}
    assert f"the grade failed: ValueError: {detail}" in rlvr("analyze", "failures", "r", "--limit", 1).out
    (error,) = json.loads(rlvr("analyze", "grade_errors", "r", "--format", "json").out)
    assert (error["error"], error["detail"], error["samples"]) == ("ValueError", detail, 6)

    regraded = rlvr("grade", "r", "--grader", "rewards.py:broken", status=1)
    assert f"ValueError: {detail}\n" in regraded.err
    assert "Not one of the 6 responses could be graded" in regraded.err
    (row,) = json.loads(rlvr("analyze", "select distinct grade_error_detail from grades", "r", "--format", "json").out)
    assert row == {"grade_error_detail": detail}
    assert "6 rollouts to grade" in rlvr("grade", "r", "--grader", "r1_zero").err


@pytest.mark.parametrize("command", [slow("ei"), "ppo", slow("dpo")])
def test_training_stops_before_its_first_update_if_grades_fail(rlvr, tmp_path, command):
    options = {
        "ei": ("--ei-batch-size", 2, "--group-size", 4, "--n-ei-steps", 1),
        "ppo": ("--rollout-batch-size", 8, "--train-batch-size", 8, "--micro-batch-size", 8, "--n-ppo-steps", 1),
        "dpo": ("--dataset", "arithmetic", "--rollout-batch-size", 8, "--group-size", 4, "--n-dpo-steps", 1),
    }[command]
    given = (
        *options,
        "--sampling-max-tokens",
        8,
        "--eval-examples",
        2,
        "--grader-workers",
        1,
        "--grader",
        "rewards.py:broken",
    )
    done = rlvr(command, *given, "--run", "r", status=1)
    assert "could not be graded; " in done.err
    assert "ValueError: rewards.py:7: oops I divided by zero\n" in done.err
    run = read_run(tmp_path / "runs/r")
    assert run.metadata["status"] == "failed"
    assert not (run.path / "model").exists()
    assert {r["step"] for r in read_rollouts(run.path).to_pylist()} == {0}


def test_max_grade_errors_is_the_share_that_may_fail(rlvr, tmp_path):
    (tmp_path / "q.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}?", "answer": "7" if n < 2 else "5"}) + "\n" for n in range(8))
    )
    (tmp_path / "e.jsonl").write_text('{"question": "e?", "answer": "5"}\n')
    given = ("grpo", *SMALL, "--dataset", "q.jsonl", "--eval-dataset", "e.jsonl", "--grader", "rewards.py:sevens")
    done = rlvr(*given, "--run", "a", "--max-grade-errors", 0.24, status=1)  # 8 of 32
    assert "8 of the 32 responses of the first batch could not be graded" in done.err
    assert "ZeroDivisionError: rewards.py:11: division by zero" in done.err
    # a run that stopped goes on with the share that is given then
    resumed = rlvr("grpo", "--resume", "a", "--max-grade-errors", 0.25)
    assert "note: the grader" not in resumed.err  # its first batch is graded already
    assert read_run(tmp_path / "runs/a").metadata["status"] == "finished"
    # the first evaluation counts, too, and without the option a tenth may fail
    assert GrpoConfig().max_grade_errors == 0.1
    (tmp_path / "e.jsonl").write_text('{"question": "e?", "answer": "7"}\n')
    (tmp_path / "q.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}?", "answer": "5"}) + "\n" for n in range(8))
    )
    assert "1 of the 1 responses of the first evaluation" in rlvr(*given, "--run", "d", status=1).err
    assert not (tmp_path / "runs/d/model").exists()


@pytest.mark.slow
def test_a_hanging_grader_is_said_at_once(rlvr):
    done = rlvr(
        "eval",
        "--limit",
        2,
        "--grader",
        "rewards.py:hangs",
        "--grader-timeout",
        0.3,
        "--sampling-max-tokens",
        8,
        status=1,
    )
    assert "rewards.py:hangs failed on a response: timeout: no grade within 0.3 s (--grader-timeout)" in done.err


def test_a_reward_is_tried_before_any_training(rlvr):
    given = ("--dataset", "arithmetic", "--limit", 5, "--format", "json")
    found = json.loads(rlvr("grade", "--check", "rewards.py:right", *given).out)
    assert [(r["responses"], r["number"], r["failed"], r["mean_reward"]) for r in found["rewards"]] == [
        ("perfect", 5, 0, 1.0), ("empty", 5, 0, 0.0), ("wrong", 5, 0, 0.0),
    ]  # fmt: skip
    assert all(r["ms_each"] > 0 for r in found["rewards"])
    assert "errors" not in found

    done = rlvr("grade", "--check", "rewards.py:broken", *given, status=1)
    found = json.loads(done.out)
    assert [(e["responses"], e["error"], e["detail"], e["times"]) for e in found["errors"]] == [
        (kind, "ValueError", "rewards.py:7: oops I divided by zero", 5) for kind in ("perfect", "empty", "wrong")
    ]
    assert "rewards.py:broken failed on 15 of 15 responses." in done.err


def test_a_trial_misses_only_questions_that_were_asked_for(rlvr):
    given = ("grade", "--check", "rewards.py:right", "--dataset", "arithmetic:5")
    assert "has only" not in rlvr(*given).err
    assert "arithmetic:5 has only 5 of the 9 examples asked for." in rlvr(*given, "--limit", 9).err


def test_a_trial_knows_the_format_of_the_prompt(rlvr):
    given = ("--dataset", "arithmetic", "--limit", 5, "--format", "json")
    found = json.loads(rlvr("grade", "--check", "rewards.py:boxed", *given, "--prompt", "question_only").out)
    assert [r["mean_reward"] for r in found["rewards"]] == [1.0, 0.0, 0.0]
    done = rlvr("grade", "--check", "rewards.py:boxed", *given)
    assert "warning: perfect answers are not rewarded more than wrong or empty ones." in done.err
    found = json.loads(rlvr("grade", "--check", "r1_zero", *given).out)  # a built-in one, too
    assert [r["mean_reward"] for r in found["rewards"]] == [1.0, 0.0, 0.0]


def test_a_trial_grades_the_responses_of_a_run(rlvr):
    rlvr("eval", "--limit", 6, "--sampling-max-tokens", 8, "--run", "r")
    found = json.loads(rlvr("grade", "r", "--check", "rewards.py:number", "--limit", 4, "--format", "json").out)
    (stored,) = found["rewards"]
    assert (stored["responses"], stored["number"], stored["mean_reward"]) == ("stored", 4, 0.25)
    rows = json.loads(rlvr("analyze", "select count(*) as n from grades", "r", "--format", "json").out)
    assert rows == [{"n": 0}]  # nothing is stored


def test_a_trial_of_a_hanging_reward_stops_after_the_first(rlvr):
    given = ("--dataset", "arithmetic", "--grader-timeout", 0.3)
    done = rlvr("grade", "--check", "rewards.py:hangs", *given, status=1)
    assert "no grade within 0.3 s (--grader-timeout)" in done.out
    assert "rewards.py:hangs failed on 1 of 1 responses." in done.err
    assert "The 95 others were not tried." in done.err
