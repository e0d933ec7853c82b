"""`rlvr export`: the metrics of runs, sent to a tracker or written as CSV.

Enters: an ExportConfig. Leaves: in each tracker the complete rows of each run that it did not have, by the code that `--track` uses.
"""

import contextlib
import sys
from pathlib import Path

from rlvr_cli.config.store.export import ExportConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import latest_run, read_run, resolve_runs
from rlvr_cli.terminal import console
from rlvr_cli.trackers.open import check_installed, open_tracker
from rlvr_cli.trackers.rows import complete_rows


def run(config: ExportConfig) -> None:
    """Export runs. Raises RlvrError for user errors, such as a tracker that cannot be reached."""
    check_installed(config.to)
    named = resolve_runs(config.runs, config.runs_dir)
    console.report_passed_over(named.others)
    paths = named.runs or [latest_run(config.runs_dir)]
    if config.out and len({path.name for path in paths}) < len(paths):
        raise RlvrError(
            "Two of the runs have the same name: in --out one would replace the other.", "Export them apart."
        )
    for path in paths:
        for name in dict.fromkeys(config.to):
            export(path, name, project=config.track_project, out=Path(config.out) if config.out else None)


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
            tracker.send(rows)
            note = tracker.note
            tracker.finish(info.metadata["status"])
    except RlvrError:
        raise
    except Exception as error:  # a tracker's own errors are of any kind
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise RlvrError(
            f"{name} did not take {info.id}: {text}", "What it has got is remembered: try again."
        ) from error
    trained = len([row for row in rows if row.axis == "train"])
    console.say(f"{info.id}: {trained} rows of training, {len(rows) - trained} of evaluations; {name}: {note}")
