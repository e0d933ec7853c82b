"""What `rlvr check` says about a run, as one list: ``from checks import findings``; whether anything was written; and what was called."""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

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


@contextmanager
def calls_into(module: ModuleType) -> Iterator[Counter[str]]:
    """Count how often this thread enters the functions of a module, by name: work that grows shows without a clock."""
    calls = Counter[str]()

    def note(frame, event: str, _) -> None:
        if event == "call" and frame.f_code.co_filename == module.__file__:
            calls[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
