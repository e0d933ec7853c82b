"""What the full form of these tests measured goes into one table: docs/reliability.md, by benchmarks/reliability.py."""

import json
import os
import time
from pathlib import Path

import pytest

PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture
def figures(request):
    """A dict that a full-form test fills, such as {"kills": 200, "lost rows": 0}; if it passes, written to $RLVR_FIGURES.

    What the test promises is the first line of its docstring, or else its name.
    """
    said: dict[str, object] = {}
    started = time.monotonic()
    yield said
    folder = os.environ.get("RLVR_FIGURES")
    if folder and said and request.node.stash.get(PASSED, False):
        words = request.function.__name__.removeprefix("test_").replace("_", " ")
        promise = (request.function.__doc__ or words).strip().splitlines()[0].rstrip(".")
        row = {"test": request.node.name, "promise": promise, "figures": said, "seconds": time.monotonic() - started}
        Path(folder, f"{request.node.name}.json").write_text(json.dumps(row), encoding="utf-8")
