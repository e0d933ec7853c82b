"""Seconds of the answers of `rlvr view` on a large run.

    python benchmarks/view.py [--rows 1000000] [--repeat 5] [--keep DIRECTORY]

Enters: nothing; the run is that of `benchmarks/analyze.py`. Leaves: one line per request to a server on this machine, with the
seconds of the first one and the median of the others.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

from analyze import make_run

GROUP = {"run_id": "large", "phase": "eval", "step": 3, "example_id": "question-7", "sample_index": 0}
REQUESTS = {
    "list of runs": ("", {}),
    "page of the run": ("view", {}),
    "the same page, unchanged": ("view", {"unchanged": True}),
    "values to filter by": ("facets", {}),
    "rollouts, first page": ("rollouts", {}),
    "rollouts, page in the middle": ("rollouts", {"first": 500_000}),
    "rollouts, last page": ("rollouts", {"first": 999_975}),
    "rollouts of a step, rewarded": ("rollouts", {"step": 3, "reward": "above 0.5"}),
    "rollouts of a category": ("rollouts", {"category": json.dumps("format_0_answer_0")}),
    "rollouts by length": ("rollouts", {"sort": "num_response_tokens", "down": 1}),
    "rollouts by question": ("rollouts", {"sort": "example_id"}),
    "a rollout with its group": ("group", {name: json.dumps(value) for name, value in GROUP.items()}),
    "where a question was asked": ("places", {"example_id": json.dumps("question-7")}),
    "words in a step": ("rollouts", {"words": "therefore we add", "step": 3}),
    "words in all texts": ("rollouts", {"words": "therefore we add"}),
}


def measure(address: str, path: str, parameters: dict[str, object], *, repeat: int) -> list[float]:
    """Return the seconds of each of `repeat` requests."""
    headers, parameters = {}, dict(parameters)
    query = urlencode({"run": "large", **{name: value for name, value in parameters.items() if name != "unchanged"}})
    url = f"{address}{path}?{query}"
    if parameters.get("unchanged"):
        with urllib.request.urlopen(url) as answer:
            headers = {"If-None-Match": answer.headers["ETag"]}
    seconds = []
    for _ in range(repeat):
        started = time.perf_counter()
        try:
            urllib.request.urlopen(urllib.request.Request(url, headers=headers)).read()
        except urllib.error.HTTPError as error:
            if error.code != 304:
                sys.exit(f"{url}: {error.code} {error.read().decode()}")
        seconds.append(time.perf_counter() - started)
    return seconds


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """Run `rlvr view` on a directory of runs; the address it answers at."""
    command = [sys.executable, "-m", "rlvr_cli", "view", str(root), "--no-open", "--no-token"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="make the run in this directory, or use the one that is there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.keep or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        if not (root / "large").exists():
            make_run(root, arguments.rows)
        with serving(root) as address:
            print(f"{'request':<32} {'first':>7} {'then':>7}  seconds")
            for name, (path, parameters) in REQUESTS.items():
                first, *others = measure(address, path, parameters, repeat=arguments.repeat)
                print(f"{name:<32} {first:>7.3f} {statistics.median(others):>7.3f}", flush=True)


if __name__ == "__main__":
    main()
