"""The policy that is updated."""

import pytest

from policies import make_policy


@pytest.fixture(scope="module")
def policy():
    """Read-only; a test that updates it takes a copy."""
    return make_policy()
