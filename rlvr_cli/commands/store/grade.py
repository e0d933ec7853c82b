"""`rlvr grade`: grade the responses of runs again with another grader, and show what changes; or try a grader.

Enters: a GradeConfig. Leaves: new grades stored beside the run's own, and on stdout how the two differ; or, stored nowhere, what
a grader makes of some responses.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.statistics.grade_changes import compare_grades
from rlvr_cli.analysis.summary import combined_tables
from rlvr_cli.commands.store.analyzing.said import answered
from rlvr_cli.config.parsing.command_line import typed_options, words_of
from rlvr_cli.config.shared.prompt import is_judge
from rlvr_cli.config.store.grade import GradeConfig
from rlvr_cli.data.prompts import load_prompt
from rlvr_cli.errors import Interrupted, RlvrError, UsageError
from rlvr_cli.graders import GRADERS, has_format_rule
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.grading import open_graders
from rlvr_cli.rollouts.inputs import load_questions
from rlvr_cli.rollouts.regrade import RegradeStep, plan_regrade, regrade
from rlvr_cli.rollouts.trial_grades import question_cases, stored_cases, trial_tables, try_grader
from rlvr_cli.runs.readers import latest_run, read_run, resolve_runs
from rlvr_cli.runs.remote.views import look_again, newest
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.several import telling_names
from rlvr_cli.runs.storage.sources import place_of
from rlvr_cli.terminal import console, tables
from rlvr_cli.types import Graders, Phase


def run(config: GradeConfig) -> None:
    """Grade a run again, explain a verdict, or try a grader. Raises RlvrError for user errors, Interrupted after a signal."""
    if config.explain is not None:
        return explain(config, config.explain)
    if config.check:
        return check(config)
    if not config.grader:
        raise UsageError(
            "No grader is given.", f"Choose {', '.join(GRADERS)}, FILE.py:FUNCTION or judge:RUBRIC.md, with --grader."
        )
    pool = open_graders(config.grader, config)
    named = resolve_runs(config.run, config.runs_dir)
    console.report_passed_over(named.others)
    paths = [info.path for info in answered(list(map(read_run, named.runs or [latest_run(config.runs_dir)])))]
    ungraded = []  # runs of which not one response could be graded
    with pool, StopRequest() as stop:
        for path in paths:
            failed = pool.failed
            left = grade_run(config, path, pool, stop=stop, paths=paths)
            if left and pool.failed - failed == left:
                ungraded.append((path, left))
    grader = stored_name(config)
    if pool.price:
        console.say(f"judge    {pool.price}")
    look_again(seconds=0.0)  # at those in object storage
    changes = {path: compare_grades(read_run(newest(path)), grader=grader, phase=config.phase) for path in paths}
    if len(paths) == 1:
        tables.print_tables(changes[paths[0]], output=config.format)
    else:
        named = zip(telling_names(paths), changes.values(), strict=True)
        tables.print_tables(combined_tables(named), output=config.format)
    if ungraded:
        path, left = ungraded[0]
        of = f" of {path.name}" if len(paths) > 1 else ""
        raise RlvrError(
            f"Not one of the {left} responses{of} could be graded: see the note above.",
            "Put right what it says, and give the same command again, which tries those that failed once more."
            + (
                " A judge's reply without a score is kept: --again asks for it anew." if is_judge(config.grader) else ""
            ),
        )


def grade_run(config: GradeConfig, path: Path, pool: Graders, *, stop: StopRequest, paths: Sequence[Path]) -> int:
    """Grade one of the runs `paths` again.

    Returns:
        How many rollouts were graded now; 0 if each had a grade before, and only some had failed.

    Raises:
        Interrupted: a signal came; says how to go on.
    """
    grader, sha256 = stored_name(config), pool.sha256
    with RunDir.annotate(path) as run:
        console.say(f"run      {run.place} ({run.metadata['status']})")
        for notice in run.notices:
            console.say(notice)
        works = plan_regrade(run, grader=grader, grader_sha256=sha256, phase=config.phase, again=config.again)
        done, failed, left = (sum(getattr(work, name) for work in works) for name in ("done", "failed", "left"))
        continued = {work.phase for work in works if work.attempt and (work.done or work.failed)}
        if not config.again and not any((w.left or w.failed) and w.phase in continued for w in works):
            pool.recall(run.path)  # where --again goes on, a judge is asked anew, too
        before = (f", {failed} of them failed before" if failed else "") + (f", {done} graded already" if done else "")
        console.say(f"grader   {grader}: {failed + left} rollouts to grade{before}")
        try:
            if failed or left:
                with console.progress("grading", done + failed + left, done=done) as bar:
                    regrade(run, works, grader=grader, grader_sha256=sha256, pool=pool, stop=stop, progress=bar)
        except (Interrupted, KeyboardInterrupt):
            rest = " && ".join(rest_of(config, path, run, works, sha256=sha256, paths=paths))
            raise Interrupted(f"what is done is kept in {run.place}; go on with: {rest}") from None
    return failed + left if left or not done else 0


def rest_of(
    config: GradeConfig,
    path: Path,
    run: RunDir,
    works: Sequence[RegradeStep],
    *,
    sha256: str | None,
    paths: Sequence[Path],
) -> list[str]:
    """The commands that grade what is left of the runs `paths` after an interruption in the run at `path`.

    An attempt of --again that has begun goes on without --again, which would begin another.
    """
    given = {k: v for k, v in typed_options(config).items() if k not in ("run", "runs_dir", "again")}

    def command(runs: Sequence[Path], **changed: Any) -> str:
        words = words_of(GradeConfig, {"grader": config.grader, **given, **changed})
        return shlex.join(["rlvr", "grade", *map(place_of, runs), *words])

    if not config.again:
        return [command(paths)]
    phases: dict[Phase, int] = {work.phase: work.attempt for work in works}
    going_on = plan_regrade(run, grader=stored_name(config), grader_sha256=sha256, phase=config.phase, again=False)
    begun = [p for p in phases if any((w.phase, w.attempt) == (p, phases[p]) for w in going_on)]
    later = paths[paths.index(path) + 1 :]
    if not begun:
        return [command([path, *later], again=True)]
    if len(begun) == len(phases):
        commands = [command([path])]
    else:
        commands = [command([path], phase=p, **({} if p in begun else {"again": True})) for p in phases]
    return [*commands, *([command(later, again=True)] if later else [])]


def check(config: GradeConfig) -> None:
    """Try a grader on answers that are known to be right or wrong, and on stored responses.

    Raises:
        RlvrError: a grade failed, after the tables.
    """
    cases = []
    if config.dataset:
        template = load_prompt(config.prompt)
        asked = config.sources.get("limit") != "default"
        questions = load_questions(config, purpose="eval", limit=config.limit, asked=asked).examples
        cases += question_cases(questions, template, grader=config.check)
        perfect = sum(case.kind == "perfect" for case in cases)
        if perfect < len(questions):
            unknown = len(questions) - perfect
            console.say(f"note: no perfect answer can be made up for {unknown} of the {len(questions)} questions.")
    for path in resolve_runs(config.run, config.runs_dir).runs:
        cases += stored_cases(path, limit=config.limit)
    if not cases:
        raise RlvrError(
            f"{', '.join(config.run) or config.dataset} has no response to try.", "Name other questions or another run."
        )
    with open_graders(config.check, config, workers=1, report=lambda sentence: None) as pool:
        trials = try_grader(pool, cases)
    tables.print_tables(trial_tables(trials), output=config.format)
    number, failed = (sum(counts) for counts in zip(*((len(t.cases), t.failed) for t in trials), strict=True))
    if failed:
        hint = "Correct it at the lines shown."
        if number < len(cases):
            hint = f"The {len(cases) - number} others were not tried. --grader-timeout gives each more time."
        raise RlvrError(f"{config.check} failed on {failed} of {number} responses.", hint)
    means = {trial.cases[0].kind: trial.mean_reward or 0.0 for trial in trials}
    if means.get("perfect", 1.0) <= max(means.get("wrong", 0.0), means.get("empty", 0.0)):
        perfect = next(case for case in cases if case.kind == "perfect")
        console.say(
            "warning: perfect answers are not rewarded more than wrong or empty ones. Does the function look for another format? "
            f"A perfect answer to {perfect.example['id']} was {perfect.response!r}, for the truth {perfect.ground_truth!r}."
        )


def explain(config: GradeConfig, text: str) -> None:
    """Print how the verdict on one answer or response comes about."""
    from rlvr_cli.analysis.explained_grade import explained, response_of

    (truth,) = config.run
    grader = config.grader or "r1_zero"
    response = response_of(text, grader)
    with open_graders(grader, config, workers=1, report=lambda sentence: None) as pool:
        (verdict,) = pool.grade([(response, truth)])
    found = explained(verdict, response, truth, grader=grader, format_rule=config.format_rule)
    tables.print_tables(found, output=config.format)


def stored_name(config: GradeConfig) -> str:
    """The name that the grades are stored under: the grader's name, and its format rule if it is not the default."""
    ruled = has_format_rule(config.grader) and config.format_rule != "literal"
    return f"{config.grader}_{config.format_rule}" if ruled else config.grader
