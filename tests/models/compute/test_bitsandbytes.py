"""bitsandbytes where it is, and where it is not."""

import importlib.util
import subprocess
import sys

import pytest

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.compute.bitsandbytes import check_bitsandbytes


def test_without_the_package_the_line_for_pip_is_named(monkeypatch):
    check_bitsandbytes()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RlvrError, match="bitsandbytes is not installed") as caught:
        check_bitsandbytes()
    assert "pip install -e '.[bitsandbytes]'" in caught.value.hint


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "from rlvr_cli.models.compute.bitsandbytes import import_bitsandbytes; import_bitsandbytes().optim",
        "from rlvr_cli.models.load import load_policy; from rlvr_cli.models.policy import Lora\n"
        "from rlvr_cli.models.identity import builtin_model_path; load_policy(builtin_model_path(), lora=Lora(1, 1, 0))",
    ],
    ids=["alone", "by peft"],
)
def test_its_import_says_nothing(code):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
