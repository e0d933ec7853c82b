"""Comparisons: of two runs or more on the same questions, and of a judge with a rule or with labels.

Enters: an AnalyzeConfig and the query's parameters. Leaves: tables on stdout, and what they say in words.
"""

import textwrap
from collections.abc import Mapping
from typing import Any

from rlvr_cli.analysis.pictures.arms import arm_names, split_arms
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.summary import check_accuracy
from rlvr_cli.commands.store.analyzing.asked import named_runs, read_and_name
from rlvr_cli.config.store.analyze import AnalyzeConfig
from rlvr_cli.errors import RlvrError, UsageError
from rlvr_cli.runs.readers import is_pattern
from rlvr_cli.runs.several import read_here
from rlvr_cli.terminal import console, tables
from rlvr_cli.types import Table


def compare_arms(config: AnalyzeConfig, parameters: Mapping[str, Any]) -> None:
    """Print how two runs, or two sets of runs, compare on the same questions; of more, each with the first."""
    from rlvr_cli.analysis.statistics.comparison import compare
    from rlvr_cli.analysis.statistics.sweep_table import (
        compared_table,
        comparisons,
        difference_table,
        notes_of,
        verdicts,
    )

    if len(config.runs) < 2:
        named = [arm for name in config.runs if is_pattern(name) for arm in split_arms([name], config.runs_dir)[0]]
        given = f"one arm of {len(named)} runs was" if len(named) > 1 else f"{len(config.runs)} were"
        raise UsageError(
            f"compare needs two runs or more; {given} given.",
            "rlvr analyze compare RUN_A RUN_B, or with several seeds each: rlvr analyze compare A1,A2,A3 B1,B2,B3"
            " or 'a-*' 'b-*'",
        )
    arms, others = split_arms(config.runs, config.runs_dir, patterns_are_arms=True)
    console.report_passed_over(others)
    runs = read_and_name([path for arm in arms for path in arm], read=read_here)
    if not all(arms) or len(runs) < sum(map(len, arms)):
        raise RlvrError(
            "compare needs at least one run in each arm, and each run only once.",
            "To compare steps of one run: rlvr analyze migration RUN",
        )
    check_accuracy(runs)
    named = iter(runs)
    ids = [[next(named).id for _ in arm] for arm in arms]
    where = {"phase": parameters["phase"], "step": parameters["step"]}
    with open_runs(runs, timeout_seconds=config.timeout_seconds) as database:
        if len(arms) == 2:
            of_two = compare(database, *ids, **where)
            numbers, told = of_two.tables(), [of_two.verdict, *notes_of({"B": of_two}, baseline="A")]
        else:
            of_arms = dict(zip(arm_names(ids), ids, strict=True))
            first = next(iter(of_arms))
            found = comparisons(database, of_arms, baseline=first, **where)
            numbers = [compared_table(found, baseline=first), difference_table(found, baseline=first)]
            told = verdicts(found, baseline=first)
    words = Table(("in_words",), [(text,) for text in told], title="verdict")
    if config.format != "table":
        return tables.print_tables([*numbers, words], output=config.format)
    tables.print_tables(numbers)
    console.print_text("\n" + "\n".join(textwrap.fill(text, 100) for (text,) in words.rows))


def compare_judge(config: AnalyzeConfig, parameters: Mapping[str, Any]) -> None:
    """Print how far a judge agrees with a rule or with labels, and on which responses they differ."""
    from rlvr_cli.analysis.statistics.judge_agreement import agreement_tables

    if config.labels and parameters["rule"]:
        raise UsageError(
            "--labels and --rule exclude each other: beside labels no grader is compared.", "Leave one of them out."
        )
    with open_runs(read_and_name(named_runs(config)), timeout_seconds=config.timeout_seconds) as database:
        found, note = agreement_tables(database, parameters, labels=config.labels, limit=config.limit)
    if note:
        console.say(note)
    tables.print_tables(found, output=config.format)
    if found[-1].more:
        console.say(f"only the first {config.limit} responses are shown; --limit 0 shows all of them")
