"""A thinking budget: what it cuts, what it puts in, and what it leaves alone."""

from dataclasses import replace

import pytest
import torch

from rlvr_cli.errors import QuestionsRefused, RlvrError
from rlvr_cli.models.policy import Policy
from rlvr_cli.samplers import thinking_budget
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.samplers.thinking_budget import BudgetedSampler
from rlvr_cli.types import Completion, Request, SamplingParams

PROMPTS = ["What is 12 + 30?", "a b c"]
PARAMS = SamplingParams(max_tokens=60, min_tokens=0, stop=())
ENDING = " enough </think> <answer>"


def asked(samples=3):
    return [Request(p, tuple(100 * i + j for j in range(samples)), name=p) for i, p in enumerate(PROMPTS)]


def answers(sampler, requests, params) -> dict[tuple[int, int], Completion]:
    done = {(c.request_index, c.sample_index): c for c in sampler.sample(requests, params)}
    assert sorted(done) == [(i, j) for i, r in enumerate(requests) for j in range(len(r.seeds))]
    return done


@pytest.mark.parametrize("budget", [0, 1, 7, 19])
def test_the_answer_is_sampled_after_the_thinking_as_it_is(tiny_model, tiny_tokenizer, budget):
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    plain = answers(sampler, asked(), PARAMS)
    budgeted = BudgetedSampler(sampler, tiny_tokenizer, budget=budget, stop_thinking=ENDING)
    ending = tuple(tiny_tokenizer(ENDING, add_special_tokens=False)["input_ids"])
    ended = 0
    for key, found in answers(budgeted, asked(), PARAMS).items():
        whole = plain[key]
        assert found.prompt_ids == whole.prompt_ids
        assert found.token_ids[:budget] == whole.token_ids[:budget]
        assert found.logprobs[:budget] == pytest.approx(whole.logprobs[:budget], abs=1e-5)
        if found.response_mask is None:  # it had ended before
            assert found.token_ids == whole.token_ids
            continue
        ended += 1
        start = budget + len(ending)
        assert found.token_ids[budget:start] == ending
        assert start < len(found.token_ids) <= PARAMS.max_tokens
        assert found.finish_reason == "stop" or len(found.token_ids) == PARAMS.max_tokens
        assert [i for i, sampled in enumerate(found.response_mask) if not sampled] == [*range(budget, start)]
        policy = [(turn.start, turn.end) for turn in found.turns if turn.role == "policy"]
        assert policy == [span for span in ((0, budget), (start, len(found.token_ids))) if span[0] < span[1]]
        assert found.num_tokens == len(found.token_ids) == len(found.logprobs)
        assert found.text == tiny_tokenizer.decode(found.token_ids, skip_special_tokens=True)
        with torch.no_grad():
            log_p = tiny_model(torch.tensor([found.prompt_ids + found.token_ids])).logits[0].double().log_softmax(-1)
        entropies = []
        for i, sampled in enumerate(found.response_mask):
            at = len(found.prompt_ids) + i - 1
            expected = float(log_p[at, found.token_ids[i]]) if sampled else 0.0
            assert found.logprobs[i] == pytest.approx(expected, abs=1e-4)
            entropies += [float(-(log_p[at].exp() * log_p[at]).sum())] if sampled else []
        assert found.mean_entropy == pytest.approx(sum(entropies) / len(entropies), abs=1e-4)
    assert ended > 2


def test_two_samples_of_a_question_have_different_answers(tiny_model, tiny_tokenizer):
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    budgeted = BudgetedSampler(sampler, tiny_tokenizer, budget=0, stop_thinking=ENDING)
    found = answers(budgeted, asked(4), PARAMS)
    assert len({c.token_ids for (i, _), c in found.items() if i == 0}) == 4
    assert {k: c.token_ids for k, c in answers(budgeted, asked(4), PARAMS).items()} == {
        k: c.token_ids for k, c in found.items()
    }


class Scripted:
    """A sampler that says the same to everything: `thinking`, and to what goes on from its ids, `answer`; a token per string."""

    engine, seeding, notes, policy_version, worked_seconds = "scripted", "per-request", (), 3, None

    def __init__(self, tokenizer, thinking: list[str], answer: list[str]) -> None:
        self.tokenizer, self.parts, self.calls = tokenizer, (thinking, answer), []

    def sample(self, requests, params):
        self.calls.append((requests, params))
        for i, request in enumerate(requests):
            tokens = self.parts[request.prompt_ids is not None]
            ids, ended = [], None
            for token in tokens[: params.max_tokens]:
                ids += self.tokenizer(token, add_special_tokens=False)["input_ids"]
                text = self.tokenizer.decode(ids)
                found = [(text.index(s) + len(s), s) for s in params.stop if s in text]
                if found and len(ids) > params.min_tokens:
                    end, ended = min(found)
                    text = text[:end]
                    break
            for j in range(len(request.seeds)):
                count, prompt = len(ids), request.prompt_ids or (5, 6)
                reason = "stop" if ended else "length"
                yield Completion(
                    i, j, text, prompt, tuple(ids), (-0.5,) * count, len(prompt), count, reason, ended, None
                )


def test_thinking_that_ends_by_itself_is_left_alone(tiny_tokenizer):
    scripted = Scripted(tiny_tokenizer, ["1", "+", "1", "</think> x"], ["=", "2", "</answer> and more"])
    budgeted = BudgetedSampler(scripted, tiny_tokenizer, budget=90, stop_thinking=ENDING)
    params = SamplingParams(max_tokens=400, min_tokens=4, stop=("</answer>",))
    (found,) = budgeted.sample([Request("p", (9,))], params)
    ending = len(tiny_tokenizer(ENDING, add_special_tokens=False)["input_ids"])
    assert (found.response_mask, found.turns) == (None, None)
    assert found.text == "1+1</think> x=2</answer>", "the token that ends the thinking is not cut, the last one is"
    ((continued,), _) = scripted.calls[2]
    thinking = len(continued.prompt_ids) - 2
    assert continued.prompt_ids == (5, 6, *found.token_ids[:thinking])
    assert tiny_tokenizer.decode(found.token_ids[thinking:]) == "=2</answer> and more"
    assert (found.finish_reason, found.stop_reason, found.prompt_ids) == ("stop", "</answer>", (5, 6))
    assert scripted.calls[2][1] == SamplingParams(max_tokens=310 - ending, min_tokens=0, stop=("</answer>",))
    assert budgeted.policy_version == 3


@pytest.mark.parametrize("last", ["</answer>", "eos"])
def test_a_response_that_ends_while_thinking_has_no_answer(tiny_tokenizer, last):
    scripted = Scripted(tiny_tokenizer, ["1", "2", "3", "4", "5", last], ["never"])
    budgeted = BudgetedSampler(scripted, tiny_tokenizer, budget=90, stop_thinking=ENDING)
    params = SamplingParams(max_tokens=200, min_tokens=0, stop=("</answer>", "eos"))
    (found,) = budgeted.sample([Request("p", (9,))], params)
    assert (found.text, found.response_mask, len(scripted.calls)) == (f"12345{last}", None, 2)


def test_a_thought_that_ended_unseen_is_not_ended_again(tiny_tokenizer):
    """Among the first `min_tokens` tokens no stop string ends a response."""
    scripted = Scripted(tiny_tokenizer, ["</think>", *"12345678"], ["9", "</answer>"])
    budgeted = BudgetedSampler(scripted, tiny_tokenizer, budget=5, stop_thinking=ENDING)
    params = SamplingParams(max_tokens=100, min_tokens=50, stop=("</answer>",))
    (found,) = budgeted.sample([Request("p", (9,))], params)
    assert ENDING not in found.text
    assert found.response_mask is None
    assert scripted.calls[1][1].min_tokens == 5
    assert scripted.calls[2][1].min_tokens == 45


def test_a_prompt_that_leaves_no_room_is_refused_before_anybody_thinks(tiny_model, tiny_tokenizer):
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    budgeted = BudgetedSampler(sampler, tiny_tokenizer, budget=2, stop_thinking=ENDING)
    with pytest.raises(RlvrError, match="the model's context holds 512"):
        next(budgeted.sample(asked(), replace(PARAMS, max_tokens=510)))
    ending = len(thinking_budget.token_ids(tiny_tokenizer, ENDING))
    with pytest.raises(RlvrError, match="leave none for the answer") as refused:
        next(budgeted.sample(asked(), replace(PARAMS, max_tokens=ending + 1)))
    assert "lower --thinking-budget" in refused.value.hint
    with pytest.raises(RlvrError, match=f"the {ending} that end it leave none") as refused:
        next(budgeted.sample(asked(), replace(PARAMS, max_tokens=ending)))
    assert "shorter --stop-thinking" in refused.value.hint
    assert "--thinking-budget" not in refused.value.hint


def test_groups_are_one_after_the_other(tiny_model, tiny_tokenizer, monkeypatch):
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    budgeted = BudgetedSampler(sampler, tiny_tokenizer, budget=3, stop_thinking=ENDING)
    at_once = {key: c.token_ids for key, c in answers(budgeted, asked(), PARAMS).items()}
    monkeypatch.setattr(thinking_budget, "GROUP", 3)
    found = list(budgeted.sample(asked(), PARAMS))
    assert [c.request_index for c in found] == [0, 0, 0, 1, 1, 1]
    assert {(c.request_index, c.sample_index): c.token_ids for c in found} == at_once


class Refusing(Scripted):
    """As an endpoint does, it answers all others first. It refuses "early" to think, and "late" to go on."""

    def sample(self, requests, params):
        refused = []
        for completion in super().sample(requests, params):
            request = requests[completion.request_index]
            if request.name == ("late" if request.prompt_ids else "early"):
                refused.append(request.name)
            else:
                yield completion
        if refused:
            raise QuestionsRefused(f"Refused: {refused}.", "Leave them out.")


def test_questions_that_are_refused_keep_no_others_from_being_answered(tiny_tokenizer, monkeypatch):
    """Nor those of later groups."""
    monkeypatch.setattr(thinking_budget, "GROUP", 3)
    refusing = Refusing(tiny_tokenizer, ["1", "2"], ["3", "</answer>"])
    budgeted = BudgetedSampler(refusing, tiny_tokenizer, budget=2, stop_thinking=ENDING)
    names = ["early", "late", "a", "b", "early", "c", "d"]
    found = []
    with pytest.raises(QuestionsRefused, match=r"\['early'\].*\['late'\].*\['early'\]") as refused:
        found.extend(budgeted.sample([Request("p", (9,), name=name) for name in names], PARAMS))
    assert refused.value.hint == "Leave them out."
    assert [names[completion.request_index] for completion in found] == ["a", "b", "c", "d"]
