"""pass@k, best@k and majority@k of one phase and step, with their intervals.

Enters: kinds of questions, rows of the query `at_k`. Leaves: an `AtK` for each k.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rlvr_cli.analysis.queries.database import Database
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.analysis.statistics.estimators import (
    Estimate,
    best_at_k,
    majority_at_k,
    mean_of,
    pass_at_k,
    share_of,
)
from rlvr_cli.types import Table

Kind = Mapping[str, Any]  # a row of the query `at_k`


@dataclass(frozen=True, slots=True)
class AtK:
    """Means over the questions with at least k samples, of exact expectations over k of a question's samples."""

    k: int
    questions: int
    pass_at_k: Estimate
    best_at_k: Estimate | None  # None if the log-probability of a sample is missing: then there is no best sample
    majority_at_k: Estimate | None  # None if no sample has an answer to vote for


def at_k(kinds: Sequence[Kind], ks: Sequence[int] | None = None) -> list[AtK]:
    """The three for each k of which there are questions with k samples; without `ks` for 1, 2, 4, ... and the most samples."""
    most = max(kind["n"] for kind in kinds)
    chosen = sorted(set(ks)) if ks else [*(2**i for i in range(most.bit_length()) if 2**i < most), most]
    return [_at(k, [kind for kind in kinds if kind["n"] >= k]) for k in chosen if k <= most]


def _at(k: int, kinds: Sequence[Kind]) -> AtK:
    draws = sum(kind["n"] * kind["questions"] for kind in kinds) / k

    def mean(values: Iterable[float]) -> Estimate:
        # Rounded, because a question whose samples are all right must not count as one that shows the rarer outcome.
        found = [(round(value, 12), 1, kind["questions"]) for value, kind in zip(values, kinds, strict=True)]
        return share_of(found, draws=draws) if all(0 <= value <= 1 for value, *_ in found) else mean_of(found)

    unscored = any(kind["unscored"] for kind in kinds)
    answered = any(kind["answered"] for kind in kinds)
    votes = (majority_at_k(kind["correct"], kind["wrong"], k, abstained=kind["abstained"]) for kind in kinds)
    return AtK(
        k=k,
        questions=sum(kind["questions"] for kind in kinds),
        pass_at_k=mean(pass_at_k(kind["n"], kind["correct"], k) for kind in kinds),
        best_at_k=None if unscored else mean(best_at_k(kind["rewards"], k) for kind in kinds),
        majority_at_k=None if not answered else mean(votes),
    )


def at_k_table(database: Database, parameters: Mapping[str, Any]) -> tuple[Table, list[str]]:
    """The rows of `rlvr analyze at_k`, for each run and k; and which k are left out, a sentence for each run."""
    names = ("pass_at_k", "best_at_k", "majority_at_k")
    columns = ("run_id", "step", "k", "questions", *(f"{name}{end}" for name in names for end in ("", "_low", "_high")))
    ks = [int(k) for k in str(parameters["k"]).strip("[]").split(",")] if parameters["k"] is not None else None
    kinds = database.select(named_queries()["at_k"].sql, parameters).records()
    rows, left_out = [], []
    for (run, step), group in groupby(kinds, key=lambda kind: (kind["run_id"], kind["step"])):
        of_run = list(group)
        most = max(kind["n"] for kind in of_run)
        if above := ",".join(str(k) for k in sorted(set(ks or ())) if k > most):
            left_out.append(f"k={above} left out: {run} has at most {most} sample{'s' if most > 1 else ''} a question")
        for at in at_k(of_run, ks):
            cells = [(e.value, e.low, e.high) if (e := getattr(at, name)) else (None, None, None) for name in names]
            rows.append((run, step, at.k, at.questions, *(cell for three in cells for cell in three)))
    return Table(columns, rows), left_out
