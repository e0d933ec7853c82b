"""Runs of one name are read under names that tell them apart."""

from pathlib import Path

import pytest

from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.several import read_runs, telling_names


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ("", ""),
        ("runs/a old/b", "a b"),
        ("runs/a old/a", "runs/a old/a"),
        ("st/runs/a old/runs/a /x/b", "st/runs/a old/runs/a /x/b"),
        ("runs/a runs/a", "runs/a runs/a"),  # nothing tells them apart
    ],
)
def test_names_are_as_long_as_it_takes(paths, names):
    assert telling_names([Path(path) for path in paths.split()]) == names.split()


def test_only_where_two_have_the_same_id_are_runs_read_under_other_names(tmp_path):
    for folder, name in (("runs", "a"), ("runs", "b"), ("old", "a")):
        RunDir.create(tmp_path / folder, "eval", name=name, metadata={}).close()
    first, second, other = (tmp_path / name for name in ("runs/a", "runs/b", "old/a"))
    moved = first.rename(tmp_path / "moved")
    assert [info.id for info in read_runs([second, moved, moved])] == ["b", "a"]
    assert [info.id for info in read_runs([moved, second, other])] == ["moved", "b", "a"]
    assert read_runs([]) == []
