"""`rlvr export`: the metrics of runs, sent to a tracker or written as CSV; or whole runs, copied to object storage.

Enters: an ExportConfig. Leaves: in each tracker the complete rows of each run that it did not have, by the code that `--track` uses;
in object storage a copy of each run, by `runs.remote`.
"""

import contextlib
import sys
from pathlib import Path

from rlvr_cli.config.store.export import ExportConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import latest_run, read_run, resolve_runs
from rlvr_cli.runs.remote.copies import export_run
from rlvr_cli.runs.remote.store import is_address, parsed_address
from rlvr_cli.runs.storage.files import shown
from rlvr_cli.runs.storage.sources import source_of
from rlvr_cli.terminal import console
from rlvr_cli.trackers.open import check_installed, open_tracker
from rlvr_cli.trackers.rows import complete_rows


def run(config: ExportConfig) -> None:
    """Export runs. Raises RlvrError for user errors, such as a tracker that cannot be reached."""
    places = [parsed_address(name) for name in config.to if is_address(name)]
    trackers = [name for name in config.to if not is_address(name)]
    check_installed(trackers)
    named = resolve_runs(config.runs, config.runs_dir)
    console.report_passed_over(named.others)
    paths = named.runs or [latest_run(config.runs_dir)]
    for path in paths:
        if source_of(path):
            raise RlvrError(f"{shown(path)} is in object storage.", f"Get it first: rlvr fetch {shown(path)}")
    if config.out and len({path.name for path in paths}) < len(paths):
        raise RlvrError(
            "Two of the runs have the same name: in --out one would replace the other.", "Export them apart."
        )
    for path in paths:
        for name in dict.fromkeys(trackers):
            export(path, name, project=config.track_project, out=Path(config.out) if config.out else None)
        for place in dict.fromkeys(places):
            sent = export_run(path, place)
            console.say(f"{path.name}: {sent.files} files, {sent.moved} of them sent to {sent.place}")


def export(path: Path, name: str, *, project: str, out: Path | None) -> None:
    """Send one run to one tracker; files go into the run, or into a folder of `out`."""
    info = read_run(path)
    rows = complete_rows(info)
    if not rows:
        console.say(f"{info.id}: no metrics, nothing to send")
        return
    try:
        with (
            contextlib.redirect_stdout(sys.stderr),  # trackers say what they do, and stdout is for results
            open_tracker(name, info, project=project, live=False, patience=0.0, out=out) as tracker,
        ):
            sent = tracker.send(rows)
            note = tracker.note
            tracker.finish(info.metadata["status"])
    except RlvrError:
        raise
    except Exception as error:  # a tracker's own errors are of any kind
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise RlvrError(
            f"{name} did not take {info.id}: {text}", "Try again: what it has got is not sent twice."
        ) from error
    trained = len([row for row in sent if row.axis == "train"])
    there = f"; {len(rows) - len(sent)} were there" if len(sent) < len(rows) else ""
    console.say(f"{info.id}: {trained} rows of training, {len(sent) - trained} of evaluations{there}; {name}: {note}")
