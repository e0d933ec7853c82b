"""A real S3 server, moto's, in a process of its own on loopback, and a proxy before it that does what networks and stores do.

`faults` holds what happens to the next requests that fit, each once: `Fault("PUT", "rollouts/", "503")`.
"""

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import pytest

from rlvr_cli.runs.remote.store import Store

needs_packages = pytest.mark.extra("obstore", "moto")
SECRETS = {"AWS_ACCESS_KEY_ID": "keyofatest", "AWS_SECRET_ACCESS_KEY": "not/to+be/seen", "AWS_SESSION_TOKEN": "passing"}
BUCKET = "bucket"
SLOW = 0.5  # seconds


class Fault(NamedTuple):
    """What happens to a request: a status (`500`), `cut` before the server gets it, `lost` (the answer), `short` (half of the
    answer), `slow`, `flip`: the last byte of the body is another one, or `stale`: a listing of nothing."""

    method: str
    path: str  # what the request's path contains
    kind: str


@dataclass
class S3:
    """The server as its clients see it."""

    url: str
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)  # METHOD PATH
    heard: bytearray = field(default_factory=bytearray)  # all headers and bodies
    before: Callable[[str], None] = lambda request: None  # is called before a request is passed on


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port, self.lock = port, threading.Lock()
        self.one_at_a_time = threading.Lock()  # for conditional puts: moto looks and writes in two steps
        self.s3 = S3(f"http://127.0.0.1:{self.server_address[1]}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Proxy

    def answer(self) -> None:
        s3, request = self.server.s3, f"{self.command} {self.path}"
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            fault = next((f for f in s3.faults if f.method == self.command and f.path in self.path), None)
            if fault is not None:
                s3.faults.remove(fault)
            s3.requests.append(request)
            s3.heard += str(self.headers).encode() + body
        s3.before(request)
        kind = fault.kind if fault else ""
        if kind == "slow":
            time.sleep(SLOW)
        if kind == "cut":
            return self._hang_up()
        if kind.isdecimal():
            return self._reply(int(kind), {}, b"<Error><Code>Told</Code></Error>")
        if kind == "flip":
            body = body[:-1] + bytes([body[-1] ^ 1])
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.port)
        conditional = "If-Match" in self.headers or "If-None-Match" in self.headers
        with self.server.one_at_a_time if conditional else nullcontext():
            upstream.request(self.command, self.path, body, dict(self.headers.items()))
            got = upstream.getresponse()
            data, headers = got.read(), dict(got.getheaders())
        upstream.close()
        if kind == "stale":
            data = re.sub(rb"<(Contents|CommonPrefixes)>.*?</\1>", b"", data, flags=re.DOTALL)
        if kind == "lost":
            return self._hang_up()
        self._reply(got.status, headers, data, short=kind == "short")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _reply(self, status: int, headers: dict[str, str], data: bytes, *, short: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(data[: len(data) // 2] if short else data)
        if short:
            self._hang_up()

    def log_message(self, format: str, *args: object) -> None:
        pass


def read(store: Store, key: str) -> tuple[bytes, str]:
    """An object that is there, and its tag."""
    found = store.read(key)
    assert found is not None, key
    return found


def variables(server: S3) -> dict[str, str]:
    """The environment of a client."""
    return SECRETS | {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": server.url}


@contextmanager
def s3_server() -> Iterator[S3]:
    """Start the server, with an empty bucket, and the proxy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ) as server:
        proxy = _Proxy(port)
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        try:
            _make_bucket(port)
            thread.start()
            yield proxy.s3
        finally:
            if thread.is_alive():
                proxy.shutdown()
            proxy.server_close()
            server.send_signal(signal.SIGKILL)


def _make_bucket(port: int) -> None:
    for _ in range(600):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        try:
            connection.request("PUT", f"/{BUCKET}")
            response = connection.getresponse()
            assert response.status == 200, response.read()
            return
        except ConnectionError:
            time.sleep(0.05)
        finally:
            connection.close()
    raise AssertionError("moto's server did not start")
