"""Write the manifest and metrics.parquet of an open run.

Enters: entries and the metrics table. Leaves: durable manifest lines and a durable metrics file, or on failure an
unchanged manifest.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlvr_cli.errors import RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.runs.manifest import MANIFEST, METRICS, Entries, Entry, entry_of, line_of, matches
from rlvr_cli.runs.readers import read_manifest
from rlvr_cli.runs.storage.files import (
    atomic_write,
    close_private,
    open_private,
    os_errors_as_user_errors,
    read_regular,
    shown,
    write_all,
)
from rlvr_cli.runs.storage.parquet import to_parquet
from rlvr_cli.types import SCHEMA_VERSION

if TYPE_CHECKING:
    import pyarrow as pa


def new_entry(
    relative: str, data: bytes | memoryview, *, rows: int, phase: str, step: int, version: int = SCHEMA_VERSION
) -> Entry:
    """Return the manifest entry for a file with these bytes, by default of the current schema version."""
    return entry_of(data, path=relative, rows=rows, phase=phase, step=step, schema_version=version)


class OpenManifest:
    """The manifest of a run that is open for writing.

    Attributes:
        path: the manifest file.
        entries: one per complete line.
        size: length of the complete lines in bytes.
        had_incomplete_line: whether the file ended with an incomplete line, which was removed.
        unsettled: whether the last line announces metrics that may not be in place. Recovery settles that only of a last line, so
            none may follow.
    """

    def __init__(self, run: Path) -> None:
        """Open the manifest and remove an incomplete last line. Raises RlvrError if it is missing or damaged."""
        self.path = run / MANIFEST
        entries, self.size = read_manifest(run)
        self.unsettled = False
        self.entries = Entries(entries)
        with os_errors_as_user_errors(self.path):
            self._file = open_private(self.path, os.O_RDWR)
            try:
                self.had_incomplete_line = os.fstat(self._file).st_size > self.size
                self._cut(self.size)
            except BaseException:
                self.close()
                raise

    def append(self, entry: Entry) -> None:
        """Append a line durably; if this raises, the manifest is truncated to its previous content."""
        if self.unsettled:
            raise RlvrError(
                f"{shown(self.path)} ends with a line whose file may not have been written.",
                "Open the run again, for instance with --resume: that settles it.",
            )
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
        """The size of the file, including an incomplete last line."""
        return os.fstat(self._file).st_size

    @property
    def is_in_place(self) -> bool:
        """Whether the file is still at its path: when its run was moved, another one may have been made there."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self.path, follow_symlinks=False))
        except OSError:
            return False

    def remove_last(self) -> None:
        """Remove the last line."""
        with os_errors_as_user_errors(self.path):
            lines = os.pread(self._file, self.size, 0)
            self._cut(lines.rfind(b"\n", 0, -1) + 1)
        self.entries.remove_last()

    def close(self) -> None:
        if self._file >= 0:
            close_private(self._file)
            self._file = -1

    def _cut(self, size: int) -> None:
        os.ftruncate(self._file, size)
        self.size = size
        os.fsync(self._file)


class MetricsFile:
    """metrics.parquet, which is replaced in place; the manifest announces the new sha256 before the rename.

    Attributes:
        table: the content of the file.
    """

    def __init__(self, run: Path, manifest: OpenManifest, table: "pa.Table") -> None:
        self.table = table
        self._run, self._manifest = run, manifest

    def replace(self, table: "pa.Table", *, phase: str, step: int) -> None:
        """Replace the metrics durably with another table.

        Raises:
            RlvrError: the file cannot be written. If only the fsync of the directory failed, the new table is in place;
                otherwise the old table stays, and the new announcement is removed. If the run was moved meanwhile, the
                announcement stays, for recovery, and is the last line that the manifest takes.
        """
        table = table.combine_chunks()
        data = to_parquet(table)
        entry = new_entry(METRICS, data, rows=table.num_rows, phase=phase, step=step)
        self._manifest.append(entry)
        self._manifest.unsettled = True
        try:
            atomic_write(self._run / METRICS, data)
        except BaseException:
            if self._manifest.is_in_place:
                with suppress(RlvrError):  # recovery repairs it when the run is next opened
                    self._settle(entry, table)
            raise
        self._manifest.unsettled = False
        self.table = table

    def _settle(self, entry: Entry, table: "pa.Table") -> None:
        """Remove the announcement of a table, unless the table is in place."""
        if os.path.lexists(self._run / METRICS) and matches(entry, read_regular(self._run, METRICS)):
            self.table = table
        else:
            self._manifest.remove_last()
        self._manifest.unsettled = False
