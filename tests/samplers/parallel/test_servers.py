"""Several vLLM servers as one sampler: against servers of the tests, which answer as vLLM does, and against vLLM itself."""

import json
import os
import random
import shlex
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest import TestCase

import pytest
import torch

from disks import largest_file
from endpoint import error
from following import Following
from forks import Forks, processes_in
from killed import SFT, begin_or_resume, metrics_of, rows_of, weights_of
from marks import slow
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.policy import Lora, Policy
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.readers import read_run
from rlvr_cli.samplers import openai, openai_client
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.samplers.openai import WHOLE_DISTRIBUTION, OpenAISampler
from rlvr_cli.samplers.parallel import servers as servers_module
from rlvr_cli.samplers.parallel.servers import ServersSampler
from rlvr_cli.samplers.served_teacher import ServedTeacher
from rlvr_cli.samplers.stop_strings import response_text
from rlvr_cli.types import Completion, Request, SamplingParams
from vllm_server import Real, kill, real_servers, vllm_servers

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

LORA = Lora(rank=4, alpha=8, seed=7)
PARAMS = SamplingParams(temperature=0.7, max_tokens=8, min_tokens=2, stop=("</answer>",))
GRPO = shlex.split(
    "grpo --dataset arithmetic:64 --n-grpo-steps 3 --rollout-batch-size 32 --group-size 4 --train-batch-size 32 "
    "--gradient-accumulation-steps 8 --sampling-max-tokens 32 --sampling-temperature 0.8 --learning-rate 2e-4 --eval-examples 8"
)
SMALL = shlex.split(
    "--n-grpo-steps 2 --rollout-batch-size 8 --train-batch-size 8 --gradient-accumulation-steps 2 --sampling-max-tokens 12 "
    "--eval-examples 4"
)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(builtin_model_path(), device="cpu")


@pytest.fixture(scope="module")
def of_all_tests() -> Iterator[list]:
    with vllm_servers(builtin_model_path(), 2) as servers:
        yield servers


@pytest.fixture
def servers(of_all_tests) -> list:
    for server in of_all_tests:
        server.restart()
    return of_all_tests


def requests_of(policy: Policy) -> list[Request]:
    texts = [f"What is {i} + {i + 3}?\nAssistant: <think>" for i in range(4)]
    return [Request(prompt=text, seeds=(i, i + 100)) for i, text in enumerate(texts)]


def sampler_of(servers: list, policy: Policy, **how) -> ServersSampler:
    return ServersSampler([server.url for server in servers], policy.tokenizer, **{"timeout": 30, **how})


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
    sampler = sampler_of(servers, policy)
    before = [server.answered for server in servers]
    together = answers(sampler, policy)
    shared = [server.answered - earlier for server, earlier in zip(servers, before, strict=True)]
    alone = answers(sampler_of(servers[:1], policy), policy)
    assert together.keys() == {(i, j) for i in range(4) for j in range(2)}
    assert shared == [4, 4]
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


@pytest.mark.parametrize("begun", [2, slow(3)])
def test_a_response_that_has_begun_ends_where_it_would_have(servers, policy, begun):
    """Greedy, so that the continuation is known. The servers take what has begun for the prompt."""
    engine, tokenizer = TransformersSampler(policy), policy.tokenizer
    free = answers(engine, policy, replace(PARAMS, temperature=0.0, stop=()))
    across = response_text(tokenizer, free[0, 0].token_ids[begun - 1 : begun + 2])
    params = replace(PARAMS, temperature=0.0, min_tokens=begun, stop=(across, "</answer>"))
    wholes = [c for c in answers(engine, policy, params).values() if c.num_tokens > begun]
    assert begun + 2 in {c.num_tokens for c in wholes}
    asked = [Request("", (1,), prompt_ids=c.prompt_ids + c.token_ids[:begun], begun=begun) for c in wholes]
    rest = sampler_of(servers, policy).sample(asked, replace(params, max_tokens=PARAMS.max_tokens - begun))
    for part in rest:
        whole = wholes[part.request_index]
        assert whole.token_ids == whole.token_ids[:begun] + part.token_ids
        assert len(part.logprobs) == part.num_tokens == len(part.token_ids)
        assert (part.text, part.finish_reason, part.stop_reason) == (whole.text, whole.finish_reason, whole.stop_reason)
    least = {
        body["min_tokens"]
        for server in servers
        for body in server.endpoint.bodies
        if "seed" in body and body["max_tokens"] == PARAMS.max_tokens - begun
    }
    assert least == {0}


def test_a_response_goes_on_after_an_id_that_only_the_model_has(servers, policy):
    """Such as a padded row of its embeddings, which a server may sample: partial rollouts and --resume begin with it."""
    odd = Request("", (1,), prompt_ids=(5, len(policy.tokenizer) + 5), begun=1)
    servers[0].endpoint.bodies.clear()
    with pytest.raises(RlvrError, match="samples failed at"):  # the stand-in has no more ids than its tokenizer
        list(sampler_of(servers[:1], policy).sample([odd], PARAMS))
    assert [*odd.prompt_ids] in [body.get("prompt") for body in servers[0].endpoint.bodies]


def test_what_comes_while_servers_sample_is_answered_as_if_asked_alone(servers, policy):
    """Also where one of them dies with turns that it was given."""

    def next_of(c: Completion) -> Request:
        key = c.request_index, c.sample_index
        ids = c.prompt_ids + c.token_ids + (5, 9)
        return Request("", (sum(key),), prompt_ids=ids, after=key, max_tokens=4)

    for dies in (False, True):
        sampler, first = sampler_of(servers, policy), requests_of(policy)
        servers[0].dies_after = servers[0].answered + 7 if dies else None
        more, found = Following(first, next_of, turns=2), {}
        for completion in sampler.sample(first, PARAMS, more=more):
            more.add(completion)
            found[completion.request_index, completion.sample_index] = completion
        assert len(found) == 8 + 16
        assert len(sampler.members) == 2 - dies
        alone = list(sampler_of(servers[1:], policy).sample(more.asked, PARAMS))
        assert len(alone) == len(found)
        for c in alone:
            assert found[c.request_index, c.sample_index].token_ids == c.token_ids
            assert c.num_tokens <= (8 if c.request_index < len(first) else 4)
    (member,) = sampler.members.values()
    more = Following(exact := [replace(c, prompt_ids=(5, 9, 11)) for c in first], next_of, turns=1)
    indices = []
    for completion in member.sample(exact, PARAMS, more=more):
        more.add(completion)
        indices.append(completion.request_index)
    assert sorted(indices) == sorted([*range(4)] * 2 + [*range(4, 12)])


def test_log_probabilities_are_of_the_distribution_sampled_from(servers, policy):
    hot = replace(PARAMS, temperature=0.5, min_tokens=0)
    for completion in answers(sampler_of(servers, policy), policy, hot).values():
        ids = torch.tensor([completion.prompt_ids + completion.token_ids])
        with torch.inference_mode():
            logits = policy.forward(input_ids=ids).logits[0, len(completion.prompt_ids) - 1 : -1] / 0.5
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None]).flatten()
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize(("temperature", "said"), [(0.001, "at 0.01 when asked for"), (3.0, "up to 2.0, not at 3.0")])
def test_a_temperature_that_vllm_would_change_is_refused(servers, policy, temperature, said):
    sampler = sampler_of(servers, policy)
    with pytest.raises(RlvrError, match=said):
        answers(sampler, policy, replace(PARAMS, temperature=temperature))
    assert (len(sampler.members), sampler.notes) == (2, ())
    assert temperature not in {body.get("temperature") for server in servers for body in server.endpoint.bodies}


def test_servers_are_asked_for_the_whole_distribution_whatever_the_models_files_say(servers, policy):
    """vLLM takes what a request lacks from generation_config.json. Probes, too: their log-probabilities are compared."""
    sampler = sampler_of(servers, policy)
    answers(sampler, policy)
    sampler.load_weights(policy, 1)
    for server in servers:
        bodies = [body for body in server.endpoint.bodies if "prompt" in body]
        assert {body.get("ignore_eos", False) for body in bodies} == {True, False}
        for body in bodies:
            assert {name: body.get(name) for name in WHOLE_DISTRIBUTION} == WHOLE_DISTRIBUTION


def test_the_samples_of_a_dead_server_are_asked_of_the_others_with_the_same_seeds(servers, policy):
    whole = answers(sampler_of(servers, policy), policy)
    sampler = sampler_of(servers, policy)
    servers[0].dies_after = servers[0].answered + 2
    with TestCase().assertLogs(level="WARNING") as logged:
        found = answers(sampler, policy)
    assert found.keys() == whole.keys()
    assert all(found[key].token_ids == whole[key].token_ids for key in whole)
    assert any(f"The sampler {servers[0].url} is left out" in line for line in logged.output)
    assert servers[0].url in sampler.notes[0]
    before = servers[0].answered
    assert answers(sampler, policy).keys() == whole.keys(), "the other one goes on alone"
    assert servers[0].answered == before


def test_without_a_server_left_the_error_is_that_of_the_last(servers, policy):
    sampler = sampler_of(servers, policy)
    for server in servers:
        server.dies_after = server.answered + 1
    with pytest.raises(RlvrError, match="samples failed at"):
        answers(sampler, policy)


def test_a_server_whose_engine_is_gone_when_weights_change_is_left_out(servers, policy):
    """What is in front of the engine still answers, and says 500."""
    sampler = sampler_of(servers, policy)
    servers[1].engine_died = True
    sampler.load_weights(moved(policy), 1)
    assert servers[1].url in sampler.notes[0]
    assert "answered 500" in sampler.notes[0]
    assert len(answers(sampler, policy)) == 8
    servers[0].engine_died = True
    with pytest.raises(RlvrError, match="answered 500"):
        sampler.load_weights(policy, 2)


@pytest.fixture
def quickly(monkeypatch):
    """Whether a server lives is asked often."""
    for module in (openai, servers_module):
        monkeypatch.setattr(module, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(servers_module, "HEALTH_SECONDS", 2.0)


def test_a_server_that_hangs_is_left_out_long_before_its_deadline(servers, policy, quickly):
    sampler = sampler_of(servers, policy)
    servers[1].hangs = True
    assert len(answers(sampler, policy)) == 8
    assert servers[1].url in sampler.notes[0]
    assert "nor say that its engine lives" in sampler.notes[0]


def test_a_server_that_lives_is_not_left_out_for_a_slow_response(servers, policy):
    """The others would take as long for it."""
    sampler = sampler_of(servers, policy, timeout=1.0)
    servers[1].slow = 30.0
    with pytest.raises(RlvrError, match=r"samples failed at .*no answer within 1 s") as raised:
        answers(sampler, policy)
    assert "larger --request-timeout" in raised.value.hint
    assert len(sampler.members) == 2
    servers[1].slow = 0.0
    assert len(answers(sampler, policy)) == 8
    assert sampler.notes == ()


def test_a_server_that_does_not_answer_in_time_nor_lives_is_left_out(servers, policy, monkeypatch):
    sampler = sampler_of(servers, policy, timeout=2.0)
    servers[1].hangs = True
    monkeypatch.setattr(servers_module, "HEALTH_SECONDS", 0.5)  # asked when the time of a sample is over
    assert len(answers(sampler, policy)) == 8
    assert servers[1].url in sampler.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"), [("/collective_rpc", "/v1/completions"), ("/reset_prefix_cache", "/collective_rpc")]
)
def test_a_server_that_hangs_when_weights_change_is_left_out(servers, policy, quickly, one, other):
    """As vLLM does when its engine dies: what the engine was asked to do is never answered."""
    sampler = sampler_of(servers, policy)
    servers[0].hangs_from = one
    sampler.load_weights(moved(policy), 1)
    assert "nor say that its engine lives" in sampler.notes[0]
    assert len(answers(sampler, policy)) == 8
    servers[1].hangs_from = other
    with pytest.raises(RlvrError, match="nor say that its engine lives"):
        sampler.load_weights(policy, 2)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
def test_a_server_that_hangs_when_it_is_connected_to_is_not_waited_for(servers, policy, quickly, path):
    servers[1].hangs_from = path
    with pytest.raises(RlvrError, match="nor say that its engine lives"):
        sampler_of(servers, policy)


def test_a_server_that_takes_its_time_is_waited_for(servers, policy, quickly, monkeypatch):
    monkeypatch.setattr(openai, "CHECK_SECONDS", 1e-4)
    sampler = sampler_of(servers, policy)
    assert len(answers(sampler, policy)) == 8
    sampler.load_weights(moved(policy), 1)
    assert sampler.notes == ()
    assert "/health" in servers[0].endpoint.paths


def test_servers_get_no_key_and_need_none(servers, policy, monkeypatch):
    """The key of --api-key-env is an endpoint's; a server is no endpoint, wherever it is."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-not-for-them")
    answers(sampler_of(servers, policy), policy)
    assert {key for server in servers for key in server.endpoint.keys} == {None, "Bearer EMPTY"}
    monkeypatch.delenv("OPENAI_API_KEY")
    OpenAISampler("m", base_url="http://10.0.0.2:8000/v1", processed_logprobs=True)


def test_closing_it_ends_the_requests(servers, policy):
    completions = sampler_of(servers, policy).sample(requests_of(policy), PARAMS)
    next(completions)
    completions.close()
    assert answers(sampler_of(servers, policy), policy).keys() == {(i, j) for i in range(4) for j in range(2)}


def test_new_weights_reach_every_server_and_are_proven(servers, policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)  # the servers work elsewhere
    sampler = sampler_of(servers, policy, weights_dir=tmp_path.name)
    before = answers(sampler, policy)
    sampler.load_weights(moved(policy), 7)
    assert sampler.policy_version == 7
    after = answers(sampler, policy)
    assert any(after[key].token_ids != before[key].token_ids for key in before)
    for server in servers:
        assert [Path(load).parent for load in server.loads] == [tmp_path]
        assert len(server.modes) == 1, "the server may be another user's"
    assert list(tmp_path.iterdir()) == [], "the weights are removed when they are loaded"


@pytest.mark.parametrize("lora", [None, pytest.param(LORA, marks=pytest.mark.slow)])
def test_weights_for_which_there_is_no_space_are_an_error_that_names_the_option(servers, policy, tmp_path, lora):
    sampler = sampler_of(servers, policy, takes_adapters=lora is not None, weights_dir=str(tmp_path))
    trained = load_policy(builtin_model_path(), device="cpu", lora=lora)
    with largest_file(2**14), pytest.raises(RlvrError, match=f"Cannot write {tmp_path}: File too large") as full:
        sampler.load_weights(trained, 1)
    assert "--weights-dir" in full.value.hint
    assert list(tmp_path.iterdir()) == []
    tmp_path.rmdir()
    with pytest.raises(RlvrError, match=f"Cannot write {tmp_path}: No such file"):
        sampler.load_weights(trained, 1)


def test_a_server_that_keeps_its_old_weights_is_found(servers, policy):
    servers[1].stale = True
    sampler = sampler_of(servers, policy)
    with pytest.raises(RlvrError, match="does not serve the model's weights") as raised:
        sampler.load_weights(moved(policy), 1)
    assert servers[1].url in raised.value.hint
    assert "may be another run's, too" in raised.value.hint


def test_a_server_that_was_started_again_after_it_got_weights_is_left_out(servers, policy):
    """It answers with its first weights. One that does not say when it was started is taken for the same."""
    sampler = sampler_of(servers, policy)
    sampler.load_weights(moved(policy), 1)
    servers[1].odd["/metrics"] = "# none\n"
    whole = answers(sampler, policy)
    servers[0].restart()
    found = answers(sampler, policy)
    assert {key: c.token_ids for key, c in found.items()} == {key: c.token_ids for key, c in whole.items()}
    assert f"{servers[0].url} was started again" in sampler.notes[0]
    assert list(sampler.members) == [servers[1].url]


def test_a_server_that_was_started_again_between_two_turns_is_left_out(servers, policy):
    def next_of(c: Completion) -> Request:
        return Request(
            "", (7,), prompt_ids=(*c.prompt_ids, 5, 9), after=(c.request_index, c.sample_index), max_tokens=4
        )

    sampler, first = sampler_of(servers, policy), requests_of(policy)[:2]
    sampler.load_weights(moved(policy), 1)
    more, found = Following(first, next_of, turns=1), {}
    for completion in sampler.sample(first, PARAMS, more=more):
        found[completion.request_index, completion.sample_index] = completion
        if len(found) == 4:  # both are idle
            servers[0].restart()
            for one in [*found.values()]:
                more.add(one)
    assert f"{servers[0].url} was started again" in sampler.notes[0]
    alone = sampler.sample(more.asked, PARAMS)  # of the other one
    assert len(found) == 8
    assert {found[c.request_index, c.sample_index].token_ids == c.token_ids for c in alone} == {True}


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


# Adapters


def adapted(*, by: float) -> Policy:
    """The built-in model with an adapter that moves its log-probabilities."""
    policy = load_policy(builtin_model_path(), device="cpu", lora=LORA)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter += by * torch.randn(parameter.shape, generator=generator)
    return policy


@pytest.mark.slow
def test_an_adapter_goes_to_every_server_under_a_name_of_its_version(servers, policy, tmp_path):
    sampler = sampler_of(servers, policy, takes_adapters=True, weights_dir=str(tmp_path))
    before = answers(sampler, policy)
    for version, by in ((3, 0.1), (4, 0.2)):
        sampler.load_weights(adapted(by=by), version)
        assert sampler.policy_version == version
        after = answers(sampler, policy)
        assert any(after[key].token_ids != before[key].token_ids for key in before)
        for server in servers:
            (name,) = server.adapters
            assert name.endswith(f"-{version}")
            assert {body["model"] for body in server.endpoint.bodies[-4:]} == {name}
            assert len(server.modes) == 1
        before = after
    assert len(list(tmp_path.iterdir())) == 1, "the one that is served"
    other = sampler_of(servers, policy, takes_adapters=True)
    other.load_weights(adapted(by=0.1), 4)  # of another run with the same version
    other.close()
    assert before == answers(sampler, policy)
    sampler.close()
    assert [server.adapters for server in servers] == [{}, {}]
    assert [server.most_adapters for server in servers] == [2, 2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_server_that_keeps_its_old_adapter_or_takes_none_is_found(servers, policy):
    sampler = sampler_of(servers, policy, takes_adapters=True)
    sampler.load_weights(adapted(by=0.1), 1)
    servers[1].stale = True
    with pytest.raises(RlvrError, match="does not serve the model's weights") as raised:
        sampler.load_weights(adapted(by=0.2), 2)
    assert servers[1].url in raised.value.hint
    assert "another run" not in raised.value.hint, "adapters have names of their own"
    sampler.close()
    servers[0].takes_adapters = False
    with pytest.raises(RlvrError, match="load_lora_adapter answered 404") as raised:
        sampler_of(servers, policy, takes_adapters=True).load_weights(adapted(by=0.2), 1)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank" in raised.value.hint


@pytest.mark.slow
def test_a_server_that_lost_its_adapter_is_left_out(servers, policy):
    """It does not answer from the base instead."""
    sampler = sampler_of(servers, policy, takes_adapters=True)
    sampler.load_weights(adapted(by=0.1), 1)
    whole = answers(sampler, policy)
    servers[0].adapters.clear()
    found = answers(sampler, policy)
    sampler.close()
    assert {key: c.token_ids for key, c in found.items()} == {key: c.token_ids for key, c in whole.items()}
    assert servers[0].url in sampler.notes[0]


@pytest.mark.slow
def test_a_server_that_lost_its_adapter_gets_the_next_version(servers, policy):
    """It was started again between two updates, and cannot unload what it has forgotten."""
    sampler = sampler_of(servers[:1], policy, takes_adapters=True)
    sampler.load_weights(adapted(by=0.1), 1)
    servers[0].adapters.clear()
    sampler.load_weights(adapted(by=0.2), 2)
    (name,) = servers[0].adapters
    assert name.endswith("-2")
    sampler.close()


def choice(**fields) -> dict:
    """A completion of 8 tokens, but for these fields; None: without it."""
    whole = {"text": "", "token_ids": [40] * 8, "logprobs": {"tokens": [""] * 8, "token_logprobs": [-1.0] * 8}}
    return {"choices": [{name: value for name, value in (whole | fields).items() if value is not None}]}


@pytest.mark.parametrize(
    ("path", "answer", "said"),
    [
        slow("/v1/models", [], "no data in"),
        ("/v1/models", "a page", "no data in"),
        ("/v1/models", {"data": []}, "no model"),
        ("/v1/models", {"data": [{"id": 3}]}, "no id in"),
        ("/v1/models", "x" * 2_000_000, "more than 1048576 bytes"),
        ("/v1/completions", {"choices": []}, "no choices"),
        slow("/v1/completions", "a page", "not JSON"),
        ("/v1/completions", choice(token_ids=None), "0 token ids and 8 log-probabilities"),
        ("/v1/completions", choice(token_ids=["a"]), "token_ids is a"),
        slow("/v1/completions", choice(logprobs={"token_logprobs": [None] * 8}), "8 token ids and 0 log-probabilities"),
        ("/v1/completions", choice(logprobs={"token_logprobs": [3.0] * 8}), "log-probabilities that are none"),
        (
            "/v1/completions",
            choice(token_ids=[40] * 3, logprobs={"token_logprobs": [-1.0] * 3}),
            "3 tokens, and 8 were asked for",
        ),
    ],
)
def test_an_odd_answer_is_an_error_that_names_the_server(servers, policy, path, answer, said):
    servers[1].odd[path] = answer
    with pytest.raises(RlvrError) as raised:
        sampler_of(servers, policy)
    assert raised.value.problem.startswith(f"The server at {servers[1].url}")
    assert said in raised.value.problem


@pytest.mark.parametrize(
    "answer",
    [choice(logprobs=None), choice(finish_reason="abort")],  # as a vLLM server says that is being shut down
    ids=["odd", "broken off"],
)
def test_a_server_that_gives_odd_completions_is_left_out(servers, policy, monkeypatch, answer):
    monkeypatch.setattr(openai_client, "FIRST_WAIT", 0.01)
    whole = answers(sampler_of(servers, policy), policy)
    sampler = sampler_of(servers, policy)
    servers[1].odd, servers[1].odd_after = {"/v1/completions": answer}, servers[1].answered + 1
    found = answers(sampler, policy)
    assert {key: c.token_ids for key, c in found.items()} == {key: c.token_ids for key, c in whole.items()}
    assert servers[1].url in sampler.notes[0]


def test_the_context_is_that_of_the_server_with_the_shortest(servers, policy):
    assert sampler_of(servers, policy).context_length is None
    servers[1].context = 128
    assert sampler_of(servers, policy).context_length == 128
    servers[0].context = 64
    assert sampler_of(servers, policy).context_length == 64


def test_servers_must_say_that_they_serve_the_model(servers, policy):
    urls, model = [server.url for server in servers], str(builtin_model_path())
    for name in ("the-model", os.path.relpath(model)):
        ServersSampler(urls, policy.tokenizer, model=name)
    servers[1].odd["/v1/models"] = {"data": [{"id": "the-model", "root": "/another"}]}
    with pytest.raises(RlvrError, match="serves the-model, and not") as raised:
        ServersSampler(urls, policy.tokenizer, model=model)
    assert urls[1] in raised.value.problem
    assert "--served-model-name" in raised.value.hint
    ServersSampler(urls[1:], policy.tokenizer, model="/another")
    assert answers(ServersSampler(urls, policy.tokenizer), policy), "whichever it is gets the trainer's weights"


def test_servers_that_a_training_run_may_have_used_are_noted(servers, policy):
    """They are asked under the model's name, whatever their weights are. Those of a training run get its weights."""
    urls, model = [server.url for server in servers], str(builtin_model_path())
    servers[1].takes_weights = False
    with TestCase().assertLogs(level="WARNING") as logged:
        sampler = ServersSampler(urls, policy.tokenizer, model=model)
        ServedTeacher(urls[0], model)
    (note,) = sampler.notes
    assert note.startswith(f"{urls[0]} takes new weights")
    assert [record.getMessage() for record in logged.records] == [note, note]
    assert not any(server.loads for server in servers)
    with TestCase().assertNoLogs(level="WARNING"):
        assert ServersSampler(urls[1:], policy.tokenizer, model=model).notes == ()
        ServedTeacher(urls[1], model)
        assert sampler_of(servers, policy).notes == ()


# Through the command line


def test_an_evaluation_asks_several_servers(forks: Forks, servers, tmp_path):
    urls = ",".join(server.url for server in servers)
    before = [server.answered for server in servers]
    command = shlex.split("eval --dataset arithmetic:6 --num-samples 2 --sampling-max-tokens 8")
    done = forks.run(*command, "--sampler-urls", urls, "--run", "r", cwd=tmp_path, status=0)
    assert done.err.count("takes new weights: if a training run has used it") == 1
    rows = rows_of(tmp_path / "runs/r", phase="eval")
    assert len(rows) == 12
    assert all(row["response_ids"] and row["sampled_logprobs"] for row in rows)
    assert all(server.answered - earlier >= 6 for server, earlier in zip(servers, before, strict=True))
    assert not any(server.loads for server in servers), "they serve the model already"
    done = forks.run(*command, "--sampler-urls", urls, "--model", "other", cwd=tmp_path, status=1)
    assert "other" in done.err


@pytest.mark.slow
def test_a_run_that_began_without_servers_goes_on_with_them(forks: Forks, servers, tmp_path):
    forks.run(*GRPO, *SMALL, "--run", "r", "--n-grpo-steps", "1", cwd=tmp_path, status=0)
    url = ("--sampler-urls", servers[0].url)
    done = forks.run("grpo", "--resume", "r", "--n-grpo-steps", "2", *url, cwd=tmp_path, status=0)
    assert "goes on with the engine vllm-servers instead of transformers" in done.err
    metadata = read_run(tmp_path / "runs/r").metadata
    engines = [(entry["engine"], entry["from_rollout"] > 0) for entry in metadata["engines"]]
    assert engines == [("transformers", False), ("vllm-servers", True)]
    assert {row["step"] for row in rows_of(tmp_path / "runs/r", phase="train")} == {0, 1}


def test_grpo_trains_on_what_servers_sample(forks: Forks, servers, tmp_path):
    urls = ",".join(server.url for server in servers)
    forks.run(*GRPO, *SMALL, *("--sampler-urls", urls, "--run", "r", "--trainers", "2"), cwd=tmp_path, status=0)
    run = tmp_path / "runs/r"
    assert read_run(run).metadata["sampler"]["engine"] == "vllm-servers"
    assert {(r["step"], r["policy_version"]) for r in rows_of(run, phase="train")} == {(0, 0), (1, 1)}
    assert all(len(server.loads) >= 2 for server in servers)
    gaps = [value for (_, _, name), value in metrics_of(run).items() if name == "mismatch/logprob_max_abs"]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
    forks.run("check", str(run), "--replay", "1", cwd=tmp_path, status=0)


@pytest.mark.slow
def test_training_waits_for_a_response_as_long_as_it_is_told(forks: Forks, servers, tmp_path):
    """And --resume changes that."""
    servers[0].slow = 3.0
    url, once = ("--sampler-urls", servers[0].url), ("--n-grpo-steps", "1", "--eval-examples", "1")
    impatient = (*GRPO, *SMALL, *once, *url, "--request-timeout", "0.5", "--run", "r")
    done = forks.run(*impatient, cwd=tmp_path, status=1)
    assert "no answer within 0.5 s" in done.err
    assert "larger --request-timeout" in done.err
    servers[0].slow = 1.0
    forks.run("grpo", "--resume", "r", "--request-timeout", "60", cwd=tmp_path, status=0)
    assert read_run(tmp_path / "runs/r").metadata["status"] == "finished"


@pytest.mark.slow
def test_servers_evaluate_what_trains_on_traces(forks: Forks, servers, tmp_path):
    urls = ",".join(server.url for server in servers)
    small = shlex.split("--sft-epochs 1 --eval-examples 4 --eval-every 3 --sampling-max-tokens 8")
    forks.run(*SFT, *small, "--sampler-urls", urls, "--run", "r", cwd=tmp_path, status=0)
    run = read_run(tmp_path / "runs/r")
    assert {row["policy_version"] for row in rows_of(run.path, phase="eval")} == {0, 3, 6, 8}
    assert all(len(server.loads) >= 4 for server in servers)
    assert run.metadata["sampler"]["engine"] == "vllm-servers"


@pytest.mark.slow
def test_grpo_trains_an_adapter_on_what_servers_sample(forks: Forks, servers, tmp_path):
    urls = ",".join(server.url for server in servers)
    lora = ("--lora-rank", "4", "--learning-rate", "2e-3")
    forks.run(*GRPO, *SMALL, *lora, "--sampler-urls", urls, "--run", "r", cwd=tmp_path, status=0)
    run = tmp_path / "runs/r"
    assert {(r["step"], r["policy_version"]) for r in rows_of(run, phase="train")} == {(0, 0), (1, 1)}
    assert [server.adapters for server in servers] == [{}, {}]
    assert not any("/collective_rpc" in server.endpoint.paths for server in servers), "no whole model is sent"
    gaps = [value for (_, _, name), value in metrics_of(run).items() if name == "mismatch/logprob_max_abs"]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
    forks.run("check", str(run), "--replay", "1", cwd=tmp_path, status=0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--sampler-urls http://a:8000/v1", "Leave /v1 out"),
        ("--sampler-urls a:8000", "--sampler-urls is not the address"),
        ("--sampler-urls ,", "has an empty address"),
        ("--sampler-urls http://a:8000,http://b:8000,http://a:8000/", "names http://a:8000 twice"),
        ("--sampler-urls http://a:8000 --engine vllm", "exclude each other"),
        ("--sampler-urls http://a:8000 --dtype bfloat16", "--dtype has no effect with --sampler-urls"),
        slow(
            "--sampler-urls http://a:8000 --gpu-memory-utilization 0.3", "--gpu-memory-utilization has no effect with"
        ),
        ("--weights-dir .", "--weights-dir needs --sampler-urls"),
        ("--request-timeout 900", "--request-timeout has no effect without --sampler-urls"),
        ("--sampler-urls http://a:8000 --weights-dir nowhere", "not a directory"),
        ("--sampler-urls http://127.0.0.1:9", "does not answer"),
    ],
)
def test_servers_that_cannot_be(forks: Forks, tmp_path, options, said):
    done = forks.run(*GRPO, *options.split(), cwd=tmp_path, status=1 if said == "does not answer" else 2)
    assert said in done.err


# vLLM itself


@pytest.fixture(scope="module")
def start_real(forks: Forks, tmp_path_factory) -> Iterator[Callable[..., list[Real]]]:
    with real_servers(forks, tmp_path_factory.mktemp("servers")) as start:
        yield start


# What dies: the whole server, as with its machine; what answers; or vLLM's engine behind it.
VICTIMS = ("all", "front", "engine")


def members(server: Real) -> list[int]:
    """The processes of a server that live: the one that answers, and those that it has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session, *_ = stat.read_text().rpartition(")")[2].split()
            if int(session) == server[1].pid and state != "Z":
                found.append(int(stat.parent.name))
    return found


def strike(server: Real, victim: str) -> None:
    """Kill a server, or a part of it, as nobody would who ends it in order."""
    behind = [pid for pid in members(server) if pid != server[1].pid]
    assert behind, "vLLM's engine is a process of its own"
    for pid in {"all": [server[1].pid, *behind], "front": [server[1].pid], "engine": behind}[victim]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.vllm
def test_runs_end_the_same_whenever_a_vllm_server_dies(forks: Forks, start_real, vllm_server, tmp_path):
    """Another server each time. The run goes on with a second one or, every other time, is resumed with it."""
    kills, moments = int(os.environ.get("RLVR_VLLM_KILLS", "3")), random.Random(0)
    seconds = forks.run(*GRPO, "--sampler-urls", vllm_server, "--run", "whole", cwd=tmp_path, status=0).seconds
    whole, ended, victims = tmp_path / "runs/whole", [], []
    while len(ended) < kills:
        number = len(ended)
        run, what = tmp_path / f"runs/cut{number}", VICTIMS[number % len(VICTIMS)]
        victims = victims or start_real(min(2, kills - number))  # two in the time of one, with two cores
        victim = victims.pop()
        urls = victim[0] if number % 2 else f"{victim[0]},{vllm_server}"
        call = forks.start(*GRPO, "--sampler-urls", urls, "--run", run.name, cwd=tmp_path)
        time.sleep(moments.uniform(0, seconds))
        if forks.status(call) is None:
            strike(victim, what)
            done = forks.wait(call)
            assert not done.hung
            assert "Traceback" not in done.said, done.said
            assert done.status in (0, 1), done.said
            ended.append(f"{what}: {'went on' if done.status == 0 else 'resumed'}")
            if done.status:
                assert victim[0].removeprefix("http://") in done.err
                again = [*begin_or_resume(run, GRPO), "--sampler-urls", vllm_server]
                forks.run(*again, cwd=tmp_path, status=0)
            assert weights_of(run) == weights_of(whole)
            assert rows_of(run, phase="train") == rows_of(whole, phase="train")
            assert check_run(run).problems == []
            assert processes_in(tmp_path) == {}
        shutil.rmtree(run)
        kill(victim)
        until = time.monotonic() + 10
        while members(victim) and time.monotonic() < until:
            time.sleep(0.1)
        assert members(victim) == []
    print(*ended, sep="\n")


@pytest.mark.vllm
def test_vllm_servers_train_and_one_may_die(forks: Forks, start_real, vllm_server, policy, tmp_path):
    (victim,) = start_real(1)
    urls = [victim[0], vllm_server]
    for name, trainers in (("one", "1"), ("two", "2"), ("two-again", "2")):
        options = ("--sampler-urls", ",".join(urls), "--trainers", trainers, "--run", name)
        forks.run(*GRPO, *options, cwd=tmp_path, status=0)
        run = tmp_path / "runs" / name
        assert {(r["step"], r["policy_version"]) for r in rows_of(run, phase="train")} == {(0, 0), (1, 1), (2, 2)}
        gaps = [value for (_, _, name), value in metrics_of(run).items() if name == "mismatch/logprob_max_abs"]
        assert len(gaps) == 3
        assert max(gaps) < 1e-4
        forks.run("check", str(run), "--replay", "3", cwd=tmp_path, status=0)
    one, two, again = (tmp_path / "runs" / name for name in ("one", "two", "two-again"))
    assert weights_of(two) == weights_of(again)
    assert rows_of(two, phase="train") == rows_of(again, phase="train")
    first = [metrics_of(run)["train", 0, "optimizer/grad_norm"] for run in (one, two)]
    assert first[0] == pytest.approx(first[1], rel=1e-4)

    sampler = ServersSampler(urls, policy.tokenizer, timeout=60)
    sampler.load_weights(policy, 0)
    # More than a server is asked at once, so that there is work left when the first one has been done.
    many = [replace(request, seeds=tuple(range(128))) for request in requests_of(policy)]
    params = replace(PARAMS, max_tokens=40, min_tokens=32, stop=())
    whole = {(c.request_index, c.sample_index): c for c in sampler.sample(many, params)}
    found = {}
    for completion in sampler.sample(many, params):
        if not found:
            kill(victim)
        found[completion.request_index, completion.sample_index] = completion
    assert len(sampler.notes) == 1
    assert found.keys() == whole.keys()
    assert all(found[key].token_ids == whole[key].token_ids for key in whole)
    assert all(found[key].logprobs == pytest.approx(whole[key].logprobs, abs=1e-4) for key in whole)


@pytest.mark.vllm
def test_a_vllm_server_samples_from_the_whole_distribution(vllm_server, policy):
    """Also where the server's defaults, which come from the model's files, say to take the most probable token or to penalize repetition."""
    sampler = ServersSampler([vllm_server], policy.tokenizer, timeout=60)
    many = [replace(request, seeds=tuple(range(16))) for request in requests_of(policy)]
    drawn = list(sampler.sample(many, replace(PARAMS, temperature=1.0, min_tokens=0)))
    assert len({c.token_ids for c in drawn if not c.request_index}) > 1
    for completion in drawn:
        ids = torch.tensor([completion.prompt_ids + completion.token_ids])
        with torch.inference_mode():
            log_p = policy.forward(input_ids=ids).logits[0, len(completion.prompt_ids) - 1 : -1].log_softmax(-1)
        exact = log_p.gather(-1, torch.tensor(completion.token_ids)[:, None]).flatten()
        assert completion.logprobs == pytest.approx(exact.tolist(), abs=1e-3)
    endpoint = OpenAISampler(str(builtin_model_path()), base_url=f"{vllm_server}/v1")
    assert len({c.text for c in endpoint.sample(many[:1], replace(PARAMS, temperature=1.0))}) > 1


@pytest.mark.vllm
def test_a_vllm_server_is_a_teacher(vllm_server, policy):
    rows = [([5, 9, 11], [7, 8]), ([3], [12, 13, 14, 15])]
    for (prompt, response), found in zip(rows, ServedTeacher(vllm_server, "").log_probs(rows), strict=True):
        with torch.inference_mode():
            log_p = policy.forward(input_ids=torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        exact = [float(log_p[len(prompt) - 1 + i, token]) for i, token in enumerate(response)]
        assert found == pytest.approx(exact, abs=1e-4)


@pytest.mark.vllm
def test_a_vllm_server_serves_adapters_and_evaluates(forks: Forks, start_real, policy, tmp_path):
    (server,) = start_real(1, "--enable-lora", "--max-lora-rank", "8")
    url = ("--sampler-urls", server[0])
    forks.run(*GRPO, *url, "--lora-rank", "4", "--learning-rate", "2e-3", "--run", "r", cwd=tmp_path, status=0)
    run = tmp_path / "runs/r"
    gaps = [value for (_, _, name), value in metrics_of(run).items() if name == "mismatch/logprob_max_abs"]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4
    forks.run("check", str(run), "--replay", "3", cwd=tmp_path, status=0)
    with urllib.request.urlopen(f"{server[0]}/v1/models") as listed:
        assert [model["id"] for model in json.load(listed)["data"]] == [str(builtin_model_path())]

    for name, options in (("one", ()), ("two", url)):
        forks.run(
            *SFT, *options, "--lora-rank", "4", "--sampling-temperature", "0", "--run", name, cwd=tmp_path, status=0
        )
    rows = [rows_of(tmp_path / "runs" / name, phase="eval") for name in ("one", "two")]
    assert [row["response_ids"] for row in rows[0]] == [row["response_ids"] for row in rows[1]]

    too_large = forks.run(*GRPO, *url, "--lora-rank", "64", "--run", "large", cwd=tmp_path, status=1)
    assert "--max-lora-rank RANK" in too_large.err
    evaluate = ("eval", "--dataset", "arithmetic:8", "--sampling-max-tokens", "32", *url)
    forks.run(*evaluate, "--run", "e", cwd=tmp_path, status=0)
    other = forks.run(*evaluate, "--model", str(run / "model"), cwd=tmp_path, status=1)
    assert "serves" in other.err
