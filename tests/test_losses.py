"""Masked sums, means and the SFT loss, against hand-worked cases and slow loops."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_cli.losses import loss_denominators, masked_loss, masked_mean, masked_normalize

VALUES = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
MASK = torch.tensor([[True, False, True], [False, False, True]])


def test_masked_normalize_worked_by_hand():
    assert masked_normalize(VALUES, MASK, 2.0).item() == (1 + 4 + 32) / 2
    assert masked_normalize(VALUES, MASK, 2.0, dim=0).tolist() == [0.5, 0.0, 18.0]
    assert masked_normalize(VALUES, MASK, 2.0, dim=1).tolist() == [2.5, 16.0]
    assert masked_normalize(VALUES, MASK, 2.0, dim=-1).tolist() == [2.5, 16.0]


def test_masked_mean_worked_by_hand():
    assert masked_mean(VALUES, MASK).item() == pytest.approx(37 / 3)
    assert masked_mean(VALUES, MASK, dim=1).tolist() == [2.5, 32.0]
    columns = masked_mean(VALUES, MASK, dim=0).tolist()
    assert columns[0] == 1.0
    assert math.isnan(columns[1])  # a mean over nothing is not a number
    assert columns[2] == 18.0


def test_the_handouts_length_normalization_example():
    """Section 8: two responses of 4 and 7 tokens, ratio 1 and advantage 2 everywhere."""
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1] * 7])
    for aggregate, values, gradient in (
        (lambda x: masked_mean(x, mask, dim=1), [2.0, 2.0], 2 / 8),
        (lambda x: masked_normalize(x, mask, dim=1, normalize_constant=7), [8 / 7, 2.0], 2 / 14),
    ):
        ratio = torch.ones(2, 7, requires_grad=True)
        result = aggregate(ratio * 2)
        torch.testing.assert_close(result, torch.tensor(values))
        result.mean().backward()
        torch.testing.assert_close(ratio.grad[0], torch.tensor([gradient] * 4 + [0.0] * 3))
        torch.testing.assert_close(ratio.grad[1], torch.full((7,), 1 / 7))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_masked_out_elements_contribute_nothing_not_even_a_nan(poison):
    poisoned = torch.where(MASK, VALUES, poison).requires_grad_()
    for dim in (None, 0, 1):
        assert torch.equal(masked_normalize(poisoned, MASK, 3.0, dim), masked_normalize(VALUES, MASK, 3.0, dim))
        clean = masked_mean(VALUES, MASK, dim)
        torch.testing.assert_close(masked_mean(poisoned, MASK, dim), clean, equal_nan=True)
    masked_loss(-poisoned, MASK, torch.tensor([[2.0], [5.0]])).backward()
    torch.testing.assert_close(poisoned.grad, torch.tensor([[-0.5, 0, -0.5], [0, 0, -0.2]]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_may_be_of_any_type(dtype):
    assert masked_normalize(VALUES, MASK.to(dtype), 1.0).item() == 37
    assert masked_mean(VALUES, MASK.to(dtype), dim=1).tolist() == [2.5, 32.0]


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(AssertionError):
        masked_mean(VALUES, MASK[:, :1])


@st.composite
def masked_tensors(draw):
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    tensor = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
    return tensor, torch.rand(rows, columns, generator=generator) < draw(st.floats(0, 1))


@given(masked_tensors(), st.floats(0.1, 100))
@settings(max_examples=60, deadline=None)
def test_masked_sums_and_means_against_a_slow_loop(case, constant):
    tensor, mask = case
    rows = [[v for v, m in zip(r, k, strict=True) if m] for r, k in zip(tensor.tolist(), mask.tolist(), strict=True)]
    every = [value for row in rows for value in row]
    for dim, groups in ((1, rows), (None, [every])):
        sums = torch.tensor([sum(group) / constant for group in groups], dtype=torch.float64)
        means = torch.tensor([sum(g) / len(g) if g else math.nan for g in groups], dtype=torch.float64)
        torch.testing.assert_close(masked_normalize(tensor, mask, constant, dim).reshape(-1), sums)
        torch.testing.assert_close(masked_mean(tensor, mask, dim).reshape(-1), means, equal_nan=True)
    torch.testing.assert_close(
        masked_normalize(tensor, mask, constant, 0), masked_normalize(tensor.T, mask.T, constant, 1)
    )


def test_denominators_worked_by_hand():
    mask = torch.tensor([[1, 0, 1], [0, 0, 1], [0, 0, 0]])
    assert loss_denominators(mask, normalization="token_mean").tolist() == [[3.0]] * 3
    # two rows have tokens, so each row's mean weighs one half; the empty row's denominator is never used
    assert loss_denominators(mask, normalization="masked_mean").tolist() == [[4.0], [2.0], [2.0]]
    # an empty row is an example like any other to a constant: its sum is 0
    constant = loss_denominators(mask, normalization="masked_normalize", normalize_constant=10.0)
    assert constant.tolist() == [[30.0]] * 3


def test_no_denominator_is_zero():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for normalization in ("token_mean", "masked_mean"):
        denominators = loss_denominators(nothing, normalization=normalization)
        assert (denominators > 0).all()
        assert masked_loss(-torch.randn(2, 3), nothing, denominators).item() == 0


def test_a_constant_belongs_to_masked_normalize_alone():
    with pytest.raises(AssertionError):
        loss_denominators(MASK, normalization="masked_normalize")
    with pytest.raises(AssertionError):
        loss_denominators(MASK, normalization="token_mean", normalize_constant=1.0)


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_each_normalization_is_the_loss_it_says(seed, rows, columns):
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(rows, columns, dtype=torch.float64, generator=generator)
    mask = torch.rand(rows, columns, generator=generator) < 0.7
    mask[:, 0] = True

    def loss(**how):
        return masked_loss(-log_probs, mask, loss_denominators(mask, **how))

    torch.testing.assert_close(loss(normalization="token_mean"), masked_mean(-log_probs, mask))
    torch.testing.assert_close(loss(normalization="masked_mean"), masked_mean(-log_probs, mask, 1).mean())
    torch.testing.assert_close(
        loss(normalization="masked_normalize", normalize_constant=7.0),
        masked_normalize(-log_probs, mask, 7.0, 1).mean(),
    )


def test_token_mean_is_the_cross_entropy_of_the_masked_tokens():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 3, 11, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 11, (2, 3), generator=generator)
    log_probs = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.masked_fill(~MASK, -100).flatten())
    torch.testing.assert_close(masked_loss(-log_probs, MASK, MASK.sum().item()), expected)
