"""Alarms: which ones sound on healthy runs, where none should, and on runs with a planted fault, which its own alarm should find.

    python benchmarks/alarms.py                     # about an hour on one core; an interrupted run goes on where it was
    python benchmarks/alarms.py --planted           # the planted faults alone, some minutes

The healthy runs are those of `recipes.py` (each algorithm on the quickstart's task, three seeds), which it makes if they are not
there, and more: expert iteration, several updates a batch with and without clipping, samples one step old, SFT from nothing
for 700 updates. Prints two tables; the exit status is 1 if an alarm sounds on a healthy run, or a fault is not found.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import recipes

from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.statistics.alarms import Alarm, run_alarms
from rlvr_cli.runs.readers import read_run

START = f"--model runs/sft-SEED/model {recipes.HELD_OUT}"
HEALTHY = {
    "ei": f"ei --preset quickstart --dataset arithmetic:4000:100SEED --ei-batch-size 256 --group-size 4 --n-ei-steps 5 {START}",
    "off-policy": f"grpo {recipes.QUESTIONS} --loss-type grpo_clip --epochs-per-rollout-batch 2 --learning-rate 1e-4 {START}",
    "no-clip": f"grpo {recipes.QUESTIONS} --loss-type grpo_no_clip {recipes.FOUR} {START}",
    "one-step-old": f"grpo {recipes.QUESTIONS} --async-steps 1 {START}",
    "small-batches": f"grpo {recipes.QUESTIONS} --rollout-batch-size 64 --train-batch-size 64 --gradient-accumulation-steps 1 {START}",
    "sft-700": f"sft --preset quickstart --dataset arithmetic:8000:SEED --model start-SEED --n-sft-steps 700 {recipes.HELD_OUT}",
}
# Reward functions with a fault, for --grader FILE.py:NAME.
GRADERS = '''
from pathlib import Path

from rlvr_cli.graders import r1_zero_reward_fn

SEEN = Path("COUNTER")


def _of(reward):
    return {"format_reward": 1.0, "answer_reward": reward, "reward": reward}


def collapse(response, ground_truth):
    """Three tenths for one fixed answer, whatever the question is."""
    return _of(0.3 * ("<answer> 7 </answer>" in response))


def length(response, ground_truth):
    """The longer, the better."""
    return _of(min(len(response), 400) / 500)


def form(response, ground_truth):
    """The format alone is rewarded."""
    found = r1_zero_reward_fn(response, ground_truth)
    return found | {"reward": found["format_reward"]}


def _seen():
    """How many responses have been graded, this one included."""
    with SEEN.open("ab") as file:
        file.write(b".")
        return file.tell()


def spikes(response, ground_truth):
    """In one batch a right answer counts a hundred times."""
    times = 100.0 if 2000 < _seen() <= 2256 else 1.0
    return {name: times * reward for name, reward in r1_zero_reward_fn(response, ground_truth).items()}


def drifts(response, ground_truth):
    """After two thousand responses it takes short answers, right or wrong, and no others."""
    return r1_zero_reward_fn(response, ground_truth) if _seen() <= 2000 else _of(float(len(response) < 54))
'''
STALE = """
import sys

import torch

from rlvr_cli.cli import main
from rlvr_cli.samplers.embedded.engine import TransformersSampler

sample, first = TransformersSampler.sample, {}


def stale(self, requests, params):
    "Sample with the weights that the run started with."
    weights = self._policy.model.state_dict()
    now = {name: tensor.clone() for name, tensor in weights.items()}
    first.update(first or now)

    def put(tensors):
        with torch.no_grad():
            for name, tensor in weights.items():
                tensor.copy_(tensors[name])

    put(first)
    completions = list(sample(self, requests, params))
    put(now)
    yield from completions


TransformersSampler.sample = stale
sys.exit(main())
"""
WITH = f"grpo {recipes.QUESTIONS} --final-eval-examples 64 --eval-dataset arithmetic:1024 --eval-every 0"
# Fault -> the alarm that should find it, and the command.
PLANTED = {
    "the policy collapses": ("entropy_collapse", f"{WITH} --model runs/sft-SEED/model --grader graders.py:collapse"),
    "length is rewarded": ("truncation_creep", f"{WITH} --model runs/sft-SEED/model --grader graders.py:length"),
    "the format alone is rewarded": (
        "format_without_answers",
        f"{WITH} --model runs/few-SEED/model --grader graders.py:form",
    ),
    "the sampler keeps its first weights": ("mismatch_grows", f"{WITH} --model runs/sft-SEED/model"),
    "the gradient of one batch is large": (
        "gradient_spikes",
        f"{WITH} --model runs/sft-SEED/model --grader graders.py:spikes --no-use-std-normalization --n-grpo-steps 14",
    ),
    "the learning rate is too high": ("no_signal", f"{WITH} --model runs/sft-SEED/model --learning-rate 0.03"),
    "the grader drifts": ("graders_part", f"{WITH} --model runs/sft-SEED/model --grader graders.py:drifts"),
}


def healthy(folder: Path, *, seeds: list[int]) -> list[Path]:
    """Make the healthy runs, and return them."""
    paths = []
    for seed in seeds:
        for name in recipes.RECIPES:
            recipes.prepare(name, seed=seed, folder=folder)
            recipes.measure(name, seed=seed, folder=folder)
            paths.append(folder / "runs" / f"{name.replace(', ', '-')}-{seed}")
        paths.append(folder / "runs" / f"sft-{seed}")
        for name, command in HEALTHY.items():
            paths.append(recipes.run(name, command, seed=seed, folder=folder))
    return paths


def planted(folder: Path, fault: str, *, seed: int) -> Path:
    """Make the run with a fault, and return it."""
    name, (_, command) = fault.replace(" ", "-"), PLANTED[fault]
    (folder / "graders.py").write_text(GRADERS.replace("COUNTER", str(folder / f"{name}-{seed}.seen")))
    recipes.prepare("grpo", seed=seed, folder=folder)
    if "few" in command:
        few = (
            "sft --preset quickstart --dataset arithmetic:8000:SEED --model start-SEED --n-sft-steps 20 --eval-every 0"
        )
        recipes.run("few", few, seed=seed, folder=folder)
    path = folder / "runs" / f"{name}-{seed}"
    if fault.startswith("the sampler"):
        if not path.exists():
            words = command.replace("SEED", str(seed)).split()
            arguments = [*words, "--seed", str(seed), "--run", path.name]
            subprocess.run([sys.executable, "-c", STALE, *arguments], cwd=folder, check=True, capture_output=True)
        return path
    recipes.run(name, command, seed=seed, folder=folder)
    if fault == "the grader drifts":
        again = [sys.executable, "-m", "rlvr_cli", "grade", str(path), "--grader", "r1_zero"]
        subprocess.run(again, cwd=folder, check=True, capture_output=True)
    return path


def alarms_in(path: Path) -> list[Alarm]:
    """The alarms of a run."""
    info = read_run(path)
    with open_runs([info]) as database:
        return run_alarms(database, info)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--seeds", nargs="*", type=int, choices=(0, 1, 2), default=[0, 1, 2])
    parser.add_argument("--planted", action="store_true", help="leave out the healthy runs")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wrong = 0
    if not arguments.planted:
        runs = healthy(folder, seeds=arguments.seeds)
        found = {path.name: alarms_in(path) for path in runs}
        wrong = sum(map(bool, found.values()))
        print(f"{len(runs)} healthy runs, {wrong} with an alarm")
        for name, alarms in found.items():
            for alarm in alarms:
                print(f"  {name}: {alarm.name}: {alarm.sentence}")
    print("planted fault | seed | its alarm | found | others")
    for fault, (expected, _) in PLANTED.items():
        for seed in arguments.seeds:
            names = [alarm.name for alarm in alarms_in(planted(folder, fault, seed=seed))]
            others = ", ".join(name for name in names if name != expected) or "none"
            print(f"{fault} | {seed} | {expected} | {'yes' if expected in names else 'NO'} | {others}", flush=True)
            wrong += expected not in names
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
