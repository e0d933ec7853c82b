"""How often the 95 % intervals hold the truth, how wide they are, what a comparison detects, and how often alarms are false.

Enters: nothing but the package's own functions and numpy's random numbers, seeded. Leaves: tables on stdout.
`python benchmarks/intervals.py` takes some twenty minutes on one core; `--trials 200` a tenth of that.

Shares: questions of beta-distributed difficulty (`alike` is the correlation of the samples of a question), beside the interval
of 1.96 standard errors (Wald) and Wilson's for samples taken as independent.
Comparisons: the logit of a right answer is normal over questions, plus a normal effect of the seed. Beside: z over the paired
questions, which is right if seeds have no effect, and Welch's t over the runs' means, which is right if they have one.
Alarms: runs in which nothing changes.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlvr_cli.analysis.statistics.alarms import find_alarms
from rlvr_cli.analysis.statistics.comparison import paired_difference
from rlvr_cli.analysis.statistics.estimators import (
    CONFIDENCE_Z,
    detectable_difference,
    effective_number,
    pass_at_k,
    questions_needed,
    share_interval,
    t_quantile,
)

Array = np.ndarray[Any, Any]

SHARES = (0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99)
# questions, samples, k, correlation of a question's samples
CLUSTERS = [
    *((q, 1, 1, 0.0) for q in (20, 100, 1000)),
    *((q, m, 1, alike) for q in (20, 100, 1000) for m in (4, 8) for alike in (0.05, 0.3, 0.7)),
    *((q, 8, k, 0.3) for q in (20, 100, 1000) for k in (4, 8)),
]  # fmt: skip
# runs an arm, questions, samples, standard deviation of a seed's effect on the logit
ARMS = [
    (runs, questions, samples, effect)
    for runs in (1, 2, 3, 5)
    for questions in (20, 100, 1000)
    for samples in (1, 8)
    for effect in ((0.0, 0.1, 0.3) if runs > 1 else (0.0,))
]
# steps, responses of a step, size of a group, standard deviation of the logarithm of the gradient norm
RUNS = [
    *((s, n, g, 0.3) for s, n, g in ((5, 32, 4), (10, 64, 8), (5, 256, 8), (20, 64, 8), (40, 256, 8), (200, 256, 8))),
    *((s, 256, 8, 0.9) for s in (5, 10, 40, 200)),
]


def shares_held(case: tuple[int, int, int, float], *, share: float, trials: int, seed: int = 0) -> dict[str, Array]:
    """For each method the share of trials whose interval holds the truth, and its mean width: (2,) each."""
    questions, samples, k, alike = case
    rng = np.random.default_rng((seed, questions, samples, k, round(1000 * alike), round(1000 * share)))
    a, b = (x * (1 / alike - 1) for x in (share, 1 - share)) if alike else (0.0, 0.0)
    difficulty = rng.beta(a, b, (trials, questions)) if alike else np.full((trials, questions), share)
    correct = rng.binomial(samples, difficulty)
    value = np.array([pass_at_k(samples, c, k) for c in range(samples + 1)])
    truth = 1 - _mean_of_all_wrong(a, b, k) if alike else 1 - (1 - share) ** k
    held: dict[str, list[tuple[float, float]]] = {"ours": [], "wald": [], "wilson": []}
    for of_trial in correct:
        counts = np.bincount(of_trial, minlength=samples + 1).tolist()
        kinds = [(value[c], 1.0, count) for c, count in enumerate(counts) if count]
        mean = min(sum(v * count for v, _, count in kinds) / questions, 1.0)
        error = math.sqrt(sum((v - mean) ** 2 * count for v, _, count in kinds) / (questions * max(questions - 1, 1)))
        held["ours"].append(share_interval(mean, effective_number(kinds, draws=questions * samples / k)))
        held["wald"].append((mean - CONFIDENCE_Z * error, mean + CONFIDENCE_Z * error))
        held["wilson"].append(_wilson(mean, questions * samples / k))
    return {name: _held(np.array(ends), truth) for name, ends in held.items()}


def arms_held(
    case: tuple[int, int, int, float], *, effect: float = 0.0, trials: int, seed: int = 0
) -> dict[str, tuple[float, float, float]]:
    """For each method: share of trials whose interval holds the true difference, mean width, share that find B better.

    Args:
        case: an entry of `ARMS`.
        effect: B's logit minus A's.
    """
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "paired z": [], "welch t": []}
    truths = []
    for a, b, truth in _drawn(case, effect=effect, trials=trials, seed=seed):
        ours = paired_difference(a, b, sample=1 / (len(a) * case[2]))
        found["ours"].append((ours.low, ours.high))
        each = b.mean(0) - a.mean(0)
        half = CONFIDENCE_Z * each.std(ddof=1) / math.sqrt(len(each))
        found["paired z"].append((each.mean() - half, each.mean() + half))
        if len(a) > 1:
            parts = [of.mean(1).var(ddof=1) / len(of) for of in (a, b)]
            doubt = sum(part**2 for part in parts) / (len(a) - 1)
            df = sum(parts) ** 2 / doubt if doubt else 1.0
            half = _quantile(0.975, df) * math.sqrt(sum(parts))
            found["welch t"].append((each.mean() - half, each.mean() + half))
        truths.append(truth)
    said = {}
    for name, ends in found.items():
        if ends:
            low, high = np.array(ends).T
            held = ((low <= truths) & (np.array(truths) <= high)).mean()
            said[name] = (float(held), float((high - low).mean()), float((low > 0).mean()))
    return said


def found_at_the_promise(case: tuple[int, int, int, float], *, trials: int, seed: int = 0) -> tuple[float, float]:
    """Power at the difference that `detectable_difference` names, and at the number of questions that `questions_needed` names.

    Both are medians over runs of the case with the difference that they speak of; a promise is 0.8. The second is nan where no
    number of questions suffices.
    """
    runs, questions, samples, spread = case
    effect = 0.0
    for _ in range(6):  # the effect whose difference is the one detectable
        drawn = list(_drawn(case, effect=effect, trials=max(trials // 4, 50), seed=seed + 1))
        found = [paired_difference(a, b, sample=1 / (runs * samples)) for a, b, _ in drawn]
        wanted = float(np.median([detectable_difference(f.power, questions) for f in found]))
        effect = _effect_of(wanted, spread)
    power = arms_held(case, effect=effect, trials=trials, seed=seed + 2)["ours"][2]
    needed = [questions_needed(f.power, wanted / 2) for f in found]
    asked = sorted(math.inf if n is None else n for n in needed)[len(needed) // 2]
    if asked > 20_000:
        return power, math.nan
    effect = _effect_of(wanted / 2, spread)
    longer = (runs, int(asked), samples, spread)
    return power, arms_held(longer, effect=effect, trials=trials, seed=seed + 3)["ours"][2]


def false_alarms(case: tuple[int, int, int, float], *, trials: int, seed: int = 0) -> dict[str, float]:
    """The share of runs with an alarm, in all ("any") and by name. Nothing changes in these runs."""
    counts: dict[str, int] = {}
    for trial in range(trials):
        names = {
            alarm.name for alarm in find_alarms(_stationary(case, np.random.default_rng((seed, trial, *case[:3]))))
        }
        for name in [*names, *(["any"] if names else [])]:
            counts[name] = counts.get(name, 0) + 1
    return {name: count / trials for name, count in sorted(counts.items(), key=lambda item: -item[1])}


def _stationary(case: tuple[int, int, int, float], rng: np.random.Generator) -> Mapping[str, Mapping[int, float]]:
    """Metrics of a run of `case`: reward 0.3, truncated 0.3, format 0.6; samples of a question resemble each other."""
    steps, responses, size, spikes = case
    groups = responses // size

    def shared(share: float, alike: float) -> Array:  # (steps, groups, size)
        p = rng.beta(share * (1 / alike - 1), (1 - share) * (1 / alike - 1), (steps, groups, 1))
        return rng.random((steps, groups, size)) < p

    right, cut, form = shared(0.3, 0.3), shared(0.3, 0.2), shared(0.6, 0.2)
    length = 300 * np.exp(rng.normal(0, 0.4, (steps, groups, 1)) + rng.normal(0, 0.5, right.shape))
    signal = right.any(axis=2) & ~right.all(axis=2)

    def mean(values: Array, of: Array) -> Array:
        count = of.sum(axis=(1, 2))
        return np.where(count, (values * of).sum(axis=(1, 2)) / np.maximum(count, 1), np.nan)

    everything = np.ones_like(right)
    curves = {
        "reward/mean": mean(right, everything),
        "reward/answer": mean(right, everything),
        "reward/format": mean(form, everything),
        "length/truncated_share": mean(cut, everything),
        "length/correct": mean(length, right),
        "length/wrong": mean(length, ~right),
        "groups/signal_share": signal.mean(axis=1),
        "policy/entropy": 0.3 * np.exp(rng.normal(0, 0.2, steps)),
        "mismatch/logprob_mean_abs": 0.01 * np.exp(rng.normal(0, 0.3, steps)),
        "optimizer/grad_norm": 0.5 * np.exp(rng.normal(0, spikes, steps)),
    }
    return {name: dict(enumerate(map(float, values))) for name, values in curves.items()}


def _mean_of_all_wrong(a: float, b: float, k: int) -> float:
    """E[(1 - p) ** k] for p from Beta(a, b)."""
    return math.prod((b + i) / (a + b + i) for i in range(k))


def _wilson(share: float, n: float) -> tuple[float, float]:
    z2 = CONFIDENCE_Z**2
    center = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = CONFIDENCE_Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return center - half, center + half


def _held(ends: Array, truth: float) -> Array:
    low, high = ends.T
    return np.array([((low <= truth + 1e-12) & (truth - 1e-12 <= high)).mean(), (high - low).mean()])


def _drawn(
    case: tuple[int, int, int, float], *, effect: float, trials: int, seed: int
) -> Iterator[tuple[Array, Array, float]]:
    """Shares of right samples (runs, questions) of A and of B, and the true difference over all questions and seeds."""
    runs, questions, samples, spread = case
    rng = np.random.default_rng((seed, runs, questions, samples, round(1000 * spread), round(1e6 * abs(effect))))
    truth = _difference(effect, spread)
    for _ in range(trials):
        hard = rng.normal(0, 1.5, questions)
        arms = []
        for shift in (0.0, effect):
            logit = hard + shift + rng.normal(0, 1, (runs, 1)) * spread
            arms.append(rng.binomial(samples, 1 / (1 + np.exp(-logit))) / samples)
        yield arms[0], arms[1], truth


def _difference(effect: float, spread: float) -> float:
    """The mean difference of two logistic-normal shares, whose logits differ by `effect`; the grid is exact to 1e-9."""
    x = np.linspace(-9, 9, 2001)
    weights = np.exp(-x * x / 2)
    logit = x * math.hypot(1.5, spread)
    high, low = (1 / (1 + np.exp(-logit - shift)) for shift in (effect, 0.0))
    return float(((high - low) * weights).sum() / weights.sum())


def _effect_of(difference: float, spread: float) -> float:
    """The effect on the logit whose `_difference` this is; at most 30, as large as any, where none is so large."""
    low, high = 0.0, 30.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _difference(middle, spread) < difference else (low, middle)
    return high


def _quantile(p: float, df: float) -> float:
    return t_quantile(p, round(df, 2))  # rounded: the cache then holds them all


def _print(title: str, columns: Sequence[str], rows: Iterator[Sequence[Any]]) -> None:
    print(f"\n{title}\n" + "".join(f"{name:>11}" for name in columns), flush=True)
    for row in rows:
        print("".join(f"{value:>11.3f}" if isinstance(value, float) else f"{value:>11}" for value in row), flush=True)


def _share_rows(what: int, trials: int) -> Iterator[Sequence[Any]]:
    for case in CLUSTERS:
        held = [shares_held(case, share=share, trials=trials) for share in SHARES]
        for method in held[0]:
            yield (*case, method, *(float(h[method][what]) for h in held))


def _arm_rows(trials: int) -> Iterator[Sequence[Any]]:
    for case in ARMS:
        runs, questions, samples, spread = case
        # an effect that the right test of the two finds in most trials, not in all
        error = math.sqrt((0.3 / questions) / runs * (1.5 if samples == 1 else 0.3) + 0.04 * spread**2 * 2 / runs)
        effect = (3.2 if spread else 2.3) * error / 0.16
        null, real = (arms_held(case, effect=e, trials=trials) for e in (0.0, effect))
        wide = null["ours"][1] / null["paired z"][1]
        welch = [null[name] for name in ("welch t",) if name in null]
        power = [real[name][2] if name in real else math.nan for name in ("ours", "paired z", "welch t")]
        yield (
            *case, null["ours"][0], real["ours"][0], null["paired z"][0], welch[0][0] if welch else math.nan,
            wide, welch[0][1] / null["paired z"][1] if welch else math.nan, *power,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--only", choices=["shares", "arms", "promises", "alarms"])
    options = parser.parse_args()
    trials = options.trials
    wanted = [options.only] if options.only else ["shares", "arms", "promises", "alarms"]
    if "shares" in wanted:
        columns = ["questions", "samples", "k", "alike", "method", *(f"p={share}" for share in SHARES)]
        _print("Shares: coverage of the 95 % interval", columns, _share_rows(0, trials))
        _print("Shares: mean width", columns, _share_rows(1, trials // 10))
    if "arms" in wanted:
        columns = [
            "runs", "questions", "samples", "seed sd", "held", "held, B>A", "z held", "t held", "width/z", "t width/z",
            "power", "z power", "t power",
        ]  # fmt: skip
        _print("Comparisons: coverage, width beside that of z, and power", columns, _arm_rows(trials))
    if "promises" in wanted:
        columns = ["runs", "questions", "samples", "seed sd", "detectable", "needed"]
        cases = [case for case in ARMS if case[0] != 2]  # two seeds promise nothing
        rows = ((*case, *found_at_the_promise(case, trials=trials // 2)) for case in cases)
        _print("Power at the detectable difference, and with the questions needed for half of it", columns, rows)
    if "alarms" in wanted:
        columns = ["steps", "responses", "group", "norm sd", "any", "which"]
        rows = (
            (*case, (found := false_alarms(case, trials=trials)).pop("any", 0.0), "  " + str(found)) for case in RUNS
        )
        _print("Alarms: share of runs with a false one", columns, rows)


if __name__ == "__main__":
    main()
