"""pass@k, best@k and majority@k of one phase and step, with their intervals.

Enters: a database of runs. Leaves: an `AtK` for each k. DuckDB ranks the samples, and writes to the disk those that it cannot
hold. Python holds at most `SAMPLES_AT_ONCE` of them, or all of one question.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby, islice
from operator import eq, itemgetter, not_
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
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import Table

SAMPLES_AT_ONCE = 2**14


@dataclass(frozen=True, slots=True)
class Question:
    """What the samples of a question show. Questions that show the same are equal.

    Attributes:
        rewards: those of the samples in the order of their scores, the best first; tied ones all have their mean.
        correct: how many of the samples are.
    """

    rewards: tuple[float, ...]
    correct: int
    wrong: tuple[int, ...]  # the votes for each wrong answer, the fewest first
    scored: bool = True  # whether all samples have a score, which is their mean log-probability
    answered: bool = True  # whether any sample has an answer

    @property
    def n(self) -> int:
        return len(self.rewards)


@dataclass(frozen=True, slots=True)
class AtK:
    """Means over the questions with at least k samples, of exact expectations over k of a question's samples."""

    k: int
    questions: int
    pass_at_k: Estimate
    best_at_k: Estimate | None  # None if the log-probability of a sample is missing: then there is no best sample
    majority_at_k: Estimate | None  # None if no sample has an answer to vote for


def at_k(questions: Iterable[Question], ks: Sequence[int] = ()) -> tuple[list[AtK], int]:
    """The three for each k of which there are questions with k samples, the smallest k first; and the most samples of a question.

    Args:
        ks: none for 1, 2, 4, ... and the most samples.
    """
    found: dict[int, _Found] = {}
    most = 0
    for batch in _batches(questions):
        most = max(most, batch[-1][0].n)
        for k in set(ks) or _usual_ks(most):
            of_k = found.setdefault(k, _Found(k))
            for question, times in batch:
                if question.n >= k:
                    of_k.add(question, times)
    shown = set(ks) or _usual_ks(most)
    return [of_k.means() for k, of_k in sorted(found.items()) if of_k.samples and k in shown], most


def _usual_ks(most: int) -> list[int]:
    return [*(2**i for i in range(most.bit_length()) if 2**i < most), most]


def at_k_table(database: Database, parameters: Mapping[str, Any]) -> tuple[Table, list[str]]:
    """The rows of `rlvr analyze at_k`, for each run and k; and which k are left out, a sentence for each run."""
    names = ("pass_at_k", "best_at_k", "majority_at_k")
    columns = ("run_id", "step", "k", "questions", *(f"{name}{end}" for name in names for end in ("", "_low", "_high")))
    ks = given_ks(parameters["k"])
    rows, left_out = [], []
    for run, step, questions in questions_of_runs(database, parameters):
        found, most = at_k(questions, ks)
        if above := ",".join(str(k) for k in sorted(set(ks)) if k > most):
            left_out.append(f"k={above} left out: {run} has at most {most} sample{'s' if most > 1 else ''} a question")
        for at in found:
            cells = [(e.value, e.low, e.high) if (e := getattr(at, name)) else (None, None, None) for name in names]
            rows.append((run, step, at.k, at.questions, *(cell for three in cells for cell in three)))
    return Table(columns, rows), left_out


def given_ks(value: Any) -> list[int]:
    """The ks in `8`, `[1, 8]` or `1,8`; none of None. Raises RlvrError if one is no whole number of 1 or more."""
    try:
        ks = [] if value is None else [int(k) for k in str(value).strip("[]").split(",")]
    except ValueError:
        ks = [0]
    if any(k < 1 for k in ks):
        raise RlvrError("k must be a whole number, 1 or more, or several such as 1,2,4,8.")
    return ks


def questions_of_runs(
    database: Database, parameters: Mapping[str, Any]
) -> Iterator[tuple[str, int, Iterator[Question]]]:
    """Each run, its step, and its questions, to be taken before the next run."""
    for (run, step), of_run in groupby(_ranked_samples(database, parameters), key=itemgetter(0, 1)):
        yield run, step, (_question(of_question) for _, of_question in groupby(of_run, key=itemgetter(2)))


def _ranked_samples(database: Database, parameters: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """The rows of the query. Its time has a limit, so they are in a table first, and then fetched by one query after another."""
    list(database.script(f"CREATE OR REPLACE TEMP TABLE ranked AS\n{named_queries()['at_k'].sql}", parameters))
    ((samples,),) = database.select("SELECT count(*) FROM ranked").rows
    part = "SELECT * FROM ranked WHERE rowid >= $first AND rowid < $end ORDER BY rowid"
    for first in range(0, samples, SAMPLES_AT_ONCE):
        yield from database.select(part, {"first": first, "end": first + SAMPLES_AT_ONCE}).rows
    list(database.script("DROP TABLE ranked", {}))  # its memory is for what is asked next


def _question(samples: Iterator[tuple[Any, ...]]) -> Question:
    rewards: list[float] = []
    scores: list[float | None] = []
    right, wrong, answered = 0, Counter[int | None](), False
    while part := list(islice(samples, SAMPLES_AT_ONCE)):
        _, _, _, its_rewards, correct, answers, its_scores = zip(*part, strict=True)
        rewards += its_rewards
        scores += its_scores
        right += sum(correct)
        wrong.update(compress(answers, map(not_, correct)))
        answered = answered or any(answer is not None for answer in answers)
    del wrong[None]  # they abstain
    rewards = _means_of_ties(rewards, scores)
    return Question(tuple(rewards), right, tuple(sorted(wrong.values())), scores[-1] is not None, answered)


def _means_of_ties(rewards: list[float], scores: Sequence[float | None]) -> list[float]:
    if not any(map(eq, scores, islice(scores, 1, None))):
        return rewards
    means: list[float] = []
    for _, tied in groupby(zip(scores, rewards, strict=True), key=itemgetter(0)):
        of_tied = [reward for _, reward in tied]
        means += [sum(of_tied) / len(of_tied)] * len(of_tied)
    return means


def _batches(questions: Iterable[Question]) -> Iterator[list[tuple[Question, int]]]:
    """Questions of `SAMPLES_AT_ONCE` or more samples, each with the number of equal ones; those with the fewest samples first."""
    batch, samples = Counter[Question](), 0
    for question in questions:
        batch[question] += 1
        samples += question.n
        if samples >= SAMPLES_AT_ONCE:
            yield sorted(batch.items(), key=lambda item: item[0].n)
            batch, samples = Counter[Question](), 0
    if batch:
        yield sorted(batch.items(), key=lambda item: item[0].n)


class _Found:
    """The values of the questions at one k, each with the number of questions that have it."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.samples, self.scored, self.answered = 0, True, False
        self._passed, self._best, self._voted = Counter[float](), Counter[float](), Counter[float]()

    def add(self, question: Question, times: int) -> None:
        abstained = question.n - question.correct - sum(question.wrong)
        vote = majority_at_k(question.correct, question.wrong, self.k, abstained=abstained)
        # Rounded, because a question whose samples are all right must not count as one that shows the rarer outcome.
        self._passed[round(pass_at_k(question.n, question.correct, self.k), 12)] += times
        self._best[round(best_at_k(question.rewards, self.k), 12)] += times
        self._voted[round(vote, 12)] += times
        self.samples += question.n * times
        self.scored &= question.scored
        self.answered |= question.answered

    def means(self) -> AtK:
        return AtK(
            k=self.k,
            questions=self._passed.total(),
            pass_at_k=self._mean(self._passed),
            best_at_k=self._mean(self._best) if self.scored else None,
            majority_at_k=self._mean(self._voted) if self.answered else None,
        )

    def _mean(self, values: Mapping[float, int]) -> Estimate:
        found = [(value, 1, times) for value, times in values.items()]
        return (
            share_of(found, draws=self.samples / self.k) if all(0 <= value <= 1 for value in values) else mean_of(found)
        )
