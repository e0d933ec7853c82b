"""Statistics: against hand-worked values, and against references that enumerate every subset or simulate."""

import math
import random
from collections import Counter
from itertools import combinations
from statistics import fmean as mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranking import ranked
from rlvr_cli.analysis.statistics.estimators import (
    Spread,
    _drawn_majority_at_k,
    best_at_k,
    detectable_difference,
    effective_number,
    majority_at_k,
    mcnemar_exact,
    mean_interval,
    pass_at_k,
    questions_needed,
    share_interval,
    spread_of,
    t_quantile,
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
    assert best_at_k(ranked([0, 1, 1, 0], [-2.0, -1.0, -4.0, -3.0]), 2) == pytest.approx(0.5)
    assert best_at_k(ranked([1.0, 0.0], [-5.0, -5.0]), 2) == pytest.approx(0.5)  # a tie
    assert best_at_k(ranked([0.25, 1.0], [-1.0, -2.0]), 2) == pytest.approx(0.25)


@given(rewards_and_scores, st.data())
def test_best_at_k_is_the_mean_over_subsets(samples, data):
    k = data.draw(st.integers(1, len(samples)))

    def reward_of_best(subset):
        top = max(score for _, score in subset)
        return mean([reward for reward, score in subset if score == top])

    rewards, scores = zip(*samples, strict=True)
    assert best_at_k(ranked(rewards, scores), k) == pytest.approx(over_subsets(samples, k, reward_of_best), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(9, 3, 2), (600, 5, 40), (600, 0, 3), (600, 599, 600)])
def test_best_at_k_of_right_samples_first_is_pass_at_k(n, c, k):
    assert best_at_k([1.0] * c + [0.0] * (n - c), k) == pytest.approx(pass_at_k(n, c, k), rel=1e-12)


def test_best_at_1_is_the_mean_reward():
    assert best_at_k([1, 0, 0, 0.5], 1) == pytest.approx(0.375)


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
    simulated = mean([vote(rng.sample(answers, 16)) for _ in range(4000)])
    assert simulated == pytest.approx(exact, abs=4 * math.sqrt(0.25 / 4000))


@given(st.integers(0, 40), st.lists(st.integers(1, 30), max_size=8), st.integers(0, 20), st.data())
@settings(max_examples=20)
def test_drawn_majorities_are_those_that_are_counted(correct, wrong, abstained, data):
    n = correct + sum(wrong) + abstained
    k = data.draw(st.integers(1, n)) if n else 0
    if k:
        drawn = _drawn_majority_at_k(correct, sorted(wrong), abstained, k)
        assert drawn == pytest.approx(majority_at_k(correct, wrong, k, abstained=abstained), abs=5 * 0.016)


def test_majorities_of_100_000_samples_are_drawn():
    wrong = [1000 + i % 400 for i in range(60)]  # to count these would take years
    n = 20_000 + sum(wrong)
    assert majority_at_k(20_000, wrong, n) == 1.0
    assert majority_at_k(1_399, wrong, 1_000) < 0.3 < majority_at_k(20_000, wrong, 4)
    assert majority_at_k(20_000, wrong, 1) == pytest.approx(20_000 / n)


def test_majority_of_1_and_of_all():
    assert majority_at_k(3, [2, 1], 1, abstained=2) == pytest.approx(3 / 8)
    assert majority_at_k(500, [400, 300], 1200) == 1.0  # enormous binomials


# Intervals


def test_the_interval_of_a_share_by_hand():
    # Agresti and Coull: (4 + 1.92) / (20 + 3.84) +- 1.96 sqrt(0.248 * 0.752 / 23.84); Brown, Cai and DasGupta 2001 count so too
    assert share_interval(4 / 20, 20) == pytest.approx((0.0749, 0.4218), abs=5e-5)
    assert share_interval(0.0, 20) == pytest.approx((0.0, 0.1898), abs=5e-5)
    assert share_interval(0.0, 0) == (0.0, 1.0)
    assert share_interval(0.3, 20, z=4.0)[1] > share_interval(0.3, 20)[1]


@given(st.integers(1, 10**7).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_of_a_share_holds_it_and_wilsons_and_mirrors(case):
    hits, n = case
    low, high = share_interval(hits / n, n)
    z2, share = 1.959963984540054**2, hits / n
    center = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    assert 0 <= low <= max(center - half, 0) + 1e-9
    assert min(center + half, 1) - 1e-9 <= high <= 1
    assert share_interval((n - hits) / n, n) == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_the_effective_number_goes_from_questions_to_samples():
    assert effective_number([(0, 1, 12), (1, 1, 8)]) == pytest.approx(20)  # one sample each: nothing is alike
    assert effective_number([(0, 8, 20)]) == pytest.approx(20)  # nothing shows how alike: as if all alike
    assert effective_number([(0, 8, 10), (8, 8, 10)]) == pytest.approx(20)  # all alike
    # 20 questions, 1 of 4 right in each: no question differs from the others, so 80, with one question more of weight 1 / 20
    assert effective_number([(1, 4, 20)]) == pytest.approx(21 / (20 / 80 + 1 / 20))
    # by hand: (1, 2), (2, 2): share 3/4, squares 2 (1/2)**2 = 1/2, so 1/2 / 16 / (3/16) = 1/6 below 1/4; one shows a miss
    assert effective_number([(1, 2, 1), (2, 2, 1)]) == pytest.approx(2 / (1 / 4 + 1 / 2))
    assert effective_number([(0.5, 1, 4), (1.0, 1, 4)], draws=16) <= 16
    assert effective_number([(3, 8, 600_000), (5, 8, 400_000)]) == pytest.approx(8_000_000, rel=1e-4)


@pytest.mark.parametrize(
    ("p", "df", "expected"),
    [  # tables of Student's t
        (0.975, 1, 12.7062047), (0.975, 2, 4.30265273), (0.975, 4, 2.77644511), (0.8, 19, 0.86095055), (0.975, 100, 1.98397152),
        (0.975, 1000, 1.96233908), (0.975, 1001, 1.96233670), (0.975, math.inf, 1.95996398), (0.995, 3, 5.84090931), (0.5, 3, 0.0),
    ],
)  # fmt: skip
def test_student_quantiles(p, df, expected):
    assert t_quantile(p, df) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_the_interval_of_a_mean_is_students_over_questions():
    # means 1, 2 and 6 of one sample each: 3 +- 4.3027 * sqrt(7) / sqrt(3)
    assert mean_interval([(1.0, 1, 1), (2.0, 1, 1), (6.0, 1, 1)]) == pytest.approx((-3.5725, 9.5725), abs=1e-4)
    assert mean_interval([(5.0, 4, 1)]) is None
    assert (
        mean_interval([(0.1 + 0.2, 3, 4), (0.1, 1, 7)]) is None
    )  # all 0.1 but for rounding: how questions vary is not seen
    assert mean_interval([(0.0, 1, 5)]) is None


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


def test_the_seeds_add_what_sampling_noise_does_not_explain():
    # A: means spread with variance 0.0006, of which noise explains 0.0002; B less than its noise, which takes from the sum
    spread = spread_of(0.4, questions=100, arms=[(0.0006, 0.0002, 3), (0.0001, 0.0002, 4)])
    seen, noise = 0.0006 / 3 + 0.0001 / 4, 0.0002 / 3 + 0.0002 / 4
    assert spread.seeds == pytest.approx(seen - noise)
    df = seen**2 / ((0.0006 / 3) ** 2 / 2 + (0.0001 / 4) ** 2 / 3)  # Welch, Satterthwaite
    assert spread.seed_df == pytest.approx(df)
    assert spread.unsure == pytest.approx(seen - noise * df / (df + 4))
    error, of_error = spread.error(100)
    assert error == pytest.approx(math.sqrt(0.004 + seen - noise))
    assert of_error == pytest.approx(error**4 / (0.004**2 / 99 + spread.unsure**2 / df))
    assert spread_of(0.4, questions=100, arms=[(0.0, 0.0, 1)] * 2) == Spread(0.4, questions=100)
    calm = spread_of(0.4, questions=100, arms=[(0.0001, 0.0002, 3)] * 2)
    assert (calm.seeds, calm.error(100)[0]) == (0.0, pytest.approx(0.4**0.5 / 10))


def test_a_difference_is_known_at_least_as_well_as_its_least_known_part():
    """Three seeds against three whose runs spread more than their paired questions do, but not beyond the noise of each run alone."""
    spread = Spread(per_question=0.0384, seeds=0.0, unsure=7.4e-4, seed_df=4.0, questions=128)
    assert spread.error(128) == (pytest.approx(math.sqrt(0.0384 / 128)), 4.0), "Satterthwaite's alone: 0.65"
    assert Spread(0.0384, 0.0, 7.4e-4, 4.0, 3).error(3)[1] == pytest.approx(2.0), "no more than the questions'"
    known = Spread(per_question=1.0, seeds=0.001, unsure=0.001, seed_df=4.0, questions=1000)
    assert known.error(1000)[1] == pytest.approx(0.002**2 / (0.001**2 / 999 + 0.001**2 / 4)), (
        "where nothing is too large"
    )


def test_an_arm_of_one_run_takes_its_spread_from_the_other():
    spread = spread_of(0.4, questions=100, arms=[(0.0, 0.0, 1), (0.0006, 0.0002, 3)])
    assert (spread.seeds, spread.seed_df) == (pytest.approx(0.0004 * (1 + 1 / 3)), pytest.approx(2))


def test_detectable_difference_by_hand():
    # (t_0.975 + t_0.8 of 999 degrees of freedom) * sqrt(0.2 / 1000), and the median of chi-square with 999 is 998.33
    expected = (1.96234 + 0.84198) * 0.0141421 * (999 / 998.3334) ** 0.5
    assert detectable_difference(Spread(0.2), 1000) == pytest.approx(expected, abs=1e-6)
    # All from the seeds, with 4 degrees of freedom: t_0.975 = 2.77645, t_0.8 = 0.94096, the median of chi-square is 3.35669
    expected = (2.77645 + 0.94096) * 0.03 * (4 / 3.35669) ** 0.5
    assert detectable_difference(Spread(0.0, 0.0009, 0.0009, 4, 1000), 1000) == pytest.approx(expected, rel=4e-3)
    assert detectable_difference(Spread(0.0), 100) == 0.06  # six discordant questions, or the exact test shows nothing
    assert detectable_difference(Spread(1.0), 3) == 1.0


def test_questions_needed_by_hand():
    assert questions_needed(Spread(0.2), 0.03962) == pytest.approx(1000, abs=3)
    assert questions_needed(Spread(0.2), -0.03962) == questions_needed(Spread(0.2), 0.03962)
    assert questions_needed(Spread(0.01), 0.01) == pytest.approx(785, abs=3)  # 2.8016**2 / 0.01 = 784.9
    assert questions_needed(Spread(0.2), 0.0) is None
    assert questions_needed(Spread(0.0), 1.0) == 6  # of fewer, no test can tell
    assert questions_needed(Spread(0.2, 0.0002, 0.0002, 4, 1000), 0.03962) is None


@given(st.floats(0.001, 1), st.integers(7, 10**6), st.floats(0, 1e-3))
def test_questions_needed_undoes_detectable_difference(mean_square, questions, seeds):
    spread = Spread(mean_square, seeds, seeds, 3, questions)
    needed = questions_needed(spread, detectable_difference(spread, questions))
    assert needed is None or needed <= questions * (1 + 1e-6) + 1


def test_the_detectable_difference_is_detected_in_4_of_5_trials():
    rng = random.Random(4)
    questions, discordant, trials = 400, 0.3, 400
    smallest = detectable_difference(Spread(discordant), questions)
    shown = 0
    for _ in range(trials):
        draws = [rng.random() for _ in range(questions)]
        only_b = sum(d < (discordant + smallest) / 2 for d in draws)
        only_a = sum((discordant + smallest) / 2 <= d < discordant for d in draws)
        shown += mcnemar_exact(only_a, only_b) < 0.05
    assert 0.72 <= shown / trials <= 0.88
