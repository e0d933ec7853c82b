"""Trackio: a run of the same name, in Trackio's own directory (`TRACKIO_DIR`), or wherever its environment variables say.

Enters: rows. Leaves: the logs of a Trackio run, train/NAME and eval/NAME at their steps, its config, and tables of some responses. A
resumed run goes on in the same Trackio run; what it measures again keeps the value that was sent first.
"""

from collections.abc import Sequence
from typing import Any

import trackio

from rlvr_cli.runs.readers import RunInfo
from rlvr_cli.trackers.rows import SAMPLE_COLUMNS, Row, described, samples
from rlvr_cli.trackers.sent import Sent


class Trackio:
    """Sends the rows of one run."""

    def __init__(self, info: RunInfo, *, project: str, live: bool) -> None:
        self._path, self._sent = info.path, Sent(info.path, "trackio")
        self._project = project or "rlvr"
        self._run: Any = trackio.init(
            project=self._project,
            name=info.metadata["run_id"],
            group=info.metadata["command"],
            config={name: value for name, value in described(info).items() if not name.startswith("_")},
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=None if live else False,
        )

    @property
    def note(self) -> str:
        return f"look at it with: trackio show --project {self._project}"

    def send(self, rows: Sequence[Row]) -> None:
        """Send the rows that have not been sent."""
        for row in self._sent.left(rows):
            values: dict[str, Any] = dict(row.named())
            if shown := samples(self._path, row):
                values["eval/samples"] = trackio.Table(
                    columns=list(SAMPLE_COLUMNS), data=[list(cells) for cells in shown]
                )
            self._run.log(values, step=row.step)
        self._sent.record(rows)

    def finish(self, status: str) -> None:
        trackio.finish()
