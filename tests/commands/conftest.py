"""`unreported`: for a module that trains in this process and does not look at what a run prints at its end."""

from collections.abc import Iterator

import pytest

from rlvr_cli.commands import distill, dpo, grpo, ppo


@pytest.fixture(scope="module")
def unreported() -> Iterator[None]:
    """The summary of a run is a fifth of the cost of a small one, and tests that type a command have it."""
    with pytest.MonkeyPatch.context() as patch:
        for command in (distill, dpo, grpo, ppo):
            patch.setattr(command, "report_end", lambda trainer, *, output: None)
        yield
