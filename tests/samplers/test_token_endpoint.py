"""Endpoints that give token ids, and those that lack something for it: refused after two tokens, with what is missing."""

import json
import threading

import pytest

from endpoint import Reply, completion, error, serving
from following import Following
from rlvr_cli.errors import RlvrError
from rlvr_cli.samplers.open import EngineSettings
from rlvr_cli.samplers.openai import OpenAISampler, open_engine
from rlvr_cli.samplers.token_endpoint import TokenEndpoint
from rlvr_cli.types import Request, SamplingParams

pytest.importorskip("aiohttp", reason="aiohttp is not installed")


def opened(endpoint, tokenizer) -> TokenEndpoint:
    return TokenEndpoint(OpenAISampler("m", base_url=endpoint.url, timeout=10.0, max_retries=0), tokenizer, model="m")


def only_text(body: dict) -> Reply:
    return completion("4") if isinstance(body["prompt"], str) else error(400, "Invalid type for 'prompt': a string")


def known_fields(body: dict) -> Reply:
    return error(400, "unknown field: return_token_ids") if "return_token_ids" in body else completion("4")


def of_another_tokenizer(body: dict) -> Reply:
    ids = body["prompt"] if isinstance(body["prompt"], list) else [5, 6, 7]
    return completion("4", token_ids=[5], prompt_token_ids=ids)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda body: completion("4"), "does not say which tokens it sampled"),
        (known_fields, "does not say which tokens it sampled"),
        (only_text, "did not answer a prompt of token ids.*Invalid type for 'prompt'"),
        (of_another_tokenizer, "tokenizer is not that of --model m: it makes 3 tokens"),
        (lambda body: error(401, "no such key"), "401 .*no such key"),
    ],
)
def test_an_endpoint_that_lacks_something_is_refused_before_it_is_asked_much(tiny_tokenizer, answer, problem):
    with serving(answer) as endpoint:
        with pytest.raises(RlvrError, match=problem) as caught:
            opened(endpoint, tiny_tokenizer)
        assert "vLLM gives token ids" in caught.value.hint or "Name the model" in caught.value.hint
        assert [body["max_tokens"] for body in endpoint.bodies] == [1] * len(endpoint.bodies)
        assert len(endpoint.bodies) <= 2


def test_a_name_without_a_tokenizer_here_is_refused_before_anything_is_asked():
    with serving(lambda body: completion("4")) as endpoint:
        settings = EngineSettings("no-such-model", base_url=endpoint.url, episodes={"max_turns": 3})
        with pytest.raises(RlvrError, match="no tokenizer 'no-such-model'") as caught:
            open_engine(settings)
        assert caught.value.hint.startswith("Episodes become tokens on this machine")
        assert not endpoint.bodies


@pytest.mark.parametrize(
    ("served", "context"),
    [
        ({"data": [{"id": "other", "max_model_len": 9}, {"id": "MODEL", "max_model_len": 64}]}, 64),
        ({"data": [{"id": "MODEL"}]}, 512),  # that of the model's files
        ({"data": [{"id": "MODEL", "max_model_len": "long"}]}, 512),
        ({"data": "none"}, 512),
        ([], 512),
        ({}, 512),
        ("{", 512),
    ],
)
def test_the_context_is_what_the_endpoint_takes_or_that_of_the_models_files(
    tiny_model_dir, tiny_tokenizer, served, context
):
    said = served if isinstance(served, str) else json.loads(json.dumps(served).replace("MODEL", str(tiny_model_dir)))

    def answer(body: dict) -> Reply:
        if not body:
            return Reply(said)
        mine = body["prompt"] if isinstance(body["prompt"], list) else tiny_tokenizer(body["prompt"])["input_ids"]
        return completion("4", token_ids=[5], prompt_token_ids=mine)

    with serving(answer, lists=True) as endpoint:
        assert opened(endpoint, tiny_tokenizer).context_length is None
        found = open_engine(EngineSettings(str(tiny_model_dir), base_url=endpoint.url, episodes={"max_turns": 3}))
    assert found.context_length == context


def test_the_key_stays_with_the_endpoint(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key of the endpoint")
    with serving(lambda body: Reply({"data": []}), lists=True) as elsewhere:
        moved = Reply({}, 302, {"location": f"{elsewhere.url}/models"})
        with serving(lambda body: moved, lists=True) as endpoint:
            assert OpenAISampler("m", base_url=endpoint.url).served_context() is None
            assert endpoint.keys == ["Bearer key of the endpoint"]
        assert not elsewhere.paths


def test_text_is_that_of_the_ids_and_an_answer_without_them_ends_the_call(tiny_tokenizer):
    ids = tiny_tokenizer("12</answer> 7")["input_ids"]

    def answer(body: dict) -> Reply:
        if body["prompt"] == [9]:
            return completion("12")
        mine = body["prompt"] if isinstance(body["prompt"], list) else tiny_tokenizer(body["prompt"])["input_ids"]
        return completion("the server's", token_ids=ids, prompt_token_ids=mine, stop_reason="</answer>")

    with serving(answer) as endpoint:
        sampler = opened(endpoint, tiny_tokenizer)
        (found,) = sampler.sample([Request("2+2=", (1,))], SamplingParams(stop=("</answer>",)))
        assert (found.text, found.token_ids) == ("12</answer>", tuple(ids))
        assert endpoint.bodies[-1]["prompt"] == list(found.prompt_ids) == tiny_tokenizer("2+2=")["input_ids"]
        beyond = len(tiny_tokenizer) + 5  # a model may have more ids than its tokenizer, and sample one
        list(sampler.sample([Request("", (1,), prompt_ids=(beyond,))], SamplingParams()))
        assert endpoint.bodies[-1]["prompt"] == [beyond]
        with pytest.raises(RlvrError, match="without its token ids"):
            list(sampler.sample([Request("", (1,), prompt_ids=(9,))], SamplingParams()))


def test_requests_that_come_are_sent_while_others_are_under_way(tiny_tokenizer):
    others = threading.Event()

    def answer(body: dict) -> Reply:
        mine = body["prompt"] if isinstance(body["prompt"], list) else tiny_tokenizer(body["prompt"])["input_ids"]
        said = completion("4", token_ids=[5], prompt_token_ids=mine)
        return Reply(said.body, after=others if mine == [9] else None)

    with serving(answer) as endpoint:
        slow, quick = (Request("", (1,), prompt_ids=ids) for ids in ((9,), (8,)))
        more = Following(
            [slow, quick],
            lambda c: Request("", (1,), prompt_ids=c.prompt_ids + c.token_ids) if c.request_index else None,
            turns=2,
        )
        order = []
        for completed in opened(endpoint, tiny_tokenizer).sample([slow, quick], SamplingParams(), more=more):
            more.add(completed)
            order.append((completed.request_index, completed.prompt_ids))
            if len(order) == 3:
                others.set()
        assert order == [(1, (8,)), (2, (8, 5)), (3, (8, 5, 5)), (0, (9,))]
