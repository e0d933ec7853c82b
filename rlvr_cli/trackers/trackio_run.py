"""Trackio: a run of the same name, in Trackio's own directory (`TRACKIO_DIR`), or wherever its environment variables say. Where another
run has that name already, as sweeps name theirs alike, a short hash follows it.

Enters: rows. Leaves: the logs of a Trackio run, train/NAME and eval/NAME at their steps, its config, and tables of some responses. A
resumed run goes on in the same Trackio run; what it measures again keeps the value that was sent first.

Trackio adds whatever it is sent, so that a row that is sent twice is there twice. Therefore a row counts as sent once it is handed over;
but not in a directory whose project no longer has the run.
"""

import hashlib
import os
import shlex
from collections.abc import Sequence
from typing import Any

import trackio

from rlvr_cli.runs.readers import RunInfo
from rlvr_cli.text import redacted
from rlvr_cli.trackers.rows import SAMPLE_COLUMNS, Row, Samples, described
from rlvr_cli.trackers.sent import Recorded


class Trackio:
    """Sends the rows of one run."""

    def __init__(self, info: RunInfo, *, project: str, live: bool) -> None:
        self._path, self._id, self._project = info.path, info.metadata["run_id"], project or "rlvr"
        self._sent = Recorded(info, "trackio", project=project, place=_place)
        is_own, self._name = self._sent.is_begun, self._sent.name or self._id
        found = self._opened(info, live=live and is_own, resume="must")
        if found is None and _is_local():
            self._sent.forget()
        if found is not None and not is_own:
            self._name = f"{self._id}-{hashlib.sha256(info.metadata['created_at'].encode()).hexdigest()[:6]}"
            found = None
        self._run = found or self._opened(info, live=live, resume="allow")
        self._sent.begin(self._name)

    def _opened(self, info: RunInfo, *, live: bool, resume: str) -> Any:
        """Open the run in Trackio, where nothing changes until something is sent. None if it must be there and is not."""
        try:
            return trackio.init(
                project=self._project,
                name=self._name,
                group=info.metadata["command"],
                config={name: value for name, value in described(info).items() if not name.startswith("_")},
                resume=resume,
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=None if live else False,
            )
        except ValueError as error:
            if resume == "must" and "does not exist" in str(error):
                return None
            raise

    @property
    def note(self) -> str:
        named = (
            f"; there its name is {self._name}, as another run is named {self._id}" if self._name != self._id else ""
        )
        return f"look at it with: trackio show --project {shlex.quote(self._project)}{named}"

    def send(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Send the rows that have not been sent, and return them."""
        sent: list[Row] = []
        samples = Samples(self._path)
        try:
            for row in self._sent.left(rows):
                values: dict[str, Any] = dict(row.named())
                if shown := samples.of(row):
                    values["eval/samples"] = trackio.Table(
                        columns=list(SAMPLE_COLUMNS), data=[list(cells) for cells in shown]
                    )
                self._run.log(values, step=row.step)
                sent.append(row)
        finally:
            self._sent.record(sent)
        return sent

    def finish(self, status: str) -> None:
        trackio.finish()


def _place(project: str) -> str:
    """Return where a project is: at a Space, a server (whose address may end with a token), or in a directory."""
    server = redacted(os.environ.get("TRACKIO_SERVER_URL", "").partition("?")[0])
    folder = os.environ.get("TRACKIO_DIR") or os.environ.get("HF_HOME") or "~"
    where = os.environ.get("TRACKIO_SPACE_ID") or server or os.path.abspath(os.path.expanduser(folder))
    return f"{where}: {project or 'rlvr'}"


def _is_local() -> bool:
    return not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"))
