"""What a judge makes of the responses of two runs: who wins, in both orders, and how much the order decides.

Enters: a run of `rlvr pairwise`. Leaves: a table, and its result in a sentence. A pair of which an order is not judged is left out, and
counted; the run has no row where the judge did not answer.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.statistics.estimators import Estimate, share_of
from rlvr_cli.runs.readers import RunInfo, fact_of
from rlvr_cli.types import ORDERS, Table

_ROWS = """
    SELECT example_id, sample_index // $orders AS pair, sample_index % $orders AS shown, reward
    FROM rollouts WHERE phase = 'eval' ORDER BY ALL
"""
_COLUMNS = (
    *("a", "b", "questions", "pairs", "a_wins", "a_wins_low", "a_wins_high"),
    *("a_in_both", "b_in_both", "ties", "order_decides", "a_wins_when_first", "a_wins_when_second"),
    *("first_wins", "first_wins_low", "first_wins_high", "left_out"),
)


def comparison_tables(run: RunInfo, *, timeout_seconds: float) -> list[Table]:
    """The summary of a comparison: its table alone, since its rewards count wins, and a tie is none."""
    return [pairwise_table(run, timeout_seconds=timeout_seconds)[0]]


def pairwise_table(run: RunInfo, *, timeout_seconds: float) -> tuple[Table, str]:
    """The table of a comparison, and its result in a sentence.

    A pair counts once, as the mean of its two orders, so that a preference for what is shown first cancels; a tie is half a win. The
    intervals are over questions.
    """
    names = _names(run)
    with open_runs([run], timeout_seconds=timeout_seconds) as database:
        rows = database.select(_ROWS, {"orders": ORDERS}).rows
    pairs: dict[tuple[str, int], list[float | None]] = defaultdict(list)
    for example, pair, _, reward in rows:
        pairs[example, pair].append(reward)
    whole = {key: [r for r in two if r is not None] for key, two in pairs.items()}
    whole = {key: two for key, two in whole.items() if len(two) == ORDERS}
    by_question: dict[str, list[float]] = defaultdict(list)
    for (example, _), two in whole.items():
        by_question[example].append(sum(two) / ORDERS)
    wins = _share_over(by_question)
    ends = Counter(_end(two) for two in whole.values())
    known = [(example, shown, reward) for example, _, shown, reward in rows if reward is not None]
    orders = [[reward for _, shown, reward in known if shown == order] for order in range(ORDERS)]
    first = _first_wins(known)
    row = (
        *(*names, len(by_question), len(whole), *_cells(wins)),
        *(ends["a"], ends["b"], ends["tie"], ends["order"]),
        *(sum(rewards) / len(rewards) if rewards else None for rewards in orders),
        *(*_cells(first), max(_planned(run), len(pairs)) - len(whole)),
    )
    return Table(_COLUMNS, [row], title="comparison"), _sentence(names, wins, first)


def _names(run: RunInfo) -> Sequence[str]:
    """The names of the two runs, A and B; where both have the same, as they were typed."""
    names = [str(fact_of(run.metadata, which, "run")) for which in ("a", "b")]
    typed = (run.metadata.get("config") or {}).get("runs")
    if names[0] == names[1] and isinstance(typed, list) and len(typed) == len(names):
        return [str(name) for name in typed]
    return names


def _planned(run: RunInfo) -> int:
    """How many pairs were to be compared; 0 if it is not known."""
    planned = run.metadata.get("planned")
    samples = planned.get("samples") if isinstance(planned, dict) else None
    return samples // ORDERS if isinstance(samples, int) else 0


def _cells(found: Estimate | None) -> tuple[float | None, float | None, float | None]:
    return (found.value, found.low, found.high) if found else (None, None, None)


def _end(two: Sequence[float]) -> str:
    """How a pair ends: the same winner or a tie in both orders, or `order` if that makes a difference."""
    return {(1.0, 1.0): "a", (0.0, 0.0): "b", (0.5, 0.5): "tie"}.get((two[0], two[1]), "order")


def _first_wins(known: Sequence[tuple[str, int, float]]) -> Estimate | None:
    """How often the response that is shown first wins, ties aside. Without position bias it is half."""
    decided: dict[str, list[float]] = defaultdict(list)
    for example, shown, reward in known:
        if reward != 0.5:
            decided[example].append((reward > 0.5) == (shown == 0))
    return _share_over(decided)


def _share_over(by_question: Mapping[str, Sequence[float]]) -> Estimate | None:
    """The mean of all values, with its interval over the questions; None without a value."""
    kinds = Counter((sum(values), len(values)) for values in by_question.values())
    return share_of([(total, n, count) for (total, n), count in kinds.items()]) if kinds else None


def _sentence(names: Sequence[str], wins: Estimate | None, first: Estimate | None) -> str:
    if wins is None or wins.low is None or wins.high is None:
        return "no pair was judged in both orders"
    a, b = names
    better = (
        f"{a} is better" if wins.low > 0.5 else f"{b} is better" if wins.high < 0.5 else "neither is shown to be better"
    )
    said = f"{better}: {a} wins {wins.value:.1%} of the pairs ({wins.low:.1%} to {wins.high:.1%}), a tie is half a win"
    if first is None or first.low is None or first.high is None:
        return f"{said}; every comparison is a tie"
    if first.low <= 0.5 <= first.high:
        return f"{said}; no position bias is shown: what stands first wins {first.value:.1%}"
    place, share = ("first", first.value) if first.value > 0.5 else ("second", 1 - first.value)
    return (
        f"{said}; position bias: what stands {place} wins {share:.1%} of the comparisons, which the two orders cancel"
    )
