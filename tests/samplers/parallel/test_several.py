"""Several samplers as one: how they divide requests, and what becomes of errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_cli.errors import RlvrError
from rlvr_cli.samplers.parallel.several import SeveralSamplers, divide
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


def test_a_call_that_was_closed_does_not_reach_into_the_next():
    several = SeveralSamplers({"one": Counting(), "two": Counting()})
    completions = several.sample(REQUESTS, SamplingParams())
    next(completions)
    completions.close()
    assert answers(several) == WHOLE
