"""The endpoint sampler against a local HTTP server that answers, fails, stalls and disconnects on demand."""

import gc
import json
import os
import re
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from email.utils import formatdate
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endpoint import Endpoint, Reply, completion, error, serving
from following import Following
from rlvr_cli.errors import QuestionsRefused, RlvrError
from rlvr_cli.samplers import openai_client
from rlvr_cli.samplers.openai import WHOLE_DISTRIBUTION, OpenAISampler, _fold
from rlvr_cli.types import Completion, Request, SamplingParams

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

CANARY = "sk-canary-4f1d9a"


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    monkeypatch.setattr("rlvr_cli.samplers.openai_client.FIRST_WAIT", 0.01)
    with serving(lambda body: completion("4 </answer>")) as served:
        yield served


def in_turn(*replies: Reply, then: Reply | None = None) -> Callable[[dict], Reply]:
    """Return the replies one after the other, and then `then` forever."""
    left = list(replies)
    last = then or completion("4 </answer>")
    return lambda body: left.pop(0) if left else last


def open_sampler(endpoint: Endpoint, /, **options: Any) -> OpenAISampler:
    return OpenAISampler("m", base_url=endpoint.url, **{"timeout": 10.0, **options})


def one(endpoint: Endpoint, params: SamplingParams | None = None, /, **options: Any) -> Completion:
    completions = list(
        open_sampler(endpoint, **options).sample([Request("2+2=", (2**62 + 1,))], params or SamplingParams())
    )
    assert len(completions) == 1
    return completions[0]


def until_failure(stream: Iterator[Completion]) -> tuple[list[Completion], RlvrError | None]:
    """Return the completions that a stream yields, and the error that ends it."""
    completions = []
    try:
        for completion in stream:
            completions.append(completion)
    except RlvrError as failure:
        return completions, failure
    return completions, None


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_what_is_sent_to_completions(endpoint):
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=50, min_tokens=4, stop=("</answer>", "\n\n"))
    c = one(endpoint, params)
    assert (c.text, c.finish_reason, c.stop_reason) == ("4 </answer>", "stop", "</answer>")
    assert (c.num_prompt_tokens, c.num_tokens, c.token_ids, c.prompt_ids, c.mean_entropy) == (7, 3, (), (), None)
    body = endpoint.bodies[0]
    assert endpoint.paths == ["/v1/completions"]
    assert endpoint.keys == [f"Bearer {CANARY}"]
    seed = body.pop("seed")
    assert 0 <= seed < 2**31
    assert body == {
        "model": "m",
        "prompt": "2+2=",
        "max_tokens": 50,
        "temperature": 0.7,
        "top_p": 0.9,
        "stop": ["</answer>", "\n\n"],
        "min_tokens": 4,
        "include_stop_str_in_output": True,
        "return_token_ids": True,
    }


def test_chat_sends_one_user_message_and_reads_the_assistants(endpoint):
    content = [{"token": "4", "logprob": -0.5}, {"token": " </answer>", "logprob": -0.25}]
    message = {"role": "assistant", "content": "4 </answer>"}
    choice = {"message": message, "finish_reason": "stop", "logprobs": {"content": content}}
    endpoint.answer = in_turn(Reply({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}))
    c = one(endpoint, endpoint="chat")
    assert endpoint.paths == ["/v1/chat/completions"]
    assert endpoint.bodies[0]["messages"] == [{"role": "user", "content": "2+2="}]
    assert "prompt" not in endpoint.bodies[0]
    assert endpoint.bodies[0]["logprobs"] is True
    assert (c.text, c.logprobs, c.num_tokens, c.num_prompt_tokens) == ("4 </answer>", (-0.5, -0.25), 2, 9)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_folded_seeds_fit_and_differ(a, b):
    assert 0 <= _fold(a) < 2**31
    assert _fold(a) == _fold(a)
    assert _fold(2**32 + a) != _fold(a), "the high bits count"


@pytest.mark.parametrize(
    ("temperature", "top_p", "asked"), [(1.0, 1.0, True), (0.0, 1.0, True), (0.7, 1.0, False), (1.0, 0.9, False)]
)
def test_logprobs_are_asked_for_where_they_are_of_the_distribution_sampled_from(endpoint, temperature, top_p, asked):
    sampler = open_sampler(endpoint)
    assert [*sampler.sample([Request("2+2=", (1,))], SamplingParams(temperature=temperature, top_p=top_p))]
    assert ("logprobs" in endpoint.bodies[0]) == asked
    assert [note.startswith("No log-probabilities are stored") for note in sampler.notes] == [True] * (not asked)


@pytest.mark.parametrize(
    ("listed", "sent"),
    [
        ({"id": "m", "owned_by": "vllm", "max_model_len": 512}, True),
        ({"id": "m", "owned_by": "vllm"}, True),  # of an adapter
        ({"id": "m", "owned_by": "sglang", "max_model_len": 512}, True),
        ({"id": "other", "owned_by": "vllm", "max_model_len": 512}, False),
        ({"id": "m", "owned_by": "openai"}, False),
    ],
)
def test_the_defaults_of_a_models_files_are_turned_off_where_a_server_may_have_them(endpoint, listed, sent):
    """As vLLM has those of generation_config.json, of which a request says nothing."""
    endpoint.models = Reply({"data": [listed]})
    one(endpoint)
    found = {name: endpoint.bodies[0].get(name) for name in WHOLE_DISTRIBUTION}
    assert found == (WHOLE_DISTRIBUTION if sent else dict.fromkeys(WHOLE_DISTRIBUTION))


def test_a_default_that_cannot_be_turned_off_is_named(endpoint):
    endpoint.models = Reply({"data": [{"id": "m", "max_model_len": 512}]})
    endpoint.answer = lambda body: (
        error(400, "top_k must be positive") if "top_k" in body else completion("4 </answer>")
    )
    sampler = open_sampler(endpoint)
    list(sampler.sample([Request("p", (1, 2))], SamplingParams()))
    assert sampler.notes == ("The endpoint does not take top_k: the model's own default may change what is sampled.",)
    assert "min_p" in endpoint.bodies[-1]


# --- what is read -----------------------------------------------------------------------------------------------------


def test_everything_that_vllm_reports_is_kept(endpoint):
    endpoint.answer = in_turn(
        completion(
            "4 </answer>",
            stop_reason="</answer>",
            logprobs={"tokens": ["4", " </", "answer>"], "token_logprobs": [-0.5, -0.25, 0]},
            token_ids=[19, 5, 6],
            prompt_token_ids=[1, 2],
        )
    )
    c = one(endpoint)
    assert c.logprobs == (-0.5, -0.25, 0.0)
    assert c.token_ids == (19, 5, 6)
    assert c.prompt_ids == (1, 2)
    assert c.stop_reason == "</answer>"


@pytest.mark.parametrize(
    "fields", [None, {}, {"tokens": None, "token_logprobs": None}, {"tokens": ["4"], "token_logprobs": [None]}]
)
def test_missing_logprobs_are_an_empty_tuple(endpoint, fields):
    endpoint.answer = in_turn(completion("4 </answer>", logprobs=fields))
    assert one(endpoint).logprobs == ()


def test_logprobs_that_do_not_match_the_token_ids_are_not_kept(endpoint):
    logprobs = {"tokens": ["4", "x"], "token_logprobs": [-1.0, -2.0]}
    endpoint.answer = in_turn(completion("4 </answer>", token_ids=[1, 2, 3], logprobs=logprobs))
    c = one(endpoint)
    assert c.logprobs == ()
    assert c.token_ids == (1, 2, 3)


@pytest.mark.parametrize(
    ("reply", "text", "finish", "reason"),
    [
        (completion("a </answer>"), "a </answer>", "stop", "</answer>"),
        (completion("a </answer>", stop_reason="</answer>"), "a </answer>", "stop", "</answer>"),
        (completion("a ", stop_reason="</answer>"), "a </answer>", "stop", "</answer>"),  # cut off: appended again
        (completion("a ", matched_stop="</answer>"), "a </answer>", "stop", "</answer>"),  # SGLang
        (completion("a", stop_reason=None), "a", "stop", "eos"),
        (completion("a", stop_reason=151643), "a", "stop", "eos"),  # the id of an EOS token
        (completion("a", matched_stop=2), "a", "stop", "eos"),
        (completion("a", "length", stop_reason=None), "a", "length", None),
        (completion("a", "length"), "a", "length", None),
        (completion("a", "content_filter"), "a", "stop", "content_filter"),
    ],
)
def test_how_a_response_ended(endpoint, reply, text, finish, reason):
    endpoint.answer = in_turn(reply)
    c = one(endpoint)
    assert (c.text, c.finish_reason, c.stop_reason) == (text, finish, reason)
    assert len(endpoint.bodies) == 1


def test_an_endpoint_that_does_not_say_what_stopped_is_no_longer_asked_to_stop(endpoint):
    """As most endpoints do: the stop string is cut off, and "stop" may also mean EOS. Nothing is guessed."""
    full = {"p0": "<answer> 4 </answer> User: next", "p1": "no tags at all", "p2": "too long"}

    def plain(body):
        text = full[body["prompt"]]
        if "stop" in body:
            return completion(text.partition("</answer>")[0])
        return completion(text, "length" if text == "too long" else "stop", completion_tokens=9)

    endpoint.answer = plain
    sampler = open_sampler(endpoint)
    requests = [Request(p, (1, 2)) for p in full]
    completions = {(c.request_index, c.sample_index): c for c in sampler.sample(requests, SamplingParams())}
    ends = {k: (c.text, c.finish_reason, c.stop_reason) for k, c in completions.items()}
    for j in (0, 1):
        assert ends[0, j] == ("<answer> 4 </answer>", "stop", "</answer>")
        assert ends[1, j] == ("no tags at all", "stop", "eos")
        assert ends[2, j] == ("too long", "length", None)
    assert sum("stop" in body for body in endpoint.bodies) == 1, "the first sample alone found it out"
    assert len(endpoint.bodies) == 7
    assert len({body["seed"] for body in endpoint.bodies if body["prompt"] == "p0"}) == 2, (
        "asked again with its own seed"
    )
    assert len(sampler.notes) == 1
    assert "does not say which stop string" in sampler.notes[0]


RUN_ON = ["x ", "<answer>", "5", "</", "answer>", " User:"]


@pytest.mark.parametrize(
    ("min_tokens", "says", "requests"),
    [
        (4, {"logprobs": {"tokens": RUN_ON, "token_logprobs": [-1.0] * 6}}, 2),
        (0, {"finish": "length"}, 2),
        (0, {"stop_reason": None}, 2),
        (4, {"stop_reason": None}, 3),  # it may have had to go on: asked once without a minimum
    ],
)
def test_an_endpoint_that_does_not_heed_stop_strings_is_no_longer_asked_to_stop(endpoint, min_tokens, says, requests):
    endpoint.answer = lambda body: completion("".join(RUN_ON), **says)
    sampler = open_sampler(endpoint)
    params = SamplingParams(min_tokens=min_tokens)
    completions = list(sampler.sample([Request("2+2=", (1, 2))], params))
    assert {(c.text, c.finish_reason, c.stop_reason) for c in completions} == {
        ("x <answer>5</answer>", "stop", "</answer>")
    }
    assert [body.get("stop") for body in endpoint.bodies] == [["</answer>"]] * (requests - 1) + [None]
    assert "does not heed stop strings" in sampler.notes[0]


@pytest.mark.parametrize(
    ("reports", "finish", "minima"),
    [
        (True, "length", [4, 0, 4]),
        (False, "length", [4, 0, 4, 0]),
        (False, "stop", [4, 0, 4, 4]),  # what ended it is not said: asked again, without stop strings
    ],
)
def test_an_endpoint_that_has_to_go_on_after_a_stop_string_heeds_them(endpoint, reports, finish, minima):
    def heeds(body):
        if not body["min_tokens"]:
            return completion("\n\n", stop_reason="\n\n") if reports else completion("\n\n")
        return completion("\n\nSo it is 4.", finish, **({"stop_reason": None} if reports else {}))

    endpoint.answer = heeds
    sampler = open_sampler(endpoint)
    params = SamplingParams(min_tokens=4, stop=("\n\n",))
    texts = {c.text for c in sampler.sample([Request("2+2=", (1, 2))], params)}
    assert [body["min_tokens"] for body in endpoint.bodies] == minima
    if finish == "length":
        assert (texts, sampler.notes) == ({"\n\nSo it is 4."}, ())


def test_a_response_that_is_cut_here_keeps_the_tokens_up_to_the_cut(endpoint):
    tokens = ["4", " </", "answer>", " User", ":"]
    logprobs = {"tokens": tokens, "token_logprobs": [-1.0, -2.0, -3.0, -4.0, -5.0]}
    endpoint.answer = in_turn(
        completion("4 "), completion("".join(tokens), "length", logprobs=logprobs, completion_tokens=5)
    )
    c = one(endpoint, SamplingParams(min_tokens=1))
    assert (c.text, c.num_tokens, c.logprobs) == ("4 </answer>", 3, (-1.0, -2.0, -3.0))


def test_a_stop_string_within_the_first_tokens_does_not_count(endpoint):
    tokens = ["</answer>", " 5", " </answer>", " x"]
    logprobs = {"tokens": tokens, "token_logprobs": [-1.0] * 4}
    endpoint.answer = in_turn(completion("?"), completion("".join(tokens), "length", logprobs=logprobs))
    assert one(endpoint, SamplingParams(min_tokens=2)).text == "</answer> 5 </answer>"


def test_a_missing_token_count_is_noted(endpoint):
    endpoint.answer = in_turn(Reply({"choices": [{"text": "4 </answer>", "finish_reason": "stop"}]}))
    sampler = open_sampler(endpoint)
    (c,) = sampler.sample([Request("p", (1,))], SamplingParams())
    assert c.num_tokens == 0
    assert "does not count tokens" in sampler.notes[0]


def test_a_token_count_may_be_a_whole_float(endpoint):
    endpoint.answer = in_turn(completion("4 </answer>", completion_tokens=3.0), then=error(400, "asked again"))
    count = one(endpoint).num_tokens
    assert (count, type(count)) == (3, int)


@pytest.mark.parametrize(
    ("count", "said"), [(3.5, "3.5"), (float("nan"), "nan"), (float("inf"), "inf"), (2.0**31, "out of range"), (True, "True")]
)  # fmt: skip
def test_a_token_count_that_is_none_fails(endpoint, count, said):
    endpoint.answer = in_turn(then=completion("4 </answer>", completion_tokens=count))
    with pytest.raises(RlvrError, match=f"the answer's completion_tokens is {said}"):
        one(endpoint, max_retries=0)


# --- what an endpoint refuses -----------------------------------------------------------------------------------------


def test_fields_that_the_endpoint_refuses_are_left_out_and_named(endpoint):
    known = {"model", "prompt", "max_tokens", "temperature", "top_p", "stop"}

    def strict(body):
        unknown = sorted(set(body) - known)
        return (
            error(400, f"Unrecognized request argument supplied: {unknown[0]}")
            if unknown
            else completion("4 </answer>")
        )

    endpoint.answer = strict
    sampler = open_sampler(endpoint)
    assert sampler.seeding == "endpoint"
    assert len(list(sampler.sample([Request("p", (1, 2, 3))], SamplingParams()))) == 3
    assert len(endpoint.bodies) == 5 + 3, "one refusal for each field, then as many requests as samples"
    assert sampler.seeding == "none"
    for name in ("seed", "min_tokens", "logprobs", "token_ids"):
        assert any(name in note for note in sampler.notes), name


def test_a_refusal_that_is_about_something_else_changes_nothing(endpoint):
    """The message contains the name of a field, but leaving it out does not help: the next request has it again."""
    answers = {"bad": error(400, "too long: 'the seed of an apple'"), "good": completion("4 </answer>")}
    endpoint.answer = lambda body: answers[body["prompt"]]
    sampler = open_sampler(endpoint, max_concurrency=1)
    stream = sampler.sample([Request("bad", (1,)), Request("good", (1,))], SamplingParams())
    assert next(stream).request_index == 1
    with pytest.raises(RlvrError, match="1 of 2 samples failed"):
        next(stream)
    assert "seed" in endpoint.bodies[-1]
    assert sampler.notes == ()


def test_models_that_know_only_max_completion_tokens(endpoint):
    def strict(body):
        if "max_tokens" in body:
            return error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
        return Reply({"choices": [{"message": {"content": "4 </answer>"}, "finish_reason": "stop"}]})

    endpoint.answer = strict
    one(endpoint, SamplingParams(max_tokens=33), endpoint="chat")
    assert endpoint.bodies[-1]["max_completion_tokens"] == 33


def reasoning_model(body: dict, order: Sequence[str] = ("logprobs", "stop", "top_p")) -> Reply:
    """As OpenAI's refuse what they do not take, one after another."""
    for name in order:
        if name in body:
            forbidden = error(403, "You are not allowed to request logprobs from this model")
            other = error(400, f"Unsupported parameter: '{name}' is not supported with this model.")
            return forbidden if name == "logprobs" else other
    if body["messages"][0]["content"] == "too long":
        return error(400, "This prompt is too long.")
    return Reply({"choices": [{"message": {"content": "4 </answer> So."}, "finish_reason": "stop"}]})


@pytest.mark.parametrize("order", [*permutations(("logprobs", "stop", "top_p"))])
def test_fields_are_refused_in_any_order_and_later_refusals_are_of_one_sample(endpoint, order):
    endpoint.answer = partial(reasoning_model, order=order)
    sampler = open_sampler(endpoint, endpoint="chat", max_concurrency=1)
    asked = [Request(prompt, (1,)) for prompt in ("p", "too long", "q")]
    found, failure = until_failure(sampler.sample(asked, SamplingParams()))
    assert [c.request_index for c in found] == [0, 2]
    assert "too long" in failure.problem


def test_models_that_take_neither_logprobs_nor_stop_strings(endpoint):
    endpoint.answer = reasoning_model
    sampler = open_sampler(endpoint, endpoint="chat")
    found = list(sampler.sample([Request("p", (1, 2, 3))], SamplingParams()))
    assert {(c.text, c.stop_reason) for c in found} == {("4 </answer>", "</answer>")}
    assert len(endpoint.bodies) == 3 + 3, "one refusal of each, then as many requests as samples"
    assert [note for note in sampler.notes if "cut here" in note] == [
        "The endpoint does not take stop strings: responses run to their end, which costs tokens, and are cut here."
    ]
    assert any("does not take logprobs" in note for note in sampler.notes)
    assert not any("top_p" in note for note in sampler.notes)


def test_a_top_p_that_matters_is_not_left_out(endpoint):
    endpoint.answer = lambda body: error(400, "Unsupported parameter: 'top_p'") if "top_p" in body else completion("4")
    with pytest.raises(RlvrError, match="top_p"):
        one(endpoint, SamplingParams(top_p=0.9))


def test_a_refusal_that_says_stop_and_means_something_else_sends_stop_strings_on(endpoint):
    answers = {"bad": error(400, "too long: stop it"), "good": completion("4 </answer>")}
    endpoint.answer = lambda body: answers[body["prompt"]]
    sampler = open_sampler(endpoint, max_concurrency=1)
    until_failure(sampler.sample([Request("bad", (1,)), Request("good", (1,))], SamplingParams()))
    assert "stop" in endpoint.bodies[-1]
    assert sampler.notes == ()


# --- transient failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble",
    [
        [error(429, "slow down", Retry_After="0.01")],
        [error(500, "oops"), error(503, "busy")],
        [Reply(status=0)],
        [Reply("<html>gateway</html>", 502), Reply("<html>fine</html>", 200)],
        [Reply({"error": {"message": "upstream"}}, 200)],
        [Reply({"choices": []})],
        [completion("4", "abort", stop_reason=None), completion("4", "error"), completion("4", "cancelled")],
    ],
)
def test_transient_failures_are_retried(endpoint, trouble):
    endpoint.answer = in_turn(*trouble)
    assert one(endpoint).text == "4 </answer>"
    assert len(endpoint.bodies) == len(trouble) + 1
    assert len({json.dumps(body) for body in endpoint.bodies}) == 1, "the same request, seed and all"


@pytest.mark.parametrize(
    ("headers", "least"),
    [({"retry_after": "0.4"}, 0.4), ({"retry_after_ms": "300"}, 0.3), ({"retry_after": "date"}, 0.2)],
)
def test_the_endpoint_says_how_long_to_wait(endpoint, headers, least):
    if headers.get("retry_after") == "date":  # whole seconds: between one and two from now
        headers = {"retry_after": formatdate(time.time() + 2, usegmt=True)}
    endpoint.answer = in_turn(error(429, "slow down", **headers))
    one(endpoint)
    assert endpoint.times[1] - endpoint.times[0] >= least


BACKOFF = (0.375, 0.5)


@pytest.mark.parametrize(
    ("headers", "tries", "least", "most"),
    [
        ({}, 1, *BACKOFF), ({}, 3, 1.5, 2.0), ({}, 60, 6.0, 8.0), ({"retry-after": "7"}, 3, 7.0, 7.0), ({"retry-after": "120"}, 1, 120.0, 120.0),
        ({"retry-after-ms": "250", "retry-after": "7"}, 1, 0.25, 0.25), ({"retry-after": "-5"}, 1, *BACKOFF), ({"retry-after": "0"}, 1, *BACKOFF),
        ({"retry-after": "nan"}, 1, *BACKOFF), ({"retry-after": "soon"}, 1, *BACKOFF), ({"retry-after-ms": "soon", "retry-after": "7"}, 1, 7.0, 7.0),
        ({"retry-after": formatdate(0)}, 1, *BACKOFF),
    ],
)  # fmt: skip
def test_waits_by_hand(headers, tries, least, most):
    for _ in range(20):
        assert least <= openai_client._seconds_to_wait(headers, tries) <= most


@pytest.mark.parametrize("asked", ["121", "inf", "9" * 400, "Fri, 01 Jan 2100 00:00:00 -0000"])
def test_who_asks_for_too_long_is_not_waited_for(asked):
    assert openai_client._seconds_to_wait({"retry-after": asked}, 1) is None


def test_an_endpoint_may_say_that_no_retry_will_help(endpoint):
    endpoint.answer = in_turn(then=error(500, "never", x_should_retry="false"))
    with pytest.raises(RlvrError, match=r"500 .*never.*tried 1 time\)"):
        one(endpoint)
    assert len(endpoint.bodies) == 1


def test_retries_have_an_end(endpoint):
    endpoint.answer = in_turn(then=error(500, "broken for good"))
    with pytest.raises(RlvrError, match=r"500 .*broken for good.*tried 3 times"):
        one(endpoint, max_retries=2)
    assert len(endpoint.bodies) == 3


@pytest.mark.parametrize("trouble", [error(429, "slow down"), error(503, "loading"), Reply(status=0)])
def test_what_passes_is_waited_for_as_long_as_a_sample_may_take(endpoint, trouble, monkeypatch):
    monkeypatch.setattr("rlvr_cli.samplers.openai_client.LONGEST_WAIT", 0.02)
    endpoint.answer = in_turn(completion("4 </answer>"), *[trouble] * 12)
    with TestCase().assertLogs() as logged:
        found = list(open_sampler(endpoint).sample([Request("2+2=", (1, 2))], SamplingParams()))
    assert len(found) == 2
    assert len(endpoint.bodies) == 14
    assert sum("The endpoint is asked again" in line for line in logged.output) == 1


@pytest.mark.parametrize("trouble", [Reply(status=0), Reply("<html>fine</html>", 200)])
def test_what_may_be_wrong_for_good_is_tried_seven_times(endpoint, trouble, monkeypatch):
    """An address that has never answered, and answers that cannot be read: these are paid for."""
    monkeypatch.setattr("rlvr_cli.samplers.openai_client.LONGEST_WAIT", 0.02)
    endpoint.answer = in_turn(then=trouble)
    with pytest.raises(RlvrError, match="tried 7 times"):
        one(endpoint)


def test_a_server_that_hangs_meets_the_deadline(endpoint):
    endpoint.answer = in_turn(then=Reply(wait=30))
    start = time.monotonic()
    with pytest.raises(RlvrError, match=r"no answer within 0\.5 s"):
        one(endpoint, timeout=0.5)
    assert 0.5 <= time.monotonic() - start < 3


def test_an_endpoint_that_asks_for_an_hour_is_not_waited_for(endpoint):
    endpoint.answer = in_turn(then=error(429, "slow down", retry_after="3600"))
    start = time.monotonic()
    with pytest.raises(RlvrError, match=r"429 .*slow down.*tried"):
        one(endpoint, max_retries=2)
    assert time.monotonic() - start < 3


def test_waiting_between_tries_counts_against_the_deadline_and_its_reason_is_named(endpoint):
    endpoint.answer = in_turn(then=error(429, "slow down", retry_after="60"))
    start = time.monotonic()
    with pytest.raises(RlvrError, match=r"no answer within 0\.5 s; the last try: 429 .*slow down"):
        one(endpoint, timeout=0.5)
    assert time.monotonic() - start < 3


def test_answers_that_cannot_be_read_have_an_end_too(endpoint):
    endpoint.answer = in_turn(then=Reply("<html>fine</html>", 200))
    with pytest.raises(RlvrError, match=r"not JSON: <html>fine</html> \(tried 3 times\)"):
        one(endpoint, max_retries=2)
    assert len(endpoint.bodies) == 3


def test_an_endpoint_that_is_not_there():
    with pytest.raises(RlvrError, match=r"Connection error.*tried 2 times"):
        list(
            OpenAISampler("m", base_url="http://127.0.0.1:9/v1", max_retries=1).sample(
                [Request("p", (1,))], SamplingParams()
            )
        )


# --- permanent failures -----------------------------------------------------------------------------------------------


def test_what_was_answered_is_yielded_before_the_failure_of_another(endpoint):
    def answer(body):
        if body["prompt"] == "p2":  # the error names the questions in their order all the same
            time.sleep(0.05)
        return error(400, "prompt too long") if body["prompt"] in ("p2", "p5") else completion("4 </answer>")

    endpoint.answer = answer
    requests = [Request(f"p{i}", (1, 2), name=f"gsm8k-{i}") for i in range(10)]
    completions, failure = until_failure(open_sampler(endpoint).sample(requests, SamplingParams()))
    assert {(c.request_index, c.sample_index) for c in completions} == {
        (i, j) for i in range(10) for j in (0, 1) if i not in (2, 5)
    }
    assert isinstance(failure, QuestionsRefused)
    said = r"^4 of 20 samples failed at 127\S+\. Question gsm8k-2: 400 .*prompt too long.* Also failed: Question gsm8k-5\.$"
    assert re.search(said, failure.problem)
    assert failure.hint.startswith("It would be refused again: leave out, or shorten, what is named")
    assert len(endpoint.bodies) == 20, "a 400 is not tried again"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_failure_that_concerns_every_sample_stops_the_requests(endpoint, status):
    endpoint.answer = in_turn(completion("4 </answer>"), completion("4 </answer>"), then=error(status, "not you"))
    sampler = open_sampler(endpoint, max_concurrency=4)
    completions, failure = until_failure(sampler.sample([Request("p", tuple(range(1000)))], SamplingParams()))
    assert len(completions) == 2
    assert re.search(r"of 1000 samples failed.*were not requested\. Prompt 0: ", str(failure))
    assert not isinstance(failure, QuestionsRefused)
    assert len(endpoint.bodies) <= 2 + 4


@pytest.mark.slow
def test_connections_are_closed_also_when_the_caller_stops_at_the_last_answer(endpoint):
    """It may stop while they are being closed. One that is left open is a ResourceWarning when it is collected."""
    for number in range(6):
        stream = open_sampler(endpoint).sample([Request("2+2=", tuple(range(16)))], SamplingParams())
        for _ in range(16):
            next(stream)
        time.sleep(number / 600)
        stream.close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


def test_a_sample_that_takes_too_long_does_not_stop_the_others(endpoint):
    endpoint.answer = lambda body: Reply(wait=30) if body["prompt"] == "p1" else completion("4 </answer>")
    sampler = open_sampler(endpoint, max_concurrency=2, timeout=0.5)
    completions, failure = until_failure(sampler.sample([Request(f"p{i}", (1,)) for i in range(12)], SamplingParams()))
    assert {c.request_index for c in completions} == set(range(12)) - {1}
    assert re.search("1 of 12 samples failed.*no answer within", str(failure))


def test_a_spent_quota_is_not_waited_for(endpoint):
    endpoint.answer = in_turn(then=Reply({"error": {"message": "pay", "code": "insufficient_quota"}}, 429))
    with pytest.raises(RlvrError, match="insufficient_quota"):
        one(endpoint)
    assert len(endpoint.bodies) == 1


def test_when_nothing_ever_succeeds_not_everything_is_tried(endpoint):
    endpoint.answer = in_turn(then=error(400, "no"))
    with pytest.raises(RlvrError, match="of 1000 samples failed") as raised:
        list(open_sampler(endpoint, max_concurrency=4).sample([Request("p", tuple(range(1000)))], SamplingParams()))
    assert len(endpoint.bodies) <= 8 + 3
    assert not isinstance(raised.value, QuestionsRefused)


# --- streaming --------------------------------------------------------------------------------------------------------


def test_completions_come_as_they_finish_with_limited_concurrency(endpoint):
    def slow_first(body):
        reply = completion(f"{body['prompt']} </answer>")
        reply.wait = {"p0": 0.0, "p1": 0.5}.get(body["prompt"], 0.05)
        return reply

    endpoint.answer = slow_first
    requests = [Request(f"p{i}", (5,)) for i in range(9)]
    completions = list(open_sampler(endpoint, max_concurrency=3).sample(requests, SamplingParams()))
    order = [c.request_index for c in completions]
    assert (order[0], order[-1]) == (0, 1), "the slow one comes last, and held up nothing"
    assert sorted(order) == list(range(9))
    assert all(c.text == f"p{c.request_index} </answer>" for c in completions)
    assert endpoint.most_under_way == 3


def test_requests_go_on_while_the_caller_is_busy(endpoint):
    stream = open_sampler(endpoint).sample([Request("p", tuple(range(8)))], SamplingParams())
    next(stream)
    deadline = time.monotonic() + 5
    while len(endpoint.bodies) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(endpoint.bodies) == 8
    assert len(list(stream)) == 7


def test_once_it_has_answered_an_endpoint_is_asked_for_several_samples_at_once(endpoint):
    endpoint.answer = lambda body: Reply(completion("4 </answer>").body, wait=0.3)
    sampler = open_sampler(endpoint)
    for most in (1, 3):
        list(sampler.sample([Request("p", tuple(range(most)))], SamplingParams()))
    assert endpoint.most_under_way == 3


def followed(
    sampler,
    first: list[Request],
    *,
    turns: int,
    seconds: float = 0.02,
    heard: Callable[[int], object] = lambda number: None,
) -> tuple[list[int], Following, RlvrError | None]:
    """Follow all but the prompt `slow`. Return the indices in the order in which they came, what was asked, and the error.

    `heard` is told how many have come.
    """
    more = Following(
        first,
        lambda c: None if first[0].prompt == "slow" and not c.request_index else Request(f"{c.text} again", (1,)),
        turns=turns,
        seconds=seconds,
    )

    def stream() -> Iterator[Completion]:
        for number, answer in enumerate(sampler.sample(first, SamplingParams(), more=more), start=1):
            more.add(answer)
            heard(number)
            yield answer

    found, failure = until_failure(stream())
    return [c.request_index for c in found], more, failure


def test_requests_that_come_are_sent_while_others_are_under_way(endpoint):
    others = threading.Event()
    slow = Reply(completion("4").body, after=others)
    endpoint.answer = lambda body: slow if body["prompt"] == "slow" else completion("4")
    sampler = open_sampler(endpoint)
    list(sampler.sample([Request("first", (1,))], SamplingParams()))
    asked = [Request("slow", (1,)), Request("quick", (1,))]
    order, more, failure = followed(sampler, asked, turns=3, heard=lambda number: number < 4 or others.set())
    assert failure is None
    assert order == [1, 2, 3, 4, 0]
    assert [request.prompt for request in more.asked] == ["slow", "quick", *["4 again"] * 3]
    assert [body["prompt"] for body in endpoint.bodies].count("4 again") == 3


def test_what_fails_is_said_when_all_that_come_have_been_answered(endpoint):
    endpoint.answer = lambda body: error(400, "no") if body["prompt"] == "bad" else completion("4")
    order, _, failure = followed(
        open_sampler(endpoint), [Request("bad", (1,)), Request("good", (1, 2))], turns=2, seconds=0.3
    )
    assert sorted(order) == [1, 1, 2, 3, 4, 5]
    assert "1 of 7 samples failed" in str(failure)


def test_after_a_failure_that_concerns_all_what_comes_is_not_requested(endpoint):
    endpoint.answer = lambda body: error(401, "no") if "again" in body["prompt"] else completion("4")
    order, more, failure = followed(open_sampler(endpoint, max_concurrency=1), [Request("good", (1, 2, 3, 4))], turns=1)
    assert order == [0] * 4
    assert len(more.asked) == 5
    assert "4 of 8 samples failed" in str(failure) or "were not requested" in str(failure)
    assert sum("again" in body["prompt"] for body in endpoint.bodies) < 4


def test_closing_the_stream_cancels_running_requests(endpoint):
    endpoint.answer = in_turn(completion("4 </answer>"), then=Reply(wait=30))
    threads = threading.active_count()
    stream = open_sampler(endpoint, max_concurrency=4).sample([Request("p", tuple(range(100)))], SamplingParams())
    next(stream)
    start = time.monotonic()
    stream.close()
    assert time.monotonic() - start < 3
    assert not [t for t in threading.enumerate() if t.name == "rlvr-openai"]
    assert len(endpoint.bodies) <= 5
    assert threading.active_count() <= threads + 5  # the server's own threads
    assert list(open_sampler(endpoint).sample([], SamplingParams())) == []


# --- the key ----------------------------------------------------------------------------------------------------------


def test_the_key_appears_nowhere(endpoint, capfd):
    """Not in the sampler, a message, a traceback or a log, even if the endpoint echoes it."""
    endpoint.answer = in_turn(
        error(500, f"bad key {CANARY}"), then=error(401, f"Incorrect API key provided: {CANARY}. Find yours at ...")
    )
    sampler = open_sampler(endpoint)
    with TestCase().assertLogs(level="DEBUG") as logged, pytest.raises(RlvrError) as caught:
        list(sampler.sample([Request("p", (1, 2))], SamplingParams()))
    assert "[key]" in str(caught.value)
    shown = [*traceback.format_exception(caught.value), *logged.output, repr(vars(sampler)), str(caught.value)]
    assert CANARY not in "".join((*shown, *capfd.readouterr()))
    assert endpoint.keys[0] == f"Bearer {CANARY}"


def test_a_response_that_repeats_the_key_is_stored_without_it(endpoint):
    endpoint.answer = in_turn(completion(f"{CANARY} 4 </answer>", stop_reason=CANARY), then=completion("x", CANARY))
    first, second = open_sampler(endpoint).sample([Request("p", (1, 2))], SamplingParams())
    assert (first.text, first.stop_reason) == ("[key] 4 </answer>[key]", "[key]")
    assert second.stop_reason == "[key]"


def test_a_placeholder_for_a_key_changes_no_response(endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "answer")
    assert one(endpoint).text == "4 </answer>"


@pytest.mark.parametrize("key", ["sk-canary\nx", "sk-canary-ключ"])
def test_a_key_that_cannot_be_sent_is_not_shown(endpoint, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(RlvrError, match="OPENAI_API_KEY") as caught:
        open_sampler(endpoint)
    assert "canary" not in str(caught.value)


def test_a_missing_key_names_the_variable(monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(RlvrError, match="MY_KEY is not set"):
        OpenAISampler("m", base_url="https://api.example.com/v1", api_key_env="MY_KEY")


def test_an_endpoint_on_this_machine_needs_no_key(endpoint, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    one(endpoint)
    assert endpoint.keys == ["Bearer EMPTY"]
    for url in ("http://localhost:1/v1", "http://[::1]:1/v1", "http://127.3.2.1/v1"):
        OpenAISampler("m", base_url=url)
    with pytest.raises(RlvrError, match="not set"):
        OpenAISampler("m", base_url="http://localhost.example.com/v1")


def test_another_host_to_which_an_endpoint_sends_does_not_get_the_key(endpoint):
    with serving(lambda body: completion("5 </answer>")) as other:
        endpoint.answer = in_turn(then=Reply("", 307, {"location": f"{other.url}/completions"}))
        assert one(endpoint).text == "5 </answer>"
        assert other.keys == [None]
        assert other.bodies == endpoint.bodies


def test_a_proxy_of_the_environment_is_used(endpoint, monkeypatch):
    monkeypatch.setenv("http_proxy", endpoint.url.removesuffix("/v1"))
    monkeypatch.setenv("no_proxy", "inside.invalid")
    sampler = OpenAISampler("m", base_url="http://outside.invalid/v1", max_retries=0)
    (found,) = sampler.sample([Request("p", (1,))], SamplingParams())
    assert found.text == "4 </answer>"
    assert endpoint.paths == ["http://outside.invalid/v1/completions"]
    inside = OpenAISampler("m", base_url="http://inside.invalid/v1", max_retries=0)
    with pytest.raises(RlvrError, match="Connection error"):
        list(inside.sample([Request("p", (1,))], SamplingParams()))
    assert len(endpoint.paths) == 1


def test_error_messages_contain_no_control_characters(endpoint):
    endpoint.answer = in_turn(then=error(400, "\x1b[2J\u202eevil"))
    with pytest.raises(RlvrError) as caught:
        one(endpoint)
    assert "\x1b" not in str(caught.value)
    assert "\u202e" not in str(caught.value)


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://h/v1", "http://", "/v1"])
def test_an_invalid_address_is_refused(url):
    with pytest.raises(RlvrError, match="not the address of an endpoint"):
        OpenAISampler("m", base_url=url)


@pytest.mark.parametrize("url", ["https://me:secret-canary@h/v1", "me:secret-canary@h/v1"])
def test_an_address_with_a_password_is_refused_without_showing_it(url):
    with pytest.raises(RlvrError, match=r"holds a user name or password|not the address") as caught:
        OpenAISampler("m", base_url=url)
    assert "secret-canary" not in str(caught.value)


def test_weights_cannot_be_loaded(endpoint):
    sampler = open_sampler(endpoint)
    with pytest.raises(RlvrError, match="cannot be changed"):
        sampler.load_weights(None, 1)
    sampler.sleep()
    sampler.close()


def test_a_prompt_that_is_not_unicode_is_named(endpoint):
    for name, called in (("", "Prompt 1"), ("q1", "Question q1")):
        with pytest.raises(RlvrError, match=f"^{called} is not valid Unicode"):
            next(open_sampler(endpoint).sample([Request("a", (1,)), Request("\ud83d", (1,), name)], SamplingParams()))
    assert not endpoint.bodies


def test_a_missing_package_says_how_to_install_it():
    code = (
        "import sys; sys.modules['aiohttp'] = None\n"
        "from rlvr_cli.samplers.openai import OpenAISampler\n"
        "OpenAISampler('m', base_url='http://localhost/v1')"
    )
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "aiohttp is not installed" in result.stderr
    assert "pip install -e '.[openai]'" in result.stderr


def test_token_ids_of_a_request_are_what_the_endpoint_gets(endpoint):
    request = Request("what they spell", (1,), prompt_ids=(5, 6, 7))
    (silent,) = open_sampler(endpoint).sample([request], SamplingParams())
    assert endpoint.bodies[-1]["prompt"] == [5, 6, 7]
    assert (silent.prompt_ids, silent.num_prompt_tokens) == ((5, 6, 7), 3)
    endpoint.answer = lambda body: completion("4 </answer>", prompt_token_ids=body["prompt"])
    (answer,) = open_sampler(endpoint).sample([request], SamplingParams())
    assert answer.prompt_ids == (5, 6, 7)
    endpoint.answer = lambda body: completion("4 </answer>", prompt_token_ids=[5, 67])
    with pytest.raises(RlvrError, match="did not sample from the token ids") as raised:
        list(open_sampler(endpoint).sample([request], SamplingParams()))
    assert not isinstance(raised.value, QuestionsRefused)


def test_a_chat_endpoint_accepts_no_token_ids(endpoint):
    stream = open_sampler(endpoint, endpoint="chat").sample([Request("p", (1,), prompt_ids=(5,))], SamplingParams())
    with pytest.raises(RlvrError, match="Prompt 0 is token ids"):
        next(stream)
    assert endpoint.bodies == []


# --- thinking ---------------------------------------------------------------------------------------------------------


def chat_reply(content: Any, *, finish: str = "stop", tokens: int = 9, **more: Any) -> Reply:
    choice_more = {name: more.pop(name) for name in ("stop_reason", "logprobs", "token_ids") if name in more}
    message = {"role": "assistant", "content": content, **more}
    choice = {"message": message, "finish_reason": finish, **choice_more}
    return Reply({"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})


def asked(endpoint: Endpoint, prompt: str, **options: Any) -> tuple[Completion, OpenAISampler]:
    sampler = open_sampler(endpoint, endpoint="chat", **options)
    (found,) = sampler.sample([Request(prompt, (1,))], SamplingParams())
    return found, sampler


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("2+2= <think>", " two and two </think> <answer> 4 </answer>"),
        ("2+2= <think>\n", "two and two </think> <answer> 4 </answer>"),
        ("2+2=", " <think> two and two </think> <answer> 4 </answer>"),
    ],
)
def test_a_thinking_that_is_given_apart_stands_in_the_tags_of_the_prompt(endpoint, name, prompt, text):
    more = {name: "\ntwo and two\n", "logprobs": {"content": [{"token": "4", "logprob": -0.5}]}, "token_ids": [5]}
    endpoint.answer = in_turn(chat_reply("\n\n<answer> 4 </answer>", stop_reason="</answer>", **more))
    c, sampler = asked(endpoint, prompt)
    assert (c.text, c.finish_reason, c.stop_reason) == (text, "stop", "</answer>")
    assert (c.num_tokens, c.token_ids, c.logprobs) == (9, (), ()), "no ids that spell another text"
    assert [note for note in sampler.notes if "thinking apart" in note]


def test_a_stop_string_that_the_thinking_mentions_does_not_end_the_response(endpoint):
    """The endpoint does not say what ended the response, so that it is cut here."""
    thinking = "they want <answer> </answer> tags"
    endpoint.answer = in_turn(then=chat_reply("<answer> 4 </answer> So.", reasoning_content=thinking))
    c, _ = asked(endpoint, "<think>")
    assert c.text == f" {thinking} </think> <answer> 4 </answer>"
    assert c.stop_reason == "</answer>"


@pytest.mark.parametrize("content", ["", None])
def test_a_thinking_without_an_end_has_no_closing_tag(endpoint, content):
    endpoint.answer = in_turn(chat_reply(content, finish="length", reasoning="on and on"))
    c, _ = asked(endpoint, "2+2= <think>")
    assert (c.text, c.finish_reason, c.stop_reason) == (" on and on", "length", None)
    endpoint.answer = in_turn(chat_reply(content, finish="length", reasoning="on and on"))
    assert asked(endpoint, "2+2=")[0].text == " <think> on and on"


def test_a_null_thinking_is_none_and_an_odd_one_fails(endpoint):
    endpoint.answer = in_turn(
        chat_reply("4 </answer>", reasoning_content=None, reasoning=None, stop_reason="</answer>")
    )
    c, sampler = asked(endpoint, "2+2=")
    assert c.text == "4 </answer>"
    assert not sampler.notes
    endpoint.answer = in_turn(then=chat_reply("4 </answer>", reasoning_content=["a"]))
    with pytest.raises(RlvrError, match="the answer's reasoning_content is a list"):
        asked(endpoint, "2+2=", max_retries=0)


def test_a_thinking_hides_the_key(endpoint):
    endpoint.answer = in_turn(
        chat_reply("4 </answer>", reasoning_content=f"my key is {CANARY}", stop_reason="</answer>")
    )
    assert asked(endpoint, "<think>")[0].text == " my key is [key] </think> 4 </answer>"
