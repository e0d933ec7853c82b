"""Requests that join a running call of the embedded engine: they are answered as if each had been asked alone."""

import itertools
import random
from collections import Counter, deque

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_cli.models.policy import Policy
from rlvr_cli.samplers.embedded import batch, cache, questions
from rlvr_cli.samplers.embedded.cache import RowCache, Workspace, make_slots
from rlvr_cli.samplers.embedded.decode_step import DecodeStep
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.samplers.stop_strings import StopStrings
from rlvr_cli.types import Completion, Request, SamplingParams

PROMPTS = ([7, 8, 9], list(range(20, 45)), [60], [61, 62, 63, 64, 65, 66])
PARAMS = SamplingParams(max_tokens=12, min_tokens=0, stop=())


class Turns:
    """Follows each completion with up to two others, whose prompts add some tokens: at once, after some steps, or by the end."""

    most_tokens = 90

    def __init__(self, draw: random.Random, *, prompts=PROMPTS, samples: int = 3, turns: int = 3) -> None:
        self._draw, self._turns = draw, turns
        self.asked = [
            Request("", tuple(draw.getrandbits(40) for _ in range(samples)), prompt_ids=(*p,)) for p in prompts
        ]
        self._keys = [[(i, 0)] * samples for i in range(len(prompts))]  # the turns before
        self._waiting: list[tuple[int, Request, int]] = []  # steps, request, turns before
        self._over: set[tuple[int, int]] = set()
        self.joined = 0

    def add(self, completion: Completion) -> None:
        key = completion.request_index, completion.sample_index
        before = self._keys[key[0]][key[1]][1]
        if before + 1 == self._turns or self._draw.random() < 0.4:
            self._over.add(key)
            return
        said = tuple(self._draw.randrange(2, 300) for _ in range(self._draw.choice((0, 1, 3, 9))))
        ids = completion.prompt_ids + completion.token_ids + said
        most = self._draw.choice((None, 1, 5))
        request = Request("", (self._draw.getrandbits(40),), prompt_ids=ids, after=key, max_tokens=most)
        self._waiting.append((self._draw.choice((0, 1, 4, 12, 50)), request, before + 1))

    def awaits(self, key: tuple[int, int]) -> bool:
        return key not in self._over

    def take(self, *, wait: bool) -> list[Request]:
        self._waiting = [(0 if wait else steps - 1, *rest) for steps, *rest in self._waiting]
        come = [entry for entry in self._waiting if entry[0] <= 0]
        self._waiting = [entry for entry in self._waiting if entry[0] > 0]
        for _, request, before in come:
            self._keys.append([(len(self.asked), before)])
            self.asked.append(request)
        self.joined += len(come)
        return [request for _, request, _ in come]


def answered(sampler: TransformersSampler, turns: Turns) -> list[Completion]:
    done = []
    for completion in sampler.sample(list(turns.asked), PARAMS, more=turns):
        done.append(completion)
        turns.add(completion)
    return done


def assert_as_asked_alone(sampler: TransformersSampler, turns: Turns, done: list[Completion]) -> None:
    assert len(done) == sum(len(request.seeds) for request in turns.asked)
    alone = {(c.request_index, c.sample_index): c for c in sampler.sample(turns.asked, PARAMS)}
    for completion in done:
        other = alone[completion.request_index, completion.sample_index]
        assert (completion.prompt_ids, completion.token_ids) == (other.prompt_ids, other.token_ids)
        torch.testing.assert_close(completion.logprobs, other.logprobs, atol=1e-4, rtol=0)


def test_turns_that_join_are_those_that_are_asked_alone(tiny_model, tiny_tokenizer):
    """However late they come, how many rows there are, how long a row waits for them, and whether rows are ordered meanwhile."""
    tiny_model.generation_config.eos_token_id = [tiny_tokenizer.eos_token_id, *range(288, 312)]
    moved = Counter[bool]()  # rows that were ordered: whether they waited

    def moving(rows: RowCache, to, of, move=RowCache._move_rows) -> None:
        moved.update(rows.parked[of].tolist())
        move(rows, to, of)

    @settings(max_examples=12, derandomize=True)
    @given(st.integers(0, 2**30), st.sampled_from((3, 7, 12, 40)), st.sampled_from((1, 4, 32)), st.booleans())
    def check(seed: int, rows: int, parked: int, ordered: bool) -> None:
        sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer), max_batch_size=rows)
        turns = Turns(random.Random(seed))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(questions, "PARKED_STEPS", parked)
            if ordered:
                patch.setattr(RowCache, "_move_rows", moving)
                for name, value in (("_BLOCK", 2), ("_BLOCK_BYTES", 0), ("_ORDER_COST", 0)):
                    patch.setattr(cache, name, value)
            done = answered(sampler, turns)
        assert turns.joined
        assert_as_asked_alone(sampler, turns, done)

    check()
    assert moved[True] > 5 < moved[False], moved


def recorded(patch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of each pass for rows that go on."""
    passes, extend = [], DecodeStep.extend

    def recording(step, extension, *, cache):
        passes.append(extension.new.tokens.tolist())
        return extend(step, extension, cache=cache)

    patch.setattr(DecodeStep, "extend", recording)
    return passes


def test_of_a_turn_that_joins_only_what_is_new_is_computed(tiny_model, tiny_tokenizer, monkeypatch):
    sampler, passes = TransformersSampler(Policy(tiny_model, tiny_tokenizer)), recorded(monkeypatch)
    turns, prefilled, prefill = Turns(random.Random(0), turns=2), [], RowCache.prefill
    monkeypatch.setattr(
        RowCache, "prefill", lambda cache, ids, **asked: prefilled.append(ids) or prefill(cache, ids, **asked)
    )
    done = answered(sampler, turns)
    assert sorted(prefilled[0], key=len) == sorted((list(prompt[:-1]) for prompt in PROMPTS), key=len)
    assert len(prefilled) == 1
    news = [request.prompt_ids[len(before(request, done)) - 1 : -1] for request in turns.asked[len(PROMPTS) :]]
    assert sorted(itertools.chain(*passes)) == sorted(itertools.chain(*news))
    assert_as_asked_alone(sampler, turns, done)


def before(request: Request, done: list[Completion]) -> tuple[int, ...]:
    """The tokens of the turn before."""
    (last,) = (c for c in done if (c.request_index, c.sample_index) == request.after)
    return last.prompt_ids + last.token_ids


def batch_of(sampler, tokenizer, *, rows, max_tokens, over):
    """A batch that keeps rows unless (request, sample) is in `over`."""
    slots = make_slots(sampler._empty_prefix, rows=rows, columns=90)
    rows_of = RowCache(sampler._policy, Workspace(slots, step=sampler._new_step(90)))
    params = SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens, stop=())
    stops = StopStrings(tokenizer, (), vocab_size=320)
    return batch.Batch(rows_of, params=params, eos=(), stops=stops, awaits=lambda key: key not in over)


def question(rows: batch.Batch, index: int, prompt: list[int]) -> questions.Question:
    return questions.Question(index, prompt, deque([(0, 3), (1, 4)]), *rows.cache.prefill([prompt[:-1]]))


def test_rows_that_nothing_comes_after_are_freed(tiny_model, tiny_tokenizer):
    """As soon as it is known; the others wait for as many steps as are allowed."""
    sampler, over, found = TransformersSampler(Policy(tiny_model, tiny_tokenizer)), set(), []
    with sampler._sampling():
        rows = batch_of(sampler, tiny_tokenizer, rows=2, max_tokens=2, over=over)
        rows.seat(question(rows, 0, [7, 8, 9]))
        rows.advance()
        assert {completion.sample_index for completion in rows.advance()} == {0, 1}
        assert (rows.live, rows.used) == (0, 2)
        over.add((0, 0))
        for _ in range(questions.PARKED_STEPS + 1):
            found.append(rows.used)
            rows.advance()
    assert (found, rows.used) == ([2, *[1] * questions.PARKED_STEPS], 0)


@torch.no_grad()
def test_a_row_that_waits_may_be_moved_and_its_place_taken(tiny_model, tiny_tokenizer):
    sampler, over = TransformersSampler(Policy(tiny_model, tiny_tokenizer)), {(0, 0), (0, 1)}
    with sampler._sampling():
        rows = batch_of(sampler, tiny_tokenizer, rows=4, max_tokens=1, over=over)
        rows.seat(question(rows, 0, [7, 8, 9]))
        rows.seat(question(rows, 1, [60, 61, 62, 63]))
        said = {completion.sample_index: completion for completion in rows.advance() if completion.request_index == 1}
        rows.advance()
        assert (rows.live, rows.used) == (0, 2)
        rows.arrange()
        rows.seat(question(rows, 2, [70, 71]))
        ids = [*said[1].prompt_ids, *said[1].token_ids, 80, 81]
        rows.parked.coming.append(questions.Question(3, ids, deque([(0, 9)]), after=(1, 1)))
        assert rows.resume() == []
        assert (rows.live, rows.used, rows.parked.coming) == (3, 4, [])
        logits = rows.cache.forward()
    for row, tokens in ((1, ids), (2, [70, 71]), (3, [70, 71])):
        plain = tiny_model(input_ids=torch.tensor([tokens])).logits[0, -1]
        torch.testing.assert_close(logits[row], plain, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_row_that_waits_longer_gives_its_place_to_others(tiny_model, tiny_tokenizer):
    """Its keys and values, with those that a turn before wrote out of order, come back into another row."""
    sampler, over = TransformersSampler(Policy(tiny_model, tiny_tokenizer)), set()
    with sampler._sampling():
        rows = batch_of(sampler, tiny_tokenizer, rows=3, max_tokens=1, over=over)
        rows.seat(question(rows, 0, [7, 8, 9]))
        said = {completion.sample_index: completion for completion in rows.advance()}
        ids = [*said[1].prompt_ids, *said[1].token_ids, 80, 81, 82, 83]
        rows.parked.coming.append(questions.Question(1, ids, deque([(0, 9)]), after=(0, 1)))
        assert rows.resume() == []
        (last,) = rows.advance()
        for _ in range(questions.TAKEN_OUT_STEPS - 1):
            rows.advance()
        rows.parked.coming.append(questions.Question(2, [], deque(), after=(0, 0)))
        rows.parked.take_out(rows.step)
        assert rows.used == 2  # what has come goes on in its row
        rows.parked.coming.clear()
        rows.parked.take_out(rows.step)
        assert (rows.live, rows.used) == (0, 1)  # the second turn's row waits since a step less
        rows.advance()
        rows.parked.take_out(rows.step)
        assert rows.used == 0
        rows.seat(question(rows, 2, [70, 71]))
        more = [*last.prompt_ids, *last.token_ids, 90, 91]
        for index, sample in ((3, (0, 0)), (4, (1, 0))):
            coming = more if sample == (1, 0) else [*said[0].prompt_ids, *said[0].token_ids, 95]
            rows.parked.coming.append(questions.Question(index, coming, deque([(0, 9)]), after=sample))
        assert rows.resume() == []
        assert (rows.live, [one.request_index for one in rows.parked.coming]) == (3, [4])  # one row was free
        logits = rows.cache.forward()
        plain = tiny_model(input_ids=torch.tensor([[*said[0].prompt_ids, *said[0].token_ids, 95]])).logits[0, -1]
        torch.testing.assert_close(logits[2], plain, atol=1e-4, rtol=1e-4)
        rows.cache.release([0])
        rows.step += batch.RESUME_STEPS
        assert rows.resume() == []
        logits = rows.cache.forward()
        plain = tiny_model(input_ids=torch.tensor([more])).logits[0, -1]
        torch.testing.assert_close(logits[0], plain, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_row_that_has_waited_is_taken_out_without_the_columns_of_that_time(tiny_model, tiny_tokenizer):
    sampler, over = TransformersSampler(Policy(tiny_model, tiny_tokenizer)), {(0, 1)}
    with sampler._sampling():
        rows = batch_of(sampler, tiny_tokenizer, rows=2, max_tokens=1, over=over)
        rows.seat(question(rows, 0, [7, 8, 9]))
        (said,) = (completion for completion in rows.advance() if completion.sample_index == 0)
        for _ in range(9):
            rows.advance()
        ids = [*said.prompt_ids, *said.token_ids, 80, 81]
        rows.parked.coming.append(questions.Question(1, ids, deque([(0, 9)]), after=(0, 0)))
        assert rows.resume() == []
        (last,) = rows.advance()
        for _ in range(questions.TAKEN_OUT_STEPS):
            rows.advance()
        assert rows.cache.known(0) == len(ids) + 1
        rows.parked.take_out(rows.step)
        assert rows.used == 0
        more = [*last.prompt_ids, *last.token_ids, 90]
        rows.parked.coming.append(questions.Question(2, more, deque([(0, 9)]), after=(1, 0)))
        assert rows.resume() == []
        logits = rows.cache.forward()
    plain = tiny_model(input_ids=torch.tensor([more])).logits[0, -1]
    torch.testing.assert_close(logits[0], plain, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_turn_with_an_answer_of_one_token_goes_on_without_a_pass(tiny_model, tiny_tokenizer, monkeypatch):
    """The step that runs meanwhile reads the turn's last token in its row, though other rows are freed before it."""
    sampler, passes = TransformersSampler(Policy(tiny_model, tiny_tokenizer)), recorded(monkeypatch)
    with sampler._sampling():
        rows = batch_of(sampler, tiny_tokenizer, rows=3, max_tokens=3, over={(0, 1)})
        rows.seat(
            questions.Question(0, [7, 8, 9], deque([(0, 3), (1, 4)]), *rows.cache.prefill([[7, 8]]), max_tokens=1)
        )
        rows.seat(questions.Question(1, [60, 61], deque([(0, 5)]), *rows.cache.prefill([[60]])))
        said = {completion.sample_index: completion for completion in rows.advance()}
        ids = [*said[0].prompt_ids, *said[0].token_ids, 80]
        rows.parked.coming.append(questions.Question(2, ids, deque([(0, 9)]), after=(0, 0)))
        assert rows.resume() == []
        assert rows.live == 1  # it waits for the step
        rows.advance()
        rows._resumed = rows.step  # no pass is due
        assert rows.resume() == []
        assert (rows.live, passes) == (2, [])
        logits = rows.cache.forward()
    plain = tiny_model(input_ids=torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(logits[0], plain, atol=1e-4, rtol=1e-4)


def test_what_was_taken_out_needs_not_wait_for_rows_that_wait(tiny_model, tiny_tokenizer):
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    with sampler._sampling():
        rows = batch_of(sampler, tiny_tokenizer, rows=2, max_tokens=1, over=set())
        for index in (0, 1):
            rows.seat(question(rows, index, [7, 8, 9]))
            for _ in range(1 + questions.TAKEN_OUT_STEPS):
                rows.advance()
            if not index:
                rows.parked.take_out(rows.step)
        sampler._admit(rows, deque(), deque(), shared_bytes=0)
        assert (rows.live, rows.used) == (0, 2)  # nothing has come
        ids = [7, 8, 9, int(rows.drawn.tokens[0, 0]), 60]
        rows.parked.coming.append(questions.Question(2, ids, deque([(0, 9)]), after=(0, 0)))
        sampler._admit(rows, deque(), deque(), shared_bytes=0)
        assert (rows.live, rows.parked.coming) == (1, [])


def test_what_is_taken_out_has_a_limit_and_an_end(tiny_model, tiny_tokenizer, monkeypatch):
    sampler, over = TransformersSampler(Policy(tiny_model, tiny_tokenizer)), set()
    with sampler._sampling():
        rows = batch_of(sampler, tiny_tokenizer, rows=2, max_tokens=1, over=over)
        monkeypatch.setattr(questions, "TAKEN_OUT_SHARE", 4 / 180)  # of 2 x 90 columns: one row's four tokens
        rows.seat(question(rows, 0, [7, 8, 9]))
        rows.advance()
        for _ in range(questions.TAKEN_OUT_STEPS):
            rows.advance()
        rows.parked.take_out(rows.step)
        assert rows.used == 1
        assert rows.parked.expects(questions.Question(1, [7], deque(), after=(0, 0)))
        over |= {(0, 0), (0, 1)}
        rows.advance()
        assert rows.used == 0
        assert not rows.parked.expects(questions.Question(1, [7], deque(), after=(0, 0)))


@pytest.mark.parametrize("waits", [(0,), (20,), (3, 0, 7), (1,)])
def test_turns_of_a_row_go_on_in_its_columns_those_before_them_or_a_new_row(
    waits, tiny_model, tiny_tokenizer, monkeypatch
):
    """Where the columns since it ended do not hold an answer; the last where those in which it waited leave too little room."""
    sampler, over = TransformersSampler(Policy(tiny_model, tiny_tokenizer)), set()
    passes = recorded(monkeypatch)
    ids, found, freed = [7, 8, 9], [], 0
    answers = [[60], [*range(60, 69)], [60], [], [62, 63], [*range(70, 75)]]
    with sampler._sampling():
        rows = batch_of(sampler, tiny_tokenizer, rows=1, max_tokens=2, over=over)
        rows.seat(questions.Question(0, ids, deque([(0, 5)]), *rows.cache.prefill([ids[:-1]])))
        for turn, answer in enumerate([[], *answers]):
            if turn:
                waited = waits[(turn - 1) % len(waits)] > 0  # then a step has read the newest token
                new = [*([] if waited else found[-1].token_ids[-1:]), *answer][:-1]
                ids = [*ids, *found[-1].token_ids, *answer]
                rows.parked.coming.append(questions.Question(turn, ids, deque([(0, 5)]), after=(turn - 1, 0)))
                if crowded := rows.resume():
                    assert rows.used == 0
                    freed += 1
                    crowded[0].prefix = rows.cache.prefill([ids[:-1]])[0]
                    rows.seat(crowded[0])
                elif new:
                    assert passes.pop() == new
                assert not passes
            while len(found) <= turn:
                found += rows.advance()
            for _ in range(waits[turn % len(waits)]):
                rows.advance()
    assert bool(freed) == (waits == (20,))
    for completion, alone in zip(found, _alone(sampler, found), strict=True):
        assert completion.token_ids == alone.token_ids
        torch.testing.assert_close(completion.logprobs, alone.logprobs, atol=1e-4, rtol=0)


def _alone(sampler: TransformersSampler, found: list[Completion]) -> list[Completion]:
    asked = [Request("", (5,), prompt_ids=completion.prompt_ids) for completion in found]
    params = SamplingParams(max_tokens=2, min_tokens=0, stop=())
    return sorted(sampler.sample(asked, params), key=lambda completion: completion.request_index)


@pytest.mark.parametrize("name", ["Mistral", "GPT2"])
def test_models_with_a_window_or_a_table_of_positions(name, tiny_tokenizer):
    """Their own code runs the steps, and all tokens of a turn are computed again."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    own = {
        "Mistral": {"intermediate_size": 64, "num_key_value_heads": 2, "sliding_window": 8},
        "GPT2": {"n_positions": 96},
    }
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=320, eos_token_id=0, bos_token_id=None, **sizes, **own[name]
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    sampler, turns = TransformersSampler(Policy(model, tiny_tokenizer)), Turns(random.Random(3))
    assert_as_asked_alone(sampler, turns, answered(sampler, turns))
