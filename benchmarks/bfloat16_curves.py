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
from collections.abc import Sequence
from pathlib import Path

from grpo_step import SIZES, make_model

from rlvr_cli.notebook import open_run

PRECISIONS = ("float32", "bfloat16")
EVERY = 4  # steps between evaluations
TAUGHT = "--n-sft-steps 600 --learning-rate 2e-4 --compute-dtype float32 --run taught"
TRAINED = f"--learning-rate 1e-4 --eval-every {EVERY} --eval-examples 512"


def run(folder: Path, *commands: Sequence[str], threads: int) -> None:
    """Run commands of `rlvr` at the same time. If one fails, the program ends with what they said."""
    variables = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    own = ("--preset", "quickstart", "--runs-dir", str(folder), "--checkpoint-every", "0")
    with (folder / "said").open("w+") as said:
        lines = [[sys.executable, "-m", "rlvr_cli", *command, *own] for command in commands]
        begun = [subprocess.Popen(line, env=variables, stdout=said, stderr=said) for line in lines]
        statuses = [process.wait() for process in begun]
        if any(statuses):
            said.seek(0)
            raise SystemExit(said.read())


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
        taught = ("sft", "--model", str(folder / "model"), *TAUGHT.split())
        run(folder, taught, threads=os.cpu_count() or 1)
        of = ("grpo", "--model", str(folder / "taught" / "model"), "--n-grpo-steps", str(args.steps), *TRAINED.split())
        for seed in range(args.seeds):
            runs = {name: f"{name}-{seed}" for name in PRECISIONS}
            each = [(*of, "--seed", str(seed), "--compute-dtype", name, "--run", runs[name]) for name in PRECISIONS]
            run(folder, *each, threads=1)
            for name in PRECISIONS:
                found = open_run(runs[name], runs_dir=folder)
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
