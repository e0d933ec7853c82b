"""The program that the kill tests of uploads kill: ADDRESS NAME STEPS. It writes a run in object storage, or goes on with it.

The rows of a step are a function of the step (`rows_of`); every second step has a checkpoint of two files, one of them
sent in parts. Leaves "ready" on stdout once it writes, and "step N" after each.
"""

import os
import sys
import time
from pathlib import Path

from rlvr_cli.runs.readers import is_run, resolve_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Rollout
from stores import a_rollout

PARTS = 3  # of a step
PAUSE = 0.05  # seconds after a step, so that a writer has not written hundreds of them when its first upload is there


def rows_of(run_id: str, *, step: int, part: int) -> list[Rollout]:
    """Return the rows of a part."""
    indices = range(10 * part, 10 * part + 1 + (7 * step + 5 * part) % 9)
    return [a_rollout(run_id, i, step=step, response=f"{step} {i} " * (1 + 31 * i % 250)) for i in indices]


def checkpoint(run: Path, step: int) -> None:
    """Write a checkpoint as training does: it appears when it is whole. Keeps two."""
    folder = run / "checkpoints"
    temporary, final = folder / f".step-{step:06d}.tmp", folder / f"step-{step:06d}"
    temporary.mkdir(parents=True, exist_ok=True)
    for name, size in (("state.json", 100), ("policy.safetensors", 9_000_000)):
        (temporary / name).write_bytes(bytes([step % 256]) * size)
    if not final.exists():
        os.rename(temporary, final)
    for old in sorted(folder.glob("step-*"))[:-2]:
        for file in old.iterdir():
            file.unlink()
        old.rmdir()


def main(address: str, name: str, steps: int) -> None:
    begun = is_run(name, address)
    with (
        RunDir.resume(resolve_run(name, address))
        if begun
        else RunDir.create(address, "grpo", name=name, metadata={}) as run
    ):
        print("ready", flush=True)
        for step in range(steps):
            for part in range(PARTS):
                rows = rows_of(run.id, step=step, part=part)
                if not {("train", step, r.example_id, r.sample_index) for r in rows} & run.committed_keys(
                    "train", step
                ):
                    run.commit_rollouts("train", step, rows)
            run.commit_metrics(step, "train", {"loss": float(step)})
            if step % 2:
                checkpoint(run.path, step)
            print(f"step {step}", flush=True)
            time.sleep(PAUSE)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
