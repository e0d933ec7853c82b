"""One S3 server for all tests of a process, of which each has its own place in the bucket and its own cache."""

import pytest

from rlvr_cli.runs.remote import store as storing
from rlvr_cli.runs.remote import views
from rlvr_cli.runs.remote.store import parsed_address
from s3 import BUCKET, S3, s3_server, variables


@pytest.fixture(scope="session")
def server():
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(server, monkeypatch, tmp_path) -> S3:
    for name, value in variables(server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RLVR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(storing.RETRY, "backoff", storing.RETRY["backoff"] | {"max_backoff": storing.timedelta(0, 0.2)})
    views.forget()
    server.faults.clear()
    server.requests.clear()
    server.heard.clear()
    server.before = lambda request: None
    return server


@pytest.fixture
def place(request):
    """Of each test its own."""
    return parsed_address(
        f"s3://{BUCKET}/{''.join(c for c in request.module.__name__[-12:] + request.node.name if c.isalnum())}/runs"
    )
