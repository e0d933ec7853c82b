"""`rlvr check`: read every byte of a run, compare it with its checksums, and check what the rows say.

Enters: a CheckConfig. Leaves: on stdout what is wrong, one sentence each, or a sentence that nothing is; exit status 1 or 0.
"""

import os

from rlvr_cli.config.check import CheckConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.rollouts.requests import request_seed
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.files import shown
from rlvr_cli.runs.readers import latest_run, resolve_run
from rlvr_cli.terminal import console, tables


def run(config: CheckConfig) -> None:
    """Check a run, which may still be running. Raises RlvrError when a file differs from what was committed."""
    path = resolve_run(config.run, config.runs_dir) if config.run else latest_run(config.runs_dir)
    console.say(f"run      {path}")
    check = check_run(path, seed_of=request_seed)
    files, problems = check.files, check.problems
    if os.path.lexists(path / "checkpoints"):
        from rlvr_cli.training.checkpoints import check_checkpoints  # imports torch: only if needed

        in_checkpoints, damaged = check_checkpoints(path)
        files, problems = files + in_checkpoints, [*problems, *damaged]
    for sentence in check.pending:
        console.say(sentence)
    if problems or config.format != "table":
        tables.print_table(["problem"], [[problem] for problem in problems], output=config.format)
    else:
        console.print_text(
            f"every byte of {files} files is as it was committed; the keys, seeds and steps of {check.rows} rollouts fit"
        )
    if problems:
        raise RlvrError(
            f"{shown(path)} is not as it was committed: {len(problems)} problem{'s' if len(problems) > 1 else ''}.",
            "Restore the named files from a copy of the run. If only a checkpoint is damaged, --resume uses an older one.",
        )
