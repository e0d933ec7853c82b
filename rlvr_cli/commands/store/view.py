"""`rlvr view`: the report of runs in a browser, while they run.

Enters: a ViewConfig. Leaves: on stdout the address; nothing on the disk. Ends with Ctrl-C.
"""

import importlib.util
import secrets
import webbrowser
from pathlib import Path

from rlvr_cli import process
from rlvr_cli.config.store.view import ViewConfig
from rlvr_cli.errors import RlvrError, UsageError, missing_extra
from rlvr_cli.runs.readers import is_run, resolve_runs
from rlvr_cli.runs.remote.store import is_address
from rlvr_cli.runs.storage.files import shown
from rlvr_cli.terminal import console


def run(config: ViewConfig) -> None:
    """Serve until Ctrl-C. Raises RlvrError for user errors."""
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise missing_extra(package, "view")
    from rlvr_cli.analysis.live.server import Library, is_local, listen, names_of, open_app, serve

    if not config.token and not is_local(config.host):
        raise UsageError(
            f"--no-token lets everybody read the runs who can reach {config.host}.",
            "Leave it out, or listen on this machine alone: --host 127.0.0.1",
        )
    library = Library(*named_runs(config))
    listener = listen(config.host, config.port)
    port = listener.getsockname()[1]
    token = secrets.token_urlsafe(32) if config.token else ""
    name = config.host if config.host not in ("0.0.0.0", "::") else names_of(config.host)[2]
    address = f"http://{f'[{name}]' if ':' in name else name}:{port}/{f'?token={token}' if token else ''}"
    # A query of ours has DuckDB's own limits. Those of `process`, which apply where `rlvr` was called, would end the whole server.
    has_process, process.limits_apply = process.limits_apply, False

    def started() -> None:
        console.print_text(address)
        console.say(f"{library.title}; Ctrl-C ends it")
        if config.open:
            _open(address)

    hosts, cookie = names_of(config.host), f"rlvr-view-{port}"  # cookies are not kept apart by port
    with listener, open_app(library, token=token, hosts=hosts, cookie=cookie) as app:
        serve(app, listener, started=started, has_process=has_process)


def named_runs(config: ViewConfig) -> tuple[Path | str | None, list[Path]]:
    """The directory of runs, or the address of one; or the runs."""
    place = config.runs[0] if len(config.runs) == 1 else "" if config.runs else config.runs_dir
    if is_address(place) and not is_run(place, ""):
        return place, []
    if not config.runs:
        root = Path(config.runs_dir)
    elif len(config.runs) == 1 and Path(config.runs[0]).is_dir() and not is_run(config.runs[0], config.runs_dir):
        root = Path(config.runs[0])
    else:
        named = resolve_runs(config.runs, config.runs_dir)
        console.report_passed_over(named.others)
        return None, named.runs
    if not root.is_dir():
        raise RlvrError(f"There is no directory {shown(root)}.", "Give the directory of runs with --runs-dir.")
    return root, []


def _open(address: str) -> None:
    """Open a browser of this desktop, if it has one; never one in the terminal, which would take it over."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    if not isinstance(browser, webbrowser.GenericBrowser) or isinstance(browser, webbrowser.BackgroundBrowser):
        browser.open(address)
