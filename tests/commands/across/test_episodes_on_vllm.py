"""Episodes whose turns vLLM samples, in this process, on servers and at endpoints: rows fit, training replays. A stand-in, and vLLM itself."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from cache_share import CACHE_SHARE
from checks import findings
from killed import metrics_of, rows_of
from rlvr_cli.commands import eval as evaluate
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.models.load import load_policy
from rlvr_cli.replay.run import replay_run
from rlvr_cli.replay.stored import read_stored
from rlvr_cli.runs.readers import read_run
from vllm_server import vllm_servers

# The built-in model writes sums, such as 7+7=14, 4+9=...; this answers each of them.
SUMS = """
from rlvr_cli.environments import Reply

class Sums:
    stop = (",",)

    def begin(self, example, seed):
        pass

    def answer(self, turn):
        left, _, right = turn.rstrip(",").rpartition("=")
        return Reply("(right)" if right.isdigit() else "(wrong)", role="teacher")
"""
GRPO = [
    "grpo",
    "--dataset",
    "arithmetic:64",
    "--environment",
    "sums.py:Sums",
    "--environment-workers",
    1,
    "--max-turns",
    3,
]
GRPO += ["--sampling-max-tokens", 24, "--n-grpo-steps", 2, "--rollout-batch-size", 16, "--group-size", 4]
GRPO += ["--train-batch-size", 16, "--gradient-accumulation-steps", 2, "--eval-examples", 4, "--learning-rate", 1e-4]


def check_trained(forks, folder: Path, engine: str, *options: object) -> None:
    """Train for two steps: episodes of several turns, with exact tokens and the log-probabilities of the trainer."""
    (folder / "sums.py").write_text(SUMS)
    forks.run(*GRPO, *options, "--run", "r", cwd=folder, status=0)
    run = folder / "runs/r"
    assert read_run(run).metadata["sampler"]["engine"] == engine
    assert findings(run) == []
    rows = rows_of(run, phase="train")
    assert {(row["step"], row["policy_version"]) for row in rows} == {(0, 0), (1, 1)}
    assert max(row["episode"]["num_turns"] for row in rows) == 3
    assert any(row["episode"]["tool_calls"] for row in rows)
    for row in rows:
        assert all(
            logprob == 0 or own
            for logprob, own in zip(row["sampled_logprobs"], row["response_mask"] or (), strict=False)
        )
    gaps = [value for (_, _, name), value in metrics_of(run).items() if name == "mismatch/logprob_max_abs"]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
    assert replay_run(read_stored(run), most=None).problems == []


def check_evaluated(folder: Path, url: str) -> list[dict]:
    """Evaluate at an endpoint: episodes of several turns, with exact tokens and log-probabilities of the model. Returns the rows."""
    (folder / "sums.py").write_text(SUMS)
    how = {
        "environment": f"{folder}/sums.py:Sums",
        "environment_workers": 1,
        "max_turns": 3,
        "sampling_max_tokens": 24,
        "sampling_min_tokens": 0,
    }
    where = {"model": str(builtin_model_path()), "base_url": f"{url}/v1", "runs_dir": str(folder), "run": "e"}
    evaluate.run(EvalConfig(dataset="arithmetic:8", grader_workers=1, **how, **where))
    run = folder / "e"
    assert read_run(run).metadata["sampler"]["engine"] == "openai"
    assert findings(run) == []
    rows = rows_of(run, phase="eval")
    assert max(row["episode"]["num_turns"] for row in rows) == 3
    assert any(row["episode"]["tool_calls"] for row in rows)
    model = load_policy(builtin_model_path(), device="cpu")
    for row in rows:
        start, ids = len(row["prompt_ids"]), torch.tensor([*row["prompt_ids"], *row["response_ids"]])
        with torch.no_grad():
            scores = model.forward(input_ids=ids[None]).logits[0, start - 1 : -1].double().log_softmax(-1)
        expected = scores.gather(-1, ids[start:, None]).flatten()
        own = torch.tensor(row["response_mask"] or [True] * len(row["response_ids"]))
        assert torch.allclose(torch.tensor(row["sampled_logprobs"]).double(), expected * own, atol=1e-3)
    return rows


def test_turns_of_episodes_are_sampled_at_an_endpoint(tmp_path):
    with vllm_servers(builtin_model_path(), 1) as (server,):
        rows = check_evaluated(tmp_path, server.url)
        bodies = [body for body in server.endpoint.bodies if body]  # without the question which models there are
        asked = {tuple(body["prompt"]) for body in bodies if not isinstance(body["prompt"], str)}
        for row in rows:
            for turn in row["turns"] or ():
                if turn["role"] == "policy":
                    assert (*row["prompt_ids"], *row["response_ids"][: turn["start"]]) in asked
        turns = sum(row["episode"]["num_turns"] for row in rows)
        assert len(bodies) == turns + 2  # two to try the endpoint


@pytest.mark.slow
def test_servers_sample_the_turns_of_episodes(forks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with vllm_servers(builtin_model_path(), 1) as (server,):
        check_trained(forks, tmp_path, "vllm-servers", "--sampler-urls", server.url)


@pytest.mark.vllm
def test_vllm_servers_sample_the_turns_of_episodes(forks, vllm_server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_evaluated(tmp_path, vllm_server)
    check_trained(forks, tmp_path, "vllm-servers", "--sampler-urls", vllm_server)


@pytest.mark.vllm
def test_vllm_samples_the_turns_of_episodes_in_this_process(forks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("--engine", "vllm", "--max-model-len", 256, "--gpu-memory-utilization", CACHE_SHARE)
    check_trained(forks, tmp_path, "vllm", *options)
