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
from rlvr_cli.runs.several import telling_names
from rlvr_cli.runs.storage.files import shown
from rlvr_cli.runs.storage.sources import source_of
from rlvr_cli.terminal import console
from rlvr_cli.trackers.open import check_folder, check_installed, open_tracker
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
    names = telling_names(paths)  # those of their directories, which may have been renamed
    if config.out and any("/" in name for name in names):
        raise RlvrError(
            "Two of the runs have the same name: in --out one would replace the other.",
            "Export them apart, each with an --out of its own.",
        )
    for path, run_name in zip(paths, names, strict=True):
        out = Path(config.out, run_name) if config.out else None
        for name in dict.fromkeys(trackers):
            export(path, run_name, to=name, project=config.track_project, out=out)
        for place in dict.fromkeys(places):
            sent = export_run(path, place)
            console.say(f"{run_name}: {sent.files} files, {sent.moved} of them sent to {sent.place}")


def export(path: Path, run_name: str, *, to: str, project: str, out: Path | None) -> None:
    """Send one run to one tracker; files go into the run, or into the folder `out`."""
    info = read_run(path)
    if out is not None:
        check_folder(out, info)
    rows = complete_rows(info)
    if not rows:
        console.say(f"{run_name}: no metrics, nothing to send")
        return
    try:
        with (
            contextlib.redirect_stdout(sys.stderr),  # trackers say what they do, and stdout is for results
            open_tracker(to, info, project=project, live=False, patience=0.0, out=out) as tracker,
        ):
            sent = tracker.send(rows)
            note = tracker.note
            tracker.finish(info.metadata["status"])
    except RlvrError:
        raise
    except Exception as error:  # a tracker's own errors are of any kind
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise RlvrError(
            f"{to} did not take {run_name}: {text}", "Try again: what it has got is not sent twice."
        ) from error
    trained = len([row for row in sent if row.axis == "train"])
    there = f"; {len(rows) - len(sent)} were there" if len(sent) < len(rows) else ""
    console.say(f"{run_name}: {trained} rows of training, {len(sent) - trained} of evaluations{there}; {to}: {note}")
