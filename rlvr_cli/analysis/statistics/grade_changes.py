"""How a regrading changes a run's results: accuracy, categories, agreement, advantages.

Enters: a run that was graded again. Leaves: tables with titles.
"""

from collections.abc import Sequence
from typing import Any

from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.statistics.estimators import QuestionKinds, pass_at_k, share_of
from rlvr_cli.config.grpo import overlong_buffer
from rlvr_cli.config.store.grade import PhaseChoice
from rlvr_cli.runs.readers import RunInfo
from rlvr_cli.types import Table

SECONDS = 600.0  # time limit of the comparison

_COMPARISON = """
CREATE OR REPLACE TEMP TABLE compared AS
SELECT
    phase, step, example_id, sample_index, ground_truth,
    r.category AS old_category,
    g.category AS new_category,
    coalesce(r.failure_kind, 'grade_error: ' || r.grade_error) AS old_kind,
    coalesce(g.failure_kind, 'grade_error: ' || g.grade_error) AS new_kind,
    r.extracted_answer AS old_answer,
    g.extracted_answer AS new_answer,
    r.reward IS NULL AS old_error,
    g.reward IS NULL AS new_error,
    coalesce(r.reward > 0.5 AND NOT isnan(r.reward), false) AS old,
    coalesce(g.reward > 0.5 AND NOT isnan(g.reward), false) AS new,
    policy_tokens(episode, num_response_tokens) AS tokens,
    CASE WHEN $buffer > 0 THEN least(greatest((tokens - $max_tokens) / $buffer + 1, 0), 1) ELSE 0 END AS overlong,
    coalesce(r.reward, 0) AS old_reward,
    coalesce(r.length_term, 0) + coalesce(r.language_term, 0) - overlong AS other_terms,
    coalesce(r.reward, 0) + $format_weight * coalesce(r.format_reward, 0) + other_terms AS old_return,
    coalesce(g.reward, 0) + $format_weight * coalesce(g.format_reward, 0) + other_terms AS new_return,
    advantage IS NOT NULL AS trained
FROM rollouts AS r JOIN grades AS g USING (run_id, phase, step, example_id, sample_index)
WHERE g.grader = $grader AND ($phase = 'all' OR phase = $phase);

-- questions, by their samples and how many of them are right
SELECT phase, step, n, old, new, count(*) AS questions
FROM (
    SELECT phase, step, count(*) AS n, count(*) FILTER (old) AS old, count(*) FILTER (new) AS new
    FROM compared GROUP BY phase, step, example_id
)
GROUP BY ALL ORDER BY ALL;

-- verdicts
SELECT
    phase,
    count(*) AS samples,
    count(*) FILTER (old AND new) AS both_right,
    count(*) FILTER (old AND NOT new) AS right_to_wrong,
    count(*) FILTER (NOT old AND new) AS wrong_to_right,
    count(*) FILTER (NOT old AND NOT new) AS both_wrong,
    count(*) FILTER (old_error) AS old_errors,
    count(*) FILTER (new_error) AS new_errors
FROM compared GROUP BY phase ORDER BY phase;

-- categories
SELECT phase, old_category, new_category, count(*) AS samples
FROM compared GROUP BY ALL ORDER BY phase, old_category DESC, new_category DESC;

-- the last step of each phase
SELECT phase, step, what, name, sum(old)::BIGINT AS old, sum(new)::BIGINT AS new
FROM (
    SELECT phase, step, unnest([
        {'what': 'category', 'name': old_category, 'old': 1, 'new': 0},
        {'what': 'category', 'name': new_category, 'old': 0, 'new': 1},
        {'what': 'failure', 'name': CASE WHEN NOT old THEN coalesce(old_kind, 'unknown') END, 'old': 1, 'new': 0},
        {'what': 'failure', 'name': CASE WHEN NOT new THEN coalesce(new_kind, 'unknown') END, 'old': 0, 'new': 1}
    ], recursive := true)
    FROM compared JOIN (SELECT phase, max(step) AS step FROM compared GROUP BY phase) USING (phase, step)
)
WHERE name IS NOT NULL
GROUP BY ALL ORDER BY phase, what, name DESC;

-- three examples of each change, the latest
SELECT phase, old, step, example_id, sample_index, ground_truth, old_kind, new_kind, old_answer, new_answer
FROM compared WHERE old <> new
QUALIFY row_number() OVER (PARTITION BY phase, old ORDER BY step DESC, example_id, sample_index) <= 3
ORDER BY phase, old, step DESC, example_id, sample_index;

-- groups that were trained on: what their advantages would have been
SELECT
    count(*) AS groups,
    count(*) FILTER (changed) AS sign_changed,
    count(*) FILTER (NOT old_signal AND new_signal) AS gained_signal,
    count(*) FILTER (old_signal AND NOT new_signal) AS lost_signal,
    count(*) FILTER (old_signal) AS old_signal,
    count(*) FILTER (new_signal) AS new_signal
FROM (
    SELECT
        bool_or(sign(old_advantage) <> sign(new_advantage)) AS changed,
        max(old_return) > min(old_return) AS old_signal,
        max(new_return) > min(new_return) AS new_signal
    FROM (
        SELECT
            *,
            round(old_return - CASE WHEN $baseline THEN avg(old_return) OVER same ELSE 0 END, 9) AS old_advantage,
            round(new_return - CASE WHEN $baseline THEN avg(new_return) OVER same ELSE 0 END, 9) AS new_advantage
        FROM compared WHERE phase = 'train' AND trained
        WINDOW same AS (PARTITION BY step, example_id)
    )
    GROUP BY step, example_id
    HAVING NOT $dynamic OR max(old_reward) > min(old_reward) -- dynamic sampling drops the others
);
"""


def compare_grades(run: RunInfo, *, grader: str, phase: PhaseChoice) -> list[Table]:
    """Compare a regrading with the run's own grades, on the rollouts that were graded again. Returns tables with titles.

    A grade that failed counts as wrong, and as an error. The advantages are computed as in the run's own objective: with or
    without a baseline, and of shaped rewards, whose length and language terms are as they were; groups that dynamic sampling
    has dropped are left out. With --credit turn they are those of a response's first turn, which has all of its reward before it.

    Raises:
        RlvrError: the run cannot be read.
    """
    parameters = {"grader": grader, "phase": phase, **_objective(run)}
    with open_runs([run], timeout_seconds=SECONDS) as database:
        results = database.script(_COMPARISON, parameters)
        questions, verdicts, categories, last, examples, groups = (list(table.records()) for table in results)
    tables = [
        _accuracy(questions),
        *_at_k(questions),
        Table(
            ("phase", "step", "what", "name", "before", "after"),
            [(r["phase"], r["step"], r["what"], r["name"], r["old"], r["new"]) for r in last],
            title="last step",
        ),
        _confusion(categories),
        _verdicts(verdicts),
    ]
    if examples:
        tables.append(_examples(examples))
    if groups[0]["groups"]:
        tables.append(_groups(groups[0]))
    return tables


def cohen_kappa(both: int, only_first: int, only_second: int, neither: int) -> float | None:
    """Agreement of two graders beyond chance (Cohen 1960), from counts; None where chance agreement is already complete."""
    n = both + only_first + only_second + neither
    first, second = both + only_first, both + only_second
    by_chance = first * second + (n - first) * (n - second)  # times n * n
    return None if by_chance == n * n else ((both + neither) * n - by_chance) / (n * n - by_chance)


def _objective(run: RunInfo) -> dict[str, Any]:
    config = run.metadata.get("config")
    config = config if run.metadata["command"] == "grpo" and isinstance(config, dict) else {}
    loss = None
    if config:
        from rlvr_cli.training.losses.policy_gradient import LOSSES  # here: imports torch

        loss = LOSSES.get(config.get("loss_type", ""))
    max_tokens = config.get("sampling_max_tokens") or 0
    buffer = overlong_buffer(config.get("overlong_buffer"), max_tokens=max_tokens)
    return {
        "baseline": loss is None or not loss.raw_rewards,
        "format_weight": config.get("format_weight") or 0.0,
        "dynamic": bool(config.get("dynamic_sampling")),
        "max_tokens": max_tokens,
        "buffer": buffer if config.get("overlong") == "soft_punish" else 0,
    }


def _accuracy(questions: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for phase in dict.fromkeys(r["phase"] for r in questions):
        of_phase = [r for r in questions if r["phase"] == phase]
        for step in dict.fromkeys(r["step"] for r in of_phase):
            kinds = [r for r in of_phase if r["step"] == step]
            before, after = (share_of([(r[w], r["n"], r["questions"]) for r in kinds]) for w in ("old", "new"))
            samples = sum(r["n"] * r["questions"] for r in kinds)
            cells = (before.value, before.low, before.high, after.value, after.low, after.high)
            how = " / ".join(dict.fromkeys((before.interval, after.interval)))
            rows.append((phase, step, samples, *cells, after.value - before.value, how))
    columns = ("phase", "step", "samples", "before", "before_low", "before_high", "after", "after_low", "after_high")
    return Table((*columns, "change", "interval"), rows, title="accuracy")


def _at_k(questions: Sequence[dict[str, Any]]) -> list[Table]:
    """pass@k at the last evaluated step, if questions have several samples there."""
    step = max((r["step"] for r in questions if r["phase"] == "eval"), default=None)
    kinds = [r for r in questions if r["phase"] == "eval" and r["step"] == step]
    most = max((r["n"] for r in kinds), default=1)
    rows = []
    for k in [*(2**i for i in range(most.bit_length()) if 2**i < most), most] if most > 1 else []:
        asked = [r for r in kinds if r["n"] >= k]
        passed: list[QuestionKinds] = [
            [(pass_at_k(r["n"], r[w], k), 1, r["questions"]) for r in asked] for w in ("old", "new")
        ]
        values = [sum(v * c for v, _, c in kind) / sum(c for *_, c in kind) for kind in passed]
        rows.append((step, k, sum(r["questions"] for r in asked), *values, values[1] - values[0]))
    return [Table(("step", "k", "questions", "before", "after", "change"), rows, title="pass_at_k")] if rows else []


def _confusion(categories: Sequence[dict[str, Any]]) -> Table:
    """Confusion matrix of the categories: a row per old one, a column per new one."""
    names = sorted({r[w] for r in categories for w in ("old_category", "new_category")}, reverse=True)
    counts = {(r["phase"], r["old_category"], r["new_category"]): r["samples"] for r in categories}
    lines = dict.fromkeys((r["phase"], r["old_category"]) for r in categories)
    rows = [(phase, old, *(counts.get((phase, old, new), 0) for new in names)) for phase, old in lines]
    return Table(("phase", "before \\ after", *names), rows, title="confusion")


def _verdicts(verdicts: Sequence[dict[str, Any]]) -> Table:
    counts = ("samples", "both_right", "right_to_wrong", "wrong_to_right", "both_wrong")
    rows = []
    for r in verdicts:
        kappa = cohen_kappa(r["both_right"], r["right_to_wrong"], r["wrong_to_right"], r["both_wrong"])
        errors = (r["old_errors"], r["new_errors"])
        rows.append((r["phase"], *(r[c] for c in counts), kappa, *errors))
    return Table(("phase", *counts, "kappa", "errors_before", "errors_after"), rows, title="verdicts")


def _examples(examples: Sequence[dict[str, Any]]) -> Table:
    columns = ("phase", "change", "step", "example_id", "sample_index", "ground_truth")
    rows = [
        (
            r["phase"],
            "right to wrong" if r["old"] else "wrong to right",
            *(r[c] for c in columns[2:]),
            *(r[c] for c in ("old_answer", "new_answer", "old_kind", "new_kind")),
        )
        for r in examples
    ]
    return Table((*columns, "answer_before", "answer_after", "why_before", "why_after"), rows, title="examples")


def _groups(counted: dict[str, Any]) -> Table:
    names = {
        "signal before": "old_signal",
        "signal after": "new_signal",
        "gained their signal": "gained_signal",
        "lost their signal": "lost_signal",
        "an advantage changed its sign (+, 0 or -)": "sign_changed",
    }
    rows = [(name, counted[key], counted[key] / counted["groups"]) for name, key in names.items()]
    return Table(("training groups", "count", "share"), [("all", counted["groups"], 1.0), *rows], title="groups")
