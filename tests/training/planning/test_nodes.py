"""What does not fit between machines: from their facts, and from two environments of this machine."""

import json
from pathlib import Path

import pytest

from rlvr_cli.errors import RlvrError
from rlvr_cli.training.planning.nodes import facts_here, findings_of, marker


@pytest.fixture
def here(tmp_path, tiny_model_dir):
    with marker(tmp_path / "runs") as mark:
        yield json.loads(json.dumps(facts_here(str(tiny_model_dir), tmp_path / "runs", mark=mark)))


def test_equal_machines_fit(here, tmp_path):
    assert here["model"]
    assert here["runs_seen"]
    assert findings_of(here, here) == []
    assert list(tmp_path.iterdir()) != [], "the marker is there while nodes look for it"


def test_what_differs_is_named(here):
    packages = here["packages"] | {"torch": "2.0.0", "pandas": "0.1", "vllm": "0.9"}
    other = here | {"python": "3.9.1", "code": "0.1 abc", "packages": packages, "model": "abc", "runs_seen": False}
    found = {finding.what: finding for finding in findings_of(other, here)}
    assert {what: finding.verdict for what, finding in found.items()} == {
        "Python": "problem", "rlvr's code": "problem", "torch": "problem", "vllm": "problem", "pandas": "note",
        "model": "problem", "runs directory": "note",
    }  # fmt: skip
    assert found["torch"].found.startswith("2.0.0; here ")
    assert found["model"].found == "another one than here"
    (missing,) = [f for f in findings_of(here | {"model": None}, here) if f.what == "model"]
    assert missing.found == "its files are not there"


def test_what_is_not_there_is_a_problem_of_its_own(here, tmp_path):
    (tmp_path / "file").touch()
    facts = facts_here("./nowhere", tmp_path / "file/runs", mark=str(tmp_path / "gone"))
    assert [(f.what, f.verdict) for f in findings_of(facts, here)] == [
        ("model", "problem"), ("runs directory", "problem"),
    ]  # fmt: skip
    with pytest.raises(RlvrError), marker(Path("/proc/nowhere")):
        pass
