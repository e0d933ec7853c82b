"""The arms of a sweep side by side: what each reached, at what cost, and which differ from the baseline.

Enters: a `Database` over the runs of all arms. Leaves: tables, and a sentence for each comparison.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from rlvr_cli.analysis.comparison import Comparison, compare, held_out_intervals
from rlvr_cli.analysis.database import Database
from rlvr_cli.types import Table

Arms = Mapping[str, Sequence[str]]  # name -> ids of its runs, the seeds
_ARM = ("arm", "seeds", "accuracy", "low", "high", "best", "at_update", "updates", "minutes", "tokens")
_DIFFERENCE = ("arm", "against", "difference", "low", "high", "detectable", "questions", "decided")


def arm_table(database: Database, arms: Arms) -> Table:
    """A row for each arm with an evaluation: the accuracy at the end with its 95 % interval, the best one of any evaluation (of
    the mean over seeds, so that it is chosen by chance, too), and the means over seeds of updates, minutes and sampled tokens.
    """
    accuracy: dict[tuple[str, int], float] = {(run, step): value for run, step, value in database.rows(_ACCURACY)}
    cost: dict[str, tuple[float, float, float]] = {run: (u, m, t) for run, u, m, t in database.rows(_COST)}
    intervals = held_out_intervals(database, list(arms.values()))
    rows = []
    for number, (arm, runs) in enumerate(arms.items()):
        steps = sorted({step for run, step in accuracy if run in runs})
        means = {
            step: statistics.fmean(accuracy[run, step] for run in runs)
            for step in steps
            if all((run, step) in accuracy for run in runs)
        }
        if not means:
            continue
        last, best = max(means), max(means, key=lambda step: (means[step], -step))
        low, high = intervals.get((number, last), (None, None))
        spent = [statistics.fmean(values) for values in zip(*(cost[run] for run in runs), strict=True)]
        rows.append(
            (arm, len(runs), means[last], low, high, means[best], best, round(spent[0]), spent[1], round(spent[2]))
        )
    return Table(_ARM, rows, title="arms")


def comparisons(database: Database, arms: Arms, *, baseline: str) -> dict[str, Comparison]:
    """Compare each arm with the baseline, paired by question."""
    return {arm: compare(database, arms[baseline], runs) for arm, runs in arms.items() if arm != baseline and runs}


def difference_table(found: Mapping[str, Comparison], *, baseline: str) -> Table:
    """A row for each comparison; accuracies between 0 and 1."""
    rows = [
        (arm, baseline, c.difference, c.low, c.high, c.detectable, c.questions, "yes" if c.decided else "no")
        for arm, c in found.items()
    ]
    return Table(_DIFFERENCE, rows, title="differences")


def sentence(arm: str, found: Comparison, *, baseline: str) -> str:
    """Say in words what a comparison with the baseline tells."""
    low, high = 100 * found.low, 100 * found.high
    interval = f"{100 * found.difference:+.1f} points (95% interval {low:+.1f} to {high:+.1f})"
    if found.decided:
        return f"{arm} is {'better' if found.difference > 0 else 'worse'} than {baseline}: {interval}."
    told = (
        "" if found.detectable is None else f" {100 * found.detectable:.1f} points or more would show in 4 of 5 trials."
    )
    return f"The data cannot tell {arm} from {baseline}: {interval}.{told}"


def note_on_many(found: Mapping[str, Comparison]) -> str:
    """What to keep in mind of several comparisons with one baseline; empty for one."""
    if len(found) < 2:
        return ""
    chance = 1 - math.pow(0.95, len(found))
    return (
        f"{len(found)} arms are compared with one baseline: if none differed, one or more of {len(found)} independent 95% intervals would "
        f"leave out 0 with a probability of {chance:.0%}."
    )


_ACCURACY = """
    SELECT run_id, step, avg(share)
    FROM (
        SELECT run_id, step, example_id, avg(CASE WHEN reward > 0.5 AND NOT isnan(reward) THEN 1.0 ELSE 0.0 END) AS share
        FROM rollouts
        WHERE phase = 'eval'
        GROUP BY ALL
    )
    GROUP BY ALL
    ORDER BY ALL
"""
_COST = """
    SELECT
        run_id,
        coalesce((SELECT max(step) FROM rollouts r WHERE r.run_id = runs.run_id AND phase = 'eval'), 0),
        wall_seconds / 60,
        coalesce((SELECT sum(num_response_tokens) FROM rollouts r WHERE r.run_id = runs.run_id AND phase = 'train'), 0)
    FROM runs
    ORDER BY ALL
"""
