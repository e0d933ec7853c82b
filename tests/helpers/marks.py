"""Cases of a parametrized test that are not of the default suite."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def full(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)
