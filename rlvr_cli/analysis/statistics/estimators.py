"""Estimators over samples and questions: numbers in, numbers out.

n is the number of samples of a question, c the number of correct ones, k the number drawn. All metrics at k are exact
expectations over all k-subsets of the n samples; only the majority of more than `COUNTED_SAMPLES` is simulated.
"""

import functools
import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from statistics import NormalDist

CONFIDENCE_Z = 1.959963984540054  # two-sided 95 %
COUNTED_SAMPLES = 512  # of a question: of more, majority@k is drawn, since to count it takes minutes
VOTES_DRAWN = 1000
FEWEST_DISCORDANT = 6  # McNemar's exact test cannot reach 5 % with fewer: 2 / 2 ** 5 > 0.05 > 2 / 2 ** 6


# Kinds of questions: (value summed over a question's samples, its samples, number of such questions).
QuestionKinds = Sequence[tuple[float, float, int]]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement is correct.

    1 - C(n - c, k) / C(n, k), as a product that neither overflows nor cancels (Chen et al. 2021, arXiv:2107.03374).
    """
    assert 0 <= c <= n, (n, c)
    assert 1 <= k <= n, (n, k)
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Expected reward of the sample with the highest score among k drawn without replacement, ties broken at random.

    The sample with the i-th best score (from 0) is the best one drawn with probability C(n - 1 - i, k - 1) / C(n, k).

    Args:
        rewards: one per sample, in the order of their scores, such as the mean log-probabilities of their tokens; the best
            first. Those whose scores are equal all have their mean.
    """
    return sum(map(mul, _shares_best(len(rewards), k), rewards))


@functools.lru_cache(maxsize=1)  # the next question mostly has as many samples
def _shares_best(n: int, k: int) -> Sequence[float]:
    """The share of draws of k of n samples in which the best sample, the 2nd best, ... is the best one drawn."""
    # The share in which none of the 0, 1, 2, ... best samples is drawn.
    if n <= COUNTED_SAMPLES:
        without = accumulate((max(n - k - i, 0) / (n - i) for i in range(n)), mul, initial=1.0)
        return array("d", (above - below for above, below in pairwise(without)))
    import numpy as np  # ten times as fast, but most runs do without

    left = np.arange(n, 0, -1)
    shares = -np.diff(np.cumprod(np.maximum(left - k, 0) / left), prepend=1.0)
    return array("d", shares.tobytes())


def majority_at_k(correct: int, wrong: Sequence[int], k: int, *, abstained: int = 0) -> float:
    """Probability that a majority vote of k samples drawn without replacement is correct (Wang et al. 2022).

    The answer with the most votes wins; ties are broken at random. All correct samples count as the same answer.
    Exact for up to `COUNTED_SAMPLES` samples; the time of that grows with their fourth power, so of more it is the mean of
    `VOTES_DRAWN` votes, drawn with a fixed seed: its standard error is at most 0.016.

    Args:
        correct: number of correct samples.
        wrong: for each different wrong answer, the number of samples that gave it.
        abstained: number of samples without an answer; they do not vote.
    """
    n = correct + sum(wrong) + abstained
    assert 1 <= k <= n, (n, k)
    if n <= COUNTED_SAMPLES or k == 1:
        return _majority_at_k(correct, tuple(sorted(wrong)), abstained, k)
    return _drawn_majority_at_k(correct, sorted(wrong), abstained, k)


def _drawn_majority_at_k(correct: int, wrong: Sequence[int], abstained: int, k: int) -> float:
    import numpy as np  # here: most runs do without

    sizes, generator, won = [correct, *wrong, abstained], np.random.default_rng(0), 0.0
    at_once = max(2**20 // len(sizes), 1)
    method = "count" if k < len(sizes) else "marginals"  # its time grows with k, or with the number of answers
    for first in range(0, VOTES_DRAWN, at_once):
        drawn = generator.multivariate_hypergeometric(sizes, k, size=min(at_once, VOTES_DRAWN - first), method=method)
        votes, rivals = drawn[:, 0], drawn[:, 1:-1]
        unbeaten = (votes > 0) & (rivals.max(axis=1, initial=0) <= votes)
        won += (unbeaten / (1 + (rivals == votes[:, None]).sum(axis=1))).sum()
    return float(won / VOTES_DRAWN)


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


def share_interval(share: float, n: float, *, z: float = CONFIDENCE_Z) -> tuple[float, float]:
    """95 % interval of a share of n independent trials (Agresti and Coull 1998); (0, 1) for n = 0.

    It is the usual interval after z**2 / 2 successes and as many failures are added, about two each. Wilson's interval (1927)
    has the same center and lies inside it; it holds the truth too seldom for some shares near 0 and 1 (`benchmarks/intervals.py`).

    Args:
        n: the effective number of trials, see `effective_number`; need not be whole.
        z: the normal quantile, or Student's if `n` is itself an estimate from few runs.
    """
    assert 0 <= share <= 1, share
    assert n >= 0, n
    if n == 0:
        return 0.0, 1.0
    center = (share * n + z * z / 2) / (n + z * z)
    half = z * math.sqrt(center * (1 - center) / (n + z * z))
    return max(0.0, center - half), min(1.0, center + half)


def effective_number(kinds: QuestionKinds, *, draws: float | None = None) -> float:
    """The number of independent trials that tell as much of a share as these samples do (Kish 1965).

    Samples of one question resemble each other. How much is estimated from the questions that show the rarer outcome; one
    question more is counted, whose samples are all alike. So the number goes from that of the questions, when no question shows
    the rarer outcome, to what the data say, and it is never above `draws`.

    Args:
        kinds: kinds of questions, whose values per sample are from 0 to 1.
        draws: separate observations of the value: samples, or for pass@k samples / k; None for the samples.
    """
    questions, size = sum(count for *_, count in kinds), sum(n * count for _, n, count in kinds)
    assert questions > 0, "no question"
    share = sum(total * count for total, _, count in kinds) / size
    alike = sum(n * n * count for _, n, count in kinds) / size**2
    rarer = min(
        sum(count for total, _, count in kinds if total > 0), sum(count for total, n, count in kinds if total < n)
    )
    if not rarer:
        return 1 / alike
    squares = sum((total - share * n) ** 2 * count for total, n, count in kinds)
    seen = max(squares / size**2 / (share * (1 - share)), 1 / (draws or size))
    return (rarer + 1) / (rarer * seen + alike)


def mean_interval(kinds: QuestionKinds) -> tuple[float, float] | None:
    """95 % interval of a mean over samples that need not lie between 0 and 1: Student's t over questions (Miller 2024).

    Returns:
        None for one question, or questions that are all equal: they do not show how questions vary.
    """
    questions, size = sum(count for *_, count in kinds), sum(n * count for _, n, count in kinds)
    if questions < 2:
        return None
    mean = sum(total * count for total, _, count in kinds) / size
    squares = sum((total - mean * n) ** 2 * count for total, n, count in kinds)
    if squares <= 1e-24 * (mean * size) ** 2:  # equal but for rounding
        return None
    half = t_quantile(0.975, questions - 1) * math.sqrt(squares * questions / (questions - 1)) / size
    return mean - half, mean + half


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over samples with its 95 % interval, and the method of the interval."""

    value: float
    low: float | None
    high: float | None
    interval: str


def share_of(kinds: QuestionKinds, *, draws: float | None = None) -> Estimate:
    """A mean of values from 0 to 1, with the interval for the effective number of samples; `draws` as in `effective_number`."""
    share = min(_kinds_mean(kinds), 1.0)  # rounding
    return Estimate(share, *share_interval(share, effective_number(kinds, draws=draws)), "agresti-coull")


def mean_of(kinds: QuestionKinds) -> Estimate:
    """A mean of any values, with Student's interval over the questions."""
    low, high = mean_interval(kinds) or (None, None)
    return Estimate(_kinds_mean(kinds), low, high, "" if low is None else "t by question")


def _kinds_mean(kinds: QuestionKinds) -> float:
    return sum(total * count for total, _, count in kinds) / sum(n * count for _, n, count in kinds)


@functools.lru_cache(maxsize=1024)
def t_quantile(p: float, df: float) -> float:
    """Quantile of Student's t, for p from 0.5 to 1 and df >= 1 that need not be whole; accurate to 1e-6.

    With t = sqrt(df) tan(angle) the density is that of the angle, in proportion to cos(angle) ** (df - 1): Simpson's rule for its
    integral, Newton's method for the quantile. For large df, the first terms of Cornish and Fisher's series (1938).
    """
    assert 0.5 <= p < 1, p
    assert df >= 1, df
    z = NormalDist().inv_cdf(p)
    if df > 1000:
        return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    angle = math.atan(z / math.sqrt(df))
    for _ in range(100):
        density = [scale * math.cos(angle * i / 40) ** (df - 1) for i in range(41)]
        held = angle / 120 * (density[0] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2]) + density[-1])
        angle += (p - 0.5 - held) / density[-1]
        if abs(p - 0.5 - held) < 1e-12:
            break
    return math.sqrt(df) * math.tan(angle)


def t_test(t: float, df: float) -> float:
    """Two-sided p-value of Student's t, for df >= 1 that need not be whole; accurate to 1e-6. The inverse of `t_quantile`."""
    assert df >= 1, df
    if df > 1000:  # Wallace (1959)
        t = t * (1 - 1 / (4 * df)) / math.sqrt(1 + t * t / (2 * df)) if math.isfinite(df) else t
        return math.erfc(abs(t) / math.sqrt(2))
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    angle, pieces = math.atan(abs(t) / math.sqrt(df)), 2000
    density = [scale * math.cos(angle * i / pieces) ** (df - 1) for i in range(pieces + 1)]
    held = angle / (3 * pieces) * (density[0] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2]) + density[-1])
    return min(1.0, max(0.0, 1 - 2 * held))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values of several tests, corrected for their number (Holm 1979): the chance that any of them is below 5 % although none of
    the differences exists is then at most 5 %, however the tests depend on one another. In the given order.
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for place, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[i]))
        corrected[i] = largest
    return corrected


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


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the uncertainty of a difference between two arms comes from; questions and seeds are counted once each."""

    per_question: float  # variance of a question's difference; the noise of sampling and grading is in it
    seeds: float = 0.0  # variance of the difference through the seeds, beyond that noise
    unsure: float = 0.0  # `seeds` and a part of the noise: what is known with only `seed_df` degrees of freedom
    seed_df: float = 1.0
    questions: int = 1  # with which all this was measured

    def error(self, questions: int) -> tuple[float, float]:
        """Standard error with that many questions and the same seeds, and its degrees of freedom.

        These are Satterthwaite's (1946), and no fewer than those of the part that is known least: `unsure` may be larger than the variance.
        """
        of_questions = self.per_question / questions
        unsure = self.seeds + (self.unsure - self.seeds) * self.questions / questions
        variance = of_questions + self.seeds
        doubt = of_questions**2 / max(questions - 1, 1) + unsure**2 / self.seed_df
        least = max(min(self.seed_df, questions - 1), 1.0)
        return math.sqrt(variance), max(variance**2 / doubt, least) if doubt else math.inf


def spread_of(per_question: float, *, questions: int, arms: Sequence[tuple[float, float, int]]) -> Spread:
    """Split the uncertainty of a difference into that of the questions and that of the seeds.

    The variance of a question's difference already has the noise of sampling in it. So the seeds add only what their means
    spread beyond this noise, and nothing if that is negative (method of moments, Searle 1971). The spread of few seeds is
    hardly known, even where it is no larger than the noise: for the degrees of freedom only the share df / (df + 4) of the
    noise is subtracted. The share was chosen by simulation: `benchmarks/intervals.py` shows the coverage.

    Args:
        per_question: variance over the questions of B's share minus A's.
        arms: of each, the variance of the means of its runs, that which the noise alone would give, and the number of runs.
            An arm of one run takes its spread from the other arm; if all have one run, seeds count for nothing.
    """
    known = [arm for arm in arms if arm[2] > 1]
    if not known:
        return Spread(per_question, questions=questions)
    filled = [arm if arm[2] > 1 else (*known[0][:2], 1) for arm in arms]
    seen, noise = (sum(arm[i] / arm[2] for arm in filled) for i in (0, 1))
    known_parts = [(v / runs, runs - 1) for v, _, runs in known]
    doubt = sum(part**2 / df for part, df in known_parts)
    df = sum(part for part, _ in known_parts) ** 2 / doubt if doubt else 1.0
    seeds, unsure = max(0.0, seen - noise), max(0.0, seen - noise * df / (df + 4))
    return Spread(per_question, seeds, unsure, df, questions)


def detectable_difference(spread: Spread, questions: int) -> float:
    """The smallest true difference of accuracy that a two-sided paired test at 5 % detects with 80 % power.

    (t_0.975 + t_0.8) standard errors. With one sample per question and one run an arm, and the mean square of the questions'
    differences as `per_question`, it is the formula of Miettinen (1968) for McNemar's test without its second-order term. It
    is at least `FEWEST_DISCORDANT` / questions: with fewer discordant questions the exact test is never significant.

    An error that was measured with few degrees of freedom is too small in more than half of all experiments: here it is divided
    by the median of what one measures where it is 1 (the root of chi-square / df; Wilson and Hilferty 1931).
    """
    assert questions > 0, questions
    error, df = spread.error(questions)
    error /= (1 - 2 / (9 * df)) ** 1.5
    return min(1.0, max((t_quantile(0.975, df) + t_quantile(0.8, df)) * error, FEWEST_DISCORDANT / questions))


def questions_needed(spread: Spread, difference: float) -> int | None:
    """The number of questions needed to detect a difference with 80 % power: the first that `detectable_difference` allows, and at
    least `FEWEST_DISCORDANT`.

    Returns:
        None if no number up to a billion suffices: the difference is 0, or too small compared with the variation between seeds.
    """
    most = 10**9
    if not difference or detectable_difference(spread, most) > abs(difference):
        return None
    return bisect_left(
        range(most), -abs(difference), lo=FEWEST_DISCORDANT, key=lambda n: -detectable_difference(spread, n)
    )
