"""Whole runs on CUDA devices, those of `fake_cuda`: the commands sample with graphs, train, save and evaluate on the right one."""

import pytest
import torch

from fake_cuda import fake_cuda
from rlvr_cli.commands import eval as evaluate
from rlvr_cli.commands import grpo, sft
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.runs.readers import read_rollouts, read_run

SHARED = {
    "train_batch_size": 8,
    "sampling_max_tokens": 6,
    "grader_workers": 1,
    "learning_rate": 1e-3,
    "eval_examples": 1,
    "run": "r",
}


def tokens_of(run, **where):
    rows = read_rollouts(run, **where).to_pylist()
    return {(r["step"], r["example_id"], r["sample_index"]): r["response_ids"] for r in rows}


@pytest.mark.slow
def test_grpo_on_the_second_device_samples_what_a_cpu_samples(tmp_path):
    """With a reference model and two updates on each batch."""
    options = SHARED | {"dataset": "arithmetic:200", "rollout_batch_size": 8, "group_size": 4, "engine": "transformers",
               "gradient_accumulation_steps": 2, "epochs_per_rollout_batch": 2, "loss_type": "grpo_clip", "kl_coef": 0.1}  # fmt: skip
    grpo.run(GrpoConfig(**options, n_grpo_steps=1, runs_dir=str(tmp_path / "cpu"), device="cpu"))
    with fake_cuda() as cuda:
        grpo.run(GrpoConfig(**options, n_grpo_steps=2, runs_dir=str(tmp_path / "cuda"), device="cuda:1"))
        assert set(cuda.captured) == {"cuda:1"}
        assert {call.dtype for call in cuda.attentions if call.query[2] > 5} == {torch.bfloat16}
        assert torch.cuda.current_device() == 0
        computing = (
            "engine",
            "batch",
            "decode_step",
            "draw",
            "weight_check.py:_logprobs",
            "log_probs",
            "update",
            "objectives",
        )
        assert not [place for place in cuda.astray if place.startswith(computing)]
    run = tmp_path / "cuda/r"
    assert read_run(run).metadata["status"] == "finished"
    assert read_run(run).metadata["updates"] == 4
    found, expected = (tokens_of(tmp_path / place / "r", phase="train") for place in ("cuda", "cpu"))
    assert len(found) == 2 * len(expected) == 16
    same = [found[key] == tokens for key, tokens in expected.items()]
    assert sum(same) > 0.7 * len(same)  # bfloat16 rounds


@pytest.mark.slow
def test_sft_and_the_evaluation_of_its_model(tmp_path):
    with fake_cuda() as cuda:
        sft.run(SftConfig(**SHARED, dataset="arithmetic:8", n_sft_steps=1, runs_dir=str(tmp_path), device="auto"))
        assert set(cuda.captured) == {"cuda:0"}
        cuda.captured.clear()
        options = {
            "dataset": "arithmetic:2",
            "sampling_max_tokens": 6,
            "engine": "transformers",
            "runs_dir": str(tmp_path),
        }
        options |= {"model": str(tmp_path / "r/model"), "device": "cuda:1"}
        evaluate.run(EvalConfig(**options, run="without", cuda_graphs=False))
        assert not cuda.captured
        evaluate.run(EvalConfig(**options, run="with"))
        assert set(cuda.captured) == {"cuda:1"}
    assert len(tokens_of(tmp_path / "with")) == 2
    assert tokens_of(tmp_path / "with") == tokens_of(tmp_path / "without")
    assert read_run(tmp_path / "with").metadata["status"] == "finished"
