"""--lora-rank through the commands: what a run saves, evals, and goes on from, and what is refused."""

import json
import shutil

import pyarrow.parquet as pq
import pytest

from marks import slow
from rlvr_cli.commands import eval as evaluate
from rlvr_cli.commands import grpo, sft
from rlvr_cli.commands.store import check
from rlvr_cli.config.ei import EiConfig
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.config.store.check import CheckConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.models.load import load_policy
from rlvr_cli.runs.readers import read_run

SFT = {
    "dataset": "arithmetic:64",
    "eval_examples": 2,
    "sampling_max_tokens": 8,
    "grader_workers": 1,
    "train_batch_size": 32,
    "lora_rank": 8,
}
GRPO = {
    "dataset": "arithmetic:64", "eval_examples": 2, "sampling_max_tokens": 12, "grader_workers": 1, "rollout_batch_size": 16, "group_size": 4,
    "train_batch_size": 16, "gradient_accumulation_steps": 2, "n_grpo_steps": 2, "lora_rank": 8, "learning_rate": 1e-3, "sampling_min_tokens": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the run `taught`, which trained an adapter on traces and merged it."""
    folder = tmp_path_factory.mktemp("runs")
    traces = [{"prompt": f"{i} and {i}?", "response": " so it is 7", "ground_truth": "7"} for i in range(64)]
    (folder / "traces.jsonl").write_text("".join(json.dumps(trace) + "\n" for trace in traces))
    how = {"dataset": str(folder / "traces.jsonl"), "sft_epochs": 4, "learning_rate": 1e-2, "lora_merge": True}
    sft.run(SftConfig(**SFT | how, run="taught", runs_dir=str(folder)))
    return folder


def metrics(run, name):
    rows = pq.read_table(run / "metrics.parquet").to_pylist()
    return [row["value"] for row in sorted(rows, key=lambda row: row["step"]) if row["name"] == name]


def test_an_adapter_learns_from_traces(runs):
    losses = metrics(runs / "taught", "loss/nll")
    assert losses[-1] < 0.5 * losses[0]
    files = {p.name for p in (runs / "taught/model").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    metadata = read_run(runs / "taught").metadata
    assert metadata["model_files"].keys() == files
    assert "model.safetensors" in metadata["merged_model_files"]
    check.run(CheckConfig(runs=("taught",), runs_dir=str(runs), replay="2"))


def test_without_lora_merge_only_the_adapter_is_saved(runs):
    sft.run(SftConfig(**SFT, n_sft_steps=1, run="adapter-alone", runs_dir=str(runs)))
    run = runs / "adapter-alone"
    assert not (run / "model-merged").exists()
    assert "merged_model_files" not in read_run(run).metadata
    given = {"resume": "adapter-alone", "lora_merge": True, "runs_dir": str(runs)}
    sft.run(resolve(SftConfig, flags=given, command="sft"))  # a finished run does nothing else when it goes on
    assert (run / "model-merged/model.safetensors").is_file()
    assert "model.safetensors" in read_run(run).metadata["merged_model_files"]


def test_the_adapter_and_the_merged_model_evaluate_alike(runs):
    answers = []
    for name in ("model", "model-merged"):
        run = f"eval-{name}"
        evaluate.run(
            EvalConfig(
                model=str(runs / "taught" / name), dataset="arithmetic:6", sampling_temperature=0.0,
                sampling_max_tokens=16, grader_workers=1, run=run, runs_dir=str(runs),
            )
        )  # fmt: skip
        table = pq.read_table(next((runs / run / "rollouts").glob("*.parquet"))).sort_by("example_id")
        answers.append(table["response"].to_pylist())
        facts = read_run(runs / run).metadata["facts"]["model"]
        assert ("base_sha256" in facts) == (name == "model")
    assert answers[0] == answers[1]


@pytest.mark.parametrize("async_steps", [0, slow(1)])
def test_reinforcement_goes_on_from_an_adapter(forked, runs, async_steps):
    name = f"reinforced-{async_steps}"
    model = str(runs / "taught/model")
    (runs / "mine.py").write_text("def grade(response, truth):\n    return {'reward': len(response) % 3 / 2}\n")
    how = {
        "grader": f"{runs / 'mine.py'}:grade",
        "kl_coef": 0.1,
        "async_steps": async_steps,
        "importance_correction": "none",
    }
    grpo.run(GrpoConfig(**GRPO, **how, model=model, run=name, runs_dir=str(runs)))
    run = runs / name
    settings = json.loads((run / "model/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(builtin_model_path())  # not the adapter that it went on from
    kl = metrics(run, "policy/kl")
    assert kl[0] == pytest.approx(0, abs=1e-6)  # the reference is the policy that the run began with
    assert kl[1] > 1e-5
    if not async_steps:
        assert max(metrics(run, "mismatch/logprob_mean_abs")) < 1e-5
    start, end = load_policy(model).weights(), load_policy(run / "model").weights()
    assert start.keys() == end.keys()
    assert not all(tensor.equal(end[key]) for key, tensor in start.items())


def test_an_adapter_is_not_taken_for_a_model_to_fine_tune(runs):
    model = str(runs / "taught/model")
    for changes, said in (
        ({"lora_rank": 0}, "holds a LoRA adapter"),
        ({"lora_rank": 4}, "has --lora-rank 8 --lora-alpha 32"),
        ({"lora_rank": 8, "lora_alpha": 8}, "has --lora-rank 8 --lora-alpha 32"),
    ):
        with pytest.raises(RlvrError, match=said) as caught:
            grpo.run(GrpoConfig(**GRPO | changes, model=model, run="refused", runs_dir=str(runs)))
        assert "--lora-rank 8 --lora-alpha 32" in caught.value.hint
    assert not (runs / "refused").exists()


@pytest.mark.parametrize("config", [SftConfig, EiConfig, GrpoConfig])
@pytest.mark.parametrize("option", [{"lora_alpha": 16}, {"lora_merge": True}])
def test_options_of_an_adapter_need_one(config, option):
    with pytest.raises(RlvrError, match="needs --lora-rank"):
        config(**option)
    config(**option, lora_rank=4)


def test_a_damaged_adapter_is_named(runs, tmp_path):
    copied = shutil.copytree(runs / "taught", tmp_path / "taught")
    for folder, file in (("model", "adapter_model.safetensors"), ("model-merged", "model.safetensors")):
        path = copied / folder / file
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(RlvrError, match=rf"{folder}/{file} is damaged"):
            evaluate.run(EvalConfig(model=str(copied / folder), dataset="arithmetic:4", runs_dir=str(tmp_path)))
    with pytest.raises(RlvrError, match="2 problems"):
        check.run(CheckConfig(runs=("taught",), runs_dir=str(tmp_path)))


def test_the_plan_says_what_is_trained_and_at_which_rate(capsys):
    config = GrpoConfig(dry_run=True, lora_rank=4, param_dtype="bfloat16", kl_coef=0.1)
    grpo.run(config)
    said = capsys.readouterr().err
    assert "LoRA of rank 4, alpha 32, on all linear layers but the head" in said
    assert "about 10 times that of full fine-tuning" in said
    assert "bfloat16 weights, float32 adapter and optimizer state" in said
    assert "reference model" not in said
    assert "rounded away" not in said
