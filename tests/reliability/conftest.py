"""What the full form of these tests measured goes into a table, one line a subject: docs/reliability.md."""

import json
import os
from pathlib import Path

import pytest


@pytest.fixture
def figures(request):
    """A dict that a full-form test fills, for example {"kills": 200, "lost rows": 0}; written to $RLVR_FIGURES."""
    said: dict[str, object] = {}
    yield said
    folder = os.environ.get("RLVR_FIGURES")
    if folder and said:
        Path(folder, f"{request.node.name}.json").write_text(json.dumps(said), encoding="utf-8")
