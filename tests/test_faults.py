import pytest

from rlvr_cli import faults


def test_a_fault_happens_only_at_the_nth_passage(monkeypatch: pytest.MonkeyPatch):
    faults.fault_point("p")
    monkeypatch.setenv("RLVR_FAULT", "p:2:enospc")
    faults.fault_point("p")
    faults.fault_point("q")
    with pytest.raises(OSError, match="No space"):
        faults.fault_point("p")
    faults.fault_point("p")


@pytest.mark.parametrize("value", ["", "p", "p:", "p:0", "p:x", ":1", "p:1:explode", "p:-1"])
def test_an_invalid_fault_is_rejected(monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv("RLVR_FAULT", value)
    with pytest.raises(ValueError, match="RLVR_FAULT"):
        faults.fault_point("p")
