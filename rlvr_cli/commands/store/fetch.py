"""`rlvr fetch`: runs from object storage.

Enters: a FetchConfig. Leaves: the runs in the directory of runs, each as it was when it was exported, to be read or resumed.
"""

from pathlib import Path

from rlvr_cli.config.store.fetch import FetchConfig
from rlvr_cli.runs.remote.copies import fetch_run
from rlvr_cli.runs.remote.store import parsed_address
from rlvr_cli.terminal import console


def run(config: FetchConfig) -> None:
    """Fetch runs. Raises RlvrError for user errors, such as an address at which there is none."""
    for place in [parsed_address(text) for text in config.runs]:
        path, sent = fetch_run(place, Path(config.runs_dir))
        console.say(f"{path}: {sent.files} files, {sent.moved} of them fetched from {place}")
