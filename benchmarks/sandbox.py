"""The verifier's times, and what a run in the sandbox costs.

    python benchmarks/sandbox.py [--repeats 20] [--json FILE]

Enters: nothing. Leaves: a line per measurement with its goal, in CPU time, with one thread (set OMP_NUM_THREADS=1). The sets are made by
the tests' helpers: 600 vectors, whose arithmetic is float64; 582 with entries of 43 bits, as the published 593 has, and 869 with 512 bits,
in Python's integers; as many near to each other, and in two places far from each other, where floats cannot tell pairs of one place apart, the
worst there is; a million vectors. The cost of the sandbox is that of a
program that does nothing, and of one that imports numpy, beside that of the same interpreter without any layer, one at a time.
"""

import argparse
import random
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rows import Row, write

from rlvr_cli.discovery.kissing import MAX_BITS, verify
from rlvr_cli.sandbox.run import available_layers, run_program

HELPERS = Path(__file__).parents[1] / "tests" / "helpers"
GOALS = {
    "600 vectors": 20,
    "582 vectors of 43 bits": 300,
    "869 vectors of 512 bits": 1000,
    "869 close vectors of 512 bits": 1000,
    "869 vectors of 512 bits, in two places": 1000,
    "a million vectors": 100,
}


def sets() -> dict[str, Any]:
    """The sets of `GOALS`."""
    sys.path.insert(0, str(HELPERS))
    import kissing_sets

    draw = random.Random(0)
    largest = (1 << MAX_BITS) - 1
    return {
        "600 vectors": kissing_sets.rational_600(),
        "582 vectors of 43 bits": kissing_sets.large_coordinates(),
        "869 vectors of 512 bits": [[draw.randint(largest // 2, largest) for _ in range(11)] for _ in range(869)],
        "869 close vectors of 512 bits": [[largest - draw.randint(0, 1 << 300) for _ in range(11)] for _ in range(869)],
        "869 vectors of 512 bits, in two places": [
            [(-1) ** i * (largest - draw.randint(0, 1 << 300)) for _ in range(11)] for i in range(869)
        ],
        "a million vectors": [[i, *range(10)] for i in range(1_000_000)],
    }


def cpu_seconds() -> float:
    """Of this process and of the children that have ended: unlike the clock's, the same on a busy machine."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    """The median CPU time of a call."""
    times = []
    for _ in range(repeats):
        start = cpu_seconds()
        function()
        times.append(cpu_seconds() - start)
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rows = []

    def said(what: str, work: str, measured: float, goal: float) -> None:
        rows.append(Row(what, work, "the bound", "ms", measured, goal, "<= 1"))
        print(f"{what}, {work}: {measured:.1f} ms (goal: {goal:g})", flush=True)

    for name, points in sets().items():
        repeats = max(3, arguments.repeats // 4) if "bits" in name else arguments.repeats
        said("verify", name, milliseconds(lambda points=points: verify(points, dim=11), repeats), GOALS[name])
    print(f"layers: {', '.join(available_layers())}")
    for name, line in {"an empty program": "", "a program that imports numpy": "import numpy\n"}.items():
        program = f"{line}points = [[1], [-1]]"
        found = milliseconds(lambda program=program: run_program(program, entry=("points",)), arguments.repeats)
        command = [sys.executable, "-s", "-P", "-c", program]
        plain = milliseconds(lambda command=command: subprocess.run(command, check=True), arguments.repeats)
        print(f"sandbox, {name}: {found:.1f} ms, of which the interpreter alone {plain:.1f} ms", flush=True)
        said("sandbox", f"overhead of {name}", max(found - plain, 0.001), 100)
    write(arguments.json, rows)


if __name__ == "__main__":
    main()
