"""CPU seconds and memory of commands on a large evaluation in many parts, as `rlvr eval` writes it, and on many runs.

    python benchmarks/scale.py [--rows 1000000] [--per-part 512] [--runs 1000] [--keep DIRECTORY]
    python benchmarks/scale.py --per-part 10000 --times 100    # 100 M rollouts in 0.4 GB, by hard links; one run alone

The run is made of random rows, each another question with a response of a dozen words; 0.5 KB each on the disk. Pairs are made of
another run, with a tenth of the rows: 8 responses of 150 words to each question. The many runs have 200 rows each, as those of the
first. With `--times` each part is there under so many names (hard links), so that each question has so many equal samples, and
only the commands of the one run are measured, without `filter`, and pages of `rlvr view`. Each command runs once, in a process
of its own: CPU seconds, since the machines used are shared, and the largest resident set. Of pages, the seconds of the first
request and of the next.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import view
from analyze import make_run

COMMANDS = {
    "analyze categories": "analyze categories {run} --timeout-seconds 1800",
    "analyze summary": "analyze summary {run} --timeout-seconds 1800",
    "runs": "runs --runs-dir {root}",
    "filter --dedup": "filter {run} --dedup --out {root}/kept.jsonl --overwrite --timeout-seconds 600",
}
PAIRS = "filter {run} --emit pairs --out {root}/pairs.jsonl --overwrite --timeout-seconds 600"
PAGES = ("list of runs", "page of the run", "rollouts, first page", "rollouts of a category", "rollouts by length")
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


def measure(name: str, command: str) -> None:
    """Print CPU seconds and peak MB of a command and its children, and why it failed, which ends this script."""
    line = [sys.executable, "-c", _MEASURED, sys.executable, "-m", "rlvr_cli", *command.split()]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    code, seconds, peak = map(float, done.stdout.split())
    failed = (
        next((line for line in done.stderr.splitlines() if line.startswith("error: ")), done.stderr) if code else ""
    )
    print(f"{name:<25} {seconds:>8.1f} CPU s {peak:>8.0f} MB  {failed}".rstrip(), flush=True)
    if failed:
        sys.exit(1)


def measure_page(root: Path) -> None:
    """Print the seconds of the first and the second answer of `rlvr view` on the large run."""
    with view.serving(root) as address:
        for name in PAGES:
            first, then = view.measure(address, *view.REQUESTS[name], repeat=2)
            print(f"{name:<25} {first:>8.2f} s, then {then:.2f} s", flush=True)


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
        measure(name, line.format(many=many, all=paths))
    with view.serving(many) as address:
        first, then = view.measure(address, "", {}, repeat=2)
        print(f"{'page of the runs':<25} {first:>8.2f} s, then {then:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--per-part", type=int, default=512)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--times", type=int, default=1, help="how often each part of the large run is there")
    parser.add_argument("--keep", type=Path, help="make the runs in this directory, or use those that are there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.keep or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        run = root / "large"
        if not run.exists():
            make_run(
                root, arguments.rows, per_part=arguments.per_part, words_each=12, one_step=True, times=arguments.times
            )
        print(f"{arguments.rows * arguments.times:,} rollouts in {len(list((run / 'rollouts').iterdir())):,} parts")
        for name, line in COMMANDS.items():
            if arguments.times > 1 and name.startswith("filter"):
                continue
            measure(name, line.format(run=run, root=root))
        if arguments.times > 1:
            return measure_page(root)
        sampled = root / "sampled"
        if not sampled.exists():
            make_run(root, arguments.rows // 10, name="sampled", words_each=150, one_step=True, samples_each=8)
        measure("filter --emit pairs", PAIRS.format(run=sampled, root=root))
        measure_many(root, arguments.runs)


if __name__ == "__main__":
    main()
