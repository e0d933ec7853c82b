"""`rlvr pairwise`: two runs -> pairs of responses -> a judge, in both orders -> who wins.

Enters: a PairwiseConfig. Leaves: a run with a row for each pair and order, and on stdout wins, ties and position bias.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.statistics.pairwise import pairwise_table
from rlvr_cli.analysis.summary import AT_END_SECONDS
from rlvr_cli.config.pairwise import PairwiseConfig
from rlvr_cli.config.parsing.options import JUDGE
from rlvr_cli.errors import RlvrError
from rlvr_cli.judges.pool import JudgePool
from rlvr_cli.judges.rubric import PAIRWISE
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.collect import COMMIT_ROWS, COMMIT_SECONDS
from rlvr_cli.rollouts.comparisons import Comparison, comparisons_of, missing, row_of
from rlvr_cli.rollouts.grading import check_some_graded, say_failure
from rlvr_cli.rollouts.metrics import AVERAGED, generation_metrics
from rlvr_cli.rollouts.regrade import graded_batches
from rlvr_cli.runs.provenance import open_run, resumed_config
from rlvr_cli.runs.readers import RunInfo, read_parts, read_run, resolve_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.files import typed
from rlvr_cli.terminal import console, tables
from rlvr_cli.trackers.children import tracked
from rlvr_cli.types import Rollout


def run(config: PairwiseConfig) -> None:
    """Compare two runs. Raises RlvrError for user errors, Interrupted after a signal."""
    config = resumed_config(config, command="pairwise")
    a, b = (read_run(resolve_run(name, config.runs_dir)) for name in config.runs)
    with (
        JudgePool(f"{JUDGE}{config.rubric}", config, placeholders=PAIRWISE, report=say_failure) as judge,
        StopRequest() as stop,
        tracked(config.track, project=config.track_project) as trackers,
    ):
        pairs, note = comparisons_of((a, b), judge.rubric, phase=config.phase, step=config.step, limit=config.limit)
        facts = {**judge.facts, "dataset": {"name": f"{a.id}-{b.id}"}, "a": _facts(a), "b": _facts(b)}
        with open_run(config, command="pairwise", facts=facts) as opened:
            trackers.start(opened)
            console.say(f"run      {opened.path}")
            for notice in [*opened.notices, *([note] if note else [])]:
                console.say(notice)
            opened.update(planned={"samples": len(pairs)})
            judge.recall(opened.path)
            if unanswered := compare(opened, judge, pairs, seed=config.judge_seed, stop=stop):
                again = f"to ask it again: rlvr pairwise --resume {typed(opened.place)}"
                console.say(f"note: the judge did not answer {unanswered:,} of {len(pairs):,} comparisons; {again}")
        console.say(f"judge    {judge.price}")
    report(opened.path, output=config.format)


def compare(opened: RunDir, judge: JudgePool, pairs: Sequence[Comparison], *, seed: int, stop: StopRequest) -> int:
    """Have the judge compare the pairs that the run lacks, and commit its verdicts as they come, and what they cost.

    Returns:
        How many it did not answer: the run lacks these, so that --resume asks again.

    Raises:
        Interrupted: `stop` was requested; all verdicts so far are committed.
        RlvrError: the judge answered none.
    """
    left = missing(pairs, opened.committed_keys("eval", 0))
    rows: list[Rollout] = []
    committed = time.monotonic()

    def commit() -> None:
        if rows:
            opened.commit_rollouts("eval", 0, rows)
            rows.clear()

    with (
        opened.activity.doing("comparing", total=len(left), unit="comparisons"),
        console.progress("comparing", len(pairs), done=len(pairs) - len(left)) as bar,
    ):
        try:
            graded = graded_batches(
                left, lambda some: judge.ask([c.text for c in some]), batch_size=judge.batch_size, stop=stop
            )
            for batch, grades in graded:
                answered = [(c, grade) for c, grade in zip(batch, grades, strict=True) if grade.judgement is not None]
                rows += [row_of(c, grade, run_id=opened.id, grader=judge.spec, seed=seed) for c, grade in answered]
                opened.activity.progress(len(batch))
                bar.advance(len(batch))
                if len(rows) >= COMMIT_ROWS or time.monotonic() - committed > COMMIT_SECONDS:
                    commit()
                    committed = time.monotonic()
        finally:
            commit()
    done = opened.num_rollouts("eval", 0)
    if not done:
        raise RlvrError(
            f"The judge answered none of the {len(pairs):,} comparisons.",
            "Its note says why: correct it, and resume the run.",
        )
    parts = read_parts(opened.path, phase="eval", step=0, columns=AVERAGED)
    opened.commit_metrics(0, "eval", generation_metrics(row for part in parts for row in part.to_pylist()))
    return len(pairs) - done


def report(path: Path, *, output: str) -> None:
    """Print who wins. Raises RlvrError if the judge failed on every pair."""
    table, sentence = pairwise_table(read_run(path), timeout_seconds=AT_END_SECONDS)
    tables.print_tables([table], output=output)
    console.say(sentence)
    hint = "Correct the rubric or the judge, and compare again under another --run."
    check_some_graded(path, of="the comparison", hint=hint)


def _facts(run: RunInfo) -> dict[str, Any]:
    """What identifies a run that is compared. Raises RlvrError if it is being written."""
    committed = run.metadata.get("committed")
    if not isinstance(committed, dict):
        raise RlvrError(f"{run.id} is being written.", "Wait until it has ended, or resume it.")
    return {"run": run.id, "manifest_sha256": committed.get("manifest_sha256")}
