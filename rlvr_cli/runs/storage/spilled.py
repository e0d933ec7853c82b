"""What may have millions of entries: in memory while it has few, else in a temporary file that nobody else sees.

Enters: records whose fields are JSON values, or keys with texts or whole numbers. Leaves: the same, at 8 bytes of memory for a
record and none for a key.
"""

import json
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import chain, islice
from os import pread
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

if TYPE_CHECKING:
    import sqlite3

T = TypeVar("T")
V = TypeVar("V", str, int)

IN_MEMORY = 20_000  # entries


def spilled(items: Iterable[T], record: type[T], *, folder: Path | None = None) -> Sequence[T]:
    """Return records of a dataclass: as a list, or if they are more than `IN_MEMORY` as a `SpilledList` in this folder.

    Raises:
        OSError: the file cannot be written.
    """
    remaining = iter(items)
    first = list(islice(remaining, IN_MEMORY + 1))
    return first if len(first) <= IN_MEMORY else SpilledList(chain(first, remaining), record, folder=folder)


class SpilledList(Sequence[T]):
    """Records in a temporary file. A slice is a list."""

    def __init__(self, items: Iterable[T], record: type[T], *, folder: Path | None = None) -> None:
        self._record: Any = record
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # as long as the list
        weakref.finalize(self, self._file.close)
        self._ends = array("Q", [0])
        names = [field.name for field in fields(self._record)]
        try:
            for item in items:
                line = json.dumps([getattr(item, name) for name in names]).encode()
                self._ends.append(self._ends[-1] + self._file.write(line))
            self._file.flush()
        except OSError:
            with suppress(OSError):
                self._file.close()  # what it could not write it tries to write once more, and no longer at its end
            raise

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]  # raises IndexError
        start, end = self._ends[place : place + 2]
        return self._record(*json.loads(pread(self._file.fileno(), end - start, start)))


class SpillingDict(MutableMapping[Any, V], Generic[V]):
    """A dict that goes to a temporary file with more than `IN_MEMORY` keys, in which it has no order.

    Its keys are JSON values, or tuples of such; its values are texts, or whole numbers from 0.
    """

    def __init__(self) -> None:
        self._held: dict[Any, V] = {}
        self._file: sqlite3.Connection | None = None

    def __getitem__(self, key: Any) -> V:
        if self._file is None:
            return self._held[key]
        found: Any = self._file.execute("SELECT value FROM held WHERE key = ?", (json.dumps(key),)).fetchone()
        if found is None:
            raise KeyError(key)
        value: Any = found[0]
        if isinstance(value, bytes):
            value = int.from_bytes(value, "little")
        return value

    def __setitem__(self, key: Any, value: V) -> None:
        if self._file is None:
            self._held[key] = value
            if len(self._held) > IN_MEMORY:
                self._spill()
        else:
            self._file.execute("REPLACE INTO held VALUES (?, ?)", (json.dumps(key), _stored(value)))

    def __delitem__(self, key: Any) -> None:
        _ = self[key]  # raises KeyError
        if self._file is None:
            del self._held[key]
        else:
            self._file.execute("DELETE FROM held WHERE key = ?", (json.dumps(key),))

    def __len__(self) -> int:
        return len(self._held) if self._file is None else self._file.execute("SELECT count(*) FROM held").fetchone()[0]

    def __iter__(self) -> Iterator[Any]:
        if self._file is None:
            return iter(self._held)
        keys = (json.loads(key) for (key,) in self._file.execute("SELECT key FROM held"))
        return (tuple(key) if isinstance(key, list) else key for key in keys)

    def _spill(self) -> None:
        import sqlite3

        file = sqlite3.connect("", isolation_level=None, check_same_thread=False)  # without a name: a file of its own
        weakref.finalize(self, file.close)
        for setting in ("journal_mode = OFF", "synchronous = OFF", "temp_store = FILE"):
            file.execute(f"PRAGMA {setting}")
        file.execute("CREATE TABLE held (key TEXT PRIMARY KEY, value) WITHOUT ROWID")
        rows = ((json.dumps(key), _stored(value)) for key, value in self._held.items())
        file.executemany("INSERT INTO held VALUES (?, ?)", rows)
        self._file, self._held = file, {}


def _stored(value: str | int) -> str | bytes:
    return value if isinstance(value, str) else value.to_bytes(value.bit_length() // 8 + 1, "little")
