"""What comes of training in bfloat16 on a CPU: reward curves beside those of float32, over several seeds.

    python benchmarks/bfloat16_curves.py [--seeds 3] [--size 25M] [--steps 24]

A random model is fine-tuned on the quickstart's traces in float32, and then trained by the quickstart's GRPO in either precision, for
each seed in both at the same time, on a thread each. The table has the reward on 512 held-out questions every 4 steps, the mean over
seeds, and the greatest mean gap between sampler and trainer, in nats a token. Below it is the difference of the mean over the curve (the
first evaluation, of the same model, left out), with its standard error over the seeds. It takes about half an hour on two cores.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from grpo_step import SIZES, make_model

from rlvr_cli.notebook import open_run

PRECISIONS = ("float32", "bfloat16")
EVERY = 4  # steps between evaluations
TAUGHT = "--n-sft-steps 600 --learning-rate 2e-4 --compute-dtype float32 --run taught"
TRAINED = f"--learning-rate 1e-4 --eval-every {EVERY} --eval-examples 512"


def begin(command: str, folder: Path, *options: str, threads: int) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "rlvr_cli", command, "--preset", "quickstart", "--runs-dir", str(folder), *options]
    variables = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with (folder / f"{options[-1]}.log").open("wb") as log:
        return subprocess.Popen([*line, "--checkpoint-every", "0"], env=variables, stdout=log, stderr=log)


def end(*begun: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for all of them. Of one that fails, the program ends with what it said."""
    for process in begun:
        process.wait()
    for process in begun:
        if process.returncode:
            said = "".join(log.read_text(errors="replace")[-2000:] for log in sorted(folder.glob("*.log")))
            raise SystemExit(f"{said}\n{process.args} ended with status {process.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="25M")
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    curves: dict[str, list[list[float]]] = {name: [] for name in PRECISIONS}  # of each seed
    gaps = dict.fromkeys(PRECISIONS, 0.0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder / "model", args.size)
        end(
            begin("sft", folder, "--model", str(folder / "model"), *TAUGHT.split(), threads=os.cpu_count() or 1),
            folder=folder,
        )
        of = ("--model", str(folder / "taught" / "model"), "--n-grpo-steps", str(args.steps), *TRAINED.split())
        for seed in range(args.seeds):
            runs = {name: f"{name}-{seed}" for name in PRECISIONS}
            own = {name: ("--compute-dtype", name, "--seed", str(seed), "--run", run) for name, run in runs.items()}
            end(*(begin("grpo", folder, *of, *own[name], threads=1) for name in PRECISIONS), folder=folder)
            for name, run in runs.items():
                found = open_run(run, runs_dir=folder)
                held_out = found.sql(
                    "select avg(reward) r from rollouts where phase = 'eval' group by step order by step"
                )
                curves[name].append([row["r"] for row in held_out])
                gap = found.sql("select max(value) gap from metrics where name = 'mismatch/logprob_mean_abs'")
                gaps[name] = max(gaps[name], *(row["gap"] for row in gap))
            print(f"seed {seed}: " + ", ".join(f"{name} {curves[name][-1]}" for name in PRECISIONS), flush=True)
    print("\nstep      " + "".join(f"{EVERY * i:>7}" for i in range(len(curves["float32"][0]))))
    for name in PRECISIONS:
        means = map(statistics.mean, zip(*curves[name], strict=True))
        print(f"{name:<10}" + "".join(f"{mean:7.3f}" for mean in means) + f"   gap {gaps[name]:.1e} nats")
    differences = [
        statistics.mean(half[1:]) - statistics.mean(wide[1:])
        for half, wide in zip(curves["bfloat16"], curves["float32"], strict=True)
    ]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    print(
        f"bfloat16 - float32: {statistics.mean(differences):+.4f}, standard error {error:.4f} over {args.seeds} seeds"
    )


if __name__ == "__main__":
    main()
