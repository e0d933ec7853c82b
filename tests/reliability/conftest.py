"""What the full form of these tests measured goes into one table: docs/reliability.md, by benchmarks/reliability.py."""

import json
import os
import time
from pathlib import Path

import pytest


@pytest.fixture
def figures(request):
    """A dict that a full-form test fills, such as {"kills": 200, "lost rows": 0}; written to the folder $RLVR_FIGURES.

    What the test promises is the first line of its docstring, or else its name.
    """
    said: dict[str, object] = {}
    started = time.monotonic()
    yield said
    folder = os.environ.get("RLVR_FIGURES")
    if folder and said:
        words = request.function.__name__.removeprefix("test_").replace("_", " ")
        promise = (request.function.__doc__ or words).strip().splitlines()[0].rstrip(".")
        row = {"test": request.node.name, "promise": promise, "figures": said, "seconds": time.monotonic() - started}
        Path(folder, f"{request.node.name}.json").write_text(json.dumps(row), encoding="utf-8")
