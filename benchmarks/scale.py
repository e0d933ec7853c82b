"""CPU seconds and memory of commands on a large evaluation in many parts, as `rlvr eval` writes it.

    python benchmarks/scale.py [--rows 1000000] [--per-part 512] [--keep DIRECTORY]

The run is made of random rows, each another question with a response of a dozen words; 0.5 KB each on the disk. Each command runs
once, in a process of its own: CPU seconds, since the machines used are shared, and the largest resident set.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from analyze import make_run

COMMANDS = {
    "analyze categories": "analyze categories {run}",
    "analyze summary": "analyze summary {run} --timeout-seconds 600",
    "runs": "runs --runs-dir {root}",
    "filter --dedup": "filter {run} --dedup --out {root}/kept.jsonl --overwrite --timeout-seconds 600",
}
_MEASURED = (
    "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode; "
    "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
    "print(code, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)"
)


def measure(command: list[str]) -> tuple[float, float]:
    """Return CPU seconds and peak MB of a command and its children."""
    done = subprocess.run([sys.executable, "-c", _MEASURED, *command], capture_output=True, text=True, check=True)
    code, seconds, peak = map(float, done.stdout.split())
    if code:
        sys.exit(f"{' '.join(command)} ended with status {code:.0f}:\n{done.stderr[-2000:]}")
    return seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--per-part", type=int, default=512)
    parser.add_argument("--keep", type=Path, help="make the run in this directory, or use the one that is there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.keep or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        run = root / "large"
        if not run.exists():
            make_run(root, arguments.rows, per_part=arguments.per_part, words_each=12, one_step=True)
        print(f"{arguments.rows:,} rollouts in {len(list((run / 'rollouts').iterdir())):,} parts")
        for name, line in COMMANDS.items():
            seconds, peak = measure([sys.executable, "-m", "rlvr_cli", *line.format(run=run, root=root).split()])
            print(f"{name:<20} {seconds:>8.1f} CPU s {peak:>8.0f} MB", flush=True)


if __name__ == "__main__":
    main()
