"""How a command splits an update: by tokens where nothing is said, else by what was asked for."""

import json
import math

import pyarrow.parquet as pq
import pytest

from marks import slow
from rlvr_cli.commands import distill, dpo, ei, grpo, ppo, sft
from rlvr_cli.config.distill import DistillConfig
from rlvr_cli.config.dpo import DpoConfig
from rlvr_cli.config.ei import EiConfig
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.ppo import PpoConfig
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.training.planning.memory import TOKENS

GRADER = """
def grade(response, truth):
    reward = float(len(response) % 2)
    return {"format_reward": 0.0, "answer_reward": reward, "reward": reward}
"""
ROWS = 24  # of an update, each with a prompt of its own, of more than 100 tokens
OWN = {  # what makes one update of each command
    "sft": (sft.run, SftConfig, {"train_batch_size": ROWS}),
    "grpo": (
        grpo.run,
        GrpoConfig,
        {
            "rollout_batch_size": ROWS, "group_size": 1, "train_batch_size": ROWS, "n_grpo_steps": 1, "loss_type": "no_baseline",
            "kl_coef": 0.1,
        },
    ),
    "ppo": (ppo.run, PpoConfig, {"rollout_batch_size": ROWS, "train_batch_size": ROWS, "n_ppo_steps": 1}),
    "ei": (ei.run, EiConfig, {"ei_batch_size": ROWS, "group_size": 8, "train_batch_size": 8 * ROWS, "n_ei_steps": 1}),
    "dpo": (dpo.run, DpoConfig, {"train_batch_size": ROWS}),
    "distill": (
        distill.run, DistillConfig, {"rollout_batch_size": ROWS, "group_size": 1, "n_distill_steps": 1}
    ),
}  # fmt: skip
LONGER = [slow(command) for command in ("ppo", "ei", "dpo", "distill")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Questions, traces, pairs, and a grader."""
    folder = tmp_path_factory.mktemp("splits")
    (folder / "mine.py").write_text(GRADER)
    (folder / "prompt").write_text("{question}")
    rows = [
        {
            "question": (question := f"{number} " + "1 + 2 " * 20),
            "prompt": question,
            "answer": "7",
            "response": " 7",
            "ground_truth": "7",
            "chosen": " 7",
            "rejected": " 8",
        }
        for number in range(10, 10 + ROWS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def update_of(command, place, model, **given):
    """The metrics of the first update of a run."""
    run, config, own = OWN[command]
    options = {
        "model": str(model), "dataset": str(place / "rows.jsonl"), "prompt": str(place / "prompt"), "grader": f"{place / 'mine.py'}:grade",
        "grader_workers": 1, "runs_dir": str(place), "sampling_max_tokens": 4, "sampling_min_tokens": 1, "eval_every": 0,
        "checkpoint_every": 0, "run": f"{command}-{len(given)}-{'-'.join(map(str, given.values()))}", **own, **given,
    }  # fmt: skip
    if command == "distill":
        options["teacher"] = str(model)
    run(config(**options))
    rows = pq.read_table(place / options["run"] / "metrics.parquet").to_pylist()
    return {row["name"]: row["value"] for row in rows if (row["phase"], row["step"]) == ("train", 0)}


@pytest.mark.parametrize("command", ["grpo", slow("sft"), *LONGER])
def test_where_nothing_is_said_tokens_are_counted(command, place, tiny_model_dir, capsys):
    update = update_of(command, place, tiny_model_dir)
    assert f"micro-batches  up to {TOKENS:,} tokens" in capsys.readouterr().err
    number, computed = update["update/micro_batches"], update["update/computed"]
    assert computed > TOKENS
    assert number == math.ceil(computed / TOKENS), "as full as they can be"
    assert update["update/rows"] / number > 8, "rows are not counted"


@pytest.mark.parametrize("command", ["sft", slow("grpo"), *LONGER])
def test_a_split_that_is_asked_for_counts_rows(command, place, tiny_model_dir, capsys):
    asked = {"gradient_accumulation_steps": 6} if command == "grpo" else {"micro_batch_size": 4}
    update = update_of(command, place, tiny_model_dir, **asked)
    of_unit = 2 if command == "dpo" else 1
    assert f"micro-batches  {4 * of_unit} responses of up to" in capsys.readouterr().err
    assert update["update/micro_batches"] == math.ceil(update["update/rows"] / of_unit / 4)
    assert update_of(command, place, tiny_model_dir, micro_batch_tokens=1, **asked)["update/micro_batches"] == (
        update["update/rows"] / of_unit
    ), "tokens that are asked for count before rows"


@pytest.mark.slow
def test_two_trainers_share_an_update_that_one_would_do_at_once(place, tiny_model_dir):
    """Each has half of it, and the update is the same."""
    together = {"micro_batch_tokens": 65_536}
    alone = update_of("sft", place, tiny_model_dir, **together)
    both = update_of("sft", place, tiny_model_dir, trainers=2, **together)
    assert (alone["update/micro_batches"], both["update/micro_batches"]) == (1, 2)
    assert both["update/computed"] == pytest.approx(alone["update/computed"], rel=0.01)  # the prompts begin alike
    for name in ("loss/objective", "optimizer/grad_norm"):
        assert both[name] == pytest.approx(alone[name], rel=1e-5)
