"""`rlvr fetch`: runs from object storage.

Enters: a FetchConfig. Leaves: the runs in the directory of runs, each as it was when it was exported, to be read or resumed.
"""

from pathlib import Path

from rlvr_cli.config.store.fetch import FetchConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.remote.copies import fetch_run
from rlvr_cli.runs.remote.store import is_address, parsed_address
from rlvr_cli.runs.storage.files import shown
from rlvr_cli.terminal import console


def run(config: FetchConfig) -> None:
    """Fetch runs. Raises RlvrError for user errors, such as an address at which there is none."""
    runs_dir = config.runs_dir
    if is_address(runs_dir) and config.sources.get("runs_dir") == "environment":
        runs_dir = "runs"  # the environment says where runs are written and read
    if is_address(runs_dir):
        raise RlvrError(
            f"{shown(runs_dir)} is no directory of this machine, to which rlvr fetch gets runs.",
            "Name one with --runs-dir DIRECTORY. A run in object storage can also be read, and resumed, where it is.",
        )
    for place in [parsed_address(text) for text in config.runs]:
        path, sent = fetch_run(place, Path(runs_dir))
        console.say(f"{path}: {sent.files} files, {sent.moved} of them fetched from {place}")
