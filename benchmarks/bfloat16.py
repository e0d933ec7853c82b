"""A step of the quickstart's GRPO in bfloat16, compared with the same step in float32, on a CPU that multiplies bfloat16.

    python benchmarks/bfloat16.py [--steps 16] [--repeats 3] [--sizes quickstart 1M 25M] [--json FILE]

Each repeat starts one process per precision, as in `grpo_step.py`, whose steps these are; they take turns, one step each while
the other waits. The ratio is the median over repeats of the median over pairs of steps, in CPU seconds of the process (user
and system): other work on the machine disturbs these less than wall seconds, which are printed too. The first step is left
out. In another precision other tokens are sampled after a while, so that single steps differ in length.

The other sizes are random models with 64 responses of 64 tokens, as in `grpo_step.py`; a quarter of the steps are measured. What the
rounding does to the reward, `bfloat16_curves.py` shows.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from grpo_step import SIZES, grid_flags, make_model, ours, workers
from rows import Row, write

PRECISIONS = ("bfloat16", "float32")


def compared(options: list[str], args: argparse.Namespace, *, number: int) -> dict[str, tuple[float, float]]:
    """Return the seconds of a step in either precision, by kind of second, and print them with the ratios of the repeats."""
    found: dict[str, list[list[float]]] = {
        "cpu": [],
        "seconds": [],
    }  # of each repeat: both medians, and that of the ratios
    for _ in range(args.repeats):
        steps: dict[str, list[dict[str, float]]] = {name: [] for name in PRECISIONS}
        with workers(__file__, list(PRECISIONS), options, threads=args.threads) as turns:
            for step in range(number):
                for name in PRECISIONS if step % 2 == 0 else reversed(PRECISIONS):
                    steps[name].append(turns[name]())
        for kind, medians in found.items():
            pairs = [(half[kind], wide[kind]) for half, wide in zip(*steps.values(), strict=True)]
            columns = [*zip(*pairs, strict=True), [half / wide for half, wide in pairs]]
            medians.append([statistics.median(column) for column in columns])
    results = {}
    for kind, medians in found.items():
        half, wide, ratio = (statistics.median(column) for column in zip(*medians, strict=True))
        ratios = ", ".join(f"{each[2]:.3f}" for each in medians)
        name = {"cpu": "CPU", "seconds": "wall"}[kind]
        print(f"{name} s a step: bfloat16 {half:.3f}, float32 {wide:.3f}; by pairs {ratio:.3f} ({ratios})", flush=True)
        results[kind] = ratio * wide, wide
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16, help="measured steps per process")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    sizes = ("quickstart", *SIZES)
    parser.add_argument("--sizes", nargs="+", choices=sizes, default=["quickstart", "1M", "25M"], help="of the model")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--way", choices=PRECISIONS, help=argparse.SUPPRESS)
    parser.add_argument("--cell", default="{}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        ours(stop="</answer>", more=json.loads(args.cell) | {"compute_dtype": args.way})
    rows = []
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as temporary:
            options, work, steps = [], size, args.steps
            if size != "quickstart":
                steps = max(steps // 4, 1)
                make_model(Path(temporary) / "model", size)
                options = ["--cell", json.dumps(grid_flags(Path(temporary) / "model", ""))]
                work = f"{size} parameters, short prompts, 64 responses of 64 tokens"
            print(work, flush=True)
            half, wide = compared(options, args, number=steps)["cpu"]
            rows.append(Row("GRPO step in bfloat16, CPU time", work, "the step in float32", "s", half, wide, "<= 1"))
    write(args.json, rows)


if __name__ == "__main__":
    main()
