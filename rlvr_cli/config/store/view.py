"""The options of `rlvr view`."""

from dataclasses import dataclass

from rlvr_cli.config.parsing.options import Provenance, check_values, knob
from rlvr_cli.errors import RlvrError


@dataclass(frozen=True)
class ViewConfig(Provenance):
    """Show runs in a browser while they run: their list, curves, rollouts as they are committed, and the comparison of two.

    Examples:
        rlvr view
        rlvr view my-grpo 'abl-*'
        rlvr view --port 8000 --no-open
    """

    runs: tuple[str, ...] = knob(
        (),
        "Runs: names, directories, or patterns in quotes; or one directory of runs. Default: all of --runs-dir.",
        group="Data",
        argument=True,
        completes="run",
    )
    runs_dir: str = knob(
        "runs", "Directory that holds the runs, or s3://BUCKET/PREFIX.", group="Data", common=True, path=True
    )
    host: str = knob(
        "127.0.0.1",
        "Address to listen on. If it is not a local one, everybody with the token can read the runs over the network, in clear text.",
        group="Run",
        common=True,
    )
    port: int = knob(0, "Port to listen on; 0: a free one.", group="Run", common=True, at_least=0, at_most=65535)
    token: bool = knob(
        True, "Ask for the token in the printed address. Only a local host can do without.", group="Run", common=True
    )
    open: bool = knob(True, "Open the page in a browser, where there is one.", group="Run", common=True)

    def __post_init__(self) -> None:
        check_values(self)
        if not self.host:
            raise RlvrError("--host is empty.", "For this machine alone: --host 127.0.0.1")
