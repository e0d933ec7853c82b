"""A run at one moment: which of its files an upload takes."""

import pytest

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.remote.index import local_files
from rlvr_cli.runs.remote.snapshot import take
from stores import with_links_of_wandb


def test_links_of_wandb_are_left_out_and_others_are_refused(finished):
    whole = set(local_files(finished))
    with_links_of_wandb(finished)
    wanted = whole | {"wandb/run-1/run-1.wandb"}
    taken = take(finished, {})
    assert taken is not None
    assert set(local_files(finished)) == set(taken.files) == wanted
    (finished / "rollouts" / "link").symlink_to("../run.json")
    for look in (lambda: take(finished, {}), lambda: list(local_files(finished))):
        with pytest.raises(RlvrError, match=r"rollouts/link is (a symbolic link|not a regular file)"):
            look()
