"""Alarms: problems of a training run that its metrics show, in plain words, each with the query that shows it.

Enters: a run. Leaves: `Alarm`s, none when nothing looks wrong. A trend compares the first fifth of a curve with its last fifth.
"""

import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlvr_cli.analysis.database import open_runs
from rlvr_cli.runs.readers import read_run

Curves = Mapping[str, Mapping[int, float]]  # metric of the training phase -> step -> value

MIN_STEPS = 5  # a shorter curve has no trend
SOLVED = 0.9  # mean reward above which low entropy, and few groups with a signal, are no alarm
SPIKE = 10.0  # times the median gradient norm
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
        return self.query.replace("RUN", shlex.quote(str(run)))


def run_alarms(path: Path | str) -> list[Alarm]:
    """Find the alarms of a run. Raises RlvrError if it cannot be read."""
    info = read_run(path)
    with open_runs([info]) as database:
        rows = database.select("SELECT name, step, value FROM metrics WHERE phase = 'train' ORDER BY step").rows
        verdicts = database.select(_DISAGREEMENT).rows
    curves: dict[str, dict[int, float]] = {}
    for name, step, value in rows:
        curves.setdefault(name, {})[step] = value
    disagreement: dict[str, dict[int, float]] = {}
    for grader, step, share in verdicts:
        disagreement.setdefault(grader, {})[step] = share
    return list(find_alarms(curves, disagreement=disagreement))


def find_alarms(curves: Curves, *, disagreement: Curves | None = None) -> Iterator[Alarm]:
    """Find the alarms in the metrics of a training phase.

    Args:
        curves: metric -> step -> value, with the names that the training commands log.
        disagreement: second grader -> step -> share of training responses that it judges differently from the run's grader.
    """

    def ends(name: str) -> tuple[float, float] | None:
        return _ends(curves.get(name, {}))

    reward = ends("reward/mean")
    if (entropy := ends("policy/entropy")) and entropy[1] < entropy[0] / 10 and reward and reward[1] < SOLVED:
        yield Alarm(
            "entropy_collapse",
            "warning",
            f"entropy fell from {entropy[0]:.3g} to {entropy[1]:.3g} nats per token while the reward is only {reward[1]:.2f}: the policy "
            "hardly explores any more",
            "rlvr analyze entropy RUN --phase train",
        )
    if (cut := ends("length/truncated_share")) and cut[1] > cut[0] + 0.1:
        yield Alarm(
            "truncation_creep",
            "warning",
            f"{cut[1]:.0%} of the responses are cut at the length limit; at the start it was {cut[0]:.0%}",
            "rlvr analyze lengths RUN --phase train",
        )
    wrong, right = ends("length/wrong"), ends("length/correct")
    if wrong and right and wrong[1] > 1.5 * max(wrong[0], right[1]):
        yield Alarm(
            "wrong_answers_grow",
            "warning",
            f"wrong responses grew from {wrong[0]:.0f} to {wrong[1]:.0f} tokens, while correct ones have {right[1]:.0f}: with masked_mean "
            "a long wrong answer costs little per token; try --length-normalization masked_normalize",
            "rlvr analyze lengths RUN --phase train",
        )
    if (signal := ends("groups/signal_share")) and signal[1] < 0.2 and not (reward and reward[1] >= SOLVED):
        solved = reward is not None and reward[1] > 0.5
        yield Alarm(
            "no_signal",
            "warning",
            f"only {signal[1]:.0%} of the groups still have unequal rewards: the questions have become too "
            f"{'easy' if solved else 'hard'}",
            "rlvr analyze groups RUN",
        )
    form, answer = ends("reward/format"), ends("reward/answer")
    if form and answer and form[1] > form[0] + 0.1 and answer[1] < answer[0] + 0.02:
        yield Alarm(
            "format_without_answers",
            "warning",
            f"format reward rose from {form[0]:.2f} to {form[1]:.2f}, but answer reward stayed at {answer[1]:.2f}: the policy "
            "learns only the format",
            "rlvr analyze metrics RUN --set names=reward/%",
        )
    for grader, shares in (disagreement or {}).items():
        if (apart := _ends(shares)) and apart[1] > apart[0] + DISAGREEMENT:
            yield Alarm(
                "graders_part",
                "warning",
                f"{grader} disagrees with {apart[1]:.0%} of the training rewards, {apart[0]:.0%} at the start: the policy may be "
                "learning responses that only the training grader accepts",
                "rlvr analyze graders RUN --phase train --set by_step=true",
            )
    lagging = any(curves.get("sampling/lag", {}).values())  # then an older policy sampled: a gap is expected
    if not lagging and (gap := ends("mismatch/logprob_mean_abs")) and gap[1] > max(3 * gap[0], 0.01):
        yield Alarm(
            "mismatch_grows",
            "warning",
            f"log-probabilities of sampler and trainer differ by {gap[1]:.2g} nats per token, {gap[0]:.2g} at the start",
            "rlvr analyze mismatch RUN",
        )
    norms = {step: norm for step, norm in curves.get("optimizer/grad_norm", {}).items() if norm == norm}
    usual = statistics.median(norms.values()) if len(norms) >= MIN_STEPS else 0.0
    spikes = [step for step, norm in norms.items() if usual and norm > SPIKE * usual]
    if spikes:
        yield Alarm(
            "gradient_spikes",
            "warning",
            f"the gradient norm exceeded {SPIKE:g} times its median ({usual:.2g}) at {_steps(spikes)}",
            "rlvr analyze metrics RUN --set names=optimizer/grad_norm",
        )
    skipped = [step for step, value in curves.get("update/skipped", {}).items() if value]
    if skipped:
        yield Alarm(
            "skipped_updates",
            "error",
            f"no update was made at {_steps(skipped)}: nothing to train on, or a loss or gradient that was not finite",
            "rlvr analyze metrics RUN --set names=update/%",
        )
    failed, samples = (sum(curves.get(f"reward/{n}", {}).values()) for n in ("grade_errors", "samples"))
    if failed:
        yield Alarm(
            "grade_errors",
            "error" if failed > 0.01 * samples else "warning",
            f"{failed:.0f} of {samples:.0f} training responses could not be graded and counted as wrong",
            "rlvr analyze grade_errors RUN --phase train",
        )


_DISAGREEMENT = """
    SELECT grader, step, avg((first <> second)::INT)
    FROM (
        SELECT
            grades.grader, step,
            coalesce(grades.reward > 0.5 AND NOT isnan(grades.reward), false) AS first,
            coalesce(rollouts.reward > 0.5 AND NOT isnan(rollouts.reward), false) AS second
        FROM rollouts JOIN grades USING (run_id, phase, step, example_id, sample_index)
        WHERE phase = 'train'
    )
    GROUP BY ALL
    ORDER BY ALL
"""


def _ends(curve: Mapping[int, float]) -> tuple[float, float] | None:
    """Means of the first and the last fifth of a curve, without nan; None if fewer than `MIN_STEPS` values are left."""
    values = [curve[step] for step in sorted(curve) if curve[step] == curve[step]]
    if len(values) < MIN_STEPS:
        return None
    fifth = max(len(values) // 5, 1)
    return statistics.fmean(values[:fifth]), statistics.fmean(values[-fifth:])


def _steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:5]))
    return f"step{'s' if len(steps) > 1 else ''} {shown}" + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")
