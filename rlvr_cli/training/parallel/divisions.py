"""How the work of a run's updates is divided among trainers: run.json has it from each change on.

Enters: an open run. Leaves: `divisions` in run.json, and a note where a resumed run goes on with another division.
"""

from typing import Any

from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.terminal import console


class Divisions:
    """The divisions of a run so far.

    Attributes:
        stored: of each, `from_update`, `trainers` and `fsdp`.
    """

    def __init__(self, run: RunDir, *, updates: int) -> None:
        """
        Args:
            updates: done so far; what run.json says of later ones was undone.
        """
        self._run = run
        stored = run.metadata.get("divisions")
        if stored is None and updates:  # of a run before there were divisions
            policy = run.metadata.get("policy", {})
            stored = [{"from_update": 0, "trainers": policy.get("trainers", 1), "fsdp": policy.get("fsdp", False)}]
        self.stored: list[dict[str, Any]] = [d for d in stored or () if d["from_update"] < updates]

    def record(self, *, updates: int, trainers: int, fsdp: bool) -> None:
        """Before an update: store how the work is divided from now on, and say so if it was divided otherwise before."""
        now = {"trainers": trainers, "fsdp": fsdp}
        before = {key: value for key, value in self.stored[-1].items() if key in now} if self.stored else None
        if now == before:
            return
        if before is not None:
            console.say(
                f"note: it goes on with {_in_words(**now)} instead of {_in_words(**before)}: gradients are the same but for rounding, so "
                "that the run is no longer, to the last bit, what it would have been"
            )
        self.stored.append({"from_update": updates, **now})
        self._run.update(divisions=self.stored)


def _in_words(trainers: int, *, fsdp: bool) -> str:
    of = f", with {'shards' if fsdp else 'copies'} of the weights" if trainers > 1 else ""
    return f"{trainers} trainer{'s' * (trainers > 1)}{of}"
