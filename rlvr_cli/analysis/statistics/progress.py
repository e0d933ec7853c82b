"""How far each run was at each number of updates, and which updates of different seeds belong together.

Enters: a `Database`. Leaves: the rows of the query `progress`, and the updates at which the rounds of each run began.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from rlvr_cli.analysis.queries.database import Database
from rlvr_cli.analysis.queries.named_queries import named_queries

Progress = Mapping[tuple[str, int], Mapping[str, float]]  # (run, updates) -> row of the query `progress`


def read_progress(database: Database) -> Progress:
    """How far each run was at each number of updates."""
    rows = database.select(named_queries()["progress"].sql).records()
    return {(row["run_id"], row["step"]): row for row in rows}


def round_starts(progress: Progress, runs: Sequence[str]) -> dict[str, list[int]]:
    """The updates at which the rounds of each run began, and its end, if they differ between the runs; else none.

    A round is a step of the algorithm. In expert iteration it has as many updates as its right responses need, so that seeds
    have their rounds, and not their updates, in common. A run that ended early differs only if a round of it began elsewhere.
    """
    starts: dict[str, list[int]] = {run: [] for run in runs}
    for (run, step), row in sorted(progress.items()):
        if run in starts and float(row["algorithm_steps"]).is_integer():
            starts[run].append(step)
    fewest = min(map(len, starts.values()), default=0)
    if len(set(map(len, starts.values()))) > 1:
        fewest -= 1  # the last one may be an end within a round
    return starts if fewest > 0 and len({tuple(of[:fewest]) for of in starts.values()}) > 1 else {}


def place(step: int, starts: Sequence[int]) -> tuple[int, int]:
    """What `step` updates have in common with other seeds: the number of the round, and of the updates since it began.

    Args:
        starts: of the run, by `round_starts`; without them it is the updates themselves.
    """
    number = bisect_right(starts, step) - 1
    return (number, step - starts[number]) if number >= 0 else (step, 0)


def shared_steps(progress: Progress, steps: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:
    """Which of the runs' steps belong together: of each place that all runs have, the step of each run; in order.

    Args:
        steps: of each run, in the order in which the runs are to be.
    """
    starts = round_starts(progress, list(steps))
    of_run = [{place(step, starts.get(run, ())): step for step in sorted(its)} for run, its in steps.items()]
    return [tuple(its[at] for its in of_run) for at in of_run[0] if all(at in its for its in of_run)]
