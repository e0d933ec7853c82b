"""The order of the data: epochs, batches and the next questions are pure functions of seed and counters."""

import hashlib

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_cli.data.order import batches, epoch_order, next_indices, update_rows, weighted_indices


def test_the_order_is_a_permutation_fixed_for_good_by_seed_and_epoch():
    assert sorted(epoch_order(1000, seed=3, epoch=2)) == list(range(1000))
    orders = {tuple(epoch_order(50, seed=seed, epoch=epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert epoch_order(8, seed=0, epoch=0) == (7, 0, 1, 5, 3, 4, 2, 6)
    firsts = [epoch_order(4, seed=seed, epoch=0)[0] for seed in range(2000)]
    for index in range(4):
        assert 400 < firsts.count(index) < 600  # 500 expected, 5 standard deviations


@given(st.integers(0, 30), st.integers(1, 7))
def test_batches_are_an_epoch_in_its_order_and_only_the_last_is_smaller(count, size):
    examples = [f"example {index}" for index in range(count)]
    found = list(batches(examples, batch_size=size, seed=1, epoch=4))
    assert [example for batch in found for example in batch] == [
        examples[index] for index in epoch_order(count, seed=1, epoch=4)
    ]
    assert [len(batch) for batch in found] == [size] * (count // size) + ([count % size] if count % size else [])


def test_next_indices_follow_the_order_of_each_epoch():
    first, second = (list(epoch_order(5, seed=3, epoch=epoch)) for epoch in (0, 1))
    assert next_indices(5, 2, seed=3, start=0) == (first[:2], 2)
    assert next_indices(5, 3, seed=3, start=2) == (first[2:], 5)
    assert next_indices(5, 5, seed=3, start=5) == (second, 10)
    assert next_indices(5, 0, seed=3, start=4) == ([], 4)


def test_next_indices_repeat_nothing_where_an_epoch_ends():
    first, second = epoch_order(5, seed=3, epoch=0), epoch_order(5, seed=3, epoch=1)
    tail = list(first[3:])
    fresh = [index for index in second if index not in tail]
    drawn, position = next_indices(5, 4, seed=3, start=3)
    assert drawn == tail + fresh[:2]
    assert position == 5 + second.index(fresh[1]) + 1


def test_next_indices_skip_the_excluded_and_run_out():
    order = epoch_order(6, seed=1, epoch=0)
    drawn, position = next_indices(6, 2, seed=1, start=0, exclude=[order[0], order[2], order[0]])
    assert (drawn, position) == ([order[1], order[3]], 4)
    drawn, _ = next_indices(6, 9, seed=1, start=4, exclude=[2, 5])
    assert sorted(drawn) == [0, 1, 3, 4]
    assert next_indices(6, 1, seed=1, start=4, exclude=range(6)) == ([], 4)
    assert next_indices(0, 3, seed=1, start=0) == ([], 0)


@given(st.integers(1, 12), st.integers(0, 15), st.integers(0, 5), st.integers(0, 60), st.sets(st.integers(0, 11)))
@settings(max_examples=80)
def test_next_indices_are_a_pure_function_without_gaps(num_examples, count, seed, start, exclude):
    exclude = {index for index in exclude if index < num_examples}
    before = torch.random.get_rng_state()
    drawn, position = next_indices(num_examples, count, seed=seed, start=start, exclude=sorted(exclude))
    assert (drawn, position) == next_indices(
        num_examples, count, seed=seed, start=start, exclude=sorted(exclude, reverse=True)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(drawn) == len(set(drawn)) == min(count, num_examples - len(exclude))
    passed = []
    for place in range(start, position):
        index = epoch_order(num_examples, seed=seed, epoch=place // num_examples)[place % num_examples]
        if index not in exclude and index not in passed:
            passed.append(index)
    assert drawn == passed
    if drawn:  # it stops at what it drew last
        last = divmod(position - 1, num_examples)
        assert epoch_order(num_examples, seed=seed, epoch=last[0])[last[1]] == drawn[-1]


def test_batches_that_divide_an_epoch_use_each_example_once():
    position, seen = 0, []
    for _ in range(8):
        drawn, position = next_indices(12, 3, seed=7, start=position)
        seen.append(drawn)
    for epoch in (seen[:4], seen[4:]):
        assert sorted(index for drawn in epoch for index in drawn) == list(range(12))


def test_the_order_of_the_dataset_is_not_made_again_for_each_batch(monkeypatch):
    """However many passes over a batch, each with an order of its own, come in between."""
    made, blake2b = [], hashlib.blake2b

    def counted(*arguments, **how):
        made.append(arguments)
        return blake2b(*arguments, **how)

    monkeypatch.setattr(hashlib, "blake2b", counted)
    for number in range(3):
        next_indices(1000, 8, seed=271, start=8 * number)
        update_rows(8, batch_size=4, epochs=5, seed=271, number=number)
    assert len(made) == 1000 + 3 * 5 * 8


def test_without_a_seed_each_epoch_is_the_file():
    assert next_indices(5, 4, seed=None, start=3) == ([3, 4, 0, 1], 7)
    assert next_indices(5, 3, seed=None, start=3, exclude=[4]) == ([3, 0, 1], 7)


def test_weighted_indices_have_the_probabilities_of_their_weights():
    """Kimi's example: success rates of 0, 1/4, 1/2 and 1 give 4/9, 3/9, 2/9, and the last one its floor."""
    weights = [1.0, 0.75, 0.5, 1e-9]
    draws = [weighted_indices(weights, 2, seed=0, draw=draw) for draw in range(4000)]
    firsts = [first for first, _ in draws]
    for index, expected in enumerate([0.444444, 0.333333, 0.222222, 0.0]):
        assert abs(firsts.count(index) / 4000 - expected) < 5 * (expected * (1 - expected) / 4000) ** 0.5 + 1e-9
    after_0 = [second for first, second in draws if first == 0]
    assert abs(after_0.count(1) / len(after_0) - 0.75 / 1.25) < 5 * (0.24 / len(after_0)) ** 0.5


def test_a_draw_goes_on_where_it_stopped():
    weights = [1.0, 0.2, 0.7, 0.05, 1.0, 0.3]
    whole = weighted_indices(weights, 6, seed=3, draw=2)
    assert sorted(whole) == [*range(6)]
    assert whole == weighted_indices(weights, 9, seed=3, draw=2)
    first = weighted_indices(weights, 2, seed=3, draw=2)
    assert first + weighted_indices(weights, 4, seed=3, draw=2, exclude=first) == whole
    assert len({tuple(weighted_indices(weights, 6, seed=s, draw=d)) for s in range(5) for d in range(5)}) > 20
