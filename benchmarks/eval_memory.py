"""Peak memory of `rlvr eval` for growing numbers of samples: rows stream to disk, so it should stay constant.

    python benchmarks/eval_memory.py [--samples 1000 10000 100000] [--max-tokens 4] [--repeats 1] [--json FILE]

The command itself runs, on the built-in model, with responses of a few tokens, from loading torch to the table at the
end. The result is the largest resident set (VmHWM, so Linux only) of its process and the sum of those of the grading
processes that there are at a time (each is replaced after 20,000 grades). There are two ways to get so many samples:

  few    10 questions, each sampled many times
  many   that many questions, sampled once: beyond 20,000 the questions and their keys are on the disk

One run is enough: memory varies by a few MB from run to run. The last value of --samples is compared with the first.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rows import Row, write

WORKS = {"few": "10 questions, sampled often", "many": "as many questions, sampled once"}


def high_water(pid: int) -> float:
    """Return the largest resident set so far of a process, in MB; 0 if the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


def children(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return [*found, *(grandchild for child in found for grandchild in children(child))]


def peaks(command: list[str]) -> tuple[float, float]:
    """Return the peak MB of a command's own process, and the largest sum of those of its descendants at a time."""
    own, others, seen = 0.0, 0.0, set[int]()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        while process.poll() is None:
            own = max(own, high_water(process.pid))
            now = children(process.pid)
            # One that was not seen before has just been forked, and its parent's memory counts as its own.
            others = max(others, sum(high_water(child) for child in now if child in seen))
            seen.update(now)
            time.sleep(0.1)
        if process.returncode:
            said.seek(0)
            sys.exit(f"{' '.join(command)} ended with status {process.returncode}:\n{said.read().decode()[-2000:]}")
    return own, others


def measure(work: str, samples: int, *, max_tokens: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        if work == "few":
            asked = ["--dataset", "arithmetic:10", "--num-samples", str(samples // 10)]
        else:
            questions = Path(folder) / "questions.jsonl"
            with questions.open("w", encoding="utf-8") as file:
                for i in range(samples):
                    question = {"question": f"What is {i} + {7 * i % 1000} - {3 * i % 100}?", "answer": i}
                    file.write(json.dumps(question) + "\n")
            asked = ["--dataset", str(questions)]
        how = ["--sampling-max-tokens", str(max_tokens), "--runs-dir", f"{folder}/runs"]
        return peaks([sys.executable, "-m", "rlvr_cli", "eval", *asked, *how])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    rows = []
    for work in args.works:
        found: dict[int, float] = {}
        for samples in args.samples:
            runs = [measure(work, samples, max_tokens=args.max_tokens) for _ in range(args.repeats)]
            own, others = (statistics.median(values) for values in zip(*runs, strict=True))
            found[samples] = own
            print(
                f"{work:5} {samples:9,} samples  {own:7.0f} MB  {own / found[args.samples[0]]:5.2f}x  children {others:5.0f} MB"
            )
            sys.stdout.flush()
        first, last = args.samples[0], args.samples[-1]
        what = f"peak memory of rlvr eval, {last:,} samples"
        rows.append(Row(what, WORKS[work], f"{first:,} samples", "MB", found[last], found[first], "<= 1.1"))
    write(args.json, rows)


if __name__ == "__main__":
    main()
