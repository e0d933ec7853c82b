"""Run every built-in experiment at the quickstart's size, and put the reports into docs/experiments/.

    python docs/make_experiments.py                       # all of them, on two idle cores half an hour; runs in runs/experiments
    python docs/make_experiments.py grpo_baselines        # some of them

What is finished is not repeated: stop it and start it again.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGES = HERE / "experiments"
PICTURES = ("held_out.svg", "minutes.svg", "curves.svg", "at_k.svg")
LARGE = 200_000  # bytes of a picture that is left out
START = "--model runs/base/model"  # the SFT model of `rlvr quickstart`, right in two of five answers
HELD_OUT = "--eval-dataset arithmetic:1024 --eval-examples 256 --final-eval-examples 1024"
GRPO = f"--preset quickstart {START} {HELD_OUT}"
SFT = "--n-sft-steps 700 --eval-every 100"
FOUR = "--gradient-accumulation-steps 1 --warmup-steps 16 --learning-rate 1e-4 --eval-every 40"  # several updates a batch: micro-batches of 64
# Name -> what stands after it, and after `rlvr sweep`.
EXPERIMENTS = {
    "math_baseline": f"--preset quickstart {START}",
    "sft_dataset_size": f"--preset quickstart --model runs/start {HELD_OUT} {SFT} --seeds 0,1,2",
    "sft_filtered": f"--preset quickstart --model runs/start --dataset runs/samples {HELD_OUT} {SFT} --seeds 0,1,2",
    "ei_rollouts": f"--preset quickstart {START} {HELD_OUT} --n-ei-steps 3 --seeds 0,1,2",
    "grpo_learning_rate": f"{GRPO} --vary learning_rate=3e-4,1e-5,1e-4,1e-3,1e-2 --seeds 0,1,2",
    "grpo_baselines": GRPO,
    "grpo_length_normalization": GRPO,
    "grpo_group_standard_deviation": GRPO,
    "grpo_off_policy_sweep": f"{GRPO} {FOUR} --seeds 0,1,2 --stages 1",
    "grpo_off_policy_clip_ablation": f"{GRPO} {FOUR}",
    "grpo_prompt_ablation": GRPO,
    "leaderboard": f"{GRPO} --time-limit 2m --n-grpo-steps 1000",
    "best_of_n": f"--preset quickstart {START} --dataset arithmetic:256",
    "objectives": f"{GRPO} {FOUR}",
}
BEFORE = {
    "start": "-m rlvr_cli.models.tiny runs/start",
    "base": "-m rlvr_cli sft --preset quickstart --model runs/start --run base --eval-dataset arithmetic:256",
    "samples": f"-m rlvr_cli eval --preset quickstart {START} --dataset arithmetic:1000:7 --split train --num-samples 8 --run samples",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(EXPERIMENTS))
    parser.add_argument("--folder", type=Path, default=Path("runs/experiments"))
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(EXPERIMENTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    os.environ["OMP_NUM_THREADS"] = "1"
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, words in BEFORE.items():
        if not (arguments.folder / "runs" / name).exists():
            subprocess.run([sys.executable, *words.split()], cwd=arguments.folder, check=True)
    for name in arguments.names or EXPERIMENTS:
        words = ["sweep", name, *shlex.split(EXPERIMENTS[name])]
        print(f"$ rlvr {shlex.join(words)}", flush=True)
        more = ["--jobs", str(arguments.jobs)]
        subprocess.run([sys.executable, "-m", "rlvr_cli", *words, *more], cwd=arguments.folder, check=True)
        copy_report(arguments.folder / "runs" / name, PAGES / name, command=f"rlvr {shlex.join(words)}")


def copy_report(folder: Path, page: Path, *, command: str) -> None:
    """Copy the report as Markdown, with the sweep's command and those of its pictures that are not large."""
    shutil.rmtree(page, ignore_errors=True)
    page.mkdir(parents=True)
    title, *parts = (folder / "report.md").read_text(encoding="utf-8").split("\n\n")
    kept = [title, f"```sh\n{command}\n```"]
    for part in parts:
        name = next((name for name in PICTURES if part == f"![{name}]({name})"), None)
        if name is not None and (folder / name).stat().st_size > LARGE:
            continue
        kept.append(part)
        if name is not None:
            shutil.copy(folder / name, page)
    (page / "README.md").write_text("\n\n".join(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
