"""The server of `rlvr view`: a Starlette application that can only read, and uvicorn to run it.

Enters: a directory of runs, or runs; a token. Leaves: pages and JSON for who has the token.

- The first address has the token in it; the answer makes it a cookie that no script can read and no other site can send, and
  the address is left. Every other request without the cookie is refused, and so is any method but GET and HEAD.
- The Host header must be an IP address, or a name of this machine: a web page whose own name was made to point here (DNS
  rebinding) has another.
- Every answer has the content security policy of the report, which allows only the page's own style and script, by their
  hashes, and requests to this server.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import signal
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rlvr_cli import process
from rlvr_cli.analysis.live import pages, rollouts
from rlvr_cli.analysis.queries.database import LimitReached
from rlvr_cli.analysis.queries.run_list import Known
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import RunInfo, recent_runs
from rlvr_cli.runs.remote.store import is_address
from rlvr_cli.runs.remote.views import look_again, newest
from rlvr_cli.runs.several import command_below, read_named, telling_names
from rlvr_cli.runs.storage.files import shown

MAX_RUNS = 16  # in one page
LOOKED_EVERY = 2.0  # seconds for which runs in object storage stay as they were seen
LISTED_EVERY = 30.0  # seconds for which the folders of runs in object storage stay as they were listed
GONE_EVERY = 0.2  # seconds between looks at whether a client still waits
KEPT = 16  # pages whose values are kept
HEADERS = {
    "Content-Security-Policy": f"{pages.ASSETS.policy}; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Unknown(RlvrError):
    """The request names a run that is not here."""


class Library:
    """The runs that a server shows: those of a directory, which may grow, or those that were named."""

    def __init__(self, root: Path | str | None, runs: Sequence[Path] = ()) -> None:
        self._root = root
        self._runs = dict(zip(telling_names(runs), runs, strict=True))
        self._below, self._listed = "", float("-inf")
        self.title = "Runs" if root is None else f"Runs in {root}"
        self.order = "as named" if root is None else "last written first"

    def paths(self) -> dict[str, Path]:
        """Name -> directory, the most recently written first."""
        look_again(seconds=LOOKED_EVERY)
        if self._root is None:
            return {name: newest(path) for name, path in self._runs.items()}
        return {path.name: path for path in recent_runs(self._root)}

    def below(self) -> str:
        """The command that shows the runs of the directory's folders, if there are any. Raises RlvrError, of object storage."""
        if self._root is None:
            return ""
        now = time.monotonic()
        if not is_address(str(self._root)) or now - self._listed >= LISTED_EVERY:
            self._below, self._listed = command_below("view", self._root), now
        return self._below

    def chosen(self, query: QueryParams) -> dict[str, Path]:
        """The runs that a request names, as many as one page shows. Raises Unknown."""
        paths, names = self.paths(), _named_runs(query)[:MAX_RUNS]
        for name in names:
            if name not in paths:
                raise Unknown(f"There is no run {shown(name)} here.")
        if not names:
            raise Unknown("No run was chosen.", "Choose at least one in the list.")
        return {name: paths[name] for name in names}


class Guard:
    """Refuses requests without the token, with a foreign Host, or with another method than GET and HEAD."""

    def __init__(self, app: ASGIApp, *, token: str, hosts: Sequence[str], cookie: str) -> None:
        self._app, self._token, self._hosts, self._cookie = app, token, {host.lower() for host in hosts}, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]  # uvicorn is told to serve no other
        await self._answer(scope)(scope, receive, self._with_headers(send))

    def _answer(self, scope: Scope) -> ASGIApp:
        request = Request(scope)
        if not self._is_ours(Headers(scope=scope).get("host", "")):
            return PlainTextResponse("This Host is not the server's.", 403)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("The server only reads.", 405, {"Allow": "GET, HEAD"})
        if not self._token:
            return self._app
        if "token" in request.query_params:
            return self._welcome(request.query_params["token"])
        if self._is_token(request.cookies.get(self._cookie, "")):
            return self._app
        return PlainTextResponse("Open the address that rlvr view printed: it has the token.", 403)

    def _welcome(self, token: str) -> Response:
        """Make the token a cookie and leave the address. Not by a redirect: with it a strict cookie is not sent if the link was
        followed from another site, such as a terminal in a browser.
        """
        if not self._is_token(token):
            return PlainTextResponse("The token is not the server's: it makes another one at each start.", 403)
        response = Response("", headers={"Refresh": "0; url=./"}, media_type="text/html")
        response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return response

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(
            hashlib.sha256(text.encode()).digest(), hashlib.sha256(self._token.encode()).digest()
        )

    def _is_ours(self, host: str) -> bool:
        name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower() in self._hosts
        return True

    @staticmethod
    def _with_headers(send: Send) -> Send:
        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                named = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *named]
            await send(message)

        return sending


class _Kept:
    """The last values, each with the state that it is of. Of several requests for one value, one makes it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Any, tuple[str, Any]] = OrderedDict()
        self._locks: dict[Any, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, name: Any, state: str, make: Callable[[], Any]) -> Any:
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            with self._lock:
                kept = self._kept.get(name)
            if kept is None or kept[0] != state:
                kept = (state, make())
            with self._lock:
                self._kept[name] = kept
                self._kept.move_to_end(name)
                while len(self._kept) > KEPT:
                    self._locks.pop(self._kept.popitem(last=False)[0], None)
        return kept[1]


@contextmanager
def open_app(
    library: Library, *, token: str, hosts: Sequence[str] = (), cookie: str = "rlvr-view"
) -> Iterator[ASGIApp]:
    """Make the application. It keeps databases open until the context ends.

    Args:
        token: what the first request must have; "" for none.
        hosts: names of this machine that a Host header may have, besides IP addresses.
    """
    kept, known, databases = _Kept(), Known(), rollouts.Databases()

    def page(
        request: Request,
        paths: Mapping[str, Path],
        read: Callable[[], Any],
        render: Callable[..., str],
        below: str = "",
    ) -> Response:
        committed, doing = pages.committed_state(paths), pages.activities(paths)
        state = pages.page_state(committed, doing, below)
        headers = {"ETag": f'"{state}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        values = kept.get((request.url.path, tuple(paths)), committed, read)
        return HTMLResponse(render(values, doing, state=state, committed=committed), headers=headers)

    def list_of_runs(request: Request) -> Response:
        try:
            paths, asked = library.paths(), request.query_params.get("order", "")
            below = "" if paths else library.below()
        except RlvrError as error:  # of object storage
            return HTMLResponse(pages.problem_page(error), 503)
        order = asked if asked in pages.ORDERS else ""
        render = partial(pages.runs_page, title=library.title, given=library.order, order=order, below=below)
        return page(request, paths, lambda: pages.run_rows(paths, known), render, below)

    def report(request: Request) -> Response:
        try:
            paths = library.chosen(request.query_params)
            render = partial(pages.report_page, without=_named_runs(request.query_params)[MAX_RUNS:])
            return page(request, paths, lambda: pages.read_report(paths), render)
        except RlvrError as error:
            return HTMLResponse(pages.problem_page(error), 404 if isinstance(error, Unknown) else 409)

    def asked(
        answer: Callable[[rollouts.Databases, Sequence[RunInfo], Mapping[str, str]], Mapping[str, Any]],
        request: Request,
    ) -> Response:
        try:
            infos = read_named(library.chosen(request.query_params))
            return JSONResponse(answer(databases, infos, request.query_params))
        except RlvrError as error:
            statuses = {Unknown: 404, rollouts.Refused: 400, LimitReached: 504}
            status = next((status for kind, status in statuses.items() if isinstance(error, kind)), 503)
            return JSONResponse({"error": f"{error.problem} {error.hint}".strip()}, status)

    answers = {"facets": rollouts.facets, "rollouts": rollouts.page, "group": rollouts.group, "places": rollouts.places}
    routes = [Route("/", list_of_runs), Route("/view", report)]
    routes += [Route(f"/{name}", _while_awaited(partial(asked, answer))) for name, answer in answers.items()]
    try:
        yield Guard(Starlette(routes=routes), token=token, hosts=hosts, cookie=cookie)
    finally:
        databases.close()


def _named_runs(query: QueryParams) -> list[str]:
    return list(dict.fromkeys(query.getlist("run")))


def _while_awaited(answer: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
    """A function that has the answer made in a thread, and its queries ended when the client is gone."""

    async def endpoint(request: Request) -> Response:
        asker = rollouts.Asker()
        rollouts.ASKER.set(asker)
        made = asyncio.ensure_future(run_in_threadpool(answer, request))
        while not (await asyncio.wait([made], timeout=GONE_EVERY))[0]:
            if await request.is_disconnected():
                asker.leave()
        return made.result()

    return endpoint


def is_local(host: str) -> bool:
    """Whether only this machine can reach a server on this host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Open the port. Raises RlvrError if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RlvrError(
            f"Cannot listen on {host}, port {port}: {reason}.", "Choose another --port, or --port 0 for a free one."
        ) from error


def names_of(host: str) -> list[str]:
    """The names that a Host header may have: this machine's."""
    return ["localhost", host, socket.gethostname(), socket.getfqdn()]


def serve(app: ASGIApp, listener: socket.socket, *, started: Callable[[], None], has_process: bool) -> None:
    """Answer requests until Ctrl-C, or another signal to stop.

    Args:
        started: called when requests are answered.
        has_process: whether the process does nothing else: with answers that then need more than 2 s it is left.
    """
    are_given_up = False

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal are_given_up
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            are_given_up = True
            raise

    config = uvicorn.Config(
        answering,
        log_level="error",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=2,
        lifespan="off",
    )
    server = uvicorn.Server(config)

    async def run() -> None:
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if server.started:
            started()
        await task

    with _ended_by_signals(server):
        asyncio.run(run())  # uvicorn raises the signals that it has received again at the end
        if are_given_up and has_process:
            process.leave(0)


@contextmanager
def _ended_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """Have signals to stop end the server, without a word of the answers that are given up; afterwards they do what they did."""

    def stop(number: int, frame: object) -> None:
        """Ask the server to stop: an exception here would end the answer that is being given, and not the server."""
        server.should_exit = True

    def is_said(record: logging.LogRecord) -> bool:
        return not server.should_exit

    log, previous = logging.getLogger("uvicorn.error"), {}
    log.addFilter(is_said)
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, stop)
        yield
    finally:
        log.removeFilter(is_said)
        for number, handler in previous.items():
            signal.signal(number, handler)
