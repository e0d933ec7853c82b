"""A run at one moment: which of its files an upload takes."""

import pytest

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.remote import snapshot
from rlvr_cli.runs.remote.index import local_files, received
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


def test_parts_are_not_held_in_memory(finished):
    """They are never replaced, and so can be read again; a run may have many gigabytes of them."""
    known = {}
    assert take(finished, known) is not None
    held = {path for path, seen in known.items() if seen.data is not None}
    assert {path for path in known if path.startswith("rollouts/")} == known.keys() - held
    assert {"run.json", "metrics.parquet"} <= held


def test_a_large_file_that_grows_is_taken_as_it_was_at_first(finished, monkeypatch):
    """W&B and TensorBoard append to theirs at any time. What becomes another file changes the run."""
    monkeypatch.setattr(snapshot, "IN_MEMORY", 1000)
    log = finished / "wandb" / "run.wandb"
    log.parent.mkdir()
    log.write_bytes(b"x" * 2000)
    states = snapshot._states

    def taken(change):
        def changed(run, below=""):
            yield from [*states(run, below)]
            if not below:
                change()

        monkeypatch.setattr(snapshot, "_states", changed)
        return take(finished, {})

    def grow() -> None:
        with log.open("ab") as file:
            file.write(b"y" * 10)

    def replace() -> None:
        (finished / ".new.tmp").write_bytes(log.read_bytes() + b"z")
        (finished / ".new.tmp").rename(log)

    grown = taken(grow)
    assert grown is not None
    assert grown.files["wandb/run.wandb"].file == received([b"x" * 2000])
    assert taken(replace) is None
