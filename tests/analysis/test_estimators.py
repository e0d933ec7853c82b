"""Statistics: against hand-worked values, and against references that enumerate every subset or simulate."""

import math
import random
from collections import Counter
from itertools import combinations
from statistics import fmean as mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_cli.analysis.estimators import (
    best_at_k,
    bootstrap_interval,
    detectable_difference,
    majority_at_k,
    mcnemar_exact,
    pass_at_k,
    questions_needed,
    wilson_interval,
)

rewards_and_scores = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([-3.0, -2.0, -1.0])), min_size=1, max_size=7
)


def over_subsets(items, k, value):
    """The mean of value(subset) over every k-subset of the items."""
    values = [value(subset) for subset in combinations(items, k)]
    return math.fsum(values) / len(values)


# pass@k


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
        (5, 2, 3, 0.9),  # 1 - C(3, 3) / C(5, 3) = 1 - 1 / 10
        (8, 0, 8, 0.0),
        (8, 1, 8, 1.0),
        (200, 3, 100, 1 - (100 * 99 * 98) / (200 * 199 * 198)),
    ],
)
def test_pass_at_k_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_mean_over_subsets(case):
    n, c, k = case
    assert pass_at_k(n, c, k) == pytest.approx(over_subsets([1] * c + [0] * (n - c), k, max), abs=1e-12)


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_binomial_formula(case):
    n, c, k = case
    exact = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert pass_at_k(n, c, k) == pytest.approx(exact, abs=1e-9)
    assert 0 <= pass_at_k(n, c, k) <= 1


def test_pass_at_1_is_the_share_and_pass_at_n_is_any():
    for n in range(1, 20):
        for c in range(n + 1):
            assert pass_at_k(n, c, 1) == pytest.approx(c / n)
            assert pass_at_k(n, c, n) == (c > 0)


# best@k


def test_best_at_k_by_hand():
    # Ranked: 1, 0, 0, 1. Of 6 pairs, 3 have the first (reward 1), 2 the second (0), 1 the third (0): 3 / 6.
    assert best_at_k([0, 1, 1, 0], [-2.0, -1.0, -4.0, -3.0], 2) == pytest.approx(0.5)
    assert best_at_k([1.0, 0.0], [-5.0, -5.0], 2) == pytest.approx(0.5)  # a tie
    assert best_at_k([0.25, 1.0], [-1.0, -2.0], 2) == pytest.approx(0.25)


@given(rewards_and_scores, st.data())
def test_best_at_k_is_the_mean_over_subsets(samples, data):
    k = data.draw(st.integers(1, len(samples)))

    def reward_of_best(subset):
        top = max(score for _, score in subset)
        return mean([reward for reward, score in subset if score == top])

    rewards, scores = zip(*samples, strict=True)
    assert best_at_k(rewards, scores, k) == pytest.approx(over_subsets(samples, k, reward_of_best), abs=1e-12)


@given(rewards_and_scores, st.randoms())
def test_best_at_k_does_not_depend_on_the_order(samples, rng):
    shuffled = samples[:]
    rng.shuffle(shuffled)
    for k in range(1, len(samples) + 1):
        assert best_at_k(*zip(*samples, strict=True), k) == pytest.approx(best_at_k(*zip(*shuffled, strict=True), k))


def test_best_at_1_is_the_mean_reward():
    assert best_at_k([1, 0, 0, 0.5], [-1, -2, -3, -4], 1) == pytest.approx(0.375)


@pytest.mark.parametrize("missing", [None, math.nan])
def test_best_at_k_has_no_value_without_every_score(missing):
    assert best_at_k([1, 0], [-1.0, missing], 1) is None


# majority@k


def vote(subset):
    """The probability that the correct answer (named True) wins; None has no vote."""
    votes = Counter(answer for answer in subset if answer is not None)
    top = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == top]
    return 1 / len(winners) if True in winners else 0.0


def test_majority_at_k_by_hand():
    assert majority_at_k(2, [1], 3) == 1.0
    assert majority_at_k(1, [2], 3) == 0.0
    assert majority_at_k(1, [1], 2) == 0.5  # a tie
    assert majority_at_k(1, [1, 1], 3) == pytest.approx(1 / 3)
    assert majority_at_k(1, [], 4, abstained=3) == 1.0  # the only vote
    assert majority_at_k(0, [], 2, abstained=2) == 0.0
    # 2 correct, one wrong answer twice; of 4 triples 2 have two correct ones, 2 have two wrong ones.
    assert majority_at_k(2, [2], 3) == pytest.approx(0.5)


@given(st.integers(0, 4), st.lists(st.integers(1, 4), max_size=3), st.integers(0, 3), st.data())
@settings(deadline=None)
def test_majority_at_k_is_the_mean_over_subsets(correct, wrong, abstained, data):
    answers = [True] * correct + [f"w{i}" for i, size in enumerate(wrong) for _ in range(size)] + [None] * abstained
    if not answers:
        return
    k = data.draw(st.integers(1, len(answers)))
    expected = over_subsets(answers, k, vote)
    assert majority_at_k(correct, wrong, k, abstained=abstained) == pytest.approx(expected, abs=1e-12)


def test_majority_at_k_agrees_with_a_simulation_of_many_samples():
    rng = random.Random(0)
    answers = [True] * 20 + ["a"] * 18 + ["b"] * 9 + ["c", "d", "e"] + [None] * 14
    exact = majority_at_k(20, [18, 9, 1, 1, 1], 16, abstained=14)
    simulated = mean([vote(rng.sample(answers, 16)) for _ in range(20000)])
    assert simulated == pytest.approx(exact, abs=4 * math.sqrt(0.25 / 20000))


def test_majority_of_1_and_of_all():
    assert majority_at_k(3, [2, 1], 1, abstained=2) == pytest.approx(3 / 8)
    assert majority_at_k(500, [400, 300], 1200) == 1.0  # enormous binomials


# Intervals


def test_wilson_interval_by_hand():
    # Newcombe 1998, table I, method 3
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
    assert wilson_interval(0, 0) == (0.0, 1.0)


@given(st.integers(1, 10**7).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_the_share_and_mirrors(case):
    hits, n = case
    low, high = wilson_interval(hits, n)
    assert 0 <= low <= hits / n <= high <= 1
    mirrored = wilson_interval(n - hits, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-9)


def multinomial_bootstrap(totals, sizes, *, resamples, seed):
    """The textbook's: questions drawn one by one with replacement."""
    rng = random.Random(seed)
    ratios = []
    for _ in range(resamples):
        drawn = rng.choices(range(len(totals)), k=len(totals))
        ratios.append(sum(totals[i] for i in drawn) / sum(sizes[i] for i in drawn))
    ratios.sort()
    return ratios[int(0.025 * resamples)], ratios[int(0.975 * resamples)]


def test_bootstrap_interval_is_the_textbooks():
    rng = random.Random(1)
    sizes = [rng.choice([4, 8]) for _ in range(200)]
    totals = [sum(rng.random() < p for _ in range(n)) for n in sizes for p in [rng.random()]]
    low, high = bootstrap_interval(totals, sizes, resamples=4000)
    expected = multinomial_bootstrap(totals, sizes, resamples=2000, seed=2)
    assert (low, high) == pytest.approx(expected, abs=0.1 * (high - low))


def test_bootstrap_interval_counts_alike_questions_together():
    totals, counts = [0, 1, 2, 3, 4], [30, 10, 20, 5, 35]
    together = bootstrap_interval(totals, [4] * 5, counts, resamples=4000)
    one_by_one = bootstrap_interval(
        [t for t, c in zip(totals, counts, strict=True) for _ in range(c)], [4] * 100, resamples=4000
    )
    assert together == pytest.approx(one_by_one, abs=0.1 * (together[1] - together[0]))


def test_bootstrap_interval_is_wider_than_if_samples_were_independent():
    # Half of the questions are always right, half always wrong: 16 samples of each say no more than one would.
    low, high = bootstrap_interval([0, 16], [16, 16], [50, 50])
    width = wilson_interval(50, 100)
    assert high - low == pytest.approx(width[1] - width[0], rel=0.1)
    naive = wilson_interval(800, 1600)
    assert high - low > 3 * (naive[1] - naive[0])


def test_bootstrap_interval_covers_the_truth():
    rng = random.Random(3)
    hits, trials, truth = 0, 200, 1 / 3  # questions ~ Beta(1, 2)
    for trial in range(trials):
        kinds = Counter(sum(rng.random() < p for _ in range(4)) for p in (rng.betavariate(1, 2) for _ in range(100)))
        low, high = bootstrap_interval(list(kinds), [4] * len(kinds), list(kinds.values()), seed=trial, resamples=400)
        hits += low <= truth <= high
    assert 0.90 <= hits / trials <= 0.99


def test_bootstrap_interval_is_reproducible_and_seeded():
    case = ([0, 1, 2], [2, 2, 2], [5, 6, 7])
    assert bootstrap_interval(*case) == bootstrap_interval(*case)
    assert bootstrap_interval(*case, seed=1) != bootstrap_interval(*case, seed=2)


def test_bootstrap_interval_of_a_handful_and_of_a_million():
    assert bootstrap_interval([1.0], [2]) == (0.5, 0.5)
    low, high = bootstrap_interval([0, 1], [1, 1], [600_000, 400_000], resamples=500)
    assert (low, high) == pytest.approx(wilson_interval(400_000, 1_000_000), abs=2e-4)


# Paired tests


@pytest.mark.parametrize(
    ("only_a", "only_b", "expected"),
    [
        (0, 0, 1.0),
        (3, 3, 1.0),
        (0, 5, 2 / 32),
        (0, 6, 2 / 64),
        (1, 8, 2 * (1 + 9) / 512),
        (2, 10, 2 * (1 + 12 + 66) / 4096),
    ],
)
def test_mcnemar_by_hand(only_a, only_b, expected):
    assert mcnemar_exact(only_a, only_b) == pytest.approx(expected, rel=1e-12)
    assert mcnemar_exact(only_b, only_a) == mcnemar_exact(only_a, only_b)


def test_mcnemar_of_a_hundred_thousand_is_that_of_the_normal_distribution():
    z = (1000 - 1) / math.sqrt(100_000)  # with the correction for continuity
    assert mcnemar_exact(49_500, 50_500) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=1e-3)


def test_detectable_difference_by_hand():
    # (1.96 + 0.8416) * sqrt(0.2 / 1000)
    assert detectable_difference(0.2, 1000) == pytest.approx(0.03962, abs=1e-5)
    assert detectable_difference(0.2, 1000, seed_variance=0.0006) == pytest.approx(2 * 0.03962, abs=1e-5)
    assert detectable_difference(0.0, 100) == 0.06  # six discordant questions, or the exact test shows nothing
    assert detectable_difference(1.0, 3) == 1.0


def test_questions_needed_by_hand():
    assert questions_needed(0.2, 0.03962) == pytest.approx(1000, abs=1)
    assert questions_needed(0.2, -0.03962) == questions_needed(0.2, 0.03962)
    assert questions_needed(0.01, 0.01) == 785  # 2.8016**2 / 0.01 = 784.9
    assert questions_needed(0.5, 0.5) == 16
    assert questions_needed(0.2, 0.0) is None
    assert questions_needed(0.2, 0.03962, seed_variance=0.0002) is None


@given(st.floats(0.001, 1), st.integers(7, 10**6), st.floats(0, 1e-3))
def test_questions_needed_undoes_detectable_difference(mean_square, questions, seed_variance):
    smallest = detectable_difference(mean_square, questions, seed_variance=seed_variance)
    needed = questions_needed(mean_square, smallest, seed_variance=seed_variance)
    assert needed is None or needed <= questions * (1 + 1e-6) + 1


def test_the_detectable_difference_is_detected_in_4_of_5_trials():
    rng = random.Random(4)
    questions, discordant, trials = 400, 0.3, 400
    smallest = detectable_difference(discordant, questions)
    shown = 0
    for _ in range(trials):
        draws = [rng.random() for _ in range(questions)]
        only_b = sum(d < (discordant + smallest) / 2 for d in draws)
        only_a = sum((discordant + smallest) / 2 <= d < discordant for d in draws)
        shown += mcnemar_exact(only_a, only_b) < 0.05
    assert 0.72 <= shown / trials <= 0.88
