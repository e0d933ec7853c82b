"""The manifest of a run that is open for writing, and the metrics file that it announces.

Enters: entries and the metrics' table. Leaves: lines that are on disk when a call returns, or a manifest that is as it was.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlvr_cli.errors import RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.runs.files import (
    atomic_write,
    close_private,
    open_private,
    os_errors_as_user_errors,
    read_regular,
    write_all,
)
from rlvr_cli.runs.manifest import METRICS, Entry, entry_of, line_of, matches
from rlvr_cli.runs.parquet import to_parquet
from rlvr_cli.runs.readers import MANIFEST, read_manifest
from rlvr_cli.types import SCHEMA_VERSION

if TYPE_CHECKING:
    import pyarrow as pa


def new_entry(
    relative: str, data: bytes | memoryview, *, rows: int, phase: str, step: int, version: int = SCHEMA_VERSION
) -> Entry:
    """The entry of a file of today's schema version, or of an older one."""
    return entry_of(data, path=relative, rows=rows, phase=phase, step=step, schema_version=version)


class OpenManifest:
    """A manifest that lines are added to.

    Attributes:
        path: of the file.
        entries: of its whole lines.
        was_cut: it ended in an incomplete line, which is gone.
    """

    def __init__(self, run: Path) -> None:
        """Raises RlvrError when the manifest is missing or damaged."""
        self.path = run / MANIFEST
        self.entries, self.size = read_manifest(run)  # bytes of whole lines
        with os_errors_as_user_errors(self.path):
            self._file = open_private(self.path, os.O_RDWR)
            try:
                self.was_cut = os.fstat(self._file).st_size > self.size
                self._cut(self.size)
            except BaseException:
                self.close()
                raise

    @property
    def is_open(self) -> bool:
        return self._file >= 0

    def append(self, entry: Entry) -> None:
        """Add a line, durably; when this raises, the manifest is cut back to what it was."""
        line = line_of(entry)
        half = len(line) // 2
        with os_errors_as_user_errors(self.path):
            try:
                fault_point("manifest")
                write_all(self._file, line[:half], offset=self.size)
                fault_point("manifest.torn")
                write_all(self._file, line[half:], offset=self.size + half)
                os.fsync(self._file)
            except BaseException:
                self._cut(self.size)
                raise
        self.size += len(line)
        self.entries.append(entry)
        fault_point("manifest.done")

    @property
    def bytes_on_disk(self) -> int:
        """Of the file, an incomplete line included."""
        return os.fstat(self._file).st_size

    def take_back(self) -> None:
        """Remove the last line."""
        with os_errors_as_user_errors(self.path):
            lines = read_regular(self.path.parent, MANIFEST)[: self.size]
            self._cut(lines.rfind(b"\n", 0, -1) + 1)
        self.entries.pop()

    def close(self) -> None:
        if self._file >= 0:
            close_private(self._file)
            self._file = -1

    def _cut(self, size: int) -> None:
        os.ftruncate(self._file, size)
        self.size = size
        os.fsync(self._file)


class MetricsFile:
    """metrics.parquet, which is replaced in place: the manifest announces its sha256 before the rename.

    Attributes:
        table: what the file holds.
    """

    def __init__(self, run: Path, manifest: OpenManifest, table: "pa.Table") -> None:
        self.table = table
        self._run, self._manifest = run, manifest

    def replace(self, table: "pa.Table", *, phase: str, step: int) -> None:
        """Make another table the metrics, durably.

        Raises:
            RlvrError: the file cannot be written. Then `table` is the new one when only the fsync of the directory failed, and
                otherwise the old one, whose announcement is the last again.
        """
        table = table.combine_chunks()
        data = to_parquet(table)
        entry = new_entry(METRICS, data, rows=table.num_rows, phase=phase, step=step)
        self._manifest.append(entry)
        try:
            atomic_write(self._run / METRICS, data)
        except BaseException:
            with suppress(RlvrError):  # what cannot be settled now is settled when the run is opened again
                if os.path.lexists(self._run / METRICS) and matches(entry, read_regular(self._run, METRICS)):
                    self.table = table
                else:
                    self._manifest.take_back()
            raise
        self.table = table
