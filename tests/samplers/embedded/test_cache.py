"""samplers/embedded/cache.py: which columns steps read, and how the rows are ordered for that."""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marks import slow
from rlvr_cli.models.policy import Policy
from rlvr_cli.samplers.embedded import cache
from rlvr_cli.samplers.embedded.decode_step import DecodeStep
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.types import Request, SamplingParams
from tests.helpers.sampled import assert_same

PARAMS = SamplingParams(max_tokens=48, min_tokens=2, stop=())


def test_rows_are_divided_into_the_blocks_that_are_read_fastest(monkeypatch):
    """By hand: six rows that need 10, 9, 3, 2, 2 and 1 of the columns up to 10."""
    monkeypatch.setattr(cache, "_BLOCK", 2)
    first = np.array([0, 1, 7, 8, 8, 9])
    assert cache._blocks(first, 10, each=0) == (20 + 6 + 4, ((0, 2, 0), (2, 4, 7), (4, 6, 8)))
    assert cache._blocks(first, 10, each=3) == (20 + 12 + 2 * 3, ((0, 2, 0), (2, 6, 7)))
    assert cache._blocks(first, 10, each=30) == (60 + 30, ((0, 6, 0),))
    assert cache._blocks(first[:0], 10, each=3) == (0, ())


@given(st.lists(st.integers(0, 20), min_size=1, max_size=14), st.integers(1, 3), st.integers(0, 25))
def test_no_other_blocks_are_read_faster(first, block, each):
    """Of all ways to divide the rows."""
    atoms = [*range(0, len(first), block), len(first)]
    costs = []
    for count in range(len(atoms) - 1):
        for inner in itertools.combinations(atoms[1:-1], count):
            borders = [0, *inner, len(first)]
            costs.append(sum(each + (b - a) * (21 - min(first[a:b])) for a, b in itertools.pairwise(borders)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "_BLOCK", block)
        read, blocks = cache._blocks(np.array(first), 21, each=each)
    assert read == min(costs) == sum(each + (end - row) * (21 - low) for row, end, low in blocks)
    assert [row for row, _, _ in blocks] + [len(first)] == [0] + [end for _, end, _ in blocks]
    assert all(low == min(first[row:end]) for row, end, low in blocks)


@given(st.data(), st.integers(0, 20), st.integers(1, 4))
def test_each_block_gets_rows_of_similar_length(data, rows, block):
    """No row of a block is shorter than one of the next, and after the last comes the first; those that stand in their block stay there."""
    used = np.array(sorted(data.draw(st.sets(st.integers(0, rows + 2), min_size=rows, max_size=rows))))
    start = np.array(data.draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "_BLOCK", block)
        to, of = cache._by_length(used, start)
    stands = {int(row): int(row) for row in used} | dict(zip(of.tolist(), to.tolist(), strict=True))
    assert sorted(stands.values()) == list(range(rows))
    start_of = dict(zip(used.tolist(), start.tolist(), strict=True))
    blocks = [[start_of[row] for row, place in stands.items() if place // block == i] for i in range(-(-rows // block))]
    orders = [blocks[first:] + blocks[:first] for first in range(len(blocks) or 1)]
    assert any(all(max(one) <= min(after) for one, after in itertools.pairwise(order)) for order in orders)
    assert all(row >= rows or row // block != place // block for row, place in zip(of, to, strict=True))


def test_ordered_rows_stay_where_they_are_when_the_longest_end(monkeypatch):
    """By hand, in blocks of 2 rows: new rows are in the places of two that have ended, and one is in another's place."""
    monkeypatch.setattr(cache, "_BLOCK", 2)
    ordered = np.array([40, 41, 10, 11, 20, 21, 30])  # the longest begin first: they are in the second block
    assert [*map(len, cache._by_length(np.arange(7), ordered))] == [0, 0]
    swapped = np.array([40, 20, 10, 11, 41, 21, 30])
    assert [array.tolist() for array in cache._by_length(np.arange(7), swapped)] == [[1, 4], [4, 1]]


def ragged(count: int, samples: int) -> list[Request]:
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(20, 280) for _ in range(draw.choice((3, 5, 8)))) for _ in range(count)]
    return [
        Request("", tuple(range(99 * i, 99 * i + samples)), prompt_ids=prompt, max_tokens=draw.choice((2, 8, 24, 48)))
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture
def read(monkeypatch):
    """For each step what it read, in columns of a row, and how many blocks; None for each time that rows were ordered."""
    seen, step, by_length = [], DecodeStep.__call__, cache._by_length

    def watched(self, *args, window, **kwargs):
        blocks = window.blocks or ((0, window.rows, window.low),)
        seen.append((sum((end - row) * (window.high - low) for row, end, low in blocks), len(blocks)))
        return step(self, *args, window=window, **kwargs)

    monkeypatch.setattr(DecodeStep, "__call__", watched)
    monkeypatch.setattr(cache, "_by_length", lambda *rows: seen.append(None) or by_length(*rows))
    return seen


def collect(sampler, requests):
    return {(c.request_index, c.sample_index): c for c in sampler.sample(requests, PARAMS)}


@pytest.mark.parametrize(
    ("prompt", "compute_dtype"),
    [("copied", "float32"), ("shared", "bfloat16"), slow("copied", "bfloat16"), slow("shared", "float32")],
)
@pytest.mark.parametrize("block", [2, slow(5)])
def test_ordered_rows_that_are_read_in_blocks_give_the_same_tokens(
    tiny_model, tiny_tokenizer, block, prompt, compute_dtype, monkeypatch, read
):
    """Rows are ordered at each step that changes them; they leave, others take their place, and the columns move."""
    tiny_model.generation_config.eos_token_id = [tiny_tokenizer.eos_token_id, *range(288, 292)]
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer, compute_dtype=compute_dtype), max_batch_size=13)
    sampler._shares = prompt == "shared"
    moved, move = [], cache.RowCache._move_columns
    monkeypatch.setattr(cache.RowCache, "_move_columns", lambda rows, room: moved.append(room) or move(rows, room))
    monkeypatch.setattr("rlvr_cli.samplers.embedded.engine._SHARED_TOKENS", 1)
    monkeypatch.setattr(cache, "_BLOCK_BYTES", 10**9)
    monkeypatch.setattr(cache, "_ORDER_COST", 10**9)
    requests = ragged(24, samples=3)
    expected = collect(sampler, requests)
    assert not any(step is None or step[1] > 1 for step in read)
    read.clear()
    moved.clear()
    monkeypatch.setattr(cache, "_BLOCK_BYTES", 0)
    monkeypatch.setattr(cache, "_BLOCK", block)
    monkeypatch.setattr(cache, "_ORDER_COST", 0)
    done = collect(sampler, requests)
    assert read.count(None) > 5, read
    assert any(step and step[1] > 1 for step in read)
    assert moved
    assert_same(done, expected, compute_dtype=compute_dtype)


@pytest.mark.parametrize("fixed", [False, True])
def test_what_steps_read_beyond_what_they_need_is_counted(tiny_model, tiny_tokenizer, fixed, monkeypatch):
    """By hand, in blocks of 4 rows. A long row alone in the last block reads less than an ordered one: that is no credit."""
    monkeypatch.setattr(cache, "_BLOCK", 4)
    monkeypatch.setattr(cache, "_BLOCK_BYTES", 0)
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    with sampler._sampling():
        slots = cache.make_slots(sampler._empty_prefix, rows=6, columns=90)
        rows = cache.RowCache(sampler._policy, cache.Workspace(slots, step=sampler._new_step(90), fixed=fixed))
        for prompt in ([7, 8], [7, 9], [7, 10], [7, 11], list(range(20, 60))):
            rows.seat(prompt, *rows.prefill([prompt[:-1]]), most=1)
        counts = []
        for ended in ([], [1, 2, 3], [0]):
            rows.release(ended)
            rows.forward()
            counts.append((rows._needed, rows._wasted))
        # At last the long row is alone, and each of the four free ones before it reads a column.
        assert counts == ([(0, 0)] * 3 if fixed else [(4 * 40 + 2, 0), (2 * 41, 0), (42, 4)])


def test_a_free_row_is_computed_at_the_first_position(tiny_model, tiny_tokenizer):
    """So that none runs out of positions, however long the others go on. One that waits for the next step keeps its own."""
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    with sampler._sampling():
        slots = cache.make_slots(sampler._empty_prefix, rows=3, columns=40)
        rows = cache.RowCache(sampler._policy, cache.Workspace(slots, step=sampler._new_step(40)))
        for prompt in ([7, 8], [7, 9, 10], [7, 11, 12, 13]):
            rows.seat(prompt, *rows.prefill([prompt[:-1]]), most=1)
        rows.release([0])
        rows.park([1])
        positions = []
        for _ in range(2):
            rows.forward()
            positions.append(rows.positions[:, 0].tolist())
            rows.feed(torch.tensor([1, 2, 3]))
            rows.release([1])
        assert positions == [[0, 2, 3], [0, 0, 4]]


def test_ordered_rows_are_read_in_fewer_columns(tiny_model, tiny_tokenizer, monkeypatch, read):
    """They are ordered seldom: moving them takes about as long as what was read without need since the last time."""
    monkeypatch.setattr(cache, "_BLOCK", 4)
    monkeypatch.setattr(cache, "_BLOCK_BYTES", 0)
    sampler, counts = TransformersSampler(Policy(tiny_model, tiny_tokenizer), max_batch_size=16), {}
    for cost in (cache._ORDER_COST, 10**9):
        monkeypatch.setattr(cache, "_ORDER_COST", cost)
        read.clear()
        collect(sampler, ragged(150, samples=1))
        counts[cost] = sum(step[0] for step in read if step), read.count(None), len(read)
    (ordered, times, steps), (as_they_came, never, _) = counts.values()
    assert never == 0
    assert ordered < 0.9 * as_they_came, counts
    assert 2 < times < steps / 5, counts
