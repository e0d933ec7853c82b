"""`rlvr check`: read every byte of a run, compare it with its checksums, and check what the rows say; with --replay, compute its
updates again.

Enters: a CheckConfig. Leaves: on stdout what is wrong, one sentence each, or a sentence that nothing is, and what a replay
found, as JSON or CSV in one document; exit status 1 or 0. Of several runs, all are checked, whatever is wrong with one.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlvr_cli.config.store.check import CheckConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.rollouts.requests import request_seed
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.lock import description, holder_of
from rlvr_cli.runs.readers import latest_run, resolve_runs
from rlvr_cli.runs.remote.views import remote_run
from rlvr_cli.runs.storage.files import shown
from rlvr_cli.terminal import console, tables
from rlvr_cli.types import Table

if TYPE_CHECKING:
    from rlvr_cli.replay.run import Replay

SHOWN_PROBLEMS = 5
REPLAYED = ("update", "objective", "replayed", "gradient norm", "replayed norm", "difference")


def run(config: CheckConfig) -> None:
    """Check runs, which may still be running. Raises RlvrError when a file differs from what was committed."""
    named = resolve_runs(config.runs, config.runs_dir)
    console.report_passed_over(named.others)
    paths = named.runs or [latest_run(config.runs_dir)]
    if len(paths) == 1:
        return check(paths[0], config)
    if config.format != "table":
        raise RlvrError(f"--format {config.format} is for one run; these are {len(paths)}.", "Leave it out.")
    failed: list[RlvrError] = []
    for path in paths:
        try:
            check(path, config)
        except RlvrError as error:
            console.say(f"error: {error.problem}")
            failed.append(error)
    if failed:
        raise RlvrError(f"{len(failed)} of {len(paths)} runs are not as they were committed.", failed[0].hint)


def check(path: Path, config: CheckConfig) -> None:
    """Check one run."""
    console.say(f"run      {shown(path)}")
    remote = remote_run(path)
    lost = remote.verify() if remote else []  # what follows reads what has come
    found = check_run(path, seed_of=request_seed)
    files, problems = found.files, list(dict.fromkeys([*lost, *found.problems]))
    if os.path.lexists(path / "checkpoints"):
        from rlvr_cli.training.checkpoints import check_checkpoints  # imports torch: only if needed

        in_checkpoints, damaged = check_checkpoints(path)
        files, problems = files + in_checkpoints, [*problems, *damaged]
    if holder := holder_of(path):
        console.say(f"it is being written by {description(holder)}")
    for sentence in found.pending:
        console.say(sentence)
    if problems or not config.replay:
        print_found(problems, None, config)
    if not problems and config.format == "table":
        console.print_text(
            f"every byte of {files} files is as it was committed; the keys, seeds and steps of {found.rows} rollouts fit"
        )
    if problems:
        raise RlvrError(
            f"{shown(path)} is not as it was committed: {len(problems)} problem{'s' if len(problems) > 1 else ''}.",
            "Restore the named files from a copy of the run. If only a checkpoint is damaged, --resume uses an older one.",
        )
    if config.replay:
        replay(path, config)


def print_found(problems: Sequence[str], replayed: "Replay | None", config: CheckConfig) -> None:
    """Print what is wrong and, with --replay, the updates and the verdict. The format table shows one of these tables, others all."""
    updates = replayed.updates if replayed else []
    rows = [(u.number, u.logged_objective, u.objective, u.logged_norm, u.norm, u.difference) for u in updates]
    wrong = Table(("problem",), [(problem,) for problem in problems], "problems" if config.replay else "")
    compared = Table(REPLAYED, rows, "updates")
    result = Table(("verdict",), [(replayed.verdict,)] if replayed and not problems else [], "result")
    if config.format != "table":
        tables.print_tables([wrong, compared, result] if config.replay else [wrong], output=config.format)
    elif replayed or problems:
        tables.print_tables([compared if replayed else wrong])


def replay(path: Path, config: CheckConfig) -> None:
    """Replay a run's updates and print them. Raises RlvrError when they are not what the run logged."""
    from rlvr_cli.replay.run import replay_run  # imports torch: only if needed
    from rlvr_cli.replay.stored import read_stored

    stored, most = read_stored(path), config.replayed_updates
    with console.progress("updates", min(len(stored.logged), most or len(stored.logged))) as bar:
        found = replay_run(stored, most=most, advance=bar.advance)
    print_found(found.problems, found, config)
    console.say(
        f"largest difference {found.difference:.2g}; {found.rows} rollouts have the log-probabilities of their policies"
    )
    if found.problems:
        more = len(found.problems) - SHOWN_PROBLEMS
        some = "; ".join(found.problems[:SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        raise RlvrError(
            f"The stored rollouts and options of {shown(path)} do not give what it logged: {some}.",
            "Its options, rollouts, metrics or weights were changed, or another version of rlvr made it. Small differences that grow from update "
            "to update are of rounding, at a high learning rate: see docs/runs.md.",
        )
    if config.format == "table":
        console.print_text(found.verdict)
