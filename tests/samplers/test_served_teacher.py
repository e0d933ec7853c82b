"""A teacher on a vLLM server."""

import threading

import pytest
import torch

from endpoint import Reply, error, serving
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.models.load import load_policy
from rlvr_cli.samplers import served_teacher
from rlvr_cli.samplers.served_teacher import ServedTeacher
from vllm_server import vllm_servers

ROWS = [([5, 9, 11], [7, 8]), ([3], [12, 13, 14, 15]), ([4, 6], [9])]


def expected() -> list[list[float]]:
    policy = load_policy(builtin_model_path(), device="cpu")
    found = []
    for prompt, response in ROWS:
        with torch.inference_mode():
            log_p = policy.forward(input_ids=torch.tensor([prompt + response])).logits[0].double().log_softmax(-1)
        found.append([float(log_p[len(prompt) - 1 + i, token]) for i, token in enumerate(response)])
    return found


def test_each_token_of_a_response_gets_its_log_probability():
    with vllm_servers(builtin_model_path(), 1) as (server,):
        found = ServedTeacher(f"{server.url}/", "whatever the one model is called").log_probs(ROWS)
    for row, exact in zip(found, expected(), strict=True):
        assert row == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Reply({"choices": [{"text": "x"}]}), "no log-probabilities of the 5 tokens"),
        (Reply({"choices": []}), "no log-probabilities of the 5 tokens"),
        (Reply({"choices": [{"prompt_logprobs": [None] + [{"1": {"logprob": -1.0}}] * 4}]}), "of other tokens"),
        (Reply({"choices": [{"prompt_logprobs": [None] + [None] * 4}]}), "of other tokens"),
        (Reply("<html>"), "no JSON object"),
        (Reply([1]), "no JSON object"),
        (error(400, "prompt_logprobs are off"), "answered 400: .*prompt_logprobs are off"),
        (Reply(status=0), "does not answer"),
    ],
)
def test_an_odd_answer_is_an_error_that_names_the_server(reply, problem, monkeypatch):
    monkeypatch.setattr(served_teacher, "PAUSES", (0.0, 0.0))
    models = Reply({"data": [{"id": "t"}]})
    with serving(lambda body: reply if body else models, lists=True) as endpoint:
        teacher = ServedTeacher(endpoint.url.removesuffix("/v1"), "t")
        with pytest.raises(RlvrError, match=problem) as raised:
            teacher.log_probs(ROWS[:1])
    assert endpoint.url.removesuffix("/v1") in raised.value.problem


def test_a_server_of_other_models_is_refused():
    with serving(lambda _: Reply({"data": [{"id": "a"}, {"id": "b"}]}), lists=True) as endpoint:
        assert ServedTeacher(endpoint.url.removesuffix("/v1"), "b").log_probs([]) == []
        with pytest.raises(RlvrError, match="serves a, b, and not c"):
            ServedTeacher(endpoint.url.removesuffix("/v1"), "c")


@pytest.mark.parametrize(("said", "takes"), [(6, 5), (5, 4), (0, None), (None, None), ("5", None)])
def test_a_response_that_is_too_long_is_not_sent(said, takes):
    """A token more is sampled after it."""
    good = Reply({"choices": [{"prompt_logprobs": [None] + [{str(i): {"logprob": -1.0}} for i in (9, 11, 7, 8)]}]})
    models = Reply({"data": [{"id": "t", "max_model_len": said}]})
    with serving(lambda body: good if body else models, lists=True) as endpoint:
        teacher = ServedTeacher(endpoint.url.removesuffix("/v1"), "t")
        assert teacher.context_length == takes
        if takes == 4:
            with pytest.raises(RlvrError, match=r"have 5 tokens, and the teacher's server at http\S+ takes 4"):
                teacher.log_probs(ROWS[:1])
        else:
            assert teacher.log_probs(ROWS[:1]) == [[-1.0, -1.0]]


@pytest.mark.parametrize(
    "trouble",
    [[Reply(status=0)] * 2, [error(429, "slow down"), error(503, "overloaded")], [error(502, ""), error(504, "")]],
    ids=["drops", "is busy", "is behind a gateway"],
)
def test_a_server_that_may_answer_later_is_asked_again(monkeypatch, trouble):
    monkeypatch.setattr(served_teacher, "PAUSES", (0.0, 0.0))
    good = Reply({"choices": [{"prompt_logprobs": [None] + [{str(i): {"logprob": -1.0}} for i in (9, 11, 7, 8)]}]})
    replies = iter([*trouble, good])
    models = Reply({"data": [{"id": "t"}]})
    with serving(lambda body: next(replies) if body else models, lists=True) as endpoint:
        teacher = ServedTeacher(endpoint.url.removesuffix("/v1"), "t")
        assert teacher.log_probs(ROWS[:1]) == [[-1.0, -1.0]]
    assert next(replies, None) is None


def test_what_is_answered_late_keeps_its_place():
    other_is_done = threading.Event()

    def answer(body: dict) -> Reply:
        if not body:
            return Reply({"data": [{"id": "t"}]})
        token = body["prompt"][1]
        said = {"choices": [{"prompt_logprobs": [None, {str(token): {"logprob": -float(token)}}]}]}
        return Reply(said, after=other_is_done if token == 7 else None)

    with serving(answer, lists=True) as endpoint:
        teacher = ServedTeacher(endpoint.url.removesuffix("/v1"), "t")
        assert teacher.log_probs([([1], [7]), ([1], [8])], progress=other_is_done.set) == [[-7.0], [-8.0]]
