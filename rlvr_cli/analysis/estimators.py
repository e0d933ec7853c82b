"""Estimators over samples and questions: numbers in, numbers out, with only the standard library.

n is the number of samples of a question, c the number of correct ones, k the number drawn. All metrics at k are exact
expectations over all k-subsets of the n samples; nothing is simulated.
"""

import functools
import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, groupby

CONFIDENCE_Z = 1.959963984540054  # two-sided 95 %
POWER_Z = 0.8416212335729143  # 80 %
FEWEST_DISCORDANT = 6  # McNemar's exact test cannot reach 5 % with fewer: 2 / 2 ** 5 > 0.05 > 2 / 2 ** 6


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement is correct.

    1 - C(n - c, k) / C(n, k), as a product that neither overflows nor cancels (Chen et al. 2021, arXiv:2107.03374).
    """
    assert 0 <= c <= n, (n, c)
    assert 1 <= k <= n, (n, k)
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def best_at_k(rewards: Sequence[float], scores: Sequence[float | None], k: int) -> float | None:
    """Expected reward of the sample with the highest score among k drawn without replacement, ties broken at random.

    The sample with the i-th best score (from 0) is the best one drawn with probability C(n - 1 - i, k - 1) / C(n, k).

    Args:
        rewards: one per sample.
        scores: one per sample, such as the mean log-probability of its tokens.

    Returns:
        None when a score is missing or nan, because the samples then have no order.
    """
    n = len(rewards)
    assert 1 <= k <= n, (n, k)
    if any(s is None or math.isnan(s) for s in scores):
        return None
    ranked = sorted(zip(scores, rewards, strict=True), key=lambda pair: pair[0] or 0.0, reverse=True)
    expected, better, reaching = 0.0, 0, 1.0  # reaching: the share of draws without any of the `better` best samples
    for _, tied in groupby(ranked, key=lambda pair: pair[0]):
        group = [reward for _, reward in tied]
        # The best sample drawn is in this group if none is better, and not all k are worse.
        below = reaching
        for passed in range(better, better + len(group)):
            below *= max(n - k - passed, 0) / (n - passed)
        expected += (reaching - below) * (math.fsum(group) / len(group))
        better, reaching = better + len(group), below
    return expected


def majority_at_k(correct: int, wrong: Sequence[int], k: int, *, abstained: int = 0) -> float:
    """Probability that a majority vote of k samples drawn without replacement is correct (Wang et al. 2022).

    The answer with the most votes wins; ties are broken at random. All correct samples count as the same answer.

    Args:
        correct: number of correct samples.
        wrong: for each different wrong answer, the number of samples that gave it.
        abstained: number of samples without an answer; they do not vote.
    """
    n = correct + sum(wrong) + abstained
    assert 1 <= k <= n, (n, k)
    return _majority_at_k(correct, tuple(sorted(wrong)), abstained, k)


@functools.lru_cache(maxsize=1 << 16)  # many questions have the same vote counts
def _majority_at_k(correct: int, wrong: tuple[int, ...], abstained: int, k: int) -> float:
    draws = math.comb(correct + sum(wrong) + abstained, k)
    expected = 0.0
    fewest = max(1, k - abstained - sum(wrong))
    for votes in range(fewest, min(correct, k) + 1):
        # Count the draws of the other k - votes samples in which no wrong answer gets more than `votes`, by the number of
        # wrong answers that tie. Wrong answers that cannot reach `votes` are pooled with the abstentions.
        rivals = [size for size in wrong if size >= votes]
        rest = abstained + sum(wrong) - sum(rivals)
        ways: dict[tuple[int, int], int] = {
            (0, 0): 1
        }  # (samples drawn from rivals, rivals with as many votes) -> draws
        for size in rivals:
            grown: Counter[tuple[int, int]] = Counter()
            for (drawn, ties), count in ways.items():
                for more in range(min(votes, k - votes - drawn) + 1):
                    grown[drawn + more, ties + (more == votes)] += count * math.comb(size, more)
            ways = grown
        for (drawn, ties), count in ways.items():
            others = math.comb(rest, k - votes - drawn)
            expected += math.comb(correct, votes) * count * others / (draws * (1 + ties))
    return expected


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95 % interval of a proportion from n independent trials (Wilson 1927); (0, 1) for n = 0."""
    assert 0 <= successes <= n, (successes, n)
    if n == 0:
        return 0.0, 1.0
    z2 = CONFIDENCE_Z**2
    share = successes / n
    center = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = CONFIDENCE_Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    low = 0.0 if successes == 0 else max(0.0, center - half)
    return low, 1.0 if successes == n else min(1.0, center + half)


def bootstrap_interval(
    totals: Sequence[float],
    sizes: Sequence[float],
    counts: Sequence[int] | None = None,
    *,
    seed: int = 0,
    resamples: int = 1000,
) -> tuple[float, float]:
    """95 % interval of sum(totals) / sum(sizes) by the percentile bootstrap over questions.

    Samples of the same question are correlated, so whole questions are resampled. Each question is drawn Poisson(1) times
    (Hanley and MacGibbon 2006), so m identical questions are drawn Poisson(m) times together. The cost therefore depends on
    the number of different kinds of questions, not on the number of questions.

    Args:
        totals: per kind of question, the sum over its samples of the averaged quantity.
        sizes: per kind of question, the number of samples of such a question.
        counts: per kind of question, how many there are; None for one of each.
    """
    counts = [1] * len(totals) if counts is None else counts
    assert sum(counts) > 0, "no question"
    draw = random.Random(seed).random
    sums, weights = [0.0] * resamples, [0.0] * resamples
    for total, size, count in zip(totals, sizes, counts, strict=True):
        least, cumulative = _poisson_table(count)
        drawn = [least + bisect_left(cumulative, draw()) for _ in range(resamples)]
        sums = [s + d * total for s, d in zip(sums, drawn, strict=True)]
        weights = [w + d * size for w, d in zip(weights, drawn, strict=True)]
    ratios = [s / w for s, w in zip(sums, weights, strict=True) if w]  # a resample of few questions can be empty
    ratios.sort()
    return _quantile(ratios, 0.025), _quantile(ratios, 0.975)


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided p-value of McNemar's exact test (1947), whose null hypothesis is that A and B solve equally many questions.

    It is twice the probability of min(only_a, only_b) or fewer heads in only_a + only_b tosses of a fair coin, at most 1.

    Args:
        only_a: questions that A solved and B did not.
        only_b: questions that B solved and A did not.
    """
    n, fewer = only_a + only_b, min(only_a, only_b)
    if n == 0:
        return 1.0
    logs = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in range(fewer + 1)]
    return min(1.0, 2 * math.fsum(math.exp(log - n * math.log(2)) for log in logs))


def detectable_difference(mean_square: float, questions: int, *, seed_variance: float = 0.0) -> float:
    """The smallest true difference of accuracy that a two-sided paired test at 5 % detects with 80 % power.

    (z_0.975 + z_0.8) * sqrt(mean_square / questions + seed_variance). With one sample per question, the mean square is the
    share of discordant questions, and this is the formula of Miettinen (1968) for McNemar's test without its second-order
    term. It is at least `FEWEST_DISCORDANT` / questions: with fewer discordant questions the exact test is never significant.

    Args:
        mean_square: mean over the questions of the squared difference between the shares of correct samples.
        seed_variance: variance, over seeds, of the difference between the two accuracies.
    """
    assert questions > 0, questions
    smallest = (CONFIDENCE_Z + POWER_Z) * math.sqrt(mean_square / questions + seed_variance)
    return min(1.0, max(smallest, FEWEST_DISCORDANT / questions))


def questions_needed(mean_square: float, difference: float, *, seed_variance: float = 0.0) -> int | None:
    """The number of questions needed to detect a difference with 80 % power: `detectable_difference` solved for `questions`.

    Returns:
        None if no number suffices: the difference is 0, or too small compared with the variation between seeds.
    """
    left = (difference / (CONFIDENCE_Z + POWER_Z)) ** 2 - seed_variance
    if left <= 0:
        return None
    return math.ceil(max(mean_square / left, FEWEST_DISCORDANT / abs(difference)))


@functools.lru_cache(maxsize=1024)
def _poisson_table(rate: int) -> tuple[int, list[float]]:
    """Least value of Poisson(rate), and cumulative probabilities from it on; the tails cut off have probability < 1e-20."""
    spread = 10 * math.sqrt(rate) + 20
    least, most = max(0, int(rate - spread)), int(rate + spread)
    logs = [k * math.log(rate) - rate - math.lgamma(k + 1) for k in range(least, most)] if rate else [0.0]
    cumulative = list(accumulate(map(math.exp, logs)))
    return least, [*cumulative[:-1], 1.0]


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
