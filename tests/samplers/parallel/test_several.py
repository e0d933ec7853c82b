"""Several samplers as one: how they divide requests, and what becomes of errors."""

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from following import Following
from rlvr_cli.errors import QuestionsRefused, RlvrError
from rlvr_cli.samplers.parallel.several import OfAll, SeveralSamplers, divide
from rlvr_cli.types import Completion, Request, SamplingParams

REQUESTS = [Request("a", (1, 2)), Request("b", (3,)), Request("c", (4, 5, 6))]


class Counting:
    """A sampler whose answer to a seed is the seed. It raises `error` after so many completions."""

    def __init__(self, error: Exception | None = None, *, after: int = 0) -> None:
        self.error, self.after, self.asked = error, after, []

    def sample(self, requests, params):
        for i, request in enumerate(requests):
            for j, seed in enumerate(request.seeds):
                if self.error is not None and len(self.asked) >= self.after:
                    raise self.error
                self.asked.append(seed)
                yield Completion(i, j, request.prompt, (), (seed,), (0.0,), 0, 1, "stop", None, None)


def answers(sampler) -> dict:
    return {
        (c.request_index, c.sample_index): (c.text, c.token_ids[0]) for c in sampler.sample(REQUESTS, SamplingParams())
    }


WHOLE = answers(Counting())


@given(st.lists(st.integers(0, 4), max_size=8), st.integers(1, 5))
def test_each_sample_is_asked_of_one_and_those_of_a_request_of_the_same(counts, number):
    samples = {(i, j) for i, count in enumerate(counts) for j in range(count)}
    names = [f"s{k}" for k in range(number)]
    shares = divide(samples, names)
    assert [*shares] == names
    dealt = [(i, j) for share in shares.values() for i, indices in share for j in indices]
    assert sorted(dealt) == sorted(samples)
    requests = [i for share in shares.values() for i, _ in share]
    assert len(requests) == len(set(requests))
    sizes = [len(share) for share in shares.values()]
    assert max(sizes) - min(sizes) <= 1


def test_they_answer_as_one_does():
    members = {"one": Counting(), "two": Counting()}
    assert answers(SeveralSamplers(members)) == WHOLE
    assert {name: sorted(member.asked) for name, member in members.items()} == {"one": [1, 2, 4, 5, 6], "two": [3]}


@pytest.mark.parametrize("after", range(5))
def test_what_one_leaves_unanswered_the_others_answer(after):
    gone = Counting(RlvrError("It is gone."), after=after)
    several = SeveralSamplers({"one": gone, "two": Counting()})
    assert answers(several) == WHOLE
    assert several.left_out == ("The sampler one is left out: It is gone.",)
    assert [*several.members] == ["two"]


def test_the_last_ones_error_and_any_fault_of_ours_is_raised():
    gone = RlvrError("It is gone.")
    with pytest.raises(RlvrError, match="It is gone"):
        answers(SeveralSamplers({"one": Counting(gone), "two": Counting(gone, after=2)}))
    with pytest.raises(ZeroDivisionError):
        answers(SeveralSamplers({"one": Counting(ZeroDivisionError()), "two": Counting()}))


def test_an_error_that_all_would_meet_leaves_no_one_out():
    several = SeveralSamplers({"one": Counting(OfAll("It takes too long.")), "two": Counting()})
    with pytest.raises(RlvrError, match="takes too long"):
        answers(several)
    assert [*several.members] == ["one", "two"]


class Refusing(Counting):
    """It refuses some seeds, and says so when it has answered all others, as an endpoint does."""

    def __init__(self, *refused: int) -> None:
        super().__init__()
        self.refused = refused

    def sample(self, requests, params, **more):
        found = []
        for completion in super().sample(requests, params, **more):
            if completion.token_ids[0] in self.refused:
                found += completion.token_ids
            else:
                yield completion
        if found:
            raise QuestionsRefused(f"Refused: {found}.", "Leave them out.")


def test_a_question_that_one_refuses_is_not_asked_of_another_and_leaves_no_one_out():
    members, found = {"one": Refusing(2, 4), "two": Refusing(3)}, []
    several = SeveralSamplers(members)
    with pytest.raises(QuestionsRefused, match=r"Refused: \[") as refused:
        found.extend(several.sample(REQUESTS, SamplingParams()))
    assert {"[2, 4]", "[3]"} == set(re.findall(r"\[.*?\]", refused.value.problem))
    assert sorted(c.token_ids[0] for c in found) == [1, 5, 6]
    assert {name: sorted(member.asked) for name, member in members.items()} == {"one": [1, 2, 4, 5, 6], "two": [3]}
    assert ([*several.members], several.left_out) == (["one", "two"], ())


def test_a_call_that_was_closed_does_not_reach_into_the_next():
    several = SeveralSamplers({"one": Counting(), "two": Counting()})
    completions = several.sample(REQUESTS, SamplingParams())
    next(completions)
    completions.close()
    assert answers(several) == WHOLE


# --- requests that come -----------------------------------------------------------------------------------------------


class Joining(Counting):
    """One whose call takes further requests. Its answers take a moment."""

    def sample(self, requests, params, *, more):
        coming, number = [*requests], 0
        while number < len(coming) or (coming := coming + more.take(wait=True))[number:]:
            time.sleep(0.002)
            for completion in super().sample([coming[number]], params):
                yield replace(completion, request_index=number)
            number += 1
            coming += more.take(wait=False)
        if self.error is not None and len(self.asked) >= self.after:
            raise self.error


def next_of(c: Completion) -> Request:
    return Request("t", (10 * c.token_ids[0],), after=(c.request_index, c.sample_index))


def turns_of(several, more: Following) -> Iterator[Completion]:
    for completion in several.sample(REQUESTS, SamplingParams(), more=more):
        more.add(completion)
        yield completion


def all_of(several) -> tuple[dict, Following]:
    """Each answer to a seed is followed by a request for ten times the seed, three times."""
    more, found = Following(REQUESTS, next_of, turns=3), {}
    for completion in turns_of(several, more):
        assert (completion.request_index, completion.sample_index) not in found
        found[completion.request_index, completion.sample_index] = completion.token_ids[0]
    return found, more


TURNS = sorted(seed * 10**turn for seed in range(1, 7) for turn in range(4))


def test_what_comes_after_an_answer_is_asked_of_who_gave_it():
    members = {"one": Joining(), "two": Joining()}
    found, more = all_of(SeveralSamplers(members))
    assert sorted(found.values()) == TURNS
    assert {key: more.asked[key[0]].seeds[key[1]] for key in found} == found
    begun = {name: {int(str(seed)[0]) for seed in member.asked} for name, member in members.items()}
    assert begun == {"one": {1, 2, 4, 5, 6}, "two": {3}}


@pytest.mark.parametrize("after", [0, 1, 3, 6, 11])
def test_what_one_leaves_unanswered_of_what_comes_the_others_answer(after):
    several = SeveralSamplers({"one": Joining(RlvrError("It is gone."), after=after), "two": Joining()})
    found, more = all_of(several)
    assert sorted(found.values()) == TURNS
    assert {key: more.asked[key[0]].seeds[key[1]] for key in found} == found
    assert [*several.members] == ["two"]


def test_what_one_leaves_unanswered_is_asked_of_the_others_while_they_work():
    class Patient(Counting):
        """It answers nothing before it has been asked for more."""

        calls = 0

        def sample(self, requests, params, *, more):
            self.calls += 1
            coming, until = [*requests], time.monotonic() + 5
            while len(coming) < 3 and time.monotonic() < until:
                coming += more.take(wait=False)
                time.sleep(0.001)
            for number, request in enumerate(coming):
                for completion in super().sample([request], params):
                    yield replace(completion, request_index=number)
            assert not more.take(wait=True)

    patient = Patient()
    several = SeveralSamplers({"one": Joining(RlvrError("It is gone.")), "two": patient})
    more = Following(REQUESTS, lambda c: None, turns=0)
    found = {(c.request_index, c.sample_index): c for c in several.sample(REQUESTS, SamplingParams(), more=more)}
    assert {key: (c.text, c.token_ids[0]) for key, c in found.items()} == WHOLE
    assert (patient.calls, patient.asked) == (1, [3, 1, 2, 4, 5, 6])
    assert several.left_out == ("The sampler one is left out: It is gone.",)


def test_what_has_come_is_seen_at_once():
    """Not only when somebody has answered: here one waits for what comes, and the other for the end of that."""
    over = threading.Event()

    class Long(Joining):
        def sample(self, requests, params, *, more):
            assert over.wait(20)
            yield from super().sample(requests, params, more=more)

    first = [Request("a", (1,)), Request("b", (2,))]
    more = Following(first, lambda c: Request("t", (c.token_ids[0] + 2,), after=(c.request_index, 0)), turns=3)
    order = []
    for completion in SeveralSamplers({"one": Joining(), "two": Long()}).sample(first, SamplingParams(), more=more):
        more.add(completion)
        order.append(completion.token_ids[0])
        if completion.token_ids[0] == 7:
            over.set()
    assert order[:4] == [1, 3, 5, 7]
    assert sorted(order) == [*range(1, 9)]


def test_one_that_fails_a_sample_and_waits_for_more_is_left_out():
    """An endpoint says what has failed when it has no more to do."""

    class Failing(Joining):
        def sample(self, requests, params, *, more):
            yield from super().sample([r for r in requests if 3 not in r.seeds], params, more=more)
            raise RlvrError("A sample failed.")

    several = SeveralSamplers({"one": Joining(), "two": Failing()})
    found, _ = all_of(several)
    assert sorted(found.values()) == TURNS
    assert several.left_out == ("The sampler two is left out: A sample failed.",)


class RefusingAndJoining(Refusing, Joining):
    """It says what it has refused when it waits for more."""


class Late(RefusingAndJoining):
    """It says so when it has been given something that it does not take any more."""

    def sample(self, requests, params, *, more):
        try:
            yield from super().sample(requests, params, more=more)
        except QuestionsRefused:
            given, until = len(more.places), time.monotonic() + 1
            while len(more.places) == given and time.monotonic() < until:
                time.sleep(0.001)
            raise


@pytest.mark.parametrize(("one", "of_two"), [(RefusingAndJoining, 3), (Late, 3), (Late, 0)])
def test_what_comes_is_answered_also_when_questions_have_been_refused(one, of_two):
    """By others, or in calls of its own where all have refused something."""
    several, found = SeveralSamplers({"one": one(1), "two": RefusingAndJoining(of_two)}), []
    with pytest.raises(QuestionsRefused, match=r"Refused: \[1\]"):
        found.extend(turns_of(several, Following(REQUESTS, next_of, turns=3)))
    refused = str(1), str(of_two)
    assert sorted(c.token_ids[0] for c in found) == [seed for seed in TURNS if not str(seed).startswith(refused)]
    assert ([*several.members], several.left_out) == (["one", "two"], ())


def test_a_call_that_was_closed_leaves_nobody_waiting():
    several = SeveralSamplers({"one": Joining(), "two": Joining()})
    more = Following(REQUESTS, lambda c: Request("t", (7,)), turns=1)
    completions = several.sample(REQUESTS, SamplingParams(), more=more)
    more.add(next(completions))
    completions.close()
    several.settle()
    assert sorted(all_of(several)[0].values()) == TURNS
