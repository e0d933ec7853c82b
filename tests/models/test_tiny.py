"""A new tiny model is a model like any other: every loader loads what was made."""

import shutil
from pathlib import Path

import pytest

from disks import largest_file
from rlvr_cli.commands.quickstart import commands, left_of, run
from rlvr_cli.config.quickstart import QuickstartConfig
from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.data.prompts import load_prompt
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import builtin_model_path, model_identity
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.tiny import main, new_tiny_model, new_tokenizer
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.provenance import environment
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.sums import sums_of

TEMPLATE = load_prompt("r1_zero")
TRACES = load_dataset("arithmetic:200", purpose="traces").examples
TEXTS = [text for e in TRACES for text in (TEMPLATE.fill(e.question), e.response or "")]
OTHER = [
    "Janet's ducks lay 16 eggs.",
    "é ½ 数 😀\n\n",
    " </answer>",
    r"\boxed{1,234}",
    " it looks like 9 </think> <answer> 9 </answer>",
]


def test_the_tokenizer_on_disk_is_the_one_that_was_trained(tmp_path):
    tokenizer = new_tokenizer(TEXTS)
    new_tiny_model(tmp_path / "m", texts=TEXTS)
    loaded = load_policy(tmp_path / "m").tokenizer
    for text in (*TEXTS[:20], *OTHER):
        ids = tokenizer(text).input_ids
        assert loaded(text).input_ids == ids
        assert loaded.decode(ids) == text


def test_the_template_is_a_handful_of_tokens_and_digits_are_tokens():
    tokenizer = new_tokenizer(TEXTS)
    assert len(tokenizer(TEXTS[0]).input_ids) < 24
    assert tokenizer.tokenize("123") == ["1", "2", "3"]


def test_the_seed_determines_the_model(tmp_path):
    import torch

    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        new_tiny_model(tmp_path / name, texts=TEXTS, seed=seed)
        weights.append(load_policy(tmp_path / name).model.model.embed_tokens.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_quickstarts_start_is_the_model_of_a_run(tmp_path, monkeypatch):
    """So that nothing but runs lies among the runs; that of a folder is the same. One that failed is made by the same command."""
    monkeypatch.chdir(tmp_path)

    def problem_of(*arguments):
        monkeypatch.setattr("sys.argv", ["tiny", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return str(ended.value.code).splitlines()[0]

    in_a_run = ("runs/q0-start", "--as-run", "--seed")
    with largest_file(2**20):
        assert problem_of(*in_a_run, "3") == "error: Cannot write runs/q0-start: File too large."
    assert read_run(tmp_path / "runs/q0-start").metadata["status"] == "failed"
    assert problem_of(*in_a_run, "4") == "error: runs/q0-start exists already.", "another seed makes another model"
    for arguments in (in_a_run, ["folder", "--seed"]):
        monkeypatch.setattr("sys.argv", ["tiny", *arguments, "3"])
        main()
    info = read_run(tmp_path / "runs/q0-start")
    assert info.metadata["model_files"] == sums_of(tmp_path / "folder")
    assert (info.metadata["status"], info.metadata["seed"]) == ("finished", 3)
    assert check_run(info.path).problems == []
    assert model_identity(info.path / "model")["sha256"] == model_identity(tmp_path / "folder")["sha256"]
    assert problem_of(*in_a_run, "3") == "error: runs/q0-start exists already."


def test_the_quickstart_names_its_directory_unless_every_command_takes_that_one(monkeypatch):
    def given(runs):
        words = [line for _, line in commands("q0", Path(runs), seed=0) if line[0] == "rlvr"]
        return {line[line.index("--runs-dir") + 1] if "--runs-dir" in line else "" for line in words}

    monkeypatch.delenv("RLVR_RUNS_DIR", raising=False)
    assert (given("runs"), given("other")) == ({""}, {"other"})
    monkeypatch.setenv("RLVR_RUNS_DIR", "/data/runs")
    assert given("runs") == {"runs"}, "the variable would send the runs elsewhere"


def test_the_quickstart_goes_on_where_an_earlier_one_stopped(tmp_path, monkeypatch):
    (_, make), (_, evaluate), *_, (_, draw) = commands("q0", tmp_path, seed=0)
    resume = ["rlvr", "eval", "--resume", "q0-start-eval", "--runs-dir", str(tmp_path)]

    def left_after(name, command, words, status):
        monkeypatch.setattr("sys.argv", [command, *words])
        with RunDir.create(tmp_path, command, name=name, metadata={"environment": environment()}) as made:
            made.finish(status)
        return left_of(make if command == "tiny" else evaluate, tmp_path)

    assert [left_of(command, tmp_path) for command in (make, evaluate, draw)] == [make, evaluate, draw]
    assert left_after("q0-start", "tiny", make[3:], "failed") == make, "which goes on by itself"
    assert left_after("q0-start-eval", "eval", evaluate[1:], "interrupted") == resume
    for name in ("q0-start", "q0-start-eval"):
        shutil.rmtree(tmp_path / name)
    assert left_after("q0-start", "tiny", make[3:], "finished") == []
    assert left_after("q0-start-eval", "eval", evaluate[1:], "finished") == []
    for given in ({"seed": 1}, {"tools": True}):
        with pytest.raises(RlvrError, match="q0-start exists already, and was made by another command") as raised:
            run(QuickstartConfig(name="q0", runs_dir=str(tmp_path), **given))
        assert raised.value.hint == "Choose another --name."


def test_the_quickstart_writes_only_runs_among_the_runs():
    made = [word for _, line in commands("q0", Path("runs"), seed=0) for word in line if word.startswith("runs/")]
    assert {Path(word).parts[1] for word in made} == {"q0-start", "q0-sft", "q0-grpo"}
    assert [word for word in made if word.endswith(".png")] == ["runs/q0-grpo/curves.png"]


def test_the_built_in_model_is_small_and_knows_its_tokens():
    files = [p for p in builtin_model_path().iterdir() if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 3_000_000
    assert {p.name for p in files} >= {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"}
    policy = load_policy(builtin_model_path())
    assert policy.model.config.model_type == "qwen2"
    prompt = TEMPLATE.fill(load_dataset("arithmetic").examples[0].question)
    assert len(policy.tokenizer(prompt).input_ids) < 24
    assert policy.tokenizer.eos_token_id == policy.model.config.eos_token_id


@pytest.mark.parametrize("text", OTHER)
def test_any_text_is_encodable(text):
    tokenizer = new_tokenizer(TEXTS)
    assert tokenizer.decode(tokenizer(text).input_ids) == text
