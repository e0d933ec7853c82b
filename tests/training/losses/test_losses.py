"""Masked sums, means, the SFT loss and the policy-gradient losses, against hand-worked cases and slow loops."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_cli.training.losses.normalization import loss_denominators, masked_loss, masked_mean, masked_normalize
from rlvr_cli.training.losses.policy_gradient import (
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
    importance_weights,
    kl_penalty,
)

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
@settings(max_examples=60)
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
    mask = torch.tensor([[1, 1, 1], [0, 0, 1], [0, 0, 0]])
    assert loss_denominators(mask, normalization="token_mean").tolist() == [[4.0]] * 3
    # two rows have tokens, so each row's mean weighs one half; the empty row's denominator is never used
    assert loss_denominators(mask, normalization="masked_mean").tolist() == [[6.0], [2.0], [2.0]]
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
@settings(max_examples=40)
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


def test_the_handouts_length_normalization_example_through_the_losses():
    """The same example as one update's loss: the denominators give the gradients that the handout prints, negated."""
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1] * 7])
    for normalization, constant, short, long in (
        ("masked_mean", None, 0.2500, 0.1429),
        ("masked_normalize", 7.0, 0.1429, 0.1429),
        ("token_mean", None, 2 / 11, 2 / 11),
    ):
        log_probs = torch.zeros(2, 7, requires_grad=True)  # the ratio is 1, and so is its derivative
        loss, _ = compute_policy_gradient_loss(
            log_probs, "grpo_no_clip", advantages=torch.full((2, 1), 2.0), old_log_probs=torch.zeros(2, 7)
        )
        denominators = loss_denominators(mask, normalization=normalization, normalize_constant=constant)
        masked_loss(loss, mask, denominators).backward()
        expected = torch.tensor([[-short] * 4 + [0.0] * 3, [-long] * 7])
        torch.testing.assert_close(log_probs.grad, expected, rtol=0, atol=5e-5)


def test_a_row_that_is_masked_out_counts_for_a_constant_alone():
    generator = torch.Generator().manual_seed(1)
    losses, mask = torch.randn(3, 4, dtype=torch.float64, generator=generator), torch.ones(3, 4, dtype=torch.bool)
    mask[0, 2:] = False
    silenced = mask & torch.tensor([[True], [True], [False]])
    for normalization, constant, factor in (
        ("token_mean", None, 1.0),
        ("masked_mean", None, 1.0),
        ("masked_normalize", 5.0, 2 / 3),
    ):

        def loss(chosen, rows, how=normalization, constant=constant):
            denominators = loss_denominators(chosen[:rows], normalization=how, normalize_constant=constant)
            return masked_loss(losses[:rows], chosen[:rows], denominators)

        torch.testing.assert_close(loss(silenced, 3), loss(mask, 2) * factor, rtol=1e-14, atol=0)


# --- policy gradients


# ratio 1/2, 9/10, 1, 11/10, 2 at a response with a positive, a negative and no advantage
RATIOS = torch.tensor([0.5, 0.9, 1.0, 1.1, 2.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([[3.0], [-2.0], [0.0]], dtype=torch.float64)


def log_probs_with_ratios(dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    old = -torch.rand(3, 5, dtype=torch.float64, generator=generator) - 0.5
    return (old + RATIOS.log()).to(dtype).requires_grad_(), old.to(dtype)


def test_the_handouts_signatures():
    def names(function):
        return [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]

    clip = ["advantages", "policy_log_probs", "old_log_probs", "cliprange"]
    wrapper = ["policy_log_probs", "loss_type", "raw_rewards", "advantages", "old_log_probs", "cliprange"]
    assert names(compute_naive_policy_gradient_loss) == ["raw_rewards_or_advantages", "policy_log_probs"]
    assert names(compute_grpo_clip_loss) == clip
    assert names(compute_policy_gradient_loss) == wrapper
    assert names(masked_mean) == ["tensor", "mask", "dim"]
    for name in wrapper[2:]:
        assert inspect.signature(compute_policy_gradient_loss).parameters[name].default is None


def test_naive_policy_gradient_loss_worked_by_hand():
    log_probs = torch.tensor([[-1.0, -2.0], [-0.5, -4.0]], requires_grad=True)
    loss = compute_naive_policy_gradient_loss(torch.tensor([[2.0], [-3.0]]), log_probs)
    assert loss.tolist() == [[2.0, 4.0], [-1.5, -12.0]]  # likelier is better where the advantage is positive
    loss.sum().backward()
    assert log_probs.grad.tolist() == [[-2.0, -2.0], [3.0, 3.0]]


@pytest.mark.parametrize(("low", "high"), [(0.2, None), (0.2, 0.2), (0.2, 0.05), (0.05, 0.2), (0.2, 1.5), (0.6, 0.0)])
def test_grpo_clip_loss_worked_by_hand(low, high):
    log_probs, old = log_probs_with_ratios()
    loss, statistics = compute_grpo_clip_loss(ADVANTAGES, log_probs, old, low, cliprange_high=high)
    top, bottom = 1 + (low if high is None else high), 1 - low
    expected = [
        [-3 * min(ratio, top) for ratio in RATIOS.tolist()],  # a good token gains nothing more above the top
        [2 * max(ratio, bottom) for ratio in RATIOS.tolist()],  # a bad one nothing more below the bottom
        [0.0] * 5,
    ]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
    above, below = [ratio > top for ratio in RATIOS.tolist()], [ratio < bottom for ratio in RATIOS.tolist()]
    assert statistics["clipped_high"].tolist() == [above, [False] * 5, [False] * 5]
    assert statistics["clipped_low"].tolist() == [[False] * 5, below, [False] * 5]
    assert statistics["clipped"].tolist() == [above, below, [False] * 5]
    torch.testing.assert_close(statistics["ratio"], RATIOS.expand(3, 5), rtol=1e-14, atol=0)
    assert not any(values.requires_grad for values in statistics.values())

    loss.sum().backward()
    flowing = [
        [0.0 if clipped else -3 * ratio for clipped, ratio in zip(above, RATIOS.tolist(), strict=True)],
        [0.0 if clipped else 2 * ratio for clipped, ratio in zip(below, RATIOS.tolist(), strict=True)],
        [0.0] * 5,
    ]
    torch.testing.assert_close(log_probs.grad, torch.tensor(flowing, dtype=torch.float64), rtol=1e-14, atol=0)


def test_what_is_clipped_on_each_side():
    """The example in numbers: clipped at 0.8 and 1.2."""
    log_probs, old = log_probs_with_ratios()
    loss, statistics = compute_grpo_clip_loss(ADVANTAGES, log_probs, old, 0.2)
    assert loss[0].tolist() == pytest.approx([-1.5, -2.7, -3.0, -3.3, -3.6])
    assert loss[1].tolist() == pytest.approx([1.6, 1.8, 2.0, 2.2, 4.0])
    assert statistics["clipped"].int().tolist() == [[0, 0, 0, 0, 1], [1, 0, 0, 0, 0], [0] * 5]
    assert statistics["ratio"].shape == (3, 5)


def test_a_ratio_on_the_clip_boundary_still_learns():
    log_probs = torch.zeros(2, 1, requires_grad=True)
    advantages = torch.tensor([[1.0], [-1.0]])
    loss, statistics = compute_grpo_clip_loss(advantages, log_probs, torch.zeros(2, 1), 0.0)
    loss.sum().backward()
    assert log_probs.grad.tolist() == [[-1.0], [1.0]]
    assert not statistics["clipped"].any()


def test_grpo_no_clip_is_the_ratio_times_the_advantage():
    log_probs, old = log_probs_with_ratios()
    loss, statistics = compute_policy_gradient_loss(log_probs, "grpo_no_clip", advantages=ADVANTAGES, old_log_probs=old)
    torch.testing.assert_close(loss, -ADVANTAGES * RATIOS, rtol=1e-14, atol=0)
    assert set(statistics) == {"ratio"}
    assert not statistics["ratio"].requires_grad
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, -ADVANTAGES * RATIOS, rtol=1e-14, atol=0)
    clipped, _ = compute_grpo_clip_loss(ADVANTAGES, log_probs, old, 0.99, cliprange_high=99.0)
    torch.testing.assert_close(clipped, loss, rtol=0, atol=0)


@pytest.mark.parametrize("loss_type", ["grpo_clip", "grpo_no_clip"])
def test_no_gradient_reaches_the_old_policy(loss_type):
    log_probs, old = log_probs_with_ratios()
    old.requires_grad_()
    loss, _ = compute_policy_gradient_loss(
        log_probs, loss_type, advantages=ADVANTAGES, old_log_probs=old, cliprange=0.2
    )
    loss.sum().backward()
    assert old.grad is None
    assert log_probs.grad.abs().sum() > 0


def test_the_wrapper_hands_each_type_its_own_arguments():
    log_probs, old = log_probs_with_ratios()
    rewards = ADVANTAGES + 5
    every = {"raw_rewards": rewards, "advantages": ADVANTAGES, "old_log_probs": old, "cliprange": 0.2}
    loss, statistics = compute_policy_gradient_loss(log_probs, "no_baseline", **every)
    torch.testing.assert_close(loss, -rewards * log_probs, rtol=0, atol=0)
    assert statistics == {}
    loss, statistics = compute_policy_gradient_loss(log_probs, "reinforce_with_baseline", **every)
    torch.testing.assert_close(loss, -ADVANTAGES * log_probs, rtol=0, atol=0)
    assert statistics == {}
    for high in (None, 0.05):
        loss, statistics = compute_policy_gradient_loss(log_probs, "grpo_clip", **every, cliprange_high=high)
        expected, its_statistics = compute_grpo_clip_loss(ADVANTAGES, log_probs, old, 0.2, cliprange_high=high)
        torch.testing.assert_close(loss, expected, rtol=0, atol=0)
        assert list(statistics) == list(its_statistics) == ["ratio", "clipped", "clipped_low", "clipped_high"]
        for name, values in statistics.items():
            assert torch.equal(values, its_statistics[name])


@pytest.mark.parametrize(
    ("loss_type", "name"),
    [
        ("no_baseline", "raw_rewards"),
        ("reinforce_with_baseline", "advantages"),
        ("grpo_clip", "advantages"),
        ("grpo_clip", "old_log_probs"),
        ("grpo_clip", "cliprange"),
        ("grpo_no_clip", "advantages"),
        ("grpo_no_clip", "old_log_probs"),
    ],
)
def test_a_missing_argument_is_named(loss_type, name):
    log_probs, old = log_probs_with_ratios()
    every = {"raw_rewards": ADVANTAGES, "advantages": ADVANTAGES, "old_log_probs": old, "cliprange": 0.2}
    compute_policy_gradient_loss(log_probs, loss_type, **every)
    with pytest.raises(ValueError, match=rf"{loss_type}.* needs {name}$"):
        compute_policy_gradient_loss(log_probs, loss_type, **(every | {name: None}))


def test_zero_is_a_cliprange_and_not_a_missing_argument():
    log_probs, old = log_probs_with_ratios()
    loss, _ = compute_policy_gradient_loss(
        log_probs, "grpo_clip", advantages=ADVANTAGES, old_log_probs=old, cliprange=0.0
    )
    assert loss[0].tolist() == pytest.approx([-1.5, -2.7, -3.0, -3.0, -3.0])


def test_an_unknown_type_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"'ppo' .*no_baseline, reinforce_with_baseline, grpo_clip, grpo_no_clip"):
        compute_policy_gradient_loss(torch.zeros(1, 1), "ppo", advantages=torch.zeros(1, 1))


@pytest.mark.parametrize("loss_type", ["no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip"])
def test_one_number_per_response_must_be_a_column(loss_type):
    log_probs = torch.zeros(3, 3)  # square: (3,) and (1, 3) would broadcast
    name = {"no_baseline": "raw_rewards"}.get(loss_type, "advantages")
    for shape in ((3,), (1, 3), (3, 2), (1, 1), ()):
        options = {"old_log_probs": log_probs, "cliprange": 0.2, name: torch.ones(shape)}
        with pytest.raises(ValueError, match=r"not \(batch, 1\) = \(3, 1\)"):
            compute_policy_gradient_loss(log_probs, loss_type, **options)


@pytest.mark.parametrize("loss_type", ["no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip"])
def test_an_advantage_per_token_weighs_its_token(loss_type):
    log_probs, old = log_probs_with_ratios()
    name = {"no_baseline": "raw_rewards"}.get(loss_type, "advantages")
    options = {"old_log_probs": old, "cliprange": 0.2}
    per_token = torch.linspace(-2, 3, 15, dtype=torch.float64).view(3, 5)
    loss, _ = compute_policy_gradient_loss(log_probs, loss_type, **options, **{name: per_token})
    for token in range(5):
        column, _ = compute_policy_gradient_loss(
            log_probs, loss_type, **options, **{name: per_token[:, token : token + 1]}
        )
        torch.testing.assert_close(loss[:, token], column[:, token], rtol=0, atol=0)


@pytest.mark.parametrize("loss_type", ["grpo_clip", "grpo_no_clip"])
def test_old_log_probs_of_another_shape_are_refused(loss_type):
    for shape in ((3, 1), (1, 4), (3, 5)):
        with pytest.raises(AssertionError):
            compute_policy_gradient_loss(
                torch.zeros(3, 4),
                loss_type,
                advantages=torch.ones(3, 1),
                old_log_probs=torch.zeros(shape),
                cliprange=0.2,
            )


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("loss_type", ["reinforce_with_baseline", "grpo_clip", "grpo_no_clip"])
def test_what_is_not_a_number_shows_in_the_loss(loss_type, poison):
    """min and clamp must not hide it, so that the update is skipped."""
    for advantage in (1.0, -1.0):
        log_probs = torch.full((1, 2), -1.0)
        loss, _ = compute_policy_gradient_loss(
            log_probs,
            loss_type,
            advantages=torch.tensor([[poison * advantage]]),
            old_log_probs=log_probs,
            cliprange=0.2,
        )
        assert not loss.isfinite().any()
    if loss_type != "reinforce_with_baseline":
        loss, _ = compute_policy_gradient_loss(
            log_probs,
            loss_type,
            advantages=torch.ones(1, 1),
            old_log_probs=torch.tensor([[-1.0, torch.nan]]),
            cliprange=0.2,
        )
        assert loss.isnan().tolist() == [[False, True]]


# --- the penalty for leaving the reference


def distribution(seed):
    return torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).log_softmax(0)


def test_kl_penalty_worked_by_hand():
    policy = torch.tensor([[0.5, 0.2, 0.1]]).log().requires_grad_()
    reference = torch.tensor([[0.25, 0.2, 0.4]]).log().requires_grad_()
    penalty = kl_penalty(policy, reference)
    expected = [0.5 - math.log(0.5) - 1, 0.0, 4 - math.log(4) - 1]
    assert penalty.tolist()[0] == pytest.approx(expected, rel=1e-6)
    penalty.sum().backward()
    assert policy.grad.tolist()[0] == pytest.approx([1 - 0.5, 0.0, 1 - 4], rel=1e-6)
    assert reference.grad is None


@given(st.integers(0, 1000), st.integers(0, 1000))
@settings(max_examples=30)
def test_kl_penalty_is_unbiased_by_exact_enumeration(first, second):
    policy, reference = distribution(first), distribution(second)
    exact = F.kl_div(reference, policy, log_target=True, reduction="sum")
    torch.testing.assert_close((policy.exp() * kl_penalty(policy, reference)).sum(), exact, rtol=1e-12, atol=1e-14)


@given(st.integers(0, 2**32), st.floats(-9, 2), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=60)
def test_kl_penalty_is_never_negative_and_zero_at_equality(seed, exponent, dtype):
    generator = torch.Generator().manual_seed(seed)
    policy = -5 * torch.rand(100, dtype=dtype, generator=generator)
    reference = policy + 10**exponent * torch.randn(100, dtype=dtype, generator=generator)
    assert (kl_penalty(policy, reference) >= 0).all()
    assert (kl_penalty(policy, policy) == 0).all()


def test_kl_penalty_keeps_its_digits_close_to_the_reference():
    difference = torch.tensor([1e-3, -1e-3, 1e-4], dtype=torch.float32)
    penalty = kl_penalty(-difference, torch.zeros(3))
    torch.testing.assert_close(penalty, difference**2 / 2 * (1 + difference / 3), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_penalty_is_finite_however_far_away(dtype):
    far = [-torch.inf, -1e6, -100.0, 100.0, 1e6, torch.inf]
    policy = torch.zeros(6, dtype=dtype, requires_grad=True)
    penalty = kl_penalty(policy, torch.tensor(far, dtype=dtype))
    at_20 = [math.exp(-20) + 20 - 1] * 3 + [math.exp(20) - 20 - 1] * 3
    assert penalty.tolist() == pytest.approx(at_20, rel=1e-6)
    penalty.sum().backward()
    assert policy.grad.isfinite().all()


# --- the correction for the sampler


def test_importance_weights_worked_by_hand():
    trainer = torch.tensor([[0.3, 0.2, 0.9, 0.5]]).log().requires_grad_()
    sampled = torch.tensor([[0.3, 0.4, 0.3, 0.4]]).log().requires_grad_()
    weights = importance_weights(trainer, sampled, cap=2.0)
    assert weights.tolist()[0] == pytest.approx([1.0, 0.5, 2.0, 1.25], rel=1e-6)
    assert not weights.requires_grad
    assert importance_weights(trainer, sampled, cap=4.0)[0, 2].item() == pytest.approx(3.0)
    assert torch.equal(importance_weights(trainer, trainer, cap=2.0), torch.ones(1, 4))


def test_importance_weights_are_finite_and_within_the_cap():
    far = torch.tensor([-torch.inf, -1e6, 1e6, torch.inf])
    weights = importance_weights(torch.zeros(4), far, cap=3.0)
    assert weights.tolist() == pytest.approx([3.0, 3.0, math.exp(-20), math.exp(-20)])
