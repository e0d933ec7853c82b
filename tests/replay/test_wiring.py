"""Every option that reaches training or sampling does what it says: runs whose options differ, each computed again.

A run is made by the command's own entry on a tiny random model. The replay reads its stored rollouts and options and knows the
definitions; where a command, the trainer or an update loses or misplaces an option, the two differ. The default cases have
each value of `GRPO`, `EI` and `SFT` in effect once; the slow array has each two values together.
"""

import hashlib
import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from arrays import pairwise
from rlvr_cli.commands import distill, ei, grpo, sft
from rlvr_cli.commands import eval as evaluate
from rlvr_cli.config.distill import DistillConfig
from rlvr_cli.config.ei import EiConfig
from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.models.compute import recompute
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.policy import Policy
from rlvr_cli.models.pretrained import load_tokenizer
from rlvr_cli.replay import formulas
from rlvr_cli.replay.run import GAP, TOLERANCE, replay_run
from rlvr_cli.replay.stored import batches, read_stored
from rlvr_cli.rollouts.grading import grader_pool
from rlvr_cli.runs.readers import read_rollouts
from rlvr_cli.runs.storage.parquet import to_rollouts
from rlvr_cli.samplers.open import engine_kind, settings_of
from rlvr_cli.training.session import load_inputs
from rlvr_cli.training.updates.scores import compute_log_probs
from rlvr_cli.training.updates.tensors import rollout_tensors
from rlvr_cli.types import Phase
from teachers import write_teacher

pytestmark = pytest.mark.usefixtures("forked", "read_once")

COMMANDS = {
    "grpo": (GrpoConfig, grpo.run),
    "ei": (EiConfig, ei.run),
    "sft": (SftConfig, sft.run),
    "distill": (DistillConfig, distill.run),
}

# Of what all commands do alike: by default the one whose runs take least.
ONCE = ["sft", *(pytest.param(command, marks=pytest.mark.slow) for command in COMMANDS if command != "sft")]

# Small enough for seconds; at this learning rate rounding is far below 1e-6, and what an option changes is far above.
SHARED = {
    "learning_rate": (1e-4, 3e-4),
    "warmup_steps": (0, 2),
    "adam_beta1": (0.9, 0.5),
    "adam_beta2": (0.95, 0.6),
    "weight_decay": (0.0, 0.3),
    "max_grad_norm": (1.0, 100.0),
    "seed": (0, 3),
    "eval_every": (0, 2),
    "eval_examples": (3, 2),
    "final_eval_examples": (None, 4),
    "sampling_max_tokens": (12, 9),
    "sampling_min_tokens": (4, 0),
    "sampling_top_p": (1.0, 0.8),
    "stop": (("e",), ("a", "1")),
}
SAMPLED = SHARED | {
    "sampling_temperature": (1.0, 0.7),
    "eval_temperature": (None, 0.0, 1.5),
    "eval_top_p": (None, 0.6),
    "eval_max_tokens": (None, 5),
    "eval_min_tokens": (None, 1),
    "group_size": (4, 2),
}
GRPO = SAMPLED | {
    "loss_type": ("reinforce_with_baseline", "no_baseline", "grpo_clip", "grpo_no_clip", "gspo", "cispo", "kimi"),
    "use_std_normalization": (True, False),
    "std_normalization": (None, "group", "batch", "none"),
    "advantage_eps": (1e-6, 0.5),
    "cliprange": (0.2, 0.0103),
    "cliprange_high": (None, 0.0203),
    "length_normalization": ("masked_mean", "masked_normalize", "token_mean"),
    "normalize_constant": (None, 7.0),
    "cispo_cap": (5.0, 1.0),
    "kimi_tau": (0.1, 2.0),
    "kl_coef": (0.0, 0.5),
    "kl_type": ("k3", "k2", "unbiased"),
    "importance_correction": ("auto", "none", "truncated", "masked"),
    "importance_floor": (0.0, 0.85),
    "importance_cap": (2.0, 0.9),
    "format_weight": (0.0, 0.3),
    "length_reward": (0.0, 0.4),
    "length_reward_after": (0, 1),
    "language_reward": (0.0, 0.7),
    "question_order": ("shuffled", "file", "prioritized"),
    "dynamic_sampling": (False, True),
    "max_sampling_rounds": (10, 2),
    "overlong": ("none", "mask", "soft_punish"),
    "overlong_buffer": (None, 3),
    "epochs_per_rollout_batch": (1, 2),
    "train_batch_size": (8, 4),
    "gradient_accumulation_steps": (1, 2),
    "lr_schedule": ("constant", "cosine"),
    "async_steps": (0, 1),
}
EI = SAMPLED | {
    "eval_temperature": (None, 0.0),
    "sft_epochs": (1, 2),
    "ei_batch_size": (4, 3),
    "train_batch_size": (3, 5),
    "micro_batch_size": (8, 2),
}
SFT = SHARED | {
    "sampling_temperature": (1.0, 0.0),
    "dataset": ("traces.jsonl", "sampled", "arithmetic:12"),
    "num_examples": ("all", "5"),
    "sft_epochs": (1, 2),
    "n_sft_steps": (0, 3),
    "train_batch_size": (4, 3),
    "micro_batch_size": (8, 2),
    "length_normalization": ("token_mean", "masked_mean", "masked_normalize"),
    "normalize_constant": (1.0, 7.0),
    "append_eos": (True, False),
    "loss_on_prompts": (False, True),
    "correct_only": (False, True),
    "lr_schedule": ("constant", "cosine"),
}

DISTILL = SAMPLED | {
    "eval_temperature": (None, 0.0),
    "divergence": ("reverse_kl", "sampled", "forward_kl"),
    "task_reward": (0.0, 0.5),
    "micro_batch_size": (8, 2),
    "lr_schedule": ("constant", "cosine"),
}

CASES = [
    ("grpo", "on-policy", {"n_grpo_steps": 3, "sampling_temperature": 0.7, "max_grad_norm": 100.0, "weight_decay": 0.3,
      "use_std_normalization": False, "gradient_accumulation_steps": 2, "eval_every": 2, "eval_temperature": 0.0,
      "eval_max_tokens": 5, "final_eval_examples": 4, "importance_correction": "none"}),
    ("grpo", "clip", {"loss_type": "grpo_clip", "cliprange": 0.0103, "cliprange_high": 0.0203, "epochs_per_rollout_batch": 2,
      "train_batch_size": 4, "length_normalization": "token_mean", "kl_coef": 0.5, "lr_schedule": "cosine", "warmup_steps": 2,
      "adam_beta1": 0.5, "adam_beta2": 0.6, "overlong": "soft_punish", "overlong_buffer": 3, "advantage_eps": 0.5, "seed": 3,
      "eval_top_p": 0.6, "eval_min_tokens": 1, "sampling_temperature": 0.7}),
    ("grpo", "weighted", {"loss_type": "grpo_clip", "cliprange": 0.0103, "train_batch_size": 4, "importance_cap": 0.9,
      "importance_correction": "truncated", "length_normalization": "masked_normalize", "overlong": "mask",
      "learning_rate": 3e-4, "sampling_max_tokens": 9, "stop": ("a", "1"), "eval_examples": 2}),
    ("grpo", "dynamic", {"loss_type": "grpo_no_clip", "dynamic_sampling": True, "max_sampling_rounds": 2, "train_batch_size": 4,
      "importance_correction": "truncated", "sampling_top_p": 0.8, "length_normalization": "masked_normalize",
      "normalize_constant": 7.0, "overlong": "soft_punish", "eval_temperature": 1.5, "group_size": 2}),
    ("grpo", "no baseline", {"loss_type": "no_baseline", "sampling_min_tokens": 0}),
    ("grpo", "gspo", {"loss_type": "gspo", "train_batch_size": 4, "std_normalization": "batch", "kl_coef": 0.5, "kl_type": "k2",
      "length_reward": 0.4, "length_reward_after": 1, "advantage_eps": 0.5, "learning_rate": 3e-4, "question_order": "file"}),
    ("grpo", "cispo", {"loss_type": "cispo", "train_batch_size": 4, "cispo_cap": 1.0, "std_normalization": "none", "kl_coef": 0.5,
      "kl_type": "unbiased", "length_normalization": "token_mean", "format_weight": 0.3, "learning_rate": 3e-4,
      "n_grpo_steps": 4, "question_order": "prioritized", "seed": 3}),
    ("grpo", "kimi", {"loss_type": "kimi", "n_grpo_steps": 1, "rollout_batch_size": 16, "train_batch_size": 8, "kimi_tau": 2.0, "kl_coef": 0.5,
      "use_std_normalization": False,
      "std_normalization": "group", "language_reward": 0.7, "length_reward": 0.4, "learning_rate": 3e-4}),
    ("grpo", "masked", {"importance_correction": "masked", "importance_floor": 0.85, "importance_cap": 1.2,
      "sampling_top_p": 0.8, "dynamic_sampling": True, "std_normalization": "batch", "overlong": "soft_punish",
      "n_grpo_steps": 4, "question_order": "prioritized", "seed": 3}),
    ("grpo", "floored", {"importance_correction": "truncated", "importance_floor": 0.85, "sampling_top_p": 0.8}),
    ("grpo", "ahead", {"n_grpo_steps": 3, "async_steps": 1, "dynamic_sampling": True, "train_batch_size": 4, "group_size": 2,
      "eval_every": 1, "learning_rate": 3e-4}),
    ("grpo", "adapter", {"lora_rank": 2, "lora_alpha": 8, "kl_coef": 0.5, "learning_rate": 3e-4, "seed": 3}),
    ("distill", "reverse", {"sampling_temperature": 0.7, "task_reward": 0.5, "max_grad_norm": 100.0, "weight_decay": 0.3,
      "n_distill_steps": 3, "eval_every": 2, "eval_temperature": 0.0, "eval_max_tokens": 5, "final_eval_examples": 4,
      "learning_rate": 3e-4, "micro_batch_size": 2}),
    ("distill", "sampled", {"divergence": "sampled", "lr_schedule": "cosine", "warmup_steps": 2, "adam_beta1": 0.5,
      "adam_beta2": 0.6, "seed": 3, "eval_top_p": 0.6, "eval_min_tokens": 1, "group_size": 2, "task_reward": 0.5,
      "sampling_temperature": 0.7, "n_distill_steps": 4, "rollout_batch_size": 6}),
    ("distill", "forward", {"divergence": "forward_kl", "sampling_max_tokens": 9, "sampling_min_tokens": 0,
      "sampling_top_p": 0.8, "stop": ("a", "1"), "eval_examples": 2, "learning_rate": 3e-4}),
    ("distill", "adapter", {"lora_rank": 2, "lora_alpha": 8, "learning_rate": 3e-4, "n_distill_steps": 3}),
    ("ei", "once", {"sampling_temperature": 0.7, "train_batch_size": 5, "weight_decay": 0.3, "max_grad_norm": 100.0,
      "eval_every": 2, "eval_temperature": 0.0, "eval_max_tokens": 5, "final_eval_examples": 4, "stop": ("a", "1"),
      "sampling_max_tokens": 9, "sampling_min_tokens": 0, "n_ei_steps": 3, "ei_batch_size": 3, "group_size": 2}),
    ("ei", "twice", {"sft_epochs": 2, "micro_batch_size": 2, "warmup_steps": 2, "adam_beta1": 0.5, "seed": 3,
      "adam_beta2": 0.6, "learning_rate": 3e-4, "eval_top_p": 0.6, "eval_min_tokens": 1,
      "sampling_top_p": 0.8, "eval_examples": 2}),
    ("sft", "text", {"sft_epochs": 2, "weight_decay": 0.3, "max_grad_norm": 100.0, "lr_schedule": "cosine", "warmup_steps": 2,
      "eval_every": 2, "final_eval_examples": 4, "sampling_temperature": 0.0, "seed": 3, "learning_rate": 3e-4}),
    ("sft", "means", {"length_normalization": "masked_mean", "num_examples": "5", "append_eos": False, "train_batch_size": 3,
      "adam_beta1": 0.5, "adam_beta2": 0.6, "n_sft_steps": 3, "eval_examples": 2, "sampling_top_p": 0.8,
      "sampling_max_tokens": 9, "sampling_min_tokens": 0, "stop": ("a", "1")}),
    ("sft", "sums", {"length_normalization": "masked_normalize", "normalize_constant": 7.0, "dataset": "sampled",
      "train_batch_size": 4, "sft_epochs": 2, "micro_batch_size": 2, "loss_on_prompts": True}),
    ("sft", "packed", {"packing": True, "packing_length": 64, "length_normalization": "masked_mean", "sft_epochs": 2,
      "train_batch_size": 2, "micro_batch_size": 1, "seed": 3, "learning_rate": 3e-4, "lora_rank": 2}),
    ("sft", "across", {"packing": True, "packing_length": 30, "packing_attend_across": True, "sft_epochs": 2, "train_batch_size": 2,
      "dataset": "sampled", "micro_batch_size": 1, "seed": 3}),
    ("sft", "prompts", {"packing": True, "packing_length": 30, "packing_attend_across": True, "train_batch_size": 2, "micro_batch_size": 1,
      "loss_on_prompts": True}),
    ("sft", "correct", {"length_normalization": "masked_normalize", "dataset": "arithmetic:12", "correct_only": True}),
]  # fmt: skip
TABLES = {"grpo": GRPO, "ei": EI, "sft": SFT, "distill": DISTILL}

GRADER = """
def grade(response, truth):
    if len(response) % 11 == 10:
        raise ValueError("cannot be graded")
    reward = len(response) % 3 / 2
    return {"format_reward": len(response) % 5 / 4, "answer_reward": reward, "reward": reward}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Questions, traces, and a grader."""
    folder = tmp_path_factory.mktemp("wiring")
    lines = {"train": range(9), "eval": range(20, 25)}
    for name, numbers in lines.items():
        rows = [{"question": f"{i} and {i}?", "answer": "7"} for i in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    traces = [{"prompt": f"{i}{i}?", "response": " so it is 1" + "2" * (i % 4), "ground_truth": "7"} for i in range(10)]
    (folder / "traces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in traces))
    (folder / "mine.py").write_text(GRADER)
    (folder / "prompt").write_text("Q: {question} A:")
    return folder


def make(command: str, given: dict, place: Path, model: Path) -> Path:
    """Make a run with these options; its directory."""
    config, run = COMMANDS[command]
    common = {
        "model": str(model),
        "prompt": str(place / "prompt"),
        "grader": f"{place / 'mine.py'}:grade",
        "grader_workers": 1,
        "runs_dir": str(place),
        "eval_dataset": str(place / "eval.jsonl"),
        "max_grade_errors": 1.0,  # the grader fails on some responses
    }
    first = {name: values[0] for name, values in TABLES[command].items()}
    steps = {
        "grpo": {"n_grpo_steps": 2, "rollout_batch_size": 8},
        "ei": {"n_ei_steps": 2},
        "sft": {},
        "distill": {"n_distill_steps": 2, "rollout_batch_size": 8, "teacher": str(place / "teacher")},
    }[command]
    if command == "distill" and not (place / "teacher").exists():
        write_teacher(place / "teacher", of=model)
    options = {"dataset": "train.jsonl"} | common | first | steps | given
    if options["dataset"] == "sampled" and not (place / "sampled").exists():  # a run to fine-tune on
        make(
            "grpo",
            {"n_grpo_steps": 1, "sampling_min_tokens": 0, "stop": ("e", "a", "1"), "run": "sampled"},
            place,
            model,
        )
    if options["dataset"].endswith(".jsonl"):
        options["dataset"] = str(place / options["dataset"])
    if command == "sft" and (options["dataset"].startswith("arithmetic") or options["correct_only"]):
        options |= {
            "prompt": "question_only",
            "grader": "math_verify",
            "eval_dataset": "",
        }  # a replay runs no user's code
    run(config(**options))
    return place / options["run"]


def check(run: Path, *, rounding: int = 1) -> None:
    """The replay agrees to 1e-6 times `rounding`, and evaluations and lengths are those of the options."""
    stored = read_stored(run)
    assert stored.facts["prompt"]["name"] == stored.options["prompt"]
    found = replay_run(stored, most=None)
    assert found.problems == []
    assert len(found.updates) == found.logged > 1
    for update in found.updates:  # without the allowance for rounding
        if update.objective is not None:  # None: no token to train on
            assert update.objective == pytest.approx(
                update.logged_objective, rel=rounding * TOLERANCE, abs=rounding * TOLERANCE
            ), update
        assert update.difference <= 5 * rounding * TOLERANCE, update  # the norm's: it moves more than the objective
    assert found.weights["the final model"] <= 5 * rounding * TOLERANCE
    assert max(found.gaps) <= GAP
    assert found.rows == sum(1 for _ in rows_of(run, "train")) + sum(1 for _ in rows_of(run, "eval"))
    check_length(stored)
    check_evaluations(stored)
    check_draws(stored)


def rows_of(run: Path, phase: Phase) -> list[dict]:
    return read_rollouts(
        run, phase=phase, columns=["step", "example_id", "sample_index", "stop_reason", "seed", "reward"]
    ).to_pylist()


def check_length(stored) -> None:
    """The run has the batches and updates that its options ask for."""
    own, rows = stored.options, rows_of(stored.path, "train")
    steps = {r["step"] for r in rows}
    if stored.command == "sft":
        epoch = math.ceil(stored.facts["dataset"]["rows"] / own["train_batch_size"])
        if own["packing"]:
            epoch = len(next(batches(stored, load_tokenizer(own["model"]))).updates)
        assert len(stored.logged) == (own["n_sft_steps"] or own["sft_epochs"] * epoch)
        if own["num_examples"] != "all":
            assert stored.facts["dataset"]["rows"] == int(own["num_examples"])
        for update in stored.logged:
            if own["packing"]:
                most = own["micro_batch_size"] * own["packing_length"]
                assert update["update/micro_batches"] >= update["update/computed"] / most
                continue
            assert update["update/micro_batches"] == math.ceil(update["update/rows"] / own["micro_batch_size"])
        return
    size = (
        own["train_batch_size"] // own["gradient_accumulation_steps"]
        if stored.command == "grpo"
        else own["micro_batch_size"]
    )
    for update in stored.logged:
        if "update/rows" not in update:  # it had nothing to learn from
            assert update["update/skipped"]
            continue
        fewest = math.ceil(update["update/tokens"] / own["sampling_max_tokens"])  # rows without a token are left out
        most = math.ceil(update["update/rows"] / size) + 1  # rows without an advantage have micro-batches of their own
        assert math.ceil(fewest / size) <= update["update/micro_batches"] <= most
    assert len(steps) == own[f"n_{stored.command}_steps"]
    questions = own["ei_batch_size"] if stored.command == "ei" else own["rollout_batch_size"] // own["group_size"]
    for step in steps:
        groups = Counter(r["example_id"] for r in rows if r["step"] == step)
        assert set(groups.values()) == {own["group_size"]}
        most = own["max_sampling_rounds"] if own.get("dynamic_sampling") else 1
        assert questions <= len(groups) <= questions * most
    reasons = {r["stop_reason"] for r in rows} - {None, "eos"}
    assert reasons <= set(own["stop"])


def check_evaluations(stored) -> None:
    """Each evaluation asks the same questions, as many as the options say, after the updates that the options say."""
    own, updates = stored.options, len(stored.logged)
    last, due = own["final_eval_examples"] or own["eval_examples"], {0}
    if stored.command == "ei":
        rounds = sorted({r["step"] for r in rows_of(stored.path, "train")})
        due = {step for number, step in enumerate(rounds) if own["eval_every"] and number % own["eval_every"] == 0}
    elif own["eval_every"]:
        due = set(range(0, updates, own["eval_every"]))
    asked = Counter(r["step"] for r in rows_of(stored.path, "eval"))
    assert asked == dict.fromkeys(due, own["eval_examples"]) | {
        updates: max(last, own["eval_examples"] * (updates in due))
    }


def check_draws(stored) -> None:
    """Each sample has the seed of its key, and each batch the next questions in the order of their epoch."""
    seed, asked = stored.options["seed"], 0
    for phase in ("train", "eval"):
        for r in rows_of(stored.path, phase):
            identity = "\0".join(map(str, (seed, phase, r["step"], r["sample_index"], r["example_id"])))
            digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
            assert r["seed"] == int.from_bytes(digest, "big") // 2
    order, dynamic = stored.options.get("question_order"), stored.options.get("dynamic_sampling")
    if stored.command == "sft" or (dynamic and order != "prioritized"):
        return
    ids = [e.id for e in load_dataset(stored.options["dataset"], purpose="train").examples]
    endless = [ids[i] for epoch in range(9) for i in formulas.order(len(ids), seed=seed, epoch=epoch)]
    if order == "file":
        endless = ids * 9
    rows = rows_of(stored.path, "train")
    for number, step in enumerate(sorted({r["step"] for r in rows})):
        batch = list(dict.fromkeys(r["example_id"] for r in rows if r["step"] == step))
        if order == "prioritized":
            earlier = [r for r in rows if r["step"] < step]
            first = stored.options["rollout_batch_size"] // stored.options["group_size"] if dynamic else len(batch)
            assert batch[:first] == prioritized(ids, earlier, seed=seed, number=number)[:first]
            continue
        drawn: list[str] = []
        while len(drawn) < len(batch):
            drawn += [endless[asked]] if endless[asked] not in drawn else []
            asked += 1
        assert batch == drawn


def prioritized(ids: list[str], earlier: list[dict], *, seed: int, number: int) -> list[str]:
    """All questions in the order of a draw: by -log(u) / (1 - success rate)."""
    keys = []
    for index, name in enumerate(ids):
        right = [(r["reward"] or 0.0) > 0.5 for r in earlier if r["example_id"] == name]
        weight = max(1 - sum(right) / len(right), 0.05) if right else 1.0
        digest = hashlib.blake2b(f"{seed}/draw {number}/{index}".encode(), digest_size=8).digest()
        keys.append(-math.log((int.from_bytes(digest, "big") + 0.5) / 2**64) / weight)
    return [name for _, name in sorted(zip(keys, ids, strict=True))]


# Each value is in another run too, or is what another command does as well.
SLOW = {("distill", "adapter"), ("grpo", "floored"), ("sft", "prompts")}


@pytest.mark.parametrize(
    ("command", "name", "given"),
    [
        pytest.param(*case, id="-".join(case[:2]), marks=[pytest.mark.slow] if case[:2] in SLOW else [])
        for case in CASES
    ],
)
def test_a_run_is_what_its_options_and_rollouts_give(command, name, given, place, tiny_model_dir):
    check(make(command, given | {"run": f"{command}-{name.replace(' ', '-')}"}, place, tiny_model_dir))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="weighted", marks=pytest.mark.slow),
        pytest.param(
            {"importance_correction": "none", "loss_type": "grpo_clip", "cliprange": 0.0103, "train_batch_size": 4, "kl_coef": 0.5},
            id="clip", marks=pytest.mark.slow,
        ),
        pytest.param(
            {"importance_cap": 0.9, "question_order": "file", "overlong": "mask", "epochs_per_rollout_batch": 2, "train_batch_size": 4,
             "warmup_steps": 2, "lr_schedule": "cosine"},
            id="capped",
        ),
        pytest.param(
            {"std_normalization": "batch", "length_reward": 0.4, "sampling_top_p": 0.8, "importance_correction": "masked"},
            id="masked", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_partial_rollouts_are_what_their_options_and_rollouts_give(given, place, tiny_model_dir):
    run = f"partial-{'-'.join(given) or 'plain'}"
    more = {
        "partial_rollout_tokens": 4,
        "n_grpo_steps": 6,
        "group_size": 2,
        "learning_rate": 1e-3,
        "sampling_max_tokens": 12,
        "stop": ("an",),
    }
    stored = read_stored(make("grpo", more | given | {"run": run}, place, tiny_model_dir))
    found = replay_run(stored, most=None)
    assert found.problems == []
    assert sum(update.objective is not None for update in found.updates) > 1
    assert max(found.gaps) <= GAP
    rows = to_rollouts(read_rollouts(stored.path, phase="train"))
    assert found.rows == len(rows) + len(rows_of(stored.path, "eval"))
    assert max(len(set(row.token_versions or ())) for row in rows) == 3
    assert {row.stop_reason for row in rows} >= {"an", None}
    most = [
        update["mismatch/importance_weight_mean"]
        for update in stored.logged
        if "mismatch/importance_weight_mean" in update
    ]
    assert bool(most) == (given.get("importance_correction") != "none")


@pytest.mark.parametrize("command", ["grpo", "distill"])
def test_the_mismatch_leaves_out_the_tokens_before_the_minimum(command, place, tiny_model_dir):
    run = f"early-{command}"
    given = {"sampling_min_tokens": 4, f"n_{command}_steps": 1, "eval_examples": 1, "run": run}
    stored = read_stored(make(command, given, place, tiny_model_dir))
    assert stored.logged
    for update in stored.logged:
        gaps = {start: update[f"mismatch/position/{start}"] for start in (0, 1, 4)}
        assert min(gaps[0], gaps[1]) > 100 * gaps[4]  # the end is forbidden at positions 0 to 3
        assert update["mismatch/logprob_max_abs"] < GAP


def test_the_cases_have_every_value_of_every_option():
    for command, table in TABLES.items():
        first = {name: values[0] for name, values in table.items()}
        seen = [first | given for other, _, given in CASES if other == command]
        lacking = {(n, v) for n, values in table.items() for v in values if all(case[n] != v for case in seen)}
        assert not lacking, command


def test_an_evaluation_is_what_its_options_give(place, tiny_model_dir):
    given = {"limit": 3, "num_samples": 2, "seed": 3, "sampling_temperature": 0.7, "sampling_top_p": 0.8}
    given |= {
        "sampling_max_tokens": 9,
        "sampling_min_tokens": 0,
        "stop": ("e", "a"),
        "run": "evaluated",
        "grader_workers": 1,
    }
    common = {"model": str(tiny_model_dir), "prompt": str(place / "prompt"), "dataset": str(place / "eval.jsonl")}
    evaluate.run(EvalConfig(**common, **given, grader=f"{place / 'mine.py'}:grade", runs_dir=str(place)))
    stored = read_stored(place / "evaluated")
    found = replay_run(stored, most=None)
    assert (found.problems, found.updates, found.rows) == ([], [], 6)
    prompts = {r["prompt"] for r in read_rollouts(stored.path, columns=["prompt"]).to_pylist()}
    assert prompts == {f"Q: {i} and {i}? A:" for i in (20, 21, 22)}
    assert set(Counter(r["example_id"] for r in rows_of(stored.path, "eval")).values()) == {2}
    check_draws(replace(stored, command="sft"))


@pytest.mark.parametrize("command", ONCE)
def test_weights_in_bfloat16_train_in_bfloat16_with_kahan_summation(command, place, tiny_model_dir):
    given = {"param_dtype": "bfloat16", "optimizer": "adamw_kahan", "run": f"{command}-kahan"}
    run = make(command, given, place, tiny_model_dir)
    (last,) = list((run / "checkpoints").iterdir())[-1:]
    state = load_file(last / "optimizer.safetensors")
    assert {name.rpartition("/")[2] for name in state} == {"step", "exp_avg", "exp_avg_sq", "compensation"}
    assert any(tensor.any() for name, tensor in state.items() if name.endswith("/compensation"))
    assert load_policy(run / "model", dtype="bfloat16").model.config.dtype == torch.bfloat16
    assert json.loads((run / "model/config.json").read_text())["dtype"] == "bfloat16"
    found = replay_run(read_stored(run), most=None)
    assert found.problems == []
    assert TOLERANCE < found.difference < 0.1, "as far as rounding moves it"


@pytest.mark.parametrize("command", ONCE)
def test_the_state_on_the_host_is_that_of_the_optimizer_that_is_used(command, place, tiny_model_dir):
    given = {"param_dtype": "bfloat16", "offload_optimizer": True, "run": f"{command}-offload"}
    run = make(command, given, place, tiny_model_dir)
    (last,) = list((run / "checkpoints").iterdir())[-1:]
    weights, state = load_file(last / "model/model.safetensors"), load_file(last / "optimizer.safetensors")
    assert {name.rpartition("/")[2] for name in state} == {"step", "exp_avg", "exp_avg_sq", "weight"}
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    for name, weight in weights.items():
        assert weight.equal(state[f"{name}/weight"].bfloat16())
    assert replay_run(read_stored(run), most=None).problems == []


@pytest.mark.parametrize(
    "command", ["grpo", *(pytest.param(c, marks=pytest.mark.slow) for c in COMMANDS if c != "grpo")]
)
@pytest.mark.parametrize("param_dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_moments_of_8_bits_are_those_of_the_optimizer_that_is_used(param_dtype, command, place, tiny_model_dir):
    given = {"optimizer": "adamw_8bit", "param_dtype": param_dtype, "run": f"{command}-8bit-{param_dtype}"}
    run = make(command, given, place, tiny_model_dir)
    (last,) = list((run / "checkpoints").iterdir())[-1:]
    state = load_file(last / "optimizer.safetensors")
    assert {tensor.dtype for name, tensor in state.items() if name.endswith("/exp_avg")} == {torch.uint8, torch.float32}
    stored = read_stored(run)
    assert replay_run(stored, most=None).problems == []
    if param_dtype == "float32":
        exact = replace(stored, options=stored.options | {"optimizer": "adamw"})
        assert replay_run(exact, most=None).problems != []


@pytest.mark.parametrize("command", ONCE)
def test_what_saves_memory_is_used_and_changes_no_update(command, place, tiny_model_dir, monkeypatch):
    """Micro-batches of a token have one row; layers are computed again in the backward pass."""
    layers = []

    def counted(*args, **kwargs):
        layers.append(1)
        return checkpoint(*args, **kwargs)

    monkeypatch.setattr(recompute, "checkpoint", counted)
    off_policy = {"epochs_per_rollout_batch": 2, "loss_type": "grpo_clip"} if command == "grpo" else {}
    given = {"run": f"{command}-small", "micro_batch_tokens": 1, "gradient_checkpointing": True, **off_policy}
    stored = read_stored(make(command, given, place, tiny_model_dir))
    found = replay_run(stored, most=None)
    assert found.problems == []
    assert found.weights["the final model"] <= 5 * TOLERANCE
    assert layers
    for update in stored.logged:
        if "update/rows" in update:
            assert update["update/micro_batches"] == update["update/rows"]
    if command == "grpo":
        assert {u["policy/ratio_max"] for u in stored.logged[::2] if "policy/ratio_max" in u} <= {1.0}


@pytest.mark.parametrize("async_steps", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_run_in_bfloat16_computes_in_bfloat16(async_steps, place, tiny_model_dir):
    """Sampler, update and reference: each is compared with the one before."""
    given = {
        "compute_dtype": "bfloat16",
        "kl_coef": 0.5,
        "sampling_min_tokens": 0,
        "async_steps": async_steps,
        "eval_examples": 1,
    }
    run = make("grpo", given | {"run": f"computes-in-half-{async_steps}"}, place, tiny_model_dir)
    assert json.loads((run / "run.json").read_text())["policy"]["compute_dtype"] == "bfloat16"
    assert load_policy(run / "model").model.config.dtype == torch.float32
    rollouts = to_rollouts(read_rollouts(run, phase="train", step=0))
    batch, gaps = rollout_tensors(rollouts, pad_id=1), {}
    for name in ("float32", "bfloat16"):
        scored = compute_log_probs(load_policy(tiny_model_dir, compute_dtype=name), batch, micro_batch_size=16)
        gaps[name] = float((scored - batch["sampled_log_probs"])[batch["response_mask"]].abs().mean())
    assert gaps["bfloat16"] < 1e-3 < 1e-2 < gaps["float32"], "the sampler"
    stored = read_stored(run)
    first = stored.logged[0]
    assert first["mismatch/logprob_mean_abs"] < 1e-3, "the update"
    assert first["policy/kl"] == 0, "the reference"
    assert replay_run(stored, most=None).problems == []
    assert replay_run(replace(stored, compute_dtype="float32"), most=1).problems != []


def test_checkpoints_are_as_frequent_as_asked_for(place, tiny_model_dir):
    run = make("sft", {"checkpoint_every": 4, "sft_epochs": 2, "run": "saved"}, place, tiny_model_dir)
    assert len(read_stored(run).logged) == 6
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["step-000004", "step-000006"]
    found = replay_run(read_stored(run), most=4)
    assert (found.problems, list(found.weights)) == ([], ["checkpoint 4"])
    rarely = {"checkpoint_every": 2, "checkpoint_minutes": 1000.0, "sft_epochs": 2, "run": "saved-late"}
    run = make("sft", rarely, place, tiny_model_dir)
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["step-000006"], "the last one does not wait"


def test_questions_are_read_as_the_options_say(tmp_path):
    row = {"question": "not this", "answer": "0", "q": "this?", "a": "7"}
    (tmp_path / "data").mkdir()
    for name, question in (("data/train", "nor this"), ("data/odd", "this?"), ("eval", "and this?")):
        lines = [json.dumps(row | {"q": question}), "{not JSON"] * 2
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "prompt").write_text("Q: {question}")
    fields: dict[str, Any] = {"question_field": "q", "answer_field": "a", "skip_bad_lines": True, "grader": "gsm8k"}
    files: dict[str, Any] = {
        "dataset": str(tmp_path / "data"),
        "split": "odd",
        "eval_dataset": str(tmp_path / "eval.jsonl"),
    }
    config = GrpoConfig(**fields, **files, prompt=str(tmp_path / "prompt"))
    inputs = load_inputs(config, questions_per_batch=2)
    assert [(e.question, e.ground_truth) for e in inputs.questions] == [("this?", "7")] * 2
    assert inputs.eval_dataset is not None
    assert [(e.question, e.ground_truth) for e in inputs.eval_dataset.examples] == [("and this?", "7")] * 2
    assert (inputs.template.text, inputs.pool.spec) == ("Q: {question}", "gsm8k")


def test_a_grader_has_its_options():
    config = EvalConfig(grader="r1_zero", format_rule="lenient", grader_timeout=60.0, grader_workers=3)
    with grader_pool(config, "gsm8k") as pool:
        assert (pool.spec, pool.timeout) == ("r1_zero", 60.0)
        grades = pool.grade([("so</think>\n<answer> 7 </answer>", "7")] * 1000)  # enough to keep more than three busy
        assert ({grade.reward for grade in grades}, len(pool._workers)) == ({1.0}, 3)


def test_as_many_rows_at_once_as_asked_for(tiny_model, tiny_tokenizer):
    share = engine_kind("transformers").share
    assert share is not None
    sampler: Any = share(Policy(tiny_model, tiny_tokenizer), settings_of(GrpoConfig(max_batch_size=3)))
    assert sampler._max_rows == 3


@pytest.fixture
def one_layer(tiny_model_dir, tmp_path) -> Path:
    """The tiny model without its second layer."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers, model.config.layer_types = 1, model.config.layer_types[:1]
    shutil.copytree(tiny_model_dir, tmp_path / "one-layer")
    model.save_pretrained(tmp_path / "one-layer")
    return tmp_path / "one-layer"


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=pytest.mark.slow if c == "grpo" else pytest.mark.full) for c in TABLES]
)
def test_every_two_values_together(command, place, one_layer):
    """The covering array: several hundred pairs of values in a few dozen runs."""
    for number, row in enumerate(pairwise(TABLES[command])):
        if row.get("correct_only"):
            row["dataset"] = "arithmetic:12"
        if row.get("loss_type") == "gspo":
            row["length_normalization"] = "masked_mean"  # and no other
        if row.get("loss_type") == "kimi":
            row["importance_correction"] = "none"  # its loss is one number for a response
        run = make(command, row | {"run": f"pairs-{command}-{number}"}, place, one_layer)
        check(run, rounding=20)  # some pairs are sensitive: Kimi's weights are sums of small differences
