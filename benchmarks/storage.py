"""Runs in object storage: how far behind an upload is, what it costs a step, and how long the list of 200 runs takes.

    python benchmarks/storage.py [lag] [step] [list] [--repeat 3] [--runs 200]

Enters: nothing; the store is moto's server over loopback, in a process of its own on the same cores. Leaves: a line per figure, with
its goal. Needs the extra `storage-test`. A store elsewhere adds its latency to the lag and to the list, and takes its work off these cores.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
HELPERS = [str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "helpers" / "processes")]
ADDRESS = "s3://bucket/runs"
GRPO = shlex.split(
    "grpo --preset quickstart --n-grpo-steps 30 --eval-every 100 --eval-examples 16 --checkpoint-every 10 --run r"
)


def lag(*, commits: int = 60, pause: float = 0.25) -> None:
    """Seconds from the return of a commit until the index of the store names it."""
    from rlvr_cli.runs.remote.index import INDEX, parsed_index
    from rlvr_cli.runs.remote.store import Store, parsed_address
    from rlvr_cli.runs.run_dir import RunDir
    from stores import a_rollout

    committed: dict[str, float] = {}
    seen: dict[str, float] = {}
    ended = threading.Event()

    def look() -> None:
        store, known = Store(parsed_address(f"{ADDRESS}/lag")), None
        while not ended.is_set() or len(seen) < len(committed):
            if (known := store.read(INDEX, known=known)) is not None:
                for path in parsed_index(known[0], where=INDEX).files:
                    seen.setdefault(path, time.monotonic())
            time.sleep(0.02)

    looker = threading.Thread(target=look)
    with RunDir.create(ADDRESS, "grpo", name="lag", metadata={}) as run:
        looker.start()
        for step in range(commits):
            rows = [a_rollout(run.id, i, step=step, response="so " * 400) for i in range(64)]
            path = run.commit_rollouts("train", step, rows)
            committed[path.relative_to(run.path).as_posix()] = time.monotonic()
            run.commit_metrics(step, "train", {"loss": 0.5})
            time.sleep(pause)
    ended.set()
    looker.join()
    behind = sorted(seen[path] - at for path, at in committed.items())
    print(
        f"lag of {commits} commits, one each {pause:g} s: median {statistics.median(behind):.2f} s, largest {behind[-1]:.2f} s (goal: at most 2 s)"
    )


def step(folder: Path, *, repeat: int) -> None:
    """Seconds of a step of the quickstart's training with an upload, beside those without, in turns."""
    import io

    import pyarrow.parquet as pq

    from rlvr_cli.runs.readers import read_metrics, read_run
    from rlvr_cli.runs.remote.behind import work_folder

    model = folder / "start"
    subprocess.run([sys.executable, "-m", "rlvr_cli.models.tiny", str(model)], check=True, capture_output=True)
    seconds: dict[str, list[float]] = {"local": [], "upload": []}
    for number in range(repeat):
        for kind in seconds:
            root = str(folder / f"local{number}") if kind == "local" else f"{ADDRESS}/step{number}"
            subprocess.run(
                [sys.executable, "-m", "rlvr_cli", *GRPO, "--model", str(model), "--runs-dir", root],
                check=True,
                capture_output=True,
            )
            info = read_run((Path(root) if kind == "local" else work_folder(root)) / "r")
            rows = pq.read_table(
                io.BytesIO(read_metrics(info.path, info.entries, settled=info.settled) or b"")
            ).to_pylist()
            walls = sorted(
                {row["step"]: row["wall_seconds"] for row in rows if row["name"] == "update/tokens"}.values()
            )
            seconds[kind].append(statistics.median(b - a for a, b in pairwise(walls)))
    local, upload = (statistics.median(values) for values in seconds.values())
    print(
        f"step {local:.3f} s, with an upload {upload:.3f} s, each {repeat} times: ratio {upload / local:.3f} (goal: at most 1.01)"
    )


def listing(folder: Path, *, repeat: int, runs: int) -> None:
    """Seconds of `rlvr runs` over many runs in the store, in a fresh process, once it has read them and before."""
    from rlvr_cli.runs.remote.copies import export_run
    from rlvr_cli.runs.remote.store import parsed_address
    from rlvr_cli.runs.run_dir import RunDir
    from stores import a_rollout

    for number in range(runs):
        with RunDir.create(folder / "many", "eval", name=f"run-{number}", metadata={"config": {"seed": number}}) as run:
            run.commit_rollouts("eval", 0, [a_rollout(run.id, i, phase="eval") for i in range(8)])
            run.commit_metrics(0, "eval", {"reward/mean": 1.0})
        export_run(run.path, parsed_address(f"{ADDRESS}/many"))

    def seconds(root: str) -> float:
        began = time.monotonic()
        command = [sys.executable, "-m", "rlvr_cli", "runs", "--limit", "0", "--runs-dir", root]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert said.count("run-") == runs
        return time.monotonic() - began

    first = seconds(f"{ADDRESS}/many")
    turns = [(seconds(f"{ADDRESS}/many"), seconds(str(folder / "many"))) for _ in range(repeat)]
    again, here = (statistics.median(times) for times in zip(*turns, strict=True))
    print(
        f"rlvr runs over {runs} runs: {first:.2f} s the first time, then {again:.2f} s (goal: at most 2 s); on the disk {here:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["lag", "step", "list", []], default=[])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--runs", type=int, default=200)
    arguments = parser.parse_args()
    sys.path[:0] = HELPERS
    from s3 import s3_server, variables

    what = arguments.what or ["lag", "step", "list"]
    with s3_server() as server, tempfile.TemporaryDirectory() as folder:
        os.environ |= variables(server) | {"RLVR_CACHE_DIR": f"{folder}/cache", "HF_HUB_OFFLINE": "1"}
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        if "lag" in what:
            lag()
        if "step" in what:
            step(Path(folder), repeat=arguments.repeat)
        if "list" in what:
            listing(Path(folder), repeat=arguments.repeat, runs=arguments.runs)


if __name__ == "__main__":
    main()
