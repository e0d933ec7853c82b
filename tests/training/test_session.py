"""What a training command decides before its first step: the precision of products on a CPU, and which models it refuses."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Qwen2ForCausalLM

from marks import slow
from rlvr_cli.cli import invoke
from rlvr_cli.commands import grpo
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.compute.device import faster_in_bfloat16
from rlvr_cli.replay.run import GAP, replay_run
from rlvr_cli.replay.stored import read_stored
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.training.session import load_inputs

FEW = {
    "dataset": "arithmetic:8",
    "eval_dataset": "arithmetic:4",
    "rollout_batch_size": 4,
    "train_batch_size": 4,
    "group_size": 2,
    "sampling_max_tokens": 4,
    "eval_examples": 1,
    "grader_workers": 1,
    "device": "cpu",
    "engine": "transformers",
}


@pytest.fixture(scope="module")
def million(tiny_model_dir, tmp_path_factory):
    """The tiny model with wider MLPs: 1.1M parameters."""
    directory = tmp_path_factory.mktemp("million")
    shutil.copytree(tiny_model_dir, directory, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(tiny_model_dir, intermediate_size=5632, local_files_only=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(("option", "row"), [("question_field", {"answer": 1}), ("answer_field", {"question": "Q"})])
def test_a_field_that_the_evaluation_questions_lack_is_said_to_be_theirs_too(tmp_path, option, row, skip):
    for name, of_both in (("train", {"own": "1"}), ("eval", {"text": "1"})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row | of_both) + "\n")
    files: dict[str, Any] = {"dataset": str(tmp_path / "train.jsonl"), "eval_dataset": str(tmp_path / "eval.jsonl")}
    with pytest.raises(RlvrError, match=r"eval\.jsonl:1: no .*: looked for own") as raised:
        load_inputs(GrpoConfig(**files, **{option: "own"}, skip_bad_lines=skip), questions_per_batch=1)
    named = f"Name its field: --{option.replace('_', '-')}, which counts for every dataset of the command."
    assert raised.value.hint.startswith(named)
    (tmp_path / "eval.jsonl").write_text("{")
    with pytest.raises(RlvrError) as raised:
        load_inputs(GrpoConfig(**files, **{option: "own"}, skip_bad_lines=skip), questions_per_batch=1)
    assert "counts for" not in raised.value.hint


def multiplies_bfloat16(instructions: bool, patch: pytest.MonkeyPatch) -> None:
    """Say whether this processor does, by AVX512_BF16."""
    patch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


@pytest.fixture
def processor(monkeypatch):
    return partial(multiplies_bfloat16, patch=monkeypatch)


@pytest.fixture(scope="module")
def begun(million, tmp_path_factory):
    """A run of one step in this precision, made once on a processor that chooses it; the folder is for a copy of it."""
    made: dict[str, Path] = {}

    def run_in(dtype: str, folder: Path) -> None:
        if dtype not in made:
            runs_dir = tmp_path_factory.mktemp("begun")
            with pytest.MonkeyPatch.context() as patch:
                multiplies_bfloat16(dtype == "bfloat16", patch)
                grpo.run(GrpoConfig(**FEW, model=str(million), runs_dir=str(runs_dir), run="r", n_grpo_steps=1))
            made[dtype] = runs_dir / "r"
        shutil.copytree(made[dtype], folder / "r")

    return run_in


WINS = "float32 weights and optimizer state; computes in bfloat16: faster on this processor (--compute-dtype float32 rounds less)"
PLAIN = "float32 weights and optimizer state; computes in float32"


@pytest.mark.parametrize(
    ("instructions", "given", "line"),
    [
        (True, {}, WINS),
        (False, {}, PLAIN),
        (True, {"model": GrpoConfig().model}, PLAIN),  # 0.4M
        (True, {"compute_dtype": "float32"}, PLAIN),
        (True, {"compute_dtype": "bfloat16"}, "float32 weights and optimizer state; computes in bfloat16"),
        (True, {"param_dtype": "bfloat16"}, "bfloat16 weights and optimizer state; computes in bfloat16"),
        (
            True,
            {"sampler_urls": "http://localhost:9", "engine": GrpoConfig().engine},
            PLAIN,
        ),  # vLLM's servers sample in float32 on a CPU
    ],
)
def test_a_large_model_computes_in_bfloat16_where_the_processor_multiplies_it(
    processor, million, tmp_path, capsys, instructions, given, line
):
    processor(instructions)
    given = {**FEW, "model": str(million), "runs_dir": str(tmp_path), "dry_run": True} | given
    grpo.run(GrpoConfig(**given))
    assert f"precision      {line}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parameters", "instructions", "faster"),
    [(1_000_000, True, True), (999_999, True, False), (1_000_000, False, False), (7_000_000_000, False, False)],
)
def test_bfloat16_is_faster_for_a_large_model_on_a_processor_that_multiplies_it(
    processor, parameters, instructions, faster
):
    processor(instructions)
    assert faster_in_bfloat16(parameters) is faster


def resumed(folder, *, steps):
    more = {"resume": "r", "runs_dir": str(folder), "n_grpo_steps": steps}
    grpo.run(resolve(GrpoConfig, flags=more, command="grpo"))
    metadata = read_run(folder / "r").metadata
    assert (metadata["updates"], metadata["config"]["compute_dtype"]) == (steps, "auto")
    assert metadata["policy"]["param_dtype"] == "float32"
    return metadata["policy"]["compute_dtype"]


@pytest.mark.parametrize("began", ["bfloat16", slow("float32")])
def test_a_run_goes_on_in_the_precision_that_it_began_with(processor, begun, tmp_path, capsys, began):
    """On a CPU that would choose another one. Weights and moments are float32 all the while."""
    begun(began, tmp_path)
    assert read_run(tmp_path / "r").metadata["policy"]["compute_dtype"] == began
    processor(began != "bfloat16")
    assert resumed(tmp_path, steps=2) == began
    assert f"computes in {began}{': as when it began' * (began == 'bfloat16')}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stored", "instructions", "computes"),
    [
        slow({}, True, "float32"),  # of a version that stored nothing of it
        slow({"device": "cuda:0", "compute_dtype": "bfloat16"}, True, "bfloat16"),
        ({"device": "cuda:0", "compute_dtype": "bfloat16"}, False, "float32"),
        slow({"device": "cpu", "compute_dtype": ["bfloat16"]}, True, "float32"),  # by a stranger
    ],
)
def test_a_run_from_elsewhere_goes_on(processor, begun, tmp_path, stored, instructions, computes):
    begun("float32", tmp_path)
    with RunDir.resume(tmp_path / "r") as run:
        run.update(policy=stored)
    processor(instructions)
    assert resumed(tmp_path, steps=2) == computes


def test_a_run_without_a_signal_replays_in_bfloat16(begun, tmp_path):
    """No update moves, so none says how far rounding goes; log-probabilities are rounded all the same."""
    begun("bfloat16", tmp_path)
    found = replay_run(read_stored(tmp_path / "r"), most=None)
    assert not found.problems
    assert max(found.gaps) > GAP


def test_a_model_of_no_known_type_is_refused_before_a_run_is_made(tiny_model_dir, tmp_path):
    unknown = shutil.copytree(tiny_model_dir, tmp_path / "unknown")
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(config | {"model_type": "zork"}))
    given = (
        "grpo --dataset arithmetic:8 --rollout-batch-size 4 --train-batch-size 4 --group-size 2 --device cpu --run r"
    )
    with pytest.raises(RlvrError, match="has model type `zork`"):
        invoke([*given.split(), "--model", str(unknown), "--runs-dir", str(tmp_path / "runs")])
    assert not (tmp_path / "runs" / "r").exists()


@pytest.mark.parametrize(
    "words",
    [
        "grpo --dataset arithmetic:8 --rollout-batch-size 4 --train-batch-size 4 --group-size 2",
        "sft --dataset {traces}",
        "distill --model {plain} --teacher {quantized} --dataset arithmetic:8 --rollout-batch-size 4 --group-size 2",
        "eval --engine transformers --dataset arithmetic:4",
        "discover --engine transformers kissing",
    ],
    ids=lambda words: words.partition(" ")[0],
)
def test_a_quantized_model_is_refused_before_a_run_is_made(tiny_model_dir, tmp_path, words):
    quantized = shutil.copytree(tiny_model_dir, tmp_path / "q")
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    (tmp_path / "t.jsonl").write_text('{"prompt": "1 + 1 =", "response": " 2"}\n')
    given = words.format(traces=tmp_path / "t.jsonl", plain=tiny_model_dir, quantized=quantized)
    model = () if "--model" in words else ("--model", str(quantized))
    with pytest.raises(RlvrError, match=r"q is quantized \(fp8\)"):
        invoke([*given.split(), *model, "--runs-dir", str(tmp_path / "runs"), "--run", "r", "--device", "cpu"])
    assert not (tmp_path / "runs" / "r").exists()
