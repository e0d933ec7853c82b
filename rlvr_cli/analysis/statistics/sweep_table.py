"""The arms of a sweep side by side: what each reached, at what cost, and which differ from the baseline.

Enters: a `Database` over the runs of all arms. Leaves: tables, and sentences.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rlvr_cli.analysis.queries.database import Database, ask_spilling
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.analysis.statistics.at_k import at_k_table
from rlvr_cli.analysis.statistics.comparison import NOT_PROMISED, ONE_RUN, Comparison, compare, held_out_intervals
from rlvr_cli.analysis.statistics.estimators import holm
from rlvr_cli.analysis.statistics.progress import read_progress, shared_steps
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import RunInfo
from rlvr_cli.types import PValue, Table

OF_K = "of k samples a question"  # title of a table
Arms = Mapping[str, Sequence[str]]  # name -> ids of its runs, the seeds
_ARM = (
    *("arm", "seeds", "diverged", "accuracy", "low", "high"),
    *("best", "best_low", "best_high", "at_update", "updates", "minutes", "tokens"),
)
_DIFFERENCE = (
    *("arm", "against", "against_accuracy", "difference", "low", "high"),
    *("p", "p_holm", "detectable", "questions", "decided"),
)


def arm_table(database: Database, arms: Arms) -> Table:
    """A row for each arm; where a seed has no evaluation, with no more than what it cost.

    Its columns: how many of its seeds diverged; the accuracy at the last evaluation of each with its 95 % interval; the best one of
    any evaluation (of the mean over seeds, so that it is chosen by chance, too) with that of this evaluation; and the means over seeds
    of updates, minutes and tokens: those sampled for training, without sampling those trained on, of an evaluation its responses.
    Seeds may differ in their updates, as in expert iteration: the evaluations after as many rounds belong together.
    """
    evaluations: dict[str, dict[int, float]] = {}
    for run, step, value in database.rows(_ACCURACY):  # in the order of their steps
        evaluations.setdefault(run, {})[step] = value
    cost = {run: spent for run, *spent in database.rows(_COST)}
    diverged = {run for run, status in database.rows("SELECT run_id, status FROM runs") if status == "diverged"}
    intervals = held_out_intervals(database, list(arms.values()), of_any_reward=True)
    progress = read_progress(database)
    rows = []
    for number, (arm, runs) in enumerate(arms.items()):
        updates, minutes, tokens = (_mean(values) for values in zip(*(cost[run] for run in runs), strict=True))
        if not all(run in evaluations for run in runs):
            unknown = [None] * len(_ARM[3:-2])
            rows.append((arm, len(runs), len(diverged & set(runs)), *unknown, minutes, tokens and round(tokens)))
            continue
        means = {
            steps: statistics.fmean(evaluations[run][step] for run, step in zip(runs, steps, strict=True))
            for steps in shared_steps(progress, {run: list(evaluations[run]) for run in runs})
        }
        last = statistics.fmean(list(evaluations[run].values())[-1] for run in runs)
        best = (None, None, None, None)
        if means:
            at = max(means, key=lambda steps: means[steps])  # the first one
            best = (means[at], *intervals.get((number, at[0]), (None, None)), round(statistics.fmean(at)))
        low, high = intervals.get((number, None), (None, None))
        spent = (updates and round(updates), minutes, tokens and round(tokens))
        rows.append((arm, len(runs), len(diverged & set(runs)), last, low, high, *best, *spent))
    return Table(_ARM, rows, title="arms")


def reached(database: Database, arms: Arms) -> dict[str, float]:
    """The accuracy of each arm as in `arm_table`, without arms of which a seed has none, or has diverged."""
    rows = arm_table(database, arms).records()
    return {row["arm"]: row["accuracy"] for row in rows if row["accuracy"] is not None and not row["diverged"]}


def evaluation_tables(runs: Sequence[RunInfo], *, timeout_seconds: float = 30.0) -> list[Table]:
    """What evaluations have beside their accuracy: the categories of the responses and, with several samples a question, pass@k,
    best@k and majority@k.
    """
    return ask_spilling(runs, _evaluation_tables, timeout_seconds=timeout_seconds)


def _evaluation_tables(database: Database) -> list[Table]:
    categories = named_queries()["categories"]
    found = [replace(database.select(categories.sql, categories.parameters, limit=0), title="categories")]
    of_k, _ = at_k_table(database, named_queries()["at_k"].parameters)
    if any(row["k"] > 1 for row in of_k.records()):
        found.append(replace(of_k, title=OF_K))
    return found


def comparisons(
    database: Database, arms: Arms, *, baseline: str, phase: str = "eval", step: int | None = None
) -> dict[str, Comparison]:
    """Compare each arm with the baseline, paired by question. Raises RlvrError as `compare` does."""
    return {
        arm: compare(database, arms[baseline], runs, phase=phase, step=step)
        for arm, runs in arms.items()
        if arm != baseline and runs
    }


def comparisons_that_can_be(
    database: Database, arms: Arms, *, baseline: str
) -> tuple[dict[str, Comparison], list[str]]:
    """Compare the arms that can be compared with the baseline, as `comparisons` does; and say in a sentence each why others cannot."""
    if baseline and baseline not in arms:
        return {}, [f"No arm is compared: of {baseline}, the baseline, no run is finished."]
    found, others = {}, []
    for arm in arms if baseline else ():
        try:
            found |= comparisons(database, {baseline: arms[baseline], arm: arms[arm]}, baseline=baseline)
        except RlvrError as error:
            others.append(f"{arm} is not compared with {baseline}: {error.problem}")
    return found, others


def compared_table(found: Mapping[str, Comparison], *, baseline: str) -> Table:
    """A row for each arm, the baseline first: its accuracy on the questions on which it was compared."""
    first = next(iter(found.values()))
    rows = [
        (name, ", ".join(arm.runs), c.questions, arm.samples, arm.accuracy, arm.low, arm.high)
        for name, arm, c in [(baseline, first.a, first), *((name, c.b, c) for name, c in found.items())]
    ]
    return Table(("arm", "runs", "questions", "samples", "accuracy", "low", "high"), rows, title="arms")


def corrected(found: Mapping[str, Comparison]) -> dict[str, float]:
    """The p-value of each comparison, corrected for their number."""
    return dict(zip(found, holm([comparison.p for comparison in found.values()]), strict=True))


def is_decided(found: Comparison, p_holm: float) -> bool:
    """Whether a difference is significant among all comparisons."""
    return found.decided and p_holm < 0.05


def difference_table(found: Mapping[str, Comparison], *, baseline: str) -> Table:
    """A row for each comparison; accuracies between 0 and 1, that of the baseline on the questions that both have."""
    p_holm = corrected(found)
    rows = []
    for arm, c in found.items():
        told = "yes" if is_decided(c, p_holm[arm]) else "no"
        of_both = (c.a.accuracy, c.difference, c.low, c.high)
        rows.append((arm, baseline, *of_both, PValue(c.p), PValue(p_holm[arm]), c.detectable, c.questions, told))
    return Table(_DIFFERENCE, rows, title="differences")


def sentences(found: Mapping[str, Comparison], *, baseline: str) -> Iterator[str]:
    """Say in words what each comparison with the baseline tells, and how their number was counted in."""
    p_holm = corrected(found)
    several = f"for {len(found)} comparisons " if len(found) > 1 else ""
    for arm, c in found.items():
        p = _said(c.p) + (f"; {several}{_said(p_holm[arm])}" if several else "")
        interval = f"{100 * c.difference:+.1f} points (95% interval {100 * c.low:+.1f} to {100 * c.high:+.1f}; {p})"
        words = "better" if c.difference > 0 else "worse"
        if is_decided(c, p_holm[arm]):
            yield f"{arm} is {words} than {baseline}: {interval}."
        elif c.decided:
            yield (
                f"Taken alone, {arm} is {words} than {baseline}: {interval}. Among {len(found)} comparisons a difference like this one "
                "arises by chance too often to count."
            )
        else:
            if c.detectable is None:
                least = c.too_few or NOT_PROMISED
            else:
                shows = f"{100 * c.detectable:.1f} points or more would show in 4 of 5 trials."
                least = f"{c.too_few} {shows}".lstrip()
            yield f"The data cannot tell {arm} from {baseline}: {interval}. {least}"
    if several:
        yield (
            f"{len(found)} arms are compared with one baseline. The intervals are each arm's own. The second p is Holm's: if no arm "
            "differs, it is below 0.05 for any of them with a chance of at most 5%."
        )


def verdicts(found: Mapping[str, Comparison], *, baseline: str, command: str = "") -> list[str]:
    """What the comparisons tell in words, `sentences`, and then what limits them, `notes_of`."""
    return [*sentences(found, baseline=baseline), *notes_of(found, baseline=baseline, command=command)] if found else []


def notes_of(found: Mapping[str, Comparison], *, baseline: str, command: str = "") -> list[str]:
    """Say what limits comparisons: questions that were left out, grades that failed, and what each has noted.

    Args:
        command: of all runs, if it is known; of those of eval there is nothing to say of training with another seed.
    """
    noted = dict.fromkeys(note for c in found.values() for note in c.notes if command != "eval" or note != ONE_RUN)
    return [*_left_out(found, baseline=baseline), *noted]


def _left_out(found: Mapping[str, Comparison], *, baseline: str) -> Iterator[str]:
    """Say how many questions were left out of each comparison, and how many grades of the others failed."""
    failed = {
        baseline: max(c.a.grade_errors for c in found.values()),
        **{arm: c.b.grade_errors for arm, c in found.items()},
    }
    for arm, c in found.items():
        if c.a.left_out or c.b.left_out:
            yield (
                f"{arm} and {baseline} are compared on what both have, {c.questions:,} questions: {c.b.left_out:,} of {arm} and "
                f"{c.a.left_out:,} of {baseline} are left out."
            )
    yield from (f"Failed grades of {arm}, which count as wrong: {count:,}." for arm, count in failed.items() if count)


def divergences(arms: Mapping[str, Sequence[RunInfo]]) -> Iterator[str]:
    """Say which arms diverged, with how many seeds, why and when."""
    for arm, infos in arms.items():
        ended = [info.metadata.get("diverged") for info in infos if info.metadata["status"] == "diverged"]
        if ended:
            which = f"{len(ended)} of its {len(infos)} seeds" if len(infos) > 1 else "its one seed"
            why = "; ".join(
                str(diverged["why"]) for diverged in ended if isinstance(diverged, dict) and "why" in diverged
            )
            yield f"{arm} diverged with {which}{why and f': {why}'}. It is compared as it was then."


def _said(p: float) -> str:
    text = PValue(p).text
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


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
        coalesce(
            (
                SELECT sum(policy_tokens(episode, num_response_tokens)) FROM rollouts r
                WHERE r.run_id = runs.run_id AND (phase = 'train' OR command = 'eval')
            ),
            (SELECT sum(value) FROM metrics m WHERE m.run_id = runs.run_id AND phase = 'train' AND name = 'update/tokens')
        )
    FROM runs
    ORDER BY ALL
"""
