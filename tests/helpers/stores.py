"""Runs in the store, as small as they can be."""

import os
from pathlib import Path

import pyarrow.parquet as pq

import factories
from rlvr_cli.runs.readers import (
    metadata_bytes,
    read_metadata,
)
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Regrade, Rollout


def a_rollout(run_id: str, index: int = 0, **values) -> Rollout:
    own = {"phase": "train", "example_id": f"q{index}", "response": f"<think> {index} </think> <answer> 4 </answer>"}
    return factories.a_rollout(**{"run_id": run_id, **own, **values})


def some_rollouts(run: RunDir, n: int = 3, **values) -> list[Rollout]:
    return [a_rollout(run.id, i, **values) for i in range(n)]


def as_killed(run: Path, *, status: str = "running") -> None:
    """Give a run the run.json of a killed one: of one that was being written or, with a status, to which grades were added."""
    metadata = {k: v for k, v in read_metadata(run).items() if k != "committed"} | {"status": status}
    (run / "run.json").write_bytes(metadata_bytes(metadata))


def with_links_of_wandb(run: Path) -> Path:
    """Add what W&B writes into a run, with the links that it makes by itself."""
    folder = run / "wandb" / "run-1"
    folder.mkdir(parents=True)
    (folder / "run-1.wandb").write_bytes(b"history")
    for name, target in (("latest-run", "run-1"), ("debug.log", "run-1/run-1.wandb"), ("debug-internal.log", "gone")):
        (run / "wandb" / name).symlink_to(target)
    return run


def tree(root: Path) -> dict[str, bytes | str]:
    """Return every file below a directory with its bytes, and every link with its target."""
    return {
        str(p.relative_to(root)): os.readlink(p) if p.is_symlink() else p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


def metrics_of(run: Path) -> dict[tuple[int, str, str], float]:
    table = pq.read_table(run / "metrics.parquet")
    rows = table.to_pylist()
    values = {(r["step"], r["phase"], r["name"]): r["value"] for r in rows}
    assert len(values) == len(rows)
    return values


def a_grade(run_id: str, index: int = 0, **values) -> Regrade:
    return factories.a_grade(**{"run_id": run_id, "phase": "train", "example_id": f"q{index}", **values})
