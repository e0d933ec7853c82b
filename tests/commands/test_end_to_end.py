"""The commands as a user types them, on real models: evaluate, ask, train, evaluate what was trained; stop and go on."""

import json
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from checks import findings
from endpoint import completion, error, serving
from marks import slow
from rlvr_cli.commands import eval as evaluation
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.errors import QuestionsRefused, RlvrError
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.rollouts import collect as collecting
from rlvr_cli.runs.readers import read_rollouts, read_run

ROOT = Path(__file__).parents[2]
UNLIKE = ("run_id", "sampled_at")  # what two runs of the same work may differ in
ROUNDED = (
    "sampled_logprobs",
    "mean_logprob",
    "mean_entropy",
)  # a matrix product's last bit depends on the batch it is in


@pytest.fixture(scope="module")
def rlvr(forks):
    """Run the command line in a directory; `Done`, once it has ended with this status and without a traceback."""
    return lambda cwd, *arguments, status=0: forks.run(*arguments, cwd=cwd, status=status)


def rows_of(run):
    rows = read_rollouts(run).to_pylist()
    rows = [{k: v for k, v in r.items() if k not in UNLIKE} for r in rows]
    return sorted(rows, key=lambda r: (r["phase"], r["step"], r["example_id"], r["sample_index"]))


def test_eval_as_typed_measures_the_built_in_model(tmp_path, rlvr):
    done = rlvr(tmp_path, "eval", "--prompt", "r1_zero")
    assert "built in" in done.err
    assert "--model" in done.err  # how to name another
    (run,) = (tmp_path / "runs").iterdir()
    info = read_run(run)
    assert info.metadata["status"] == "finished"
    assert findings(run) == []
    rows = rows_of(run)
    assert len(rows) == len(load_dataset("arithmetic").examples)
    categories = {r["category"] for r in rows}
    assert categories == {"format_1_answer_1", "format_1_answer_0", "format_0_answer_0"}  # something to show for each
    for r in rows:
        assert len(r["response_ids"]) == len(r["sampled_logprobs"]) == r["num_response_tokens"]
        assert r["category"] in done.out
    shown = json.loads(rlvr(tmp_path, "analyze", "categories", "--format", "json").out)
    counts = {c["category"]: c["samples"] for c in shown}
    assert counts == {c: sum(r["category"] == c for r in rows) for c in categories}


def test_eval_with_several_samples_reports_pass_best_and_majority_at_k(tmp_path, rlvr):
    done = rlvr(tmp_path, "eval", "--limit", 16, "--num-samples", 4, "--format", "json", "--run", "n4")
    at_k = json.loads(done.out)["at_k"]
    assert [row["k"] for row in at_k] == [1, 2, 4]
    rows, rewards = rows_of(tmp_path / "runs/n4"), {}
    assert len({(r["example_id"], r["sample_index"]) for r in rows}) == len(rows) == 64
    for r in rows:
        rewards.setdefault(r["example_id"], []).append(r["reward"])
    assert at_k[0]["pass_at_k"] == pytest.approx(sum(sum(v) for v in rewards.values()) / 64)
    assert at_k[-1]["pass_at_k"] == pytest.approx(sum(max(v) for v in rewards.values()) / 16)


@pytest.mark.slow
def test_each_thinking_budget_is_a_run(tmp_path, rlvr):
    budgets = ["--thinking-budget", "2,9", "--limit", "4", "--sampling-max-tokens", "40", "--num-samples", "2"]
    words = ["eval", *budgets, "--run", "b"]
    table = json.loads(rlvr(tmp_path, *words, "--stop-thinking", " so </think> <answer>", "--format", "json").out)
    assert [(r["run_id"], r["thinking_budget"], r["samples"]) for r in table] == [("b-2", 2, 8), ("b-9", 9, 8)]
    for name, budget in (("b-2", 2), ("b-9", 9)):
        rows = rows_of(tmp_path / "runs" / name)
        ended = [r for r in rows if r["turns"]]
        assert ended
        for r in ended:
            assert " so </think> <answer>" in r["response"]
            assert r["turns"][0] == {"role": "policy", "start": 0, "end": budget}
    rlvr(tmp_path, "check", "b-2", "--replay", "all")
    # A command that is given again goes on with what is there.
    whole = rows_of(tmp_path / "runs/b-9")
    shutil.rmtree(tmp_path / "runs/b-9")
    again = rlvr(tmp_path, *words, "--stop-thinking", " so </think> <answer>", "--format", "json")
    assert json.loads(again.out) == table
    for mine, theirs in zip(rows_of(tmp_path / "runs/b-9"), whole, strict=True):
        assert mine["response_ids"] == theirs["response_ids"]
    for given in (["--stop-thinking", " </think>"], []):
        other = rlvr(tmp_path, *words, *given, status=1)
        assert "b-2 was started with other options: --stop-thinking ' so </think> <answer>', not" in other.err


@pytest.mark.slow  # each of the two by default
def test_each_budget_of_each_dataset_is_a_run(tmp_path, rlvr):
    words = ["eval", "--dataset", "arithmetic,arithmetic:9:1", "--thinking-budget", "2,9", "--limit", "2"]
    words += [
        "--stop-thinking",
        " so </think> <answer>",
        "--sampling-max-tokens",
        "40",
        "--run",
        "t",
        "--format",
        "json",
    ]
    table = json.loads(rlvr(tmp_path, *words).out)
    expected = [("t-arithmetic", 2), ("t-arithmetic-9-1", 2), ("t-arithmetic", 9), ("t-arithmetic-9-1", 9)]
    assert [(r["evaluation"], r["thinking_budget"]) for r in table] == expected
    for row in table:
        config = read_run(tmp_path / "runs" / row["run_id"]).metadata["config"]
        dataset = "arithmetic" if row["evaluation"] == "t-arithmetic" else "arithmetic:9:1"
        assert (config["dataset"], config["thinking_budget"]) == (dataset, str(row["thinking_budget"]))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"thinking_budget": "1e3"}, "not a number of tokens"),
        ({"thinking_budget": "8,8"}, "twice"),
        ({"thinking_budget": "4,1024"}, "no tokens for the answer"),
        ({"thinking_budget": "4", "base_url": "http://localhost:1/v1", "model": "m"}, "endpoint is not asked for"),
        ({"thinking_budget": "4", "chat": True, "chat_thinking": "off"}, "exclude each other"),
        ({"stop_thinking": "</think>"}, "no effect without"),
        ({"thinking_budget": "4", "stop_thinking": "stop"}, "does not end the thinking"),
    ],
)
def test_what_cannot_be_a_thinking_budget_is_refused(given, problem):
    with pytest.raises(RlvrError, match=problem):
        resolve(EvalConfig, flags=given, command="eval")


@pytest.mark.parametrize(("given", "problem"), [((), "has no <think>"), (("--chat",), "chat template")])
def test_a_thinking_budget_needs_a_prompt_and_a_model_that_think(tmp_path, rlvr, given, problem):
    refused = rlvr(tmp_path, "eval", "--prompt", "question_only", "--thinking-budget", 8, *given, status=1)
    assert problem in refused.err
    assert not (tmp_path / "runs").exists()


LONG = {"question": "long " * 5000, "answer": "5"}


def test_a_prompt_that_does_not_fit_is_named_before_anything_is_sampled(tmp_path, monkeypatch):
    """It was found when its turn came, hours later, and the run could not be finished in any way."""
    monkeypatch.setattr(collecting, "ASKED_ROWS", 4)
    rows = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "e.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, LONG]))
    flags = {"dataset": str(tmp_path / "e.jsonl"), "sampling_max_tokens": 8, "runs_dir": str(tmp_path), "run": "r"}
    with pytest.raises(RlvrError, match=r"Question e-9 has a prompt of \d+ tokens; with 8 for the response"):
        evaluation.run(resolve(EvalConfig, flags=flags, command="eval"))
    assert not list((tmp_path / "r/rollouts").iterdir())


def test_a_prompt_of_a_later_dataset_that_does_not_fit_is_named_at_once(tmp_path, rlvr):
    (tmp_path / "e.jsonl").write_text(json.dumps(LONG) + "\n")
    command = "eval --dataset arithmetic:4,e.jsonl --sampling-max-tokens 8 --run r"
    done = rlvr(tmp_path, *command.split(), status=1)
    assert "Question e-1 has a prompt of" in done.err
    assert "allow only shorter responses: --sampling-max-tokens." in done.err
    assert not list(tmp_path.glob("runs/*/rollouts/*"))


def test_each_dataset_is_a_run(tmp_path, rlvr):
    for folder, sums in (("a", ((2, 3), (40, 2))), ("b", ((7, 8), (1, 1), (30, 9)))):
        (tmp_path / folder).mkdir()
        rows = [{"question": f"What is {x} + {y}?", "answer": str(x + y)} for x, y in sums]
        (tmp_path / folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["eval", "--dataset", "arithmetic:2", "--dataset", "a/own.jsonl,b/own.jsonl", "--num-samples", "2"]
    words += ["--sampling-max-tokens", "40", "--run", "t", "--format", "json"]
    table = json.loads(rlvr(tmp_path, *words).out)
    names = {"t-arithmetic-2": "arithmetic:2:0", "t-own": "a/own.jsonl", "t-own-2": "b/own.jsonl"}
    assert {row["run_id"]: row["dataset"] for row in table} == names
    assert [(row["questions"], row["samples"]) for row in table] == [(2, 4), (2, 4), (3, 6)]
    for row in table:
        rows = rows_of(tmp_path / "runs" / row["run_id"])
        assert row["accuracy"] == pytest.approx(sum(r["reward"] for r in rows) / len(rows))
        assert read_run(tmp_path / "runs" / row["run_id"]).metadata["facts"]["dataset"]["name"] == row["dataset"]
    assert {r["ground_truth"] for r in rows_of(tmp_path / "runs/t-own-2")} == {"15", "2", "39"}
    # That a command that is given again goes on with what is there is seen of budgets, and of an interrupted one.
    other = rlvr(tmp_path, *words, "--limit", "1", status=1)
    assert "t-arithmetic-2 was started with other options: --limit None, not 1" in other.err


@pytest.mark.parametrize(
    ("given", "ends", "fault"),
    [
        (["--dataset", "arithmetic:3,arithmetic:2:1"], ["arithmetic-3", "arithmetic-2-1"], "create:1:term"),
        slow(["--thinking-budget", "2,9", "--stop-thinking", " so </think> <answer>"], ["2", "9"], "create:2:term"),
    ],
)
def test_an_interrupted_evaluation_of_several_runs_says_how_all_of_them_go_on(tmp_path, forks, given, ends, fault):
    words = [*given, "--limit", 3, "--sampling-max-tokens", 20]
    done = forks.run("eval", *words, cwd=tmp_path, fault=fault, status=130)
    (command,) = re.findall("go on with all runs: (.*)", done.err)
    forks.run(*shlex.split(command)[1:], cwd=tmp_path, status=0)
    runs = {path.name: read_run(path) for path in (tmp_path / "runs").iterdir()}
    (name,) = {run_id.removesuffix(f"-{end}") for end in ends for run_id in runs if run_id.endswith(f"-{end}")}
    assert runs.keys() == {f"{name}-{end}" for end in ends}
    assert {info.metadata["status"] for info in runs.values()} == {"finished"}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--dataset", "arithmetic,arithmetic"], "a dataset twice"),
        (["--dataset", "arithmetic,"], "an empty name"),
    ],
)
def test_datasets_that_cannot_be_evaluated_together_are_refused(tmp_path, rlvr, given, problem):
    assert problem in rlvr(tmp_path, "eval", *given, status=2).err
    assert not (tmp_path / "runs").exists()


def test_a_dataset_whose_name_has_a_comma_is_one(tmp_path, rlvr):
    (tmp_path / "a,b.jsonl").write_text('{"question": "What is 2 + 3?", "answer": "5"}\n')
    assert "a,b.jsonl: 1 questions" in rlvr(tmp_path, "eval", "--dataset", "a,b.jsonl", "--dry-run").err


@pytest.mark.slow
def test_failures_show_the_cases_of_a_category(tmp_path, rlvr):
    rlvr(tmp_path, "eval", "--limit", 20, "--run", "r")
    assert rlvr(tmp_path, "analyze", "r").out == rlvr(tmp_path, "analyze", "summary", "runs/r").out
    shown = rlvr(tmp_path, "analyze", "failures", "--category", "format_1_answer_0", "--format", "json")
    cases = json.loads(shown.out)
    rows = [r for r in rows_of(tmp_path / "runs/r") if r["category"] == "format_1_answer_0"]
    assert {c["example_id"] for c in cases} == {r["example_id"] for r in rows}
    assert {c["failure_kind"] for c in cases} == {"wrong_answer"}
    assert all(c["extracted_answer"] != c["ground_truth"] for c in cases)


EVAL = shlex.split(
    "--dataset arithmetic:80 --num-samples 8 --sampling-max-tokens 6 --max-batch-size 64 --grader-workers 1"
)
ROWS = 640  # more than the 512 of a commit


@pytest.fixture(scope="module")
def whole_eval(tmp_path_factory, rlvr):
    """A run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    rlvr(folder, "eval", *EVAL, "--run", "whole")
    return folder / "runs/whole"


@pytest.mark.parametrize(
    "fault",
    [*(slow(f"sampled:100:{how}") for how in ("int", "term")), "manifest.done:1"],
)
def test_eval_stopped_midway_goes_on_to_the_same_rows(tmp_path, whole_eval, rlvr, forks, fault):
    done = forks.run("eval", *EVAL, "--run", "cut", cwd=tmp_path, fault=fault)
    held = len(read_rollouts(tmp_path / "runs/cut"))
    assert 0 < held <= ROWS, done.err
    if fault == "manifest.done:1":  # which may have all rows, where grading has waited for a processor
        assert done.status == -signal.SIGKILL
    else:
        assert held < ROWS
        assert done.status == 130
        assert "--resume" in done.err
        assert read_run(tmp_path / "runs/cut").metadata["status"] == "interrupted"
    differs = rlvr(tmp_path, "eval", "--resume", "cut", "--num-samples", "5", status=1)
    assert "--num-samples 8, not 5" in differs.err
    rlvr(tmp_path, "eval", *EVAL, "--resume", "cut")
    assert read_run(tmp_path / "runs/cut").metadata["status"] == "finished"
    cut, whole = rows_of(tmp_path / "runs/cut"), rows_of(whole_eval)
    assert len(cut) == ROWS
    for a, b in zip(cut, whole, strict=True):
        assert {k: v for k, v in a.items() if k not in ROUNDED} == {k: v for k, v in b.items() if k not in ROUNDED}
        for name in ROUNDED:
            assert a[name] == pytest.approx(b[name], abs=1e-5), name


def test_a_changed_dataset_cannot_be_resumed(tmp_path, rlvr):
    data = tmp_path / "d.jsonl"
    data.write_text('{"question": "1+1?", "answer": "2"}\n')
    rlvr(tmp_path, "eval", "--dataset", "d.jsonl", "--sampling-max-tokens", "8", "--run", "r")
    data.write_text('{"question": "1+1?", "answer": "3"}\n')
    refused = rlvr(tmp_path, "eval", "--resume", "r", status=1)
    assert "dataset fingerprint" in refused.err
    assert read_run(tmp_path / "runs/r").metadata["status"] == "finished"


def test_a_plan_of_an_evaluation_says_what_would_be_sampled_and_writes_nothing(tmp_path, rlvr):
    words = "eval --dataset arithmetic:6,countdown:3 --num-samples 4 --sampling-max-tokens 50 --dry-run"
    done = rlvr(tmp_path, *words.split())
    for said in (
        "arithmetic:6:0: 6 questions; grader r1_zero",
        "24 responses of up to 50 tokens",
        "grader countdown",
        "12 responses",
    ):
        assert said in done.err
    assert "User: What is the last digit of" in done.out
    assert done.out.endswith("<think>\n")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs/taken").mkdir(parents=True)
    assert "exists already" in rlvr(tmp_path, "eval", "--dry-run", "--run", "taken", status=1).err
    words = "eval --dataset arithmetic:6 --thinking-budget 8,20,40 --sampling-max-tokens {} --dry-run"
    done = rlvr(tmp_path, *words.format(300).split(), "--max-model-len", "400")
    assert "18 responses of up to 300 tokens" in done.err
    unheeded = "note: --max-model-len has no effect"
    assert (unheeded in done.err) == ("engine   transformers" in done.err)
    far = "eval --dataset arithmetic:6 --base-url http://127.0.0.1:9 --model m --max-model-len 400 --dry-run"
    assert unheeded in rlvr(tmp_path, *far.split()).err
    for asked in (words, words.removesuffix(" --dry-run")):
        assert "leave none for the answer" in rlvr(tmp_path, *asked.format(41).split(), status=1).err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["taken"]
    assert "There is no device cuda:9" in rlvr(tmp_path, "eval", "--dry-run", "--device", "cuda:9", status=1).err
    both = rlvr(tmp_path, "eval", "--dry-run", "--check-dataset", status=2)
    assert "--dry-run has no effect with --check-dataset" in both.err


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_damaged_model_leaves_no_run_of_its_name(tmp_path, rlvr, file):
    damaged = shutil.copytree(builtin_model_path(), tmp_path / "m") / file
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert "m cannot be loaded" in rlvr(tmp_path, "eval", "--model", "m", "--run", "r", status=1).err
    assert not (tmp_path / "runs").exists()


def test_check_dataset_lists_the_truths_the_grader_cannot_read(tmp_path, rlvr):
    (tmp_path / "good.jsonl").write_text(
        '{"question": "a", "answer": "\\\\frac{1}{2}"}\n{"question": "b", "answer": "#### 1,234"}\n'
    )
    assert "reads all 2" in rlvr(tmp_path, "eval", "--dataset", "good.jsonl", "--check-dataset").err
    (tmp_path / "bad.jsonl").write_text(
        '{"id": "x", "question": "a", "answer": "5"}\n{"id": "y", "question": "b", "answer": "about five"}\n'
    )
    done = rlvr(
        tmp_path, "eval", "--dataset", "bad.jsonl", "--grader", "gsm8k", "--check-dataset", "--format", "json", status=1
    )
    assert [row["example_id"] for row in json.loads(done.out)] == ["y"]
    assert not (tmp_path / "runs").exists()


def test_unit_tests_that_tell_no_program_are_counted_and_not_condemned(tmp_path, rlvr):
    tests = ["assert is_prime(7)", "assert f(2) is None", "assert f(2) == 4"]
    rows = [json.dumps({"question": "Write it.", "answer": test}) + "\n" for test in tests]
    (tmp_path / "code.jsonl").write_text("".join(rows))
    done = rlvr(tmp_path, "eval", "--dataset", "code.jsonl", "--grader", "python", "--check-dataset")
    assert "note: of 2 ground truths no program that passes them can be made up" in done.err
    assert "python reads all 3 ground truths of code.jsonl." in done.err
    tried = rlvr(tmp_path, "grade", "--check", "python", "--dataset", "code.jsonl", "--limit", 2).err
    assert "note: no perfect answer can be made up for 2 of the 2 questions." in tried


@pytest.mark.slow  # by default tests/commands/test_rewards.py
def test_a_graders_own_file_and_its_errors_are_rows_not_crashes(tmp_path, rlvr):
    (tmp_path / "mine.py").write_text(
        "def grade(response, truth):\n"
        "    if truth == '7': raise KeyError(truth)\n"
        "    return {'format_reward': 1.0, 'answer_reward': 0.0, 'reward': 0.0}\n"
    )
    rlvr(tmp_path, "eval", "--limit", 30, "--grader", "mine.py:grade", "--run", "r")
    rows = rows_of(tmp_path / "runs/r")
    failed = [r for r in rows if r["ground_truth"] == "7"]
    assert failed
    assert {(r["reward"], r["grade_error"], r["category"]) for r in failed} == {(None, "KeyError", "grade_error")}
    assert all(r["reward"] == 0.0 for r in rows if r["ground_truth"] != "7")


def test_sft_teaches_and_what_it_saves_is_a_model(tmp_path, rlvr):
    options = [
        "--dataset", "arithmetic:200:3", "--num-examples", 128, "--correct-only", "--sft-epochs", 2, "--train-batch-size", 8,
        "--micro-batch-size", 8, "--learning-rate", 1e-3, "--eval-examples", 4, "--eval-every", 4, "--sampling-max-tokens", 32,
    ]  # fmt: skip
    short = rlvr(tmp_path, "sft", *options, status=1)
    assert "--num-examples 128, but there are" in short.err  # of 200 traces fewer are correct
    options[3] = 32
    plan = rlvr(tmp_path, "sft", *options, "--dry-run")
    assert "8 of 8 examples" in plan.err
    assert "2 epochs" in plan.err
    assert "8 updates change a model little" in plan.err
    assert not (tmp_path / "runs").exists()
    done = rlvr(tmp_path, "sft", *options, "--run", "s")
    run = tmp_path / "runs/s"
    shown = re.findall(r"^evaluation +after (\d+) updates: reward ([0-9.]+)", done.err, re.MULTILINE)
    means = [sum(r["reward"] for r in rows_of(run) if r["step"] == step) / 4 for step in (0, 4, 8)]
    assert [(int(step), float(reward)) for step, reward in shown] == [
        (step, pytest.approx(mean, abs=1e-3)) for step, mean in zip((0, 4, 8), means, strict=True)
    ]
    sql = "select name, list(value order by step) as found from metrics group by name"
    shown = json.loads(rlvr(tmp_path, "analyze", sql, "s", "--format", "json").out)
    metrics = {row["name"]: row["found"] for row in shown}
    losses = metrics["loss/nll"]
    assert len(losses) == 8
    assert sum(losses[-2:]) < sum(losses[:2])
    assert {r["step"] for r in rows_of(run)} == {0, 4, 8}
    wanted = {
        "reward/mean",
        "reward/format",
        "reward/answer",
        "entropy/mean",
        "length/mean",
        "policy/entropy",
        "optimizer/grad_norm",
    }
    assert wanted <= metrics.keys()

    again = rlvr(tmp_path, "eval", "--model", run / "model", "--limit", 4, "--sampling-temperature", 0, "--run", "e")
    assert "built in" not in again.err
    import torch
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(run / "model")
    assert all(p.dtype == torch.float32 for p in trained.parameters())


@pytest.mark.slow
def test_sft_does_not_depend_on_how_the_batch_is_cut(tmp_path, rlvr):
    from safetensors.torch import load_file

    weights = []
    for size in (16, 5):
        rlvr(tmp_path, "sft", "--dataset", "arithmetic:64", "--train-batch-size", 32, "--micro-batch-size", size, "--learning-rate", 1e-3,
             "--eval-examples", 1, "--run", f"m{size}")  # fmt: skip
        weights.append(load_file(tmp_path / f"runs/m{size}/model/model.safetensors"))
    for name in weights[0]:
        assert (weights[0][name] - weights[1][name]).abs().max() < 2e-5, name


def test_sft_trains_on_a_runs_rollouts(tmp_path, rlvr):
    rlvr(tmp_path, "eval", "--limit", 16, "--num-samples", 2, "--run", "r")
    correct = {(r["prompt"], r["response"]) for r in rows_of(tmp_path / "runs/r") if r["reward"] == 1}
    done = rlvr(
        tmp_path,
        "sft",
        "--dataset",
        "runs/r",
        "--correct-only",
        "--train-batch-size",
        8,
        "--dry-run",
    )
    assert re.search(rf"\b{len(correct)} of \d+ traces of r\b", done.err)


def test_a_question_that_an_endpoint_refuses_keeps_no_other_dataset_from_being_asked(tmp_path, monkeypatch, capsys):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    monkeypatch.chdir(tmp_path)
    for name, number in {"a": 2, "b": 1, "c": 2}.items():
        rows = [json.dumps({"question": f"{name}{i}?", "answer": "4"}) + "\n" for i in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    with serving(lambda body: error(400, "no") if "1?" in body["prompt"] else completion("4 </answer>")) as endpoint:
        flags = {
            "model": "m",
            "base_url": endpoint.url,
            "dataset": "a.jsonl,b.jsonl,c.jsonl",
            "run": "r",
            "grader_workers": 1,
        }
        with pytest.raises(QuestionsRefused, match=r"Question a-2: 400 .* Question c-2: 400"):
            evaluation.run(resolve(EvalConfig, flags=flags, command="eval"))
    assert [read_rollouts(tmp_path / f"runs/r-{name}").num_rows for name in "abc"] == [1, 1, 1]
    assert re.search(r"dataset +run_id(?s:.+)\nb.jsonl +r-b", capsys.readouterr().out)
