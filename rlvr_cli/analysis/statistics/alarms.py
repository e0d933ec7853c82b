"""Alarms: problems of a training run that its metrics show, in plain words, each with the query that shows it.

Enters: a run. Leaves: `Alarm`s, none when nothing looks wrong. A trend compares the first fifth of a curve with its last fifth,
and must be more than the noise from step to step explains: in a short run of few responses these fifths differ by chance.
"""

import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlvr_cli.analysis.queries.database import Database, LimitReached
from rlvr_cli.analysis.statistics.estimators import t_quantile
from rlvr_cli.runs.manifest import GRADES, METRICS
from rlvr_cli.runs.readers import RunInfo
from rlvr_cli.runs.storage.sources import place_of

Curves = Mapping[str, Mapping[int, float]]  # metric of the training phase -> step -> value

MIN_STEPS = 5  # a shorter curve has no trend
SOLVED = 0.9  # mean reward above which low entropy, and few groups with a signal, are no alarm
SPIKE = 10.0  # times the median gradient norm, at least
CHANCE = 0.01  # how often an alarm may sound by noise alone
MOST_ROWS = 1_000_000  # metrics and grades that are asked for at once: about 100 MB
DISAGREEMENT = 0.05  # how much the share of verdicts on which two graders differ may grow


@dataclass(frozen=True)
class Alarm:
    """One thing to look at."""

    name: str
    severity: str  # "warning": it may explain a bad result; "error": numbers are missing or wrong
    sentence: str
    query: str  # the command that shows it; RUN stands for the run

    def command_for(self, run: Path) -> str:
        """The command that shows the alarm for this run."""
        return self.query.replace("RUN", shlex.quote(place_of(run)))


def run_alarms(database: Database, info: RunInfo) -> list[Alarm]:
    """Find the alarms of a run, one of those in the database. Raises RlvrError, LimitReached among them."""
    return _alarms_of(database, [info])[info.id]


def alarms_by_run(database: Database, infos: Sequence[RunInfo]) -> Callable[[RunInfo], list[Alarm]]:
    """Return what gives the alarms of each of these runs, as `run_alarms` does, but from few queries: each goes through all files.

    Raises RlvrError.
    """
    found: dict[str, list[Alarm]] = {}
    batches: list[list[RunInfo]] = []
    room = 0
    for info in infos:
        rows = _rows_read(info)
        if not batches or rows > room:
            batches.append([])
            room = MOST_ROWS
        batches[-1].append(info)
        room -= rows
    for batch in batches:
        if len(batch) > 1:
            with suppress(LimitReached):  # each by itself may need less
                found |= _alarms_of(database, batch)
    return lambda info: found[info.id] if info.id in found else run_alarms(database, info)


def _rows_read(info: RunInfo) -> int:
    metrics = next((entry.rows for entry in reversed(info.entries) if entry.path == METRICS), 0)
    return metrics + sum(entry.rows for entry in info.entries if entry.folder == GRADES)


def _alarms_of(database: Database, infos: Sequence[RunInfo]) -> dict[str, list[Alarm]]:
    curves: dict[str, dict[str, dict[int, float]]] = {info.id: {} for info in infos}
    disagreement: dict[str, dict[str, dict[int, float]]] = {info.id: {} for info in infos}
    for run, name, step, value in database.rows(_CURVES, {"runs": list(curves)}):
        curves[run].setdefault(name, {})[step] = value
    if graded := [info.id for info in infos if info.grades]:
        for run, grader, step, share in database.rows(_DISAGREEMENT, {"runs": graded}):
            disagreement[run].setdefault(grader, {})[step] = share
    return {info.id: _found(info, curves[info.id], disagreement[info.id]) for info in infos}


def _found(info: RunInfo, curves: Curves, disagreement: Curves) -> list[Alarm]:
    diverged = info.metadata.get("diverged")
    config = info.metadata.get("config")
    given = config if isinstance(config, dict) else {}
    found = list(find_alarms(curves, disagreement=disagreement, config=given))
    if info.metadata["status"] == "diverged" and isinstance(diverged, dict):
        found.insert(0, Alarm("diverged", "error", f"it diverged: {diverged.get('why')}", "rlvr analyze curves RUN"))
    return found


def find_alarms(
    curves: Curves, *, disagreement: Curves | None = None, config: Mapping[str, Any] | None = None
) -> Iterator[Alarm]:
    """Find the alarms in the metrics of a training phase.

    Args:
        curves: metric -> step -> value, with the names that the training commands log.
        disagreement: second grader -> step -> share of training responses that it judges differently from the run's grader.
        config: the run's options, for what an alarm advises.
    """
    training = _Training(curves, disagreement or {}, config or {})
    for name, find in _ALARMS:
        for finding in find(training):
            yield Alarm(name, *finding)


class _Training(NamedTuple):
    """The curves of a training phase: the arguments of `find_alarms`."""

    curves: Curves
    disagreement: Curves
    config: Mapping[str, Any]

    @property
    def is_solved(self) -> bool:
        """Whether the mean reward is `SOLVED` at the end."""
        reward = self.ends("reward/mean")
        return reward is not None and reward[1] >= SOLVED

    def was_solved(self, step: int) -> bool:
        """Whether the mean reward was `SOLVED` before a step."""
        before = [value for at, value in self.curves.get("reward/mean", {}).items() if at < step]
        return bool(before) and statistics.fmean(before[-MIN_STEPS:]) >= SOLVED

    def ends(self, name: str) -> tuple[float, float] | None:
        return _ends(self.curves.get(name, {}))

    def rises(self, name: str) -> bool:
        return _rises(self.curves.get(name, {}))


class _Finding(NamedTuple):
    """The fields of an `Alarm` after its name."""

    severity: str
    sentence: str
    query: str


def _entropy_collapse(training: _Training) -> Iterator[_Finding]:
    reward = training.ends("reward/mean")
    entropy = training.ends("policy/entropy")
    if entropy and entropy[1] < entropy[0] / 10 and reward and not training.is_solved:
        yield _Finding(
            "warning",
            f"entropy fell from {entropy[0]:.3g} to {entropy[1]:.3g} nats per token while the reward is only {reward[1]:.2f}: the policy "
            "hardly explores any more",
            "rlvr analyze entropy RUN --phase train",
        )


def _truncation_creep(training: _Training) -> Iterator[_Finding]:
    name = "length/truncated_share"
    if (cut := training.ends(name)) and cut[1] > cut[0] + 0.1 and training.rises(name):
        yield _Finding(
            "warning",
            f"{cut[1]:.0%} of the responses are cut at the length limit; at the start it was {cut[0]:.0%}",
            "rlvr analyze lengths RUN --phase train",
        )


def _wrong_answers_grow(training: _Training) -> Iterator[_Finding]:
    wrong, right = training.ends("length/wrong"), training.ends("length/correct")
    if wrong and right and wrong[1] > 1.5 * max(wrong[0], right[1]) and training.rises("length/wrong"):
        advice = ""
        if training.config.get("length_normalization") == "masked_mean":
            advice = ": with masked_mean a long wrong answer costs little per token; try --length-normalization masked_normalize"
        yield _Finding(
            "warning",
            f"wrong responses grew from {wrong[0]:.0f} to {wrong[1]:.0f} tokens, while correct ones have {right[1]:.0f}{advice}",
            "rlvr analyze lengths RUN --phase train",
        )


def _no_signal(training: _Training) -> Iterator[_Finding]:
    reward = training.ends("reward/mean")
    name = "groups/signal_share"
    shares = training.curves.get(name, {})
    mean = statistics.fmean(training.curves.get("reward/mean", {}).values() or [0.0])
    if len(shares) > 1 and not any(shares.values()) and mean < SOLVED:  # also of a run too short for a trend
        yield _Finding(
            "warning",
            f"in none of the {len(shares)} batches did a group have unequal rewards, so that nothing was learned; the mean reward is "
            f"{mean:.2f}",
            "rlvr analyze rollouts RUN --phase train",
        )
        return
    lowest = 0.2 - _error_of_end(training.curves.get(name, {}))
    if (signal := training.ends(name)) and signal[1] < lowest and not training.is_solved:
        solved = reward is not None and reward[1] > 0.5
        yield _Finding(
            "warning",
            f"only {signal[1]:.0%} of the groups still have unequal rewards: the questions have become too "
            f"{'easy' if solved else 'hard'}",
            "rlvr analyze groups RUN",
        )


def _format_without_answers(training: _Training) -> Iterator[_Finding]:
    form, answer = training.ends("reward/format"), training.ends("reward/answer")
    rises = training.rises("reward/format")
    # Answers count only in the right format, so that some come to count when the format is learned.
    if form and answer and rises and form[1] > form[0] + 0.1 and answer[1] - answer[0] < 0.4 * (form[1] - form[0]):
        yield _Finding(
            "warning",
            f"format reward rose from {form[0]:.2f} to {form[1]:.2f}, but answer reward only from {answer[0]:.2f} to {answer[1]:.2f}: the "
            "policy learns little but the format",
            "rlvr analyze metrics RUN --set names=reward/%",
        )


def _graders_part(training: _Training) -> Iterator[_Finding]:
    for grader, shares in training.disagreement.items():
        if (apart := _ends(shares)) and apart[1] > apart[0] + DISAGREEMENT and _rises(shares):
            yield _Finding(
                "warning",
                f"{grader} disagrees with {apart[1]:.0%} of the training rewards, {apart[0]:.0%} at the start: the policy may be "
                "learning responses that only the training grader accepts",
                "rlvr analyze graders RUN --phase train --set by_step=true",
            )


def _mismatch_grows(training: _Training) -> Iterator[_Finding]:
    lagging = any(training.curves.get("sampling/lag", {}).values())  # then an older policy sampled: a gap is expected
    name = "mismatch/logprob_mean_abs"
    if not lagging and (gap := training.ends(name)) and gap[1] > max(3 * gap[0], 0.01) and training.rises(name):
        yield _Finding(
            "warning",
            f"log-probabilities of sampler and trainer differ by {gap[1]:.2g} nats per token, {gap[0]:.2g} at the start",
            "rlvr analyze mismatch RUN",
        )


def _gradient_spikes(training: _Training) -> Iterator[_Finding]:
    norms = {step: norm for step, norm in training.curves.get("optimizer/grad_norm", {}).items() if norm == norm}
    usual = statistics.median(norms.values()) if len(norms) >= MIN_STEPS else 0.0
    times = max(SPIKE, _usual_spread(norms.values())) if usual else 0.0
    settled = sorted(norms)[MIN_STEPS:]  # the first steps of an untrained model are steep
    # On a solved task few rows have a signal, and their gradients vary.
    spikes = [step for step in settled if usual and norms[step] > times * usual and not training.was_solved(step)]
    if spikes:
        yield _Finding(
            "warning",
            f"the gradient norm exceeded {times:.3g} times its median ({usual:.2g}) {_after(spikes)}",
            "rlvr analyze metrics RUN --set names=optimizer/grad_norm",
        )


def _skipped_updates(training: _Training) -> Iterator[_Finding]:
    tokens = training.curves.get("update/tokens", {})
    # With --partial-rollout-tokens all questions of a step may go on.
    going_on = {step for step, ended in training.curves.get("groups/sampled", {}).items() if not ended}
    skips = training.curves.get("update/skipped", {})
    skipped = [step for step, value in skips.items() if value and step not in going_on]
    empty = [step for step in skipped if tokens.get(step) == 0]
    for steps, severity, why in (
        ([step for step in skipped if step not in empty], "error", "a loss or gradient that was not finite"),
        ([] if training.is_solved else empty, "warning", "nothing to train on"),
    ):
        if steps:
            query = "rlvr analyze metrics RUN --set names=update/%"
            yield _Finding(severity, f"no update was made {_after(steps)}: {why}", query)


def _grade_errors(training: _Training) -> Iterator[_Finding]:
    failed, samples = (sum(training.curves.get(f"reward/{n}", {}).values()) for n in ("grade_errors", "samples"))
    if failed:
        played = ", or their environment failed," if "episodes/turns" in training.curves else ""
        yield _Finding(
            "error" if failed > 0.01 * samples else "warning",
            f"{failed:.0f} of {samples:.0f} training responses could not be graded{played} and counted as wrong",
            "rlvr analyze grade_errors RUN --phase train",
        )


# In the order in which they are shown.
_ALARMS: tuple[tuple[str, Callable[[_Training], Iterator[_Finding]]], ...] = (
    ("entropy_collapse", _entropy_collapse),
    ("truncation_creep", _truncation_creep),
    ("wrong_answers_grow", _wrong_answers_grow),
    ("no_signal", _no_signal),
    ("format_without_answers", _format_without_answers),
    ("graders_part", _graders_part),
    ("mismatch_grows", _mismatch_grows),
    ("gradient_spikes", _gradient_spikes),
    ("skipped_updates", _skipped_updates),
    ("grade_errors", _grade_errors),
)


_CURVES = "SELECT run_id, name, step, value FROM metrics WHERE run_id IN $runs AND phase = 'train' ORDER BY step"
_DISAGREEMENT = """
    SELECT run_id, grader, step, avg((first <> second)::INT)
    FROM (
        SELECT
            run_id, grades.grader, step,
            grades.reward > 0.5 AND NOT isnan(grades.reward) AS first,
            rollouts.reward > 0.5 AND NOT isnan(rollouts.reward) AS second
        FROM rollouts JOIN grades USING (run_id, phase, step, example_id, sample_index)
        -- a grade that failed is no verdict
        WHERE run_id IN $runs AND phase = 'train' AND grades.reward IS NOT NULL AND rollouts.reward IS NOT NULL
    )
    GROUP BY ALL
    ORDER BY ALL
"""


def _finite(curve: Mapping[int, float]) -> list[float]:
    return [curve[step] for step in sorted(curve) if math.isfinite(curve[step])]


def _ends(curve: Mapping[int, float]) -> tuple[float, float] | None:
    """Means of the first and the last fifth of a curve's finite values; None if there are fewer than `MIN_STEPS`."""
    values = _finite(curve)
    if len(values) < MIN_STEPS:
        return None
    fifth = max(len(values) // 5, 1)
    return statistics.fmean(values[:fifth]), statistics.fmean(values[-fifth:])


def _line(curve: Mapping[int, float]) -> tuple[float, float, int] | None:
    """Of a curve's finite values: rise of their least-squares line, standard error of a step about it, and number of steps."""
    values = _finite(curve)
    n = len(values)
    if n < MIN_STEPS:
        return None
    slope, start = statistics.linear_regression(range(n), values)
    squares = math.fsum((value - start - slope * i) ** 2 for i, value in enumerate(values))
    return slope * (n - 1), math.sqrt(squares / (n - 2)), n


def _rises(curve: Mapping[int, float]) -> bool:
    """Whether a curve rises by more than the noise about its line explains: the t-test of its slope, at `CHANCE`."""
    if (line := _line(curve)) is None:
        return False
    rise, noise, n = line
    return rise > t_quantile(1 - CHANCE, n - 2) * noise * (n - 1) / math.sqrt(n * (n * n - 1) / 12)


def _error_of_end(curve: Mapping[int, float]) -> float:
    """By how much the mean of the last fifth of a curve may differ by chance, at `CHANCE`."""
    if (line := _line(curve)) is None:
        return 0.0
    _, noise, n = line
    return t_quantile(1 - CHANCE, n - 2) * noise / math.sqrt(max(n // 5, 1))


def _usual_spread(norms: Iterable[float]) -> float:
    """How many times the median the largest of these numbers is by chance, at `CHANCE`, if their logarithms are normal.

    1.0 where none is finite and above 0.

    Their standard deviation is estimated from the median absolute deviation (Hampel 1974), which spikes do not move.
    """
    logs = [math.log(norm) for norm in norms if 0 < norm < math.inf]
    if not logs:
        return 1.0
    middle = statistics.median(logs)
    spread = 1.4826 * statistics.median(abs(log - middle) for log in logs)
    return math.exp(min(t_quantile(1 - CHANCE / len(logs), max(len(logs) / 2, 1.0)) * spread, 700.0))


def _after(steps: Sequence[int]) -> str:
    """Say after how many updates something was, as evaluations do."""
    shown = ", ".join(map(str, steps[:5])) + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")
    return f"after {shown} update{'' if list(steps) == [1] else 's'}"
