"""What `rlvr check` says about a run, as one list: ``from checks import findings``; and whether anything was written."""

import hashlib
from pathlib import Path

from rlvr_cli.runs.check import check_run


def findings(run: Path | str) -> list[str]:
    """The problems of a run and its parts that are not in the manifest, one sentence each; empty for a run at rest."""
    check = check_run(run)
    return check.problems + check.pending


def tree_hash(root: Path) -> str:
    """A digest of all files below a directory: their names, contents and times."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        digest.update(str(path.relative_to(root)).encode() + b"\0")
        if path.is_file():
            digest.update(path.read_bytes())
            digest.update(str(path.stat().st_mtime_ns).encode())
    return digest.hexdigest()
