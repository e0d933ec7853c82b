"""Quiet traps: what a user would not notice is said, and what cannot work is said before anything is loaded."""

import json
import re

import pytest

from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.runs.readers import read_run

SMALL = ("--rollout-batch-size", 8, "--group-size", 4, "--train-batch-size", 8, "--gradient-accumulation-steps", 1,
         "--sampling-max-tokens", 8, "--eval-examples", 4, "--grader-workers", 1)  # fmt: skip


@pytest.fixture
def rlvr(tmp_path, forks):
    """Run the command line; `Done`, once it has ended with this status and without a traceback."""
    return lambda *arguments, status=0, **more: forks.run(*arguments, cwd=tmp_path, status=status, **more)


def questions(path, numbers):
    path.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in numbers))


COMMANDS = ("eval", "grpo", "ei", "ppo", "sft", "dpo", "distill")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_name_of_a_run_is_checked_before_anything_is_read(rlvr, tmp_path, command):
    """The dataset does not exist, so an error about the name comes first; --dry-run says it, too."""
    (tmp_path / "runs/old").mkdir(parents=True)
    given = (command, "--dataset", "missing.jsonl")
    more = () if command == "eval" else ("--dry-run",)
    assert "exists already" in rlvr(*given, "--run", "old", *more, status=1).err
    if command == "grpo":
        assert "exists already" in rlvr(*given, "--run", "old", status=1).err
        assert "'../evil' cannot be the name of a run" in rlvr(*given, "--run", "../evil", *more, status=1).err
        assert "missing" in rlvr(*given, "--run", "new", status=1).err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_plan_says_where_no_run_can_be_written(rlvr, tmp_path, command):
    (tmp_path / "file").write_text("")
    given = (command, "--dataset", "missing.jsonl", "--dry-run", "--runs-dir")
    assert "Cannot write file/runs: Not a directory." in rlvr(*given, "file/runs", status=1).err
    if command == "grpo":
        assert "Cannot write /proc/x: Permission denied." in rlvr(*given, "/proc/x", status=1).err
        assert "Cannot write file: File exists." in rlvr(*given, "file", status=1).err
        assert "missing" in rlvr(*given, "new/runs", status=1).err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("command", ["eval", "grpo"])
def test_a_plan_says_that_a_model_is_not_here_to_be_checked(rlvr, command):
    small = SMALL if command == "grpo" else ()
    said = "nomodel: its files are not on this machine, so nothing of it is checked"
    assert said in rlvr(command, "--model", "nomodel", *small, "--dry-run").err
    assert "not on this machine, so" not in rlvr(command, *small, "--dry-run").err


def test_an_endpoints_model_is_nowhere_to_be_checked(rlvr):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    given = ("--model", "m", "--base-url", "http://localhost:1/v1", "--dry-run")
    assert "model    m\n" in rlvr("eval", *given).err


@pytest.mark.parametrize(
    ("given", "updates"),
    [
        (("grpo", *SMALL, "--n-grpo-steps", 3), 3),
        (("ppo", *SMALL[:6], *SMALL[8:], "--n-ppo-steps", 3), 3),
        (("dpo", *SMALL[:4], *SMALL[8:], "--train-batch-size", 4, "--pairs-per-question", 3, "--n-dpo-steps", 3), 6),
        (("ei", "--ei-batch-size", 3, "--group-size", 3, "--train-batch-size", 4, "--n-ei-steps", 3), 9),
        (("distill", *SMALL[:4], *SMALL[8:], "--teacher", builtin_model_path(), "--n-distill-steps", 3), 3),
    ],
)
def test_a_warm_up_that_no_update_gets_out_of_is_noted(rlvr, given, updates):
    def note(steps):
        said = rlvr(*given, "--dataset", "arithmetic:8", "--warmup-steps", steps, "--dry-run").err
        return re.findall(r"note: the warm-up \(.*?\) is longer than the run of at most (\d+) updates", said)

    assert note(updates + 1) == [str(updates)]
    assert note(updates) == []


def test_training_on_evaluation_questions_is_said(rlvr, tmp_path):
    questions(tmp_path / "a.jsonl", range(8))
    questions(tmp_path / "b.jsonl", range(6, 12))
    same = rlvr("grpo", *SMALL, "--dataset", "a.jsonl", "--eval-dataset", "a.jsonl", "--dry-run")
    assert "warning: 4 of the 4 evaluation questions are also trained on." in same.err  # --eval-examples 4
    (tmp_path / "own.prompt").write_text("Say {question}\n")
    formatted = [{"prompt": f"Say {n} + 1?\n", "answer": n + 1, "response": None} for n in range(8)]
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in formatted))
    given = ("--eval-dataset", "b.jsonl", "--prompt", "own.prompt", "--dry-run")
    some = rlvr("grpo", *SMALL, "--dataset", "f.jsonl", *given)
    assert "warning: 2 of the 4 evaluation questions" in some.err
    apart = rlvr("grpo", *SMALL, "--dataset", "arithmetic", "--dry-run")
    assert "warning" not in apart.err
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row | {"response": "1"}) + "\n" for row in formatted))
    fine_tuned = rlvr("sft", "--dataset", "t.jsonl", *given)
    assert "warning: 2 of the 6 evaluation questions" in fine_tuned.err


@pytest.mark.slow
def test_a_resumed_run_shows_the_whole_and_a_finished_one_says_so(rlvr, tmp_path):
    first = rlvr("grpo", *SMALL, "--n-grpo-steps", 1, "--run", "r")
    assert "finished       " not in first.err
    again = rlvr("grpo", "--resume", "r")
    assert "finished       all 1 steps are done; longer with: rlvr grpo --resume runs/r --n-grpo-steps 2\n" in again.err
    longer = rlvr("grpo", "--resume", "r", "--n-grpo-steps", 2)
    assert "finished       " not in longer.err
    assert "steps: 2/2 (100%)" in longer.err
    stored = read_run(tmp_path / "runs/r").metadata
    assert stored["updates"] == stored["config"]["n_grpo_steps"] == 2  # the new length is the run's
    assert stored["sources"]["n_grpo_steps"] == "flag"
    scheduled = ("--lr-schedule", "cosine", "--n-grpo-steps", 1)
    rlvr("grpo", *SMALL, *scheduled, "--run", "c")
    assert "finished       all 1 steps are done\n" in rlvr("grpo", "--resume", "c").err  # more cannot extend it


def test_the_environment_names_the_directory_of_runs(tmp_path, forks):
    def rlvr(*arguments, status=0):
        variable = {"RLVR_RUNS_DIR": str(tmp_path / "elsewhere")}
        return forks.run(*arguments, cwd=tmp_path, status=status, environment=variable)

    rlvr("eval", "--limit", 1, "--sampling-max-tokens", 8, "--grader-workers", 1, "--run", "r")
    assert read_run(tmp_path / "elsewhere/r").metadata["sources"]["runs_dir"] == "environment"
    assert "elsewhere/r" in rlvr("analyze", "summary").err
    assert "There is no run in here" in rlvr("analyze", "summary", "--runs-dir", "here", status=1).err
    rlvr("eval", "--resume", "r")


@pytest.mark.slow
def test_a_query_without_rows_says_why(rlvr, tmp_path):
    (tmp_path / "all.py").write_text("def right(response, truth):\n    return 1\n")
    rlvr("eval", "--limit", 2, "--sampling-max-tokens", 8, "--grader", "all.py:right", "--run", "r")
    assert "no failures: every response was rewarded; rlvr analyze rollouts" in rlvr("analyze", "failures", "r").err
    assert "no rows; there are rollouts of r: eval step 0" in rlvr("analyze", "failures", "r", "--step", 7).err
    named = rlvr("analyze", "metrics", "r", "--set", "names=clip%").err
    assert "no metric is named like 'clip%'" in named
    assert "reward/grade_errors, reward/mean, reward/samples" in named


def test_the_list_of_queries_is_for_reading_and_for_programs(rlvr):
    page = rlvr("analyze", "--list").out
    assert "rollouts" in page
    assert max(map(len, page.splitlines())) <= 100
    assert "correct = null" in page
    rows = json.loads(rlvr("analyze", "--list", "--format", "json").out)
    assert {"rollouts", "failures", "report"} <= {row["query"] for row in rows}
