"""Which rows a run holds, in memory: a bit each, since a run may hold millions.

Enters: the manifest's entries. Leaves: for a phase and step the sample indices of each question, read from its parts the first time.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlvr_cli.runs.manifest import Entry, part_name
from rlvr_cli.runs.parquet import keys_of
from rlvr_cli.runs.readers import damaged_file, read_part

Held = dict[Any, int]  # example_id, or (example_id, attempt) of grades -> its sample indices, as the bits of a number
MAX_SAMPLES = 2**24  # of a question: a part that claims more would cost memory that nobody has


class CommittedKeys:
    """The keys of the committed rollouts and grades of a run that is open for writing."""

    def __init__(self, run: Path, entries: list[Entry]) -> None:
        """
        Args:
            entries: the manifest's, which grow as the run is written.
        """
        self._run, self._entries = run, entries
        self._held: dict[tuple[str, str, int], Held] = {}

    def held(self, phase: str, step: int, *, grader: str = "") -> Held:
        """What is committed of a phase and step, or of a grader's slug there. Add to it what is committed there next.

        Raises:
            RlvrError: a part is missing or damaged.
        """
        group = (grader, phase, step)
        if group not in self._held:
            columns = ["example_id", "sample_index", *(["attempt"] if grader else [])]
            held: Held = {}
            for entry in self._entries:
                if (
                    (entry.phase, entry.step) == (phase, step)
                    and (name := part_name(entry.path))
                    and name.grader == grader
                ):
                    try:
                        merge(held, held_of(keys_of(read_part(self._run, entry, columns))))
                    except ValueError as error:
                        raise damaged_file(self._run / entry.path, str(error)) from error
            self._held[group] = held
        return self._held[group]


def held_of(keys: Iterable[tuple[Any, ...]]) -> Held:
    """Keys of `parquet.keys_of`. Raises ValueError for a sample index that nothing of ours has."""
    found: dict[Any, bytearray] = {}
    for example_id, index, *attempt in keys:
        if not 0 <= index < MAX_SAMPLES:
            raise ValueError(f"a sample index in it is {index}")
        octets = found.setdefault((example_id, *attempt) if attempt else example_id, bytearray())
        octets.extend(bytes(max(index // 8 + 1 - len(octets), 0)))
        octets[index // 8] |= 1 << index % 8
    return {who: int.from_bytes(octets, "little") for who, octets in found.items()}


def indices(bits: int) -> Iterator[int]:
    """The sample indices in a number of `Held`, in their order."""
    return (index for index, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")


def overlap(held: Held, fresh: Held) -> list[Any]:
    """The keys that are in both."""
    return [(who, *indices(both)) for who, bits in fresh.items() if (both := bits & held.get(who, 0))]


def merge(held: Held, fresh: Held) -> None:
    """Add `fresh` to `held`."""
    for who, bits in fresh.items():
        held[who] = held.get(who, 0) | bits
