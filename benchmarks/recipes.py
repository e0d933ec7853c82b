"""Each algorithm on the quickstart's task: held-out accuracy after 40 batches, seeds 0 to 2.

    python benchmarks/recipes.py                        # about an hour on one core; stores recipes.json
    python benchmarks/recipes.py --only gspo cispo --seeds 0

A recipe is a command of rlvr, typed as a user would; what comes before (the untrained model, SFT, samples for pairs, teachers) is
made once for each seed. Runs that are finished are not repeated: stop it and start it again. `python docs/make_reference.py` puts the
table into docs/algorithms.md.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rlvr_cli.runs.readers import read_rollouts, read_run

STORED = Path(__file__).with_name("recipes.json")
HELD_OUT = "--eval-dataset arithmetic:1024 --eval-every 0 --eval-examples 64 --final-eval-examples 1024"
FOUR = "--train-batch-size 64 --gradient-accumulation-steps 1 --warmup-steps 16 --learning-rate 1e-4"  # four updates a batch
PAIRS = "--sampling-max-tokens 64 --train-batch-size 64 --learning-rate 1e-4"
FIRST = f"--dataset samples-SEED {PAIRS}"
AGAIN = f"--model runs/LOSS-SEED/model --dataset LOSS-again-SEED {PAIRS} --dpo-epochs 1"
DECAY = "--lr-schedule cosine --warmup-steps 6"
# The questions of `rlvr quickstart --seed SEED`.
QUESTIONS = "--preset quickstart --dataset arithmetic:4000:100SEED"
# Name -> command; SEED is replaced, and OTHER by another seed, whose GRPO model is the teacher.
RECIPES = {
    "grpo": f"grpo {QUESTIONS}",
    "dr-grpo": f"grpo {QUESTIONS} --no-use-std-normalization --length-normalization masked_normalize",
    "grpo_clip": f"grpo {QUESTIONS} --loss-type grpo_clip {FOUR}",
    "gspo": f"grpo {QUESTIONS} --loss-type gspo {FOUR}",
    "cispo": f"grpo {QUESTIONS} --loss-type cispo --length-normalization token_mean --std-normalization batch {FOUR}",
    "kimi": f"grpo {QUESTIONS} --loss-type kimi --no-use-std-normalization {FOUR}",
    "ppo": "ppo --preset quickstart --dataset arithmetic:12000:100SEED",
    "dpo, on-policy": f"dpo {QUESTIONS}",
    "dpo_norm, on-policy": f"dpo --loss-type dpo_norm {QUESTIONS}",
    "simpo, on-policy": f"dpo --loss-type simpo {QUESTIONS}",
    "dpo": f"dpo --loss-type dpo {FIRST} --dpo-epochs 1 {DECAY}",
    "dpo, second round": f"dpo --loss-type dpo {AGAIN.replace('LOSS', 'dpo')} {DECAY}",
    "dpo_norm": f"dpo --loss-type dpo_norm {FIRST} --dpo-epochs 2 {DECAY}",
    "dpo_norm, second round": f"dpo --loss-type dpo_norm {AGAIN.replace('LOSS', 'dpo_norm')} {DECAY}",
    "simpo": f"dpo --loss-type simpo {FIRST} --dpo-epochs 1",
    "distill": f"distill {QUESTIONS} --teacher runs/grpo-OTHER/model",
}
SAMPLES = "--split train --num-samples 8 --sampling-max-tokens 64"
BEFORE = {
    "sft": "sft --preset quickstart --dataset arithmetic:8000:SEED --model start-SEED",
    "samples": f"eval --dataset arithmetic:1280:200SEED {SAMPLES} --model runs/sft-SEED/model",
    "dpo-again": f"eval --dataset arithmetic:1280:300SEED {SAMPLES} --model runs/dpo-SEED/model",
    "dpo_norm-again": f"eval --dataset arithmetic:1280:300SEED {SAMPLES} --model runs/dpo_norm-SEED/model",
}


def run(name: str, command: str, *, seed: int, folder: Path) -> Path:
    """Run a command as runs/NAME-SEED, unless it is finished; its directory."""
    path = folder / "runs" / f"{name}-{seed}"
    if path.exists() and read_run(path).metadata["status"] == "finished":
        return path
    again = ["--resume", str(path)] if path.exists() else ["--seed", str(seed), "--run", path.name]
    words = command.replace("SEED", str(seed)).replace("OTHER", str((seed + 1) % 3))
    arguments = [words.split()[0], *again] if path.exists() else [*shlex.split(words), *again]
    print(f"$ rlvr {shlex.join(arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "rlvr_cli", *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return path


def prepare(recipe: str, *, seed: int, folder: Path) -> None:
    """Make what a recipe starts from."""
    if not (folder / f"start-{seed}").exists():
        subprocess.run(
            [sys.executable, "-m", "rlvr_cli.models.tiny", f"start-{seed}", "--seed", str(seed)], cwd=folder, check=True
        )
    run("sft", BEFORE["sft"], seed=seed, folder=folder)
    if recipe.endswith("second round"):
        first = recipe.partition(",")[0]
        prepare(first, seed=seed, folder=folder)
        measure(first, seed=seed, folder=folder)
        run(f"{first}-again", BEFORE[f"{first}-again"], seed=seed, folder=folder)
    if "samples-SEED" in RECIPES[recipe]:
        run("samples", BEFORE["samples"], seed=seed, folder=folder)
    if "OTHER" in RECIPES[recipe]:
        other = (seed + 1) % 3
        prepare("grpo", seed=other, folder=folder)
        measure("grpo", seed=other, folder=folder)


def measure(recipe: str, *, seed: int, folder: Path) -> tuple[int, int]:
    """Run a recipe; the right ones of its last evaluation, and all."""
    start = "" if "--model" in RECIPES[recipe] else "--model runs/sft-SEED/model"
    path = run(re.sub(", | ", "-", recipe), f"{RECIPES[recipe]} {start} {HELD_OUT}", seed=seed, folder=folder)
    rows = read_rollouts(path, phase="eval", columns=["step", "reward"]).to_pylist()
    last = [row["reward"] or 0.0 for row in rows if row["step"] == max(r["step"] for r in rows)]
    return sum(reward > 0.5 for reward in last), len(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--only", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", nargs="*", type=int, choices=(0, 1, 2), default=[0, 1, 2])
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in arguments.only:
        for seed in arguments.seeds:
            prepare(recipe, seed=seed, folder=folder)
            right, count = measure(recipe, seed=seed, folder=folder)
            stored = json.loads(STORED.read_text()) if STORED.exists() else {}
            stored.setdefault(recipe, {})[str(seed)] = [right, count]
            stored = {name: dict(sorted(stored[name].items())) for name in RECIPES if name in stored}
            STORED.write_text(json.dumps(stored, indent=2) + "\n")
            print(f"{recipe:<16} seed {seed}: {right / count:.4f} of {count}", flush=True)


if __name__ == "__main__":
    main()
