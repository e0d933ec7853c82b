"""CPU seconds and memory of commands on a large evaluation in many parts, as `rlvr eval` writes it, and on many runs.

    python benchmarks/scale.py [--rows 1000000] [--per-part 512] [--runs 1000] [--keep DIRECTORY]

The run is made of random rows, each another question with a response of a dozen words; 0.5 KB each on the disk. Pairs are made of
another run, with a tenth of the rows: 8 responses of 150 words to each question. The many runs have 200 rows each, as those of the
first. Each command runs once, in a process of its own: CPU seconds, since the machines used are shared, and the largest resident
set. Of the page that lists the runs, the seconds of the first request and of the next.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import view
from analyze import make_run

COMMANDS = {
    "analyze categories": "analyze categories {run}",
    "analyze summary": "analyze summary {run} --timeout-seconds 600",
    "runs": "runs --runs-dir {root}",
    "filter --dedup": "filter {run} --dedup --out {root}/kept.jsonl --overwrite --timeout-seconds 600",
}
PAIRS = "filter {run} --emit pairs --out {root}/pairs.jsonl --overwrite --timeout-seconds 600"
OF_MANY = {
    "runs": "runs --runs-dir {many}",
    "runs, the best": "runs --runs-dir {many} --sort best",
    "analyze categories of all": "analyze categories {all} --limit 0",
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


def measure_many(root: Path, count: int) -> None:
    """Print what commands and the page take on so many runs."""
    many = root / "many"
    if not many.exists():
        many.mkdir()
        for number in range(count):
            make_run(many, 200, name=f"run-{number:06d}", per_part=200, words_each=12)
    paths = " ".join(str(path) for path in sorted(many.iterdir()))
    print(f"{count:,} runs of 200 rollouts")
    for name, line in OF_MANY.items():
        seconds, peak = measure([sys.executable, "-m", "rlvr_cli", *line.format(many=many, all=paths).split()])
        print(f"{name:<25} {seconds:>8.1f} CPU s {peak:>8.0f} MB", flush=True)
    with view.serving(many) as address:
        first, then = view.measure(address, "", {}, repeat=2)
        print(f"{'page of the runs':<25} {first:>8.2f} s, then {then:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--per-part", type=int, default=512)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--keep", type=Path, help="make the runs in this directory, or use those that are there")
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
        sampled = root / "sampled"
        if not sampled.exists():
            make_run(root, arguments.rows // 10, name="sampled", words_each=150, one_step=True, samples_each=8)
        seconds, peak = measure([sys.executable, "-m", "rlvr_cli", *PAIRS.format(run=sampled, root=root).split()])
        print(f"{'filter --emit pairs':<20} {seconds:>8.1f} CPU s {peak:>8.0f} MB", flush=True)
        measure_many(root, arguments.runs)


if __name__ == "__main__":
    main()
