"""samplers/embedded/draw.py against slow references and exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlvr_cli.samplers.embedded import draw
from rlvr_cli.samplers.embedded.draw import draw_tokens, inverse_cdf, nucleus, uniforms


def reference_uniform(seed, position):
    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    return (mix((mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31))
def test_uniforms_equal_the_reference(seed, position):
    (u,) = uniforms(np.array([seed]), np.array([position]))
    assert u == reference_uniform(seed, position)
    assert 0 <= u < 1


def test_splitmix64_is_the_published_one():
    # The first outputs for state 1234567, from the reference implementation at https://prng.di.unimi.it/splitmix64.c
    state = np.array([1234567 + k * 0x9E3779B97F4A7C15 & (2**64 - 1) for k in (1, 2, 3)], dtype=np.uint64)
    assert draw._mix(state).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("layout", ["one seed", "consecutive seeds", "seeds a generator increment apart"])
def test_uniforms_are_uniform_and_unrelated(layout):
    n = 200_000
    seeds = {
        "one seed": np.full(n, 42),
        "consecutive seeds": np.arange(n),
        "seeds a generator increment apart": np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        >> np.uint64(1),
    }[layout]
    u = uniforms(seeds, np.arange(n) if layout == "one seed" else np.zeros(n, dtype=np.int64))
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    chi2 = ((counts - n / 100) ** 2 / (n / 100)).sum()
    assert abs(chi2 - 99) < 5 * math.sqrt(2 * 99)
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 5 / math.sqrt(n)
    assert len(np.unique(u)) == n


@given(
    weights=st.lists(st.floats(0, 1, width=32) | st.just(0.0), min_size=1, max_size=20).filter(lambda w: sum(w) > 0),
    u=st.floats(0, 1, exclude_max=True),
)
def test_inverse_cdf_equals_exact_arithmetic(weights, u):
    index = int(inverse_cdf(torch.tensor([weights]), torch.tensor([u], dtype=torch.float64)))
    assert weights[index] > 0
    target, before = Fraction(u) * sum(map(Fraction, weights)), sum(map(Fraction, weights[:index]))
    slack = Fraction(1, 10**12)
    assert before - slack <= target <= before + Fraction(weights[index]) + slack


@pytest.mark.parametrize("vocab", [2049, 151_936])
def test_inverse_cdf_in_a_large_vocabulary(vocab):
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(40, vocab, generator=generator) ** 8
    weights[torch.rand(40, vocab, generator=generator) < 0.3] = 0
    weights[0] = 0
    weights[0, -1] = 1e-30  # all the mass in the last place
    weights[1, 1:] = 0
    weights[1, 0] = 1e-30
    u = torch.rand(40, generator=generator, dtype=torch.float64)
    u[2], u[3] = 0.0, 1 - 2**-53
    index = inverse_cdf(weights, u)
    running = weights.double().cumsum(-1)
    assert index[0] == vocab - 1
    assert index[1] == 0
    assert (weights[torch.arange(40), index] > 0).all()
    target = u * running[:, -1]
    slack = 1e-6 * running[:, -1]  # blocks are summed in float32
    assert (running[torch.arange(40), index] >= target - slack).all()
    assert (running[torch.arange(40), index] - weights[torch.arange(40), index] <= target + slack).all()


@given(
    weights=st.lists(st.integers(0, 50), min_size=2, max_size=12).filter(any),
    top_p=st.floats(0.05, 0.999),
)
def test_nucleus_is_the_smallest_set_with_that_mass(weights, top_p):
    p = torch.tensor([weights], dtype=torch.float64) / sum(weights)
    kept = nucleus(p, top_p)[0]
    assert ((kept == p[0]) | (kept == 0)).all()
    chosen = sorted(kept[kept > 0].tolist(), reverse=True)
    assert chosen == sorted(p[0].tolist(), reverse=True)[: len(chosen)]
    assert sum(chosen) >= top_p - 1e-9
    assert sum(chosen[:-1]) < top_p + 1e-9


def test_draw_by_hand():
    logits = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]] * 4)
    u = torch.tensor([0.49, 0.51, 0.79, 0.81], dtype=torch.float64)
    draw = draw_tokens(logits.clone(), u, temperature=1.0, top_p=1.0)
    assert draw.tokens.tolist() == [0, 1, 1, 2]
    torch.testing.assert_close(draw.logprobs, torch.tensor([0.5, 0.3, 0.3, 0.2]).log())
    entropy = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2))
    torch.testing.assert_close(draw.entropy, torch.full((4,), entropy))
    # Temperature 1/2 squares and normalizes: 25, 9, 4 of 38. A nucleus of 0.8 keeps 25 and 9, that is 34.
    draw = draw_tokens(logits.clone(), u, temperature=0.5, top_p=0.8)
    assert draw.tokens.tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(draw.logprobs, torch.tensor([25 / 34, 25 / 34, 9 / 34, 9 / 34]).log())
    # Token 0 barred from the rows 0 and 2: 0.3 and 0.2 of 0.5 are left. The entropy is that of all three.
    barred = torch.tensor([0, 2]), torch.tensor([0])
    draw = draw_tokens(logits.clone(), u, temperature=1.0, top_p=1.0, barred=barred)
    assert draw.tokens.tolist() == [1, 1, 2, 2]
    torch.testing.assert_close(draw.logprobs, torch.tensor([0.6, 0.3, 0.4, 0.2]).log())
    torch.testing.assert_close(draw.entropy, torch.full((4,), entropy))
    draw = draw_tokens(logits.clone(), u, temperature=0.0, top_p=0.1, barred=barred)
    assert draw.tokens.tolist() == [1, 0, 1, 0]
    torch.testing.assert_close(draw.logprobs, torch.tensor([0.6, 0.5, 0.6, 0.5]).log())


def test_a_target_beyond_the_sum_does_not_reach_a_zero_weight():
    running = torch.tensor([[0.0, 0.25, 0.5, 0.5]], dtype=torch.float64)
    assert draw._first_above(running, torch.tensor([0.6], dtype=torch.float64)).item() == 2


def test_an_impossible_token_has_no_part_in_the_entropy():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    draw = draw_tokens(logits, torch.tensor([0.999], dtype=torch.float64), temperature=2.0, top_p=1.0)
    assert draw.tokens.item() == 1
    assert draw.entropy.item() == pytest.approx(math.log(2))


def test_a_barred_token_that_had_all_the_probability():
    logits = torch.tensor([[500.0, 1.0, 0.0]])
    barred = torch.tensor([0]), torch.tensor([0])
    draw = draw_tokens(logits, torch.tensor([0.9], dtype=torch.float64), temperature=1.0, top_p=1.0, barred=barred)
    assert draw.tokens.tolist() == [2]
    assert draw.logprobs.item() == pytest.approx(-math.log(1 + math.e), abs=1e-6)
    assert draw.entropy.item() == pytest.approx(0, abs=1e-6)
