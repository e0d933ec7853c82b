"""What `rlvr check` says about a run, as one list: ``from checks import findings``."""

from pathlib import Path

from rlvr_cli.runs.check import check_run


def findings(run: Path | str) -> list[str]:
    """The problems of a run and its parts that are not in the manifest, one sentence each; empty for a run at rest."""
    check = check_run(run)
    return check.problems + check.pending
