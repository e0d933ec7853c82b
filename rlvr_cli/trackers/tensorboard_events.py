"""TensorBoard: an event file in a folder.

Enters: rows. Leaves: events of train/NAME and eval/NAME at their steps. What the file says is read back and compared with the
rows: what it lacks is added, and where it says something else, TensorBoard is told that the run goes on from that step (as after a
restart), and the rows from there on are written again. So each point is there once, whatever was killed when.
(protobuf makes the messages' classes when its modules are imported: no type checker finds their names.)
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rlvr_cli.runs.readers import RunInfo
from rlvr_cli.runs.storage.files import typed
from rlvr_cli.trackers.rows import SAMPLE_COLUMNS, Row, Samples, as_markdown, described, started_at

SAMPLES_TAG = "eval/samples"


class TensorBoard:
    """Writes the event files of one run."""

    def __init__(self, info: RunInfo, *, project: str, live: bool, folder: Path) -> None:
        self._path, self._started = info.path, started_at(info)
        self._all_runs = info.path.parent if folder.parent == info.path else folder.parent
        self._sent, self._shown = _read_back(folder)
        self._writer = EventFileWriter(str(folder))
        if not self._sent:
            options = as_markdown(("option", "value"), list(described(info).items()))
            self._write([_text("config", options)], step=0, seconds=0.0)

    @property
    def note(self) -> str:
        return f"look at it with: tensorboard --logdir {typed(self._all_runs)}"

    def send(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Make the files say what all rows of the run so far say. Returns those of which something was written."""
        changed = [row.step for row in rows for tag, value in _scalars(row) if self._differs(tag, row.step, value)]
        if changed:
            first = min(changed)
            self._writer.add_event(
                Event(wall_time=self._started, step=first, session_log=SessionLog(status=SessionLog.START))
            )
            self._sent = {(tag, step): value for (tag, step), value in self._sent.items() if step < first}
        written: list[Row] = []
        samples = Samples(self._path)
        for row in rows:
            scalars = [(tag, value) for tag, value in _scalars(row) if (tag, row.step) not in self._sent]
            if not scalars:
                continue
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars]
            if row.step not in self._shown and (shown := samples.of(row)):  # TensorBoard takes back numbers only
                values.append(_text(SAMPLES_TAG, as_markdown(SAMPLE_COLUMNS, shown)))
                self._shown.add(row.step)
            self._write(values, step=row.step, seconds=row.seconds)
            self._sent |= {(tag, row.step): np.float32(value) for tag, value in scalars}
            written.append(row)
        self._writer.flush()
        return written

    def finish(self, status: str) -> None:
        self._writer.close()

    def _differs(self, tag: str, step: int, value: float) -> bool:
        sent = self._sent.get((tag, step))
        return sent is not None and not np.array_equal(sent, np.float32(value), equal_nan=True)

    def _write(self, values: Sequence[Any], *, step: int, seconds: float) -> None:
        time = self._started + seconds
        self._writer.add_event(Event(wall_time=time, step=step, summary=Summary(value=values)))


def _scalars(row: Row) -> Iterator[tuple[str, float]]:
    yield from ((f"{row.axis}/{name}", value) for name, value in row.values.items())


def _text(tag: str, text: str) -> Any:
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode(errors="replace")])
    tensor.tensor_shape.dim.add(size=1)
    return Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)


def _read_back(folder: Path) -> tuple[dict[tuple[str, int], Any], set[int]]:
    """Return (tag, step) -> value of the scalars in the event files, as TensorBoard reads them, and the steps that have samples."""
    sent: dict[tuple[str, int], Any] = {}
    shown: set[int] = set()
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                sent = {key: value for key, value in sent.items() if key[1] < event.step}
            for value in event.summary.value:
                if value.HasField("tensor") and value.tensor.float_val:  # how a scalar is read back
                    sent[value.tag, event.step] = np.float32(value.tensor.float_val[0])
                elif value.tag == f"{SAMPLES_TAG}/text_summary":
                    shown.add(event.step)
    return sent, shown
