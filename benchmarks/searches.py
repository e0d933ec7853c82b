"""Ten seeds of the search without a model: how high each comes, and how long it takes.

    python benchmarks/searches.py               # about 2 minutes on two idle cores
    python benchmarks/searches.py --seeds 3

Each is `rlvr discover kissing --dim 11 --proposer mutate --max-attempts 60 --seed SEED`, with a time limit that a busy machine does not
reach. The first is run twice: its rows must be the same.
Prints a line for each seed and what was asked for: a median of at least 566, 582 (which is known) by at least three, 90 s each. The exit
status is 1 if it is missed.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlvr_cli.runs.readers import read_rollouts

COMMAND = "discover kissing --dim 11 --proposer mutate --max-attempts 60 --program-timeout 60"
UNLIKE = ("run_id", "sampled_at")


def searched(folder: Path, *, seed: int, name: str) -> tuple[list[dict[str, Any]], float]:
    """Run one search. Returns its rows without names and times, and its seconds."""
    command = [sys.executable, "-m", "rlvr_cli", *COMMAND.split(), "--seed", str(seed), "--run", name, "--runs-dir"]
    started = time.monotonic()
    subprocess.run([*command, str(folder)], check=True, capture_output=True)
    seconds = time.monotonic() - started
    rows = [{k: v for k, v in row.items() if k not in UNLIKE} for row in read_rollouts(folder / name).to_pylist()]
    for row in rows:
        row["candidate"].pop("seconds")
    return rows, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    best, slowest = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            rows, seconds = searched(Path(folder), seed=seed, name=f"seed-{seed}")
            scores = [row["reward"] for row in rows]
            best.append(max(scores))
            slowest = max(slowest, seconds)
            reached = scores.index(max(scores))
            print(f"seed {seed}: {max(scores):g} at attempt {reached} of {len(rows)}, {seconds:.1f} s", flush=True)
            if not seed:
                again, _ = searched(Path(folder), seed=seed, name="again")
                print(f"seed {seed} again: {'the same rows' if again == rows else 'OTHER ROWS'}", flush=True)
                if again != rows:
                    return 1
    median, reached = statistics.median(best), sum(score >= 582 for score in best)
    print(
        f"median {median:g} (asked: 566), 582 by {reached} of {seeds} (asked: 3 of 10), at most {slowest:.1f} s (asked: 90)"
    )
    return 0 if median >= 566 and reached >= min(3, seeds) and slowest <= 90 else 1


if __name__ == "__main__":
    sys.exit(main())
