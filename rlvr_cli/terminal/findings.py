"""Findings, in tables with a verdict and what to do.

Enters: what was found, or work that finds it. Leaves: a table, and what is a problem.
"""

import time
from collections.abc import Callable

from rlvr_cli.errors import RlvrError
from rlvr_cli.terminal import console
from rlvr_cli.types import Table

_LOOK = "Look at the versions, the driver and the device above."


class Section:
    """Findings, a row each: `ok`, `note` (something is not there, nothing is wrong) or `problem`."""

    def __init__(self, title: str, *, timed: bool = False) -> None:
        self.table = Table(("what", "verdict", "found", "to do", *(["seconds"] if timed else [])), [], title)
        self.timed = timed
        self.problems: list[str] = []

    def add(self, what: str, found: str, verdict: str = "ok", to_do: str = "", seconds: float = 0.0) -> None:
        self.table.rows.append((what, verdict, found, to_do, *([round(seconds, 2)] if self.timed else [])))
        if verdict == "problem":
            self.problems.append(what)

    def attempt(self, what: str, work: Callable[[], str]) -> bool:
        """Add what `work` finds, or why it fails, in words. Returns whether it succeeded."""
        if self.timed:
            console.say(f"trying     {what}")
        started, error = time.perf_counter(), None
        try:
            finding: tuple[str, ...] = (work(),)
        except RlvrError as e:
            error, finding = e, (e.problem, "problem", e.hint)
        except Exception as e:  # whatever a broken library or device raises
            lines = str(e).strip().splitlines() or ["no message"]
            error, finding = e, (f"{type(e).__name__}: {lines[0]}", "problem", _LOOK)
        self.add(what, *finding, seconds=time.perf_counter() - started)
        return error is None
