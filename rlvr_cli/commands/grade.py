"""`rlvr grade`: grade the responses of a run again with another grader, and show what changes.

Enters: a GradeConfig. Leaves: new grades stored beside the run's own, and on stdout how the two differ.
"""

import shlex

from rlvr_cli import user_code
from rlvr_cli.analysis.grade_changes import compare_grades
from rlvr_cli.config.grade import GradeConfig
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.graders import GRADERS, has_format_rule
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.regrade import plan_regrade, regrade
from rlvr_cli.runs.readers import latest_run, read_run, resolve_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.terminal import console, tables


def run(config: GradeConfig) -> None:
    """Grade a run again, or explain a verdict. Raises RlvrError for user errors, Interrupted after a signal."""
    if config.explain is not None:
        return explain(config, config.explain)
    if not config.grader:
        raise RlvrError("No grader is given.", f"Choose {', '.join(GRADERS)}, or FILE.py:FUNCTION, with --grader.")
    pool = GraderPool(
        config.grader,
        format_rule=config.format_rule,
        workers=config.grader_workers,
        timeout=config.grader_timeout,
    )
    path = resolve_run(config.run, config.runs_dir) if config.run else latest_run(config.runs_dir)
    grader, sha256 = stored_name(config), _sha256_of(config.grader)
    with pool, StopRequest() as stop, RunDir.annotate(path) as run:
        console.say(f"run      {run.path} ({run.metadata['status']})")
        for notice in run.notices:
            console.say(notice)
        works = plan_regrade(run, grader=grader, grader_sha256=sha256, phase=config.phase, again=config.again)
        done, left = sum(w.done for w in works), sum(w.left for w in works)
        console.say(f"grader   {grader}: {left} rollouts to grade" + (f", {done} graded already" if done else ""))
        try:
            if left:
                with console.progress("grading", left) as bar:
                    regrade(run, works, grader=grader, grader_sha256=sha256, pool=pool, stop=stop, progress=bar)
        except (Interrupted, KeyboardInterrupt):
            words = ["rlvr", "grade", str(run.path), "--grader", config.grader]
            words += ["--format-rule", config.format_rule] if config.format_rule != "literal" else []
            words += ["--phase", config.phase] if config.phase != "all" else []
            raise Interrupted(f"what is done is kept in {run.path}; go on with: {shlex.join(words)}") from None
    changes = compare_grades(read_run(path), grader=grader, phase=config.phase)
    tables.print_tables(changes, output=config.format, missing="–")


def explain(config: GradeConfig, text: str) -> None:
    """Print how the verdict on one answer or response comes about."""
    from rlvr_cli.graders.explain import explained, response_of

    if not config.run.strip():
        raise RlvrError(
            "--explain needs the ground truth, too.",
            'rlvr grade --explain "ANSWER" "TRUTH"; one that starts with - comes after -- : --explain "-5" -- "-5"',
        )
    grader = config.grader or "r1_zero"
    response = response_of(text, grader)
    with GraderPool(grader, format_rule=config.format_rule, workers=1, timeout=config.grader_timeout) as pool:
        (verdict,) = pool.grade([(response, config.run)])
    found = explained(verdict, response, config.run, grader=grader, format_rule=config.format_rule)
    tables.print_tables(found, output=config.format, missing="–")


def stored_name(config: GradeConfig) -> str:
    """The name that the grades are stored under: the grader's name, and its format rule if it is not the default."""
    ruled = has_format_rule(config.grader) and config.format_rule != "literal"
    return f"{config.grader}_{config.format_rule}" if ruled else config.grader


def _sha256_of(grader: str) -> str | None:
    """The sha256 of a grader's file, so that a changed file counts as another grader; None for a built-in grader."""
    return None if grader in GRADERS else user_code.sha256(grader)
