"""Episodes through the commands: rows, rewards, grading again, resumption, and what cannot go together."""

import json
import re
from dataclasses import replace

import pytest

from killed import metrics_of, rows_of, weights_of
from marks import slow
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.report.build import charts_of, environment_of
from rlvr_cli.commands import eval as evaluate
from rlvr_cli.commands import grpo
from rlvr_cli.commands.quickstart import TOOLS, commands
from rlvr_cli.commands.store.filter import run as filter_run
from rlvr_cli.config import config_of
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.config.store.filter import FilterConfig
from rlvr_cli.data.prompts import load_prompt, stored_prompts
from rlvr_cli.data.synthetic import multiplication
from rlvr_cli.data.traces import keep_correct, load_traces, was_cut
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.replay.run import replay_run
from rlvr_cli.replay.stored import read_stored
from rlvr_cli.rollouts.regrade import known_example
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.readers import read_rollouts, read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.parquet import to_rollouts
from rlvr_cli.training.credit.turns import turn_returns

# The built-in model writes sums, such as 7+7=14, 4+9=...; this one answers each of them.
SUMS = """
import os, random, signal, time
from pathlib import Path
from rlvr_cli.environments import Reply

class Sums:
    stop = (",",)
    marker = "(right)"

    def begin(self, example, seed):
        self.question = example.question

    def answer(self, turn):
        left, _, right = turn.rstrip(",").rpartition("=")
        correct = right.isdigit() and int(right) == sum(map(int, left.split()[-1].split("+")))
        return Reply("(right)" if correct else "(wrong)", reward=float(correct), role="teacher")

class Rewarded(Sums):
    gives_rewards = True

class Once(Sums):  # rewards the first or the second turn: sums of a group may be equal where its turns differ
    gives_rewards = True

    def begin(self, example, seed):
        super().begin(example, seed)
        self.rewards = [float(seed % 2), 1 - float(seed % 2)]

    def answer(self, turn):
        reply = super().answer(turn)
        return Reply(reply.text, reward=self.rewards.pop(0), done=not self.rewards)
class Rolls(Sums):
    def answer(self, turn):
        return Reply(str(random.random()), role="dice")

class Kills(Sums):
    # the run in its 14th answer, once: after the first update
    answers = 0

    def answer(self, turn):
        Kills.answers += 1
        once = Path(__file__).with_name("killed")
        if Kills.answers == 14 and not once.exists():
            once.touch()
            guard = Path(f"/proc/{os.getppid()}/stat").read_text()
            os.kill(int(guard.rpartition(")")[2].split()[1]), signal.SIGKILL)
            time.sleep(60)
        return super().answer(turn)

class Watched(Sums):
    def answer(self, turn):
        with open(Path(__file__).with_name("asked"), "a") as asked:
            print(os.getpid(), file=asked)
        return super().answer(turn)

class Prompts(Sums):
    def begin(self, example, seed):
        super().begin(example, seed)
        return f"Mine: {example.question}" if example.id.endswith("-1") else None

class Broken(Sums):
    def begin(self, example, seed):
        raise KeyError("no such game")

class Slow(Sums):
    def answer(self, turn):
        time.sleep(30)

def hears_the_environment(response, ground_truth):
    return float("(right)" in response or "(wrong)" in response)

def teacher(text):
    return text
"""
COMMON = {
    "dataset": "arithmetic:64",
    "sampling_max_tokens": 24,
    "grader_workers": 1,
    "environment_workers": 1,
    "max_turns": 3,
}
TRAINED = {"n_grpo_steps": 2, "rollout_batch_size": 8, "group_size": 4, "train_batch_size": 8, "eval_examples": 2}
TRAINED |= {"gradient_accumulation_steps": 2, "learning_rate": 1e-4, "checkpoint_every": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("episodes")
    (folder / "mine.py").write_text(SUMS)
    evaluate.run(EvalConfig(**COMMON, limit=8, environment=f"{folder}/mine.py:Sums", runs_dir=str(folder), run="eval"))
    grpo.run(GrpoConfig(**COMMON, **TRAINED, environment=f"{folder}/mine.py:Sums", runs_dir=str(folder), run="grpo"))
    return folder


def test_an_evaluation_stores_episodes_and_grades_the_last_turn(folder):
    rows = read_rollouts(folder / "eval").to_pylist()
    assert len(rows) == 8
    assert max(row["episode"]["num_turns"] for row in rows) == 3
    assert check_run(folder / "eval").problems == []
    for row in rows:
        episode = row["episode"]
        assert row["grader"] == "r1_zero"
        assert row["num_response_tokens"] == len(row["response_ids"])
        turns = [turn["role"] for turn in row["turns"] or ()]
        assert episode["tool_calls"] == turns.count("teacher")
        assert episode["num_turns"] == turns.count("policy") or not turns
        answer = re.search(
            r"</think> <answer> (.*?) </answer>", row["response"][episode["graded_from"] : episode["graded_to"]]
        )
        assert row["reward"] == float(answer is not None and answer[1] == row["ground_truth"])
        assert row["failure_kind"] != "out_of_turns" or episode["ended_by"] == "turns"
    assert {row["failure_kind"] for row in rows} >= {"out_of_turns"}
    facts = read_run(folder / "eval").metadata["facts"]["environment"]
    assert facts["name"].endswith("mine.py:Sums")


def test_a_prompt_of_the_environment_is_stored_as_its_own_and_tells_no_question(folder):
    """It begins the episodes of the first question with a prompt, those of the second one with the dataset's."""
    mine = {"environment": f"{folder}/mine.py:Prompts", "dataset": "arithmetic:2", "prompt": "question_only"}
    evaluate.run(EvalConfig(**COMMON | mine, runs_dir=str(folder), run="own"))
    rows = sorted(read_rollouts(folder / "own").to_pylist(), key=lambda row: row["example_id"])
    assert [(row["own_prompt"], row["prompt"].startswith("Mine: ")) for row in rows] == [(True, True), (False, False)]
    assert {row["own_prompt"] for row in read_rollouts(folder / "eval").to_pylist()} == {False}
    prompts = stored_prompts(read_run(folder / "own").metadata)
    assert [known_example(row, prompts=prompts)["question"] for row in rows] == [None, rows[1]["prompt"]]
    assert [e.question for e in load_traces("own", load_prompt("question_only"), runs_dir=str(folder)).examples] == [
        known_example(row, prompts=prompts)["question"] or "" for row in rows if not was_cut(row)
    ]
    asked = FilterConfig(source=("own",), runs_dir=str(folder), out=str(folder / "own.jsonl"), emit="questions")
    with pytest.raises(RlvrError, match=r"mine\.py:Prompts of own gave 1 of the prompts") as raised:
        filter_run(asked)
    assert "in its dataset arithmetic:2" in raised.value.hint


def test_training_is_on_the_policys_tokens_and_replays(folder):
    assert replay_run(read_stored(folder / "grpo"), most=None).problems == []
    rows = [row for row in read_rollouts(folder / "grpo").to_pylist() if row["turns"]]
    assert rows
    for row in rows:
        for logprob, own in zip(row["sampled_logprobs"], row["response_mask"], strict=True):
            assert (logprob == 0.0) or own
    logged = metrics_of(folder / "grpo")
    for step in range(2):
        tokens = [
            row["episode"]["num_policy_tokens"]
            for row in rows_of(folder / "grpo", phase="train")
            if row["step"] == step
        ]
        assert logged["train", step, "length/mean"] == sum(tokens) / len(tokens)
        assert logged["train", step, "sampling/tokens"] == logged["train", step, "update/tokens"] == sum(tokens)


@pytest.mark.parametrize(("name", "environment", "fault"), [slow("cut", "Sums", "sampled:14"), ("kill", "Kills", "")])
def test_a_run_goes_on_where_it_was_killed(folder, forks, name, environment, fault):
    """Between two turns, and while a tool works."""
    options = ["--environment", f"{folder}/mine.py:{environment}"]
    for option, value in {**COMMON, **TRAINED}.items():
        options += [f"--{option.replace('_', '-')}", str(value)]
    done = forks.run("grpo", *options, "--run", name, "--runs-dir", folder, cwd=folder, fault=fault)
    assert done.status == -9
    assert (folder / "killed").exists() == (environment == "Kills")
    forks.run("grpo", "--resume", name, "--runs-dir", folder, cwd=folder, status=0)
    assert check_run(folder / name).problems == []
    own = [[row["response_ids"] for row in rows_of(folder / run, phase="train")] for run in (name, "grpo")]
    assert own[0] == own[1]
    assert weights_of(folder / name) == weights_of(folder / "grpo")


# Of turns: their advantages, whatever else makes a reward, over several updates of a batch.
TURNS = {
    "credit": "turn",
    "loss_type": "grpo_clip",
    "epochs_per_rollout_batch": 2,
    "dynamic_sampling": True,
    "length_reward": 0.2,
}
TURNS |= {
    "overlong": "soft_punish",
    "overlong_buffer": 20,
    "max_sampling_rounds": 3,
    "n_grpo_steps": 1,
    "rollout_batch_size": 16,
    "train_batch_size": 16,
    "group_size": 2,
    "seed": 1,
}


def test_credit_of_turns_trains_on_what_is_stored_and_replays(folder):
    spec = f"{folder}/mine.py:Once"
    grpo.run(GrpoConfig(**{**COMMON, **TRAINED, **TURNS}, environment=spec, runs_dir=str(folder), run="turns"))
    found = replay_run(read_stored(folder / "turns"), most=None)
    assert found.problems == []
    assert len(found.updates) == 2
    assert check_run(folder / "turns").problems == []
    rows = to_rollouts(read_rollouts(folder / "turns", phase="train"))
    groups = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    turns = {len(r.turn_advantages or ()) for r in rows}
    assert turns == {r.episode.num_turns for r in rows if r.episode}
    assert max(turns) > 1
    assert any(len(set(r.turn_advantages or ())) > 1 for r in rows), "turns of an episode differ"
    known, logged = 0, metrics_of(folder / "turns")
    for step in {r.step for r in rows}:
        returns = [[turn_returns(r) for r in group] for group in groups if group[0].step == step]
        differ = [any(a != b for a, b in zip(*pair, strict=False)) for pair in returns]
        assert logged["train", step, "groups/signal_share"] == sum(differ) / len(differ)
        assert logged["train", step, "groups/used"] == sum(differ)
        known += sum(one and a[0] == b[0] for one, (a, b) in zip(differ, returns, strict=True))
    assert known, "turns differ where the sums of the episodes do not"
    for group in groups:
        for number in range(max(turns)):
            same = [r.turn_advantages[number] for r in group if r.turn_advantages and len(r.turn_advantages) > number]
            assert sum(same) == pytest.approx(0, abs=1e-6)
            assert len(same) != 1 or same == [0.0]
    assert {r.turn_advantages for r in to_rollouts(read_rollouts(folder / "turns", phase="eval"))} == {None}


@pytest.mark.slow
def test_credit_of_turns_goes_on_to_the_same_bytes(folder, forks):
    """With two trainers: what each has of a batch has its turns, too."""
    options = ["--environment", f"{folder}/mine.py:Rewarded", "--no-dynamic-sampling", "--trainers", "2"]
    for name, value in {
        **COMMON,
        **TRAINED,
        **TURNS,
        "n_grpo_steps": 2,
        "rollout_batch_size": 16,
        "train_batch_size": 16,
    }.items():
        if name != "dynamic_sampling" and name != "max_sampling_rounds":
            options += [f"--{name.replace('_', '-')}", str(value)]
    run = "turns-2"
    forks.run("grpo", *options, "--run", run, "--runs-dir", folder, cwd=folder, status=0)
    done = forks.run("grpo", *options, "--run", f"{run}-cut", "--runs-dir", folder, cwd=folder, fault="updated:3")
    assert done.status == -9
    forks.run("grpo", "--resume", f"{run}-cut", "--runs-dir", folder, cwd=folder, status=0)
    own = [[row["turn_advantages"] for row in rows_of(folder / name, phase="train")] for name in (run, f"{run}-cut")]
    assert own[0] == own[1]
    assert weights_of(folder / run) == weights_of(folder / f"{run}-cut")
    assert replay_run(read_stored(folder / f"{run}-cut"), most=None).problems == []


def test_limits_of_episodes_reach_the_environment_and_the_sampler(folder):
    given = {**COMMON, "limit": 4, "runs_dir": str(folder)}
    evaluate.run(EvalConfig(**given, environment=f"{folder}/mine.py:Slow", turn_timeout=0.2, run="slow"))
    slow = read_rollouts(folder / "slow").to_pylist()
    failed = [row for row in slow if row["episode"]["ended_by"] == "error"]
    assert {(row["grade_error"], row["failure_kind"]) for row in failed} == {("timeout", "environment_error")}
    assert all("no answer within 0.2 s" in row["grade_error_detail"] for row in slow if row["grade_error"])
    evaluate.run(EvalConfig(**given, environment=f"{folder}/mine.py:Sums", max_episode_tokens=9, run="short"))
    short = read_rollouts(folder / "short").to_pylist()
    assert max(row["num_response_tokens"] for row in short) == 9
    evaluate.run(EvalConfig(**given, environment="calculator", tool=(f"{folder}/mine.py:teacher",), run="tool"))
    named = read_run(folder / "tool").metadata["facts"]["environment"]
    assert named["name"] == f"calculator {folder}/mine.py:teacher"
    assert len(named["sha256"]) == 1


@pytest.mark.parametrize("command", ["eval", "grpo"])
def test_an_environment_that_always_fails_is_what_the_last_error_names(folder, tmp_path, command):
    """The dataset's prompts need not fit the context: the environment may begin with its own."""
    given = {**COMMON, "environment": f"{folder}/mine.py:Broken", "runs_dir": str(folder), "run": f"{command}-broken"}
    (tmp_path / "q.jsonl").write_text((json.dumps({"question": "long " * 5000, "answer": "5"}) + "\n") * 2)
    given["dataset"] = f"{tmp_path}/q.jsonl"
    config = EvalConfig(**given, limit=2) if command == "eval" else GrpoConfig(**given, **TRAINED)
    line = 1 + SUMS.splitlines().index('        raise KeyError("no such game")')
    with pytest.raises(RlvrError) as caught:
        (evaluate if command == "eval" else grpo).run(config)
    episodes, of = (2, "the run") if command == "eval" else (8, "the first batch")
    assert caught.value.problem == (
        f"The environment {folder}/mine.py:Broken failed in {episodes} of the {episodes} episodes of {of}; {episodes} of them: "
        f"KeyError: {folder}/mine.py:{line}: 'no such game'"
    )


def test_grading_again_reads_the_last_turn(folder, forks):
    hears = f"{folder}/mine.py:hears_the_environment"
    forks.run("grade", folder / "eval", "--grader", hears, "--grader-workers", 1, cwd=folder, status=0)
    with open_runs([read_run(folder / "eval")]) as database:
        assert database.select("SELECT count(*), sum(reward) FROM grades").rows == [(8, 0.0)]
    assert any(re.search(r"\((right|wrong)\)", row["response"]) for row in rows_of(folder / "eval", phase="eval"))


def test_an_environment_gives_the_rewards(folder):
    spec = f"{folder}/mine.py:Rewarded"
    evaluate.run(EvalConfig(**COMMON, limit=8, environment=spec, runs_dir=str(folder), run="rewarded"))
    rows = read_rollouts(folder / "rewarded").to_pylist()
    assert {row["grader"] for row in rows} == {"environment"}
    said = {setting.name: setting.values for setting in environment_of([read_run(folder / "rewarded")])}
    assert (said["facts.grader"], said["facts.environment.name"]) == (("environment",), (spec,))
    for row in rows:
        assert row["reward"] == sum(reward or 0.0 for reward in row["episode"]["turn_rewards"] or ())
        assert row["category"] == "reward_only"
    assert max(row["reward"] for row in rows) >= 1
    kinds = {row["failure_kind"] for row in rows}
    assert kinds >= {None, "no_tool_call"}  # in the place of low_reward
    assert all((row["failure_kind"] is None) == (row["reward"] > 0.5) for row in rows)
    with pytest.raises(RlvrError, match="gives the rewards, and so does --grader r1_zero"):
        evaluate.run(
            EvalConfig(**COMMON, limit=8, environment=spec, grader="r1_zero", runs_dir=str(folder), run="refused")
        )
    assert not (folder / "refused").exists()


@pytest.mark.parametrize("command", [slow("eval"), "grpo"])
def test_a_plan_says_what_plays_and_what_rewards(folder, forks, command):
    given = (command, "--dataset", "arithmetic:64", "--sampling-max-tokens", "24", "--max-turns", "3", "--dry-run")
    if command == "grpo":
        given += ("--group-size", "4", "--rollout-batch-size", "16", "--train-batch-size", "16")
        given += ("--gradient-accumulation-steps", "4")
    for name, judge in (("Rewarded", "rewards of the environment"), ("Sums", "grader r1_zero")):
        said = forks.run(*given, "--environment", f"mine.py:{name}", cwd=folder, status=0)
        (line,) = [line for line in said.err.splitlines() if line.startswith("episodes")]
        assert line.split(maxsplit=1)[1] == f"mine.py:{name}; up to 3 turns, 48 tokens with what the environment says"
        assert judge in said.err
        assert ("grader" in said.err) == (name == "Sums")
    said = forks.run(*given, "--environment", "calculator", "--tool", "mine.py:teacher", cwd=folder, status=0)
    assert "calculator, tools mine.py:teacher; up to 3 turns" in said.err


def test_an_answer_is_needed_where_a_grader_judges(folder, forks):
    (folder / "games.jsonl").write_text('{"question": "1+1="}\n{"question": "2+1=", "answer": ""}\n')
    given = ("eval", "--dataset", "games.jsonl", "--sampling-max-tokens", "8", "--grader-workers", "1", "--environment")
    forks.run(*given, "mine.py:Rewarded", "--run", "games", cwd=folder, status=0)
    rows = read_rollouts(folder / "runs/games").to_pylist()
    assert [(row["ground_truth"], row["grader"]) for row in rows] == [("", "environment")] * 2
    assert read_run(folder / "runs/games").metadata["facts"]["grader"] == "environment"
    said = forks.run(*given, "mine.py:Sums", cwd=folder)
    assert (said.status, "games.jsonl:1: no answer: looked for" in said.err) == (1, True)
    (folder / "games.jsonl").write_text('{"question": "2+1=", "answer": ""}\n')
    said = forks.run(*given, "mine.py:Sums", cwd=folder)
    assert (said.status, "games.jsonl:1: no answer: its field answer is empty." in said.err) == (1, True)


def test_a_file_that_has_changed_is_named_by_a_resumed_run(folder, forks, tmp_path):
    (tmp_path / "game.py").write_text(SUMS)
    (tmp_path / "tool.py").write_text("def hints(text): return text\n")
    given = (
        "eval",
        "--dataset",
        "arithmetic:64",
        "--limit",
        "2",
        "--sampling-max-tokens",
        "8",
        "--grader-workers",
        "1",
    )
    forks.run(*given, "--tool", "game.py:teacher", "--tool", "tool.py:hints", "--run", "r", cwd=tmp_path, status=0)
    (tmp_path / "tool.py").write_text("def hints(text): return text + '!'\n")
    said = forks.run("eval", "--resume", "runs/r", cwd=tmp_path)
    assert said.status == 1
    assert "r was made from other inputs: its environment tool.py:hints: sha256 was " in said.err
    assert "game.py" not in said.err


def test_a_run_of_episodes_has_their_metrics_and_its_report_their_curves(folder):
    """Each step's are the means of its rows; a run without an environment has none."""
    metrics = metrics_of(folder / "grpo")
    for (phase, step), rows in groups_by(folder / "grpo", "phase", "step").items():
        mean = {
            name: sum(r["episode"][name] for r in rows) / len(rows) for name in ("num_turns", "tool_calls", "forged")
        }
        found = [metrics[phase, step, f"episodes/{name}"] for name in ("turns", "tool_calls", "forged")]
        assert found == pytest.approx([*mean.values()])
        said = [1 - r["episode"]["num_policy_tokens"] / r["num_response_tokens"] for r in rows]
        assert metrics[phase, step, "episodes/environment_share"] == pytest.approx(sum(said) / len(rows))
    info = read_run(folder / "grpo")
    with open_runs([info]) as database:
        panels = {panel.name: panel for panel in charts_of(database, [[info]]).panels}
    trained = [metrics["train", step, "episodes/turns"] for step in range(2)]
    assert list(panels["turns"].lines[0].y) == pytest.approx(trained)
    assert {"tool_calls", "environment_share"} <= panels.keys()
    assert "tool_errors" not in panels  # none: it is said instead


def groups_by(run, *names):
    """Rows of a run by the values of these columns."""
    found = {}
    for row in read_rollouts(run).to_pylist():
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def test_queries_count_turns_and_tools(folder, forks):
    said = forks.run("analyze", "turns", folder / "grpo", "--format", "json", cwd=folder, status=0)
    train = [row for row in json.loads(said.out) if row["phase"] == "train"]
    assert [row["episodes"] for row in train] == [8, 8]
    rows = [row for row in read_rollouts(folder / "grpo").to_pylist() if row["phase"] == "train"]
    assert sum(row["tool_calls"] * 8 for row in train) == sum(row["episode"]["tool_calls"] for row in rows)
    said = forks.run(
        "analyze", "tools", folder / "grpo", "--set", "phase=train", "--format", "json", cwd=folder, status=0
    )
    (teacher,) = json.loads(said.out)
    assert (teacher["tool"], teacher["answers"]) == ("teacher", sum(row["episode"]["tool_calls"] for row in rows))


@pytest.mark.slow
def test_a_query_of_tools_without_rows_says_why(folder, forks):
    """Nobody asks the calculator here; and a run without an environment has no episodes."""
    given = ("--dataset", "arithmetic:64", "--limit", "4", "--sampling-max-tokens", "24", "--grader-workers", "1")
    forks.run("eval", *given, "--environment", "calculator", "--run", "silent", cwd=folder, status=0)
    forks.run("eval", *given, "--run", "alone", cwd=folder, status=0)
    told = {
        "silent": "no tool was called in 4 episodes",
        "alone": "no episodes: the rollouts were made without --environment",
    }
    for name, why in told.items():
        said = forks.run("analyze", "tools", f"runs/{name}", cwd=folder, status=0)
        assert why in said.err, said.err
    said = forks.run("analyze", "turns", "runs/alone", "--set", "phase=eval", cwd=folder, status=0)
    assert "no episodes: the rollouts of phase eval were made" in said.err


def test_an_environment_that_is_no_function_is_refused_before_it_trains(folder, capfd):
    spec = f"{folder}/mine.py:Rolls"
    given = {**COMMON, "environment": spec, "runs_dir": str(folder)}
    with pytest.raises(
        RlvrError, match="Rolls is not a function of the example, the seed and the turns: in an episode of"
    ):
        grpo.run(GrpoConfig(**given, **TRAINED, run="rolls"))
    assert rows_of(folder / "rolls", phase="train") == []
    evaluate.run(EvalConfig(**given, limit=4, run="rolled"))
    assert len(rows_of(folder / "rolled", phase="eval")) == 4
    assert capfd.readouterr().err.count("Rolls is not a function of the example, the seed and the turns, so") in (1, 2)


@pytest.mark.parametrize(
    ("config", "given", "problem"),
    [
        (EvalConfig, {"thinking_budget": "8"}, "--thinking-budget and episodes exclude each other"),
        (
            EvalConfig,
            {"base_url": "http://localhost:1/v1", "model": "m", "endpoint": "chat"},
            "--endpoint chat takes messages",
        ),
        (GrpoConfig, {"partial_rollout_tokens": 256}, "--partial-rollout-tokens and episodes exclude each other"),
    ],
)
def test_what_cannot_go_together_is_refused_with_the_reason(config, given, problem):
    with pytest.raises(RlvrError) as error:
        config(environment="calculator", **given)
    assert error.value.problem.startswith(problem)


@pytest.mark.parametrize("command", [evaluate, grpo])
def test_an_environment_that_is_not_there_is_said_before_anything_else(tmp_path, command):
    config = {evaluate: EvalConfig, grpo: GrpoConfig}[command]
    with pytest.raises(RlvrError, match="There is no environment calculater"):
        command.run(config(environment="calculater", dry_run=True, runs_dir=str(tmp_path)))
    assert not list(tmp_path.iterdir())


def test_a_check_finds_an_episode_whose_turns_do_not_fit(folder, monkeypatch):
    """Such a row is never stored here: it is one of another program."""
    row = next(r for r in to_rollouts(read_rollouts(folder / "eval")) if r.turns)
    with RunDir.create(folder, "eval", name="broken", metadata={"seed": 0, "config": {}, "facts": {}}) as run:
        monkeypatch.setattr("rlvr_cli.runs.storage.parquet.broken_turns", lambda *_, **__: None)
        run.commit_rollouts("eval", 0, [replace(row, run_id="broken", response_mask=row.response_mask[::-1])])
    (problem,) = [p for p in check_run(folder / "broken").problems if "episode" in p]
    assert "has an episode whose turns do not fit: the mask does not fit the turn of" in problem


def played(folder, name, *, environment="Sums", **given):
    """GRPO as in `folder`. Returns its training rows."""
    options = COMMON | TRAINED | given
    grpo.run(GrpoConfig(**options, environment=f"{folder}/mine.py:{environment}", runs_dir=str(folder), run=name))
    return rows_of(folder / name, phase="train")


@pytest.mark.slow  # by default test_measured.py plays some
@pytest.mark.parametrize("processes", ["samplers", "trainers"])
def test_processes_play_episodes_with_environments_of_their_own(folder, forked, processes):
    """The same ones as one sampler; none of them waits for all others."""
    rows = played(folder, processes, environment="Watched", n_grpo_steps=1, eval_examples=1, **{processes: 2})
    said = ("example_id", "sample_index", "prompt_ids", "response_ids", "response_mask", "turns", "reward")
    own = [row for row in rows_of(folder / "grpo", phase="train") if row["step"] == 0]
    assert [[row[name] for name in said] for row in rows] == [[row[name] for name in said] for row in own]
    assert any(row["episode"]["num_turns"] > 1 for row in rows)
    asked = (folder / "asked").read_text().split()
    (folder / "asked").unlink()
    assert len(set(asked)) == 2
    assert min(asked.count(process) for process in asked) > 2


@pytest.mark.slow
def test_episodes_are_played_ahead(folder, forked):
    """With weights one batch old, in the process that samples while the trainer trains."""
    rows = played(folder, "ahead", async_steps=1, n_grpo_steps=3)
    assert {row["step"]: row["policy_version"] for row in rows} == {0: 0, 1: 0, 2: 1}
    assert any(row["episode"]["num_turns"] > 1 for row in rows if row["step"] == 2)
    assert (check_run(folder / "ahead").problems, replay_run(read_stored(folder / "ahead"), most=None).problems) == (
        [],
        [],
    )


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["samplers", "trainers"])
def test_a_process_that_samples_for_training_refuses_what_is_no_function(folder, forked, processes):
    with pytest.raises(RlvrError, match="Rolls is not a function of the example, the seed and the turns"):
        played(folder, f"apart-{processes}", environment="Rolls", n_grpo_steps=1, **{processes: 2})
    assert rows_of(folder / f"apart-{processes}", phase="train") == []


def test_options_without_an_environment_have_no_effect():
    with pytest.raises(RlvrError, match="--max-turns has no effect without --environment or --tool"):
        GrpoConfig(max_turns=3, sources={"max_turns": "flag"})


def test_a_turn_has_more_time_than_a_program_of_python():
    with pytest.raises(RlvrError, match=r"--turn-timeout 5 .* its programs may take 5 s\."):
        GrpoConfig(environment="python", turn_timeout=5.0, sources={"turn_timeout": "flag"})
    GrpoConfig(environment="python", turn_timeout=5.0, sources={"turn_timeout": "resumed run"})
    GrpoConfig(environment="calculator", turn_timeout=5.0, sources={"turn_timeout": "flag"})


def test_multiplication_asks_the_calculator_in_a_third_of_its_traces():
    examples = multiplication(600, seed=3)
    asked = [e for e in examples if e.turns and len(e.turns) == 3]
    assert 0.3 < len(asked) / 600 < 0.4
    for e in asked:
        a, b = map(int, re.findall(r"\d+", e.question))
        assert e.ground_truth == str(a * b)
        assert [role for role, _ in e.turns] == ["policy", "calc", "policy"]
        assert "".join(text for _, text in e.turns) == e.response
        assert e.turns[0][1] == f" <calc>{a}*{b}</calc>"
    assert not {e.question for e in examples} & {e.question for e in multiplication(600, seed=3, split="validation")}
    with pytest.raises(RlvrError, match="multiplication questions in the train split"):
        multiplication(9000)


def test_traces_with_turns_train_on_the_policys_tokens_alone(tmp_path, forks):
    turns = [{"role": "policy", "text": " <calc>1+1</calc>"}, {"role": "calc", "text": "<out>2</out>"}]
    row = {
        "question": "1+1?",
        "ground_truth": "2",
        "turns": [*turns, {"role": "policy", "text": " </think> <answer> 2 </answer>"}],
    }
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps({**row, "question": f"{i}?"}) + "\n" for i in range(2)))
    options = ("sft", "--dataset", "traces.jsonl", "--train-batch-size", "2", "--micro-batch-size", "2", "--run", "r")
    forks.run(*options, "--num-examples", "2", "--sft-epochs", "1", cwd=tmp_path, status=0)
    from rlvr_cli.models.identity import model_path
    from rlvr_cli.models.pretrained import load_tokenizer

    tokenizer = load_tokenizer(model_path(""))
    own = [t["text"] for t in row["turns"] if t["role"] == "policy"]
    expected = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in own) + 1  # EOS
    assert metrics_of(tmp_path / "runs/r")["train", 0, "update/tokens"] == 2 * expected
    (tmp_path / "traces.jsonl").write_text(json.dumps({**row, "turns": [["policy", "x"]]}) + "\n")
    done = forks.run(*options[:-1], "bad", cwd=tmp_path)
    assert done.status == 1
    assert "its turns are not a list of {role, text}" in done.err


def test_correct_traces_are_those_whose_last_turn_is(folder, tmp_path):
    """Also of a run, whatever its tools said; and a run whose environment gave the rewards names no grader."""
    template = load_prompt("r1_zero")
    traces = load_traces(str(folder / "eval"), template)
    assert traces.default_grader == "r1_zero"
    with (
        GraderPool(f"{folder}/mine.py:hears_the_environment", workers=1) as pool,
        pytest.raises(RlvrError, match="None of"),
    ):
        keep_correct(traces.examples, pool, graded=traces.graded)
    turns = [{"role": "calc", "text": " </think> <answer> 2 </answer>"}, {"role": "policy", "text": " no"}]
    (tmp_path / "traces.jsonl").write_text(json.dumps({"question": "1+1?", "ground_truth": "2", "turns": turns}) + "\n")
    given = load_traces(str(tmp_path / "traces.jsonl"), template)
    with GraderPool("r1_zero", workers=1) as pool, pytest.raises(RlvrError, match="None of"):
        keep_correct(given.examples, pool, graded=given.graded)


def test_sft_evaluates_episodes(tmp_path):
    assert SftConfig(dataset="multiplication", environment="calculator").longest_response(8) == 16
    assert SftConfig(dataset="multiplication").longest_response(8) == 8


def test_of_an_episode_only_what_the_policy_samples_must_fit_the_context():
    assert EvalConfig(environment="calculator").must_fit(8) == 8
    assert EvalConfig(environment="calculator", max_episode_tokens=5).must_fit(8) == 5


def test_the_quickstart_with_a_tool_types_commands_that_exist(tmp_path):
    typed = [command for _, command in commands("q", tmp_path, seed=3, task=TOOLS)]
    assert [command[:2] for command in typed[1:]] == [
        ["rlvr", name] for name in ("eval", "sft", "eval", "grpo", "eval", "eval", "analyze")
    ]
    configs = []
    for _, name, *words in typed[1:-1]:
        given = {
            flag.removeprefix("--").replace("-", "_"): value
            for flag, value in zip(words[::2], words[1::2], strict=True)
        }
        configs.append(resolve(config_of(name), flags={**given, "seed": int(given["seed"])}, command=name))
    assert [config.environment for config in configs] == ["calculator"] * 5 + [""]
    assert {config.seed for config in configs} == {3}
    assert configs[-1].model == configs[-2].model


@pytest.mark.parametrize(
    "seed", [pytest.param(0, marks=pytest.mark.slow), *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))]
)
def test_a_model_that_cannot_multiply_learns_to_ask_the_calculator(tmp_path, forks, seed):
    done = forks.run("quickstart", "--tools", "--name", "q", "--seed", seed, cwd=tmp_path, status=0, limit=900)
    table = {line.rsplit(maxsplit=5)[0].strip(): float(line.split()[-5]) for line in done.out.splitlines()[2:]}
    assert table["untrained"] == 0
    assert 0.1 < table["after SFT"] < 0.5
    assert table["after GRPO"] > 0.9
    assert table["without the tool"] < 0.05
