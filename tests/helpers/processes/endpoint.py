"""A local HTTP server that answers, fails, stalls and disconnects on demand, as an OpenAI-compatible endpoint may."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """The server's reaction to a request: wait so many seconds, or until `after` is set, and send this; status 0 drops the connection."""

    body: Any = None  # text, bytes, or a value that is sent as JSON
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    wait: float = 0.0
    after: threading.Event | None = None
    raw: bytes | None = None  # sent instead of an HTTP response
    drip: float = 0.0  # seconds between the bytes of the body


@dataclass
class Endpoint:
    """A running server; `answer` maps the body of a request to a reply, and may be replaced at any time.

    `models` is its list of models, whose requests are not noted; None: `answer` replies to them, too.
    """

    url: str
    answer: Callable[[dict], Reply]
    bodies: list[dict] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    models: Reply | None = field(default_factory=lambda: Reply({}, 404))
    under_way: int = 0
    most_under_way: int = 0


def completion(text: str, finish: str = "stop", **choice: Any) -> Reply:
    usage = {"prompt_tokens": 7, "completion_tokens": choice.pop("completion_tokens", 3)}
    return Reply({"choices": [{"index": 0, "text": text, "finish_reason": finish, **choice}], "usage": usage})


def error(status: int, message: str, **headers: str) -> Reply:
    return Reply({"error": {"message": message}}, status, {k.replace("_", "-"): v for k, v in headers.items()})


@contextmanager
def serving(answer: Callable[[dict], Reply], *, lists: bool = False) -> Iterator[Endpoint]:
    """Run the server until the block ends; requests that still wait are then answered.

    Args:
        lists: whether `answer` also replies to requests for the list of models, which have an empty body.
    """
    lock, closing = threading.Lock(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
            with lock:
                served.bodies.append(body)
                served.paths.append(self.path)
                served.keys.append(self.headers["authorization"])
                served.times.append(time.monotonic())
                served.under_way += 1
                served.most_under_way = max(served.most_under_way, served.under_way)
                reply = served.answer(body)
            closing.wait(reply.wait)
            if reply.after is not None:
                reply.after.wait(30)
            with lock:
                served.under_way -= 1
            try:
                self.send(reply)
            except OSError:
                self.close_connection = True  # the client is gone

        def do_GET(self):
            if served.models and self.path.endswith("/models"):
                self.send(served.models)
            else:
                self.do_POST()

        def send(self, reply: Reply) -> None:
            if reply.raw is not None or not reply.status:
                self.close_connection = True
                self.wfile.write(reply.raw or b"")
                return
            data = reply.body if isinstance(reply.body, bytes) else text_of(reply.body).encode("utf-8", "surrogatepass")
            self.send_response(reply.status)
            for name, value in (
                {"content-type": "application/json", "content-length": str(len(data))} | reply.headers
            ).items():
                self.send_header(name, value)
            self.end_headers()
            if not reply.drip:
                self.wfile.write(data)
            for i in range(len(data) if reply.drip else 0):
                self.wfile.write(data[i : i + 1])
                if closing.wait(reply.drip):
                    break

        def log_message(self, *args):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request, client_address):
            pass  # the client is gone

    server = Server(("127.0.0.1", 0), Handler)
    served = Endpoint(f"http://127.0.0.1:{server.server_port}/v1", answer)
    if lists:
        served.models = None
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield served
    finally:
        closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def text_of(body: Any) -> str:
    return body if isinstance(body, str) else json.dumps(body)
