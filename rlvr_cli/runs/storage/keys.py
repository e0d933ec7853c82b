"""The keys of a run's committed rows: one bit per row, and of many questions in a temporary file, since a run may have millions.

Enters: the manifest's entries. Leaves: the sample indices of each question for a phase and step, read from the parts on
first use, and again when a step is returned to.
"""

from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

from rlvr_cli.runs.manifest import ROLLOUTS, Entries, part_name
from rlvr_cli.runs.readers import read_part
from rlvr_cli.runs.storage.files import damaged_file
from rlvr_cli.runs.storage.parquet import keys_of
from rlvr_cli.runs.storage.spilled import SpillingDict

# example_id, or (example_id, attempt) for grades -> an int whose set bits are the sample indices
KeyBits = MutableMapping[Any, int]
MAX_SAMPLES = 2**24  # per question: a damaged part with a larger index would exhaust memory


class CommittedKeys:
    """The keys of the committed rows of a run that is open for writing: of each phase those of one step, as a run may have many."""

    def __init__(self, run: Path, entries: Entries) -> None:
        """
        Args:
            entries: the manifest's, which grow as the run is written.
        """
        self._run, self._entries = run, entries
        self._held: dict[tuple[str, str, str, int], KeyBits] = {}

    def committed(self, phase: str, step: int, *, folder: str = ROLLOUTS, grader: str = "") -> KeyBits:
        """Return the committed keys of a phase and step, of the parts in a folder; of grades, with the grader's slug.

        The caller must `merge` new keys into the returned dict after each commit, before it asks for another step.

        Raises:
            RlvrError: a part is missing or damaged.
        """
        group = (folder, grader, phase, step)
        if group not in self._held:
            columns = ["example_id", "sample_index", *(["attempt"] if grader else [])]
            held: KeyBits = SpillingDict()
            for entry in self._entries.of(folder, phase, step):
                if (name := part_name(entry.path)) and name.grader == grader:
                    try:
                        merge(held, bits_of_keys(keys_of(read_part(self._run, entry, columns))))
                    except ValueError as error:
                        raise damaged_file(self._run / entry.path, str(error)) from error
            self._held = {other: kept for other, kept in self._held.items() if other[:3] != group[:3]} | {group: held}
        return self._held[group]


def bits_of_keys(keys: Iterable[tuple[Any, ...]]) -> KeyBits:
    """Convert the keys of `parquet.keys_of` to bits. Raises ValueError for an impossible sample index."""
    found: dict[Any, bytearray] = {}
    for example_id, index, *attempt in keys:
        if not 0 <= index < MAX_SAMPLES:
            raise ValueError(f"a sample index in it is {index}")
        octets = found.setdefault((example_id, *attempt) if attempt else example_id, bytearray())
        octets.extend(bytes(max(index // 8 + 1 - len(octets), 0)))
        octets[index // 8] |= 1 << index % 8
    return {who: int.from_bytes(octets, "little") for who, octets in found.items()}


def bit_positions(bits: int) -> Iterator[int]:
    """Yield the positions of the set bits of a `KeyBits` value, the sample indices, in ascending order."""
    return (index for index, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")


def overlap(held: KeyBits, fresh: KeyBits) -> list[Any]:
    """Return the keys that are in both."""
    return [(who, *bit_positions(both)) for who, bits in fresh.items() if (both := bits & held.get(who, 0))]


def merge(held: KeyBits, fresh: KeyBits) -> None:
    """Add `fresh` to `held`."""
    for who, bits in fresh.items():
        held[who] = held.get(who, 0) | bits
